"""Checks that break the communicator on purpose: ranks differ, all are told, and a reconnect makes it whole."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from butter_mpi.communicator import Communicator
from butter_mpi.enums import DType
from butter_mpi.errors import CollectiveMismatchError, CommunicatorBrokenError
from butter_mpi.selftest.checks import Context
from butter_mpi.selftest.rules import right_all_reduce

__all__ = ["hindrance", "mismatch", "reconnect"]

_BOUND_SECONDS = 5.0
_SITE = re.compile(r"faults\.py:\d+")


@dataclass(frozen=True, slots=True)
class _Arrays:
    """What the calls below take; nobody looks at what comes of it."""

    narrow: Any
    wide: Any


Call = Callable[[Communicator, _Arrays], None]

# Each pair of calls stands on lines of its own: the error must name both.
_PAIRS: tuple[tuple[str, Call, Call], ...] = (
    (
        "operation",
        lambda comm, given: comm.all_reduce(given.narrow),
        lambda comm, given: comm.barrier(),
    ),
    (
        "count",
        lambda comm, given: comm.all_reduce(given.narrow),
        lambda comm, given: comm.all_reduce(given.narrow[:3]),
    ),
    (
        "dtype",
        lambda comm, given: comm.all_reduce(given.narrow),
        lambda comm, given: comm.all_reduce(given.wide),
    ),
    (
        "reduction",
        lambda comm, given: comm.all_reduce(given.narrow),
        lambda comm, given: comm.all_reduce(given.narrow, op="max"),
    ),
    (
        "root",
        lambda comm, given: comm.broadcast(given.narrow, 0),
        lambda comm, given: comm.broadcast(given.narrow, 1),
    ),
)


def hindrance(context: Context) -> str:
    """Return why the communicator must not be broken here."""
    if context.comm.world_size == 1:
        return "one rank has nobody to differ from"
    if context.comm.settings.action == "abort":
        return 'BUTTER_MPI_ACTION is "abort", so the first fault would end the job'
    return ""


def _arrays(context: Context) -> _Arrays:
    return _Arrays(context.zeros(DType.FLOAT32, 4).array, context.zeros(DType.FLOAT64, 4).array)


def _broken(call: Call, comm: Communicator, given: _Arrays) -> CommunicatorBrokenError | None:
    try:
        call(comm, given)
    except CommunicatorBrokenError as error:
        return error
    return None


def mismatch(context: Context) -> Iterator[str]:
    """Whatever one rank submits differently, every rank raises the mismatch at once, with both call sites."""
    comm, given = context.comm, _arrays(context)
    for what, usual, other in _PAIRS:
        odd = context.draw(comm.world_size)
        began = time.monotonic()
        error = _broken(other if comm.rank == odd else usual, comm, given)
        seconds = time.monotonic() - began
        if not isinstance(error, CollectiveMismatchError):
            yield f"another {what} on rank {odd} gave {error!r}, expected CollectiveMismatchError"
        elif len(set(_SITE.findall(error.message))) < 2:
            yield f"another {what} on rank {odd}: the error does not name both call sites: {error.message}"
        if seconds > _BOUND_SECONDS:
            yield f"another {what} on rank {odd} was told after {seconds:.1f} s"
        comm.attempt_reconnect()
        yield from right_all_reduce(context, f"another {what} on rank {odd} and a reconnect")


def reconnect(context: Context) -> Iterator[str]:
    """Refused by a broken communicator, everything with the first cause; healed by a reconnect, and numbers go on."""
    comm, given = context.comm, _arrays(context)
    _, usual, other = _PAIRS[0]
    first = _broken(other if comm.rank == 0 else usual, comm, given)
    if comm.is_healthy():
        yield "a broken communicator says that it is healthy"
    for call in (usual, other):
        again = _broken(call, comm, given)
        if first is None or again is None or again.message != first.message:
            yield f"an operation on a broken communicator gave {again!r}, expected the first cause: {first!r}"
    before = comm.sequence
    comm.attempt_reconnect()
    if not comm.is_healthy():
        yield "it is not healthy after the reconnect"
    said = comm.all_gather_json([before, comm.sequence])
    if {after for _, after in said} != {max(number for number, _ in said)}:
        yield f"(number before, number after the reconnect) on each rank: {said}; expected the largest before"
    yield from right_all_reduce(context, "a reconnect")
