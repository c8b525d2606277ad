"""What must come of a cell: within how many milliseconds, and which errors."""

from __future__ import annotations

from dataclasses import dataclass

from matrix.cells import Cell
from matrix.table import HOST, START, START_DEADLINE, VICTIM


@dataclass(frozen=True)
class Bound:
    """Milliseconds from the fault: to poisoned (median), to the exception, to the return of a foreign wait."""

    poisoned: float
    raised: float
    foreign: float

    def of(self, phase: str) -> float:
        """Return the bound of the exception in a phase: after a foreign wait it comes when that returns."""
        return self.foreign if phase == "foreign" else self.raised


BOUNDS = {
    "death": Bound(250, 300, 1500),
    "watcher": Bound(250, 300, 1500),
    "mismatch": Bound(2000, 2000, 2000),
    "frozen": Bound(5000, 5000, 5000),
    "watcher-frozen": Bound(5000, 5000, 5000),
    "left": Bound(5000, 5000, 5000),
    "told": Bound(5000, 5000, 5000),
    "host": Bound(5000, 5000, 5000),
    "cut": Bound(5000, 5000, 5000),
    # From the begin of the wait.
    "late": Bound(11000, 11000, 11000),
    "unseen": Bound(11000, 11000, 11000),
}
_BETWEEN_HOSTS = Bound(500, 500, 1500)
"""Of a rank that was killed."""
WARNED_AT = (5000, 6000)
LATE_AT = (10000, 11000)
ENDED_WITHIN = 5000.0
"""Of close and exit: milliseconds until the processes of the others are gone."""


BACK = {HOST: 2000.0}
BACK_ON_GPU = 1500.0


def back_within(cell: Cell) -> float:
    """Return within how many milliseconds all must be back at work: of a death from there on, else once all know."""
    return BACK.get(cell.plane, BACK_ON_GPU)


def bound(cell: Cell, rank: int) -> Bound:
    """Return the bounds of a cell for a rank."""
    if cell.phase == "join":
        return Bound(*[START_DEADLINE * 1000] * 3)
    if cell.phase in START:
        return Bound(*[min(START_DEADLINE, 5.0) * 1000] * 3)
    if cell.on_hosts and cell.kind == "death":
        return _BETWEEN_HOSTS
    if cell.on_hosts and cell.kind == "watcher" and rank != VICTIM:
        return BOUNDS["host"]
    return BOUNDS[cell.kind]


ERRORS = {
    "death": "PeerLostError",
    "left": "PeerLostError",
    "frozen": "PeerLostError",
    "watcher": "PeerLostError",
    "watcher-frozen": "PeerLostError",
    "mismatch": "CollectiveMismatchError",
    "late": "CollectiveTimeoutError",
    "told": "CommunicatorBrokenError",
    "host": "PeerLostError",
    "cut": "PeerLostError",
    "unseen": "CollectiveTimeoutError",
}


def errors(cell: Cell) -> tuple[str, ...]:
    """Return the classes that a rank may raise."""
    if cell.phase == "join":
        return ("StartError", "StartTimeoutError")
    if cell.phase in START:
        # Without a watcher a start may still come to its end, and breaks then.
        return ("StartError", ERRORS[cell.kind]) if "watcher" in cell.kind else ("StartError",)
    return (ERRORS[cell.kind],)
