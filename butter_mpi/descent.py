"""Where a communicator comes from: ``init``, or a split of another one; and its ranks' numbers there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Descent", "applicable", "members", "refused"]

_SHRUNK = re.compile(r"(?:(?P<before>.*), )?shrink (?P<number>\d+)", re.DOTALL)
_LARGEST = 2**31 - 1
_SMALLEST_KEY = -(2**31)
_MOST_MAPPED = 16


@dataclass(frozen=True, slots=True)
class Descent:
    """A communicator's name, equal on all its ranks, and what its ranks are in the one that ``init`` made.

    Parameters
    ----------
    name : str
        How messages name it.
    origin : str
        The name of the communicator that ``init`` made.
    size : int
        That one's number of ranks.
    ranks : tuple of int
        For each rank of this communicator, its rank there.
    """

    name: str
    origin: str
    size: int
    ranks: tuple[int, ...]

    @classmethod
    def of_init(cls, name: str, size: int) -> Descent:
        """Return that of a communicator of ``init``."""
        return cls(name, name, size, tuple(range(size)))

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Descent:
        """Return it from its fields, as JSON carries them."""
        return cls(facts["name"], facts["origin"], facts["size"], tuple(facts["ranks"]))

    @property
    def split(self) -> bool:
        """Whether it comes from another communicator."""
        return self.name != self.origin

    def child(self, name: str, ranks: Sequence[int]) -> Descent:
        """Return that of a communicator that is split off this one, with `ranks` of it in their new order."""
        whole = f"{self.name}, {name}" if self.split else name
        return Descent(whole, self.origin, self.size, tuple(self.ranks[rank] for rank in ranks))

    def shrunk(self, ranks: Sequence[int]) -> Descent:
        """Return that of a communicator in which `ranks` of this one go on; one that comes of such a one counts on."""
        before = _SHRUNK.fullmatch(self.name)
        own = f"{self.name}, " if self.split else ""
        prefix = own if before is None else f"{before['before']}, " if before["before"] else ""
        name = f"{prefix}shrink {1 if before is None else int(before['number']) + 1}"
        return Descent(name, self.origin, self.size, tuple(self.ranks[rank] for rank in ranks))

    def key(self, first: str) -> str:
        """Return a key of this communicator alone, from that of the first one with its watcher."""
        shrunk = _SHRUNK.fullmatch(self.name)
        return f"{first} shrink {shrunk['number']}" if shrunk else first

    def who(self, rank: int, host: str) -> str:
        """Return a rank as messages name it: here, and in the communicator of ``init``."""
        here = f"rank {rank}/{len(self.ranks)}"
        if self.split:
            here += f" of {self.name} (rank {self.ranks[rank]}/{self.size} of {self.origin})"
        return f"{here} on {host}"

    def remark(self, lost: Sequence[int]) -> str:
        """Return what a failure means for other communicators; empty where this one comes from ``init``."""
        if not self.split:
            return ""
        mapped = [rank for rank in (lost or range(len(self.ranks))) if 0 <= rank < len(self.ranks)][:_MOST_MAPPED]
        there = ", ".join(f"{rank} is {self.ranks[rank]}" for rank in mapped)
        numbers = f"Ranks of {self.name} in {self.origin}: {there}"
        if _SHRUNK.fullmatch(self.name):
            # It has replaced the one that it comes from.
            return numbers
        return (
            f"Other communicators have a health of their own: the one that {self.name} comes from, and those split off "
            f"beside it, go on unless they are named here, or have a rank that has ended. {numbers}"
        )


def refused(what: str, color: Any, key: Any) -> tuple[str, str] | None:
    """Return what is wrong with the arguments of a split, as the name of an error and its text, or ``None``."""
    if color is not None and (wrong := _wrong(f"{what}: color", color, 0, "; None for a rank that shall be in none")):
        return wrong
    return _wrong(f"{what}: key", key, _SMALLEST_KEY, "")


def _wrong(name: str, value: Any, low: int, remedy: str) -> tuple[str, str] | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return "TypeError", f"{name} must be an int{remedy}; got {type(value).__name__}"
    if not low <= value <= _LARGEST:
        return "ValueError", f"{name} must be from {low} to {_LARGEST}{remedy}; got {value}"
    return None


def members(said: Sequence[Mapping[str, Any]], color: int) -> list[int]:
    """Return the ranks that gave a color, in the order of their keys, then of their ranks."""
    ranks = [rank for rank, one in enumerate(said) if one["color"] == color]
    return sorted(ranks, key=lambda rank: (said[rank]["key"], rank))


def applicable(required: str | None, nodes: Sequence[str]) -> str | None:
    """Return a required transport where ranks on these nodes can have it at all, else ``None``.

    Parameters
    ----------
    required : str or None
        What was required of, and verified on, the communicator that these ranks come from.
    nodes : sequence of str
        The node of each rank.

    Returns
    -------
    str or None
        A network counts between nodes, what is inside a node where every rank has another one on its own.
    """
    if required is None or len(nodes) == 1:
        return None
    if required.startswith("NET/"):
        return required if len(set(nodes)) > 1 else None
    return required if all(nodes.count(node) > 1 for node in set(nodes)) else None
