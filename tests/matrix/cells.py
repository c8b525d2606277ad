"""The cells of the matrix: which values go together, and what each cell is."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from matrix.table import (
    ALSO_BETWEEN,
    BETWEEN,
    BY_STANDIN,
    FAULTS,
    FULL,
    HOST,
    IN_FLIGHT,
    LAUNCHERS,
    NCCL,
    NOT_IN_A_BROADCAST,
    NOTHING,
    ON,
    ON_GPU,
    PHASES,
    PLANES,
    RECOVERIES,
    RUNNING,
    SECOND,
    SHRINK,
    START_DEADLINE,
    STRICT,
    VICTIM,
    Fault,
)

FIRST_PART, HOSTS_PART, RECOVERY_PART = PARTS = ("one-host", "hosts", "recovery")
_SECONDS = {"frozen": 5.0, "watcher-frozen": 5.5, "late": 15.0, "left": 1.0, "host": 5.0, "cut": 5.0, "unseen": 12.0}
"""What a kind lasts by design."""


@dataclass(frozen=True)
class Cell:
    """One fault in one phase on one plane under one launcher, and what is done about it."""

    fault: str
    phase: str
    plane: str
    launcher: str
    recovery: str = NOTHING

    @property
    def name(self) -> str:
        """How people ask for it."""
        more = "" if self.recovery == NOTHING else f".{self.recovery}"
        return f"{self.fault}.{self.phase}.{self.plane}.{self.launcher}{more}"

    @property
    def kind(self) -> str:
        """The kind of its fault."""
        return FAULTS[self.fault].kind

    @property
    def ranks(self) -> int:
        """How many there are."""
        return ON_GPU[self.plane].ranks if self.plane in ON_GPU else FAULTS[self.fault].ranks

    @property
    def on_hosts(self) -> bool:
        """Whether each rank has a host of its own."""
        return LAUNCHERS[self.launcher].hosts

    @property
    def part(self) -> str:
        """The part of the matrix, and of its page, that it belongs to."""
        return RECOVERY_PART if self.recovery != NOTHING else HOSTS_PART if self.on_hosts else FIRST_PART

    @property
    def slow(self) -> bool:
        """Whether it lasts seconds by design, so that another one beside it does not decide the outcome."""
        return (self.kind in _SECONDS and self.kind != "left") or self.phase == "join"

    @property
    def seconds(self) -> float:
        """What it costs, about."""
        more = max(_SECONDS.get(self.kind, 0.0), START_DEADLINE if self.phase == "join" else 0.0)
        if self.kind == "watcher" and self.on_hosts:
            more = _SECONDS["host"]
        return LAUNCHERS[self.launcher].seconds + more + (self.recovery != NOTHING) * 0.5

    @property
    def judged(self) -> tuple[int, ...]:
        """The ranks that must learn of it; after a recovery those that must be back at work."""
        return tuple(rank for rank in range(self.ranks) if rank not in FAULTS[self.fault].gone)

    @property
    def blames(self) -> bool:
        """Whether ranks must be named as lost."""
        return self.kind in ("death", "left", "frozen", "late", "host", "cut")

    def lost(self, rank: int) -> list[tuple[int, ...]]:
        """Return whom a rank may name as lost: whoever is gone; of two sides that are cut off each the other one.

        Where a network stands, one side tells the other what it sees, and that is then the first cause of both.
        """
        gone = FAULTS[self.fault].gone or (VICTIM,)
        others = tuple(other for other in range(self.ranks) if other not in gone)
        if self.fault in ("cut-control", "cut-data"):
            return [gone, others]
        return [others if self.kind == "cut" and rank == VICTIM else gone]


def _happens(fault: Fault, phase: str, plane: str) -> bool:
    """Say whether a fault makes sense in a phase on a plane."""
    if phase not in fault.phases or phase not in ON[plane]:
        return False
    if fault.name in BY_STANDIN if plane in ON_GPU else plane not in fault.planes:
        return False
    if fault.name == "host-kill" and plane == NCCL and phase in IN_FLIGHT:
        # The stand-in sees the end of a process, whatever network is cut.
        return False
    if fault.second and plane in ON_GPU and ON_GPU[plane].ranks <= SECOND:
        return False
    return not (fault.name in NOT_IN_A_BROADCAST and phase == "wait" and plane != HOST)


def _is_on(fault: Fault, cell: Cell) -> bool:
    """Say whether a fault is one of several hosts where there are several, and of one where there is one."""
    if not cell.on_hosts:
        return not fault.outside
    return (fault.outside or fault.name in ALSO_BETWEEN) and cell.phase in BETWEEN and cell.plane != STRICT


def _recovers(fault: Fault, cell: Cell) -> bool:
    """Say whether ranks can do that: who is lost needs a launcher that spares the others, or MPI's own shrink."""
    launcher = LAUNCHERS[cell.launcher]
    if cell.recovery not in fault.recoveries or (cell.recovery != NOTHING and cell.phase not in RUNNING):
        return False
    if cell.phase == FULL and cell.plane in ON_GPU and cell.recovery != NOTHING:
        # Each operation that NCCL ends takes some milliseconds, and there are a thousand of them.
        return False
    if cell.recovery != SHRINK:
        return True
    if cell.plane == HOST or cell.on_hosts:
        # MPI waits for a rank that is stopped.
        return launcher.ulfm and fault.kind != "frozen"
    return launcher.spares


def fits(cell: Cell) -> bool:
    """Say whether a cell makes sense."""
    fault = FAULTS[cell.fault]
    return _happens(fault, cell.phase, cell.plane) and _is_on(fault, cell) and _recovers(fault, cell)


def every_cell(planes: Iterable[str] = PLANES, *, gpu: bool = False) -> Iterator[Cell]:
    """Yield all that make sense, in the order of the tables."""
    launchers = [launcher.name for launcher in LAUNCHERS.values() if launcher.gpu == gpu]
    every = itertools.product(FAULTS, PHASES, planes, launchers, RECOVERIES)
    return (cell for values in every if fits(cell := Cell(*values)))
