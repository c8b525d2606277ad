"""Sends and receives of recordings: the k-th send of one rank to another belongs to the k-th receive there."""

from __future__ import annotations

from collections.abc import Mapping

from butter_mpi.merging.findings import Behind, Divergence, Group
from butter_mpi.merging.reading import Recording, Shape

__all__ = ["judge_pairs"]

_Side = tuple[int, int, str]
_Entries = dict[int, tuple[Shape, float]]
_OTHER = {"send": "recv", "recv": "send"}


def judge_pairs(ranks: Mapping[int, Recording]) -> tuple[list[Divergence], list[Behind]]:
    """Return which sends and receives do not fit, and the first of each side that has no answer, by time.

    Parameters
    ----------
    ranks : mapping of int to Recording
        By rank; what is sent to another one is not judged.

    Returns
    -------
    tuple of list
        Both.
    """
    sides = _sides(ranks)
    differing: list[Divergence] = []
    waiting: list[Behind] = []
    for side, entries in sides.items():
        rank, peer, kind = side
        if peer not in ranks:
            continue
        theirs = sides.get((peer, rank, _OTHER[kind]), {})
        # Both sides would tell it.
        if kind == "send":
            differing += _misfits(rank, peer, entries, theirs)
        # What a rank that has lost records did on its other sides is not known.
        reached = max(theirs, default=None if ranks[peer].pairs.lost else 0)
        unanswered = [] if reached is None else [number for number in entries if number > reached]
        if unanswered:
            first = min(unanswered)
            waiting.append(Behind("send/recv", first - 1, (peer,), (_group(rank, first, entries),)))
    differing.sort(key=lambda one: min(group.time for group in one.groups))
    return differing, sorted(waiting, key=lambda one: one.ahead[0].time)


def _sides(ranks: Mapping[int, Recording]) -> dict[_Side, _Entries]:
    """Return, for each rank, peer and kind, what was submitted there, by number."""
    sides: dict[_Side, _Entries] = {}
    for rank, one in ranks.items():
        track = one.pairs
        for number, time, shape in zip(track.numbers, track.times, track.shapes, strict=True):
            if shape.peer is not None and shape.operation in _OTHER:
                sides.setdefault((rank, shape.peer, shape.operation), {})[number] = shape, time
    return sides


def _misfits(rank: int, peer: int, sent: _Entries, received: _Entries) -> list[Divergence]:
    return [
        Divergence("send/recv", number, True, (_group(rank, number, sent), _group(peer, number, received)))
        for number in sent
        if number in received and _content(sent[number]) != _content(received[number])
    ]


def _content(entry: tuple[Shape, float]) -> tuple[str, int]:
    return entry[0].dtype, entry[0].elements


def _group(rank: int, number: int, entries: _Entries) -> Group:
    shape, time = entries[number]
    return Group((rank,), shape.text(number), time, shape)
