"""What fails in, and between, communicators that come from one another: who is told, what, and how soon."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.mpirun import Job, start_job
from helpers.standin import build

HEAD = """
import os, signal, sys, time
import numpy as np
import butter_mpi
from mpi4py import MPI
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
def say(text):
    print(text, flush=True)
def raised(call):
    try:
        call()
    except butter_mpi.ButterError as error:
        say(f"raised {time.monotonic()} {type(error).__name__} {getattr(error, 'lost_ranks', ())} {error} .")
        return error
    say("nothing came .")
def total(comm):
    x = np.array([RANK + 1.0])
    comm.all_reduce(x)
    return int(x[0])
def die():
    say(f"dies {time.monotonic()} .")
    os.kill(os.getpid(), signal.SIGKILL)
fault = butter_mpi.FaultPolicy(start_deadline=20, collective_deadline=10)
comm = butter_mpi.init(plane=os.environ["PLANE"], fault=fault)
"""
# Open MPI's launcher leaves the others alone, so that they can be seen.
RECOVERY: dict[str, Any] = {"mpi": "openmpi", "options": ["--enable-recovery"]}
STANDIN = {"PLANE": "nccl", "NCCL_IB_TIMEOUT": "10", "NCCL_IB_RETRY_CNT": "1"}


def told(text: str) -> list[tuple[float, str]]:
    """What a rank raised, each with the time of it."""
    found = re.findall(r"^raised (\S+) (.*?) \.$", text, re.MULTILINE | re.DOTALL)
    return [(float(at), said) for at, said in found]


@contextlib.contextmanager
def together(programs: dict[str, tuple[int, str, dict[str, Any]]]) -> Iterator[dict[str, Job]]:
    """Run jobs beside one another."""
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(start_job(n, HEAD + program, timeout=50, **how))
            for name, (n, program, how) in programs.items()
        }


# -- death -----------------------------------------------------------------------------------------------------------

DEATHS = {
    "before": "die() if RANK == 1 else None",
    "in MPI": "from butter_mpi.planes.peers import PeerPlane as place; name = 'divide'",
    "in the start": "from butter_mpi.bootstrap import _Start as place; name = '_sentinel'",
    "watched start": "from butter_mpi.bootstrap import _Start as place; name = '_connect_watched'",
    "in NCCL": "from butter_mpi.planes.nccl_life import NcclLife as place; name = '_connect'",
}
DIES = """
place = None
{how}
if place and RANK == 1:
    setattr(place, name, lambda *_: die())
error = raised(lambda: comm.split(0, key=-RANK))
assert not comm.is_healthy()
"""


@pytest.fixture(scope="module")
def deaths() -> Iterator[dict[str, Job]]:
    """A job for each place of a split in which a rank dies."""
    host, nccl = {"env": {"PLANE": "host"}}, {"env": {**build().env(), **STANDIN}}
    programs = {
        where: (3, DIES.format(how=how), {**RECOVERY, **(nccl if "NCCL" in where else host)})
        for where, how in DEATHS.items()
    }
    with together(programs) as jobs:
        yield jobs


@pytest.mark.parametrize("where", list(DEATHS))
def test_death_in_a_split(deaths: dict[str, Job], where: str) -> None:
    """Wherever a rank dies in a split, each survivor names it within five seconds, and the job ends."""
    result = deaths[where].wait()
    died = float(result.rank_out[1].split("dies ")[1].split()[0])
    for rank in (0, 2):
        ((at, text),) = told(result.rank_out[rank])
        assert text.startswith("PeerLostError (1,)") and "was killed by SIGKILL" in text, result.text
        assert "rank 1/3 on" in text and at - died < 5, (at - died, result.text)
        # With recovery, the launcher's own status says nothing.
        assert "the job is ended" in result.rank_err[rank] or "ending" in result.rank_err[rank], result.text


def test_death_of_a_rank_of_two_communicators() -> None:
    """Each communicator with the rank is told, by its own name of it; one without it goes on."""
    program = """
row = comm.split(RANK // 2, key=-RANK)
comm.barrier(); row.barrier()
if RANK == 3:
    die()
error = raised(lambda: comm.wait_for_async_error(10))
if RANK == 2:
    error = raised(lambda: row.wait_for_async_error(10))
    say(error.__notes__)
else:
    say(f"row has {total(row)}, {total(row.dup())}")
"""
    with start_job(4, HEAD + program, env={"PLANE": "host"}, timeout=40, **RECOVERY) as job:
        result = job.wait()
    died = float(result.rank_out[3].split("dies ")[1].split()[0])
    for rank in range(3):
        (at, text), *more = told(result.rank_out[rank])
        assert text.startswith("PeerLostError (3,)") and "rank 3/4 on" in text and at - died < 5, result.text
        assert len(more) == (rank == 2), result.text
    ((at, text),) = told(result.rank_out[2])[1:]
    assert text.startswith("PeerLostError (0,)") and at - died < 5, result.text
    assert re.search(r"rank 0/2 of split 1 color 1 \(rank 3/4 of init\) on \S+ \(process \d+\) was killed", text), text
    assert "Ranks of split 1 color 1 in init: 0 is 3" in result.rank_out[2], result.text
    assert all("row has 3, 3" in result.rank_out[rank] for rank in (0, 1)), result.text


def test_child_that_breaks_while_the_parent_goes_on() -> None:
    """An exception in the block of a child breaks that one on its ranks; the parent works on, and the job ends well."""
    program = """
child = comm.split(RANK // 2)
try:
    with child:
        if RANK == 1:
            raise ZeroDivisionError("one part fails")
        if RANK == 0:
            raised(child.barrier)
except ZeroDivisionError:
    pass
say(f"parent has {total(comm)}, {total(comm.dup())}")
comm.close()
"""
    with start_job(3, HEAD + program, env={"PLANE": "host"}, timeout=40) as job:
        result = job.wait()
    ((_, text),) = told(result.rank_out[0])
    assert text.startswith("PeerLostError (1,)") and "of split 1 color 0 (rank 0/3 of init)" in text, result.text
    assert "ZeroDivisionError: one part fails" in text, result.text
    assert all("parent has 6, 6" in out for out in result.rank_out), result.text


def test_part_that_nccl_cannot_start() -> None:
    """A start of NCCL that fails on one rank of a part is raised on each of its ranks; the parent and a retry work."""
    program = """
from helpers.memory import DeviceArray, DeviceMemory
def on_device(comm):
    memory = DeviceMemory(comm.backend.device, comm.backend.stream)
    array = DeviceArray(memory, np.full(4, RANK + 1, np.float32), stream=memory.stream)
    comm.all_reduce(array)
    return array.get()[0]
raised(lambda: comm.split(RANK // 2))
say(f"parent has {on_device(comm)}, part {on_device(comm.split(RANK // 2))}")
"""
    env = {**build().env(faults="1@ncclCommInitRankConfig#2=3"), **STANDIN}
    with start_job(3, HEAD + program, env=env, timeout=40) as job:
        result = job.wait()
    for rank, out in enumerate(result.rank_out[:2]):
        ((_, text),) = told(out)
        assert text.startswith("StartError ()") and "ncclCommInitRankConfig" in text, result.text
        assert f"rank {rank}/2 of split 1 color 0 (rank {rank}/3 of init)" in text, result.text
    assert "nothing came" in result.rank_out[2], result.text
    # The third rank is alone in its part.
    assert all("parent has 6.0, part 3.0" in out for out in result.rank_out), result.text


# -- order -----------------------------------------------------------------------------------------------------------

PAIRS = """
other = comm.dup()
x = np.zeros(1)
one, two = (comm, other) if RANK else (other, comm)
began = time.monotonic()
raised(lambda: (one.send(x, 1 - RANK), two.recv(x, 1 - RANK)))
say(f"took {time.monotonic() - began} .")
"""
UNWATCHED = """
comm.close()
comm = butter_mpi.init(plane="host", fault=fault, watch="off")
other = comm.dup()
one, two = (comm, other) if RANK else (other, comm)
began = time.monotonic()
raised(lambda: (one.barrier(), two.barrier()))
say(f"took {time.monotonic() - began} .")
"""
# Each rank shares one communicator with each other one, and two ranks are in no two.
CYCLE = """
pairs = {(a, b): comm.split(0 if RANK in (a, b) else None) for a, b in ((0, 1), (1, 2), (0, 2))}
mine = [pairs[0, 1], pairs[1, 2], pairs[0, 2]] * 2
began = time.monotonic()
raised(lambda: (mine[RANK].barrier(), mine[RANK + 2].barrier()))
say(f"took {time.monotonic() - began} .")
"""


@pytest.fixture(scope="module")
def orders() -> Iterator[dict[str, Job]]:
    """Jobs that wait for their deadline of ten seconds; they do so together."""
    host = {"env": {"PLANE": "host"}}
    strict = {"env": {**build().env(), **STANDIN, "BUTTER_MPI_CHECK": "strict"}}
    programs = {
        "pairs": (2, PAIRS, host),
        "unwatched": (2, UNWATCHED, host),
        "cycle": (3, CYCLE, host),
        "strict": (3, CYCLE, strict),
    }
    with together(programs) as jobs:
        yield jobs


@pytest.mark.parametrize("what", ["pairs", "unwatched", "cycle", "strict"])
def test_orders_that_no_watcher_compares(orders: dict[str, Job], what: str) -> None:
    """What is blocked in MPI ends at the collective deadline, and tells in which operation of which other each rank is.

    The first rank to raise tells the others, by the communicator that they share.
    """
    result = orders[what].wait()
    assert result.rc != 0, result.text
    timeouts = []
    for out in result.rank_out:
        ((_, text),) = told(out)
        assert float(out.split("took ")[1].split()[0]) < 11, result.text
        timeouts += [text] if text.startswith("CollectiveTimeoutError") else []
    assert timeouts, result.text
    for text in timeouts:
        kind = "send" if what == "pairs" else "barrier"
        where = rf"lately in {kind} #\d \(.*\) at \S*program.py:\d+ as rank \d/\d( of \w+ \d.* \(rank \d/\d of init)?"
        assert "no answer within 10." in text and re.search(where, text), text


def test_orders_on_a_device() -> None:
    """Two communicators on one stream, in different orders: the stream ends within 5 s, and both say what was done.

    A third one, of the same ranks, goes on.
    """
    program = """
from helpers.memory import DeviceArray, DeviceMemory
from helpers.standin_rank import until
other, third = comm.dup(), comm.dup()
plane = comm.backend
memory = DeviceMemory(plane.device, plane.stream)
make = lambda: DeviceArray(memory, np.full(4, RANK + 1, np.float32), stream=plane.stream)
for one in (comm, other, third):
    one.all_reduce(make())
memory.wait()
began = time.monotonic()
one, two = (comm, other) if RANK else (other, comm)
one.all_reduce(make()); two.all_reduce(make())
until(lambda: plane.device.ready(plane.stream), 5)
for one in (comm, other):
    raised(lambda: one.wait_for_async_error(5))
say(f"took {time.monotonic() - began} .")
array = make()
third.all_reduce(array)
say(f"third has {array.get()[0]}")
"""
    with start_job(2, HEAD + program, env={**build().env(), **STANDIN}, timeout=40) as job:
        result = job.wait()
    for rank, out in enumerate(result.rank_out):
        assert float(out.split("took ")[1].split()[0]) < 5 and "third has 3" in out, result.text
        for _, text in told(out):
            assert text.startswith("CollectiveMismatchError ()") and "in different orders" in text, result.text
            first = r"rank 0: all_reduce #2 \(float32 x 4, sum\) at \S+:\d+ of dup 1, then all_reduce #2 .* of init"
            last = r"rank 1: all_reduce #2 \(float32 x 4, sum\) at \S+:\d+ of init, then all_reduce #2 .* of dup 1"
            assert re.search(f"{first}\n +{last}", text), (rank, text)
