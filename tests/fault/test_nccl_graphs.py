"""Plans that launch CUDA graphs, in jobs of their own: by a network, and where ranks are lost with graphs in flight."""

from __future__ import annotations

import re
import signal
import time

import pytest
from helpers.mpirun import run_job, start_job
from helpers.standin import build
from helpers.surviving import HEAD, NCCL, on_standins

PLAN = """
from helpers.memory import DeviceArray
def array(comm):
    return DeviceArray(memory(comm), np.ones(4, np.float32), stream=comm.backend.stream)
def planned(comm, graph=True):
    data = array(comm)
    plan = comm.plan_all_reduce(data, graph=graph)
    plan()
    assert (data.get() == SIZE).all()
    return plan, data
def ended(plane, began, seconds=3.0):
    for one in plane._stopping:
        one.wait()
    assert time.monotonic() - began < seconds, time.monotonic() - began
"""

LOST = """
comm = start()
plan, data = planned(comm)
assert plan.graph
plane, dropped = comm.backend, planned(comm)[0]
if RANK == 1:
    say("ready")
    time.sleep(60)
try:
    for _ in range(LAUNCHES):
        plan()
    say("launched")
    comm.wait_for_async_error(20)
except butter_mpi.PeerLostError as error:
    say(f"raised {time.monotonic()} {error.lost_ranks}")
    began = time.monotonic()
    del dropped
    ended(plane, began)
    say("aborted")
"""

SHRUNK = """
comm = start()
plan, data = planned(comm)
child = comm.dup()
other, _ = planned(child)
if RANK == 1:
    die()
plan()
lost(comm)
began = time.monotonic()
new = comm.shrink()
ended(comm.backend, began)
assert total(new) == 3 and not plan.graph
say(f"back {time.monotonic()}")
again = new.plan_all_reduce(array(new), graph=True)
again()
assert again.graph and new.is_healthy()
lost(child)
child.close()
ended(child.backend, time.monotonic())
new.close()
"""


def test_by_a_network() -> None:
    """Where each launch would wait for the host all go on without a graph; so do host planes, and one rank alone."""
    program = HEAD + PLAN + "comm = start()\nplan, data = planned(comm)\nassert not plan.graph\nplan()\ncomm.close()"
    program += "\nassert comm.backend._closing.done"
    result = run_job(2, program, env={**build().env(transport="NET/Socket"), **NCCL})
    assert result.rc == 0, result.text
    alone = """
    import numpy as np
    import butter_mpi
    with butter_mpi.init(plane="host") as comm:
        data = np.ones(4, np.float32)
        plan = comm.plan_all_reduce(data, graph=True)
        plan()
        assert not plan.graph and (data == comm.world_size).all() and comm.sequence == 1
        if comm.world_size > 1:
            try:
                comm.plan_all_reduce(np.ones(4 + comm.rank, np.float32), graph=True)
            except butter_mpi.CollectiveMismatchError as error:
                assert "plan_graph" in str(error)
            else:
                raise AssertionError
            comm.attempt_reconnect()
    """
    for ranks in (1, 2):
        result = run_job(ranks, re.sub("\n    ", "\n", alone))
        assert result.rc == 0, result.text


@pytest.mark.parametrize("launches", [1, 40], ids=["one", "more than the driver takes"])
def test_a_lost_peer(launches: int) -> None:
    """A survivor with launches in flight, or inside one, hears of it in the usual time, and its abort ends."""
    program = HEAD + PLAN + LOST.replace("LAUNCHES", str(launches))
    with start_job(2, program, **on_standins()) as job:
        job.wait_for("ready", 1)
        time.sleep(0.5)
        killed = time.monotonic()
        job.signal(1, signal.SIGKILL)
        job.wait_for("aborted", 0)
        found = re.search(r"raised (\S+) \(1,\)", job.read(0, "out"))
        assert found and float(found[1]) - killed < 2, job.read(0, "out")
        assert (launches == 1) == ("launched" in job.read(0, "out"))


def test_survivors() -> None:
    """Survivors shrink beside plans with graphs; new ones have graphs again."""
    result = run_job(3, HEAD + PLAN + SHRUNK, timeout=60, **on_standins())
    assert all("back" in result.rank_out[rank] for rank in (0, 2)), result.text
    for rank in (0, 2):
        assert "Traceback" not in result.rank_err[rank], result.text


def test_never_closed() -> None:
    """A program that ends with plans, living and dropped, leaves as others do."""
    program = HEAD + PLAN + "comm = start()\nplan, data = planned(comm)\nplanned(comm)\nplan()"
    began = time.monotonic()
    result = run_job(2, program, env={**build().env(), **NCCL})
    assert result.rc == 0 and "Exception ignored" not in result.text, result.text
    assert time.monotonic() - began < 10
