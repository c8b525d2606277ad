"""Who uses two communicators in another order than the others: judged from the times in the recorders of both.

On a device, and in MPI, an operation of one communicator that waits behind one of another is a wait of all its ranks.
So ranks must use communicators that they have in common in one order. Pure: readers are handed in.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import repeat

from butter_mpi.findings import by_value, ranks_text
from butter_mpi.recorder import Reader
from butter_mpi.sentinel.judging import Verdict

__all__ = ["Orders"]

Readers = Mapping[int, Reader]


@dataclass(frozen=True)
class _Crossing:
    """Some ranks submit ``number`` of the newer communicator before ``behind`` of the older one, others after it."""

    number: int
    behind: int
    older_first: Mapping[int, bool]


class Orders:
    """The order in which each rank submits collectives of this communicator, and of each older one.

    A rank's own clock orders what it submits; clocks of different ranks are not compared. How many of the older one's
    a rank had submitted before number `n` of the newer one must be equal on all ranks that have both.

    Parameters
    ----------
    name : str
        The newer communicator, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # Up to which number of the newer one ranks were seen to agree, by the older one's key.
        self._agreed: dict[str, int] = {}

    def look(self, newer: Readers, older: Mapping[str, Readers], names: Mapping[str, str]) -> Verdict | None:
        """Return the verdict on ranks whose orders differ, if some do; it is found again at the next look.

        Parameters
        ----------
        newer : mapping of int to Reader
            By rank.
        older : mapping of str to mapping of int to Reader
            By the key of the older communicator, and the rank in the newer one.
        names : mapping of str to str
            The older ones' names.

        Returns
        -------
        Verdict or None
            That ranks differ, with what each one submitted, and the older communicator as the other that breaks.
        """
        newest = max((reader.head() for reader in newer.values()), default=0)
        for key, readers in older.items():
            # Nothing new: ranks that use many communicators stand still in most of them.
            if newest <= self._agreed.get(key, 0):
                continue
            # One that broke has other things to tell, and stands still on some ranks before others.
            if len(readers) < 2 or any(reader.broke for reader in readers.values()):
                continue
            both = {rank: newer[rank] for rank in readers if rank in newer}
            found = self._compare(key, both, readers)
            if found is not None:
                return self._verdict(found, both, readers, names[key], key)
        return None

    def _compare(self, key: str, newer: Readers, older: Readers) -> _Crossing | None:
        # In this order: what a rank has of the older one while it has not come to a number is submitted before that.
        reached = {rank: reader.head() for rank, reader in older.items()}
        heads = {rank: reader.head() for rank, reader in newer.items()}
        kept_from = [max(reader.oldest() - 1, reader.floor) for reader in newer.values()]
        low, first = min(heads.values()), max(self._agreed.get(key, 0), *kept_from) + 1
        if max(heads.values()) < first:
            return None
        counts = {rank: _counts(newer[rank], older[rank], first, min(low + 1, heads[rank])) for rank in newer}
        first = max(known_from for known_from, _ in counts.values())
        known = {rank: own[first - known_from :] for rank, (known_from, own) in counts.items()}
        # What is being written on one rank is there at the next look.
        low = min(low, first - 1 + min(map(len, known.values())))
        span = max(0, low + 1 - first)
        of_all = [own[:span] for own in known.values()]
        if any(own != of_all[0] for own in of_all):
            differs = next(index for index, each in enumerate(zip(*of_all, strict=True)) if len(set(each)) > 1)
            return _crossing(first + differs, {rank: own[differs] for rank, own in known.items()}, {})
        here = {rank: own[span] for rank, own in known.items() if low + 1 >= first and len(own) > span}
        behind = {rank: reached[rank] for rank in newer if heads[rank] <= low}
        if here and max([*here.values(), *behind.values()]) > min(here.values()):
            return _crossing(low + 1, here, behind)
        self._agreed[key] = low
        return None

    def _verdict(self, found: _Crossing, newer: Readers, older: Readers, other: str, key: str) -> Verdict:
        records = {
            rank: _course(
                _text(newer[rank], found.number, self._name), _text(older[rank], found.behind, other), older_first
            )
            for rank, older_first in sorted(found.older_first.items())
        }
        lines = "".join(f"\n  {ranks_text(ranks)}: {text}" for text, ranks in by_value(records.items()).items())
        return Verdict(
            "CollectiveMismatchError",
            (),
            f"ranks of {self._name} use it and {other} in different orders, and would wait for one another for ever. "
            f"Every rank must use communicators that it shares with others in one order{lines}",
            n=found.number,
            records=records,
            phase="collective",
            other=key,
        )


def _text(reader: Reader, number: int, name: str) -> tuple[str, bool]:
    """Return an operation as people read it, and whether it was submitted."""
    entry = reader.collective(number)
    text = entry.text() if entry else f"collective #{number}"
    return f"{text} of {name}", reader.head() >= number


def _course(newer: tuple[str, bool], older: tuple[str, bool], older_first: bool) -> str:
    """Return what one rank did in which order."""
    (one, _), (two, came) = (older, newer) if older_first else (newer, older)
    if not (newer[1] or older[1]):
        return f"neither {one} nor {two} yet"
    return f"{one}, {'then' if came else 'and not yet'} {two}"


def _crossing(number: int, counts: Mapping[int, int], behind: Mapping[int, int]) -> _Crossing:
    """Return where ranks differ, from how many of the older one each had before, or has without, this number."""
    fewest = min(counts.values())
    return _Crossing(number, fewest + 1, {rank: count > fewest for rank, count in {**behind, **counts}.items()})


def _counts(newer: Reader, older: Reader, first: int, last: int) -> tuple[int, list[int]]:
    """Return a number of the newer one, and how many of the older one came before it, before the next one, and so on.

    It is `first`, or the first of which that is known: the recorder of the older one may have lost what came before.
    """
    start, times = _times(older, older.oldest(), older.head())
    first, submitted = _times(newer, first, last)
    before = list(map(bisect_left, repeat(times), submitted))
    unknown = bisect_right(before, 0) if start > 1 else 0
    return first + unknown, [start - 1 + count for count in before[unknown:]]


def _times(reader: Reader, first: int, last: int) -> tuple[int, list[float]]:
    """Return the first number from which on all times are there, and these."""
    times = reader.times(first, last)
    while times and times[-1] == 0.0:
        # It is being written now, and so is behind all that was read before.
        times.pop()
    lost = len(times) - times[::-1].index(0.0) if 0.0 in times else 0
    return first + lost, times[lost:]
