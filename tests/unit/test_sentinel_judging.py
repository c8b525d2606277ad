"""Who differs and who is late, judged from real recorders; no MPI, no process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from butter_mpi.collectives import Operation, describe, signature
from butter_mpi.enums import DType, ReduceOp
from butter_mpi.recorder import COLLECTIVES, PAIRS, Reader, Recorder
from butter_mpi.sentinel.judging import (
    FIRST_WARNING,
    Late,
    Pairs,
    Waiting,
    first_difference,
    left_out_exchange,
    mismatch,
    said_here,
)

BOUND = 60.0

BARRIER = Operation("barrier", 0, DType.UINT8, site="app/train.py:1")
SUM = Operation("all_reduce", 8, DType.FLOAT32, op=ReduceOp.SUM, site="app/train.py:2")
LONGER = Operation("all_reduce", 9, DType.FLOAT32, op=ReduceOp.SUM, site="app/train.py:3")
COMMAND = Operation("broadcast", 4, DType.UINT8, root=0, waits=True, waits_for_ever=True, site="app/serve.py:4")
POOL = [
    BARRIER,
    SUM,
    LONGER,
    Operation("all_gather", 8, DType.FLOAT32),
    Operation("broadcast", 8, DType.FLOAT32, root=1),
]


class Job:
    """Ranks without processes: a recorder and a reader each."""

    def __init__(self, size: int) -> None:
        self.recorders = [Recorder(BOUND) for _ in range(size)]
        self.readers = {rank: Reader(recorder.fd) for rank, recorder in enumerate(self.recorders)}
        self.numbers = [0] * size

    def submit(self, rank: int, *operations: Operation) -> None:
        for operation in operations:
            self.numbers[rank] += 1
            self.recorders[rank].write(operation, self.numbers[rank])

    def exchange(self, *ranks: int) -> None:
        for rank in ranks:
            self.recorders[rank].exchange("all_gather_json", self.numbers[rank], f"app/rank{rank}.py:9")


@contextlib.contextmanager
def job(size: int) -> Iterator[Job]:
    """Ranks, whose recorders are given back."""
    one = Job(size)
    try:
        yield one
    finally:
        for recorder in one.recorders:
            recorder.close()


def searched(histories: Sequence[Sequence[Operation]]) -> tuple[int, list[Operation]] | None:
    """The first number at which not all submitted the same, and what each did, by looking at every one."""
    for number, submitted in enumerate(zip(*histories, strict=False), 1):
        if len({(one.kind, one.count, one.dtype, one.op, one.root) for one in submitted}) > 1:
            return number, list(submitted)
    return None


_MANY = st.lists(st.sampled_from(POOL), max_size=40)


@settings(deadline=None)
@given(_MANY, st.lists(st.tuples(st.integers(0, 40), _MANY), min_size=2, max_size=4))
def test_first_difference_is_what_a_search_of_all_finds(
    common: list[Operation], own: list[tuple[int, list[Operation]]]
) -> None:
    """The halving search finds the number and the records that looking at every record finds."""
    histories = [common[:kept] + rest for kept, rest in own]
    with job(len(own)) as ranks:
        for rank, history in enumerate(histories):
            ranks.submit(rank, *history)
        found, expected = first_difference(ranks.readers), searched(histories)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        number, submitted = expected
        assert {rank: entry.text() for rank, entry in found.items()} == {
            rank: describe(signature(operation, number)) for rank, operation in enumerate(submitted)
        }


def test_difference_of_long_ago() -> None:
    """A difference is found as long as the rings hold it, however much came after."""
    with job(2) as ranks:
        for rank, one in enumerate((SUM, LONGER)):
            ranks.submit(rank, *[BARRIER] * 700, one, *[BARRIER] * (COLLECTIVES // 2))
        found = first_difference(ranks.readers)
    assert found is not None and {entry.number for entry in found.values()} == {701}


def test_difference_that_is_overwritten_is_still_one() -> None:
    """A difference that the rings have lost is still told, and no equal records are shown as different ones."""
    with job(2) as ranks:
        for rank, one in enumerate((SUM, LONGER)):
            ranks.submit(rank, one, *[BARRIER] * (COLLECTIVES + 10))
        found = first_difference(ranks.readers)
        assert found is not None
        text = mismatch(found).text
    assert len(text.splitlines()) != 2, text


def test_no_difference_where_one_is_behind_or_has_not_begun() -> None:
    """A rank that is behind, or has submitted nothing, differs in nothing."""
    with job(3) as ranks:
        for rank, count in enumerate((0, 3, 9)):
            ranks.submit(rank, *[SUM] * count)
        assert first_difference(ranks.readers) is None
        ranks.submit(0, SUM)
        assert first_difference(ranks.readers) is None


def test_ranks_that_went_on_after_a_reconnect() -> None:
    """What differed before the number that all agreed on counts no more; what differs after it does."""
    with job(2) as ranks:
        ranks.submit(0, SUM)
        ranks.submit(1, LONGER, BARRIER, BARRIER)
        for rank in range(2):
            ranks.recorders[rank].begin_at(3)
            ranks.readers[rank].floor = ranks.numbers[rank] = 3
        assert first_difference(ranks.readers) is None
        ranks.submit(0, BARRIER)
        assert first_difference(ranks.readers) is None
        ranks.submit(1, BARRIER)
        assert first_difference(ranks.readers) is None
        ranks.submit(0, SUM, BARRIER)
        ranks.submit(1, LONGER, BARRIER)
        found = first_difference(ranks.readers)
    assert found is not None and {entry.number for entry in found.values()} == {5}


def test_verdict_on_a_mismatch() -> None:
    """The verdict names the number, groups the ranks that agree, and keeps every record; it goes through JSON."""
    with job(4) as ranks:
        for rank in range(4):
            ranks.submit(rank, BARRIER, LONGER if rank == 2 else SUM)
        found = first_difference(ranks.readers)
        assert found is not None
        verdict = mismatch(found)
    assert (verdict.error, verdict.n, verdict.operation, verdict.lost) == (
        "CollectiveMismatchError",
        2,
        "all_reduce",
        (),
    )
    lines = verdict.text.splitlines()
    assert lines[1:] == [
        "  ranks 0-1, 3: all_reduce #2 (float32 x 8, sum) at app/train.py:2",
        "  rank 2: all_reduce #2 (float32 x 9, sum) at app/train.py:3",
    ]
    notice = json.loads(json.dumps(verdict.notice()))
    assert (
        notice["records"]["2"] == "all_reduce #2 (float32 x 9, sum) at app/train.py:3" and len(notice["records"]) == 4
    )


# -- exchanges over the control plane --------------------------------------------------------------------------------


def test_exchange_that_a_rank_left_out() -> None:
    """A collective in place of an exchange is a mismatch: both are named, with who did what."""
    with job(4) as ranks:
        for rank in range(4):
            ranks.submit(rank, SUM, SUM)
        ranks.exchange(0, 1, 2, 3)
        ranks.submit(3, BARRIER, SUM)
        ranks.exchange(0, 2)
        # Rank 1 may still come; rank 3 has gone on without it.
        found = left_out_exchange(ranks.readers)
        assert found is not None and first_difference(ranks.readers) is None
        verdict = mismatch(found)
    assert (verdict.error, verdict.n, verdict.operation) == ("CollectiveMismatchError", 3, "barrier")
    assert verdict.records == {
        0: "all_gather_json #2 (json x 0) at app/rank0.py:9",
        2: "all_gather_json #2 (json x 0) at app/rank2.py:9",
        3: "barrier #3 (uint8 x 0) at app/train.py:1",
    }


def test_ranks_between_exchanges_differ_in_nothing() -> None:
    """Whoever has not come to an exchange yet, or went on after it, is no fault, however far apart they are."""
    with job(3) as ranks:
        for _ in range(3):
            for rank in range(3):
                ranks.submit(rank, SUM)
                ranks.exchange(rank)
                assert left_out_exchange(ranks.readers) is None
            # The first ones go on while the last has not seen yet that all have come.
            for rank in range(2):
                ranks.submit(rank, *[SUM] * (COLLECTIVES + 5))
                assert left_out_exchange(ranks.readers) is None
            ranks.submit(2, *[SUM] * (COLLECTIVES + 5))


def test_exchanges_before_a_reconnect_count_no_more() -> None:
    """Ranks that failed with different counts of exchanges, and go on one after another, differ in nothing."""
    with job(2) as ranks:
        ranks.exchange(0, 1)
        for rank in range(2):
            ranks.submit(rank, SUM)
        ranks.exchange(0)
        ranks.submit(1, SUM)
        assert left_out_exchange(ranks.readers) is not None
        for rank in range(2):
            ranks.recorders[rank].begin_at(2)
            ranks.readers[rank].floor = ranks.numbers[rank] = 2
            ranks.submit(rank, SUM)
            assert left_out_exchange(ranks.readers) is None
        ranks.exchange(1)
        assert left_out_exchange(ranks.readers) is None
        ranks.submit(0, SUM)
        assert left_out_exchange(ranks.readers) is not None


# -- late ------------------------------------------------------------------------------------------------------------


def looks(late: Late, readers: Mapping[int, Reader], seconds: float, step: float = 0.5) -> list[Waiting]:
    """What is seen in `seconds` of waiting."""
    return [one for _ in range(round(seconds / step)) for one in late.look(readers, step)]


def test_late_rank_is_warned_of_at_a_falling_rate_and_over_at_the_bound() -> None:
    """Warnings come at 5, 10, 20, 40 s; the wait is over at the operation's deadline and not before."""
    with job(3) as ranks:
        ranks.submit(0, BARRIER, SUM)
        ranks.submit(1, BARRIER)
        ranks.submit(2, BARRIER, SUM)
        late = Late()
        assert not late.look(ranks.readers, 100)  # seen for the first time: it has not waited yet
        seen = looks(late, ranks.readers, BOUND + 5)
    assert [one.seconds for one in seen if one.warn] == [FIRST_WARNING, 10, 20, 40]
    assert next(one.seconds for one in seen if one.over) == BOUND
    assert {one.absent for one in seen} == {(1,)}
    assert {one.entry.text() for one in seen} == {"all_reduce #2 (float32 x 8, sum) at app/train.py:2"}


def test_patient_operation_is_never_late() -> None:
    """Who may wait for ever is neither warned of nor over."""
    with job(2) as ranks:
        ranks.submit(0, BARRIER)
        ranks.submit(1, BARRIER, COMMAND)
        late = Late()
        late.look(ranks.readers, 0.1)
        seen = looks(late, ranks.readers, 1000, 50)
    assert seen and not [one for one in seen if one.warn or one.over]


@pytest.mark.parametrize("comes", ["the late one", "all"])
def test_wait_begins_anew_when_the_last_one_moves(comes: str) -> None:
    """A late rank that comes has its waiting forgotten, also where it is behind again at once."""
    with job(2) as ranks:
        ranks.submit(0, SUM, SUM, SUM)
        late = Late()
        late.look(ranks.readers, 0)
        assert [one.warn for one in looks(late, ranks.readers, 12)].count(True) == 2
        ranks.submit(1, *[SUM] * (3 if comes == "all" else 1))
        assert not late.look(ranks.readers, 1)
        ranks.submit(0, SUM)
        late.look(ranks.readers, 0)
        seen = looks(late, ranks.readers, FIRST_WARNING)
        assert [one.seconds for one in seen if one.warn] == [FIRST_WARNING]


def test_time_that_does_not_count() -> None:
    """Where the caller says that no time passed, nobody is late."""
    with job(2) as ranks:
        ranks.submit(0, SUM)
        late = Late()
        late.look(ranks.readers, 0)
        assert not [one for _ in range(1000) for one in late.look(ranks.readers, 0) if one.warn or one.over]


def test_rank_that_is_further_behind_than_a_ring_is_late_all_the_same() -> None:
    """Others that are more than a ring ahead do not make a late rank unseen."""
    with job(2) as ranks:
        ranks.submit(0, SUM)
        ranks.submit(1, *[SUM] * (COLLECTIVES + 100))
        late = Late()
        late.look(ranks.readers, 0)
        seen = looks(late, ranks.readers, BOUND + 1)
    assert [one for one in seen if one.over]


def test_idle_time_before_a_command_is_nobodys_delay() -> None:
    """The wait for a command that may take for ever does not count as a wait for the ranks that come after it."""
    with job(3) as ranks:
        ranks.submit(1, COMMAND)
        late = Late()
        late.look(ranks.readers, 0)
        assert not [one for one in looks(late, ranks.readers, 10 * BOUND, 1) if one.warn or one.over]
        ranks.submit(0, replace(COMMAND, waits_for_ever=False))
        seen = looks(late, ranks.readers, FIRST_WARNING - 1)
    assert seen and seen[-1].seconds == FIRST_WARNING - 1 and not [one for one in seen if one.warn or one.over]


def exchange(ranks: Job, first: int, count: int) -> None:
    """Two ranks send to one another and receive, as often as `count` says."""
    for number in range(first, first + count):
        for rank in range(2):
            for kind in ("send", "recv"):
                one = Operation(kind, 8, DType.FLOAT32, peer=1 - rank, site="app/train.py:5")
                ranks.recorders[rank].write(one, number)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_pairs_that_the_ring_has_lost_are_nobodys_delay(order: tuple[int, int]) -> None:
    """Bursts that are longer than the ring, seen in parts, leave no send or receive that waits."""
    with job(2) as ranks:
        pairs, seen = Pairs(range(2)), 0
        for turn in range(5):
            exchange(ranks, 1 + turn * 2 * PAIRS, 2 * PAIRS)
            assert pairs.read({rank: ranks.readers[rank] for rank in order[: 1 + turn % 2]}) is None
            seen += len(pairs.look(1))
        assert pairs.read(ranks.readers) is None
        assert seen and pairs.look(10 * BOUND) == []
        ranks.recorders[0].write(Operation("send", 8, DType.FLOAT32, peer=1, site="app/train.py:6"), 10 * PAIRS + 1)
        assert pairs.read(ranks.readers) is None
        (waiting,) = pairs.look(FIRST_WARNING)
    assert waiting.absent == (1,) and waiting.warn and waiting.entry.site == "app/train.py:6"


def test_sends_to_others_that_the_ring_has_lost_are_nobodys_delay() -> None:
    """One send to a rank and a burst to another: whether the lost one was there is not known; nobody waits for it."""
    with job(3) as ranks:
        pairs = Pairs(range(3))
        ranks.recorders[0].write(Operation("send", 8, DType.FLOAT32, peer=1), 1)
        for number in range(1, PAIRS + 1):
            ranks.recorders[0].write(Operation("send", 8, DType.FLOAT32, peer=2), number)
            ranks.recorders[2].write(Operation("recv", 8, DType.FLOAT32, peer=0), number)
        ranks.recorders[1].write(Operation("recv", 8, DType.FLOAT32, peer=0), 1)
        assert pairs.read(ranks.readers) is None and pairs.look(10 * BOUND) == []
        # What is seen from now on counts again.
        ranks.recorders[0].write(Operation("send", 8, DType.FLOAT32, peer=1), 2)
        ranks.recorders[1].write(Operation("recv", 8, DType.FLOAT32, peer=0), 2)
        ranks.recorders[1].write(Operation("recv", 8, DType.FLOAT32, peer=0), 3)
        assert pairs.read(ranks.readers) is None
        (waiting,) = pairs.look(FIRST_WARNING)
    assert waiting.absent == (0,) and waiting.entry.number == 3


def test_pairs_with_ranks_of_other_nodes_are_not_judged() -> None:
    """Their recorders are read by another watcher: nobody is late there, and no rank is asked for that is not here."""
    with job(2) as ranks:
        pairs = Pairs(range(2))
        ranks.recorders[0].write(Operation("send", 8, DType.FLOAT32, peer=7), 1)
        assert pairs.read(ranks.readers) is None and pairs.look(10 * BOUND) == []


def test_pair_that_does_not_fit_is_told() -> None:
    """A receive of another count than the send is a mismatch of these two, whichever comes first."""
    with job(3) as ranks:
        pairs = Pairs(range(3))
        ranks.recorders[2].write(Operation("recv", 8, DType.FLOAT32, peer=0), 1)
        ranks.recorders[0].write(Operation("send", 9, DType.FLOAT32, peer=2), 1)
        found = pairs.read(ranks.readers)
    assert found is not None and set(found) == {0, 2} and "send and recv #1" in mismatch(found).text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rank 1/2 on n01 was killed", "the watcher: rank 1/2 on n01 was killed"),
        ("the watcher of host n1 cannot reach that of host n0", "the watcher of host n1 cannot reach that of host n0"),
    ],
)
def test_watcher_names_itself_once(text: str, said: str) -> None:
    """What it says begins with its name, also where the text has it already."""
    assert said_here(text) == said
