"""Ranks that come together after a failure: who goes on, decided in one place.

Pure: who came, who is expected and how much time passed is handed in, the decision comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from butter_mpi.findings import by_value, ranks_text

__all__ = ["RECONNECT", "SHRINK", "Agreed", "Gathering", "Refused", "outvoted"]

SHRINK, RECONNECT = "shrink", "attempt_reconnect"


@dataclass(frozen=True, slots=True)
class Agreed:
    """Who goes on, from which numbers: the largest of any of them."""

    what: str
    ranks: tuple[int, ...]
    sequence: int
    pairs: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Why these ranks do not go on, as an error of this class.

    ``lost`` are the ranks that are to blame; ``alone``: others may go on without these.
    """

    error: str
    ranks: tuple[int, ...]
    text: str
    lost: tuple[int, ...] = ()
    alone: bool = False


def outvoted(going: Collection[int], silent: Collection[int]) -> bool:
    """Return whether ranks must not go on, since those that they do not hear may live, and go on themselves.

    Of two parts that do not hear one another at most one may: that of more ranks; of equally many, that of the lowest.

    Parameters
    ----------
    going : collection of int
        The ranks that would go on.
    silent : collection of int
        Those of which is not known what became of them.
    """
    if len(going) != len(silent):
        return len(going) < len(silent)
    return bool(silent) and min(silent) < min(going)


@dataclass(frozen=True, slots=True)
class _Caller:
    what: str
    sequence: int
    pairs: int


class Gathering:
    """The ranks that have come, and what each of them calls; after a decision the next gathering begins."""

    def __init__(self) -> None:
        self._come: dict[int, _Caller] = {}
        # What ranks call that do not wait here.
        self._elsewhere: dict[int, str] = {}
        self._limit = self._passed = 0.0

    @property
    def open(self) -> bool:
        """Whether a rank has come that waits for a decision."""
        return bool(self._come)

    def come(self, rank: int, what: str, sequence: int, pairs: int, limit: float) -> None:
        """Let a rank come, which waits for at most `limit` seconds; the shortest limit counts."""
        self._limit = min(self._limit, limit) if self._come else limit
        self._passed = self._passed if self._come else 0.0
        self._come[rank] = _Caller(what, sequence, pairs)
        self._elsewhere.pop(rank, None)

    def elsewhere(self, rank: int, what: str) -> None:
        """Note what a rank calls that meets the others in another way; empty: it waits for nobody any more."""
        self._elsewhere.pop(rank, None)
        self._come.pop(rank, None)
        if what:
            self._elsewhere[rank] = what

    def look(
        self, expected: Collection[int], lost: Mapping[int, str], passed: float, name: Callable[[int], str]
    ) -> list[Agreed | Refused]:
        """Return what is decided now.

        Parameters
        ----------
        expected : collection of int
            The ranks that can go on.
        lost : mapping of int to str
            The others, each with what became of it.
        passed : float
            Seconds since the last look.
        name : callable
            Returns a rank as messages name it.

        Returns
        -------
        list of Agreed or Refused
            For each rank that came, at most one decision; empty: ranks are waited for.
        """
        self._come = {rank: caller for rank, caller in self._come.items() if rank in expected}
        decided: list[Agreed | Refused] = []
        if lost:
            decided += self._refuse_reconnects(lost)
        if not self._come:
            return decided
        self._passed += passed
        decision = self._decision(expected, bool(lost), name)
        if decision is not None:
            decided.append(decision)
            self._come.clear()
        return decided

    def _refuse_reconnects(self, lost: Mapping[int, str]) -> list[Agreed | Refused]:
        """Refuse those that need every rank, while others may go on without."""
        ranks = tuple(sorted(rank for rank, caller in self._come.items() if caller.what == RECONNECT))
        for rank in ranks:
            self._come.pop(rank)
            self._elsewhere[rank] = RECONNECT
        text = f"{'; '.join(lost.values())}. Every rank must take part"
        return [Refused("PeerLostError", ranks, text, tuple(sorted(lost)))] if ranks else []

    def _decision(
        self, expected: Collection[int], any_lost: bool, name: Callable[[int], str]
    ) -> Agreed | Refused | None:
        ranks = tuple(sorted(self._come))
        calls = {rank: caller.what for rank, caller in self._come.items()}
        others = {rank: what for rank, what in self._elsewhere.items() if rank in expected}
        # Where a rank is lost, who tries to reconnect fails soon, and can come here then.
        every = calls if any_lost else {**others, **calls}
        if len(set(every.values())) > 1:
            said = "; ".join(f"{ranks_text(who)} called {what}()" for what, who in by_value(every.items()).items())
            return Refused("CommunicatorBrokenError", tuple(sorted(every)), f"{said}. All must call the same")
        missing = [rank for rank in sorted(expected) if rank not in self._come]
        if not missing:
            callers = self._come.values()
            return Agreed(
                calls[ranks[0]], ranks, max(one.sequence for one in callers), max(one.pairs for one in callers)
            )
        if self._passed < self._limit:
            return None
        said = ", ".join(f"{name(rank)} ({_did(others.get(rank))})" for rank in missing)
        what = calls[ranks[0]]
        text = f"no answer within {self._passed:.1f} s from {said}. Every rank that lives must call {what}() together"
        return Refused("CollectiveTimeoutError", ranks, text, tuple(missing))


def _did(what: str | None) -> str:
    return f"it called {what}()" if what else "it has not called it"
