"""Who differs, who is late, who is frozen: judged by what the watcher sees of the ranks of its node.

Pure: times and readers are handed in, verdicts come back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from butter_mpi.findings import by_value, ranks_text
from butter_mpi.recorder import PAIRS, Entry, Glance, Reader

__all__ = [
    "STAY",
    "Clock",
    "Late",
    "Pairs",
    "Side",
    "Verdict",
    "Waiting",
    "first_difference",
    "left_out_exchange",
    "mismatch",
    "opposite",
    "said_here",
    "told_by",
]

FIRST_WARNING = 5.0
_KEPT_AWAY = 64
STAY = "Every rank must submit the same operations before one closes"
"""What to do where a rank closed before others had what they waited for."""


@dataclass(frozen=True)
class Verdict:
    """What is wrong, for every living rank.

    ``error`` is the class that ranks raise, ``lost`` the ranks that are to blame, ``other`` the key of the communicator
    that breaks with this one, where one does, and ``other_epoch`` the epoch in which it does.
    """

    error: str
    lost: tuple[int, ...]
    text: str
    n: int | None = None
    operation: str = ""
    records: Mapping[int, str] = field(default_factory=dict)
    elapsed: float = 0.0
    phase: str = ""
    other: str = ""
    other_epoch: int = 0

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
                other=str(notice.get("other", "")),
                other_epoch=int(notice.get("other_epoch", 0)),
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
            "other": self.other,
            "other_epoch": self.other_epoch,
        }


def told_by(rank: int, text: str) -> str:
    """Return what a rank told of its failure, with its name once: such texts begin with it."""
    return f"told by {text}" if text.startswith(f"rank {rank}/") else f"told by rank {rank}: {text}"


def said_here(text: str) -> str:
    """Return what a watcher says on its own node, with its name once: texts for other nodes may begin with it."""
    return text if text.startswith("the watcher ") else f"the watcher: {text}"


def first_difference(readers: Mapping[int, Reader]) -> dict[int, Entry] | None:
    """Return what each rank submitted at the first number at which not all submitted the same, if there is one.

    The hash at the lowest position of all says whether there is a difference; only then records are read one by one.
    """
    low = min([reader.head() for reader in readers.values()])
    chains = {reader.chain(low) for reader in readers.values()}
    if None in chains or len(chains) == 1:
        return None
    at_low = {rank: reader.collective(low) for rank, reader in readers.items()}
    if None in at_low.values():
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


def left_out_exchange(readers: Mapping[int, Reader]) -> dict[int, Entry] | None:
    """Return the exchange over the control plane that some ranks have come to, and what others submitted instead of it.

    An exchange takes no number, but ends only when every rank has come to it. So a rank that has come to fewer, and has
    submitted a collective that comes after it, has left it out. Whoever is merely behind, or ahead, has not.
    """
    # In this order: a rank that comes to the exchange in between, and then submits, is not taken for one that did not.
    heads = {rank: reader.head() for rank, reader in readers.items()}
    exchanges = {rank: reader.exchange() for rank, reader in readers.items()}
    most = max([count for count, _ in exchanges.values()])
    came = {rank: entry for rank, (count, entry) in exchanges.items() if count == most and entry}
    if not came:
        return None
    after = min(entry.number for entry in came.values())
    ahead = [rank for rank, (count, _) in exchanges.items() if count < most and heads[rank] > after]
    instead = {rank: readers[rank].collective(max(after + 1, readers[rank].oldest())) for rank in ahead}
    found = {rank: entry for rank, entry in instead.items() if entry}
    return {**found, **came} if found else None


def mismatch(found: Mapping[int, Entry]) -> Verdict:
    """Return the verdict on records that differ, or come after some that did and are overwritten."""
    records = {rank: entry.text() for rank, entry in sorted(found.items())}
    first = next(iter(found.values()))
    what = f"as send and recv #{first.number}" if first.paired else f"as number {first.number}"
    same = not first.paired and len({(entry.signature, entry.elements) for entry in found.values()}) == 1
    if same:
        what = f"somewhere before number {first.number}; the records of that are overwritten"
    lines = "".join(f"\n  {ranks_text(ranks)}: {text}" for text, ranks in by_value(records.items()).items() if not same)
    return Verdict(
        "CollectiveMismatchError",
        (),
        f"ranks submitted different operations {what}. Every rank must submit the same operations in the same order"
        f"{lines}",
        n=first.number,
        operation=first.kind,
        records=records,
        phase=first.phase,
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


class Clock:
    """Seconds of one wait, and when to warn of it: at 5, 10, 20 ... s."""

    def __init__(self) -> None:
        self.seconds, self._warn_at = 0.0, FIRST_WARNING

    def warns(self) -> bool:
        """Return whether it is time to say so, once each time."""
        if self.seconds < self._warn_at:
            return False
        self._warn_at *= 2
        return True


class Late:
    """How long the first of the ranks wait for the last; the caller says how much time counts."""

    def __init__(self) -> None:
        self._low = 0
        self._clock, self._patience = Clock(), Clock()

    def look(self, readers: Mapping[int, Reader], passed: float) -> list[Waiting]:
        """Return who waits for whom after `passed` more seconds: nobody, or the first for the last."""
        heads = {rank: reader.head() for rank, reader in readers.items()}
        low, high = min(heads.values()), max(heads.values())
        if low != self._low or low == high:
            self._low, self._clock, self._patience = low, Clock(), Clock()
            return []
        # Whoever is further ahead than its ring is long shows the oldest that it has.
        ahead = [reader for rank, reader in readers.items() if heads[rank] > low]
        entries = [entry for reader in ahead if (entry := reader.collective(max(low + 1, reader.oldest())))]
        absent = tuple(rank for rank, head in heads.items() if head == low)
        bounded = next((entry for entry in entries if entry.bound), None)
        if bounded is not None:
            self._clock.seconds += passed
            return [Waiting(bounded, absent, self._clock.seconds, self._clock.warns())]
        # Whoever may wait for ever does so on a clock of its own: it is no part of a wait that has a bound.
        self._clock = Clock()
        self._patience.seconds += passed
        return [Waiting(entry, absent, self._patience.seconds, False) for entry in entries[:1]]


Side = tuple[int, int, str]
"""A rank, its peer, and ``"send"`` or ``"recv"``."""


def opposite(side: Side) -> Side:
    """Return the side of the peer."""
    return side[1], side[0], "recv" if side[2] == "send" else "send"


class Pairs:
    """Sends and receives: the k-th send of one rank to another pairs with the k-th receive there.

    By side (rank, peer, kind), whose records are numbered without gaps: a side that was seen at a number has submitted
    all below it, also those that its ring has lost. What a rank whose ring has lost records submitted on its other
    sides is not known, and nobody is said to wait for it there.

    Parameters
    ----------
    ranks : collection of int
        The ranks of this node.

    Attributes
    ----------
    away : dict
        Of each side whose peer is on another node the newest records.
    """

    def __init__(self, ranks: Collection[int]) -> None:
        self._ranks = ranks
        self._read: dict[int, int] = {}
        self._reached: dict[Side, int] = {}
        self._open: dict[Side, dict[int, Entry]] = {}
        self._clocks: dict[Side, tuple[int, Clock]] = {}
        self._lossy: set[int] = set()
        self.away: dict[Side, deque[Entry]] = {}

    def read(self, readers: Mapping[int, Reader]) -> dict[int, Entry] | None:
        """Take what is new; returns what the two ranks submitted where a pair does not fit."""
        for rank, reader in readers.items():
            newest = reader.pairs()
            next_one = self._read.get(rank, 0) + 1
            first = max(next_one, newest - PAIRS * 7 // 8)
            if first > next_one:
                self._lose(rank)
            for position in range(first, newest + 1):
                found = reader.pair(position)
                # A record that is being written is there at the next look.
                if found is None and position == newest:
                    break
                self._read[rank] = position
                if found is None or found[1].number <= reader.pairs_floor:
                    continue
                if found[0] not in self._ranks:
                    side = rank, found[0], found[1].kind
                    self.away.setdefault(side, deque(maxlen=_KEPT_AWAY)).append(found[1])
                elif differing := self._match(rank, *found):
                    return differing
        return None

    def settled(self, glances: Mapping[int, Glance]) -> bool:
        """Whether all is read that a glance at each rank showed, and nobody waits there."""
        read = all(self._read.get(rank, 0) >= glance.pairs for rank, glance in glances.items())
        return read and not any(self._open.values())

    def _lose(self, rank: int) -> None:
        """Forget what was known of a rank's sides, and who waits there."""
        self._lossy.add(rank)
        self._reached = {side: number for side, number in self._reached.items() if side[0] != rank}
        self._open = {side: entries for side, entries in self._open.items() if side[1] != rank}
        self.away = {side: entries for side, entries in self.away.items() if side[0] != rank}

    def knows(self, rank: int) -> bool:
        """Whether a side of a rank that was never seen has submitted nothing."""
        return rank not in self._lossy

    def _has_reached(self, side: Side, number: int) -> bool:
        reached = self._reached.get(side)
        return side[0] in self._lossy if reached is None else reached >= number

    def _match(self, rank: int, peer: int, entry: Entry) -> dict[int, Entry] | None:
        side = rank, peer, entry.kind
        other = opposite(side)
        self._reached[side] = entry.number
        waiting = self._open.get(other, {})
        theirs = waiting.pop(entry.number, None)
        while waiting and next(iter(waiting)) < entry.number:
            del waiting[next(iter(waiting))]
        if theirs is not None:
            same = (entry.elements, entry.dtype) == (theirs.elements, theirs.dtype)
            return None if same else {rank: entry, peer: theirs}
        mine = self._open.setdefault(side, {})
        if not self._has_reached(other, entry.number) and len(mine) < PAIRS:
            mine[entry.number] = entry
        return None

    def look(self, passed: float) -> list[Waiting]:
        """Return, for each side, who waits for whom after `passed` more seconds."""
        found = []
        for side, entries in self._open.items():
            if not entries:
                continue
            number, entry = next(iter(entries.items()))
            known, clock = self._clocks.get(side, (0, Clock()))
            if known != number:
                clock = Clock()
            clock.seconds += passed
            self._clocks[side] = number, clock
            found.append(Waiting(entry, (side[1],), clock.seconds, bool(entry.bound) and clock.warns()))
        return found
