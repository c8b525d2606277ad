"""ThreadSanitizer on the nccl plane: its waits between streams order all use of memory, and each one is needed."""

from __future__ import annotations

import re

import pytest
from helpers.job import JobResult
from helpers.mpirun import run_job
from helpers.standin import build

# The two files through which all device memory is read and written; NCCL's stand-in starts threads that are none of it.
REPORT = re.compile(r"SUMMARY: ThreadSanitizer: data race \S*/(cuda/kernels|nccl/arithmetic)\.c")

PROGRAM = """
import numpy as np
import butter_mpi
from butter_mpi import DType
from helpers.standin_rank import Gpu, check, driver, until
from mpi4py import MPI
RANK, SIZE, N = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, 5000
TOTAL, F32 = SIZE * (SIZE + 1) / 2, DType.FLOAT32
fault = butter_mpi.FaultPolicy(start_deadline=60, collective_deadline=60)
comm = butter_mpi.init(plane="nccl", fault=fault)
plane = comm.backend
gpu = Gpu(plane.device.ordinal)
compute, other = gpu.stream(), gpu.stream()
x, y, seen = gpu.blank(4 * N), gpu.put(np.zeros(N, np.float32)), np.zeros(1, np.float32)

def lucky(stream, pointer, value):
    '''Wait until a stream has written a value, in a way that orders nothing.'''
    check(driver.cuMemcpyDtoHAsync(seen.ctypes.data, pointer, 4, stream))
    assert until(lambda: seen[0] == value)

def consume(stream, value):
    gpu.launch("axpy_f32", stream, 2.0, x, y, N)
    check(driver.cuStreamSynchronize(stream))
    assert (gpu.get(y, np.zeros(N, np.float32)) == value).all()

def first():
    gpu.launch("fill_f32", compute, x, RANK + 1, N)
    if MISSING: lucky(compute, x, RANK + 1)
    plane.all_reduce_async(x, 4 * N, int(compute), dtype=F32)
    if MISSING: lucky(plane._aside, x, TOTAL)
    consume(compute, 2 * TOTAL)

def second():
    gpu.order(compute, plane.stream)
    gpu.launch("fill_f32", plane.stream, x, RANK + 1, N)
    plane.all_reduce(x, 4 * N, dtype=F32)
    consume(plane.stream, 4 * TOTAL)

class Named:
    dtype = np.dtype(np.float32)
    __cuda_array_interface__ = dict(shape=(N,), typestr=dtype.str, data=(x, False), version=3, stream=int(compute))

def named():
    '''The array names the compute stream, and the operation is on another one.'''
    check(driver.cuMemsetD8Async(y, 0, 4 * N, compute))
    gpu.launch("fill_f32", compute, x, RANK + 1, N)
    if MISSING: lucky(compute, x, RANK + 1)
    comm.all_reduce(Named(), stream=int(other))
    if MISSING: lucky(other, x, TOTAL)
    consume(compute, 2 * TOTAL)

def grouped():
    a, b = gpu.blank(4 * N), gpu.blank(4 * N)
    with comm.group():
        for stream, p in ((compute, a), (other, b)):
            gpu.launch("fill_f32", stream, p, RANK + 1, N)
            plane.all_reduce_async(p, 4 * N, int(stream), dtype=F32)
            plane.barrier()
    for stream, p in ((compute, a), (other, b)):
        gpu.launch("axpy_f32", stream, 2.0, p, p, N)
        check(driver.cuStreamSynchronize(stream))
        assert (gpu.get(p, np.zeros(N, np.float32)) == 3 * TOTAL).all()

def added():
    '''The send, receive and add path has one receive buffer, which several streams use one after another.'''
    kernel = int(check(driver.cuModuleGetFunction(gpu._module, b"bf16_add_inplace")))
    plane.set_add_kernel(kernel)
    one = np.full(N, 0x3F80, np.uint16)
    ones = [gpu.put(one) for _ in range(3)]
    for turn in range(3):
        plane.all_reduce_async(ones[0], 2 * N, int(compute))
        plane.all_reduce(ones[1], 2 * N)
        plane.all_reduce_async(ones[2], 2 * N, int(other))
    for stream in (int(compute), plane.stream, int(other)):
        check(driver.cuStreamSynchronize(stream))
    if not MISSING:  # else it is right by luck only
        for p in ones:
            assert (gpu.get(p, one) == 0x4100).all()
    plane.set_add_kernel(0)
"""


def run(body: str, missing: bool = False, n: int = 2) -> JobResult:
    """Run a program on every rank under ThreadSanitizer."""
    standin = build("tsan")
    environment = standin.env(NCCL_IB_TIMEOUT="10", NCCL_IB_RETRY_CNT="1")
    environment["TSAN_OPTIONS"] += " exitcode=0"
    program = f"MISSING = {missing}\n{PROGRAM}\n{body}\nprint('right', flush=True)\nMPI.COMM_WORLD.Barrier()\n"
    # The launcher should not load the sanitizer. MPICH's hooks on memory would run in threads that it has let go of.
    ranks = {rank: {**environment, "UCX_MEM_MMAP_HOOK_MODE": "none"} for rank in range(n)}
    return run_job(n, program, rank_env=ranks, timeout=150)


@pytest.mark.parametrize(("what", "n"), [("first(); second(); named(); grouped()", 3), ("added()", 2)])
def test_ordered(what: str, n: int) -> None:
    """Producer, collective, consumer, on one stream and on several: no report, and the result is right."""
    result = run(f"{what}\ncomm.barrier(); comm.close()", n=n)
    assert result.rc == 0 and result.rank_out == ["right\n"] * n, result.text
    assert not REPORT.search("".join(result.rank_err)), result.text


WAITS = {
    "before": ("stream != plane._aside", "first()"),
    "after": ("stream == plane._aside", "first()"),
    "before, by an array": ("stream != int(other)", "named()"),
    "after, by an array": ("stream != int(compute)", "named()"),
    "added": ("event != plane._issuer.added", "added()"),
}


@pytest.mark.parametrize("which", WAITS)
def test_a_missing_wait_is_reported(which: str) -> None:
    """Without one of the plane's waits there is a report on the rank that lacks it, although the result is right."""
    kept, what = WAITS[which]
    program = f"""
waits = plane.device._waits
class Planted(dict):
    def __missing__(self, both):
        stream, event = both
        return waits[both] if {kept} else lambda: 0
if RANK == 1: plane.device._waits = Planted()
{what}
plane.device._waits = waits
"""
    result = run(f"{program}\ncomm.barrier(); comm.close()", missing=True)
    assert REPORT.search(result.rank_err[1]) and not REPORT.search(result.rank_err[0]), result.text
    assert result.rank_out == ["right\n"] * 2, result.text
