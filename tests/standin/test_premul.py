"""The kernel that multiplies in each element type, compiled as C: every product beside NumPy's, rounded once."""

from __future__ import annotations

from helpers.standin import Standin

PROGRAM = """
import itertools, json
import ml_dtypes, numpy as np
from butter_mpi import DType
from helpers.standin_rank import Gpu, check, driver
g, found = Gpu(), {}
kernel = check(driver.cuModuleGetFunction(g._module, b"premul"))
stream = g.stream()

def run(values, factor, dtype):
    import ctypes
    bits = int.from_bytes(np.asarray(factor, values.dtype).tobytes(), "little")
    pointer = g.put(values)
    types = ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_ulonglong, ctypes.c_uint
    given = (pointer, values.size, bits, dtype.nccl), types
    check(driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, given, 0))
    check(driver.cuStreamSynchronize(stream))
    out = g.get(pointer, values)
    check(driver.cuMemFree(pointer))
    return out

def wanted(values, factor):
    with np.errstate(all="ignore"):
        if values.dtype.itemsize >= 4 or values.dtype.kind in "iu":
            return values * np.asarray(factor, values.dtype)
        wide = values.astype(np.float32) * np.float32(factor)
        if values.dtype.itemsize == 1:
            largest = np.float32(ml_dtypes.finfo(values.dtype).max)
            wide = np.where(np.isnan(wide), wide, np.clip(wide, -largest, largest))
        return wide.astype(values.dtype)

for dtype in DType:
    if dtype.label == "bool" or dtype.label.startswith("complex"):
        continue
    kind = np.dtype(getattr(ml_dtypes, dtype.label, dtype.label))
    size = min(kind.itemsize, 2)
    # Every number of 8 and of 16 bits; of longer ones, random bytes, whose exponents are all there are.
    values = np.arange(256**size, dtype=f"u{size}").view(kind) if kind.itemsize < 3 else np.frombuffer(
        np.random.default_rng(1).bytes(kind.itemsize * 10000), kind)
    numbers = values if kind.itemsize == 1 else values[:: len(values) // 50]
    wrong = []
    for factor in numbers:
        out, want = run(values, factor, dtype), wanted(values, factor)
        nan = want != want
        good = (out[~nan].view(np.uint8) == want[~nan].view(np.uint8)).all() and (out[nan] != out[nan]).all()
        if not good:
            wrong.append(str(factor))
    found[dtype.label] = [len(numbers), wrong[:5]]
print(json.dumps(found))
"""


def test_every_product(standin: Standin) -> None:
    """All numbers of up to 16 bits, subnormal and infinite ones too, times factors of each kind."""
    found = standin.run(PROGRAM, timeout=120)
    assert len(found) == 14 and {name: wrong for name, (_, wrong) in found.items() if wrong} == {}
    assert all(count >= 50 for count, _ in found.values()), found
