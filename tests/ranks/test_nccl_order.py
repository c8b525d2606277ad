"""Arrays that name another stream than the one that an operation is on: what waits for what, alone and with others."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from helpers.held import Held
from helpers.memory import PLANE, DeviceArray, DeviceMemory
from helpers.standin_rank import driver, until
from mpi4py import MPI

from butter_mpi import Communicator
from butter_mpi.cuda import prepared
from butter_mpi.device import Device

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(PLANE != "nccl", reason="this is about the nccl plane")]

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
TOTAL = SIZE * (SIZE + 1) // 2
OWN = np.full(1000, RANK + 1, np.float32)
UNMOVED = 0.3
"""Seconds in which a stream that waits for nothing would be done."""

Make = Callable[..., DeviceArray]


@pytest.fixture
def make(memory: DeviceMemory) -> Make:
    """What makes an array of poison, or of its content, that names a stream; it is read in the order of that one."""

    def made(stream: int, content: Any = None, **more: Any) -> DeviceArray:
        array = DeviceArray(memory, OWN if content is None else content, stream=stream, **more)
        memory.stream = stream
        return array

    return made


@pytest.fixture
def streams(device: Device) -> tuple[int, int]:
    """Two streams that know nothing of one another."""
    return device.make_stream(), device.make_stream()


def test_buffer_is_kept_until_its_stream_has_passed(
    comm: Communicator, device: Device, make: Make, memory: DeviceMemory, streams: tuple[int, int]
) -> None:
    """An array that nobody else has any more lives until the operation is done; then the next look lets go of it."""
    array = make(streams[0])
    reference, pointer = weakref.ref(array), array.pointer
    with Held(device, streams[0]):
        comm.all_reduce(array)
        del array
        gc.collect()
        assert comm.is_healthy() and reference() is not None
    assert (memory.get(pointer, OWN) == TOTAL).all()
    assert comm.is_healthy() and reference() is None


def test_a_look_at_kept_buffers_spoils_no_capture(
    comm: Communicator, device: Device, make: Make, streams: tuple[int, int]
) -> None:
    """While another stream is captured, in the mode that forbids most, operations and looks leave the capture valid."""
    one, other = make(streams[0]), make(streams[0])
    comm.all_reduce(one)
    device.call("cuStreamBeginCapture", streams[1], driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
    comm.all_reduce(other)
    assert comm.is_healthy()
    device.call("cuGraphDestroy", device.call("cuStreamEndCapture", streams[1]))


def test_health_is_asked_from_any_thread(comm: Communicator, make: Make, streams: tuple[int, int]) -> None:
    """A thread that has no CUDA context yet may ask for the health while a buffer is kept, and harms nothing."""
    comm.all_reduce(make(streams[0]))
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(comm.is_healthy()))
    thread.start()
    thread.join(20)
    assert seen == [True] and comm.is_healthy()


def produce(device: Device, array: DeviceArray, stream: int) -> None:
    """Put the work that makes the content on a stream."""
    device.copy(array.pointer, OWN.ctypes.data, OWN.nbytes, stream)


def waits(device: Device, stream: int) -> bool:
    """Return whether a stream holds work that waits for something."""
    return not until(lambda: device.ready(stream), UNMOVED)


def test_given_stream_waits_for_the_producer(
    comm: Communicator, device: Device, make: Make, memory: DeviceMemory, streams: tuple[int, int]
) -> None:
    """With a stream given, an operation comes after what the stream of the array holds."""
    named, ordered = streams
    own = make(named, np.zeros_like(OWN))
    with Held(device, named):
        produce(device, own, named)
        comm.all_reduce(own, stream=ordered)
        assert waits(device, ordered)
    memory.stream = ordered
    assert (own.get() == TOTAL).all()


def test_named_stream_waits_for_the_operation(
    comm: Communicator, device: Device, make: Make, memory: DeviceMemory, streams: tuple[int, int]
) -> None:
    """What comes on the stream of an array after the call comes after the operation."""
    named, ordered = streams
    own, out = make(named), make(named)
    with Held(device, ordered):
        comm.all_reduce(own, out, stream=ordered)
        device.fill(own.pointer, 0, OWN.nbytes, named)
        assert waits(device, named)
    assert (out.get() == TOTAL).all() and (own.get() == 0).all()


def test_every_buffer_counts(
    comm: Communicator, device: Device, make: Make, memory: DeviceMemory, streams: tuple[int, int]
) -> None:
    """Without a stream the first array's is taken; work that the other one's stream holds does not come after it."""
    first, second = streams
    own, out = make(first), make(second)
    with Held(device, second):
        device.fill(out.pointer, 0, OWN.nbytes, second)
        comm.all_reduce(own, out)
        assert waits(device, first)
    assert (out.get() == TOTAL).all()


def test_order_is_that_of_the_call_in_a_group(
    comm: Communicator, device: Device, make: Make, memory: DeviceMemory, streams: tuple[int, int]
) -> None:
    """In a group, too, an operation waits for what a stream held at the call, and for nothing that came later."""
    named, ordered = streams
    own = make(named, np.zeros_like(OWN))
    with Held(device, named) as before, ExitStack() as later:
        with comm.group():
            produce(device, own, named)
            comm.all_reduce(own, stream=ordered)
            later.enter_context(Held(device, named))
        assert waits(device, ordered)
        before.go()
        assert until(lambda: device.ready(ordered)) and not device.ready(named)
    assert (own.get() == TOTAL).all()


def test_pair_of_one_rank_on_two_streams(
    comm: Communicator, device: Device, make: Make, memory: DeviceMemory, streams: tuple[int, int]
) -> None:
    """What a rank sends to itself comes after the work of the one stream, and is there on the other."""
    first, second = streams
    own, out = make(first, np.zeros_like(OWN)), make(second, np.zeros_like(OWN))
    with Held(device, first):
        produce(device, own, first)
        with comm.group():
            comm.send(own, RANK)
            comm.recv(out, RANK)
        assert waits(device, second)
    assert (out.get() == OWN).all()


@pytest.mark.parametrize("which", ["the same", "two names of one", "another"])
def test_only_other_streams_cost_calls(
    comm: Communicator, plane: Any, make: Make, streams: tuple[int, int], monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """The driver is asked each question once, and one event lets go of the array; another stream costs two orders.

    What is asked of the current context is not counted here.
    """
    named, given = {"the same": (streams[0],) * 2, "two names of one": (1, 0), "another": streams}[which]
    own, device = make(named), plane.device
    calls: list[str] = []

    def counted(name: str, *arguments: Any) -> Callable[[], int]:
        call = prepared(name, *arguments)

        def counting() -> int:
            calls.append(name)
            return int(call())

        return counting

    monkeypatch.setattr("butter_mpi.device.prepared", counted)
    asked = device._asked.questions
    kept = (asked.memories, asked.contexts, asked.captures, device._asked_on_lane.captures)
    for known in (*kept, device._records, device._waits):
        known.clear()
    comm.all_reduce(own, stream=given)
    calls.clear()
    comm.all_reduce(own, stream=given)
    streams_asked, order = {"the same": (1, 0), "two names of one": (0, 0), "another": (2, 1)}[which]
    questions = ["cuPointerGetAttributes", *["cuStreamGetCtx"] * streams_asked, *["cuStreamIsCapturing"] * (1 + order)]
    there, back = ["cuEventRecord", "cuStreamWaitEvent"] * order, ["cuStreamWaitEvent"] * order
    assert calls == [*questions, *there, "cuEventRecord", *back]
    assert (own.get() == TOTAL * SIZE).all()


@pytest.mark.parametrize("which", ["sendbuf", "recvbuf"])
@pytest.mark.parametrize(("named", "text"), [(2, "one that all threads share"), (12345, "12345 is none")])
def test_streams_that_cannot_be_ordered(
    comm: Communicator, make: Make, streams: tuple[int, int], which: str, named: int, text: str
) -> None:
    """An array on a stream of one thread, or on none, is refused before anything is sent, though a stream is given."""
    arrays = [make(named if name == which else streams[0]) for name in ("sendbuf", "recvbuf")]
    with pytest.raises(ValueError, match=f"{text}.* A buffer names this one") as caught:
        comm.all_reduce(*arrays, stream=streams[0])
    assert str(caught.value).startswith(f"rank {RANK}/{SIZE}") and comm.sequence == 0 and comm.is_healthy()


@pytest.mark.parametrize("grouped", [False, True])
def test_named_stream_in_capture(
    comm: Communicator, device: Device, make: Make, streams: tuple[int, int], grouped: bool
) -> None:
    """An array on a stream that is captured is refused, also where that begins in a group; the capture stays valid."""
    named, ordered = streams
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    own = make(named)

    def attempt() -> None:
        if not grouped:
            device.call("cuStreamBeginCapture", named, mode)
            comm.all_reduce(own, stream=ordered)
        with comm.group():
            comm.all_reduce(own, stream=ordered)
            device.call("cuStreamBeginCapture", named, mode)

    with pytest.raises(ValueError, match=r"captured into a CUDA graph.* A buffer names this one, and all_reduce is"):
        attempt()
    assert int(device.call("cuStreamEndCapture", named)) and comm.sequence == 0
    comm.all_reduce(own, stream=ordered)
    assert (own.get() == TOTAL).all()
