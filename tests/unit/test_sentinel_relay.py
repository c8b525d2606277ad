"""What the watcher carries between ranks that go on, and the control plane that stands on it; in one process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from helpers.relaying import FakeRank, killed
from hypothesis import given
from hypothesis import strategies as st

from butter_mpi import control
from butter_mpi.control import Overdue, Watch
from butter_mpi.descent import Descent
from butter_mpi.sentinel.client import Sentinel
from butter_mpi.sentinel.door import ALONE
from butter_mpi.sentinel.elsewhere import Elsewhere
from butter_mpi.sentinel.gathering import RECONNECT, SHRINK
from butter_mpi.sentinel.judging import Verdict
from butter_mpi.sentinel.messages import pack, unpack
from butter_mpi.sentinel.networks import Networks
from butter_mpi.sentinel.relay import LETTER_BYTES, Relay
from butter_mpi.sentinel.relayed import RelayedControl
from butter_mpi.sentinel.reunion import Reunion

LIMIT = 5.0
FIRST = 2
"""The number of the first agreement."""


class Node:
    """Ranks, and a relay between them."""

    def __init__(self, size: int) -> None:
        self.ranks = {number: FakeRank(number) for number in range(size)}
        self.verdicts: list[Verdict] = []
        named: Any = lambda number: f"rank {number}/{size}"  # noqa: E731
        ranks: Any = lambda: self.ranks  # noqa: E731
        links: Any = Networks(ALONE, lambda *_: None, lambda *_: None)
        self.elsewhere = Elsewhere(links, ALONE["nodes"], size, 0)
        self.relay = Relay(ranks, named, self._begin, self.verdicts.append, lambda: None, self.elsewhere, 0)

    def _begin(self, survivors: Sequence[int]) -> None:
        self.elsewhere.go_on(survivors)
        self.ranks = {new: self.ranks[old] for new, old in enumerate(survivors)}
        for new, rank in self.ranks.items():
            rank.number = new

    def hear(self, rank: FakeRank, kind: str, **fields: Any) -> None:
        """Take a message of a rank, as its socket brings it."""
        fake: Any = rank
        self.relay.hear(fake, unpack(pack(kind, **fields)))

    def come(self, *numbers: int, what: str = SHRINK) -> list[FakeRank]:
        """Let ranks come, and decide."""
        ranks = [self.ranks[number] for number in numbers]
        for rank in ranks:
            self.hear(rank, "come", what=what, sequence=7, pairs=0, limit=LIMIT)
        self.relay.look(0.0)
        return ranks


def test_survivors_get_new_numbers_and_the_others_are_told() -> None:
    """Dead, stopped and closed ranks are not waited for; those that live are told that others went on."""
    node = Node(6)
    dead, stopped, closed = (node.ranks[number] for number in (1, 2, 3))
    killed(dead)
    stopped.stop = Verdict("PeerLostError", (2,), "rank 2 has been stopped")
    closed.closed = True
    survivors = node.come(0, 4, 5)
    numbers = {"sequence": 7, "pairs": 0, "generation": FIRST}
    agreed = {"kind": "gathered", "what": SHRINK, "spans": [[0, 0], [4, 5]], **numbers}
    assert [rank.told for rank in survivors] == [[agreed]] * 3 and [rank.number for rank in survivors] == [0, 1, 2]
    assert dead.told == []
    for rank in (stopped, closed):
        (told,) = rank.told
        assert told["kind"] == "left_out" and "ranks 0, 4-5 went on without this rank" in told["text"]
    # It runs again, and comes too late.
    node.hear(stopped, "come", what=SHRINK, sequence=7, pairs=0, limit=LIMIT)
    node.relay.look(LIMIT)
    assert len(stopped.told) == len(survivors[0].told) == 1


def test_letters_go_to_ranks_of_the_newest_agreement_only() -> None:
    """What is of an older generation, too long, or to no rank is not carried."""
    node = Node(3)
    killed(node.ranks[0])
    one, other = node.come(1, 2)
    good = {"to": [1], "letter": "op", "body": {"n": 1}, "generation": FIRST}
    for wrong in (
        {**good, "generation": 0},
        {**good, "body": {"data": "x" * LETTER_BYTES}},
        {**good, "to": [7, "1", None, [1]]},
    ):
        node.hear(one, "post", **wrong)
    assert len(other.told) == 1
    node.hear(one, "post", **good)
    assert other.told[1:] == [{"kind": "letter", "by": 0, "letter": "op", "body": {"n": 1}, "generation": FIRST}]


def test_a_rank_that_reads_nothing_is_judged() -> None:
    """Letters wait for a rank in a bounded number; then that one is to blame."""
    node = Node(2)
    one, other = node.come(0, 1, what=RECONNECT)
    other.unsent = 100_000
    node.hear(one, "post", to=[1], letter="op", body={}, generation=FIRST)
    (verdict,) = node.verdicts
    assert verdict.lost == (1,) and "takes no more messages" in verdict.text and len(other.told) == 1


_ANY = st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=3) | st.lists(st.integers(-1, 4))
_MESSAGE = st.one_of(
    st.fixed_dictionaries(
        {
            "kind": st.just("come"),
            "what": st.sampled_from([SHRINK, RECONNECT, "", "x"]),
            "sequence": st.integers(),
            "pairs": st.integers(),
            "limit": st.floats(),
        }
    ),
    st.fixed_dictionaries({"kind": st.just("elsewhere"), "what": st.sampled_from([SHRINK, RECONNECT, "", "x"])}),
    st.fixed_dictionaries(
        {
            "kind": st.just("post"),
            "to": st.lists(_ANY, max_size=4),
            "letter": st.text(max_size=3),
            "body": st.dictionaries(st.text(max_size=3), _ANY, max_size=2),
            "generation": st.integers(0, 3),
        }
    ),
)


@given(st.lists(st.tuples(st.integers(0, 3), _MESSAGE | st.sampled_from(["dies", "closes", "time"])), max_size=30))
def test_whatever_ranks_say_the_relay_stands(steps: list[tuple[int, Any]]) -> None:
    """Any order of messages, deaths and time raises nothing, and whatever is told is a message."""
    node = Node(4)
    everyone = list(node.ranks.values())
    for number, step in steps:
        rank = everyone[number]
        if step == "dies":
            killed(rank)
        elif step == "closes":
            rank.closed = True
        elif rank.lives and step != "time":
            node.hear(rank, **step)
        node.relay.look(1.0 if step == "time" else 0.0)
    assert [rank.number for rank in node.ranks.values()] == list(node.ranks)


class Client(Sentinel):
    """A rank's end of the watcher, without the sockets; what it posts is carried at once, if there is room."""

    def __init__(self, node: Node, rank: FakeRank) -> None:
        self._node, self._mine, self.room, self._left = node, rank, True, False
        self._descent, self._rank = Descent.of_init("init", len(node.ranks)), rank.number
        self.reunion = Reunion(self._send, lambda: False, self._go_on_with)
        self.reunion.generation = FIRST

    def _send(self, kind: str, **fields: Any) -> bool:
        if self.room:
            self._node.hear(self._mine, kind, **fields)
            for client in CLIENTS:
                for message in client._mine.told:
                    client.reunion.hear(message)
                client._mine.told.clear()
        return self.room


CLIENTS: list[Client] = []


@pytest.fixture
def controls() -> Iterator[list[RelayedControl]]:
    """The control planes of three ranks."""
    node = Node(3)
    ranks = node.come(0, 1, 2, what=RECONNECT)
    for rank in ranks:
        rank.told.clear()
    CLIENTS[:] = [Client(node, rank) for rank in ranks]
    made = [RelayedControl(client) for client in CLIENTS]
    yield made
    for one in made:
        one.free()
    assert not control._LISTENING & set(made)


@pytest.mark.parametrize("length", [0, 1, 24 << 10, 100_001])
def test_payloads_of_any_length_arrive(length: int, controls: list[RelayedControl]) -> None:
    """Each rank gets each one's bytes, in rank order, also where they take several letters, or wait for room."""
    payloads = [bytes([rank]) * (length * (rank + 1) // 3) for rank in range(3)]
    CLIENTS[1].room = False
    steps = [one.gathering(payload) for one, payload in zip(controls, payloads, strict=True)]
    assert [next(step) for step in steps] == [False] * 3
    CLIENTS[1].room = True
    for one in (*controls, *controls):
        one.pump()
    for step in steps:
        with pytest.raises(StopIteration) as end:
            next(step)
        assert end.value.value == payloads
    with pytest.raises(Overdue, match="comparing"):
        controls[0].all_gather(b"x", Watch(0.0), "comparing")


def test_messages_are_those_of_every_control_plane(controls: list[RelayedControl]) -> None:
    """Operations, notices and last words arrive in order and are cut to what fits; nothing follows a last word."""
    one, other, third = controls
    one.send([1, 2], "op", {"n": 1})
    one.send([1], "broken", {"error": "PeerLostError", "text": "x" * 100_000, "lost": []})
    one.send([1], "ping", {})
    one.send([1], "left", {"why": "closed"})
    one.send([1], "op", {"n": 2})
    assert other.pump() and third.pump() and not other.pump()
    assert list(other.inbox[0]) == [{"n": 1}] and other.left == {0: {"why": "closed"}}
    assert other.broken is not None and 1000 < len(json.dumps(other.broken[1])) < 5000
    one.ask_where([2])
    third.where = lambda: "barrier #1"
    third.pump()
    one.pump()
    assert one.whereabouts == {2: "barrier #1"}


@pytest.mark.parametrize("gone", [False, True])
def test_who_hears_nothing_more_waits_for_no_last_word(gone: bool, controls: list[RelayedControl]) -> None:
    """A close waits for the last words of peers only while they can be heard."""
    CLIENTS[1]._left = gone
    assert controls[1].everyone_left == gone


def test_what_is_of_another_agreement_is_not_taken(controls: list[RelayedControl]) -> None:
    """Ranks have other numbers there; letters of a newer one stay for the control plane that comes with it."""
    client, letter = CLIENTS[0], {"kind": "letter", "by": 1, "letter": "op", "body": {"n": 1}}
    for generation in (0, FIRST + 2):
        client.reunion.hear({**letter, "generation": generation})
    assert not controls[0].pump() and len(client.reunion.letters) == 1
    assert not controls[0].settled()
    client.reunion.generation = FIRST + 2
    assert controls[0].settled()
    assert RelayedControl(client).pump() and not client.reunion.letters
