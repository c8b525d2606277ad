"""What peers are told of a failure is what they raise; no MPI."""

from __future__ import annotations

import pytest

from butter_mpi.errors import CollectiveMismatchError, CollectiveTimeoutError, CommunicatorBrokenError, PeerLostError
from butter_mpi.planes.waiting import error_from, notice_of


@pytest.mark.parametrize(
    "error",
    [
        CollectiveMismatchError(
            "differs", sequence=4, operation="barrier", phase="collective", records={0: "a", 3: "b"}
        ),
        CollectiveTimeoutError("late", lost_ranks=(2,), sequence=9, operation="all_reduce", elapsed=10.5),
        PeerLostError("gone", lost_ranks=(1, 2), phase="exit"),
        CommunicatorBrokenError("broke"),
    ],
)
def test_told_error_has_the_facts(error: CommunicatorBrokenError) -> None:
    """A peer raises the same class with the same facts, and says who told it."""
    told = error_from("rank 0/4", 3, notice_of(error))
    assert type(told) is type(error) and str(told) == f"rank 0/4: told by rank 3: {error}"
    assert {name: getattr(told, name) for name in error.FACTS} == {name: getattr(error, name) for name in error.FACTS}


def test_rank_is_named_once() -> None:
    """A rank that tells of itself, and one that is told of itself, stand in the text once."""
    notice = notice_of(PeerLostError("rank 3/4 on n02: interrupted by KeyboardInterrupt"))
    assert str(error_from("rank 0/4 on n01", 3, notice)) == (
        "rank 0/4 on n01: told by rank 3/4 on n02: interrupted by KeyboardInterrupt"
    )
    seen = {**notice_of(PeerLostError("rank 3/4 on n02 (process 7) has been stopped")), "here": True}
    assert str(error_from("rank 3/4 on n02", -1, seen)) == "rank 3/4 on n02 (process 7) has been stopped"
