"""Registered and symmetric memory: who has it, how long, and what becomes of it when something breaks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers.arrays import Arrays
from mpi4py import MPI

from butter_mpi import Communicator
from butter_mpi.errors import (
    ButterError,
    CollectiveMismatchError,
    CommunicatorBrokenError,
    CommunicatorClosedError,
    CUDAError,
)

pytestmark = pytest.mark.mpi

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
TOTAL = SIZE * (SIZE + 1) // 2
BF16 = np.dtype(ml_dtypes.bfloat16)
needs_ranks = pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")


@pytest.fixture
def arrays(comm: Communicator) -> Arrays:
    """What makes arrays for `comm`, on a stream that the communicator does not know."""
    return Arrays(comm, own_stream=True)


@pytest.fixture
def frees(monkeypatch: pytest.MonkeyPatch, plane: Any) -> list[int]:
    """What was given back to the plane's allocator, as it is."""
    seen: list[int] = []
    free = plane._memory._free

    def noted(block: Any) -> None:
        free(block)
        seen.append(1)

    monkeypatch.setattr(plane._memory, "_free", noted)
    return seen


def broken(comm: Communicator) -> None:
    """Break a communicator on every rank, by what ranks compare in every setting."""
    with pytest.raises(CollectiveMismatchError):
        comm.backend.set_add_kernel(0 if RANK else 8)


# -- registered ------------------------------------------------------------------------------------------------------


def test_registered_for_the_body(comm: Communicator, arrays: Arrays, plane: Any) -> None:
    """What arrays hold is registered in the body, one handle each, and given back at its end; and again."""
    x, none, y = arrays(np.full(4, RANK + 1)), arrays(np.zeros(0)), arrays(np.zeros(3))
    block = comm.registered(x, none, y)
    for times in (1, SIZE):
        with block:
            assert len(plane._handles) == 2
            comm.all_reduce(x, stream=arrays.stream)
        assert not plane._handles and (arrays.get(x) == TOTAL * times).all()


def test_registered_is_given_back_after_an_error(comm: Communicator, arrays: Arrays, plane: Any) -> None:
    """An error of the body is what comes out, and nothing stays registered."""
    x = arrays(np.zeros(4))
    with pytest.raises(ZeroDivisionError), comm.registered(x):
        _ = 1 // 0
    assert not plane._handles and comm.is_healthy()


def test_what_cannot_be_registered(comm: Communicator, arrays: Arrays, plane: Any) -> None:
    """Another thing than an array of this plane is refused by name, and inside a group everything; nothing is kept."""
    x = arrays(np.zeros(4))
    other = np.zeros(4) if plane.on_device else [0.0]
    text = rf"^rank {RANK}/{SIZE} .*: registered: array must be a"
    with pytest.raises(TypeError, match=text), comm.registered(x, other):
        pass
    with pytest.raises(ValueError, match="registered inside a group"), comm.group(), comm.registered(x):
        pass
    assert not plane._handles and comm.is_healthy()


@pytest.mark.parametrize("end", ["close", "abort"])
def test_registered_on_a_closed_communicator(comm: Communicator, arrays: Arrays, end: str) -> None:
    """The end of the body is quiet where the communicator has ended meanwhile; a new body is refused."""
    x = arrays(np.zeros(4))
    block = comm.registered(x)
    with block:
        WORLD.Barrier()
        getattr(comm, end)()
    with pytest.raises(CommunicatorClosedError, match=rf"^rank {RANK}/{SIZE} on \S+: registered: "), block:
        pass


@needs_ranks
def test_registered_on_a_broken_communicator(comm: Communicator, arrays: Arrays, plane: Any) -> None:
    """A failure is what comes out of the body; after a reconnect inside it the handle is void, and that is quiet."""
    x = arrays(np.full(4, RANK + 1))

    def body() -> None:
        with comm.registered(x):
            broken(comm)
            comm.barrier(stream=arrays.stream)

    with pytest.raises(CommunicatorBrokenError):
        body()
    comm.attempt_reconnect()
    with comm.registered(x):
        broken(comm)
        comm.attempt_reconnect()
        assert not plane._handles
    comm.all_reduce(x, stream=arrays.stream)
    assert (arrays.get(x) == TOTAL).all()


# -- symmetric -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", np.int32])
def test_symmetric_array(comm: Communicator, arrays: Arrays, frees: list[int], dtype: Any) -> None:
    """It has the shape and type that were asked for, operations take it, and it is freed once."""
    before = comm.sequence
    memory = comm.symmetric((3, 5), dtype)
    with memory as x:
        assert x.shape == (3, 5) and x.dtype == (BF16 if dtype == "bfloat16" else np.int32) and x.nbytes
        arrays.fill(x, RANK + 1)
        comm.all_reduce(x, stream=arrays.stream)
        assert (arrays.read(x).astype(int) == TOTAL).all() and comm.sequence == before + 1
    memory.close()
    assert len(frees) == 1
    with comm.symmetric(0) as none:
        comm.all_reduce(none, stream=arrays.stream)
    assert none.shape == (0,)


def test_symmetric_array_after_its_end(comm: Communicator, arrays: Arrays) -> None:
    """Used after its end it is refused by name, and poisons nothing; NumPy's own array has memory of its own."""
    memory = comm.symmetric(4, np.float32)
    with memory as x:
        arrays.fill(x, RANK + 1)
    text = rf"^rank {RANK}/{SIZE} .*: symmetric array \(4,\) of float32 was closed, and its memory is freed"
    with pytest.raises(ValueError, match=text):
        _ = memory.array
    with pytest.raises(TypeError, match=r"Symmetric \(pass its \.array, or what a with block gives\)"):
        comm.all_reduce(memory, stream=arrays.stream)
    if arrays.device is None:
        assert (x == RANK + 1).all()
        return
    registered = comm.registered(x)
    for use in (lambda: comm.all_reduce(x, stream=arrays.stream), x.__dlpack__, registered.__enter__):
        with pytest.raises(ValueError, match=text):
            use()
    assert comm.is_healthy() and comm.sequence == 0


def test_arguments_of_symmetric(comm: Communicator, frees: list[int]) -> None:
    """No shape, no type, a group: refused before anything is sent, or made."""
    for arguments, error, text in (
        (("4",), TypeError, "shape must be an int or a sequence of ints; got str"),
        (((2, -1),), ValueError, "shape must be numbers of elements, 0 or more; got -1 in it"),
        (((2, 1.0),), TypeError, "got float in it"),
        (((2**40, 2**30),), ValueError, r"shape \(1099511627776, 1073741824\) of float32 is more than 2\*\*48 bytes"),
        ((4, "float12"), ValueError, "dtype must be one of"),
        ((4, None), ValueError, "dtype must be one of"),
        ((4, np.dtype("datetime64[s]")), ValueError, "dtype must be one of"),
    ):
        with pytest.raises(error, match=rf"^rank {RANK}/{SIZE} .*: symmetric: .*{text}"):
            comm.symmetric(*arguments)
    with pytest.raises(ValueError, match="symmetric inside a group"), comm.group():
        comm.symmetric(4)
    memory = comm.symmetric(4)
    with pytest.raises(ValueError, match="closing a symmetric array inside a group"), comm.group():
        memory.close()
    memory.close()
    assert len(frees) == 1 and comm.is_healthy() and comm.sequence == 0


@needs_ranks
def test_one_rank_without_memory(
    comm: Communicator, arrays: Arrays, plane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one rank has no memory every rank raises and names it; nothing is kept, and operations go on."""

    def refuse(*_: Any) -> int:
        raise CUDAError("cuMemAlloc failed: out of memory", call="cuMemAlloc", code=2)

    if RANK == SIZE - 1:
        monkeypatch.setattr(type(plane), "symmetric_alloc", refuse)
    with pytest.raises(ButterError, match="cuMemAlloc failed: out of memory") as caught:
        comm.symmetric(4)
    assert RANK == SIZE - 1 or f"not every rank has the memory: rank {SIZE - 1}: CUDAError" in str(caught.value)
    assert not plane._memory._blocks and comm.is_healthy()
    x = arrays(np.full(4, RANK + 1))
    comm.all_reduce(x, stream=arrays.stream)
    assert (arrays.get(x) == TOTAL).all()


def test_more_memory_than_there_is(comm: Communicator, plane: Any) -> None:
    """Every rank is told what was asked for; and on a device how much is free, and what to do, where it failed too."""
    with pytest.raises(ButterError) as caught:
        comm.symmetric((2**37, 128), np.float64)
    text = str(caught.value)
    assert text.startswith(f"rank {RANK}/{SIZE} on ") and "symmetric array (137438953472, 128) of float64: " in text
    if plane.on_device:
        assert f"{2**47} bytes cannot be had: " in text and "MemAlloc failed" in text, text
        assert re.search(r"\(\d+ bytes of device memory are free\)\. Ask for less, or free what CuPy", text), text
    assert not plane._memory._blocks and comm.is_healthy()


@needs_ranks
def test_ranks_ask_for_the_same(comm: Communicator, plane: Any) -> None:
    """Other sizes on some ranks are found as for every operation, on every rank, and nothing is kept."""
    with pytest.raises(CollectiveMismatchError, match=r"symmetric #0 \(float32 x 4\) at ranks/test_memory.py"):
        comm.symmetric(4 if RANK else 5)
    assert not plane._memory._blocks


ENDS: dict[str, Callable[[Communicator], None]] = {
    "close": lambda comm: comm.close(),
    "abort": lambda comm: comm.abort(),
    "failure": lambda comm: broken(comm),
}


@pytest.mark.parametrize("end", ENDS if SIZE > 1 else ["close", "abort"])
def test_symmetric_array_of_a_communicator_that_ends(comm: Communicator, frees: list[int], end: str) -> None:
    """It can be freed after its communicator has ended or broken: at once, and quietly."""
    with comm.symmetric(4):
        WORLD.Barrier()
        ENDS[end](comm)
        began = time.monotonic()
    assert time.monotonic() - began < 2 and len(frees) == 1


def test_a_dropped_one_goes_with_the_communicator(comm: Communicator, plane: Any, frees: list[int]) -> None:
    """Dropped without close() it says so; a finalizer must not free it, the communicator's end does."""
    memory = comm.symmetric(4)
    with pytest.warns(ResourceWarning, match=r"symmetric array \(4,\) of float32 was dropped without close"):
        del memory
    assert not plane._memory._blocks and not frees
    comm.close()
    if plane.on_device:
        assert len(frees) == 1
