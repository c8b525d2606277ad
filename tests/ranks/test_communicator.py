"""Collectives on arrays: results, exact counts, and refusals before anything is sent."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers.memory import PLANE
from mpi4py import MPI

import butter_mpi
from butter_mpi import Communicator, FaultPolicy, ReduceOp
from butter_mpi.control import unfinished
from butter_mpi.errors import (
    CollectiveMismatchError,
    CommunicatorBrokenError,
    CommunicatorClosedError,
    PreflightError,
)

pytestmark = pytest.mark.mpi

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
TOTAL = SIZE * (SIZE + 1) // 2


def test_all_reduce_in_and_out_of_place(comm: Communicator) -> None:
    """all_reduce leaves sendbuf alone unless it is the output."""
    send, recv = np.full((3, 5), RANK + 1, np.float32), np.full((3, 5), np.nan, np.float32)
    comm.all_reduce(send, recv)
    assert (send == RANK + 1).all() and (recv == TOTAL).all()
    comm.all_reduce(send, send, op="max")
    assert (send == SIZE).all()
    comm.all_reduce(send, op=ReduceOp.AVG)
    assert (send == SIZE).all()


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_narrow_floats_are_rounded_once(comm: Communicator, name: str) -> None:
    """A sum of narrow floats is that of single precision, rounded once."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    every = np.stack([np.random.default_rng(r).uniform(1, 2, 1000).astype(dtype) for r in range(SIZE)])
    result = every[RANK].copy()
    comm.all_reduce(result)
    exact = every.astype(np.float64).sum(0)
    step = float(ml_dtypes.finfo(dtype).eps)
    assert np.abs(result.astype(np.float64) - exact).max() <= exact.max() * step / 2


def test_special_values(comm: Communicator) -> None:
    """Infinity and not-a-number go through a sum; a half-precision overflow is infinity, not a warning."""
    data = np.array([np.inf if RANK == 0 else 1, np.nan if RANK == SIZE - 1 else 1, 65504], np.float16)
    comm.all_reduce(data, op="sum")
    assert np.isinf(data[0]) and np.isnan(data[1])
    assert np.isinf(data[2]) or SIZE == 1


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
def test_integers_wrap(comm: Communicator, dtype: str) -> None:
    """Integer sums and products wrap round, as NCCL's do, also where an MPI's vector code would saturate."""
    top = int(np.iinfo(dtype).max)
    bits = np.iinfo(dtype).bits
    for op, exact in (("sum", top * SIZE), ("prod", top**SIZE)):
        data = np.full(1000, top, dtype)
        comm.all_reduce(data, op=op)
        assert (data == np.array(exact % 2**bits, np.uint64).astype(dtype)).all()


def test_gather_and_scatter_are_exact(comm: Communicator) -> None:
    """all_gather and reduce_scatter take exact counts; nothing is rounded, no remainder dropped."""
    send, recv = np.arange(6, dtype=np.int64) + RANK, np.empty((SIZE, 6), np.int64)
    comm.all_gather(send, recv)
    assert (recv == np.arange(6) + np.arange(SIZE)[:, None]).all()
    share = np.empty(6, np.int64)
    comm.reduce_scatter(recv, share)
    assert (share == SIZE * (np.arange(6) + RANK)).all()
    comm.reduce_scatter(recv, recv[RANK])
    with pytest.raises(ValueError, match=rf"all_gather #4: recvbuf has {6 * SIZE + 1} elements, needs {6 * SIZE}"):
        comm.all_gather(send, np.empty(6 * SIZE + 1, np.int64))
    with pytest.raises(ValueError, match=r"reduce_scatter #4: (send|recv)buf has \d+ elements, needs \d+"):
        comm.reduce_scatter(np.empty(6 * SIZE + 1, np.int64), share)


def test_broadcast_reads_only_on_the_root(comm: Communicator, tmp_path: Path) -> None:
    """Memory that cannot be written may be broadcast from: the root's is not written."""
    wanted = np.arange(7.0)
    wanted.tofile(tmp_path / "data")
    data = np.memmap(tmp_path / "data", np.float64, "r") if RANK == 0 else np.zeros(7)
    comm.broadcast(data)
    assert (data == wanted).all()


def test_pairs(comm: Communicator) -> None:
    """Send and recv exchange arrays in one group, also with this rank itself."""
    send, recv = np.full(5, RANK, np.int32), np.empty(5, np.int32)
    with comm.group():
        comm.recv(recv, (RANK - 1) % SIZE)
        comm.send(send, (RANK + 1) % SIZE)
    assert (recv == (RANK - 1) % SIZE).all()


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
@pytest.mark.parametrize("grouped", [0, 1])
def test_group_on_one_rank_meets_plain_calls_on_the_other(comm: Communicator, grouped: int) -> None:
    """A rank may group what its peer submits one by one: each direction of a pair meets by itself."""
    mine, yours = np.full(4, RANK), np.full(4, -1)
    if grouped == RANK:
        with comm.group():
            comm.send(mine, 1 - RANK)
            comm.recv(yours, 1 - RANK)
    elif RANK < 2:
        comm.recv(yours, 1 - RANK)
        comm.send(mine, 1 - RANK)
    if RANK < 2:
        assert (yours == 1 - RANK).all()
    total, more = np.ones(3), np.zeros(3)
    if grouped == RANK:
        with comm.group():
            comm.send(np.full(3, 7.0), 1 - RANK)
            comm.all_reduce(total)
    else:
        comm.all_reduce(total)
        if RANK < 2:
            comm.recv(more, 1 - RANK)
            assert (more == 7).all()
    assert (total == SIZE).all()


@pytest.mark.skipif(SIZE < 3, reason="needs 3 ranks")
def test_chain_with_one_group(comm: Communicator) -> None:
    """Around a ring it is enough that one rank groups its send with its receive."""
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    token, received = np.full(2, RANK), np.full(2, -1)
    if RANK == 0:
        with comm.group():
            comm.send(token, right)
            comm.recv(received, left)
    else:
        comm.recv(received, left)
        comm.send(token, right)
    assert (received == left).all()


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
def test_other_collective_inside_a_group_is_a_mismatch(comm: Communicator) -> None:
    """A collective that differs is a mismatch at once, also where both ranks group it with others."""

    def group() -> None:
        with comm.group():
            comm.all_reduce(np.zeros(3)) if RANK else comm.broadcast(np.zeros(3))
            comm.barrier()

    with pytest.raises(CollectiveMismatchError) as caught:
        group()
    assert set(caught.value.records) == set(range(SIZE))
    comm.attempt_reconnect()
    comm.barrier()


GROUPS_THAT_WAIT_IN_VAIN = {
    "send and recv, collectives": (("send", "recv"), ("sum", "sum")),
    "send, send": (("send", "send"), ("send", "send")),
    "the last one of a group is met, an earlier one is not": (("send", "send", "recv"), ("send", "send")),
}


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
@pytest.mark.parametrize("scene", GROUPS_THAT_WAIT_IN_VAIN)
def test_groups_that_wait_in_vain_are_told_at_once(comm: Communicator, scene: str) -> None:
    """Two groups of which neither can end before the other are a mismatch, not a wait for the deadline."""
    token, peer = np.zeros(1), RANK ^ 1 if (RANK ^ 1) < SIZE else 0
    calls = {
        "send": lambda: comm.send(token, peer),
        "recv": lambda: comm.recv(np.zeros(1), peer),
        "sum": lambda: comm.all_reduce(np.zeros(1)),
    }

    def group() -> None:
        with comm.group():
            for name in GROUPS_THAT_WAIT_IN_VAIN[scene][RANK % 2]:
                calls[name]()

    began = time.monotonic()
    with pytest.raises(CommunicatorBrokenError):
        group()
    assert time.monotonic() - began < 5
    comm.attempt_reconnect()
    comm.barrier()
    assert not unfinished(), "MPI_Finalize would wait for what this scene gave up"


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
def test_what_met_beside_a_difference_ends(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that have begun the first part of what differs in its last one wait for no data at their end."""
    plane: Any = comm.backend
    send = plane._control.send

    def slowly(peers: Any, kind: str, body: dict[str, Any]) -> None:
        # Long enough for the others to begin what they know of.
        time.sleep(0.2 if kind == "op" and body["last"] else 0)
        send(peers, kind, body)

    if RANK == 0:
        monkeypatch.setattr(plane._control, "send", slowly)
    counts = [2] * (SIZE - 1) + [3 if RANK == 0 else 2]
    with pytest.raises(CollectiveMismatchError):
        comm.all_gather_v(np.zeros(2), np.zeros(sum(counts)), counts)
    assert not unfinished(), "MPI_Finalize would wait for what this one gave up"
    comm.attempt_reconnect()
    comm.barrier()


@pytest.mark.mpi(min_size=3)
def test_who_comes_late_to_a_difference_begins_nothing(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others have given up before a rank came is not begun there: it would be waited for for ever."""
    plane: Any = comm.backend
    sentinel = plane._sentinel
    hear, late, looked = sentinel._hear, RANK == SIZE - 1, threading.Event()
    if late:
        # It hears of it by its peers alone, as it does without a watcher.
        monkeypatch.setattr(sentinel, "_hear", lambda message: looked.wait(10) and hear(message))
        WORLD.Barrier()

    def group() -> None:
        with comm.group():
            comm.all_reduce(np.zeros(2))
            comm.all_reduce(np.zeros(3 if RANK == 0 else 2))

    with pytest.raises(CollectiveMismatchError):
        group()
    if not late:
        WORLD.Barrier()
    looked.set()
    assert not unfinished(), "MPI_Finalize would wait for what others gave up"
    comm.attempt_reconnect()
    comm.barrier()


def test_values_over_the_control_plane(comm: Communicator) -> None:
    """all_gather_json gives every rank's value in order and takes no number."""
    value = {"rank": RANK, "text": "ü" * (RANK + 1), "none": None, "list": [1, 2.5, True]}
    every = comm.all_gather_json(value)
    assert [v["rank"] for v in every] == list(range(SIZE)) and every[RANK] == value and comm.sequence == 0
    loop: list = []
    loop.append(loop)
    for wrong in (object(), loop):
        with pytest.raises(TypeError):
            comm.all_gather_json(wrong)
    with pytest.raises(ValueError, match="inside a group"), comm.group():
        comm.all_gather_json(1)


def test_records_of_every_rank(comm: Communicator) -> None:
    """gather_records gives every rank's preflight record."""
    records = comm.gather_records()
    assert [record["rank"] for record in records] == list(range(SIZE)) and records == comm.records


BIG = ">" if sys.byteorder == "little" else "<"
REFUSED = {
    "a column": (lambda: np.zeros((4, 4), np.float32)[:, 0], ValueError, r"strides \(16,\)"),
    "transposed": (lambda: np.zeros((2, 3), np.float32).T, ValueError, "not C-contiguous"),
    "reversed": (lambda: np.zeros(4, np.float32)[::-1], ValueError, r"strides \(-4,\)"),
    "Fortran order": (lambda: np.zeros((2, 3), np.float32, order="F"), ValueError, "not C-contiguous"),
    "broadcast view": (lambda: np.broadcast_to(np.zeros(1, np.float32), (4,)), ValueError, "not C-contiguous"),
    "foreign endian": (lambda: np.zeros(4, BIG + "f4"), ValueError, "foreign byte order"),
    "8-bit float of another kind": (
        lambda: np.zeros(4, ml_dtypes.float8_e4m3fnuz),
        ValueError,
        "got 'float8_e4m3fnuz'",
    ),
    "structured": (lambda: np.zeros(4, "i4,f4"), ValueError, "dtype must be one of"),
    "object": (lambda: np.zeros(4, object), ValueError, "got 'object'"),
    "datetime": (lambda: np.zeros(4, "M8[s]"), ValueError, "dtype must be one of"),
    "list": (lambda: [1.0, 2.0], TypeError, "must be a NumPy array; got builtins.list"),
    "number": (lambda: 3.0, TypeError, "must be a NumPy array"),
    "NumPy scalar": (lambda: np.float32(3), TypeError, "must be a NumPy array"),
    "bytes": (lambda: bytearray(8), TypeError, "must be a NumPy array"),
    "None": (lambda: None, TypeError, "must be a NumPy array"),
    "masked": (lambda: np.ma.masked_array(np.zeros(4), [True, False, False, False]), TypeError, "masked array"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_buffers(comm: Communicator, what: str) -> None:
    """What is no plain array is refused by name before anything is sent, and the next operation is right."""
    make, kind, message = REFUSED[what]
    with pytest.raises(kind, match=message) as caught:
        comm.all_reduce(make())
    assert f"rank {RANK}/{SIZE}" in str(caught.value) and "all_reduce #1: sendbuf" in str(caught.value)
    data = np.ones(2)
    comm.all_reduce(data)
    assert (data == SIZE).all() and comm.sequence == 1


def test_refused_pairs_of_buffers(comm: Communicator) -> None:
    """Buffers that do not go together are refused with both facts."""
    whole = np.zeros(8, np.float32)
    readonly = np.zeros(4, np.float32)
    readonly.flags.writeable = False
    with pytest.raises(ValueError, match="overlap"):
        comm.all_reduce(whole[:4], whole[2:6])
    with pytest.raises(ValueError, match="read-only"):
        comm.all_reduce(readonly)
    with pytest.raises(ValueError, match="recvbuf is read-only"):
        comm.all_reduce(whole[:4], readonly)
    with pytest.raises(ValueError, match="sendbuf is float32 and recvbuf float64"):
        comm.all_reduce(whole, np.zeros(8))
    with pytest.raises(ValueError, match="recvbuf has 7 elements, needs 8"):
        comm.all_reduce(whole, np.zeros(7, np.float32))
    with pytest.raises(ValueError, match="overlap"):
        comm.all_gather(whole[1:3], np.lib.stride_tricks.as_strided(whole, (2 * SIZE,), (4,)))
    with pytest.raises(ValueError, match="no streams"):
        comm.all_reduce(whole, stream=0)
    with pytest.raises(ValueError, match="op must be one of"):
        comm.all_reduce(whole, op="xor")
    with pytest.raises(ValueError, match="root must be from 0"):
        comm.broadcast(whole, root=SIZE)
    with pytest.raises(TypeError, match="peer must be an int"):
        comm.send(whole, peer="0")  # type: ignore[arg-type]
    assert comm.sequence == 0 and comm.is_healthy()


def test_device_memory_is_refused(comm: Communicator) -> None:
    """A device array is refused by name on host memory, never read as an address."""

    class Device:
        __cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3}

    with pytest.raises(TypeError, match="device memory"):
        comm.all_reduce(Device())


def test_zero_elements(comm: Communicator) -> None:
    """A zero count is legal on all ranks alike, and takes a number."""
    empty = np.empty((0, 5), np.float32)
    comm.all_reduce(empty)
    comm.all_gather(empty, empty)
    comm.reduce_scatter(empty, empty)
    comm.broadcast(empty)
    assert comm.sequence == 4


def test_group_that_raises_sends_nothing(comm: Communicator) -> None:
    """An exception inside a group drops it: no number is taken, the lane is free, the communicator healthy."""
    data = np.ones(3)

    def failing_group() -> None:
        with comm.group():
            comm.all_reduce(data)
            comm.send(data, (RANK + 1) % SIZE)
            raise ZeroDivisionError

    def refused_inner_group() -> None:
        with comm.group():
            comm.all_reduce(data)
            comm.broadcast(data, root=SIZE)

    with pytest.raises(ZeroDivisionError):
        failing_group()
    assert comm.sequence == 0 and (data == 1).all()
    with comm.group():
        comm.all_reduce(data)
        with pytest.raises(ValueError, match="root"):
            refused_inner_group()
    assert comm.sequence == 1 and (data == SIZE).all()
    thread = threading.Thread(target=comm.barrier)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_group_keeps_its_arrays(comm: Communicator) -> None:
    """A group keeps arrays alive that the caller has let go of."""
    data = np.full(1000, 7.0)
    alive = weakref.ref(data)
    with comm.group():
        comm.broadcast(data)
        del data
        gc.collect()
        assert alive() is not None
    gc.collect()
    assert alive() is None


def test_second_thread_waits_its_turn(comm: Communicator) -> None:
    """A second thread's operation comes after the group that holds the lane, never between."""
    order: list[str] = []
    entered, other = threading.Event(), np.ones(1)

    def second() -> None:
        entered.set()
        comm.all_reduce(other)
        order.append("second")

    thread = threading.Thread(target=second)
    with comm.group():
        thread.start()
        entered.wait(10)
        comm.barrier()
        order.append("group")
    thread.join(20)
    assert order == ["group", "second"] and (other == SIZE).all() and comm.sequence == 2


def test_two_communicators_share_the_lane(comm: Communicator) -> None:
    """Two communicators have sequences of their own, and are closed in any order on any rank."""
    with butter_mpi.init(WORLD, plane=PLANE) as other:
        other.barrier()
        comm.barrier()
        comm.barrier()
        assert (comm.sequence, other.sequence) == (2, 1)
        first, last = (comm, other) if RANK % 2 else (other, comm)
        first.close()
        last.close()
    with butter_mpi.init(WORLD, plane=PLANE) as third:
        third.barrier()


def test_closing_is_safe_in_any_order(comm: Communicator) -> None:
    """Closing twice, after abort, and aborting after close do nothing; use after it says so."""
    comm.close()
    comm.close()
    comm.abort("too late")
    with pytest.raises(CommunicatorClosedError, match="was closed"):
        comm.barrier()
    with pytest.raises(CommunicatorClosedError):
        comm.check_async_error()
    with pytest.raises(CommunicatorClosedError):
        comm.attempt_reconnect()


def test_dropped_communicator_warns(comm: Communicator) -> None:
    """A communicator that is dropped open warns, and harms nobody."""
    made = [butter_mpi.init(WORLD, plane=PLANE)]
    with pytest.warns(ResourceWarning, match="dropped without close"):
        made.clear()
    comm.barrier()


def test_many_communicators_leave_nothing(comm: Communicator) -> None:
    """Forty communicators, made and closed, leave no descriptor and no thread."""

    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    for _ in range(5):
        butter_mpi.init(WORLD, plane=PLANE).close()
    before = count()
    for _ in range(40):
        with butter_mpi.init(WORLD, plane=PLANE) as made:
            made.barrier()

    def more() -> bool:
        return any(now > then for now, then in zip(count(), before, strict=True))

    end = time.monotonic() + 5
    while more() and time.monotonic() < end:
        # A thread that was joined is listed until the kernel is done with it; there is no event for that.
        time.sleep(0.001)
    assert not more(), (count(), before)


def test_plan_is_held_to(comm: Communicator) -> None:
    """The first collective must be the planned one; afterwards everything goes."""
    plan = {"operation": "all_reduce", "count": 4, "dtype": "float32", "op": "sum"}
    with butter_mpi.init(WORLD, plane=PLANE, plan=plan) as made:
        with pytest.raises(ValueError, match="count 5, planned 4"):
            made.all_reduce(np.zeros(5, np.float32))
        with pytest.raises(ValueError, match="operation 'barrier', planned 'all_reduce'"):
            made.barrier()
        made.all_reduce(np.zeros(4, np.float32))
        made.barrier()
    comm.barrier()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"plane": "gpu"}, "plane must be one of auto, nccl, host; got 'gpu'"),
        ({"require_transport": "carrier pigeon"}, "require_transport must be one of"),
        ({"plan": {"operation": "all_reduce"}}, "needs 'op'"),
        ({"plan": {"operation": "sing"}}, "plan operation must be one of"),
        ({"share_gpu": "maybe"}, "share_gpu must be one of"),
    ],
)
def test_wrong_arguments_of_init(comm: Communicator, arguments: dict, message: str) -> None:
    """A wrong argument of init is told on every rank, with the allowed values."""
    with pytest.raises(PreflightError, match=message):
        butter_mpi.init(WORLD, **{"plane": PLANE, **arguments})
    comm.barrier()


def test_wrong_argument_on_one_rank_reaches_all(comm: Communicator) -> None:
    """One rank's wrong argument is an error on every rank, with the same text; nobody waits."""
    with pytest.raises(PreflightError) as caught:
        butter_mpi.init(WORLD, plane="gpu" if RANK == SIZE - 1 else PLANE)
    assert len(set(WORLD.allgather(str(caught.value)))) == 1
    comm.barrier()


def test_not_a_communicator() -> None:
    """What is no communicator is refused at once."""
    with pytest.raises(TypeError, match="intracommunicator"):
        butter_mpi.init("world")


def test_fault_policy_bounds() -> None:
    """Deadlines out of their range are refused with the range."""
    with pytest.raises(ValueError, match="collective_deadline must be a number of seconds from 10 to 300; got 9"):
        FaultPolicy(collective_deadline=9)
    with pytest.raises(ValueError, match="action must be one of"):
        FaultPolicy(action="ignore")


needs_peer = pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")

LARGE = 2**31 + 1


def large(value: int, count: int = LARGE, dtype: str = "int8") -> tuple[np.ndarray, list[int]]:
    """Return zeros, which take no memory until they are written, with `value` at a few places, and those places."""
    data = np.zeros(count, dtype)
    marks = sorted({mark % count for mark in (0, 2**31 // data.itemsize - 1, 2**31 // data.itemsize, count - 1)})
    data[marks] = value
    return data, marks


def arrived(data: np.ndarray, marks: Sequence[int], value: int) -> bool:
    """Whether `data` is `value` at these places and zero everywhere else."""
    return bool((data[list(marks)] == value).all()) and int(np.count_nonzero(data)) == len(marks)


def test_large_all_reduce(comm: Communicator) -> None:
    """More than 2^31 elements are one operation, and every one of them arrives."""
    data, marks = large(RANK + 1)
    comm.all_reduce(data, op="max")
    assert arrived(data, marks, SIZE)


@needs_peer
def test_large_broadcast(comm: Communicator) -> None:
    """More than 2^31 elements of root are on every rank, each at its place."""
    data, marks = large(7 * (RANK == SIZE - 1))
    comm.broadcast(data, root=SIZE - 1)
    assert arrived(data, marks, 7)


@needs_peer
def test_large_pair(comm: Communicator) -> None:
    """More than 2^31 elements go from one rank to another, each to its place."""
    data, marks = large(5 * (RANK == 0))
    if RANK == 0:
        comm.send(data, 1)
    elif RANK == 1:
        comm.recv(data, 0)
        assert arrived(data, marks, 5)


@needs_peer
def test_large_all_gather(comm: Communicator) -> None:
    """Blocks that are more than 2^31 elements together are in rank order, each element at its place."""
    send, marks = large(RANK + 1, LARGE // SIZE + 1)
    gathered = np.zeros((SIZE, send.size), np.int8)
    comm.all_gather(send, gathered)
    assert all(arrived(block, marks, rank + 1) for rank, block in enumerate(gathered))


@needs_peer
def test_large_reduce_scatter(comm: Communicator) -> None:
    """Of more than 2^31 bytes every rank has its own share, each element of it reduced."""
    share, marks = large(0, LARGE // 8 // SIZE + 1, "int64")
    send = np.zeros((SIZE, share.size), np.int64)
    send[:, marks] = (RANK + 1) * 10 ** np.arange(SIZE)[:, None]
    comm.reduce_scatter(send, share)
    assert arrived(share, marks, TOTAL * 10**RANK)


def ring(comm: Communicator, data: np.ndarray, result: np.ndarray) -> None:
    """Send to the right and receive from the left."""
    with comm.group():
        comm.send(data, (RANK + 1) % SIZE)
        comm.recv(result, (RANK - 1) % SIZE)


OPERATIONS: dict[str, Callable[..., object]] = {
    "all_reduce": lambda c, data, result: c.all_reduce(data),
    "broadcast": lambda c, data, result: c.broadcast(data),
    "all_gather": lambda c, data, result: c.all_gather(data[0], result),
    "reduce_scatter": lambda c, data, result: c.reduce_scatter(data, result[0]),
    "reduce": lambda c, data, result: c.reduce(data),
    "gather": lambda c, data, result: c.gather(data[0], result),
    "scatter": lambda c, data, result: c.scatter(data, result[0]),
    "all_to_all": lambda c, data, result: c.all_to_all(data, result),
    "pair": ring,
}


@needs_peer
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_data_goes_in_pieces(comm: Communicator, operation) -> None:
    """However much it is, MPI gets it in small pieces: no count is too large for it, and no wait keeps much memory."""
    data, result = np.ones((2, SIZE, 2**25 // SIZE), np.float32)
    tracemalloc.start()
    try:
        operation(comm, data, result)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < data.nbytes // 2


@needs_peer
def test_no_operation_is_slow_beside_the_others(comm: Communicator) -> None:
    """What moves as much as an all_reduce, or less, takes about as long, whatever MPI does between two looks."""
    data, result = np.ones((2, SIZE, 2**22 // SIZE), np.float32)

    def least(operation: Callable[..., object]) -> float:
        times = []
        for _ in range(3):
            comm.barrier()
            began = time.monotonic()
            operation(comm, data, result)
            comm.barrier()
            times.append(time.monotonic() - began)
        return min(times)

    usual = least(OPERATIONS["all_reduce"])
    multiples = {name: least(operation) / usual for name, operation in OPERATIONS.items()}
    assert max(multiples.values()) < 10, multiples


def skipping(comm: Communicator) -> None:
    """Submit a barrier as a rank does that has lost count by one."""
    comm.backend.sequence += 1  # type: ignore[attr-defined]
    comm.barrier()


@needs_peer
@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (lambda c: c.all_reduce(np.zeros(4, np.float32)), lambda c: c.all_reduce(np.zeros(8, ml_dtypes.bfloat16))),
        (lambda c: c.all_reduce(np.zeros(4, np.float32)), lambda c: c.all_reduce(np.zeros(4, np.int32))),
        (lambda c: c.all_reduce(np.zeros(4)), lambda c: c.all_reduce(np.zeros(5))),
        (lambda c: c.all_reduce(np.zeros(4)), lambda c: c.all_reduce(np.zeros(4), op="max")),
        (lambda c: c.all_reduce(np.zeros(4)), lambda c: c.all_gather(np.zeros(4), np.zeros(4 * SIZE))),
        (lambda c: c.broadcast(np.zeros(4), 0), lambda c: c.broadcast(np.zeros(4), 1)),
        (lambda c: c.barrier(), lambda c: c.all_gather_json(1)),
        (lambda c: c.barrier(), lambda c: c.send(np.zeros(4), 0)),
        (lambda c: c.barrier(), skipping),
    ],
    ids=["dtype and count", "dtype", "count", "op", "operation", "root", "control plane", "pair", "number"],
)
def test_mismatch_is_named_everywhere(comm: Communicator, mine, other) -> None:
    """A rank that submits something else is named on every rank with both call sites; no data is exchanged."""
    last = SIZE - 1
    with pytest.raises(CollectiveMismatchError) as caught:
        (other if last == RANK else mine)(comm)
    text = str(caught.value)
    assert f"rank {last}" in text and text.count("test_communicator.py:") >= 2
    with pytest.raises(CollectiveMismatchError):
        comm.check_async_error()
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == text and again.records == caught.value.records
    comm.attempt_reconnect()
    data = np.ones(3)
    comm.all_reduce(data)
    assert (data == SIZE).all()


@needs_peer
def test_pair_mismatch(comm: Communicator) -> None:
    """A recv of another size than the send is named on both ranks, and told to the others."""
    kind = CollectiveMismatchError if RANK < 2 else CommunicatorBrokenError
    calls = {0: lambda: comm.send(np.zeros(4), 1), 1: lambda: comm.recv(np.zeros(5), 0)}
    with pytest.raises(kind, match=r"(?s)send.* A send needs a recv of the same count and dtype on its peer"):
        calls.get(RANK, comm.barrier)()
    comm.attempt_reconnect()
    comm.barrier()


@needs_peer
def test_what_a_peer_sent_before_it_broke_counts(comm: Communicator) -> None:
    """A rank that fails right after an operation does not take that operation from the others."""
    for turn in range(20):
        data = np.full(70_000, 1.0)
        comm.all_reduce(data)
        with pytest.raises(CollectiveMismatchError):
            comm.broadcast(data, root=0) if turn % SIZE == RANK else comm.barrier()
        assert (data == SIZE).all()
        comm.attempt_reconnect()


@needs_peer
def test_sequence_goes_on_at_the_largest(comm: Communicator) -> None:
    """After a reconnect the sequence goes on after the largest number of any rank."""
    comm.barrier()
    with pytest.raises(CommunicatorBrokenError):
        comm.barrier() if RANK else comm.all_reduce(np.zeros(1))
    comm.attempt_reconnect()
    assert WORLD.allgather(comm.sequence) == [2] * SIZE
    comm.barrier()
    assert comm.sequence == 3


def test_forked_child_is_refused(comm: Communicator) -> None:
    """A forked child may not use its parent's communicator, and closing it there harms nobody."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            assert not comm.is_healthy()
            comm.barrier()
        except CommunicatorClosedError as error:
            os.write(write, str(error).encode())
        comm.close()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert "forked child" in pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    comm.barrier()


def test_c_environment_is_compared(comm: Communicator) -> None:
    """A variable that only the C environment has is seen: NCCL reads getenv, not os.environ."""
    setenv = ctypes.CDLL(None).setenv
    unsetenv = ctypes.CDLL(None).unsetenv
    setenv(b"NCCL_PROTO", b"LL" if RANK else b"Simple", 1)
    try:
        if SIZE == 1:
            butter_mpi.init(WORLD, plane=PLANE).close()
        else:
            with pytest.raises(PreflightError, match="NCCL_PROTO"):
                butter_mpi.init(WORLD, plane=PLANE)
    finally:
        unsetenv(b"NCCL_PROTO")
    comm.barrier()


def test_arguments_of_questions(comm: Communicator, tmp_path: Path) -> None:
    """What is no number of seconds, or no path, is refused by name; a file that cannot be written says whose it was."""
    with pytest.raises(TypeError, match="timeout must be a number of seconds, 0 or more; got 'a'"):
        comm.wait_for_async_error("a")  # type: ignore[arg-type]
    if SIZE > 1:
        with pytest.raises(TypeError):
            comm.dump_recorder(3)  # type: ignore[arg-type]
        with pytest.raises(FileNotFoundError, match=rf"rank {RANK}/{SIZE} on .*: dump_recorder: No such file"):
            comm.dump_recorder(tmp_path / "none" / "x.jsonl")
