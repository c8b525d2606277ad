"""Orders of two communicators, from recorders: what differs is found, what ranks do one after another is not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from butter_mpi.collectives import Operation
from butter_mpi.enums import DType
from butter_mpi.recorder import COLLECTIVES, Reader, Recorder
from butter_mpi.sentinel.judging import Verdict
from butter_mpi.sentinel.ordering import Orders

NAMES = {"x": "init"}


class Rank:
    """One rank of both communicators, which writes into recorders; "x" is the older one."""

    def __init__(self, ends: contextlib.ExitStack) -> None:
        self.recorders = {name: Recorder(10) for name in "xy"}
        for one in self.recorders.values():
            ends.callback(one.close)
        self.readers = {name: Reader(one.fd) for name, one in self.recorders.items()}
        self.sequence = dict.fromkeys("xy", 0)

    def submit(self, course: str) -> None:
        """Submit a collective of each communicator that is named."""
        for name in course:
            self.sequence[name] += 1
            operation = Operation("barrier", 0, DType.UINT8, site=f"a.py:{ord(name)}")
            self.recorders[name].write(operation, self.sequence[name])


@contextlib.contextmanager
def ranks(count: int) -> Iterator[list[Rank]]:
    """Some ranks."""
    with contextlib.ExitStack() as ends:
        yield [Rank(ends) for _ in range(count)]


def look(orders: Orders, made: Sequence[Rank]) -> Verdict | None:
    """Look once."""
    newer = {number: rank.readers["y"] for number, rank in enumerate(made)}
    older: Mapping[int, Reader] = {number: rank.readers["x"] for number, rank in enumerate(made)}
    return orders.look(newer, {"x": older}, NAMES)


@pytest.mark.parametrize(
    "courses",
    [
        ("xy", "yx"),
        ("x", "y"),
        ("xyxy", "xyyx"),
        ("xx", "xy"),
        ("xyxxy", "xyxy"),
        ("xy", "", "yx"),
        ("x", "", "y"),
        ("xyxyxyxx", "xyxyxyxyyx"),
        ("xyxyxyxyx", "xyxyxyxyyx"),
    ],
)
def test_other_order_is_found(courses: Sequence[str]) -> None:
    """Wherever the orders part, and however far each rank has come: found, and found again, with what each did."""
    with ranks(len(courses)) as made:
        for rank, course in zip(made, courses, strict=True):
            rank.submit(course)
        orders = Orders("dup 1")
        for _ in range(2):
            found = look(orders, made)
            assert found is not None and found.error == "CollectiveMismatchError" and found.other == "x"
            assert "ranks of dup 1 use it and init in different orders" in found.text
            assert sorted(found.records) == list(range(len(courses)))


def test_verdict_names_what_each_rank_did() -> None:
    """Each rank's two operations are told in its own order, with those that are missing."""
    with ranks(4) as made:
        for rank, course in zip(made, ("xyxy", "xyyx", "xyx", "xy"), strict=True):
            rank.submit(course)
        found = look(Orders("dup 1"), made)
        assert found is not None and found.n == 2
        x, y = "barrier #2 (uint8 x 0) at a.py:120 of init", "barrier #2 (uint8 x 0) at a.py:121 of dup 1"
        assert found.records == {
            0: f"{x}, then {y}",
            1: f"{y}, then {x}",
            2: f"{x}, and not yet collective #2 of dup 1",
            3: "neither collective #2 of dup 1 nor collective #2 of init yet",
        }


@given(st.text("xy", max_size=20), st.lists(st.integers(0, 20), min_size=2, max_size=3))
@settings(max_examples=60, deadline=None)
def test_one_order_is_never_accused(course: str, came: list[int]) -> None:
    """Ranks that have come to different places of one course agree, at each look."""
    with ranks(len(came)) as made:
        orders = Orders("dup 1")
        for until in (0, 1):
            for rank, place in zip(made, came, strict=True):
                rank.submit(course[place:] if until else course[:place])
            assert look(orders, made) is None


def test_parting_long_ago_is_found_as_long_as_it_is_recorded() -> None:
    """What was not looked at in time is found in the rings, unless they have lost it."""
    for later, told in ((COLLECTIVES // 2, True), (COLLECTIVES, False)):
        with ranks(2) as made:
            for rank, course in zip(made, ("xy", "yx"), strict=True):
                rank.submit("xy" * 5 + course + "xy" * later)
            assert (look(Orders("dup 1"), made) is not None) == told


def test_faster_older_one_leaves_nothing_to_accuse() -> None:
    """Where the ring of the older one has lost what came before, nothing is known, and nobody is accused."""
    with ranks(2) as made:
        for rank, course in zip(made, ("xyx", "xxy"), strict=True):
            rank.submit(course + "x" * COLLECTIVES)
        orders = Orders("dup 1")
        assert look(orders, made) is None
        for rank in made:
            rank.submit("xy")
        assert look(orders, made) is None
        for rank, course in zip(made, ("xy", "yx"), strict=True):
            rank.submit(course)
        assert look(orders, made) is not None


def test_nothing_new_costs_nothing() -> None:
    """Where no rank has submitted more of the newer one, the older ones are not read, of which there may be many."""
    with ranks(2) as made:
        for rank in made:
            rank.submit("xyy")
        orders = Orders("dup 1")
        assert look(orders, made) is None
        newer, unread = {number: rank.readers["y"] for number, rank in enumerate(made)}, Mock(spec=Reader, broke=False)
        assert orders.look(newer, {"x": dict.fromkeys(newer, unread)}, NAMES) is None and not unread.mock_calls
        made[0].submit("y")
        made[1].submit("xy")
        assert look(orders, made) is not None


def test_what_broke_or_was_closed_does_not_count() -> None:
    """An older communicator that broke stands still on some ranks before others: that is no other order."""
    with ranks(2) as made:
        for rank, course in zip(made, ("xy", "yx"), strict=True):
            rank.submit(course)
        made[1].recorders["x"].mark_broken()
        assert look(Orders("dup 1"), made) is None


def test_only_ranks_of_one_older_communicator_are_compared() -> None:
    """Ranks of different parts of an older split have no order to keep."""
    with ranks(2) as made:
        for rank, course in zip(made, ("xy", "yx"), strict=True):
            rank.submit(course)
        newer = {number: rank.readers["y"] for number, rank in enumerate(made)}
        older: dict[str, Mapping[int, Reader]] = {str(n): {n: rank.readers["x"]} for n, rank in enumerate(made)}
        assert Orders("dup 1").look(newer, older, {"0": "row 0", "1": "row 1"}) is None


def test_numbers_after_a_reconnect_are_compared_anew() -> None:
    """What came before the ranks agreed on new numbers is not compared; what comes after is."""
    with ranks(2) as made:
        for rank, course in zip(made, ("xy", "yxy"), strict=True):
            rank.submit(course)
            rank.recorders["y"].begin_at(2)
            rank.sequence["y"], rank.readers["y"].floor = 2, 2
        orders = Orders("dup 1")
        assert look(orders, made) is None
        for rank in made:
            rank.submit("xy")
        assert look(orders, made) is None
        for rank, course in zip(made, ("xy", "yx"), strict=True):
            rank.submit(course)
        assert look(orders, made) is not None
