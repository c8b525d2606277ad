"""How waits of the nccl plane end, which NCCL does not bound, and how a communicator ends while work is under way."""

from __future__ import annotations

import gc
import signal
import threading
import time
import warnings
from typing import Any

import numpy as np
import pytest
from helpers.held import Held
from helpers.memory import PLANE, DeviceMemory
from helpers.standin_rank import until
from helpers.sums import F32, RANK, SIZE, TOTAL, own, works
from mpi4py import MPI

import butter_mpi
from butter_mpi import Communicator
from butter_mpi.device import Device
from butter_mpi.errors import (
    CollectiveTimeoutError,
    CommunicatorBrokenError,
    CommunicatorClosedError,
    PeerLostError,
)

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(PLANE != "nccl", reason="this is about the nccl plane"),
    pytest.mark.skipif(MPI.COMM_WORLD.size < 2, reason="needs 2 ranks"),
]

WORLD = MPI.COMM_WORLD


# -- bounds ----------------------------------------------------------------------------------------------------------


def test_broadcast_is_bounded(comm: Communicator, plane: Any, memory: DeviceMemory) -> None:
    """A broadcast that a rank does not come to ends at the deadline on all others, with the facts; a retry works."""
    pointer, plane.deadline = memory.put(np.arange(16, dtype=np.uint8)), 1.0
    began = time.monotonic()
    with pytest.raises(CollectiveTimeoutError) as caught:
        comm.wait_for_async_error(20) if RANK == SIZE - 1 else plane.broadcast(pointer, 16, SIZE - 1)
    assert 0.9 < time.monotonic() - began < 5
    text, last = str(caught.value), SIZE - 1
    for fact in (f"rank {RANK}/{SIZE}", f"broadcast #1 (uint8 x 16, root {last})", "Stop all ranks before retrying"):
        assert fact in text
    with pytest.raises(CollectiveTimeoutError) as again:
        plane.barrier()
    assert str(again.value) == text and not plane.is_healthy()
    memory.wait()
    plane.attempt_reconnect()
    assert works(plane, memory)


def test_a_command_is_never_late(plane: Any, memory: DeviceMemory) -> None:
    """recv_command_u32 waits for longer than the deadline."""
    command = np.array([7], np.uint32)
    pointer = memory.put(command) if RANK == 0 else memory.blank(4)
    plane.deadline = 0.3
    if RANK == 0:
        threading.Event().wait(1)
        plane.broadcast(pointer, 4, 0)
    else:
        plane.recv_command_u32(pointer, 0)
    assert memory.get(pointer, command) == 7


def test_a_command_that_never_comes_ends_with_the_cause(comm: Communicator, plane: Any, memory: DeviceMemory) -> None:
    """recv_command_u32 waits without a deadline, and yet ends as soon as the root gives up."""
    if RANK == 0:
        threading.Event().wait(0.5)
        comm.abort("no more commands")
        return
    with pytest.raises(PeerLostError, match="no more commands"):
        plane.recv_command_u32(memory.blank(4), 0)


def test_first_connection_is_bounded(comm: Communicator, plane: Any, memory: DeviceMemory) -> None:
    """The first message between two ranks connects them in NCCL, without a bound of its own: the deadline ends it."""
    plane.deadline, pointer = 1.0, memory.blank(8)
    began = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match="send #1"):
        comm.wait_for_async_error(20) if RANK else plane.send_to(pointer, 8, 1, plane.stream)
    assert time.monotonic() - began < 5
    # The call that is stuck stays with NCCL; the communicator that follows has nothing to do with it.
    plane.deadline = 10
    plane.attempt_reconnect()
    assert works(plane, memory)


def test_interrupted_while_it_waits(comm: Communicator, plane: Any, memory: DeviceMemory) -> None:
    """What a signal handler raises ends a wait at once; the others are told who gave up, and where."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    pointer = memory.blank(4)
    if RANK:
        with pytest.raises(CommunicatorBrokenError, match=r"broadcast #1 .* interrupted by KeyboardInterrupt"):
            comm.wait_for_async_error(10)
    else:
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            plane.broadcast(pointer, 4, 0)
        signal.signal(signal.SIGALRM, before)
    plane.attempt_reconnect()
    assert works(plane, memory)


# -- endings ---------------------------------------------------------------------------------------------------------


def test_abort_is_bounded_while_an_operation_is_stuck(
    comm: Communicator, plane: Any, memory: DeviceMemory, device: Device
) -> None:
    """An abort ends a collective on the device that another rank has not come to with its data; the others are told."""
    pointer, stream = memory.put(own()), device.make_stream()
    with Held(device, stream) as held:
        if RANK == 0:
            held.go()
        plane.all_reduce_async(pointer, 4000, stream, dtype=F32)
        began = time.monotonic()
        if RANK == 0:
            memory.stream = stream
            assert not until(lambda: device.ready(stream), 0.3)
            comm.abort("stuck")
            memory.wait()
        else:
            with pytest.raises(PeerLostError, match="stuck"):
                comm.wait_for_async_error(10)
        assert time.monotonic() - began < 4


def test_close_with_work_under_way(comm: Communicator, plane: Any, memory: DeviceMemory, device: Device) -> None:
    """Closing is bounded, and takes nothing from work that is under way."""
    pointer, stream = memory.put(own()), device.make_stream()
    began = time.monotonic()
    with Held(device, stream):
        plane.all_reduce_async(pointer, 4000, stream, dtype=F32)
        comm.close()
        assert not device.ready(stream) and time.monotonic() - began < 4
    memory.stream = stream
    assert (memory.get(pointer, own()) == TOTAL).all()
    comm.close()
    comm.abort()


@pytest.mark.parametrize("late", [False, True])
def test_one_end_on_all_ranks(comm: Communicator, plane: Any, memory: DeviceMemory, late: bool) -> None:
    """Where one rank gives up, those that close abort too: a destroy would wait for it without a limit."""
    plane.barrier()
    memory.wait()
    WORLD.Barrier()
    began = time.monotonic()
    if RANK:
        comm.close()
        assert time.monotonic() - began < 4
    if late:
        WORLD.Barrier()
    if RANK == 0:
        comm.abort("enough")
        return
    assert until(lambda: plane._closing.done, 5)


def test_closed_at_different_times(comm: Communicator, plane: Any, memory: DeviceMemory) -> None:
    """Whoever closes first does not wait for the others; what it had is given back once they have closed too."""
    plane.barrier()
    memory.wait()
    if RANK:
        comm.close()
    WORLD.Barrier()
    comm.close()
    with butter_mpi.init(plane="nccl", share_gpu=comm.settings.share_gpu):
        assert until(lambda: plane._closing.done, 5)


def test_many_closed_at_different_times(comm: Communicator, plane: Any, memory: DeviceMemory) -> None:
    """Where all close in one order, one that comes late costs the others one wait, and not one for each."""
    parts = [comm.dup() for _ in range(3)]
    for part in parts:
        part.barrier()
    if RANK:
        parts[0].close()
    WORLD.Barrier()
    began = time.monotonic()
    for part in parts:
        part.close()
    assert time.monotonic() - began < 1.5


def test_closed_in_opposite_orders(comm: Communicator, plane: Any, memory: DeviceMemory) -> None:
    """Ranks that wait for one another in the closes of different communicators see that, and wait no longer."""
    parts = [comm.dup() for _ in range(3)]
    for part in parts:
        part.barrier()
    memory.wait()
    WORLD.Barrier()
    began = time.monotonic()
    for part in parts if RANK % 2 else reversed(parts):
        part.close()
    assert time.monotonic() - began < 1.5
    comm.close()
    planes: list[Any] = [part.backend for part in parts]
    with butter_mpi.init(plane="nccl", share_gpu=comm.settings.share_gpu):
        assert until(lambda: all(one._closing.done for one in planes), 5)


def test_closed_whatever_is_asked(comm: Communicator, plane: Any, memory: DeviceMemory) -> None:
    """A closed communicator says so, also where it is handed its own stream, which is gone."""
    comm.close()
    pointer = memory.blank(4)
    for call in (
        lambda: plane.all_reduce_async(pointer, 4, plane.stream),
        lambda: plane.send_to(pointer, 4, 0, plane.stream),
        lambda: comm.barrier(stream=plane.stream),
    ):
        with pytest.raises(CommunicatorClosedError):
            call()


def test_abort_from_another_thread_ends_a_wait(comm: Communicator, plane: Any, memory: DeviceMemory) -> None:
    """A broadcast that waits for ever ends when another thread gives the communicator up."""
    if RANK == 0:
        threading.Timer(0.5, comm.abort, ["enough"]).start()
        with pytest.raises((CommunicatorClosedError, CommunicatorBrokenError)):
            plane.broadcast(memory.blank(4), 4, 0)
    else:
        with pytest.raises(PeerLostError, match="enough"):
            comm.wait_for_async_error(10)


def test_dropped_without_close(comm: Communicator, plane: Any, memory: DeviceMemory) -> None:
    """The next start gives back what a dropped communicator had; a finalizer waits for nobody."""
    dropped = butter_mpi.init(plane="nccl", share_gpu=comm.settings.share_gpu)
    its_plane: Any = dropped.backend
    its_plane.barrier()
    its_plane.owner = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del dropped
        gc.collect()
    assert [w for w in caught if w.category is ResourceWarning] and its_plane.is_healthy()
    with butter_mpi.init(plane="nccl", share_gpu=comm.settings.share_gpu):
        assert its_plane.state() == "dropped" and its_plane._comm is None
    assert works(plane, memory)
