"""Which cells are run: every pair of values that makes sense at least once, and the dangerous pairs in full."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from matrix.table import FAULTS, HOST, IN_FLIGHT, NCCL, ON_GPU, PHASES, Cell, every_cell, fits

Pair = tuple[tuple[int, str], tuple[int, str]]
CI_SECONDS = 155.0
"""What the cells of a --ci run may take by their estimates; false alarms and the environments come on top."""
AT_A_TIME = 4
"""How many slow cells run beside one another: each waits most of its time."""

# Where survivors live on, and where they wait longest: MPICH starts quickest.
_DANGEROUS = {"kill": "openmpi-ulfm", "stop": "mpich"}


def pairs(cell: Cell) -> frozenset[Pair]:
    """Return the pairs of values that a cell covers."""
    values = enumerate((cell.fault, cell.phase, cell.plane, cell.launcher))
    return frozenset(itertools.combinations(values, 2))


def dangerous() -> list[Cell]:
    """Return SIGKILL and SIGSTOP in every phase on both planes."""
    return [
        Cell(fault, phase, plane, launcher)
        for fault, launcher in _DANGEROUS.items()
        for phase in PHASES
        for plane in (HOST, NCCL)
        if fits(FAULTS[fault], phase, plane)
    ]


def covering(chosen: Sequence[Cell], candidates: Iterable[Cell]) -> list[Cell]:
    """Return more cells, so that with the chosen ones every pair of the candidates is covered; greedy, repeatable."""
    left = {cell: pairs(cell) for cell in candidates}
    covered = frozenset[Pair]().union(*map(pairs, chosen))
    found: list[Cell] = []
    while True:
        left = {cell: new for cell, those in left.items() if (new := those - covered)}
        if not left:
            return found
        best = max(left, key=lambda cell: (len(left[cell]), -cell.seconds))
        found.append(best)
        covered |= pairs(best)


def selection() -> list[Cell]:
    """Return the cells of a full run."""
    first = dangerous()
    return [*first, *covering(first, every_cell())]


def on_gpus(planes: Sequence[str]) -> list[Cell]:
    """Return SIGKILL and SIGSTOP in every phase, and every other fault in one phase: another one for each fault.

    Where each rank has a GPU only what depends on the transport: the two with an operation in flight.
    """
    cells = list(every_cell(planes, gpu=True))
    chosen = [
        cell for cell in cells if cell.fault in _DANGEROUS and (ON_GPU[cell.plane].shared or cell.phase in IN_FLIGHT)
    ]
    for plane in [plane for plane in planes if ON_GPU[plane].shared]:
        for number, fault in enumerate(name for name in FAULTS if name not in _DANGEROUS):
            of_it = [cell for cell in cells if (cell.fault, cell.plane) == (fault, plane) and cell.phase in IN_FLIGHT]
            chosen += of_it[number % len(of_it) :][:1] if of_it else []
    return chosen


def cost(cells: Iterable[Cell]) -> float:
    """Return the seconds that cells take together: slow ones run several at a time."""
    return sum(cell.seconds / AT_A_TIME if cell.slow else cell.seconds for cell in cells)


def for_ci() -> list[Cell]:
    """Return what fits: the dangerous pairs in full, every fault and launcher, then what covers most, as it fits."""
    cells = dangerous()
    more = selection()[len(cells) :]
    seen = {value for cell in cells for value in (cell.fault, cell.launcher)}
    for cell in sorted(more, key=lambda cell: cell.seconds):
        if not {cell.fault, cell.launcher} <= seen:
            cells.append(cell)
            seen |= {cell.fault, cell.launcher}
    for cell in more:
        if cell not in cells and cost([*cells, cell]) <= CI_SECONDS:
            cells.append(cell)
    return cells
