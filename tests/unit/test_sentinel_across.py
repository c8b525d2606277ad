"""What ranks of several nodes submitted, compared: by recorders of this process, one rank a node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from butter_mpi.collectives import Operation
from butter_mpi.enums import DType
from butter_mpi.recorder import COLLECTIVES, Reader, Recorder
from butter_mpi.sentinel.across import Across, Standing
from butter_mpi.sentinel.judging import Verdict

BOUND = 10.0


class Job:
    """Some nodes; rank n is the one of node n, and what is said arrives before the next look."""

    def __init__(self, count: int) -> None:
        self.recorders = [Recorder(BOUND) for _ in range(count)]
        self.readers = [Reader(one.fd) for one in self.recorders]
        self.nodes = [Across(number, range(count), self._sayer(number)) for number in range(count)]
        self.closed: set[int] = set()
        self.silent: set[int] = set()
        self.leader = 0
        self.epoch = 0
        self._under_way: list[tuple[int, int, str, dict[str, Any]]] = []

    def _sayer(self, source: int) -> Any:
        def say(kind: str, to_hubs: bool, **fields: Any) -> None:
            for target in range(2 if to_hubs else len(self.nodes)):
                if target != source and source not in self.silent:
                    self._under_way.append((source, target, kind, fields))

        return say

    def submit(self, rank: int, number: int, count: int = 3, kind: str = "all_reduce") -> None:
        """Let a rank submit a collective."""
        self.recorders[rank].write(Operation(kind, count, DType.FLOAT32, site=f"app/rank{rank}.py:5"), number)

    def look(self, passed: float = 0.4) -> tuple[list[Verdict], list[str]]:
        """Let all look, once; returns what they find wrong, and what they warn of."""
        found, warnings = [], []
        for number, node in enumerate(self.nodes):
            readers = {number: self.readers[number]}

            def standing(last: list[int], number: int = number) -> Standing:
                return Standing(0, tuple(last), f"rank {number} at home", number in self.closed)

            verdict = node.look(readers, self.epoch, standing, number == self.leader)
            late, warning = node.wait(readers, passed)
            found += [one for one in (verdict, late) if one]
            warnings += [warning] if warning else []
        arrived, self._under_way = self._under_way, []
        for source, target, kind, fields in arrived:
            self.nodes[target].hear(source, kind, fields)
        return found, warnings

    def verdict(self, within: int = 12) -> Verdict:
        """What is found first."""
        for _ in range(within):
            if found := self.look()[0]:
                return found[0]
        raise AssertionError("nothing was found")

    def quiet(self, looks: int = 12) -> None:
        """See that nothing is found, nor warned of."""
        for _ in range(looks):
            assert self.look() == ([], [])


@pytest.fixture
def job() -> Iterator[Job]:
    """Three nodes whose ranks have submitted the same."""
    one = Job(3)
    for rank in range(3):
        for number in range(1, 6):
            one.submit(rank, number)
    one.quiet()
    yield one
    for recorder in one.recorders:
        recorder.close()


def test_same_operations_are_no_fault(job: Job) -> None:
    """Also where ranks are at different numbers, for less than a warning takes, and where records are overwritten."""
    for number in range(6, 2 * COLLECTIVES):
        for rank in range(3):
            job.submit(rank, number)
        if number % 500 == 0:
            assert job.look() == ([], [])
    job.submit(2, 2 * COLLECTIVES)
    job.quiet(10)
    for rank in (0, 1):
        job.submit(rank, 2 * COLLECTIVES)
    job.quiet()


@pytest.mark.parametrize("leader", [0, 1])
@pytest.mark.parametrize("more", [0, 1, 200, 3500])
def test_first_difference_is_told_with_what_each_did(job: Job, leader: int, more: int) -> None:
    """Whichever node it is, and however many operations followed on it, within a few looks."""
    job.leader = leader
    job.quiet()
    job.submit(0, 6)
    job.submit(1, 6, count=4)
    job.submit(2, 6)
    for number in range(7, 7 + more):
        for rank in range(3):
            job.submit(rank, number)
    verdict = job.verdict(within=8)
    assert (verdict.error, verdict.n, verdict.operation) == ("CollectiveMismatchError", 6, "all_reduce")
    assert verdict.records == {
        rank: f"all_reduce #6 (float32 x {4 if rank == 1 else 3}) at app/rank{rank}.py:5" for rank in range(3)
    }


@pytest.mark.parametrize(("floor", "same"), [(1_000_000, 0), (0, 3500)])
def test_difference_far_from_the_last_agreement_is_told_soon(job: Job, floor: int, same: int) -> None:
    """By ranks that went on from a large number after a failure, and where many operations came between two looks."""
    job.epoch = 1
    first = max(floor, 5) + 1
    for rank in range(3):
        job.recorders[rank].begin_at(first - 1)
        job.readers[rank].floor = floor
        for number in range(first, first + same):
            job.submit(rank, number)
        job.submit(rank, first + same, count=3 + rank)
    assert job.verdict(within=8).n == first + same


def test_difference_that_is_overwritten_is_told_as_such(job: Job) -> None:
    """Who differed long ago is found by the hash alone."""
    for rank in range(3):
        job.submit(rank, 6, count=3 + rank)
        for number in range(7, 7 + COLLECTIVES + 100):
            job.submit(rank, number)
    verdict = job.verdict()
    assert verdict.error == "CollectiveMismatchError" and "the records of that are overwritten" in verdict.text


def test_rank_that_does_not_come_is_warned_of_and_late_at_the_deadline(job: Job) -> None:
    """By each node that waits; never by the one that is waited for."""
    for rank in (0, 2):
        job.submit(rank, 6)
    warned: list[float] = []
    for turn in range(40):
        found, warnings = job.look()
        warned += [(turn + 1) * 0.4 for _ in warnings]
        assert all("all_reduce #6 (float32 x 3) at app/rank" in one and "for rank 1 at home" in one for one in warnings)
        if found:
            break
    (verdict, _) = found
    assert (verdict.error, verdict.lost, verdict.n) == ("CollectiveTimeoutError", (1,), 6), verdict
    assert "no answer within 10." in verdict.text and "(collective deadline: 10 s) from rank 1 at home" in verdict.text
    assert len(warned) in (2, 4) and 5 <= warned[0] <= 7 and 10 <= (turn + 1) * 0.4 <= 12


def test_rank_that_moves_on_is_not_late(job: Job) -> None:
    """However long it stays behind, as long as it comes a step further now and then."""
    for number in range(6, 40):
        job.submit(0, number)
        job.submit(2, number)
    for number in range(6, 20):
        assert not job.look(passed=3)[0]
        job.submit(1, number)
        assert not job.look(passed=3)[0]


def test_rank_that_closed_is_told_at_once(job: Job) -> None:
    """Where others wait for what it never submitted."""
    job.closed.add(1)
    job.quiet()
    job.submit(0, 6)
    verdict = job.verdict(within=8)
    assert (verdict.error, verdict.lost) == (
        "PeerLostError",
        (1,),
    ) and "rank 1 at home. Every rank must" in verdict.text


def test_node_that_is_not_heard_accuses_nobody(job: Job) -> None:
    """What is known of it may be old: the links judge its silence."""
    job.silent.add(1)
    for rank in range(3):
        job.submit(rank, 6)
    job.submit(0, 7)
    for _ in range(40):
        assert job.look() == ([], [])


def test_new_epoch_begins_anew(job: Job) -> None:
    """After a reconnect, what came before counts no more; what is said of it late is not taken."""
    job.submit(1, 6)
    job.look()
    job.epoch = 1
    for rank in range(3):
        job.recorders[rank].begin_at(10)
        job.readers[rank].floor = 10
        job.submit(rank, 11)
    job.quiet(20)
    job.submit(0, 12, count=9)
    for rank in (1, 2):
        job.submit(rank, 12)
    assert job.verdict().n == 12


@pytest.mark.parametrize(
    "entries", [[1], [[1, 2]], [["x"] * 8], [[7, 0.5, 1, 255, 4, "app.py:1", 10.0, 0]], [None] * 999]
)
def test_odd_records_of_another_watcher_are_no_crash(job: Job, entries: list[Any]) -> None:
    """They come from one that knows the secret, of another version maybe."""
    job.nodes[0].hear(1, "shown", {"epoch": 0, "first": 6, "last": 6, "rank": 1, "entries": entries})
    job.nodes[0].hear(99, "place", {"epoch": 0})
    job.submit(0, 6, count=9)
    for rank in (1, 2):
        job.submit(rank, 6)
    assert job.verdict().n == 6
