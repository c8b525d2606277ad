"""The ranks of an operation tell one another what they submit, before its data moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from butter_mpi.collectives import RULES, describe
from butter_mpi.control import Control, Watch
from butter_mpi.errors import CollectiveMismatchError
from butter_mpi.findings import by_value, ranks_text
from butter_mpi.planes.waiting import Waiting

__all__ = ["Meeting"]

Record = dict[str, Any]

_COUNTERPART = {"send": "recv", "recv": "send"}
_GRACE = 0.2
_SAME = "Every rank must submit the same operations in the same order"
_PAIR = "A send needs a recv of the same count and dtype on its peer, in the same order"
_SAME_WAY = (
    "Every rank must do it in the same way: with a kernel of set_add_kernel or without one, by a plan with a graph or "
    "without one, alone or in a group with others"
)


def _key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in ("n", "kind", "count", "dtype", "op", "root", "way"))


def _side(record: Record) -> str:
    """Return ``"send"``, ``"recv"`` or ``"collective"``."""
    return record["kind"] if record["kind"] in _COUNTERPART else "collective"


def _meets(mine: Record, theirs: Record) -> bool:
    return _key({**mine, "kind": _COUNTERPART.get(mine["kind"], mine["kind"])}) == _key(theirs)


class Meeting:
    """One submission's records, met peer by peer; each operation goes on as soon as its own records have met.

    Collectives meet in order, and so do the sends and the receives of a pair, each direction by itself. A record of a
    peer's group that this rank does not wait for now is left for later; one that the peer waits in alone is a mismatch.

    Parameters
    ----------
    control : Control
        Where records go and come.
    mine : mapping of int to sequence of dict
        For each peer, what this rank tells it; told here.
    """

    def __init__(self, control: Control, mine: Mapping[int, Sequence[Record]]) -> None:
        self._control = control
        self._told, self._begun = mine, set[int]()
        self._open = {peer: list(records) for peer, records in mine.items() if records}
        for peer, records in self._open.items():
            for record in records:
                marks = {"group": len(records) > 1, "last": record is records[-1]}
                control.send([peer], "op", {**record, **marks})

    def missing(self) -> dict[int, Record]:
        """Return the peers that have not come to everything, each with this rank's first record that waits for it."""
        return {peer: records[0] for peer, records in self._open.items()}

    def met(self, record: Record) -> bool:
        """Whether every peer that `record` was told to has come to it."""
        return not any(record is waits for records in self._open.values() for waits in records)

    def begin(self, record: Record) -> bool:
        """Begin to move the data of what every peer has come to; returns false where one has given it up since."""
        side = _COUNTERPART.get(_side(record), "collective")
        for peer, first in self._control.given_up.items():
            concerned = any(record is told for told in self._told.get(peer, ()))
            if concerned and side in first and record["n"] >= first[side]:
                return False
        self._begun.add(id(record))
        return True

    def not_begun(self, peer: int) -> dict[str, int]:
        """Return, for each side, the number of the first operation with a peer whose data never began to move."""
        left = [record for record in self._told.get(peer, ()) if id(record) not in self._begun]
        return {_side(record): record["n"] for record in reversed(left) if record["kind"] in RULES}

    def match(self, waiting: Waiting) -> bool:
        """Match what has come; returns whether anything did.

        Raises
        ------
        CollectiveMismatchError
            A peer submitted something else.
        """
        matched = False
        for peer in list(self._open):
            matched = self._match(peer, waiting) or matched
        return matched

    def match_rest(self) -> None:
        """Match what fits of what has come, up to where a peer submitted something else."""
        for peer in list(self._open):
            for theirs in list(self._control.inbox[peer]):
                mine = self._mine(peer, theirs)
                if mine is None or not _meets(mine, theirs):
                    break
                self._met(peer, mine, theirs)

    def _match(self, peer: int, waiting: Waiting) -> bool:
        matched = False
        for theirs in list(self._control.inbox[peer]):
            mine = self._mine(peer, theirs)
            if mine is None and theirs["group"]:
                continue
            if mine is None or not _meets(mine, theirs):
                raise self._mismatch(waiting, mine or self._open[peer][0], peer, theirs)
            self._met(peer, mine, theirs)
            matched = True
            if peer not in self._open:
                break
        self._check_deadlock(peer, waiting)
        return matched

    def _mine(self, peer: int, theirs: Record) -> Record | None:
        """Return what this rank submitted next on the side that a peer's record is for."""
        side = _COUNTERPART.get(_side(theirs), "collective")
        return next((record for record in self._open.get(peer, ()) if _side(record) == side), None)

    def _met(self, peer: int, mine: Record, theirs: Record) -> None:
        self._control.inbox[peer].remove(theirs)
        self._open[peer] = [record for record in self._open[peer] if record is not mine]
        if not self._open[peer]:
            del self._open[peer]

    def _check_deadlock(self, peer: int, waiting: Waiting) -> None:
        """Raise where this rank's submission and the peer's whole group each wait for what comes after the other."""
        left = self._control.inbox[peer]
        if peer in self._open and left and self._control.seen[peer]["last"]:
            raise self._mismatch(waiting, self._open[peer][0], peer, left[0])

    def _mismatch(self, waiting: Waiting, own: Record, peer: int, theirs: Record) -> CollectiveMismatchError:
        """Return the error, after a short grace in which the other ranks' records may still come in."""
        others = [] if own["kind"] in _COUNTERPART else [p for p in self._control.peers if p != peer]
        watch = Watch(_GRACE)
        while any(self._record_of(p, own) is None for p in others) and not watch.tick():
            self._control.pump()
        records = {self._control.rank: describe(own), peer: describe(theirs)}
        for other in others:
            record = self._record_of(other, own)
            records[other] = describe(record) if record else "nothing yet"
        remedy = _SAME_WAY if _meets({**own, "way": None}, {**theirs, "way": None}) else _SAME
        remedy = _PAIR if {own["kind"], theirs["kind"]} <= _COUNTERPART.keys() else remedy
        lines = "\n".join(f"  {ranks_text(ranks)}: {text}" for text, ranks in by_value(records.items()).items())
        return CollectiveMismatchError(
            f"{waiting.text(own)}: rank {peer} submitted {records[peer]}. {remedy}\n{lines}",
            records=records,
            **waiting.facts(own, []),
        )

    def _record_of(self, peer: int, own: Record) -> Record | None:
        """Return what a peer submitted where this rank submitted `own`, if that is known."""
        inbox, seen = self._control.inbox[peer], self._control.seen.get(peer)
        if inbox:
            return inbox[0]
        return seen if seen is not None and seen["n"] == own["n"] else None
