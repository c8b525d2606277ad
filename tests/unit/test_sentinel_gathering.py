"""Who goes on after a failure: a pure decision, from who came, who lives and what each called."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from butter_mpi.sentinel.gathering import RECONNECT, SHRINK, Agreed, Gathering, Refused

LIMIT = 10.0


def name(rank: int) -> str:
    """Return a rank as messages name it."""
    return f"rank {rank}/4"


def came(*ranks: int, what: str = SHRINK) -> Gathering:
    """Return a gathering to which these ranks have come, each with its own numbers."""
    gathering = Gathering()
    for rank in ranks:
        gathering.come(rank, what, 10 * rank, rank, LIMIT)
    return gathering


def test_all_that_live_go_on_from_the_largest_numbers() -> None:
    """The agreement is made once the last of those that live has come, and only once."""
    gathering, lost = came(3, 0), {1: "rank 1 was killed"}
    assert gathering.look({0, 2, 3}, lost, 0.1, name) == []
    gathering.come(2, SHRINK, 99, 1, LIMIT)
    assert gathering.look({0, 2, 3}, lost, 0.1, name) == [Agreed(SHRINK, (0, 2, 3), 99, 3)]
    assert gathering.look({0, 2, 3}, lost, 100, name) == []


def test_a_rank_that_dies_meanwhile_is_not_waited_for() -> None:
    """Who died before it came is left out; so is one that came and died before the last did."""
    assert came(0, 3).look({0, 3}, {1: "killed", 2: "killed"}, 0, name) == [Agreed(SHRINK, (0, 3), 30, 3)]
    gathering = came(0, 2)
    assert gathering.look({0, 2, 3}, {1: "killed"}, 0, name) == []
    assert gathering.look({0, 3}, {1: "killed", 2: "killed"}, 0, name) == []
    gathering.come(3, SHRINK, 1, 1, LIMIT)
    assert gathering.look({0, 3}, {1: "killed", 2: "killed"}, 0, name) == [Agreed(SHRINK, (0, 3), 1, 1)]
    assert came(2).look({2}, dict.fromkeys((0, 1, 3), "killed"), 0, name) == [Agreed(SHRINK, (2,), 20, 2)]


def test_whoever_does_not_come_is_named_at_the_shortest_limit() -> None:
    """The first limit that is over ends the wait of all, and names who is missing, and what that one did instead."""
    gathering = came(0)
    gathering.come(3, SHRINK, 0, 0, 2 * LIMIT)
    gathering.elsewhere(2, RECONNECT)
    lost = {1: "killed"}
    assert gathering.look({0, 2, 3}, lost, LIMIT - 1, name) == []
    (refused,) = gathering.look({0, 2, 3}, lost, 1, name)
    assert isinstance(refused, Refused)
    assert refused == Refused("CollectiveTimeoutError", (0, 3), refused.text, (2,))
    assert "10.0 s from rank 2/4 (it called attempt_reconnect())" in refused.text
    # The next gathering has a time of its own.
    gathering.come(0, SHRINK, 0, 0, LIMIT)
    assert gathering.look({0, 2, 3}, lost, LIMIT - 1, name) == []


def test_different_calls_are_refused_at_once_where_nobody_is_lost() -> None:
    """Nobody waits for who calls something else; each is named with its call, also one that waits elsewhere."""
    gathering = came(0)
    gathering.elsewhere(1, RECONNECT)
    said = "rank 0 called shrink(); rank 1 called attempt_reconnect(). All must call the same"
    assert gathering.look({0, 1, 2}, {}, 0, name) == [Refused("CommunicatorBrokenError", (0, 1), said)]
    # It gave that up.
    gathering = came(0)
    gathering.elsewhere(1, RECONNECT)
    gathering.elsewhere(1, "")
    assert gathering.look({0, 1, 2}, {}, 0, name) == []


def test_a_reconnect_needs_every_rank() -> None:
    """Where a rank is lost those that reconnect are refused, while those that shrink wait for them."""
    gathering = came(0, 2, what=RECONNECT)
    gathering.come(3, SHRINK, 5, 5, LIMIT)
    (refused,) = gathering.look({0, 2, 3}, {1: "rank 1 was killed"}, 0, name)
    assert refused == Refused("PeerLostError", (0, 2), "rank 1 was killed. Every rank must take part", (1,))
    for rank in (0, 2):
        gathering.come(rank, SHRINK, 1, 1, LIMIT)
    assert gathering.look({0, 2, 3}, {1: "rank 1 was killed"}, 0, name) == [Agreed(SHRINK, (0, 2, 3), 5, 5)]
    assert came(0, 1, what=RECONNECT).look({0, 1}, {}, 0, name) == [Agreed(RECONNECT, (0, 1), 10, 1)]


@given(st.permutations(range(6)), st.sets(st.integers(0, 5), max_size=5), st.integers(0, 6))
def test_any_order_of_coming_and_dying_ends_in_one_agreement(order: list[int], dead: set[int], when: int) -> None:
    """Whatever the order, exactly those that live agree, once; nobody who is dead is in it."""
    gathering, decided = Gathering(), []
    for step, rank in enumerate(order):
        gone = dead if step >= when else set()
        if rank not in gone:
            gathering.come(rank, SHRINK, rank, 0, LIMIT)
        decided += gathering.look(set(range(6)) - gone, dict.fromkeys(gone, "killed"), 0, name)
    if when < 6:
        alive = tuple(sorted(set(range(6)) - dead))
        assert decided == [Agreed(SHRINK, alive, alive[-1], 0)]
