"""Which cells are run: every pair of values that makes sense at least once, and the dangerous pairs in full."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from matrix.cells import RECOVERY_PART, Cell, every_cell, fits
from matrix.table import FAULTS, HOST, IN_FLIGHT, NCCL, NOTHING, ON_GPU, PHASES

Pair = tuple[tuple[int, str], tuple[int, str]]
CI_SECONDS = 178.0
"""What the cells of a --ci run may take by their estimates; false alarms and the environments come on top."""
AT_A_TIME = 4
"""How many slow cells run beside one another: each waits most of its time."""

# Where survivors live on, and where they wait longest: MPICH starts quickest.
_DANGEROUS = {"kill": "openmpi-ulfm", "stop": "mpich"}


def pairs(cell: Cell) -> frozenset[Pair]:
    """Return the pairs of values that a cell covers."""
    values = enumerate((cell.fault, cell.phase, cell.plane, cell.launcher, cell.recovery))
    return frozenset(itertools.combinations(values, 2))


def dangerous() -> list[Cell]:
    """Return SIGKILL and SIGSTOP in every phase on both planes."""
    every = itertools.product(_DANGEROUS.items(), PHASES, (HOST, NCCL))
    cells = (Cell(fault, phase, plane, launcher) for (fault, launcher), phase, plane in every)
    return [cell for cell in cells if fits(cell)]


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
    chosen = dangerous()
    chosen += covering(chosen, every_cell())
    return [*chosen, *(cell for cell in _between_hosts() if cell not in chosen)]


def _between_hosts() -> list[Cell]:
    """Return the dangerous faults of ranks, on several hosts, in every phase that cells have there."""
    every = itertools.product(_DANGEROUS.items(), PHASES, (HOST, NCCL))
    cells = (Cell(fault, phase, plane, f"hosts-{launcher}") for (fault, launcher), phase, plane in every)
    return [cell for cell in cells if fits(cell)]


def on_gpus(planes: Sequence[str]) -> list[Cell]:
    """Return SIGKILL and SIGSTOP in every phase, and every other fault in one phase: another one for each fault.

    Where each rank has a GPU only what depends on the transport: the two with an operation in flight.
    """
    every = list(every_cell(planes, gpu=True))
    cells = [cell for cell in every if cell.recovery == NOTHING]
    chosen = [
        cell for cell in cells if cell.fault in _DANGEROUS and (ON_GPU[cell.plane].shared or cell.phase in IN_FLIGHT)
    ]
    for plane in [plane for plane in planes if ON_GPU[plane].shared]:
        for number, fault in enumerate(name for name in FAULTS if name not in _DANGEROUS):
            of_it = [cell for cell in cells if (cell.fault, cell.plane) == (fault, plane) and cell.phase in IN_FLIGHT]
            chosen += of_it[number % len(of_it) :][:1] if of_it else []
    return [*chosen, *_recoveries(every)]


def _recoveries(cells: Iterable[Cell]) -> list[Cell]:
    """Return, of a shared GPU, the recoveries of each kind of fault in one phase, of each way to kill, SIGKILL in two.

    What ranks do after a mismatch does not depend on which one it was.
    """
    of_each: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if cell.part == RECOVERY_PART and ON_GPU[cell.plane].shared and cell.phase in IN_FLIGHT:
            which = cell.fault if cell.fault.startswith("kill") else f"{cell.kind} {cell.recovery}"
            of_each.setdefault((which, cell.plane), []).append(cell)
    chosen = []
    for number, ((which, _), same) in enumerate(of_each.items()):
        turned = same[number % len(same) :] + same
        chosen += turned[: 2 if which == "kill" else 1]
    return chosen


def cost(cells: Iterable[Cell]) -> float:
    """Return the seconds that cells take together: slow ones run several at a time."""
    return sum(cell.seconds / AT_A_TIME if cell.slow else cell.seconds for cell in cells)


def _to_be_seen(cell: Cell) -> set[str]:
    return {cell.fault, cell.launcher, cell.recovery}


def for_ci() -> list[Cell]:
    """Return what fits: the dangerous pairs, every fault, launcher and recovery, then what covers most, as it fits."""
    cells = dangerous()
    more = [cell for cell in selection() if cell not in cells]
    seen = {value for cell in cells for value in _to_be_seen(cell)}
    while left := [cell for cell in more if not _to_be_seen(cell) <= seen]:
        best = max(left, key=lambda cell: len(_to_be_seen(cell) - seen) / cost([cell]))
        cells.append(best)
        seen |= _to_be_seen(best)
    for cell in more:
        if cell not in cells and cost([*cells, cell]) <= CI_SECONDS:
            cells.append(cell)
    return cells
