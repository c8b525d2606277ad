"""Runs one cell or one scene that must end well, and returns what was seen of it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.hosts import Hosts
from helpers.job import Job, JobFailure
from helpers.mpirun import start_job
from helpers.processes import FOLDER_PREFIX
from helpers.slurm import Slurm, throw_away_slurm
from helpers.standin import build

from butter_mpi.sentinel.process import Process
from matrix import outside
from matrix.cells import Cell
from matrix.lines import parse
from matrix.table import CALM, COLLECTIVE_DEADLINE, ENDING, HOST, LAUNCHERS, NOTHING, ON_GPU, RANKS, VICTIM

HERE = Path(__file__).parent
POLICY = {"NCCL_IB_TIMEOUT": "10", "NCCL_IB_RETRY_CNT": "1"}
_GIVEN = {"NCCL_LIBRARY": "BUTTER_MPI_TEST_NCCL", "NCCL_NVLS_ENABLE": "NCCL_NVLS_ENABLE"}
_LIMIT = 20.0
"""Seconds after which a job hangs: its start, the longest bound, and the time in which ranks wait for one another."""
_ENDING_LIMIT = 14.0
_AGAIN = 10.0
"""Seconds more for a recovery."""
_AFTER = 8.0
"""Seconds that what is left of a job gets to end."""
_TAKE_GPUS = """
from cuda.bindings import driver
driver.cuInit(0)
count = driver.cuDeviceGetCount()[1]
raise SystemExit(any(int(driver.cuDevicePrimaryCtxRetain(device)[0]) for device in range(count)))
"""
# What goes wrong inside the stand-ins: after the start's first operation and two of the scene; the first broadcast.
_STANDIN_FAULTS = {
    ("background", ""): "1@collective#4=6",
    ("call", "unique-id"): "1@ncclCommInitRankConfig#1=3",
    ("call", "nccl-init"): "1@ncclCommSplit#1=3",
    ("call", "wait"): "1@ncclBroadcast#1=3",
    ("call", ""): "1@ncclAllReduce#4=3",
}


@dataclass
class Seen:
    """What was seen of one job: what ranks said, how and when they ended, what stands on stderr and in the file."""

    said: dict[int, list[dict[str, Any]]]
    ends: dict[int, tuple[float, str]] = field(default_factory=dict)
    err: str = ""
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    left: str = ""
    rc: int | None = None

    def first(self, rank: int, what: str) -> dict[str, Any] | None:
        """Return what a rank said first of a kind."""
        return next(iter(self.every(rank, what)), None)

    def every(self, rank: int, what: str) -> list[dict[str, Any]]:
        """Return all that a rank said of a kind."""
        return [one for one in self.said.get(rank, []) if one["what"] == what]


class Runner:
    """Runs jobs; has one Slurm of one node for all of them."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._slurm: Slurm | None = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _slurm_of_all(self) -> Slurm:
        with self._lock:
            if self._slurm is None:
                self._slurm = self._stack.enter_context(throw_away_slurm(nodes=1, cpus=16))
        return self._slurm

    def cell(self, cell: Cell, gpus: Sequence[str] = (), **more: str) -> Seen:
        """Run a cell once; ``gpus`` are those that it may use, ``more`` are variables."""
        faults = _STANDIN_FAULTS.get((cell.fault, cell.phase), _STANDIN_FAULTS.get((cell.fault, ""), ""))
        program = [str(HERE / "scene.py"), cell.fault, cell.phase, cell.plane, cell.recovery]
        limit = _limit(cell)
        env = _environment(cell.plane, faults, gpus) | outside.environment(cell) | more
        given = {"env": env, "rank_env": _rank_environment(cell)}
        if gpus:
            _wait_until_usable(env["CUDA_VISIBLE_DEVICES"])
        with self._job(cell.launcher, program, limit, cell.ranks, **given) as (job, file, hosts):
            ends = _Ends(job)
            struck = None if hosts is None else outside.strike(cell, job, hosts)
            survivors = {rank for rank in cell.judged if rank != VICTIM}
            ends.wait_for(survivors, limit)
            hang = survivors - ends.found.keys()
            _let_go(job, ends, cell, hosts)
            seen = _seen(job, ends, file, between=hosts is not None)
        if struck is not None:
            seen.said[VICTIM].append({"what": "fault", "t": struck})
        # Their end, if it came when the tool ended the victim, is none of theirs.
        seen.ends = {rank: end for rank, end in seen.ends.items() if rank not in hang}
        return seen

    def calm(self, name: str, plane: str, launcher: str, *, full: bool) -> Seen:
        """Run a scene that must end well."""
        calm = CALM[name]
        seconds, deadline = calm.full if full else calm.ci, calm.deadlines[full]
        limit = seconds + 60
        program = [str(HERE / "calm.py"), name, plane, str(seconds), str(deadline)]
        both = outside.both_networks(plane) if calm.hosts else {}
        with (
            self._job(launcher, program, limit, RANKS, env=_environment(plane, "") | both) as (job, file, hosts),
            contextlib.ExitStack() as stack,
        ):
            ends = _Ends(job)
            if name == "saturated":
                stack.enter_context(_burners(len(os.sched_getaffinity(0))))
            if name == "suspended":
                _suspend(job, seconds)
            if hosts is not None:
                outside.outage(job, hosts, seconds)
            ends.wait_for(range(RANKS), limit)
            return _seen(job, ends, file)

    @contextlib.contextmanager
    def _job(
        self, launcher: str, program: list[str], limit: float, ranks: int, **given: Any
    ) -> Iterator[tuple[Job, Path, Hosts | None]]:
        how = LAUNCHERS[launcher]
        given |= {"mpi": how.mpi, "options": how.options, "timeout": limit + 10}
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, dir="/tmp"))
            file = Path(folder) / "verdicts"
            hosts = stack.enter_context(Hosts(ranks)) if how.hosts else None
            if hosts is None and not how.slurm:
                # Where a launcher ends every rank, and then itself, before the watcher had a core.
                given["script"] = True
            start = hosts.start_job if hosts else self._slurm_of_all().start_job if how.slurm else start_job
            yield stack.enter_context(start(ranks, [*program, str(file)], **given)), file, hosts


def _wait_until_usable(gpus: str) -> None:
    """Wait until a process can take each GPU: for seconds after clients were killed at work, MPS takes no new one."""
    command = [sys.executable, "-c", _TAKE_GPUS]
    env, end = os.environ | {"CUDA_VISIBLE_DEVICES": gpus}, time.monotonic() + _LIMIT
    while subprocess.run(command, env=env, timeout=_LIMIT, check=False).returncode and time.monotonic() < end:
        time.sleep(0.1)


def _environment(plane: str, faults: str, gpus: Sequence[str] = ()) -> dict[str, str]:
    if plane in ON_GPU:
        library = {name: os.environ[given] for name, given in _GIVEN.items() if given in os.environ}
        share = {"BUTTER_MPI_SHARE_GPU": "1"} if ON_GPU[plane].shared else {}
        return {**library, **POLICY, **share, **dict(ON_GPU[plane].env), "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return {} if plane == HOST else {**build().env(faults=faults), **POLICY}


def _rank_environment(cell: Cell) -> dict[int, dict[str, str]]:
    """Return what differs between ranks: NCCL takes them for hosts of their own; hosts have a GPU of their own."""
    if cell.plane in ON_GPU and ON_GPU[cell.plane].own_hosts:
        return {rank: {"NCCL_HOSTID": f"host-{rank}"} for rank in range(cell.ranks)}
    if cell.on_hosts and cell.plane != HOST:
        return {rank: {"CUDA_VISIBLE_DEVICES": str(rank)} for rank in range(cell.ranks)}
    return {}


class _Ends:
    """When and how the ranks of a job end."""

    def __init__(self, job: Job) -> None:
        self.processes: dict[int, Process] = {}
        self.found: dict[int, tuple[float, str]] = {}
        for rank in range(job.plan.n):
            pid = job.pid(rank)
            try:
                self.processes[rank] = Process(pid)
            except OSError:
                self.found[rank] = (time.monotonic(), "ended")

    def wait_for(self, ranks: Iterable[int], seconds: float) -> None:
        """Wait until these have ended, noting every end; gives up after ``seconds``."""
        end, wanted = time.monotonic() + seconds, set(ranks)
        while not wanted <= self.found.keys() and time.monotonic() < end:
            poll = select.poll()
            waiting = {process.pidfd: rank for rank, process in self.processes.items() if rank not in self.found}
            for pidfd in waiting:
                poll.register(pidfd, select.POLLIN)
            for pidfd, _ in poll.poll(max(0.0, end - time.monotonic()) * 1000):
                rank = waiting[pidfd]
                self.found[rank] = (time.monotonic(), self.processes[rank].end())

    def close(self) -> None:
        """Give the handles back."""
        for process in self.processes.values():
            process.close()


def _limit(cell: Cell) -> float:
    """Return the seconds after which a cell hangs."""
    if cell.phase in ENDING:
        return _ENDING_LIMIT
    waits = COLLECTIVE_DEADLINE if cell.kind in ("late", "unseen") else 0.0
    return _LIMIT + waits + (_AGAIN if cell.recovery != NOTHING else 0.0)


def _let_go(job: Job, ends: _Ends, cell: Cell, hosts: Hosts | None) -> None:
    """End what the fault itself keeps from ending: a rank, a watcher or a host that is stopped for good, or cut off."""
    if hosts is not None:
        outside.let_go(cell, job, hosts)
    if cell.fault == "stop" and VICTIM not in ends.found:
        with contextlib.suppress(ProcessLookupError):
            job.signal(VICTIM, signal.SIGKILL)
    fault = next((one for one in parse(job.read(VICTIM, "out")) if one["what"] == "fault"), None)
    if cell.fault == "watcher-stop" and fault is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(fault["watcher"], signal.SIGCONT)
    ends.wait_for(range(job.plan.n), _AFTER)


def _seen(job: Job, ends: _Ends, file: Path, *, between: bool = False) -> Seen:
    """Collect everything; what is left behind is a finding and not an exception.

    Launchers may hang once a host was lost: of a job between hosts only what is butter_mpi's must be gone.
    """
    rc, left = None, ""
    running = [rank for rank in range(job.plan.n) if rank not in ends.found]
    if between:
        left = outside.left(job)
    if running or between:
        job.kill()
    else:
        try:
            rc = job.wait(_AFTER).rc
        except JobFailure as failure:
            left = str(failure).partition("\nstatus")[0]
    ends.close()
    ranks = range(job.plan.n)
    said = {rank: parse(job.read(rank, "out")) for rank in ranks}
    err = "\n".join(job.read(rank, "err") for rank in ranks)
    err += (job.folder / "launcher.out").read_text("utf-8", "replace")
    lines = file.read_text().splitlines() if file.exists() else []
    return Seen(said, ends.found, err, [json.loads(line)["verdict"] for line in lines], left, rc)


@contextlib.contextmanager
def _burners(count: int) -> Iterator[None]:
    """Keep so many cores busy."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()


def _suspend(job: Job, seconds: float) -> None:
    """Stop all ranks, and continue them."""
    for rank in range(RANKS):
        job.wait_for('"ready"', rank)
    for rank in range(RANKS):
        job.signal(rank, signal.SIGSTOP)
    time.sleep(seconds)
    for rank in range(RANKS):
        job.signal(rank, signal.SIGCONT)
