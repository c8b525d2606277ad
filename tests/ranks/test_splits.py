"""Communicators from communicators: who is in them, what they compute beside one another, and how they end."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers.memory import PLANE, DeviceArray, DeviceMemory
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from butter_mpi import Communicator
from butter_mpi.errors import CollectiveMismatchError, CommunicatorClosedError, PeerLostError, PreflightError
from butter_mpi.lane import LANE
from butter_mpi.sentinel.judging import Verdict

pytestmark = pytest.mark.mpi

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
RANKS = range(SIZE)
needs_peer = pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")

Array = npt.NDArray[Any]


class Arrays:
    """Makes arrays in the memory of one communicator's plane, and looks at them."""

    def __init__(self, comm: Communicator) -> None:
        plane: Any = comm.backend
        self._memory = DeviceMemory(plane.device, plane.stream) if plane.on_device else None

    def __call__(self, content: Array) -> Any:
        """Return an array of the plane's memory."""
        if self._memory is None:
            return content.copy()
        return DeviceArray(self._memory, content, stream=self._memory.stream)

    def get(self, array: Any) -> Array:
        """Return what is in it."""
        return array if self._memory is None else array.get()


def total(comm: Communicator) -> float:
    """Return the sum of every rank's number in MPI's world."""
    arrays = Arrays(comm)
    array = arrays(np.full(3, RANK + 1.0))
    comm.all_reduce(array)
    return float(arrays.get(array)[0])


def numbers(ranks: list[int]) -> float:
    """Return what that sum must be."""
    return sum(rank + 1.0 for rank in ranks)


def differ(comm: Communicator, first: Callable[[], Any], others: Callable[[], Any]) -> None:
    """Call one thing on rank 0 and another on the others, and wait for what comes of it."""
    first() if RANK == 0 else others()
    comm.wait_for_async_error(5)


# -- the model -------------------------------------------------------------------------------------------------------


@dataclass
class Model:
    """A communicator as everybody knows it: its ranks in MPI's world, in order, and how many collectives it had."""

    ranks: list[int]
    mine: Communicator | None
    sequence: int = 0
    arrays: Arrays | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.arrays = Arrays(self.mine) if self.mine is not None else None


def content(step: int, rank: int, count: int) -> Array:
    """Return small whole numbers that no sum here rounds, different by step, rank and place."""
    return (np.arange(count) + 7 * rank + 3 * step).astype(np.float32) % 64


def expected(kind: str, model: Model, step: int, count: int, root: int) -> dict[int, Array]:
    """Return what each rank of a communicator must get of an operation, by NumPy."""
    size = len(model.ranks)
    sent = [content(step, rank, count * (size if kind == "reduce_scatter" else 1)) for rank in model.ranks]
    if kind == "all_reduce":
        return dict.fromkeys(range(size), np.sum(sent, axis=0))
    if kind == "broadcast":
        return dict.fromkeys(range(size), sent[root])
    if kind == "all_gather":
        return dict.fromkeys(range(size), np.concatenate(sent))
    if kind == "reduce_scatter":
        return {rank: np.sum(sent, axis=0)[rank * count : (rank + 1) * count] for rank in range(size)}
    return {rank: sent[rank - 1] for rank in range(size)}


def run(kind: str, model: Model, step: int, count: int, root: int) -> None:
    """Do an operation on this rank's communicator, and compare with the model."""
    comm, arrays = model.mine, model.arrays
    assert comm is not None and arrays is not None
    wanted = expected(kind, model, step, count, root)[comm.rank]
    send = arrays(content(step, RANK, count * (comm.world_size if kind == "reduce_scatter" else 1)))
    recv = arrays(np.full_like(wanted, -1))
    if kind == "all_reduce":
        comm.all_reduce(send, recv)
    elif kind == "broadcast":
        comm.broadcast(send, root)
        recv = send
    elif kind == "all_gather":
        comm.all_gather(send, recv)
    elif kind == "reduce_scatter":
        comm.reduce_scatter(send, recv)
    else:
        comm.sendrecv(send, (comm.rank + 1) % comm.world_size, recv, (comm.rank - 1) % comm.world_size)
    assert (arrays.get(recv) == wanted).all(), (kind, model.ranks, step, count)


KINDS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "ring")
COLORS = st.lists(st.none() | st.integers(0, 1), min_size=SIZE, max_size=SIZE)
KEYS = st.lists(st.integers(-2, 2), min_size=SIZE, max_size=SIZE)
WHICH = st.integers(0, 9)
SPLIT = st.tuples(st.just("split"), WHICH, COLORS, KEYS)
DUP = st.tuples(st.just("dup"), WHICH)
CLOSE = st.tuples(st.just("close"), WHICH)
OPERATION = st.tuples(st.sampled_from(KINDS), WHICH, st.integers(0, 5), st.integers(0, 9))
STEPS = st.tuples(SPLIT, st.lists(st.one_of(OPERATION, OPERATION, OPERATION, SPLIT, DUP, CLOSE), max_size=9))
# The same examples on every rank; a failure ends the search, as each rank would go on from another one.
AGREED = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=8,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def divided(model: Model, said: dict[int, tuple[int | None, int]], new: Communicator | None) -> Iterator[Model]:
    """Yield what a split makes, as everybody knows it."""
    for color in sorted({one for one, _ in said.values() if one is not None}):
        ranks = [rank for rank in model.ranks if said[rank][0] == color]
        ranks.sort(key=lambda rank: (said[rank][1], model.ranks.index(rank)))
        yield Model(ranks, new if RANK in ranks else None)


def take(step: int, what: tuple[Any, ...], known: list[Model]) -> None:
    """Take one step of a plan that every rank follows."""
    kind, which, *more = what
    model = known[which % len(known)]
    if kind == "close":
        if len(known) > 1:
            known.remove(model)
            if model.mine is not None:
                model.mine.close()
    elif kind in ("split", "dup"):
        colors, keys = more or ([0] * SIZE, [0] * SIZE)
        new = None
        if model.mine is not None:
            new = model.mine.dup() if kind == "dup" else model.mine.split(colors[RANK], keys[RANK])
            assert (new is None) == (colors[RANK] is None)
        known += divided(model, {rank: (colors[rank], keys[rank]) for rank in model.ranks}, new)
    else:
        count, root = more
        model.sequence += kind != "ring"
        if model.mine is not None:
            run(kind, model, step, count, root % len(model.ranks))
    for one in known:
        if one.mine is not None:
            found = (one.mine.world_size, one.ranks[one.mine.rank], one.mine.sequence, one.mine.is_healthy())
            assert found == (len(one.ranks), RANK, one.sequence, True)


@AGREED
@given(STEPS)
def test_whatever_is_split_computes_what_numpy_does(comm: Communicator, plan: tuple[Any, list[Any]]) -> None:
    """Any splits, dups and closes, with operations of all communicators between them in one order."""
    first, rest = plan
    assert WORLD.allgather(repr(plan)) == [repr(plan)] * SIZE, "ranks drew different plans"
    whole = comm.dup()
    known = [Model(list(RANKS), whole)]
    for step, what in enumerate([first, *rest]):
        take(step, what, known)
    for one in known:
        if one.mine is not None:
            one.mine.close()


# -- arguments -------------------------------------------------------------------------------------------------------


INT = "must be an int; None for a rank that shall be in none; got"
FROM_0 = "color must be from 0 to 2147483647; None for a rank that shall be in none; got"
WRONG: list[tuple[Any, Any, type[Exception], str]] = [
    ("red", 0, TypeError, f"split: color {INT} str"),
    (True, 0, TypeError, f"split: color {INT} bool"),
    (-1, 0, ValueError, f"split: {FROM_0} -1"),
    (2**31, 0, ValueError, f"split: {FROM_0} 2147483648"),
    (0, 1.5, TypeError, "split: key must be an int; got float"),
    (None, 2**31, ValueError, "split: key must be from -2147483648 to 2147483647; got 2147483648"),
]


def test_wrong_argument_on_one_rank_reaches_all(comm: Communicator) -> None:
    """Every rank raises the same error, which names the rank; nothing is poisoned, and the next split works."""
    last = SIZE - 1
    for color, key, error, said in WRONG:
        with pytest.raises(error) as caught:
            comm.split(*((color, key) if last == RANK else (0,)))
        # The rank itself is named already.
        assert str(caught.value).endswith(f": {said}" if last == RANK else f": rank {last}: {said}")
        assert f"rank {last}: " not in str(caught.value) or last != RANK
        assert comm.is_healthy() and total(comm) == numbers(list(RANKS))
    made = comm.split(np.int64(0), np.int8(-RANK))
    assert made is not None and made.rank == last - RANK and "split 1 color 0" in repr(made)
    made.close()


def test_no_split_inside_a_group_nor_of_a_closed_one(comm: Communicator) -> None:
    """A split cannot be part of a group; of a communicator that is closed there is none."""
    with pytest.raises(ValueError, match="split inside a group"), comm.group():
        comm.split(0)
    assert total(comm) == numbers(list(RANKS))
    made = comm.dup()
    made.close()
    with pytest.raises(CommunicatorClosedError, match="dup: the communicator was closed"):
        made.dup()


@needs_peer
def test_part_whose_ranks_differ_is_refused(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """What changed since init is compared again: refused on every rank of the part, and the parent goes on."""
    if RANK == SIZE - 1:
        monkeypatch.setenv("NCCL_BUFFSIZE", "8388608")
    with pytest.raises(PreflightError, match="NCCL_BUFFSIZE"):
        comm.split(0)
    monkeypatch.undo()
    child = comm.split(0)
    assert child is not None and total(child) == total(comm) == numbers(list(RANKS))
    child.close()


# -- life ------------------------------------------------------------------------------------------------------------


def test_child_is_a_whole_communicator(comm: Communicator) -> None:
    """It has plane, settings, record and sequence of its own, and goes on when its parent is closed."""
    parent = comm.dup()
    child = parent.split(RANK % 2, -RANK)
    assert child is not None
    ranks = [rank for rank in reversed(RANKS) if rank % 2 == RANK % 2]
    assert (child.rank, child.world_size) == (ranks.index(RANK), len(ranks))
    assert child.plane == ("solo" if len(ranks) == 1 else parent.plane)
    assert child.settings.collective_deadline == comm.settings.collective_deadline and child.preflight.ok
    here = f"rank {child.rank}/{len(ranks)} of dup 1, split 1 color {RANK % 2} (rank {RANK}/{SIZE} of init"
    assert here in repr(child)
    assert total(child) == numbers(ranks) and (child.sequence, parent.sequence) == (1, 0)
    parent.close()
    assert total(child) == numbers(ranks)
    grandchild = child.dup()
    assert total(grandchild) == numbers(ranks) and grandchild.sequence == 1
    assert grandchild.all_gather_json(RANK) == ranks
    with pytest.raises(ValueError, match=r"rank \d/\d of dup 1, split 1 color \d \(rank \d/\d of init"):
        child.broadcast(np.zeros(1) if PLANE == "host" else 0, root=9)
    child.close()
    grandchild.close()


@needs_peer
def test_mismatch_breaks_the_child_alone(comm: Communicator) -> None:
    """Ranks that differ in one communicator break it; the others go on, and so does it after a reconnect."""
    child, sibling = comm.dup(), comm.dup()
    with pytest.raises(CollectiveMismatchError, match=r"of dup 1 \(rank") as caught:
        differ(child, lambda: child.all_gather_json(0), child.barrier)
    (note,) = caught.value.__notes__
    assert "have a health of their own: the one that dup 1 comes from" in note and "0 is 0, 1 is 1" in note
    assert not child.is_healthy()
    assert total(sibling) == total(comm) == numbers(list(RANKS))
    child.attempt_reconnect()
    assert total(child) == numbers(list(RANKS))
    child.close()
    sibling.close()


@needs_peer
def test_split_that_meets_a_collective(comm: Communicator) -> None:
    """A rank in a split where others are in a collective or a dup is a mismatch, with both call sites."""
    for other in (comm.barrier, comm.dup):
        with pytest.raises(CollectiveMismatchError) as caught:
            differ(comm, lambda: comm.split(0), other)
        assert "split #" in caught.value.records[0] and "test_splits.py:" in caught.value.records[0]
        assert f"{other.__name__} #" in caught.value.records[1], caught.value
        comm.attempt_reconnect()
    assert total(comm) == numbers(list(RANKS))


@needs_peer
def test_abort_of_the_child_is_none_of_the_parent(comm: Communicator) -> None:
    """A child that one rank gives up is broken on its ranks; the parent goes on."""
    child = comm.dup()
    if RANK == 0:
        child.abort("enough")
    else:
        with pytest.raises(PeerLostError, match="enough"):
            child.wait_for_async_error(5)
        child.close()
    assert total(comm) == numbers(list(RANKS))


@needs_peer
def test_abort_that_does_not_get_its_turn(comm: Communicator) -> None:
    """A child that a thread gives up, while others wait in it, is told as that, and not as another order."""
    child, other = comm.dup(), comm.dup()
    if RANK == 0:
        with LANE.held("rank 0", "the main thread", 1):
            thread = threading.Thread(target=child.abort, args=["enough"])
            thread.start()
            while not child._plane.health.closed:
                time.sleep(0.001)
            assert total(other) == numbers(list(RANKS))
        thread.join(10)
    else:
        with pytest.raises(PeerLostError, match="enough"):
            differ(child, child.barrier, child.barrier)
        child.close()
        assert total(other) == numbers(list(RANKS))
    assert other.is_healthy() and total(comm) == numbers(list(RANKS))
    other.close()


@needs_peer
def test_close_inside_of_a_submission(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler that closes a child before its operation is recorded: that one is done, or ends by the close."""
    # The newest has the watcher that stays to the end.
    child, newest = comm.dup(), comm.dup()
    plane: Any = child.backend
    write = plane._write

    def interrupted(*submission: Any) -> None:
        child.close()
        write(*submission)

    monkeypatch.setattr(plane, "_write", interrupted)
    WORLD.Barrier()
    # Where every rank has come, it is done all the same; one that is told before it comes is not interrupted.
    with contextlib.suppress(CommunicatorClosedError, PeerLostError):
        child.barrier()
    child.close()
    assert total(newest) == numbers(list(RANKS))
    newest.close()


def test_two_threads_take_turns(comm: Communicator) -> None:
    """Two threads with a communicator each use the one lane; in one order on every rank, all is well."""
    other, turns = comm.dup(), [threading.Semaphore(1), threading.Semaphore(0)]
    sums: list[float] = []

    def work(number: int, one: Communicator) -> None:
        for _ in range(5):
            turns[number].acquire()
            sums.append(total(one))
            turns[1 - number].release()

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate((comm, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sums == [numbers(list(RANKS))] * 10 and comm.sequence == other.sequence == 5
    assert comm.is_healthy() and other.is_healthy()
    other.close()


@needs_peer
@pytest.mark.parametrize("more", [0, 1])
def test_two_communicators_in_different_orders(comm: Communicator, more: int) -> None:
    """Ranks that use two communicators in different orders raise within 2 s, and each is told what each did in both."""
    other = comm.dup()
    first, second = (comm, other) if RANK % 2 else (other, comm)
    for _ in range(3):
        comm.barrier()
        other.barrier()
    began = time.monotonic()
    with pytest.raises(CollectiveMismatchError) as caught:
        part_ways(first, second, more)
    assert time.monotonic() - began < 2
    text = str(caught.value)
    assert "ranks of dup 1 use it and init" in text and "in different orders" in text
    for name in ("dup 1", "init"):
        assert re.search(rf"barrier #4 \(uint8 x 0\) at ranks/test_splits.py:\d+ of {name}", text), text
    for one in (comm, other):
        with pytest.raises(CollectiveMismatchError, match="in different orders"):
            one.check_async_error()
        one.attempt_reconnect()
        assert total(one) == numbers(list(RANKS))
    other.close()


@pytest.mark.mpi(min_size=3)
def test_different_orders_that_a_peer_tells(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is told over MPI of one communicator, before its watcher is heard, finds both broken at once."""
    other = comm.dup()
    first, second = (comm, other) if RANK % 2 else (other, comm)
    if RANK:
        for one in (comm, other):
            hear_late(one, first, monkeypatch)
    comm.barrier()
    other.barrier()
    with pytest.raises(CollectiveMismatchError, match="in different orders") as caught:
        part_ways(first, second, 0)
    if RANK == 0:
        # It tells nobody of the second one before they have looked.
        WORLD.Barrier()
    for one in (comm, other):
        with pytest.raises(CollectiveMismatchError, match="in different orders") as again:
            one.check_async_error()
        if one is first:
            # The other one, which breaks by it, does not replace what this one knows.
            assert (str(again.value), again.value.records) == (str(caught.value), caught.value.records)
    if RANK:
        WORLD.Barrier()
    for one in (comm, other):
        one.attempt_reconnect()
        assert total(one) == numbers(list(RANKS))
    other.close()


@needs_peer
def test_who_told_of_different_orders_has_another_number_elsewhere(comm: Communicator) -> None:
    """What a rank told of one communicator does not name a rank of the other one, whose numbers are others."""
    other = comm.split(0, key=-RANK)
    assert other is not None
    plane: Any = comm.backend
    both: Any = other.backend
    facts = {"other": both._sentinel.key, "other_epoch": 0, "by": 1, "here": False}
    notice = {**Verdict("CollectiveMismatchError", (), "in different orders").notice(), **facts}
    if RANK == 0:
        plane._sentinel._hear({"kind": "notice", "notice": notice, "epoch": 0})
        with pytest.raises(CollectiveMismatchError, match="told by rank 1: in different orders"):
            comm.check_async_error()
        with pytest.raises(CollectiveMismatchError, match=r" on \S+: in different orders"):
            other.check_async_error()
    WORLD.Barrier()
    other.close()


def hear_late(comm: Communicator, first: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep back what a watcher says until a moment after `first` broke here, or a second, as a busy machine does."""
    plane: Any = comm.backend
    sentinel, hear = plane._sentinel, plane._sentinel._hear

    def late(message: dict[str, Any]) -> None:
        end = time.monotonic() + 1
        while first._plane.health.cause is None and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.1)
        hear(message)

    monkeypatch.setattr(sentinel, "_hear", late)


def part_ways(first: Communicator, second: Communicator, more: int) -> None:
    """Use one communicator before the other, and wait for what comes of it."""
    for _ in range(1 + more):
        first.barrier()
    second.barrier()
    first.wait_for_async_error(5)


@pytest.mark.filterwarnings("ignore:.*dropped without close:ResourceWarning")
def test_twenty_rounds_leave_nothing(comm: Communicator) -> None:
    """Splits and dups, closed or dropped, leave no descriptor and no thread."""

    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def turn(number: int) -> None:
        made = comm.split(RANK % 2 if number % 2 else None if RANK else 0) if number % 3 else comm.dup()
        if made is not None:
            made.barrier()
            if number % 5:
                made.close()

    for number in range(6):
        turn(number)
    before = count()
    for number in range(6, 26):
        turn(number)

    def more() -> bool:
        return any(now > then for now, then in zip(count(), before, strict=True))

    end = time.monotonic() + 5
    while more() and time.monotonic() < end:
        # A thread that was joined is listed until the kernel is done with it; there is no event for that.
        time.sleep(0.001)
    assert not more(), (count(), before)
