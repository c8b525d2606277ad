"""The ranks of an operation tell one another what they submit, before any data moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from butter_mpi.collectives import describe
from butter_mpi.control import Control, Watch
from butter_mpi.errors import CollectiveMismatchError
from butter_mpi.findings import ranks_text
from butter_mpi.planes.waiting import Waiting

__all__ = ["meet"]

Record = dict[str, Any]

_COUNTERPART = {"send": "recv", "recv": "send"}
_GRACE = 0.2


def _key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(record[name] for name in ("n", "kind", "count", "dtype", "op", "root"))


def _expected(mine: Record) -> tuple[Any, ...]:
    """Return what the peer must have submitted: the same collective, or the other half of the pair."""
    return _key({**mine, "kind": _COUNTERPART.get(mine["kind"], mine["kind"])})


def meet(control: Control, who: str, mine: Mapping[int, Sequence[Record]], limit: float | None) -> None:
    """Exchange signatures with every peer in `mine` and compare them, position by position.

    Both sides of a pair number and order their records alike, so the n-th of one meets the n-th of the other.

    Raises
    ------
    CollectiveMismatchError
        A peer submitted something else.
    CommunicatorBrokenError
        A peer left, broke, or did not come by the deadline.
    """
    for peer, records in mine.items():
        for record in records:
            control.send([peer], "op", record)
    open_records = {peer: list(records) for peer, records in mine.items() if records}
    if not open_records:
        return
    waiting = Waiting(control, who, next(iter(open_records.values()))[0], limit)
    while open_records:
        moved = waiting.take()
        for peer in [p for p in open_records if control.inbox[p]]:
            moved = True
            _compare(control, waiting, peer, open_records)
        if open_records:
            waiting.look(tuple(open_records), moved)


def _compare(control: Control, waiting: Waiting, peer: int, open_records: dict[int, list[Record]]) -> None:
    own, theirs = open_records[peer][0], control.inbox[peer][0]
    if _expected(own) != _key(theirs):
        raise _mismatch(control, waiting, own, peer)
    control.inbox[peer].popleft()
    open_records[peer].pop(0)
    if not open_records[peer]:
        del open_records[peer]


def _mismatch(control: Control, waiting: Waiting, own: Record, peer: int) -> CollectiveMismatchError:
    """Return the error, after a short grace in which the other ranks' records may still come in."""
    paired = own["kind"] in _COUNTERPART
    others = [peer] if paired else list(control.peers)
    watch = Watch(_GRACE)

    def silent(p: int) -> bool:
        return not control.inbox[p] and control.seen.get(p, {}).get("n") != own["n"]

    while any(map(silent, others)) and not watch.tick():
        control.pump()
    records = {control.rank: describe(own)}
    for other in others:
        record = control.inbox[other][0] if control.inbox[other] else control.seen.get(other)
        records[other] = describe(record) if record else "nothing yet"
    lines = "\n".join(f"  {ranks_text(ranks)}: {text}" for text, ranks in _by_value(records))
    return CollectiveMismatchError(
        f"{waiting.text()}: rank {peer} submitted {records[peer]}. Every rank must submit the same operations in the "
        f"same order\n{lines}",
        records=records,
        **waiting.facts([]),
    )


def _by_value(records: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    values: dict[str, list[int]] = {}
    for rank in sorted(records):
        values.setdefault(records[rank], []).append(rank)
    return list(values.items())
