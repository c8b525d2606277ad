"""Arrays of device memory as the selftest shows them to operations, and what is told of a start that failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from butter_mpi.buffers import ArrayView, current_stream, device_view
from butter_mpi.enums import DType
from butter_mpi.selftest.checks import Types
from butter_mpi.selftest.places import DeviceArray, HostPlace
from butter_mpi.selftest.start import Refused, _refuse

BASE = 1 << 20
FLOATS = DeviceArray(None, BASE, 8, np.dtype(np.float32), 64)


def seen(array: DeviceArray) -> tuple[int, int, DType]:
    """Return what an operation makes of it."""
    view: ArrayView = device_view(array, "buf", writable=True)
    return view.pointer, view.count, view.dtype


def test_array_is_what_it_says() -> None:
    """Pointer, count, type and stream are those of the array, its parts and its views."""
    assert seen(FLOATS) == (BASE, 8, DType.FLOAT32)
    assert seen(FLOATS[2:5]) == (BASE + 8, 3, DType.FLOAT32)
    assert seen(FLOATS[6:20]) == (BASE + 24, 2, DType.FLOAT32)
    assert seen(FLOATS[1:3].view(np.dtype(np.uint8))) == (BASE + 4, 8, DType.UINT8)
    assert seen(FLOATS[:0]) == (0, 0, DType.FLOAT32)
    assert current_stream(device_view(FLOATS[2:5], "x", writable=True)) == 64


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.label)
def test_every_element_type_is_known(dtype: DType) -> None:
    """An operation sees each element type as itself, those of ml_dtypes too."""
    name = dtype.label
    assert seen(FLOATS.view(np.dtype(getattr(ml_dtypes, name, name))))[2] is dtype


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (FLOATS[::2], "not C-contiguous"),
        (FLOATS[::-1], "not C-contiguous"),
        (FLOATS.view(np.dtype(">f4")), "foreign byte order"),
        (FLOATS.view(np.dtype("V4")), "dtype must be one of"),
    ],
)
def test_what_operations_refuse_can_be_made(array: DeviceArray, said: str) -> None:
    """Strides, byte order and type are shown as they are, so that the refusal is tried."""
    with pytest.raises(ValueError, match=said):
        seen(array)


def test_host_array_is_its_own_copy() -> None:
    """Host memory is what the host sees, and a read-only view of it leaves it writable."""
    place, host = HostPlace(), np.zeros(4, np.uint8)
    array = place.array(host)
    assert array is host
    assert not place.read_only(array).flags.writeable
    assert array.flags.writeable


def types(version: int, *capabilities: tuple[int, int], plane: str = "nccl") -> Types:
    """Return the types of a communicator whose ranks have these capabilities."""
    library = {"version": version, "version_text": "2.x"} if plane == "nccl" else None
    comm: Any = SimpleNamespace(
        plane=plane,
        backend=SimpleNamespace(device=SimpleNamespace(capability=capabilities[0])),
        records=[{"library": library}],
        all_gather_json=lambda _value: [list(capability) for capability in capabilities],
    )
    return Types.of(comm)


def test_types_are_what_every_rank_can() -> None:
    """8-bit floats are left out below NCCL 2.24, and of reductions where one device is older than 9.0."""
    every = tuple(dtype for dtype in DType if dtype.native)
    others = tuple(dtype for dtype in every if "float8" not in dtype.label)
    assert types(22400, (9, 0), (12, 1)) == Types(every, every, "")
    assert types(0, (0, 0), plane="solo") == Types(every, every, "")
    old = types(22399, (9, 0))
    assert (old.moved, old.reduced) == (others, others)
    small = types(23203, (9, 0), (8, 9))
    assert (small.moved, small.reduced) == (every, others)
    assert small.missing == "reducing 8-bit floats: takes compute capability 9.0, a device has 8.9"


NO_ID = "rank 0/2: start: no ID"
OWN = "rank 1/2 on b: start: it failed"


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([OWN, OWN], OWN),
        (["", OWN], OWN),
        ([f"rank 0/2 on a: told by {OWN}", OWN], OWN),
        ([f"rank 0/2 on a: start: {NO_ID}", f"rank 1/2 on b: start: {NO_ID}"], NO_ID),
        (["rank 0/2 on a: start: it failed", OWN], "ranks 0-1: start: it failed"),
        (["rank 0/2 on a: start: it fails too", OWN], f"rank 0/2 on a: start: it fails too\n{OWN}"),
    ],
)
def test_refused_start_is_told_once(texts: list[str], said: str) -> None:
    """What a rank was told by another one is not repeated; what failed on each by itself is told of each, or of all."""
    with pytest.raises(Refused) as caught:
        _refuse(texts)
    assert (caught.value.text, caught.value.status) == (said, 3)


def test_start_that_nobody_refuses_goes_on() -> None:
    """Without a text there is nothing to refuse."""
    _refuse(["", ""])
