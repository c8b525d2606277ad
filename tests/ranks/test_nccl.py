"""What only the nccl plane has: an order between streams, threads, groups inside NCCL, capture, one device."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers.held import Held
from helpers.memory import PLANE, DeviceMemory, page_locked
from helpers.sums import F32, RANK, SIZE, TOTAL, own, works
from mpi4py import MPI

from butter_mpi import Communicator, nccl
from butter_mpi.device import Device
from butter_mpi.errors import (
    CUDAError,
)

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(PLANE != "nccl", reason="this is about the nccl plane"),
    pytest.mark.skipif(MPI.COMM_WORLD.size < 2, reason="needs 2 ranks"),
]

WORLD = MPI.COMM_WORLD


# -- order -----------------------------------------------------------------------------------------------------------


def test_the_host_does_not_wait(plane: Any, memory: DeviceMemory, device: Device) -> None:
    """Every operation but the backend's broadcast returns while its stream has not begun; results come in order."""
    a, b, share = memory.put(own()), memory.put(own(SIZE)), memory.blank(4)
    every, ring = memory.blank(4 * SIZE), memory.blank(4)

    def send_around() -> None:
        plane.group_start()
        plane.send_to(a, 4, (RANK + 1) % SIZE, plane.stream)
        plane.recv_from(ring, 4, (RANK - 1) % SIZE, plane.stream)
        plane.group_end()

    # The first one connects the two ranks, for which NCCL waits for the device.
    send_around()
    memory.wait()
    plane.barrier()
    with Held(device, plane.stream):
        plane.all_reduce(a, 4000, dtype=F32)
        plane.reduce_scatter(b, share, 4, dtype=F32)
        plane.all_gather(share, every, 4)
        plane.barrier()
        send_around()
        plane.group_start()
        plane.broadcast(a + 4, 4, 0)
        plane.group_end()
        assert not device.ready(plane.stream)
    assert (memory.get(a, own()) == TOTAL).all() and memory.get(ring, own(1)) == TOTAL
    assert (memory.get(every, own(SIZE)) == TOTAL).all()


def test_async_is_ordered_between_two_streams(plane: Any, memory: DeviceMemory, device: Device) -> None:
    """all_reduce_async begins after what the compute stream holds; later work there waits; the host does not."""
    # A copy from the device to memory that is not page-locked waits for it.
    compute, pointer, source, result = device.make_stream(), memory.blank(4000), own(), page_locked(device, 1000)
    with Held(device, compute):
        device.copy(pointer, source.ctypes.data, 4000, compute)
        plane.all_reduce_async(pointer, 4000, compute, dtype=F32)
        device.copy(result.ctypes.data, pointer, 4000, compute)
        assert not device.ready(compute)
        # The plane's own ordered stream has nothing to do with it.
        assert device.ready(plane.stream)
    memory.stream = compute
    memory.wait()
    assert (result == TOTAL).all()


def test_async_of_several_streams_in_one_group(plane: Any, memory: DeviceMemory, device: Device) -> None:
    """In a group each compute stream is ordered before and after its own operation."""
    streams = [device.make_stream() for _ in range(3)]
    pointers, source = [memory.blank(4000) for _ in streams], own()
    results = [page_locked(device, 1000) for _ in streams]
    with Held(device, streams[1]):
        for stream, pointer in zip(streams, pointers, strict=True):
            device.copy(pointer, source.ctypes.data, 4000, stream)
        plane.group_start()
        for stream, pointer in zip(streams, pointers, strict=True):
            plane.all_reduce_async(pointer, 4000, stream, dtype=F32)
        plane.group_end()
        for stream, pointer, result in zip(streams, pointers, results, strict=True):
            device.copy(result.ctypes.data, pointer, 4000, stream)
    for stream in streams:
        memory.stream = stream
        memory.wait()
    assert all((result == TOTAL).all() for result in results)


def test_any_thread_submits(plane: Any, memory: DeviceMemory, device: Device) -> None:
    """A thread without a current context submits as the first one does, and waits while another one has a group."""
    pointers = [memory.put(own()) for _ in range(3)]
    turns: list[str] = []

    def submit() -> None:
        plane.all_reduce_async(pointers[1], 4000, plane.stream, dtype=F32)
        plane.all_reduce(pointers[2], 4000, dtype=F32)
        plane.broadcast(pointers[2], 4, 0)
        turns.append("other thread")

    plane.group_start()
    thread = threading.Thread(target=submit, daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    plane.all_reduce(pointers[0], 4000, dtype=F32)
    turns.append("group")
    plane.group_end()
    thread.join(10)
    assert turns == ["group", "other thread"]
    assert all((memory.get(pointer, own()) == TOTAL).all() for pointer in pointers)


@pytest.mark.parametrize("count", [1, 4097])
def test_add_kernel(plane: Any, memory: DeviceMemory, device: Device, count: int) -> None:
    """With a kernel, and two ranks, sums of bfloat16 are exchanged and added; all others stay NCCL's."""
    try:
        module = device.call("cuModuleLoadData", b"STANDIN\0")
    except CUDAError:
        pytest.skip("needs the kernels of the stand-in")
    plane.set_add_kernel(int(device.call("cuModuleGetFunction", module, b"bf16_add_inplace")))
    half, whole = own(count).astype(ml_dtypes.bfloat16), own(count)
    pointers, other = [memory.put(half) for _ in range(4)], memory.put(whole)
    plane.all_reduce(pointers[0], half.nbytes)
    plane.all_reduce_async(pointers[1], half.nbytes, plane.stream)
    assert plane._connected == ({(1 - RANK, "send"), (1 - RANK, "recv")} if SIZE == 2 else set())
    plane.all_reduce(other, whole.nbytes, dtype=F32)
    plane.group_start()
    plane.all_reduce(pointers[2], half.nbytes)
    plane.barrier()
    plane.group_end()
    plane.set_add_kernel(0)
    plane.all_reduce(pointers[3], half.nbytes)
    assert all((memory.get(pointer, half).astype(np.float32) == TOTAL).all() for pointer in pointers)
    assert (memory.get(other, whole) == TOTAL).all()


# -- groups ----------------------------------------------------------------------------------------------------------


def test_wrong_argument_in_a_group(plane: Any, memory: DeviceMemory) -> None:
    """What is refused inside a group is not part of it, and leaves it open; NCCL begins its own at the end."""
    pointer = memory.put(own())
    plane.group_start()
    plane.all_reduce(pointer, 4000, dtype=F32)
    with pytest.raises(ValueError, match="stream must be"):
        plane.send_to(pointer, 4, 0, 12345)
    plane.group_end()
    assert (memory.get(pointer, own()) == TOTAL).all()
    assert nccl.close_leaked_groups(plane._library) == 0


# -- streams and devices ---------------------------------------------------------------------------------------------


def test_streams_that_are_refused(comm: Communicator, plane: Any, memory: DeviceMemory, device: Device) -> None:
    """No handle, the per-thread stream, and a stream of another context are refused; nothing is sent or poisoned."""
    context = device.call("cuCtxCreate", None, 0, device._device)
    foreign = int(device.call("cuStreamCreate", 1))
    device.make_current()
    pointer = memory.put(own())
    for stream, text in ((12345, "is none"), (2, "per-thread"), (foreign, "of another"), (-8, "is none")):
        with pytest.raises(ValueError, match=text):
            plane.all_reduce_async(pointer, 4000, stream)
        with pytest.raises(ValueError, match=text):
            comm.barrier(stream=stream)
    for wrong in (None, True, "stream"):
        with pytest.raises(TypeError, match="stream must be"):
            plane.all_reduce_async(pointer, 4000, wrong)
    device.call("cuCtxSetCurrent", context)
    for call in (lambda: plane.all_reduce(pointer, 4000, dtype=F32), lambda: plane.register_buffer(pointer, 4000)):
        with pytest.raises(ValueError, match="another package has set another device"):
            call()
    device.call("cuCtxDestroy", context)
    device.make_current()
    assert comm.sequence == 0 and works(plane, memory)


@pytest.mark.parametrize("mode", ["global", "thread local", "relaxed"])
def test_capture_is_refused_and_stays_valid(
    comm: Communicator, plane: Any, memory: DeviceMemory, device: Device, mode: str
) -> None:
    """Operations refuse a stream in capture; the capture, and a look at health meanwhile, harm nothing."""
    stream, pointer = device.make_stream(), memory.put(own())
    device.call("cuStreamBeginCapture", stream, device._driver.CUstreamCaptureMode(list(_MODES).index(mode)))
    device.fill(pointer, 0, 4, stream)
    for call in (
        lambda: plane.all_reduce_async(pointer, 4000, stream, dtype=F32),
        lambda: plane.send_to(pointer, 4, 0, stream),
        lambda: comm.barrier(stream=stream),
    ):
        with pytest.raises(ValueError, match="captured into a CUDA graph"):
            call()
    comm.check_async_error()
    assert plane.is_healthy()
    device.fill(pointer, 0, 4, stream)
    graph = device.call("cuStreamEndCapture", stream)
    assert int(graph)
    device.call("cuGraphDestroy", graph)
    assert comm.sequence == 0 and works(plane, memory)


_MODES = ("global", "thread local", "relaxed")


def test_second_device_is_refused(device: Device) -> None:
    """A process has one device."""
    with pytest.raises(CUDAError, match=f"uses cuda:{device.ordinal} already"):
        Device.of(device.ordinal + 1)
