"""Checks of the rules around the operations: identity, order, sequence, refusals, one rank alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from butter_mpi.enums import DType, ReduceOp
from butter_mpi.planes import CommBackend
from butter_mpi.selftest.checks import Context
from butter_mpi.selftest.data import Buffer, Expected, Values, differing
from butter_mpi.selftest.places import DeviceArray, place_of

__all__ = ["alone", "hindrance_alone", "identity", "order", "refusals", "right_all_reduce", "sequence"]

_ROUNDS = 50
_PER_THREAD_STREAM, _NO_STREAM = 2, 3


def right_all_reduce(context: Context, what: str) -> Iterator[str]:
    """Yield what is wrong with one small all_reduce."""
    comm = context.comm
    values = Values(context.case(DType.FLOAT32, 3, ReduceOp.SUM), comm.world_size)
    buffer = context.buffer(DType.FLOAT32, 3)
    buffer.fill(values.of(comm.rank))
    comm.all_reduce(buffer.array)
    wrong = differing(buffer.get(), values.expected())
    if wrong:
        yield f"all_reduce after {what}: {wrong}"


def identity(context: Context) -> Iterator[str]:
    """Ranks are 0 to world size - 1, one each, the same by every way to ask."""
    comm = context.comm
    said = comm.all_gather_json([comm.rank, comm.world_size, comm.plane])
    expected = [[rank, len(said), comm.plane] for rank in range(len(said))]
    if said != expected:
        yield f"ranks say (rank, world size, plane) {said}, expected {expected}"
    backend: Any = comm.backend
    if (backend.rank(), backend.world_size()) != (comm.rank, comm.world_size):
        yield f"the backend says rank {backend.rank()} of {backend.world_size()}"
    if not isinstance(backend, CommBackend):
        yield f"{type(backend).__name__} lacks methods of a backend"
    record = comm.records[comm.rank]
    if (record["rank"], record["world_size"]) != (comm.rank, comm.world_size):
        yield f"its preflight record is of rank {record['rank']} of {record['world_size']}"


def sequence(context: Context) -> Iterator[str]:
    """Each collective takes one number; pairs and the control plane take none; ranks agree."""
    comm, ranks = context.comm, context.comm.world_size
    small, other, large = (context.zeros(DType.INT32, count).array for count in (2, 2, 2 * ranks))

    def pair() -> None:
        with comm.group():
            comm.send(small, (comm.rank + 1) % ranks)
            comm.recv(other, (comm.rank - 1) % ranks)

    def grouped() -> None:
        with comm.group():
            comm.all_reduce(small)
            comm.barrier()

    steps: tuple[tuple[str, int, Callable[[], Any]], ...] = (
        ("all_reduce", 1, lambda: comm.all_reduce(small)),
        ("broadcast", 1, lambda: comm.broadcast(small, ranks - 1)),
        ("all_gather", 1, lambda: comm.all_gather(small, large)),
        ("reduce_scatter", 1, lambda: comm.reduce_scatter(large, small)),
        ("barrier", 1, comm.barrier),
        ("an empty all_reduce", 1, lambda: comm.all_reduce(small[:0])),
        ("a group of two", 2, grouped),
        ("send and recv", 0, pair),
        ("all_gather_json", 0, lambda: comm.all_gather_json(comm.rank)),
    )
    for what, numbers, step in steps:
        before = comm.sequence
        step()
        if comm.sequence - before != numbers:
            yield f"{what} took {comm.sequence - before} numbers, expected {numbers}"
    said = comm.all_gather_json(comm.sequence)
    if set(said) != {comm.sequence}:
        yield f"ranks are at different numbers: {said}"


def order(context: Context) -> Iterator[str]:
    """Results are there for whoever uses them next, and a buffer may be used again after the call."""
    comm = context.comm
    case = context.case(DType.UINT64, 257)
    states: list[Any] = [case.raw(rank).copy() for rank in range(comm.world_size)]
    mine, total = context.buffer(case.dtype, case.count), context.buffer(case.dtype, case.count)
    mine.fill(states[comm.rank])
    for number in range(_ROUNDS):
        comm.all_reduce(mine.array, total.array)
        mine.fill(np.iinfo(np.uint64).max)
        mine.fill(total.get() * np.uint64(3) + np.uint64(comm.rank + number))
        reference = np.sum(states, axis=0, dtype=np.uint64)
        states = [reference * np.uint64(3) + np.uint64(rank + number) for rank in range(comm.world_size)]
    wrong = differing(mine.get(), Expected(states[comm.rank], 0.0))
    if wrong:
        yield f"after {_ROUNDS} rounds of all_reduce and compute: {wrong}"


Calls = tuple[tuple[str, Callable[[], Any]], ...]


def _refused_calls(context: Context) -> Calls:
    comm, ranks = context.comm, context.comm.world_size
    good, more = context.zeros(DType.FLOAT32, 4).array, context.zeros(DType.FLOAT32, 4 * ranks + 1).array
    wide, long = context.zeros(DType.FLOAT64, 4).array, context.zeros(DType.FLOAT32, 8).array
    fixed = context.place.read_only(context.zeros(DType.FLOAT32, 4).array)
    return (
        ("an element type without operations", lambda: comm.all_reduce(wide.view(np.dtype("V8")))),
        ("foreign byte order", lambda: comm.all_reduce(good.view(good.dtype.newbyteorder()))),
        ("a strided array", lambda: comm.all_reduce(long[::2])),
        ("a reversed array", lambda: comm.broadcast(good[::-1])),
        ("a read-only result", lambda: comm.all_reduce(good, fixed)),
        ("buffers that overlap", lambda: comm.all_reduce(more[:4], more[1:5])),
        ("two element types", lambda: comm.all_reduce(good, wide)),
        ("another count of results", lambda: comm.all_reduce(good, long[:5])),
        ("a count with a remainder", lambda: comm.reduce_scatter(more, good)),
        ("too small a result of all_gather", lambda: comm.all_gather(good, more[: 4 * ranks - 1])),
        ("an unknown operator", lambda: comm.all_reduce(good, op="median")),
        ("a root out of range", lambda: comm.broadcast(good, ranks)),
        ("a peer out of range", lambda: comm.send(good, -1)),
        ("a list", lambda: comm.all_reduce([1.0, 2.0])),
        ("a stream that is none", lambda: comm.all_reduce(good, stream="first")),
        *(_refused_on_device(context, good) if context.place.on_device else _refused_on_host(context)),
    )


def _refused_on_host(context: Context) -> Calls:
    comm, host = context.comm, np.zeros(4, np.float32)
    device = DeviceArray(host, host.ctypes.data, 4, host.dtype, None)
    return (
        ("an array in device memory", lambda: comm.all_reduce(device)),
        ("a stream where there is none", lambda: comm.barrier(stream=1)),
    )


def _refused_on_device(context: Context, good: DeviceArray) -> Calls:
    comm, host = context.comm, np.zeros(4, np.float32)
    return (
        ("an array in host memory", lambda: comm.all_reduce(host)),
        ("host memory that is called device memory", lambda: comm.broadcast(replace(good, pointer=host.ctypes.data))),
        ("an array that names no stream", lambda: comm.all_reduce(replace(good, stream=None))),
        ("the stream of one thread", lambda: comm.all_reduce(good, stream=_PER_THREAD_STREAM)),
        ("a number that is no stream", lambda: comm.barrier(stream=_NO_STREAM)),
    )


def refusals(context: Context) -> Iterator[str]:
    """Wrong arguments are refused before anything is sent: no number is taken and nothing is poisoned."""
    comm = context.comm
    for what, call in _refused_calls(context):
        before = comm.sequence
        try:
            call()
        except (TypeError, ValueError):
            if comm.sequence != before:
                yield f"{what} was refused, but took a number"
        else:
            yield f"{what} was not refused"
        yield from right_all_reduce(context, what)
    before = comm.sequence
    try:
        with comm.group():
            comm.barrier()
            raise _BodyError
    except _BodyError:
        if comm.sequence != before:
            yield "a group whose body raised took a number"
    yield from right_all_reduce(context, "a group whose body raised")
    if not comm.is_healthy():
        yield "the communicator is not healthy"


class _BodyError(Exception):
    """What the body of a group raises."""


def hindrance_alone(context: Context) -> str:
    """Return why no communicator of one rank can be made here."""
    required = context.comm.settings.require_transport
    return f"transport {required} is required, and one rank has none" if required else ""


def alone(context: Context) -> Iterator[str]:
    """One rank alone: results, numbers and errors as with many, nothing sent."""
    with context.alone() as solo:
        if (solo.rank, solo.world_size, solo.plane) != (0, 1, "solo"):
            yield f"it is rank {solo.rank} of {solo.world_size} on plane {solo.plane}"
        values = Values(context.case(DType.BFLOAT16, 5, ReduceOp.AVG), 1)
        place = place_of(solo)
        own, result = Buffer(place, DType.BFLOAT16, 5), Buffer(place, DType.BFLOAT16, 5)
        own.fill(values.of(0))
        result.poison(values.of(0))
        solo.all_reduce(own.array, result.array, op="avg")
        solo.barrier()
        wrong = differing(result.get(), values.expected())
        if wrong:
            yield f"all_reduce: {wrong}"
        if solo.sequence != 2:
            yield f"two collectives took {solo.sequence} numbers"
        try:
            solo.all_reduce(own.array[::2])
        except ValueError:
            pass
        else:
            yield "a strided array was not refused"
        place.close()
