"""Sends and receives between ranks of several nodes, compared: by recorders of this process, one rank a node."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from butter_mpi.collectives import Operation
from butter_mpi.enums import DType
from butter_mpi.recorder import Reader, Recorder
from butter_mpi.sentinel.across import Standing
from butter_mpi.sentinel.facing import Facing
from butter_mpi.sentinel.judging import Pairs, Verdict

BOUND = 10.0
LOOK = 0.4


class Job:
    """Some nodes; rank n is the one of node n, and what is told arrives before the next look."""

    def __init__(self, count: int) -> None:
        self.recorders = [Recorder(BOUND) for _ in range(count)]
        self.readers = [Reader(one.fd) for one in self.recorders]
        self.pairs = [Pairs([number]) for number in range(count)]
        self.nodes = [Facing(number, self._node_of, self._carrier(number)) for number in range(count)]
        self.numbers: dict[tuple[int, int, str], int] = {}
        self.closed: set[int] = set()
        self.deaf: set[int] = set()
        self.told = 0
        self._under_way: list[tuple[int, dict[str, Any]]] = []

    def _node_of(self, rank: int) -> int | None:
        return rank if 0 <= rank < len(self.nodes) else None

    def _carrier(self, source: int) -> Any:
        def carry(node: int, attempt: int, **fields: Any) -> None:
            assert fields["origin"] == source and fields["to"] == node
            self.told += 1
            if not {source, node} & self.deaf:
                self._under_way.append((node, json.loads(json.dumps(fields))))

        return carry

    def submit(self, kind: str, rank: int, peer: int, count: int = 3, times: int = 1) -> None:
        """Let a rank submit sends to a peer, or receives."""
        for _ in range(times):
            number = self.numbers[rank, peer, kind] = self.numbers.get((rank, peer, kind), 0) + 1
            self.recorders[rank].write(
                Operation(kind, count, DType.FLOAT32, peer=peer, site=f"app/rank{rank}.py:5"), number
            )

    def look(self) -> tuple[list[Verdict], list[tuple[int, str]]]:
        """Let all look, once; returns what they find wrong, and who is warned of what."""
        found, warnings = [], []
        for number, node in enumerate(self.nodes):
            assert self.pairs[number].read({number: self.readers[number]}) is None

            def standing(last: Sequence[int]) -> Standing:
                return Standing(0, tuple(last), f"rank {last[0]} at home", last[0] in self.closed)

            verdict = node.look(self.pairs[number], 0, standing)
            found += [verdict] if verdict else []
            for rank, late, warning in node.wait(self.pairs[number], LOOK):
                assert rank == number
                found += [late] if late else []
                warnings += [(rank, warning)] if warning else []
        arrived, self._under_way = self._under_way, []
        for target, fields in arrived:
            self.nodes[target].hear(fields["origin"], fields["epoch"], fields["rows"])
        return found, warnings

    def verdict(self, within: float) -> tuple[Verdict, list[tuple[int, str]]]:
        """What is found first, and the warnings before."""
        warnings: list[tuple[int, str]] = []
        for _ in range(round(within / LOOK)):
            found, more = self.look()
            warnings += more
            if found:
                return found[0], warnings
        raise AssertionError(("nothing was found", warnings))

    def quiet(self, seconds: float = 20.0) -> None:
        """See that nothing is found, nor warned of."""
        for _ in range(round(seconds / LOOK)):
            assert self.look() == ([], [])


@pytest.fixture
def job() -> Iterator[Job]:
    """Three nodes."""
    one = Job(3)
    yield one
    for recorder in one.recorders:
        recorder.close()


@pytest.mark.parametrize("first", ["send", "recv"])
def test_another_count_is_named_with_both_calls(job: Job, first: str) -> None:
    """Whoever came first; and also where one of them has gone on by some."""
    other = "recv" if first == "send" else "send"
    job.submit(first, 0, 2, times=3)
    job.submit(other, 2, 0, times=3)
    job.submit(first, 0, 2, count=4, times=5)
    for _ in range(3):
        assert job.look() == ([], [])
    job.submit(other, 2, 0, count=5)
    found, _ = job.verdict(3)
    assert found.error == "CollectiveMismatchError" and found.n == 4 and set(found.records) == {0, 2}
    assert f"{first} #4 (float32 x 4" in found.records[0] and f"{other} #4 (float32 x 5" in found.records[2], found


def test_peer_that_does_not_come_is_warned_of_then_late(job: Job) -> None:
    """By the clock of the rank that waits, from the first that has no answer."""
    job.submit("send", 0, 1, times=2)
    job.submit("recv", 1, 0)
    found, warnings = job.verdict(BOUND + 4)
    assert found.error == "CollectiveTimeoutError" and found.lost == (1,) and found.n == 2
    assert "send #2 (float32 x 3" in found.text and "from rank 1 at home" in found.text, found.text
    assert [rank for rank, _ in warnings] == [0] and "has waited 5 s for rank 1 at home" in warnings[0][1], warnings


def test_peer_that_has_closed_is_lost(job: Job) -> None:
    """It says so as soon as it is asked."""
    job.closed.add(2)
    job.submit("recv", 1, 2)
    found, _ = job.verdict(4)
    assert found.error == "PeerLostError" and found.lost == (2,) and "Every rank must submit the same" in found.text


def test_pairs_that_fit_cost_two_messages_and_then_nothing(job: Job) -> None:
    """One shows it once it stands still, the other one answers."""
    job.submit("send", 0, 1, times=100)
    job.submit("recv", 1, 0, times=100)
    job.quiet(4)
    told = job.told
    assert told <= 4
    job.quiet()
    assert job.told == told


def test_pairs_that_move_are_not_shown(job: Job) -> None:
    """A job that runs costs no messages."""
    for _ in range(50):
        job.submit("send", 0, 1)
        job.submit("recv", 1, 0)
        assert job.look() == ([], [])
    assert job.told == 0


def test_peer_that_goes_on_is_not_late(job: Job) -> None:
    """However long a rank stands still that has submitted ahead, its peer takes its own time for each."""
    job.submit("send", 0, 1, times=20)
    for _ in range(19):
        job.submit("recv", 1, 0)
        for _ in range(round((BOUND - 2) / LOOK)):
            assert job.look()[0] == []
    job.submit("recv", 1, 0)
    job.quiet()


def test_node_that_is_not_heard_is_not_late(job: Job) -> None:
    """What became of it others find; once it is heard again, the wait goes on."""
    job.submit("send", 0, 1)
    for _ in range(5):
        job.look()
    job.deaf.add(1)
    for _ in range(100):
        assert job.look()[0] == []
    job.deaf.clear()
    found, _ = job.verdict(BOUND + 3)
    assert found.error == "CollectiveTimeoutError" and found.lost == (1,)


def test_what_a_ring_has_lost_blames_nobody(job: Job) -> None:
    """A rank that submitted more than its recorder holds between two looks may have come to any number elsewhere."""
    job.submit("send", 0, 1)
    job.submit("recv", 1, 0)
    job.submit("recv", 1, 2, times=5000)
    job.submit("send", 2, 1, times=5000)
    job.quiet()


def test_waits_that_may_last_for_ever_are_never_late(job: Job) -> None:
    """As on one node."""
    job.recorders[0].write(Operation("send", 3, DType.FLOAT32, peer=1, site="a.py:5", waits_for_ever=True), 1)
    job.quiet(4 * BOUND)


def test_garbage_is_no_side(job: Job) -> None:
    """Rows of other forms, of ranks that are not that node's, or of another epoch change nothing."""
    rest = [False, "", False, []]
    wrong: list[list[Any]] = [["x"], [[0, 1]], [[0, 1, 0, "x", *rest]], [[2, 1, 0, 7, *rest]], [[0, 2, 0, 7, *rest]]]
    for rows in wrong:
        with contextlib.suppress(TypeError, ValueError):
            job.nodes[1].hear(0, 0, rows)
    job.nodes[1].hear(0, 3, [[0, 1, 0, 7, *rest]])
    job.nodes[1].hear(0, 0, [[0, 1, 0, 7, False, "", False, ["x", [1], [1, 2, 3, 4, 5, 6, 7, 8]]]])
    assert [far.newest for far in job.nodes[1]._far.values()] == [7]
    assert not any(far.entries for far in job.nodes[1]._far.values())
