"""Checks of what only the nccl plane has: streams, a kernel of ours, registered memory, graph capture."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from butter_mpi.communicator import Communicator
from butter_mpi.cuda import load_driver
from butter_mpi.enums import DType, ReduceOp
from butter_mpi.errors import ButterError, CUDAError, NotSupportedError
from butter_mpi.selftest.checks import Context
from butter_mpi.selftest.collectives import reduced
from butter_mpi.selftest.data import Buffer, Values
from butter_mpi.selftest.places import DeviceArray, DevicePlace
from butter_mpi.selftest.rules import right_all_reduce

__all__ = [
    "add_path",
    "capture",
    "hindrance",
    "hindrance_add_path",
    "hindrance_registered",
    "producer_stream",
    "registered",
]

_COUNT = 2**20 + 1
_AHEAD_SECONDS = (0.02, 0.1, 0.5)
_AHEAD_BYTES = 2**25
# Fewer than a stream takes before the host has to wait for room.
_MOST_AHEAD = 500
_TRIAL = 32
_ADD_COUNTS = (1, 3, 257, _COUNT)
_ALLOCATES, _ALIGNMENT = 21900, 4096


def hindrance(context: Context) -> str:
    """Return why there is nothing of NCCL to check."""
    return "" if context.comm.plane == "nccl" else f"it is for the nccl plane, and plane {context.comm.plane} runs"


@contextmanager
def _compute_place(comm: Communicator) -> Iterator[DevicePlace]:
    """Give memory on a stream of its own, as a program computes on; where the body raises, work may still use both."""
    device = DevicePlace(comm).device
    place = DevicePlace(comm, device.make_stream())
    yield place
    place.close()
    device.destroy_stream(place.stream)


# -- between a producer and a consumer --------------------------------------------------------------------------------

Reduce = Callable[[Communicator, DeviceArray], None]


def _beside(comm: Communicator, array: DeviceArray) -> None:
    assert array.stream is not None
    comm.backend.all_reduce_async(array.pointer, array.nbytes, array.stream, dtype=DType.FLOAT32)


def producer_stream(context: Context) -> Iterator[str]:
    """Reduce float32 on the producer's own stream, then beside it, everything queued before the first byte is there."""
    with _compute_place(context.comm) as place:
        yield from _between(context, place, "all_reduce on the stream of its array", lambda comm, x: comm.all_reduce(x))
        yield from _between(context, place, "all_reduce_async", _beside)


def _between(context: Context, place: DevicePlace, what: str, reduce: Reduce) -> Iterator[str]:
    """Queue work, a producer, the reduction, a consumer, and one who writes over it all; then look.

    Were the reduction not ordered between its neighbours it would be done long before the work ahead. A host that waits
    shows by the work ahead being done when the last call returns, however much of it there was.
    """
    comm = context.comm
    values = Values(context.case(DType.FLOAT32, _COUNT, ReduceOp.SUM), comm.world_size)
    own, expected = values.of(comm.rank), values.expected()
    source, work, result = (Buffer(place, DType.FLOAT32, _COUNT) for _ in range(3))
    poison = expected.values.astype(own.dtype)
    source.fill(own)
    ahead = place.device.make_event()
    for seconds in _AHEAD_SECONDS:
        work.poison(poison)
        result.poison(poison)
        _queue_work(place, seconds)
        place.device.record(ahead, place.stream)
        place.copy(work.array, source.array)
        reduce(comm, work.array)
        in_time = not place.device.event_ready(ahead)
        place.copy(result.array, work.array)
        work.poison(poison)
        yield from reduced(what, result, expected)
        if all(comm.all_gather_json(in_time)):
            break
    else:
        yield f"{what}: the host waits: all of {seconds:g} s of work on the stream was done when the calls returned"
    place.device.destroy_event(ahead)


def _queue_work(place: DevicePlace, seconds: float) -> None:
    """Put copies on the stream that keep the device at work for about that long."""
    one, other = (place.array(np.empty(_AHEAD_BYTES, np.uint8)) for _ in range(2))
    place.wait()
    began = time.monotonic()
    for _ in range(_TRIAL):
        place.copy(one, other)
    place.wait()
    for _ in range(min(_MOST_AHEAD, math.ceil(_TRIAL * seconds / (time.monotonic() - began)))):
        place.copy(one, other)


# -- two ranks: send, receive and add ---------------------------------------------------------------------------------


def _add_kernel(place: DevicePlace) -> int:
    return int(importlib.import_module("butter_mpi.kernels").bf16_add_inplace(place.device))


def hindrance_add_path(context: Context) -> str:
    """Return why two ranks cannot add by the kernel of this package: also that it cannot be compiled on some rank."""
    if context.comm.plane != "nccl":
        return hindrance(context)
    assert isinstance(context.place, DevicePlace)
    if context.comm.world_size != 2:
        return f"it is for two ranks, here are {context.comm.world_size}"
    reason = ""
    try:
        _add_kernel(context.place)
    except (ImportError, NotSupportedError) as error:
        reason = f"no kernel: {error}"
    except ButterError:
        # The check itself will fail with it.
        pass
    return next(filter(None, context.comm.all_gather_json(reason)), "")


def add_path(context: Context) -> Iterator[str]:
    """Sum bfloat16 by the kernel, in and out of place and beside the stream; other types go on as ever."""
    comm, place = context.comm, context.place
    assert isinstance(place, DevicePlace)
    kernel, error = 0, ""
    try:
        kernel = _add_kernel(place)
    except ButterError as failure:
        error = f"no kernel: {failure}"
        yield error
    if any(comm.all_gather_json(error)):
        return
    place.plane.set_add_kernel(kernel)
    for count in _ADD_COUNTS:
        case = context.case(DType.BFLOAT16, count, ReduceOp.SUM)
        values = Values(case, comm.world_size)
        own, expected = values.of(comm.rank), values.expected()
        send, recv = context.buffer(case.dtype, count), context.buffer(case.dtype, count)
        send.fill(own)
        recv.poison(expected.values.astype(own.dtype))
        comm.all_reduce(send.array, recv.array)
        yield from reduced(f"{case}, out of place", recv, expected)
        comm.all_reduce(send.array)
        yield from reduced(f"{case}, in place", send, expected)
        send.fill(own)
        place.plane.all_reduce_async(send.array.pointer, send.array.nbytes, place.stream)
        yield from reduced(f"{case}, all_reduce_async", send, expected)
    yield from right_all_reduce(context, "float32 with the kernel set")
    place.plane.set_add_kernel(0)


# -- memory -----------------------------------------------------------------------------------------------------------


def hindrance_registered(context: Context) -> str:
    """Return why memory cannot be registered."""
    if context.comm.plane != "nccl":
        return hindrance(context)
    library = context.comm.records[0]["library"]
    if library["version"] >= _ALLOCATES:
        return ""
    return f"NCCL has an allocator and registration from 2.19 on, this is {library['version_text']}"


def registered(context: Context) -> Iterator[str]:
    """Reduce in memory of NCCL's allocator that is registered; what was given back is not taken again."""
    comm = context.comm
    plane: Any = comm.backend
    place = DevicePlace(comm, allocate=plane.symmetric_alloc, free=plane.symmetric_free)
    values = Values(context.case(DType.FLOAT32, _COUNT, ReduceOp.SUM), comm.world_size)
    buffer = Buffer(place, DType.FLOAT32, _COUNT)
    whole = buffer.array.block.pointer
    if whole % _ALIGNMENT:
        yield f"symmetric_alloc gave {whole:#x}, which is not aligned to {_ALIGNMENT} bytes"
    guard = buffer.array.pointer - whole
    handle = plane.register_buffer(whole, guard + buffer.array.nbytes + guard)
    buffer.fill(values.of(comm.rank))
    comm.all_reduce(buffer.array)
    yield from reduced("all_reduce in registered memory", buffer, values.expected())
    plane.deregister_buffer(handle)
    yield from _taken("a handle that was given back", lambda: plane.deregister_buffer(handle))
    place.close()
    yield from _taken("memory that was freed", lambda: plane.symmetric_free(whole))
    yield from right_all_reduce(context, "giving registered memory back")


def _taken(what: str, call: Callable[[], Any]) -> Iterator[str]:
    """Yield that a wrong argument was taken, if it was."""
    try:
        call()
    except ValueError:
        return
    yield f"{what} was not refused"


# -- graph capture ----------------------------------------------------------------------------------------------------


def capture(context: Context) -> Iterator[str]:
    """Refuse a stream that is captured into a graph: no number is taken, nothing is poisoned, the capture goes on."""
    comm, driver = context.comm, load_driver()
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    with _compute_place(comm) as place:
        buffer = Buffer(place, DType.FLOAT32, 3)
        buffer.fill(0)
        place.wait()
        before = comm.sequence
        place.device.call("cuStreamBeginCapture", place.stream, mode)
        yield from _taken("all_reduce on a captured stream", lambda: comm.all_reduce(buffer.array))
        yield from _taken("all_reduce_async beside one", lambda: _beside(comm, buffer.array))
        yield from _taken("a barrier on one", lambda: comm.barrier(stream=place.stream))
        yield from _end_capture(place.device, place.stream, buffer.array)
        if comm.sequence != before:
            yield f"refused operations took {comm.sequence - before} numbers"
        yield from right_all_reduce(context, "a capture")


def _end_capture(device: Any, stream: int, array: DeviceArray) -> Iterator[str]:
    """End a capture after one more step, and yield how it is not valid; the stream is an ordinary one again."""
    steps: tuple[Callable[[], Any], ...] = (
        lambda: device.fill(array.pointer, 0, array.nbytes, stream),
        lambda: device.call("cuGraphDestroy", device.call("cuStreamEndCapture", stream)),
    )
    for step in steps:
        try:
            step()
        except CUDAError as error:
            yield f"the capture did not stay valid: {error}"
