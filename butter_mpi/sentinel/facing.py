"""Sends and receives between ranks of different nodes: whose pairs do not fit, and who waits for whom.

The two nodes of a pair tell one another where their sides of it stand: what the rank submitted last there, with its
records. They do so only of sides that stand still with more than the other one is known to have, and where they are
asked by such: pairs that move cost nothing. Records of one number are held against one another where they meet; a rank
that has submitted more than its peer waits for that one, as long as its node says so. Pure: messages are handed in and
out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from butter_mpi.recorder import Entry
from butter_mpi.sentinel.across import Standing, entries_of, overdue
from butter_mpi.sentinel.judging import Clock, Pairs, Side, Verdict, mismatch, opposite

__all__ = ["Facing"]

_KINDS = ("send", "recv")
_SHOWN = 8
_MOST_SIDES, _MOST_NODES = 16, 8
_LONGEST_SAID = 500
_FRESH = 1.5
_UNKNOWN = -1


@dataclass
class _Far:
    """A side as the node of its rank shows it: its newest number, where the rank stands, and its newest records."""

    newest: int
    standing: Standing
    entries: list[Entry]
    age: float = 0.0
    compared: bool = False


class Facing:
    """One watcher's part.

    Parameters
    ----------
    me : int
        This node.
    node_of : callable
        Returns the node of a rank, if it is one.
    carry : callable
        Sends a message to a node: that, at which attempt, and the fields.
    """

    def __init__(self, me: int, node_of: Callable[[int], int | None], carry: Callable[..., None]) -> None:
        self._me, self._node_of, self._carry = me, node_of, carry
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._far: dict[Side, _Far] = {}
        # Sides of ranks here of which another node wants to know, and where all stood at the look before.
        self._asked: set[Side] = set()
        self._before: dict[Side, int] = {}
        self._clocks: dict[Side, tuple[int, Clock]] = {}
        # How often each node was told without an answer.
        self._unanswered: dict[int, int] = {}

    def hear(self, origin: int, epoch: int, rows: Sequence[Any]) -> None:
        """Take what another node shows.

        Raises
        ------
        ArithmeticError, TypeError, ValueError
            It shows no sides.
        """
        if epoch != self._epoch:
            return
        self._unanswered[origin] = 0
        for rank, peer, kind, newest, asks, said, closed, entries in rows[:_MOST_SIDES]:
            side = int(rank), int(peer), _KINDS[bool(kind)]
            if self._node_of(side[0]) == origin and self._node_of(side[1]) == self._me:
                standing = Standing(0, (side[0],), str(said), bool(closed))
                self._far[side] = _Far(int(newest), standing, entries_of(entries))
                if asks:
                    self._asked.add(opposite(side))

    def look(self, pairs: Pairs, epoch: int, standing: Callable[[Sequence[int]], Standing]) -> Verdict | None:
        """Hold what others have shown against what ranks here have submitted, and show them what they wait for.

        Parameters
        ----------
        pairs : Pairs
            What ranks here have submitted.
        epoch : int
            Of the communicator.
        standing : callable
            Returns what to say of ranks.
        """
        if epoch != self._epoch:
            self._begin(epoch)
        for side, far in self._far.items():
            if not far.compared and (differing := _differing(side, far.entries, pairs.away.get(opposite(side), ()))):
                return mismatch(differing)
            far.compared = True
        self._show(pairs, standing)
        return None

    def _show(self, pairs: Pairs, standing: Callable[[Sequence[int]], Standing]) -> None:
        now = {side: entries[-1].number for side, entries in pairs.away.items()}
        still = {side for side, number in now.items() if self._before.get(side) == number > self._known(side)}
        by_node: dict[int, list[Side]] = {}
        for side in sorted(still | self._asked):
            node = self._node_of(side[1])
            if node is not None and self._node_of(side[0]) == self._me:
                by_node.setdefault(node, []).append(side)
        self._before = now
        self._asked.clear()
        for node in sorted(by_node, key=lambda one: (self._unanswered.get(one, 0), one))[:_MOST_NODES]:
            attempt = self._unanswered[node] = self._unanswered.get(node, 0) + 1
            rows = [self._row(side, pairs, standing([side[0]])) for side in by_node[node][:_MOST_SIDES]]
            self._carry(node, attempt, origin=self._me, to=node, epoch=self._epoch, rows=rows)

    def _row(self, side: Side, pairs: Pairs, standing: Standing) -> list[Any]:
        """Return a side as a message shows it; it asks where the other one is not known to have as much."""
        entries = list(pairs.away.get(side, ()))
        newest = entries[-1].number if entries else 0 if pairs.knows(side[0]) else _UNKNOWN
        told = standing.said[:_LONGEST_SAID], standing.closed
        shown = [list(entry) for entry in entries[-_SHOWN:]]
        return [*side[:2], _KINDS.index(side[2]), newest, newest > self._known(side), *told, shown]

    def _known(self, side: Side) -> int:
        """Return how much the other end of a pair is known to have submitted."""
        far = self._far.get(opposite(side))
        return 0 if far is None else far.newest

    def wait(self, pairs: Pairs, passed: float) -> Iterator[tuple[int, Verdict | None, str]]:
        """Yield ranks of this node that wait, `passed` seconds later, with what is wrong, or a warning."""
        for far in self._far.values():
            far.age += passed
        for side, entries in pairs.away.items():
            there = self._far.get(opposite(side))
            if there is None or there.newest == _UNKNOWN or there.newest >= entries[-1].number:
                self._clocks.pop(side, None)
                continue
            known, clock = self._clocks.get(side, (_UNKNOWN, Clock()))
            clock = clock if known == there.newest else Clock()
            # Of what is not heard of any more it is not known whether it is still so.
            clock.seconds += passed if there.age < _FRESH else 0.0
            self._clocks[side] = there.newest, clock
            first = next(entry for entry in entries if entry.number > there.newest)
            yield (side[0], *overdue(first, there.standing, clock))


def _differing(side: Side, shown: Sequence[Entry], own: Sequence[Entry]) -> Mapping[int, Entry]:
    """Return what the two ranks submitted at the first number at which it does not fit; nothing where all fits."""
    mine = {entry.number: entry for entry in own}
    for entry in shown:
        other = mine.get(entry.number)
        if other is not None and (other.elements, other.dtype) != (entry.elements, entry.dtype):
            return {side[0]: entry, side[1]: other}
    return {}
