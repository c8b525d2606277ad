"""Ranks as a relay sees them, without processes."""

from __future__ import annotations

from typing import Any

from butter_mpi.sentinel.judging import Verdict
from butter_mpi.sentinel.messages import pack, unpack

__all__ = ["FakeRank", "killed"]


class FakeRank:
    """A rank as the relay sees it; what it is told is kept, or goes to a client."""

    def __init__(self, number: int) -> None:
        self.number = self.first_number = number
        self.lives, self.closed, self.unsent = True, False, 0
        self.death: Verdict | None = None
        self.stop: Verdict | None = None
        self.told: list[dict[str, Any]] = []

    def tell(self, kind: str, **fields: Any) -> None:
        """Keep it, as it comes out of the socket."""
        self.told.append(unpack(pack(kind, **fields)))

    def end(self) -> str:
        """Return how it ended."""
        return "ended"


def killed(rank: FakeRank) -> None:
    """Mark a rank as the watcher does."""
    rank.lives, rank.death = False, Verdict("PeerLostError", (rank.number,), f"rank {rank.number} was killed")
