"""Plans: what a call of one does, beside plain calls; what it still looks at; what becomes of it. On every plane."""

from __future__ import annotations

import gc
import inspect
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from helpers.memory import PLANE, DeviceArray
from mpi4py import MPI

import butter_mpi
from butter_mpi import Communicator
from butter_mpi.collectives import RULES
from butter_mpi.errors import (
    CollectiveMismatchError,
    CommunicatorBrokenError,
    CommunicatorClosedError,
    PeerLostError,
)

pytestmark = pytest.mark.mpi

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
GRAPHS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "reduce")
TOTAL = SIZE * (SIZE + 1) // 2
needs_peer = pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")


class _HostArray(np.ndarray):
    def get(self) -> Any:
        return self


Make = Callable[..., Any]


@pytest.fixture
def make(memory: Any) -> Make:
    """What makes arrays of this plane, whose content is read in the order of its stream."""

    def made(content: Any, dtype: Any = np.float32) -> Any:
        array = np.array(content, dtype)
        return DeviceArray(memory, array, stream=memory.stream) if PLANE == "nccl" else array.view(_HostArray)

    return made


def test_every_operation_has_its_plan() -> None:
    """Each operation has a plan with the same arguments."""
    for kind in RULES:
        plain, planned = (
            {name: one.default for name, one in inspect.signature(getattr(Communicator, of)).parameters.items()}
            for of in (kind, f"plan_{kind}")
        )
        graph = {"graph": False} if kind in GRAPHS else {}
        assert list(planned.items()) == [*plain.items(), *graph.items()], kind


def test_a_plan_does_what_its_operation_does(comm: Communicator, make: Make) -> None:
    """Made and not called it sends nothing; each call is one submission, with the results of the operation."""
    own, out, every, share = make([RANK + 1] * 6), make([0] * 6), make(np.zeros((SIZE, 6))), make([0] * 6)
    whole, got = make([RANK] * 5), make([-1] * 5)
    plans = [
        comm.plan_all_reduce(own, out),
        comm.plan_all_gather(own, every),
        comm.plan_reduce_scatter(every, share, op="max"),
        comm.plan_broadcast(whole, SIZE - 1),
        comm.plan_barrier(stream=comm.backend.stream if PLANE == "nccl" else None),  # type: ignore[attr-defined]
    ]
    pair = [comm.plan_send(whole, (RANK + 1) % SIZE), comm.plan_recv(got, (RANK - 1) % SIZE)]
    assert comm.sequence == 0 and "all_reduce (float32 x 6, sum)" in repr(plans[0])
    for _ in range(3):
        for plan in plans:
            plan()
        with comm.group():
            for plan in pair:
                plan()
    assert comm.sequence == 3 * len(plans)
    assert (out.get() == TOTAL).all() and (own.get() == RANK + 1).all()
    assert (every.get() == np.arange(1, SIZE + 1)[:, None]).all() and (share.get() == RANK + 1).all()
    assert (whole.get() == SIZE - 1).all() and (got.get() == SIZE - 1).all()


def test_a_graph_where_there_is_one(comm: Communicator, make: Make) -> None:
    """Asked for on every plane it gives the same result; it is a graph where NCCL moves the data."""
    data = make([RANK + 1] * 6)
    plan = comm.plan_all_reduce(data, graph=True)
    assert plan.graph == (PLANE == "nccl" and SIZE > 1) and comm.sequence == 0
    plan()
    assert (data.get() == TOTAL).all() and comm.sequence == 1
    with pytest.raises(ValueError, match="is for what is one call of NCCL"):
        comm.plan_all_reduce(data, op=butter_mpi.PreMulSum(2.0), graph=True)
    assert not comm.plan_all_reduce(data).graph


def test_wrong_arguments_are_refused_when_it_is_made(comm: Communicator, make: Make) -> None:
    """What the operation refuses is refused by the plan of it, in the same words, before anything is sent."""
    with pytest.raises(ValueError, match=f"all_gather #1: recvbuf has {6 * SIZE + 1} elements, needs {6 * SIZE}"):
        comm.plan_all_gather(make([0] * 6), make([0] * (6 * SIZE + 1)))
    with pytest.raises(ValueError, match=f"broadcast #1: root must be from 0 to {SIZE - 1}"):
        comm.plan_broadcast(make([0]), SIZE)
    assert comm.sequence == 0 and comm.is_healthy()


def test_a_plan_keeps_its_arrays(comm: Communicator, make: Make) -> None:
    """Arrays that only the plan knows are there as long as the plan is."""
    data = make([1] * 1000)
    alive = weakref.ref(data)
    plan = comm.plan_all_reduce(data)
    del data
    gc.collect()
    plan()
    kept = alive()
    assert kept is not None and (kept.get() == SIZE).all()
    del kept, plan
    # On a device they stay until the stream has passed the last call, which the read above has waited for.
    comm.check_async_error()
    gc.collect()
    assert alive() is None


def test_a_group_that_raises_drops_the_plan_s_call(comm: Communicator, make: Make) -> None:
    """In a group a call of a plan is submitted at the end, or not at all."""
    data = make([1] * 4)
    plan = comm.plan_all_reduce(data)

    def fails() -> None:
        with comm.group():
            plan()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert comm.sequence == 0 and (data.get() == 1).all()
    with comm.group():
        plan()
        assert comm.sequence == 0
    assert comm.sequence == 1 and (data.get() == SIZE).all()


def test_a_plan_waits_its_turn(comm: Communicator, make: Make) -> None:
    """A plan that another thread calls waits for the lane."""
    data, turns = make([1] * 4), list[str]()
    plan = comm.plan_all_reduce(data)

    def call() -> None:
        plan()
        turns.append("plan")

    thread = threading.Thread(target=call)
    with comm.group():
        thread.start()
        thread.join(0.2)
        turns.append("group")
    thread.join(20)
    assert turns == ["group", "plan"] and (data.get() == SIZE).all()


def test_a_plan_is_held_to_the_declared_collective(comm: Communicator, make: Make, memory: Any) -> None:
    """The first collective is held to ``init(plan=...)`` when it is called, not when its plan is made."""
    declared = {"operation": "all_reduce", "count": 4, "dtype": "float32", "op": "sum"}
    comm.close()
    share = bool(os.environ.get("BUTTER_MPI_TEST_SHARE_GPU"))
    with butter_mpi.init(WORLD, plane=PLANE, plan=declared, share_gpu=share) as made:
        # That of the first communicator is gone, and drivers crash on what is no stream any more.
        memory.stream = cast(Any, made.backend).stream
        wrong, right = made.plan_all_reduce(make([0] * 5)), made.plan_all_reduce(make([0] * 4))
        with pytest.raises(ValueError, match="count 5, planned 4"):
            wrong()
        right()
        wrong()
        assert made.sequence == 2


@needs_peer
def test_a_plan_meets_a_plain_call_and_differs_from_another(comm: Communicator, make: Make) -> None:
    """A plan on one rank and a plain call on the others are one operation; where they differ both lines are named."""
    data, longer = make([1] * 8), make([1] * 9)
    plan = comm.plan_all_reduce(data)
    for _ in range(3):
        plan() if RANK == 0 else comm.all_reduce(data)
    assert comm.sequence == 3 and (data.get() == SIZE**3).all()

    def differ() -> None:
        plan() if RANK == 0 else comm.all_reduce(longer)
        # Ranks that do not compare by themselves are told a moment later.
        comm.wait_for_async_error(20)

    with pytest.raises(CollectiveMismatchError) as caught:
        differ()
    line, text = differ.__code__.co_firstlineno + 1, str(caught.value)
    assert f"all_reduce #4 (float32 x 8, sum) at ranks/test_plans.py:{line}" in text, text
    assert f"all_reduce #4 (float32 x 9, sum) at ranks/test_plans.py:{line}" in text, text


@needs_peer
def test_a_plan_of_a_broken_communicator(comm: Communicator, make: Make) -> None:
    """A call raises the first cause until a reconnect has succeeded, and then goes on as before."""
    # What differs may move anything.
    data, other = make([1] * 4), make([1] * 4)
    plan = comm.plan_all_reduce(data)
    plan()
    # An abort ends what is under way as well.
    assert (data.get() == SIZE).all()

    def differ() -> None:
        comm.plan_broadcast(other, 1)() if RANK == 0 else comm.broadcast(other, 0)
        comm.wait_for_async_error(20)

    with pytest.raises(CommunicatorBrokenError):
        differ()
    first = str(comm.backend.health.cause)  # type: ignore[attr-defined]
    with pytest.raises(CommunicatorBrokenError) as caught:
        plan()
    assert str(caught.value) == first and "poisoned" in repr(plan)
    comm.attempt_reconnect()
    plan()
    assert comm.sequence == 3 and (data.get() == SIZE**2).all() and "healthy" in repr(plan)


def test_a_plan_of_a_closed_communicator(comm: Communicator, make: Make) -> None:
    """After a close, and in a forked child, a call says why nothing was sent."""
    plan = comm.plan_all_reduce(make([1] * 4))
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            plan()
        except CommunicatorClosedError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert "forked child" in pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    plan()
    WORLD.Barrier()
    comm.close()
    with pytest.raises(CommunicatorClosedError, match="all_reduce: the communicator was closed"):
        plan()
    assert "closed" in repr(plan)


@needs_peer
def test_a_plan_of_a_rank_that_aborted(comm: Communicator, make: Make) -> None:
    """Where a peer gives up, a loop of calls ends with its reason."""
    plan = comm.plan_all_reduce(make([1] * 4))
    # Nobody waits for the others in a light call on a device: all have made theirs before one gives up.
    WORLD.Barrier()
    if RANK == 0:
        plan()
        comm.abort("enough")
        return

    def loop() -> None:
        while True:
            plan()
            comm.check_async_error()

    with pytest.raises(PeerLostError, match="enough"):
        loop()
