"""Who differs, who is late, who is frozen: judged by what the watcher sees of the ranks of its node.

Pure: times and readers are handed in, verdicts come back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from butter_mpi.recorder import PAIRS, Entry, Reader

__all__ = ["Late", "Pairs", "Verdict", "Waiting", "first_difference", "mismatch", "ranks_text"]

FIRST_WARNING = 5.0


@dataclass(frozen=True)
class Verdict:
    """What is wrong, for every living rank.

    ``error`` is the class that ranks raise, ``lost`` the ranks that are to blame.
    """

    error: str
    lost: tuple[int, ...]
    text: str
    n: int | None = None
    operation: str = ""
    records: Mapping[int, str] = field(default_factory=dict)
    elapsed: float = 0.0
    phase: str = ""

    @classmethod
    def of(cls, notice: Mapping[str, Any]) -> Verdict:
        """Return what a rank says of its first cause, in this form.

        Raises
        ------
        ValueError
            It has not the fields, or not of their types.
        """
        try:
            return cls(
                str(notice["error"]),
                tuple(int(one) for one in notice["lost"]),
                str(notice["text"]),
                n=None if notice["n"] is None else int(notice["n"]),
                operation=str(notice["operation"]),
                records={int(one): str(text) for one, text in dict(notice["records"]).items()},
                elapsed=float(notice["elapsed"]),
                phase=str(notice["phase"]),
            )
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a notice: {error!r}") from None

    def notice(self) -> dict[str, Any]:
        """Return it as ranks tell one another their first cause."""
        return {
            "error": self.error,
            "lost": list(self.lost),
            "text": self.text,
            "n": self.n,
            "operation": self.operation,
            "phase": self.phase,
            "elapsed": self.elapsed,
            "records": {str(rank): text for rank, text in self.records.items()},
            "here": True,
        }


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 1, 3``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def first_difference(readers: Mapping[int, Reader]) -> dict[int, Entry] | None:
    """Return what each rank submitted at the first number at which not all submitted the same, if there is one.

    The hash at the lowest position of all says whether there is a difference; only then records are read one by one.
    """
    low = min(reader.head() for reader in readers.values())
    at_low = {rank: reader.collective(low) for rank, reader in readers.items()}
    if low == 0 or None in at_low.values() or len({entry.chain for entry in at_low.values() if entry}) == 1:
        return None
    first, last = max(reader.oldest() for reader in readers.values()), low
    found: dict[int, Entry] = {rank: entry for rank, entry in at_low.items() if entry}
    # Hashes differ from the first difference on: halve the range.
    while first <= last:
        middle = (first + last) // 2
        entries = {rank: entry for rank, reader in readers.items() if (entry := reader.collective(middle))}
        if len(entries) < len(readers) or len({entry.chain for entry in entries.values()}) == 1:
            first = middle + 1
        else:
            found, last = entries, middle - 1
    return found


def mismatch(found: Mapping[int, Entry]) -> Verdict:
    """Return the verdict on records that differ, or come after some that did and are overwritten."""
    records = {rank: entry.text() for rank, entry in sorted(found.items())}
    groups: dict[str, list[int]] = {}
    for rank, text in records.items():
        groups.setdefault(text, []).append(rank)
    first = next(iter(found.values()))
    paired = first.kind in ("send", "recv")
    what = f"as send and recv #{first.number}" if paired else f"as number {first.number}"
    same = not paired and len({(entry.signature, entry.elements) for entry in found.values()}) == 1
    if same:
        what = f"somewhere before number {first.number}; the records of that are overwritten"
    lines = "".join(f"\n  {ranks_text(ranks)}: {text}" for text, ranks in groups.items() if not same)
    return Verdict(
        "CollectiveMismatchError",
        (),
        f"ranks submitted different operations {what}. Every rank must submit the same operations in the same order"
        f"{lines}",
        n=first.number,
        operation=first.kind,
        records=records,
        phase="send/recv" if paired else "collective",
    )


@dataclass(frozen=True)
class Waiting:
    """Some ranks wait in ``entry`` for the ``absent`` ones, for ``seconds`` now; ``warn``: it is time to say so."""

    entry: Entry
    absent: tuple[int, ...]
    seconds: float
    warn: bool

    @property
    def over(self) -> bool:
        """Whether the deadline of the operation is over; one that may wait for ever has none."""
        return bool(self.entry.bound) and self.seconds >= self.entry.bound


class Late:
    """How long the first of the ranks wait for the last; the caller says how much time counts."""

    def __init__(self) -> None:
        self._low, self._waited, self._warn_at = 0, 0.0, FIRST_WARNING

    def look(self, readers: Mapping[int, Reader], passed: float) -> list[Waiting]:
        """Return who waits for whom after `passed` more seconds: nobody, or the first for the last."""
        heads = {rank: reader.head() for rank, reader in readers.items()}
        low, high = min(heads.values()), max(heads.values())
        if low != self._low or low == high:
            self._low, self._waited, self._warn_at = low, 0.0, FIRST_WARNING
            return []
        self._waited += passed
        # Whoever is further ahead than its ring is long shows the oldest that it has.
        ahead = [reader for rank, reader in readers.items() if heads[rank] > low]
        waiting = (reader.collective(max(low + 1, reader.oldest())) for reader in ahead)
        entry = next((entry for entry in waiting if entry), None)
        if entry is None:
            return []
        warn = bool(entry.bound) and self._waited >= self._warn_at
        if warn:
            self._warn_at *= 2
        return [Waiting(entry, tuple(rank for rank, head in heads.items() if head == low), self._waited, warn)]


class Pairs:
    """Sends and receives: the k-th send of one rank to another pairs with the k-th receive there."""

    def __init__(self) -> None:
        self._read: dict[int, int] = {}
        # By (sender, receiver), number and rank: the entry, and the seconds that it has waited for its counterpart.
        self._open: dict[tuple[int, int], dict[int, dict[int, _Open]]] = {}

    def read(self, readers: Mapping[int, Reader]) -> dict[int, Entry] | None:
        """Take what is new; returns what the two ranks submitted where a pair does not fit."""
        for rank, reader in readers.items():
            newest = reader.pairs()
            first = max(self._read.get(rank, 0) + 1, newest - PAIRS * 7 // 8)
            for position in range(first, newest + 1):
                found = reader.pair(position)
                # A record that is being written is there at the next look.
                if found is None and position == newest:
                    break
                self._read[rank] = position
                if found is None or found[1].number <= reader.pairs_floor:
                    continue
                if differing := self._match(rank, *found):
                    return differing
        return None

    def _match(self, rank: int, peer: int, entry: Entry) -> dict[int, Entry] | None:
        way = (rank, peer) if entry.kind == "send" else (peer, rank)
        numbers = self._open.setdefault(way, {})
        theirs = numbers.get(entry.number, {}).get(peer)
        if theirs is None:
            numbers.setdefault(entry.number, {})[rank] = _Open(entry)
            if len(numbers) > PAIRS:
                # Rings that have lost some cannot be paired any more: only the newest are kept.
                del numbers[min(numbers)]
            return None
        del numbers[entry.number]
        same = (entry.elements, entry.dtype) == (theirs.entry.elements, theirs.entry.dtype)
        return None if same else {rank: entry, peer: theirs.entry}

    def look(self, passed: float) -> list[Waiting]:
        """Return who waits for whom after `passed` more seconds."""
        found = []
        for (sender, receiver), numbers in self._open.items():
            for sides in numbers.values():
                for rank, one in sides.items():
                    found.append(one.waiting(receiver if rank == sender else sender, passed))
        return found


class _Open:
    """A send or receive without its counterpart."""

    def __init__(self, entry: Entry) -> None:
        self.entry, self._waited, self._warn_at = entry, 0.0, FIRST_WARNING

    def waiting(self, absent: int, passed: float) -> Waiting:
        self._waited += passed
        warn = bool(self.entry.bound) and self._waited >= self._warn_at
        if warn:
            self._warn_at *= 2
        return Waiting(self.entry, (absent,), self._waited, warn)
