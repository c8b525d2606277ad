"""The numbered checks, and what a check is given and gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from butter_mpi.communicator import Communicator
from butter_mpi.enums import DType, ReduceOp
from butter_mpi.selftest.data import Case

__all__ = ["Check", "Context"]


@dataclass(frozen=True, slots=True)
class Context:
    """What a check works with: the communicator, the agreed seed, and how to make a communicator of this rank alone."""

    comm: Communicator
    seed: int
    number: int
    alone: Callable[[], Communicator]

    def case(self, dtype: DType, count: int, op: ReduceOp | None = None) -> Case:
        """Return a case whose random numbers no other check has."""
        return Case(self.seed, self.number, dtype, count, op)

    def draw(self, below: int) -> int:
        """Return a random number that is the same on every rank."""
        return int(self.case(DType.UINT8, 0).random(below).integers(below))


def _always(_context: Context) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Parameters
    ----------
    number, id, title
        Stable over versions; a number is never given to another check.
    run : callable
        Called on every rank at the same time; yields the facts that are wrong on this rank.
    hindrance : callable
        Why it does not apply here, the same on every rank; empty: it does.
    faults : bool
        Whether it breaks the communicator on purpose, and so runs on request only.
    """

    number: int
    id: str
    title: str
    run: Callable[[Context], Iterable[str]]
    hindrance: Callable[[Context], str] = _always
    faults: bool = False
