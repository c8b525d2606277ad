"""What ranks of different nodes submit, compared: who differs, and who waits for whom.

Each node shows the hubs its place: the lowest and highest number of its ranks, and the hash of all up to a number that
the leading hub names. That hub compares the hashes, asks for the records themselves only if they differ, and tells all
nodes the lowest place of the job: those that are ahead of it wait there, each by its own clock. The ranks of one node
are compared by its own watcher; here one of them stands for all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from butter_mpi.recorder import COLLECTIVES, Entry, Reader
from butter_mpi.sentinel.judging import STAY, Clock, Verdict, mismatch

__all__ = ["Across", "Standing", "entries_of", "overdue"]

_SHOWN = 64
_FRESH = 1.5
_LEFT_GRACE = 0.5
_MOST_RANKS, _MOST_NODES = 100, 8
_LONGEST_SAID = 2000
_TYPES: tuple[Any, ...] = (int, (int, float), int, int, int, str, (int, float), int)


@dataclass(frozen=True)
class Standing:
    """Where the last of some ranks are: the number, who they are, what to say of them, and whether they have closed."""

    low: int
    ranks: tuple[int, ...]
    said: str
    closed: bool

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Standing:
        """Return what another watcher said."""
        ranks = tuple(one for one in fields["ranks"] if isinstance(one, int))
        return cls(fields["low"], ranks, fields["said"], fields["closed"])

    def fields(self) -> dict[str, Any]:
        """Return it as a message says it."""
        ranks, said = list(self.ranks[:_MOST_RANKS]), self.said[:_LONGEST_SAID]
        return {"low": self.low, "ranks": ranks, "said": said, "closed": self.closed}

    @classmethod
    def lowest(cls, every: Sequence[Standing]) -> Standing:
        """Return that of the last of all: of those that have closed, if one there has."""
        low = min(one.low for one in every)
        last = [one for one in every if one.low == low]
        last = [one for one in last if one.closed] or last
        said = "; ".join(one.said for one in last[:_MOST_NODES])
        said += f"; and those of {len(last) - _MOST_NODES} more nodes" if len(last) > _MOST_NODES else ""
        return cls(low, tuple(rank for one in last for rank in one.ranks), said, last[0].closed)


@dataclass
class _Place:
    """The place of a node as the hub has it."""

    standing: Standing
    at: int
    chain: int
    age: float = 0.0


class Across:
    """One watcher's part.

    Parameters
    ----------
    me : int
        This node.
    nodes : collection of int
        The nodes that have ranks.
    say : callable
        Sends a message: its kind, whether it is for the hubs alone, and its fields.
    """

    def __init__(self, me: int, nodes: Collection[int], say: Callable[..., None]) -> None:
        self._me, self._nodes, self._say = me, frozenset(nodes), say
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._places: dict[int, _Place] = {}
        # The number at which hashes are compared, the highest at which they agreed, and the records that are shown.
        self._at = self._agreed = 0
        self._span: tuple[int, int] | None = None
        self._shown: dict[int, tuple[tuple[int, int], int, list[Entry]]] = {}
        self._asked: tuple[int, int] | None = None
        self._lowest: Standing | None = None
        self._lowest_age = 0.0
        self._clock, self._low = Clock(), -1

    def hear(self, node: int, kind: str, fields: Mapping[str, Any]) -> None:
        """Take what another watcher says."""
        if fields["epoch"] != self._epoch or node not in self._nodes:
            return
        if kind == "place":
            self._places[node] = _Place(Standing.of(fields), fields["at"], fields["chain"])
        elif kind == "lowest":
            self._lowest, self._lowest_age, self._at = Standing.of(fields), 0.0, fields["at"]
        elif kind == "show":
            self._asked = fields["first"], fields["last"]
        elif kind == "shown":
            self._shown[node] = (fields["first"], fields["last"]), fields["rank"], entries_of(fields["entries"])

    def look(
        self, readers: Mapping[int, Reader], epoch: int, standing: Callable[[list[int]], Standing], leads: bool
    ) -> Verdict | None:
        """Show this node's place and what it was asked for; of the leading hub: compare those of all.

        Parameters
        ----------
        readers : mapping of int to Reader
            The recorders of the ranks of this node whose submissions are compared.
        epoch : int
            Of the communicator.
        standing : callable
            Returns what to say of the ranks that are last.
        leads : bool
            Whether this is the leading hub.
        """
        if epoch != self._epoch:
            self._begin(epoch)
        heads = {rank: reader.head() for rank, reader in readers.items()}
        low = min(heads.values())
        own = replace(standing([rank for rank, head in heads.items() if head == low]), low=low)
        at, entry = self._at, next(iter(readers.values())).collective(self._at)
        self._places[self._me] = _Place(own, at, entry.chain if entry else 0)
        self._say("place", True, epoch=epoch, at=at, chain=entry.chain if entry else 0, **own.fields())
        if self._asked is not None:
            self._show(readers, self._asked)
            self._asked = None
        return self._lead(readers) if leads else None

    def _show(self, readers: Mapping[int, Reader], span: tuple[int, int]) -> None:
        rank, reader = next(iter(readers.items()))
        entries = [entry for number in _numbers(*span) if (entry := reader.collective(number))]
        self._shown[self._me] = span, rank, entries
        fields = {"epoch": self._epoch, "first": span[0], "last": span[1], "rank": rank}
        self._say("shown", True, **fields, entries=[list(one) for one in entries])

    # -- the leading hub ---------------------------------------------------------------------------------------------

    def _lead(self, readers: Mapping[int, Reader]) -> Verdict | None:
        if len(self._places) < len(self._nodes) or any(one.age >= _FRESH for one in self._places.values()):
            return None
        lowest = Standing.lowest([one.standing for one in self._places.values()])
        verdict = self._compare(readers, lowest.low)
        self._say("lowest", False, epoch=self._epoch, at=self._at, **lowest.fields())
        self._lowest, self._lowest_age = lowest, 0.0
        return verdict

    def _compare(self, readers: Mapping[int, Reader], low: int) -> Verdict | None:
        """Hold the hashes against one another, and where they differ the records from the last that agreed on."""
        if self._span is not None:
            return self._confront(readers, self._span)
        if all(one.at == self._at for one in self._places.values()):
            # One whose record is overwritten already is so far ahead that it is only not late.
            chains = {one.chain for one in self._places.values() if one.chain}
            if len(chains) > 1:
                # Of what came before that, recorders hold nothing any more.
                self._ask(readers, (max(self._agreed, self._at - COLLECTIVES) + 1, self._at))
                return None
            self._agreed = self._at
        self._at = low
        return None

    def _ask(self, readers: Mapping[int, Reader], span: tuple[int, int]) -> None:
        self._span = span
        self._shown.clear()
        self._say("show", False, epoch=self._epoch, first=span[0], last=span[1])
        self._show(readers, span)

    def _confront(self, readers: Mapping[int, Reader], span: tuple[int, int]) -> Verdict | None:
        """Close in on the first record that differs: hashes differ from there on."""
        shown = {rank: entries for asked, rank, entries in self._shown.values() if asked == span}
        if len(shown) < len(self._nodes):
            return None
        by_number: dict[int, dict[int, Entry]] = {}
        for rank, entries in shown.items():
            for entry in entries:
                by_number.setdefault(entry.number, {})[rank] = entry
        several = {number: found for number, found in sorted(by_number.items()) if len(found) > 1}
        if span[1] - span[0] >= _SHOWN:
            same, differing = _around(several, span)
            self._ask(readers, (max(same + 1, differing - _SHOWN + 1), differing))
            return None
        for found in several.values():
            if len({(entry.signature, entry.elements) for entry in found.values()}) > 1:
                return mismatch(found)
        # What differed first is overwritten on some node; where nothing is left to be shown, what comes next may be.
        self._span = None
        return mismatch(several[max(several)]) if several else None

    # -- waiting -----------------------------------------------------------------------------------------------------

    def wait(self, readers: Mapping[int, Reader], passed: float) -> tuple[Verdict | None, str]:
        """Return what is wrong, or a warning, where ranks of this node wait for those that are last, elsewhere."""
        for place in self._places.values():
            # One that has closed says nothing any more.
            place.age += 0.0 if place.standing.closed else passed
        self._lowest_age += passed
        lowest = self._lowest
        heads = [reader.head() for reader in readers.values()]
        if lowest is None or self._lowest_age >= _FRESH or lowest.low >= min(heads) or lowest.low != self._low:
            self._low, self._clock = lowest.low if lowest else -1, Clock()
            return None, ""
        entries = [reader.collective(max(lowest.low + 1, reader.oldest())) for reader in readers.values()]
        there = [one for one in entries if one]
        entry = next((one for one in there if one.bound), there[0] if there else None)
        if entry is None:
            return None, ""
        self._clock.seconds += passed
        return overdue(entry, lowest, self._clock)


def overdue(entry: Entry, last: Standing, clock: Clock) -> tuple[Verdict | None, str]:
    """Return what is wrong, or a warning, where a rank waits in `entry` for those that are `last`, on other nodes."""
    seconds = clock.seconds
    facts: dict[str, Any] = {"n": entry.number, "operation": entry.kind, "elapsed": seconds, "phase": entry.phase}
    if last.closed and seconds >= _LEFT_GRACE:
        return Verdict("PeerLostError", last.ranks, f"{entry.text()}: {last.said}. {STAY}", **facts), ""
    # One that may wait for ever is never late.
    if last.closed or not entry.bound:
        return None, ""
    if seconds >= entry.bound:
        late = f"no answer within {seconds:.1f} s (collective deadline: {entry.bound:g} s) from {last.said}"
        return Verdict("CollectiveTimeoutError", last.ranks, f"{entry.text()}: {late}", **facts), ""
    return None, f"{entry.text()}: has waited {seconds:.0f} s for {last.said}" if clock.warns() else ""


def _numbers(first: int, last: int) -> list[int]:
    """Return the last number and those before it, at equal steps, as few as a message shows."""
    step = max(1, -(-(last - first + 1) // _SHOWN))
    return list(range(last, first - 1, -step))[:_SHOWN]


def _around(several: Mapping[int, Mapping[int, Entry]], span: tuple[int, int]) -> tuple[int, int]:
    """Return the last number at which those that were shown agree, and the first after it at which they do not."""
    agree = {number: len({entry.chain for entry in found.values()}) == 1 for number, found in several.items()}
    differing = min((number for number, so in agree.items() if not so), default=span[1])
    return max((number for number, so in agree.items() if so and number < differing), default=span[0] - 1), differing


def entries_of(raw: Sequence[Any]) -> list[Entry]:
    """Return the records in a message; what is none is left out."""
    whole = [one for one in raw[:_SHOWN] if isinstance(one, list) and len(one) == len(_TYPES)]
    return [Entry(*one) for one in whole if all(isinstance(*pair) for pair in zip(one, _TYPES, strict=True))]
