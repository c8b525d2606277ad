"""Several hosts: what is found on one is named on the others, and so is a host that is cut off; what is no fault."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers import processes
from helpers.hosts import CONTROL, DATA, Hosts
from helpers.mpirun import Job, JobResult
from helpers.told import STAY, STILL, go_on, raised, standing, verdicts, watcher

AGAIN = (
    STILL
    + """
import numpy as np
while True:
    try:
        comm.attempt_reconnect()
        break
    except butter_mpi.PeerLostError:
        time.sleep(0.1)
array = np.ones(3)
comm.all_reduce(array)
print("sum", array[0], flush=True)
comm.close()
"""
)
# One rank stays on after its close, the other one waits for it in MPI_Finalize.
CLOSED = """
import time
import butter_mpi
from mpi4py import MPI
butter_mpi.init(plane="host").close()
print("stands", flush=True)
if MPI.COMM_WORLD.rank == 1:
    time.sleep(60)
"""
REFUSED = """
import time
import butter_mpi
began = time.monotonic()
try:
    butter_mpi.init(plane="host", fault=butter_mpi.FaultPolicy(start_deadline=8))
except butter_mpi.StartError as error:
    print("refused", time.monotonic() - began, error, flush=True)
else:
    print("stands", flush=True)
"""
HELP = re.compile(r"Open the TCP ports.*BUTTER_MPI_WATCH_INTERFACE.*BUTTER_MPI_WATCH=node")
OPTIONS = {"mpich": [], "openmpi": ["--enable-recovery"]}
BOTH = pytest.mark.parametrize("mpi", OPTIONS)
_SOON, _WITHIN = 0.5, 5.0


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Two hosts whose network is left as it is."""
    with Hosts(2) as two:
        yield two


def cried(result: JobResult) -> list[str]:
    """The watchers' lines on the standard error of ranks, or of what started them."""
    texts = [*result.rank_err, result.out]
    return [line for text in texts for line in text.splitlines() if line.startswith("butter_mpi: the watcher")]


@dataclass
class Scene:
    """Jobs that were disturbed all at once, as they only wait meanwhile; and when."""

    jobs: dict[str, Job]
    at: dict[str, float]
    others: Hosts


@pytest.fixture(scope="module")
def disturbed(hosts: Hosts) -> Iterator[Scene]:
    """On two hosts something of each job is stopped or killed; two others are cut off for 3 s, later for good.

    Of two more pairs each loses one of its networks.
    """
    with contextlib.ExitStack() as stack:
        others, *parted = (stack.enter_context(Hosts(2)) for _ in range(3))
        jobs: dict[str, Job] = {}
        for mpi, options in OPTIONS.items():
            for what in ("frozen rank", "killed watcher", "frozen host", "cut"):
                place, program = (others, AGAIN) if what == "cut" else (hosts, STAY)
                jobs[f"{what}, {mpi}"] = stack.enter_context(place.start_job(2, program, mpi=mpi, options=options))
            for network, place in zip((DATA, CONTROL), parted, strict=True):
                jobs[f"no {network}, {mpi}"] = stack.enter_context(
                    place.start_job(2, STAY, mpi=mpi, env={"BUTTER_MPI_WATCH_INTERFACE": "ctl0,data0"}, options=options)
                )
        jobs["frozen in the end"] = stack.enter_context(
            hosts.start_job(2, CLOSED, mpi="openmpi", options=OPTIONS["openmpi"])
        )
        for job in jobs.values():
            standing(job)
        for network, place in zip((DATA, CONTROL), parted, strict=True):
            place.cut(2, network)
        scene = Scene(jobs, {name: _harm(name, job) for name, job in jobs.items()}, others)
        others.cut(2, CONTROL, DATA)
        began = time.monotonic()
        lone = {"BUTTER_MPI_WATCH_INTERFACE": "lo"}
        jobs["nowhere"] = stack.enter_context(hosts.start_job(2, REFUSED, mpi="mpich", env=lone))
        time.sleep(max(0.0, began + 3.0 - time.monotonic()))  # as long as no fault may be seen in it
        others.mend(2, CONTROL, DATA)
        time.sleep(1.5)  # as long as it would take to be told
        for mpi in OPTIONS:
            go_on(jobs[f"cut, {mpi}"])
        others.cut(2, CONTROL, DATA)
        for mpi in OPTIONS:
            scene.at[f"cut, {mpi}"] = time.monotonic()
        yield scene


def _harm(name: str, job: Job) -> float:
    if name.startswith("frozen"):
        job.signal(1, signal.SIGSTOP)
    if name.startswith("frozen host"):
        os.kill(watcher(job, "host2"), signal.SIGSTOP)
    if name.startswith("killed"):
        os.kill(watcher(job, "host2"), signal.SIGKILL)
    return time.monotonic()


@BOTH
def test_frozen_rank_is_raised_on_the_other_host(disturbed: Scene, mpi: str) -> None:
    """Also where it is the only one of its host, whose watcher alone cannot tell it from a job that is suspended."""
    name = f"frozen rank, {mpi}"
    when, text = raised(disturbed.jobs[name], 0)
    assert text.startswith("(1,) ") and "rank 1/2 on host2" in text and "has been stopped (SIGSTOP" in text, text
    assert 3.9 <= when - disturbed.at[name] <= _WITHIN, (when - disturbed.at[name], text)


@BOTH
def test_killed_watcher_is_named_on_the_other_host(disturbed: Scene, mpi: str) -> None:
    """Its own ranks learn it at once; on the other host, whose ranks MPI tells nothing here, its silence says so."""
    name = f"killed watcher, {mpi}"
    near, own = raised(disturbed.jobs[name], 1)
    assert "the watcher of this node has ended" in own and near - disturbed.at[name] <= _SOON, own
    far, text = raised(disturbed.jobs[name], 0)
    assert "no word from host host2 (rank 1) for 4." in text and far - disturbed.at[name] <= _WITHIN, text


@BOTH
def test_frozen_host_is_named_on_the_other_one(disturbed: Scene, mpi: str) -> None:
    """Where all of it stands still, its watcher too."""
    name = f"frozen host, {mpi}"
    when, text = raised(disturbed.jobs[name], 0)
    assert text.startswith("(1,) ") and "no word from host host2 (rank 1) for 4." in text, text
    assert 3.5 <= when - disturbed.at[name] <= _WITHIN, (when - disturbed.at[name], text)


@BOTH
@pytest.mark.parametrize("network", [DATA, CONTROL])
def test_loss_of_one_of_two_networks_is_named(disturbed: Scene, mpi: str, network: str) -> None:
    """Over the one that is left what one host sees is told to the other, unless that has seen it by then."""
    name = f"no {network}, {mpi}"
    for rank in (0, 1):
        when, text = raised(disturbed.jobs[name], rank)
        said = re.search(r"no word from host host\d \(rank (\d)\) over (\w+)0 for 4\.\d s: cut off", text)
        assert said and text.startswith(f"({said[1]},) ") and said[2] == network, text
        # What is found travels over the first one: where that is lost, it is not known what the others hear.
        assert ("as it is heard over another network" in text) == (network == DATA), text
        assert 3.5 <= when - disturbed.at[name] <= _WITHIN, (when - disturbed.at[name], text)


def test_killed_rank_is_raised_on_the_other_host(hosts: Hosts) -> None:
    """Within half a second, with its end and its last operation, by ranks that do not come to MPI meanwhile."""
    with hosts.start_job(4, STAY, mpi="openmpi", options=OPTIONS["openmpi"]) as job:
        standing(job, 4)
        at = job.signal(1, signal.SIGKILL)
        told = {rank: raised(job, rank) for rank in (0, 2, 3)}
        lines = [line for rank in range(4) for line in job.read(rank, "err").splitlines()]
        job.kill()
    for when, text in told.values():
        assert text.startswith("(1,) ") and "rank 1/4 on host" in text and "was killed by SIGKILL" in text, text
        assert "last submitted barrier #1" in text and when - at <= _SOON, (when - at, text)
    assert sum("the watcher: rank 1/4" in line for line in lines) == 1, lines
    assert sum(re.search(r"the watcher of host\d hears: rank 1/4", line) is not None for line in lines) == 1, lines


def test_killed_rank_is_raised_everywhere_though_the_first_hub_is_stopped() -> None:
    """What is found travels over the other one."""
    with Hosts(3) as three, three.start_job(3, STAY, mpi="openmpi", options=OPTIONS["openmpi"]) as job:
        standing(job, 3)
        os.kill(watcher(job, "host1"), signal.SIGSTOP)
        at = job.signal(2, signal.SIGKILL)
        when, text = raised(job, 1)
        job.kill()
    assert text.startswith("(2,) ") and "rank 2/3 on host3" in text and "was killed by SIGKILL" in text, text
    assert when - at <= _SOON, (when - at, text)


def test_killed_rank_is_in_the_file_of_each_host_where_the_launcher_ends_all(hosts: Hosts, tmp_path: Path) -> None:
    """MPICH's launcher leaves no time: each host's watcher names the rank that was killed, not one that was ended.

    It may have ended all ranks, and itself, before a watcher of a busy machine has run, or before it has read what a
    watcher has written: of six jobs one must do for each.
    """
    named: list[dict[str, dict[str, Any]]] = []
    told = False
    for turn in range(6):
        file = tmp_path / f"verdict{turn}"
        with hosts.start_job(2, STAY, mpi="mpich", env={"BUTTER_MPI_VERDICT_FILE": str(file)}) as job:
            standing(job)
            job.signal(1, signal.SIGKILL)
            at = time.time()
            result = job.wait(20)
        found = verdicts(file)
        assert result.rc != 0 and set(found) == {"host1", "host2"}, result.text
        if [one["verdict"]["lost"] for one in found.values()] == [[1], [1]]:
            named.append(found)
            assert all(one["time"] - at <= _SOON for one in found.values()), found
        told |= any("rank 1/2 on host2" in line for line in cried(result))
        if named and told:
            break
    assert named and told, (named, told, found, result.text)
    assert all("was killed by SIGKILL" in one["verdict"]["text"] for one in named[0].values()), named


def test_frozen_rank_after_its_close_ends_those_in_finalize(disturbed: Scene) -> None:
    """Where only a rank of another host waits there: it is ended, with the verdict."""
    job = disturbed.jobs["frozen in the end"]
    assert processes.await_exit(job.pid(0), 10), job.read(0, "err")
    err = job.read(0, "err")
    assert "hears: rank 1/2 on host2" in err and "has been stopped (SIGSTOP or SIGTSTP) for 4." in err, err
    assert "rank 0 cannot come out of MPI_Finalize any more, as rank 1 will not come there" in err, err


def test_start_over_a_network_that_leads_nowhere(disturbed: Scene) -> None:
    """Every rank says, before the deadline, which host cannot reach which address, and what helps."""
    result = disturbed.jobs["nowhere"].wait(20)
    for rank, out in enumerate(result.rank_out):
        assert out.startswith("refused ") and float(out.split()[1]) < 8, result.text
        assert HELP.search(out), out
        at = r"127\.0\.0\.1 port \d+"
        said = (
            rf"host host1, at {at}.* was not reached over lo by that of host host2 \(rank 1\)",
            rf"host host2 cannot reach over lo that of host host1 \(rank 0\) at {at} \(Connection refused\)",
        )
        assert re.search(said[rank], out), out
    cried = [line for line in result.text.splitlines() if line.startswith("butter_mpi: the watcher")]
    assert any(line.startswith("butter_mpi: the watcher of host host") for line in cried), result.text
    assert not any("the watcher: the watcher" in line for line in cried), result.text


def test_start_over_a_network_that_is_not_there(hosts: Hosts) -> None:
    """Every rank says which interfaces there are."""
    with hosts.start_job(2, REFUSED, mpi="mpich", env={"BUTTER_MPI_WATCH_INTERFACE": "data0,ib7|ib8"}) as job:
        result = job.wait(20)
    for out in result.rank_out:
        assert "rank 0: ib7|ib8 of watch_interface=data0,ib7|ib8 has no address; there are lo (127.0.0.1" in out, out
        assert out.startswith("refused ") and "Name interfaces that these hosts have by watch_interface" in out, out


def test_ends_well_and_leaves_nothing(hosts: Hosts) -> None:
    """With links, also over both networks, and without them: nothing of a job or a watcher is left."""
    program = REFUSED.replace("    butter_mpi.init", "    comm = butter_mpi.init") + "comm.barrier(); comm.close()\n"
    both = {"BUTTER_MPI_WATCH_INTERFACE": "ctl0,ib7|data0"}
    settings: list[dict[str, str]] = [{}, both, {"BUTTER_MPI_WATCH": "node"}]
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(hosts.start_job(2, program, mpi="mpich", env=env)) for env in settings]
        for job in jobs:
            result = job.wait(20)
            assert result.rc == 0 and result.rank_out == ["stands\n"] * 2 and not cried(result), result.text


@BOTH
def test_outage_is_no_fault_and_a_cut_is(disturbed: Scene, mpi: str) -> None:
    """Off all networks for 3 s nothing happened; for longer each side names the other one within five seconds.

    Back again, both reconnect.
    """
    name = f"cut, {mpi}"
    told = [raised(disturbed.jobs[name], rank) for rank in (0, 1)]
    for rank, (when, text) in enumerate(told):
        assert text.startswith(f"({1 - rank},) "), text
        assert f"no word from host host{2 - rank} (rank {1 - rank}) for 4." in text, text
        assert f"or this host, host{rank + 1}, is cut off" in text, text
        assert 3.5 <= when - disturbed.at[name] <= _WITHIN, (when - disturbed.at[name], text)
    disturbed.others.mend(2, CONTROL, DATA)
    for rank in (0, 1):
        disturbed.jobs[name].wait_for("sum 2.0", rank)
