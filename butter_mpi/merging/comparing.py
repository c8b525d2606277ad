"""Where the ranks of a communicator first submitted something else, or who is behind: judged from their recordings.

Two ranks whose hashes at a number agree have submitted the same up to it, also what is overwritten. Hashes that differ
differ from the first divergence on, so the lowest number at which they do is the first that can be seen; it is the
first of all if the ranks that have it agreed on the number before it. Pure: recordings are handed in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from butter_mpi.findings import ranks_text
from butter_mpi.merging.findings import Behind, Divergence, Group, Merged, Row
from butter_mpi.merging.pairing import judge_pairs
from butter_mpi.merging.reading import Recording, Shape, Track

__all__ = ["merge"]

_MOST_SHIFTED = 8
_SHIFT_SHOWN = 16
_FEWEST_SHIFTED = 2
_MOST_LISTED = 20


def merge(recordings: Sequence[Recording], last: int) -> Merged:
    """Return what the recordings of one communicator tell.

    Parameters
    ----------
    recordings : sequence of Recording
        One a rank, in rank order; one at least.
    last : int
        How many numbers to show before, and after, the point of interest.

    Returns
    -------
    Merged
        It.
    """
    epoch = max(one.epoch for one in recordings)
    ranks = {one.rank: one for one in recordings if one.epoch == epoch}
    tracks = {rank: one.collectives for rank, one in ranks.items()}
    differing, waiting = judge_pairs(ranks)
    divergence = _first([_diverging(tracks), _left_out(ranks), *differing[:1]])
    low, high = (choose(track.submitted for track in tracks.values()) for choose in (min, max))
    behind = None if divergence else _behind(tracks, low, high) or _behind_in_exchange(ranks)
    first, final = _shown(divergence, low, high, last)
    # What came before ranks reconnected is in no recording.
    first = max(first, 1 + min(track.floor for track in tracks.values()))
    return Merged(
        ranks=tuple(ranks.values()),
        missing=_gaps([one.rank for one in recordings], recordings[0].world_size),
        outdated=tuple(one.rank for one in recordings if one.epoch != epoch),
        common=_common(tracks, min(low, _agreed_before(divergence, low))),
        divergence=divergence,
        behind=behind,
        differing_pairs=tuple(differing[:_MOST_LISTED]),
        open_pairs=tuple(waiting[:_MOST_LISTED]),
        rows=tuple(_row(tracks, number) for number in range(first, final + 1)),
    )


def _first(found: Sequence[Divergence | None]) -> Divergence | None:
    """Return what came first: an exchange comes after the collective of its number, of pairs nobody knows."""
    order = {"collective": 0.0, "exchange": 0.5}
    known = [one for one in found if one and one.kind in order]
    return min(known, key=lambda one: one.number + order[one.kind], default=next(filter(None, found), None))


def _agreed_before(divergence: Divergence | None, low: int) -> int:
    """Return the last number before a divergence; pairs have numbers of their own."""
    if divergence is None or divergence.kind == "send/recv":
        return low
    return divergence.number - (divergence.kind == "collective")


def _common(tracks: Mapping[int, Track], highest: int) -> int | None:
    """Return the highest number that all ranks have: their hashes there agree, as nothing below it diverges."""
    floor = max(track.floor for track in tracks.values())
    lowest = max(track.oldest or 0 for track in tracks.values())
    there = (n for n in range(highest, lowest - 1, -1) if all(track.find(n) is not None for track in tracks.values()))
    return next(there, floor if highest <= floor else None)


def _gaps(ranks: Sequence[int], size: int) -> tuple[tuple[int, int], ...]:
    return tuple((one + 1, two - 1) for one, two in pairwise([-1, *ranks, size]) if two - one > 1)


def _shown(divergence: Divergence | None, low: int, high: int, last: int) -> tuple[int, int]:
    """Return the first and the last number of the table: the last common ones, and as many that follow."""
    common = min(low, _agreed_before(divergence, low))
    return max(1, common - last + 1), min(high, common + last)


# -- collectives -------------------------------------------------------------------------------------------------------


def _diverging(tracks: Mapping[int, Track]) -> Divergence | None:
    """Return the lowest number at which hashes or records of two ranks differ."""
    seen: dict[int, tuple[int, Shape]] = {}
    lowest: int | None = None
    for track in tracks.values():
        for place, number in enumerate(track.numbers):
            if lowest is not None and number >= lowest:
                break
            chain, shape = seen.setdefault(number, (track.hashes[place], track.shapes[place]))
            if chain != track.hashes[place] or shape.signature != track.shapes[place].signature:
                lowest = number
                break
    if lowest is None:
        return None
    row = _row(tracks, lowest)
    holders = {rank: track for rank, track in tracks.items() if track.find(lowest) is not None}
    exact = all(lowest == track.floor + 1 or track.find(lowest - 1) is not None for track in holders.values())
    hint = _shifted(row, holders) if exact else ""
    return Divergence("collective", lowest, exact, row.groups, row.absent, row.unknown, hint)


def _row(tracks: Mapping[int, Track], number: int) -> Row:
    found: dict[tuple[object, ...], list[int]] = {}
    absent: list[int] = []
    unknown: list[int] = []
    at: dict[int, tuple[Shape, float]] = {}
    for rank, track in tracks.items():
        place = track.find(number)
        if place is None:
            (absent if track.submitted < number else unknown).append(rank)
            continue
        shape = track.shapes[place]
        found.setdefault((*shape.signature, shape.site), []).append(rank)
        at[rank] = shape, track.times[place]
    groups = [
        Group(tuple(ranks), at[ranks[0]][0].text(number), at[ranks[0]][1], at[ranks[0]][0]) for ranks in found.values()
    ]
    return Row(number, tuple(groups), tuple(absent), tuple(unknown))


def _shifted(row: Row, holders: Mapping[int, Track]) -> str:
    """Return what it looks like where some ranks go on as the others do, some numbers later or earlier."""
    groups = sorted(row.groups, key=lambda group: -len(group.ranks))
    most = groups[0]
    for group in groups[1:]:
        for by in range(1, _MOST_SHIFTED + 1):
            theirs, mine = holders[most.ranks[0]], holders[group.ranks[0]]
            if _goes_on(mine, theirs, row.number, by):
                return _looks(group, most.text, by, "left out")
            if _goes_on(theirs, mine, row.number, by):
                return _looks(group, group.text, by, "submitted what the others did not:")
    return ""


def _looks(group: Group, text: str, by: int, what: str) -> str:
    more = f" and {by - 1} more" if by > 1 else ""
    return f"{ranks_text(group.ranks)} {'seems' if len(group.ranks) == 1 else 'seem'} to have {what} {text}{more}"


def _goes_on(one: Track, other: Track, number: int, by: int) -> bool:
    """Return whether one rank goes on at a number as the other one does so many numbers later."""
    matched = 0
    for step in range(_SHIFT_SHOWN):
        mine, theirs = one.find(number + step), other.find(number + step + by)
        if mine is None or theirs is None:
            break
        if one.shapes[mine].signature != other.shapes[theirs].signature:
            return False
        matched += 1
    return matched >= _FEWEST_SHIFTED


def _behind(tracks: Mapping[int, Track], low: int, high: int) -> Behind | None:
    if low == high:
        return None
    row = _row(tracks, low + 1)
    return Behind("collective", low, row.absent, row.groups)


# -- exchanges over the control plane ----------------------------------------------------------------------------------


def _came_last(ranks: Mapping[int, Recording]) -> tuple[int, tuple[Group, ...], int]:
    """Return how many exchanges the ranks that have come to the most have come to, who, and after which collective."""
    most = max(one.exchanges for one in ranks.values())
    found: dict[str, list[Recording]] = {}
    for one in ranks.values():
        if one.exchanges == most and one.exchange is not None:
            found.setdefault(one.exchange.text(), []).append(one)
    groups = tuple(Group(tuple(one.rank for one in them), text, _when(them[0])) for text, them in found.items())
    afters = [one.exchange.after for them in found.values() for one in them if one.exchange is not None]
    return most, groups, min(afters, default=0)


def _when(one: Recording) -> float:
    return one.exchange.time if one.exchange is not None else one.time


def _left_out(ranks: Mapping[int, Recording]) -> Divergence | None:
    """Return the exchange that some ranks have come to, and others not, who have gone on after it."""
    most, groups, after = _came_last(ranks)
    without = {
        rank: one.collectives
        for rank, one in ranks.items()
        if one.exchanges < most and one.collectives.submitted > after
    }
    if not groups or not without:
        return None
    row = _row(without, after + 1)
    return Divergence("exchange", after, True, (*row.groups, *groups), unknown=row.unknown)


def _behind_in_exchange(ranks: Mapping[int, Recording]) -> Behind | None:
    most, groups, after = _came_last(ranks)
    fewer = tuple(rank for rank, one in ranks.items() if one.exchanges < most)
    return Behind("exchange", after, fewer, groups) if groups and fewer else None
