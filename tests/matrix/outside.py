"""What strikes a host as a whole, from outside: the tool does it, with the rights of root, and says when."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Sequence

from helpers import processes
from helpers.hosts import CONTROL, DATA, Hosts
from helpers.job import GRACE, Job, JobFailure

from matrix.cells import Cell
from matrix.table import FAULTS, HOST, MENDED, NOTHING, STRUCK, VICTIM

NUMBER = VICTIM + 1
"""The host of the victim."""
_NETWORKS = {"cut-control": (CONTROL,), "cut-data": (DATA,), "cut-unseen": (DATA,)}
_OURS = re.compile(r"^\S*python\S* .*(scene\.py|sentinel/__main__\.py)")
_ALL_KNOW_SECONDS = 12.0


def both_networks(plane: str) -> dict[str, str]:
    """Return what tells watchers to have links over either network: on the nccl plane that NCCL's is named."""
    return {"BUTTER_MPI_WATCH_INTERFACE": "ctl0,data0"} if plane == HOST else {"NCCL_SOCKET_IFNAME": "data0"}


def environment(cell: Cell) -> dict[str, str]:
    """Return what a cell needs."""
    return both_networks(cell.plane) if cell.kind == "cut" else {}


def _cut(cell: Cell) -> tuple[str, ...]:
    if cell.kind in ("cut", "unseen") or cell.fault == "host-kill":
        return _NETWORKS.get(cell.fault, (CONTROL, DATA))
    return ()


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _strike_all(cell: Cell, pids: Sequence[int]) -> None:
    """Stop or kill all processes of a host; its launcher's daemon is stopped in any case.

    A host that loses its power closes no connection, nor that of the daemon, whose end the launcher would see here.
    """
    _signal(pids, signal.SIGSTOP)
    if cell.fault == "host-kill":
        _signal([pid for pid in pids if _OURS.search(processes.command_line(pid))], signal.SIGKILL)


def strike(cell: Cell, job: Job, hosts: Hosts) -> float | None:
    """Strike, when the victim asks for it; returns when. Nothing, where the fault is one of ranks or watchers."""
    if not FAULTS[cell.fault].outside:
        return None
    job.wait_for('"asks"', VICTIM)
    struck = time.monotonic()
    hosts.cut(NUMBER, *_cut(cell))
    if cell.kind == "host":
        _strike_all(cell, hosts.processes(NUMBER, job.id))
    (job.folder / STRUCK).touch()
    if cell.recovery != NOTHING and cell.kind == "cut":
        threading.Thread(target=_mend_once_known, args=(cell, job, hosts), daemon=True).start()
    return struck


def _mend_once_known(cell: Cell, job: Job, hosts: Hosts) -> None:
    with contextlib.suppress(JobFailure):
        for rank in cell.judged:
            job.wait_for('"raised"', rank, _ALL_KNOW_SECONDS)
        hosts.mend(NUMBER, *_cut(cell))
        (job.folder / MENDED).touch()


def outage(job: Job, hosts: Hosts, seconds: float) -> None:
    """Take a host off all networks for so long."""
    for rank in range(job.plan.n):
        job.wait_for('"ready"', rank)
    hosts.cut(NUMBER, CONTROL, DATA)
    time.sleep(seconds)
    hosts.mend(NUMBER, CONTROL, DATA)


def let_go(cell: Cell, job: Job, hosts: Hosts) -> None:
    """End what is left of a host that is frozen, and connect one that was cut off again."""
    if cell.kind == "host":
        _signal(hosts.processes(NUMBER, job.id), signal.SIGKILL)
    hosts.mend(NUMBER, *_cut(cell))


def left(job: Job) -> str:
    """Return which watchers are still there when their ranks have ended, as what was left behind."""
    end = time.monotonic() + GRACE
    watchers = [pid for pid in processes.marked(job.id) if "sentinel/__main__.py" in processes.command_line(pid)]
    still = [pid for pid in watchers if not processes.await_exit(pid, end - time.monotonic())]
    return f"the job left behind: watchers {still}" if still else ""
