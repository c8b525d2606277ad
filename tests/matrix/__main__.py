"""The tool: ``python -m matrix``; ``./launch/fault-matrix`` starts it in the environments that it needs."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import pytest
from helpers.job import JobFailure

from matrix import reporting
from matrix.cells import HOSTS_PART, PARTS, Cell, every_cell
from matrix.choosing import AT_A_TIME, for_ci, on_gpus, selection
from matrix.judging import NONE, NOT_RUN, PASSED, WRONG, Outcome, judge, judge_calm
from matrix.running import Runner
from matrix.table import CALM, HOST, NCCL, ON_GPU

DOCS = Path(__file__).resolve().parents[2] / "docs"


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fault-matrix", description="Run the fault matrix and judge it.")
    parser.add_argument("--ci", action="store_true", help="the part that is run before a change lands")
    parser.add_argument(
        "--cell", action="append", default=[], metavar="NAME", help="only this cell or scene; repeatable"
    )
    parser.add_argument("--scenes", action="store_true", help="only the scenes that must end well, at full length")
    parser.add_argument("--list", action="store_true", help="name the cells and scenes of the selection, run nothing")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="run each cell N times")
    parser.add_argument("--gpus", metavar="LIST", help="run the cells of real GPUs on these, such as 0 or 0,1")
    parser.add_argument("--plane", action="append", choices=ON_GPU, help="of those cells only this plane; repeatable")
    parser.add_argument(
        "--part",
        action="append",
        choices=PARTS,
        help="only cells of one host, of several, of recoveries; repeatable; a page keeps its other sections",
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="where the page goes")
    chosen = parser.parse_args(words)
    chosen.gpus = chosen.gpus.split(",") if chosen.gpus else []
    if chosen.plane is None:
        chosen.plane = [gpus.name for gpus in ON_GPU.values() if gpus.gpus <= len(chosen.gpus)]
    return chosen


def scenes() -> list[tuple[str, str, str]]:
    """Return the scenes that must end well: name, plane, launcher."""
    launchers = {HOST: "mpich", NCCL: "openmpi"}
    return [
        (calm.name, plane, "hosts-openmpi" if calm.hosts else launchers[plane])
        for calm in CALM.values()
        for plane in calm.planes
    ]


def _wanted(chosen: argparse.Namespace) -> tuple[list[Cell], list[tuple[str, str, str]]]:
    """Return the cells and scenes to run."""
    if chosen.scenes:
        return [], scenes()
    if not chosen.cell:
        cells = on_gpus(chosen.plane) if chosen.gpus else for_ci() if chosen.ci else selection()
        if chosen.part:
            between = [scene for scene in scenes() if CALM[scene[0]].hosts and HOSTS_PART in chosen.part]
            return [cell for cell in cells if cell.part in chosen.part], between
        return cells, [] if chosen.gpus else scenes()
    known = {cell.name: cell for cell in [*every_cell(), *every_cell(ON_GPU, gpu=True)]}
    calm = {".".join(scene): scene for scene in scenes()}
    unknown = [name for name in chosen.cell if name not in known and name not in calm]
    if unknown:
        raise SystemExit(
            f"fault-matrix: no cell {', '.join(unknown)}; a name is FAULT.PHASE.PLANE.LAUNCHER[.RECOVERY], see --list"
        )
    return [known[n] for n in chosen.cell if n in known], [calm[n] for n in chosen.cell if n in calm]


class _Run:
    """Runs what is wanted, and keeps the outcomes."""

    def __init__(self, runner: Runner, chosen: argparse.Namespace) -> None:
        self._runner, self._repeat, self._full = runner, chosen.repeat, not chosen.ci
        self._gpus: SimpleQueue[str] = SimpleQueue()
        for gpu in chosen.gpus:
            self._gpus.put(gpu)
        self.cells: dict[Cell, Outcome] = {}
        self.calm: dict[str, Outcome] = {}
        self.load: list[float] = []

    def cell(self, cell: Cell) -> None:
        """Run a cell."""
        gpus = [self._gpus.get() for _ in range(ON_GPU[cell.plane].gpus)] if cell.plane in ON_GPU else []
        runs = [partial(self._runner.cell, cell, gpus)] * self._repeat
        self.cells[cell] = self._outcome(cell.name, lambda: judge(cell, [run() for run in runs]))
        for gpu in gpus:
            self._gpus.put(gpu)

    def scene(self, scene: tuple[str, str, str]) -> None:
        """Run a scene that must end well."""
        name = ".".join(scene)
        self.calm[name] = self._outcome(name, lambda: judge_calm(self._runner.calm(*scene, full=self._full)))

    def _outcome(self, name: str, run: Callable[[], Outcome]) -> Outcome:
        """Return the outcome, and say it; a job that does not start is wrong, one that cannot be started here not run.

        What ``BUTTER_MPI_TEST_REQUIRE`` names must be there: without it this raises, as in the tests.
        """
        try:
            outcome = run()
        except JobFailure as failure:
            outcome = Outcome(WRONG, [str(failure)])
        except pytest.skip.Exception as missing:
            outcome = Outcome(NOT_RUN, [str(missing)])
        self.load.append(os.getloadavg()[0])
        print(reporting.line(name, outcome), flush=True)
        return outcome


def _together(tasks: Sequence[Callable[[], None]], at_a_time: int = AT_A_TIME) -> None:
    """Run what waits most of its time, or has a GPU of its own, several at a time."""
    with ThreadPoolExecutor(at_a_time) as pool:
        for done in [pool.submit(task) for task in tasks]:
            done.result()


def _what(chosen: argparse.Namespace) -> str:
    if chosen.gpus:
        return "SIGKILL and SIGSTOP in every phase, every other fault in one, recoveries of each kind of fault"
    return "every dangerous pair, and " + ("of the others what fits" if chosen.ci else "every other pair of values")


def main(words: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit status."""
    chosen = _arguments(words)
    cells, calm = _wanted(chosen)
    if chosen.list:
        print("\n".join([*(cell.name for cell in cells), *(".".join(scene) for scene in calm)]))
        return 0
    begin = time.monotonic()
    with Runner() as runner:
        run = _Run(runner, chosen)
        together = [scene for scene in calm if not CALM[scene[0]].alone]
        real = [cell for cell in cells if cell.plane in ON_GPU]
        for needed in sorted({ON_GPU[cell.plane].gpus for cell in real}):
            tasks = [partial(run.cell, cell) for cell in real if ON_GPU[cell.plane].gpus == needed]
            _together(tasks, len(chosen.gpus) // needed)
        for cell in [cell for cell in cells if not cell.slow and cell not in real]:
            run.cell(cell)
        slow = [partial(run.cell, cell) for cell in cells if cell.slow and cell not in real]
        _together([*slow, *(partial(run.scene, scene) for scene in together)])
        for scene in calm:
            if scene not in together:
                run.scene(scene)
    ordered = {cell: run.cells[cell] for cell in cells}
    bad = [one for one in [*ordered.values(), *run.calm.values()] if one.status not in (PASSED, NONE, NOT_RUN)]
    print(f"{len(ordered)} cells, {len(run.calm)} scenes, {len(bad)} of them bad, {time.monotonic() - begin:.0f} s")
    if chosen.page or not (chosen.cell or chosen.scenes or chosen.part):
        calm_in_order = {".".join(scene): run.calm[".".join(scene)] for scene in calm}
        today = datetime.datetime.now(datetime.UTC).date()
        page = chosen.page or DOCS / ("fault_matrix_gpu.md" if chosen.gpus else "fault_matrix.md")
        if chosen.part and page.exists():
            new = reporting.with_parts(page.read_text(), ordered, calm_in_order, load=run.load, date=today)
            page.write_text(new)
        else:
            page.write_text(reporting.page(ordered, calm_in_order, what=_what(chosen), load=run.load, date=today))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
