"""Writes the matrix down: a table for the terminal, a page for the documents."""

from __future__ import annotations

import ctypes
import datetime
import os
import platform
import re
import statistics
from collections import Counter
from collections.abc import Collection, Sequence

from butter_mpi._nccl_types import version_text
from butter_mpi.cuda import devices
from butter_mpi.errors import CUDAError
from matrix.cells import FIRST_PART, HOSTS_PART, RECOVERY_PART, Cell
from matrix.expected import BACK, BACK_ON_GPU
from matrix.judging import PASSED, Outcome
from matrix.table import CALM, FAULTS, HOST, LAUNCHERS, ON_GPU, PHASES, RECOVERIES

_HEAD = """\
# The fault matrix

Written by `./launch/fault-matrix`; do not edit it. Real jobs of three ranks (two, where each has a GPU; four, where
a second one is lost later), of which rank 1 is the victim of one fault each, and what the others learned after how many
milliseconds.

* What ran: {what}.
* {date}, {machine}.
* {planes}
* *no survivors*: the launcher ended every rank before it could raise. The verdict was on stderr and in the verdict
  file, but for the phase `join`, in which no watcher stands yet. It does not count as passed.

{counts}
"""

_STANDINS = """\
The nccl plane ran on the stand-ins of CUDA and NCCL (`tests/standin`); `nccl-strict` is `check="strict"`. Cells on real
  GPUs: [fault_matrix_gpu.md](fault_matrix_gpu.md)."""

_SECTIONS = {
    FIRST_PART: """
## Cells

Milliseconds from the fault, where a rank is late from the begin of the wait: median / worst over ranks and repeats.

""",
    HOSTS_PART: """
## Several hosts

Each rank has a host of its own, which is a network name space: one network carries the launcher, another one MPI. The
watchers have links over both, where `watch_interface`, or on the nccl plane `NCCL_SOCKET_IFNAME`, names the second. The
bound of a rank that was killed is 500 ms, that of all else 5 s; of two sides that are cut off each names the other, but
that a network that stands carries what one side saw first to both. On the nccl plane the stand-in of NCCL uses no
network, so a cut is one of the links. What the links do not see (`cut-unseen`) is found by the operations that wait, at
their deadline of 10 s.

""",
    RECOVERY_PART: f"""
## Back to work

What the ranks do after the error: `reconnect`, where all live, or `shrink`. *Back to work*: to an all-reduce of all
that are left with right data; counted from each death, and where none died from when the last rank had learned of it,
or a second after the network stood, or the rank ran, again. At most {BACK_ON_GPU:.0f} ms, on the host plane
{BACK[HOST]:.0f}. Then every rank that is left ends with status 0, unless a cut has left MPI with a request that never
completes: it says so, and MPI ends the job after the close.

""",
}


def _ms(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} / {max(values):.0f}" if values else ""


def row(cell: Cell, outcome: Outcome) -> list[str]:
    """Return what a table shows of a cell."""
    ranks = "; ".join(f"{rank}: {text}" for rank, text in sorted(outcome.ranks.items()))
    last = outcome.ms["ended"] or outcome.ms["raised"]
    names = [cell.fault, cell.phase, cell.plane, cell.launcher]
    if cell.part == RECOVERY_PART:
        return [*names, cell.recovery, outcome.status, _ms(last), _ms(outcome.ms["back"])]
    return [*names, outcome.status, _ms(outcome.ms["poisoned"]), _ms(outcome.ms["returned"]), _ms(last), ranks]


RECOVERY_COLUMNS = "fault|phase|plane|launcher|recovery|outcome|raised ms|back to work ms".split("|")
COLUMNS = "fault|phase|plane|launcher|outcome|poisoned ms|foreign wait ms|raised or ended ms|ranks".split("|")


def line(name: str, outcome: Outcome) -> str:
    """Return one line for the terminal, with the reasons below it where it did not pass."""
    ms = outcome.ms
    times = ", ".join(f"{what} {_ms(values)}" for what, values in ms.items() if values)
    reasons = "".join(f"\n    {why}" for why in outcome.why)
    return f"{outcome.status:15} {name:58} {times}{reasons if outcome.status != PASSED else ''}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _machine(load: Sequence[float]) -> str:
    cores = len(os.sched_getaffinity(0))
    loads = f"{min(load):.0f} to {max(load):.0f}"
    system = f"Linux {platform.release().split('-')[0]} on {platform.machine()}"
    return f"{cores} cores, {system}, {_gpus() or 'no GPU'}; load average during the run {loads}"


def _gpus() -> str:
    try:
        found = [device["name"] for device in devices(os.environ)]
    except CUDAError:
        return ""
    return ", ".join(f"{count} {name}" for name, count in Counter(found).items()) + _nccl()


def _nccl() -> str:
    library, version = os.environ.get("BUTTER_MPI_TEST_NCCL"), ctypes.c_int()
    if library is None:
        return ""
    ctypes.CDLL(library).ncclGetVersion(ctypes.byref(version))
    return f", NCCL {version_text(version.value)}"


def page(
    cells: dict[Cell, Outcome], calm: dict[str, Outcome], *, what: str, load: Sequence[float], date: datetime.date
) -> str:
    """Return the page."""
    real = [gpus for gpus in ON_GPU.values() if any(cell.plane == gpus.name for cell in cells)]
    planes = "; ".join(f"`{gpus.name}`: {gpus.text}" for gpus in real) + "." if real else _STANDINS
    text = _HEAD.format(
        what=what, date=date.isoformat(), machine=_machine(load), counts=_counts(cells.values()), planes=planes
    )
    text += "".join(_section(part, cells, calm) for part in _SECTIONS)
    bad = {cell.name: outcome for cell, outcome in cells.items()} | calm
    if listed := _bad(bad):
        text += f"\n## What did not pass\n\n{listed}"
    if scenes := _calm(calm, hosts=False):
        text += f"\n## False alarms\n\n{scenes}"
    return text + _words()


def with_parts(
    old: str, cells: dict[Cell, Outcome], calm: dict[str, Outcome], *, load: Sequence[float], date: datetime.date
) -> str:
    """Return a page in which the sections of the parts of these cells are new, and say when and where they ran."""
    for part in _SECTIONS:
        of_it = {cell: outcome for cell, outcome in cells.items() if cell.part == part}
        if of_it:
            ran = f"Run apart from the other sections: {date.isoformat()}, {_machine(load)}. {_counts(of_it.values())}"
            listed = _bad({cell.name: outcome for cell, outcome in of_it.items()})
            old = _put(old, f"{_section(part, of_it, calm)}\n{ran}\n" + (listed and f"\n{listed}"))
    return _put(old, _words())


def _put(page: str, section: str) -> str:
    """Put a section into a page: in the place of the old one, else behind the tables of cells."""
    title = section.strip().splitlines()[0]
    there = re.compile(rf"\n{re.escape(title)}\n.*?(?=\n## |\Z)", re.DOTALL)
    if there.search(page):
        return there.sub(lambda _: section, page, count=1)
    at = re.search(r"\n## (What did not pass|False alarms|Words)\n|\Z", page)
    assert at is not None
    return page[: at.start()] + section + page[at.start() :]


def _section(part: str, cells: dict[Cell, Outcome], calm: dict[str, Outcome]) -> str:
    """Return the section of a part; nothing, if no cell is of it."""
    rows = [row(cell, outcome) for cell, outcome in cells.items() if cell.part == part]
    columns = RECOVERY_COLUMNS if part == RECOVERY_PART else COLUMNS
    if not rows:
        return ""
    scenes = _calm(calm, hosts=True) if part == HOSTS_PART else ""
    return _SECTIONS[part] + _table(columns, rows) + (scenes and f"\n{scenes}")


def _calm(calm: dict[str, Outcome], *, hosts: bool) -> str:
    """Return the table of the scenes that must end well, of one host or of several; nothing, if there is none."""
    all_of_them = [(name, CALM[name.split(".")[0]], outcome) for name, outcome in calm.items()]
    rows = [[name, scene.text, outcome.status] for name, scene, outcome in all_of_them if scene.hosts == hosts]
    return "Scenes that must end well.\n\n" + _table(["scene", "what", "outcome"], rows) if rows else ""


def _counts(outcomes: Collection[Outcome]) -> str:
    counted = Counter(outcome.status for outcome in outcomes).most_common()
    return f"Cells: {len(outcomes)}: " + ", ".join(f"{number} {status}" for status, number in counted) + "."


def _bad(outcomes: dict[str, Outcome]) -> str:
    bad = [(name, one) for name, one in outcomes.items() if one.status != PASSED]
    return "".join(f"* `{name}`, {one.status}: {_reason(one)}\n" for name, one in bad)


def _words() -> str:
    text = "\n## Words\n\n"
    text += _table(["fault", "meaning"], [[f.name, f.text] for f in FAULTS.values()]) + "\n"
    text += _table(["phase", "meaning"], [[name, meaning] for name, meaning in PHASES.items()]) + "\n"
    text += _table(["recovery", "meaning"], [[name, meaning] for name, meaning in RECOVERIES.items()]) + "\n"
    rows = [[one.name, " ".join(["srun" if one.slurm else "mpirun", *one.options])] for one in LAUNCHERS.values()]
    return text + _table(["launcher", "options"], rows)


def _reason(outcome: Outcome) -> str:
    return "; ".join(dict.fromkeys(why.splitlines()[0] for why in outcome.why)).replace("|", "/")
