"""Where communicators come from: names, ranks, order, and what is required of a part."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from butter_mpi.descent import Descent, applicable, members


def test_names_and_ranks_of_generations() -> None:
    """A rank is named here and in the communicator of init, over any number of splits."""
    root = Descent.of_init("init", 6)
    assert root.who(4, "n01") == "rank 4/6 on n01" and root.remark([1]) == ""
    child = root.child("split 1 color 2", [5, 1, 3])
    assert child.who(0, "n01") == "rank 0/3 of split 1 color 2 (rank 5/6 of init) on n01"
    grandchild = child.child("dup 1", [2, 0])
    assert grandchild.who(1, "h") == "rank 1/2 of split 1 color 2, dup 1 (rank 5/6 of init) on h"
    assert "Ranks of split 1 color 2, dup 1 in init: 0 is 3, 1 is 5" in grandchild.remark([])
    assert grandchild.remark([1]).endswith("in init: 1 is 5")
    # A rank that the other end names, and that is none here, spoils nothing.
    assert grandchild.remark([7]).endswith("in init: ")


def test_communicators_of_survivors_are_counted() -> None:
    """Who goes on is named in the order of old, however often, and by the numbers of init."""
    root = Descent.of_init("init", 4)
    once = root.shrunk([0, 2, 3])
    assert once.who(1, "n01") == "rank 1/3 of shrink 1 (rank 2/4 of init) on n01"
    assert once.shrunk([1, 2]).who(1, "n01") == "rank 1/2 of shrink 2 (rank 3/4 of init) on n01"
    assert (root.key("k"), once.key("k"), once.shrunk([0]).key("k")) == ("k", "k shrink 1", "k shrink 2")
    assert once.remark([1]) == "Ranks of shrink 1 in init: 1 is 2"
    part = root.child("split 1 color 0", [3, 1]).shrunk([0])
    assert part.name == "split 1 color 0, shrink 1" and part.shrunk([0]).name == "split 1 color 0, shrink 2"
    assert part.child("dup 1", [0]).shrunk([0]).name == "split 1 color 0, shrink 1, dup 1, shrink 1"


@given(st.lists(st.tuples(st.none() | st.integers(0, 2), st.integers(-2, 2)), min_size=1, max_size=8))
def test_every_rank_is_in_the_part_of_its_color_once(said: list[tuple[Any, int]]) -> None:
    """Parts are disjoint, whole, and in the order of key, then rank."""
    given_ = [{"color": color, "key": key} for color, key in said]
    colors = {color for color, _ in said if color is not None}
    parts = [members(given_, color) for color in colors]
    assert sorted(rank for part in parts for rank in part) == [r for r, (c, _) in enumerate(said) if c is not None]
    for part in parts:
        order = [(said[rank][1], rank) for rank in part]
        assert order == sorted(order) and len({said[rank][0] for rank in part}) == 1


@pytest.mark.parametrize(
    ("required", "nodes", "kept"),
    [
        (None, "ab", False),
        ("NET/IB", "a", False),
        ("P2P", "a", False),
        ("NET/IB", "aa", False),
        ("NET/IB", "ab", True),
        ("NET/IB", "aab", True),
        ("P2P", "aa", True),
        ("SHM", "aabb", True),
        ("P2P", "ab", False),
        ("P2P", "aab", False),
    ],
)
def test_transport_is_required_where_it_can_be(required: str | None, nodes: str, kept: bool) -> None:
    """Between nodes a network, on nodes what is inside them; one rank alone has none."""
    assert applicable(required, list(nodes)) == (required if kept else None)
