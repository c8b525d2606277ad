"""Jobs whose ranks wait, and say when and what they are told; and the watchers of their hosts."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from helpers import processes
from helpers.job import Job

__all__ = ["STAY", "STILL", "go_on", "raised", "standing", "verdicts", "watcher"]

# The ranks wait without a word to MPI: whatever they learn, their watcher has told them.
STILL = """
import os, socket, time
import butter_mpi
from mpi4py import MPI
comm = butter_mpi.init(plane="host")
comm.barrier()
print("stands", socket.gethostname(), flush=True)
health, shown = comm.backend.health, time.monotonic()
while health.cause is None:
    time.sleep(0.002)
    if time.monotonic() - shown > 0.2:
        shown = time.monotonic()
        print("sign .", flush=True)
print("raised", time.monotonic(), health.cause.lost_ranks, health.cause, flush=True)
"""
STAY = STILL + "time.sleep(60)\n"


def standing(job: Job, ranks: int = 2) -> Job:
    """The job, once all its ranks stand, each on its host."""
    for rank in range(ranks):
        job.wait_for("stands", rank)
    return job


def raised(job: Job, rank: int, timeout: float = 10.0) -> tuple[float, str]:
    """When a rank learned what broke, by ``time.monotonic``, and what it was."""
    job.wait_for("raised ", rank, timeout)
    job.wait_for("\n", rank)
    at, text = job.read(rank, "out").split("raised ", 1)[1].splitlines()[0].split(" ", 1)
    return float(at), text


def go_on(job: Job, ranks: int = 2) -> None:
    """See that nothing broke, and that ranks show signs of life from now on."""
    for _ in range(2):
        shown = {rank: job.read(rank, "out").count("sign .") for rank in range(ranks)}
        for rank, count in shown.items():
            end = time.monotonic() + 10
            while job.read(rank, "out").count("sign .") <= count:
                assert "raised" not in job.read(rank, "out"), job.read(rank, "out")
                assert time.monotonic() < end
                time.sleep(0.02)  # a sign comes every 0.2 s


def verdicts(file: Path) -> dict[str, dict[str, Any]]:
    """The first verdict of each host's watcher."""
    found: dict[str, dict[str, Any]] = {}
    for line in file.read_text().splitlines():
        found.setdefault(json.loads(line)["host"], json.loads(line))
    return found


def watcher(job: Job, host: str) -> int:
    """The process of the watcher of a host."""
    pids = [pid for pid in processes.marked(job.id) if "sentinel/__main__.py" in processes.command_line(pid)]
    (pid,) = [pid for pid in pids if _host_of(pid) == host]
    return pid


def _host_of(pid: int) -> str:
    line = ["nsenter", f"--uts=/proc/{pid}/ns/uts", "hostname"]
    return subprocess.run(line, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
