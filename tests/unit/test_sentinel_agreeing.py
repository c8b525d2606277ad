"""Watchers of several nodes that have their ranks agree, over real connections: one decision, or none that splits.

Time is what a test says that it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from helpers.net import TICK, Net
from helpers.relaying import FakeRank, killed

from butter_mpi.sentinel.elsewhere import Elsewhere
from butter_mpi.sentinel.gathering import RECONNECT, SHRINK, outvoted
from butter_mpi.sentinel.messages import of_spans, spans
from butter_mpi.sentinel.relay import Relay

LIMIT = 60.0
SILENCE = 5.0


class Watched:
    """The watcher of a node with two ranks, without processes: links, what is known of others, and the relay."""

    def __init__(self, node: Any, number: int, count: int) -> None:
        self.links = node.links
        self.everyone = [FakeRank(2 * number), FakeRank(2 * number + 1)]
        self.ranks = {rank.number: rank for rank in self.everyone}
        hosts = [(f"n{one}", [2 * one, 2 * one + 1]) for one in range(count)]
        self.elsewhere = Elsewhere(node.networks, hosts, 2 * count, number)
        ranks: Any = lambda: self.ranks  # noqa: E731
        named: Any = lambda one: f"rank {one}"  # noqa: E731
        self.relay = Relay(ranks, named, self._begin, lambda _: None, lambda: None, self.elsewhere, number)
        node.networks._hear = self._hear

    def _begin(self, survivors: Sequence[int]) -> None:
        new = {old: number for number, old in enumerate(survivors)}
        self.elsewhere.go_on(survivors)
        self.ranks = {new[old]: rank for old, rank in self.ranks.items() if old in new}
        for number, rank in self.ranks.items():
            rank.number = number

    def _hear(self, kind: str, fields: dict[str, Any]) -> None:
        if kind in ("gone", "stopped", "running"):
            self.elsewhere.hear(kind, fields)
        elif kind != "begun":
            self.relay.hear_far(kind, fields)

    def call(self, what: str = SHRINK, sequence: int = 7) -> None:
        """Let the ranks here that live call something."""
        for rank in self.everyone:
            fake: Any = rank
            if rank.lives:
                message = {"kind": "come", "what": what, "sequence": sequence, "pairs": 0, "limit": LIMIT}
                self.relay.hear(fake, message)

    def die(self, place: int) -> None:
        """Let a rank die, and tell the others."""
        rank = self.everyone[place]
        killed(rank)
        self.elsewhere.died_here(rank.first_number)
        self.links.publish("gone", rank=rank.first_number, text="it was killed")

    def answers(self) -> list[dict[str, Any]]:
        """What each rank that lives was told last."""
        return [rank.told[-1] if rank.told else {} for rank in self.everyone if rank.lives]


class World:
    """Some nodes with their watchers."""

    def __init__(self, count: int, *further: str) -> None:
        self.net = Net(count, *further)
        self.watchers = [Watched(node, number, count) for number, node in enumerate(self.net.nodes)]

    def pass_time(self, seconds: float) -> None:
        """Let time pass everywhere but on nodes that are frozen."""
        for _ in range(round(seconds / TICK)):
            for node, watcher in zip(self.net.nodes, self.watchers, strict=True):
                if not node.frozen:
                    watcher.relay.look(TICK)
            self.net.pass_time(TICK)

    def going(self) -> list[list[int]]:
        """The ranks of each agreement that some rank was told, each once."""
        told = [message for watcher in self.watchers for rank in watcher.everyone for message in rank.told]
        found = {tuple(of_spans(message["spans"])) for message in told if message["kind"] == "gathered"}
        return sorted(map(list, found))


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """As many nodes as the test says."""
    made = World(*request.param)
    yield made
    made.net.close()


def nodes(count: int, *further: str) -> pytest.MarkDecorator:
    """Give a test so many nodes, which are linked over the main network and these."""
    return pytest.mark.parametrize("world", [(count, *further)], indirect=True)


@nodes(4)
def test_all_that_live_agree_on_every_node(world: World) -> None:
    """The first hub decides, from the largest number of all; whoever comes last ends the wait of all."""
    world.watchers[2].die(1)
    for number, watcher in enumerate(world.watchers[:3]):
        watcher.call(sequence=number)
    world.pass_time(1)
    assert world.going() == []
    world.watchers[3].call(sequence=9)
    world.pass_time(2 * TICK)
    assert world.going() == [[0, 1, 2, 3, 4, 6, 7]]
    for watcher in world.watchers:
        assert all(one["kind"] == "gathered" and one["sequence"] == 9 for one in watcher.answers())
    assert [list(watcher.ranks) for watcher in world.watchers] == [[0, 1], [2, 3], [4], [5, 6]]


@nodes(4, "data0")
@pytest.mark.parametrize("number", [0, 1, 3])
def test_all_go_on_without_a_node_that_one_network_loses(world: World, number: int) -> None:
    """Over the other one it still calls, and hears that it is left out."""
    world.net.cut_off(number, 1)
    world.pass_time(SILENCE)
    for watcher in world.watchers:
        watcher.call()
    world.pass_time(1)
    assert world.going() == [[rank for rank in range(8) if rank // 2 != number]]
    assert [one["kind"] for one in world.watchers[number].answers()] == ["left_out"] * 2


@nodes(2, "data0")
def test_of_two_nodes_that_one_network_parts_one_goes_on(world: World) -> None:
    """That with the lowest rank, as where they do not hear one another at all."""
    world.net.cut_off(1, 1)
    world.pass_time(SILENCE)
    for watcher in world.watchers:
        watcher.call()
    world.pass_time(1)
    assert world.going() == [[0, 1]]


@pytest.mark.parametrize(("what", "going"), [(SHRINK, {2: [[0, 1]], 4: [[2, 3, 4, 5, 6, 7]]}), (RECONNECT, {})])
@pytest.mark.parametrize("world", [(2, "data0"), (4, "data0")], indirect=True)
def test_hub_that_others_have_cut_off_decides_nothing_for_them(
    world: World, what: str, going: dict[int, list[list[int]]]
) -> None:
    """Over the main network the first hub still hears what all ranks call, when it does not know of the loss yet."""
    world.net.cut_off(0, 1)
    world.net.nodes[1].networks.tick(TICK, True)
    while not world.net.nodes[1].accused:
        world.net.pass_time(TICK)
    assert not world.net.nodes[0].accused and not world.net.nodes[0].networks.cut
    for watcher in world.watchers:
        watcher.call(what)
    # The first hub sees last what the others call, and all that they have decided on.
    for watcher in reversed(world.watchers):
        watcher.relay.look(0.0)
        world.net.settle()
    world.pass_time(1)
    assert world.going() == going.get(len(world.watchers), [])


@nodes(3)
def test_loss_of_the_first_hub_leaves_the_second_to_decide(world: World) -> None:
    """Its watcher is silent: its ranks are left out by all others, and told so where they run again."""
    world.net.nodes[0].frozen = True
    for watcher in world.watchers[1:]:
        watcher.call()
    world.pass_time(SILENCE)
    assert world.going() == [[2, 3, 4, 5]]
    world.net.nodes[0].frozen = False
    world.watchers[0].call()
    world.pass_time(2)
    assert world.going() == [[2, 3, 4, 5]]
    assert [one["kind"] for one in world.watchers[0].answers()] == ["left_out"] * 2


@nodes(2)
def test_of_two_halves_only_that_of_the_lowest_rank_goes_on(world: World) -> None:
    """Where neither hears the other; the other one is told that others may go on."""
    world.net.cut(0, 1)
    for watcher in world.watchers:
        watcher.call()
    world.pass_time(SILENCE)
    assert world.going() == [[0, 1]]
    for told in world.watchers[1].answers():
        assert told["kind"] == "refused" and told["alone"] and told["lost"] == [0, 1], told
        assert "ranks 0-1 cannot be reached, and may live" in told["text"]


@nodes(3)
def test_a_part_with_neither_hub_is_refused(world: World) -> None:
    """Once it hears none of them; the others go on."""
    world.net.cut(0, 2)
    world.net.cut(1, 2)
    for watcher in world.watchers:
        watcher.call()
    world.pass_time(SILENCE + 1)
    assert world.going() == [[0, 1, 2, 3]]
    assert all(told["kind"] == "refused" and told["alone"] for told in world.watchers[2].answers())


@pytest.mark.parametrize("world", [(4,), (4, "data0")], indirect=True)
def test_without_a_rank_on_one_hub_the_loss_of_the_other_is_known_on_each_host(world: World) -> None:
    """Who hears of it from the one that is left waits for no decision of the lost one; and would, once it is back."""
    world.watchers[1].die(0)
    world.watchers[1].die(1)
    for network in range(len(world.net.nodes[0].networks._every)):
        world.net.cut_off(0, network)
    world.pass_time(SILENCE + 1)
    for watcher in world.watchers[2:]:
        watcher.call()
    world.pass_time(2)
    for watcher in world.watchers[2:]:
        assert all("cannot be reached from here" in told["text"] for told in watcher.answers()), watcher.answers()
    for network in range(len(world.net.nodes[0].networks._every)):
        world.net.mend(network)
    world.pass_time(2)
    assert [watcher.elsewhere.decides for watcher in world.watchers] == [0] * 4


@nodes(4)
def test_without_a_rank_on_either_hub_only_one_host_goes_on(world: World) -> None:
    """Where the dead are known to be dead, and those that live are on one host; on two nobody would link these."""
    for watcher in world.watchers[:2]:
        watcher.die(0)
        watcher.die(1)
    for watcher in world.watchers[2:]:
        watcher.call()
    world.pass_time(2)
    assert world.going() == []
    for told in world.watchers[2].answers():
        assert told["kind"] == "refused" and "have no rank left" in told["text"], told
    world.watchers[2].die(0)
    world.watchers[2].die(1)
    world.watchers[3].call()
    world.pass_time(1)
    assert world.going() == [[6, 7]]


@nodes(3)
def test_who_does_not_come_is_named_on_every_node(world: World) -> None:
    """At the limit, with the name; and a call that differs at once."""
    world.watchers[0].die(0)
    for watcher in world.watchers[:2]:
        watcher.call()
    world.pass_time(LIMIT + 1)
    for watcher in world.watchers[:2]:
        for told in watcher.answers():
            assert told["error"] == "CollectiveTimeoutError" and "from rank 4 (it has not called it)" in told["text"]
    # Where nobody is lost.
    other = World(2)
    other.watchers[0].call()
    other.watchers[1].call(RECONNECT)
    other.pass_time(2 * TICK)
    for watcher in other.watchers:
        for told in watcher.answers():
            said = "ranks 0-1 called shrink(); ranks 2-3 called attempt_reconnect(). All must call the same"
            assert told["kind"] == "refused" and told["text"] == said, told
    other.net.close()


@nodes(4)
def test_letters_come_once_and_in_order_also_where_a_link_breaks(world: World) -> None:
    """Between two leaves they go through a hub; what was lost with that goes through the other one."""
    for watcher in world.watchers:
        watcher.call(RECONNECT)
    world.pass_time(1)
    (generation,) = {rank.told[-1]["generation"] for watcher in world.watchers for rank in watcher.everyone}
    sender, receiver = world.watchers[2].everyone[0], world.watchers[3].everyone[1]
    receiver.told.clear()
    fake: Any = sender

    def post(number: int) -> None:
        fields = {"to": [7], "letter": "op", "body": {"n": number, "x": "x" * 20_000}, "generation": generation}
        world.watchers[2].relay.hear(fake, {"kind": "post", **fields})

    for number in range(10):
        post(number)
    world.pass_time(TICK)
    world.net.cut(0, 3)
    for number in range(10, 20):
        post(number)
    world.pass_time(SILENCE)
    letters = [told for told in receiver.told if told["kind"] == "letter"]
    assert [told["body"]["n"] for told in letters] == list(range(20)) and {told["by"] for told in letters} == {4}


@pytest.mark.parametrize(
    ("going", "silent", "no"),
    [((0, 1), (), False), ((2, 3), (0, 1), True), ((0, 3), (1, 2), False), ((1, 2), (0,), False), ((0,), (1, 2), True)],
)
def test_at_most_one_of_two_parts_goes_on(going: tuple[int, ...], silent: tuple[int, ...], no: bool) -> None:
    """That of more ranks; of equally many, that of the lowest."""
    assert outvoted(going, silent) == no
    assert not silent or outvoted(silent, going) != no


def test_ranks_as_spans() -> None:
    """Few are said of many, in their order."""
    assert spans([0, 1, 2, 5, 4]) == [[0, 2], [5, 5], [4, 4]] and of_spans(spans(range(5000))) == list(range(5000))
