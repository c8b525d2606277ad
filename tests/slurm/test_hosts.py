"""A Slurm whose nodes have networks of their own: what is lost on one node is named on the other, or goes on without.

The ranks wait meanwhile and call no MPI, so jobs are disturbed beside one another.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import processes
from helpers.hosts import CONTROL, DATA, Hosts
from helpers.mpirun import Job
from helpers.slurm import SlurmOnHosts
from helpers.surviving import HEAD, on_standins
from helpers.told import STAY, go_on, raised, standing, verdicts, watcher

MPIS = ("mpich", "openmpi")
BOTH = pytest.mark.parametrize("mpi", MPIS)
GOES_ON, ENDS = "--kill-on-bad-exit=0", "--kill-on-bad-exit=1"
ENDED = "killed rank of a step that ends"
HARMS = ("killed rank", "frozen rank", "killed watcher", "frozen watcher", "killed host", "frozen host")
_SOON, _WITHIN = 0.5, 5.0

# Four ranks, two on each host: rank 3 dies, then all that is on host2.
SHRINKS = (
    """
import os, socket
os.environ["STANDIN_MACHINE"] = HOST = socket.gethostname()
"""
    + HEAD
    + """
comm = start(action="shrink")
assert comm.all_gather_json(HOST) == ["host1", "host1", "host2", "host2"] and total(comm) == 10
if RANK == 3:
    die()
assert lost(comm).lost_ranks == (3,)
new = comm.shrink()
assert total(new) == 6
say(f"back {time.monotonic()} {new!r}")
error = lost(new)
assert error.lost_ranks == (2,) and "no word from host host2 (rank 2)" in str(error), error
newer = new.shrink()
assert total(newer) == 3
with newer.dup() as twin:
    assert total(twin) == 3
say(f"again {time.monotonic()} {newer!r}")
newer.close()
"""
)


@dataclass
class Scene:
    """Jobs that were disturbed, when by ``time.monotonic``, and their hosts."""

    hosts: Hosts
    jobs: dict[str, Job]
    at: dict[str, float]
    files: Path


def above(job: Job, rank: int) -> list[int]:
    """The daemons of a step above a rank."""
    found, pid = list[int](), job.pid(rank)
    while (pid := processes.parent(pid)) > 1:
        if "slurmstepd" in processes.command_line(pid):
            found.append(pid)
    return found


def host(job: Job, *ranks: int) -> list[int]:
    """Everything of a job on host2: first what would see the end of the rest."""
    return [*above(job, ranks[0]), watcher(job, "host2"), *(job.pid(rank) for rank in ranks)]


def harm(name: str, job: Job) -> float:
    """Do what the name says; returns when."""
    number = signal.SIGSTOP if name.startswith("frozen") else signal.SIGKILL
    whom = host(job, 1) if "host" in name else [watcher(job, "host2")] if "watcher" in name else [job.pid(1)]
    for pid in whom:
        os.kill(pid, number)
    return time.monotonic()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """On two hosts something of each job is stopped or killed; then one host is cut off, network by network."""
    files = tmp_path_factory.mktemp("verdicts")
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(Hosts(3))
        slurm = SlurmOnHosts(hosts, cpus=32)
        stack.callback(slurm.stop)
        slurm.start()
        jobs: dict[str, Job] = {}

        def begin(name: str, mpi: str, option: str = GOES_ON, **env: str) -> None:
            full = f"{name}, {mpi}"
            told = {"BUTTER_MPI_VERDICT_FILE": str(files / full), **env}
            jobs[full] = stack.enter_context(slurm.start_job(2, STAY, mpi=mpi, options=[option], env=told))

        for mpi in MPIS:
            for name in HARMS:
                begin(name, mpi)
            begin(ENDED, mpi, ENDS)
            begin("cut control", mpi)
            begin("cut data", mpi, BUTTER_MPI_WATCH_INTERFACE="ctl0,data0")
        how = {"env": on_standins()["env"], "options": [GOES_ON, "--nodes=2", "--ntasks-per-node=2"], "timeout": 60.0}
        jobs["shrinks"] = stack.enter_context(slurm.start_job(4, SHRINKS, **how))
        for name, job in jobs.items():
            if name != "shrinks":
                standing(job)
        harmed = [name for name in jobs if "cut" not in name and name != "shrinks"]
        at = {name: harm(name, jobs[name]) for name in harmed}
        for rank in (0, 1, 2):
            jobs["shrinks"].wait_for("back ", rank)
        for pid in host(jobs["shrinks"], 2):
            os.kill(pid, signal.SIGKILL)
        at["shrinks"] = time.monotonic()
        for name in harmed:
            if ENDED not in name:
                raised(jobs[name], 0)
        jobs["shrinks"].wait_for("again ", 0)

        def cut(network: str, name: str, unharmed: str = "") -> None:
            hosts.cut(2, network)
            for mpi in MPIS:
                at[f"{name}, {mpi}"] = time.monotonic()
            for mpi in MPIS:
                for rank in (0, 1):
                    raised(jobs[f"{name}, {mpi}"], rank)
                if unharmed:
                    # Its links are on the other network.
                    go_on(jobs[f"{unharmed}, {mpi}"])

        cut(DATA, "cut data", "cut control")
        hosts.mend(2, DATA)
        for mpi in MPIS:
            begin("cut both", mpi, BUTTER_MPI_WATCH_INTERFACE="data0")
            standing(jobs[f"cut both, {mpi}"])
        cut(CONTROL, "cut control", "cut both")
        cut(DATA, "cut both")
        yield Scene(hosts, jobs, at, files)
        hosts.mend(2, CONTROL, DATA)


def told(scene: Scene, name: str, rank: int = 0) -> tuple[float, str]:
    """How long after it was disturbed a rank of a job was told of what, and what."""
    when, text = raised(scene.jobs[name], rank)
    return when - scene.at[name], text


@BOTH
@pytest.mark.parametrize("how", ["killed rank", ENDED])
def test_killed_rank(scene: Scene, mpi: str, how: str) -> None:
    """It is named on both hosts at once, and in the file of each; where srun ends the step for it, in that at least."""
    if how == ENDED:
        # What the other rank still comes to say itself is a race with srun.
        assert scene.jobs[f"{how}, {mpi}"].wait(20).rc != 0
    else:
        seconds, text = told(scene, f"{how}, {mpi}")
        assert text.startswith("(1,) ") and "rank 1/2 on host2" in text and "was killed by SIGKILL" in text, text
        assert seconds <= _SOON, (seconds, text)
    found = verdicts(scene.files / f"{how}, {mpi}")
    assert {name: one["verdict"]["lost"] for name, one in found.items()} == {"host1": [1], "host2": [1]}, found


@BOTH
def test_frozen_rank(scene: Scene, mpi: str) -> None:
    """It is named on the other host."""
    seconds, text = told(scene, f"frozen rank, {mpi}")
    assert text.startswith("(1,) ") and "rank 1/2 on host2" in text and "has been stopped (SIGSTOP" in text, text
    assert 3.9 <= seconds <= _WITHIN, (seconds, text)


@BOTH
@pytest.mark.parametrize("how", ["killed watcher", "frozen watcher", "killed host", "frozen host"])
def test_silent_host(scene: Scene, mpi: str, how: str) -> None:
    """It is named on the other host, whose file says so too."""
    seconds, text = told(scene, f"{how}, {mpi}")
    assert text.startswith("(1,) ") and "no word from host host2 (rank 1) for 4." in text, text
    assert 3.5 <= seconds <= _WITHIN, (seconds, text)
    assert verdicts(scene.files / f"{how}, {mpi}")["host1"]["verdict"]["lost"] == [1]


@BOTH
@pytest.mark.parametrize("how", ["cut control", "cut both"])
def test_host_that_is_cut_off(scene: Scene, mpi: str, how: str) -> None:
    """Each side names the other one, once the network of the links is cut; each host's file has that."""
    for rank in (0, 1):
        seconds, text = told(scene, f"{how}, {mpi}", rank)
        assert text.startswith(f"({1 - rank},) ") and f"no word from host host{2 - rank}" in text, text
        assert 3.5 <= seconds <= _WITHIN, (seconds, text)
    found = verdicts(scene.files / f"{how}, {mpi}")
    assert {name: one["verdict"]["lost"] for name, one in found.items()} == {"host1": [1], "host2": [0]}, found


@BOTH
def test_host_that_one_of_two_networks_loses(scene: Scene, mpi: str) -> None:
    """What one side sees is told to the other over the network that stands, and is in the file of both."""
    for rank in (0, 1):
        seconds, text = told(scene, f"cut data, {mpi}", rank)
        assert " over data0 for 4." in text and "as it is heard over another network" in text, text
        assert 3.5 <= seconds <= _WITHIN, (seconds, text)
    assert set(verdicts(scene.files / f"cut data, {mpi}")) == {"host1", "host2"}


def test_survivors_go_on(scene: Scene) -> None:
    """Without a rank, and without a whole host, where the step goes on."""
    job = scene.jobs["shrinks"]
    death, backs = last(job, "dies ", 3), [last(job, "back ", rank) for rank in (0, 1, 2)]
    assert max(backs) - death < 1.5, (death, backs)
    backs = [last(job, "again ", rank) for rank in (0, 1)]
    assert max(backs) - scene.at["shrinks"] < _WITHIN + 1.5, (scene.at, backs)
    for rank in (0, 1):
        job.wait_for("leaves with 0\n", rank)


def last(job: Job, word: str, rank: int) -> float:
    """Return the time that a rank has written behind a word."""
    return float(job.read(rank, "out").split(word)[1].split()[0])
