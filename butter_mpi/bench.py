"""Host time of one all_reduce: what each layer adds to the C call, as ratios of one run, and what each feature costs.

``mpirun -np 2 python -m butter_mpi.bench`` on GPUs (or ``--share-gpu`` on one); like the selftest it sets the policy
variables where they are unset. Every rank makes the same calls in the same order; the variants take turns, so that a
machine that gets slower meets all of them. Calls are put on a stream that is kept busy meanwhile: their host time is
then that of putting them there, whether the device is quick or not. The data is checked first.
"""

from __future__ import annotations

import ctypes
import itertools
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from butter_mpi import nccl
from butter_mpi.benchmarking import Array, command_line, parsed, run, wait
from butter_mpi.collectives import call_site
from butter_mpi.communicator import Communicator
from butter_mpi.cuda import check, load_driver, prepared
from butter_mpi.device import Device
from butter_mpi.enums import DType, ReduceOp
from butter_mpi.errors import ButterError
from butter_mpi.lane import LANE
from butter_mpi.recorder import Recorder

__all__ = ["main"]

_COUNT = 16
# No more calls than every driver takes on a stream that stands still.
_CALLS, _ROUNDS = 100, 25
_LOOPS, _REPEATS = 200, 200
_BUSY_MICROSECONDS = 10_000
_BARE = "ctypes, arguments prepared"
_GRAPH = "plan with a graph"
# The host waits in a launch where more are pending on a stream.
_LAUNCHES = 20
_NOTHING, _NUMBER, _RECORD = "nothing", "a new number", "record"


def _keep_busy(stream: int) -> None:
    """Let the stream stand still for a while, by a C function that needs no interpreter."""
    sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value
    arguments = [ctypes.c_void_p.from_param(value) for value in (stream, sleep, _BUSY_MICROSECONDS)]
    status = prepared("cuLaunchHostFunc", *arguments)()
    check("cuLaunchHostFunc", load_driver().CUresult(status))


def _check(comm: Communicator, device: Device, array: Array, stream: int) -> None:
    """Raise unless the sum of ones is the world size: before that its speed means nothing."""
    host = (ctypes.c_float * _COUNT)(*[1.0] * _COUNT)
    device.copy(array.pointer, ctypes.addressof(host), ctypes.sizeof(host), stream)
    comm.all_reduce(array, stream=stream)
    device.copy(ctypes.addressof(host), array.pointer, ctypes.sizeof(host), stream)
    wait(comm, device, stream)
    if list(host) != [float(comm.world_size)] * _COUNT:
        raise ButterError(f"all_reduce of ones gave {list(host)}, expected {comm.world_size} everywhere")


def _variants(comm: Communicator, array: Array, stream: int) -> dict[str, Callable[[], Any]]:
    plane: Any = comm.backend
    library, handle = plane.native()
    dtype, op, at = DType.FLOAT32, ReduceOp.SUM, array.pointer
    arguments = (at, at, _COUNT, dtype.nccl, op.nccl, handle, stream)
    typed_call = library.function("ncclAllReduce")
    graph = comm.plan_all_reduce(array, stream=stream, graph=True)
    return {
        _BARE: nccl.prepared(library, "ncclAllReduce", *arguments),
        "ctypes, arguments typed": lambda: typed_call(*arguments),
        "plan": comm.plan_all_reduce(array, stream=stream),
        **({_GRAPH: graph} if graph.graph else {}),
        "backend.all_reduce": lambda: plane.all_reduce(at, 4 * _COUNT, dtype=dtype),
        "Communicator.all_reduce": lambda: comm.all_reduce(array, stream=stream),
    }


def _measure(
    comm: Communicator, device: Device, stream: int, variants: Mapping[str, Callable[[], Any]]
) -> dict[str, list[float]]:
    """Return the mean host time of a call in each round, in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(_ROUNDS + 1):
        for name, call in variants.items():
            at_once = _LAUNCHES if name == _GRAPH else _CALLS
            elapsed = sum(_timed(comm, device, stream, call, at_once) for _ in range(_CALLS // at_once))
            if number:  # the first round warms up
                times[name].append(1e6 * elapsed / _CALLS)
    return times


def _timed(comm: Communicator, device: Device, stream: int, call: Callable[[], Any], calls: int) -> float:
    """Return the seconds of calls on a stream that stands still meanwhile."""
    comm.all_gather_json(None)
    _keep_busy(stream)
    began = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = time.perf_counter() - began
    wait(comm, device, stream)
    return elapsed


def _features(comm: Communicator, array: Array, stream: int, recorder: Recorder) -> dict[str, Callable[[], Any]]:
    """Return what each feature of a submission does, as the path does it, and first of all what is not the path's.

    That is nothing, and a new number, which the path has at hand where the record takes it.
    """
    plane: Any = comm.backend
    at, kind = array.pointer, "all_reduce"
    facts = (DType.FLOAT32, at, at, ReduceOp.SUM, None, None, call_site(), stream, False, False, False)
    operation = plane.operation((kind, _COUNT, *facts))
    numbered, numbers = (operation, plane.sequence), itertools.count(1)

    def health() -> None:
        state = plane.health
        if state.cause is not None or state.closed:
            plane._refuse(kind)

    def number() -> None:
        plane.sequence = plane.sequence + 1

    def mark() -> None:
        # The pair is made to be executed.
        outer = plane._flight
        if outer is not None:
            plane._suspended.append(outer)
        plane._flight = numbered
        plane._flight = outer
        if outer is not None:
            plane._suspended.pop()

    def turn() -> None:
        LANE.take(plane.who, kind, plane.deadline)
        LANE.give()

    return {
        _NOTHING: lambda: None,
        _NUMBER: lambda: next(numbers),
        "health": health,
        "sequence": number,
        "in-flight mark": mark,
        "call site": lambda: call_site(1),
        _RECORD: lambda: recorder.write(operation, next(numbers)),
        "turn on the lane": turn,
        "capture and context": lambda: plane._admit(operation),
    }


def _costs(comm: Communicator, device: Device, array: Array, stream: int) -> dict[str, tuple[float, float]]:
    """Return what each feature costs, in nanoseconds, alone in a loop and before a bare C call.

    The least of many: what other processes take of this machine is none of theirs. The recorder is another one than the
    watcher's, and numbers are as before in the end.
    """
    plane: Any = comm.backend
    sequence, recorder = plane.sequence, Recorder(plane.deadline)
    features = _features(comm, array, stream, recorder)
    bare = _variants(comm, array, stream)[_BARE]
    both = _measure(comm, device, stream, {name: _followed(first, bare) for name, first in features.items()})
    alone = {name: min(timeit.repeat(call, number=_LOOPS, repeat=_REPEATS)) for name, call in features.items()}
    plane.sequence = sequence
    recorder.close()
    least = {name: (1e9 * alone[name] / _LOOPS, 1e3 * min(both[name])) for name in features}
    nothing, number = least.pop(_NOTHING), least.pop(_NUMBER)
    without = {name: number if name == _RECORD else nothing for name in least}
    return {name: (max(0.0, a - without[name][0]), max(0.0, b - without[name][1])) for name, (a, b) in least.items()}


def _followed(first: Callable[[], Any], second: Callable[[], Any]) -> Callable[[], Any]:
    def both() -> None:
        first()
        second()

    return both


def _table(times: dict[str, list[float]], costs: dict[str, tuple[float, float]], comm: Communicator) -> str:
    """Return the table: the median of the rounds, and the least, in which other processes had least part."""
    floor = next(iter(times.values()))
    transport = ", ".join(getattr(comm.backend, "transport", {})) or "none"
    lines = [f"host time of one all_reduce of {_COUNT} float32, {comm.world_size} ranks, transport {transport}"]
    lines[0] += f"; median and least of {_ROUNDS} rounds"
    for name, some in times.items():
        figures = [(kind(some), kind(some) / kind(floor)) for kind in (statistics.median, min)]
        lines.append(f"  {name:28}" + "".join(f" {value:8.2f} us  {ratio:6.2f} x" for value, ratio in figures))
    lines += ["", "what each feature of a submission costs of that: alone in a loop, and before a bare C call"]
    first_five = [sum(column) for column in zip(*list(costs.values())[:5], strict=True)]
    rows = {**costs, "the first five together": first_five}
    lines += [f"  {name:28} {alone:8.0f} ns {before:8.0f} ns" for name, (alone, before) in rows.items()]
    return "\n".join(lines)


def _print(comm: Communicator) -> None:
    plane: Any = comm.backend
    array = Array(plane.device, _COUNT, plane.stream)
    _check(comm, plane.device, array, plane.stream)
    times = _measure(comm, plane.device, plane.stream, _variants(comm, array, plane.stream))
    costs = _costs(comm, plane.device, array, plane.stream)
    if comm.rank == 0:
        print(_table(times, costs, comm))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; rank 0 prints the table.

    Parameters
    ----------
    arguments : sequence of str, optional
        The command line.

    Returns
    -------
    int
        0; 2 for a wrong argument; 3 where there is no nccl plane.
    """
    options = parsed("bench", command_line("bench", __doc__ or ""), arguments)
    return options if isinstance(options, int) else run("bench", options, _print)


if __name__ == "__main__":
    sys.exit(main())
