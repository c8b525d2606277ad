"""Memory that NCCL knows: windows, streams that still use it, and who else holds it."""

from __future__ import annotations

import ctypes
import functools
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers.arrays import Arrays
from helpers.held import Held
from helpers.memory import PLANE
from mpi4py import MPI

from butter_mpi import Communicator, dlpack, nccl
from butter_mpi._libnccl import Library
from butter_mpi.device import Device
from butter_mpi.errors import CollectiveMismatchError, CommunicatorBrokenError, NCCLError

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(PLANE != "nccl", reason="this is about the nccl plane"),
    pytest.mark.skipif(MPI.COMM_WORLD.size < 2, reason="needs 2 ranks"),
]

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


@pytest.fixture
def arrays(comm: Communicator) -> Arrays:
    """What makes arrays for `comm`, on a stream that the communicator does not know."""
    return Arrays(comm, own_stream=True)


@pytest.fixture
def held(arrays: Arrays, plane: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """A hold of the stream that is let go once the plane has looked for its end three times."""
    looks: list[int] = []
    passed = plane._passed

    def counted(what: str) -> bool:
        looks.append(1)
        if len(looks) == 3:
            hold.go()
        return bool(passed(what))

    assert arrays.device is not None and arrays.stream is not None
    monkeypatch.setattr(type(plane), "_passed", lambda _plane, what: counted(what))
    with Held(arrays.device, arrays.stream) as hold:
        yield hold
    assert len(looks) >= 3


@pytest.mark.usefixtures("held")
def test_registered_until_the_stream_has_passed(
    comm: Communicator, arrays: Arrays, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was submitted may still use the memory at the end of the body: it stays registered until that is done."""
    ready: list[bool] = []
    give_back = nccl.deregister

    def noted(*arguments: Any) -> None:
        ready.append(device.ready(arrays.stream or 0))
        give_back(*arguments)

    monkeypatch.setattr(nccl, "deregister", noted)
    x = arrays(np.zeros(4))
    with comm.registered(x):
        comm.all_reduce(x, stream=arrays.stream)
        assert not device.ready(arrays.stream or 0)
    assert ready == [True]


def test_what_is_made_of_it_keeps_it(comm: Communicator) -> None:
    """The array keeps its memory and its communicator, and a capsule the array; nothing is left when they go."""
    x = comm.symmetric(4).array
    capsule, here = x.__dlpack__(), weakref.ref(x)
    seen = dlpack.look(x)
    assert (seen.pointer, seen.shape, seen.dtype) == (x.__cuda_array_interface__["data"][0], (4,), "float32")
    with pytest.raises(BufferError, match="makes no copy"):
        x.__dlpack__(copy=True)
    del x
    kept = here()
    assert kept is not None and kept.__cuda_array_interface__
    del kept
    with pytest.warns(ResourceWarning, match="was dropped without close"):
        del capsule
    assert here() is None


def test_a_capsule_that_was_taken(comm: Communicator) -> None:
    """Who takes a capsule keeps the array until it calls the deleter."""
    with comm.symmetric(4) as x:
        capsule, here = x.__dlpack__(), weakref.ref(x)
        del x
        api = ctypes.pythonapi
        get, rename = api.PyCapsule_GetPointer, api.PyCapsule_SetName
        get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        rename.argtypes = (ctypes.py_object, ctypes.c_char_p)
        managed = dlpack._Managed.from_address(get(capsule, b"dltensor"))
        name = b"used_dltensor"
        rename(capsule, name)
        del capsule
        assert here() is not None
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(managed.deleter)(ctypes.addressof(managed))
        assert here() is None


@pytest.mark.parametrize("has", [True, False], ids=["window", "older NCCL"])
def test_windows(comm: Communicator, plane: Any, monkeypatch: pytest.MonkeyPatch, has: bool) -> None:
    """A NCCL that has windows registers one of all ranks and takes it back; an older one registers the buffer."""
    calls: list[str] = []
    allocate = nccl.mem_alloc

    def aligned(library: Library, nbytes: int) -> int:
        """NCCL's own memory always is; the stand-in's sometimes."""
        while (pointer := allocate(library, nbytes)) % 4096:
            pass
        return pointer

    def noted(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        calls.append(name)
        return call(*arguments)

    monkeypatch.setattr(nccl, "mem_alloc", aligned)
    for name in ("window_register", "window_deregister", "register", "deregister"):
        monkeypatch.setattr(nccl, name, functools.partial(noted, name, getattr(nccl, name)))
    monkeypatch.setattr(type(plane._library), "has", lambda _library, _name: has)
    comm.symmetric(4).close()
    prefix = "window_" if has else ""
    assert calls == [f"{prefix}register", f"{prefix}deregister"]


def test_a_window_that_fails_on_one_rank(comm: Communicator, plane: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it inside NCCL: they are told, and leave; memory is freed everywhere."""

    def fail(*_: Any) -> int:
        raise NCCLError("ncclCommWindowRegister failed", call="ncclCommWindowRegister", result=3)

    if RANK == SIZE - 1:
        monkeypatch.setattr(nccl, "window_register", fail)
    began = time.monotonic()
    with pytest.raises(CommunicatorBrokenError, match="ncclCommWindowRegister failed"):
        comm.symmetric(4)
    assert time.monotonic() - began < 5 and not plane._memory._blocks


def test_freed_when_the_stream_has_passed(
    comm: Communicator, arrays: Arrays, device: Device, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    """What was submitted may still use the memory at the end of the block: it is freed when that is done."""
    ready: list[bool] = []
    free = nccl.mem_free

    def noted(*arguments: Any) -> None:
        ready.append(device.ready(arrays.stream or 0))
        free(*arguments)

    monkeypatch.setattr(nccl, "mem_free", noted)
    with comm.symmetric(4) as x:
        request.getfixturevalue("held")
        comm.all_reduce(x, stream=arrays.stream)
        assert not device.ready(arrays.stream or 0)
    assert ready == [True]


def test_a_capture_is_left_alone(comm: Communicator, plane: Any, device: Device) -> None:
    """A captured stream can be asked nothing: closing is refused, and the capture holds."""
    memory = comm.symmetric(4)
    modes = device._driver.CUstreamCaptureMode
    device.call("cuStreamBeginCapture", plane.stream, modes.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        with pytest.raises(ValueError, match=r"stream must not be captured into a CUDA graph"):
            memory.close()
    finally:
        graph = device.call("cuStreamEndCapture", plane.stream)
    device.call("cuGraphDestroy", graph)
    assert memory.array.nbytes
    memory.close()
    assert not plane._memory._blocks


def test_memory_that_is_still_used_is_left(
    comm: Communicator, arrays: Arrays, device: Device, plane: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a broken one has a busy stream, closing waits a moment, leaves the memory to the end, and says so."""
    with Held(device, arrays.stream or 0), comm.symmetric(4) as x:
        comm.all_reduce(x, stream=arrays.stream)
        with pytest.raises(CollectiveMismatchError):
            comm.backend.set_add_kernel(0 if RANK else 8)
        began = time.monotonic()
    assert time.monotonic() - began < 5 and "symmetric_free: a stream is still busy" in caplog.text
    assert plane._memory.has_left
    comm.close()
    plane._closing.wait()
    assert not plane._memory.has_left
