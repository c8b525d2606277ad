"""Watchers that are linked over two networks: what one of them loses is named, though the other one stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.net import TICK, Net

MAIN, DATA = 0, 1
THERE = "cut off there, as it is heard over another network"


@pytest.fixture
def make() -> Iterator[Callable[..., Net]]:
    """Make nets of two networks, and close them."""
    made: list[Net] = []

    def one(count: int, *names: str, **options: Any) -> Net:
        made.append(Net(count, *(names or ("data0",)), **options))
        return made[-1]

    yield one
    for net in made:
        net.close()


def accused(net: Net, *, by: int) -> list[list[int]]:
    """The ranks that a node accused, in order."""
    return [ranks for ranks, _, _ in net.nodes[by].accused]


def test_begins_only_with_the_links_of_both(make: Callable[..., Net]) -> None:
    """A network that carries nothing from the first keeps every node from its start, and is named."""
    net = make(2, start=False, patience=3)
    vars(net.nodes[0].networks._every[DATA])["_may_call"] = lambda number: False
    for node in net.nodes:
        node.networks.up()
    net.pass_time(3.2)
    assert not any(node.told("begun") for node in net.nodes)
    texts = [text for node in net.nodes for _, text, phase in node.accused if phase == "start"]
    assert len(texts) == 2, texts
    assert any("host n1 cannot reach over data0 that of host n0 (ranks 0-1) at 127.0.0.1" in one for one in texts)
    assert any("was not reached over data0 by that of host n1 (ranks 2-3)" in one for one in texts), texts


@pytest.mark.parametrize("number", [0, 1, 3])
def test_node_that_one_network_loses_is_named(make: Callable[..., Net], number: int) -> None:
    """By the others within five seconds; itself it says nothing sooner, as it may be told over the other network."""
    net = make(4)
    net.pass_time(1)
    net.cut_off(number, DATA)
    net.pass_time(3.6)
    assert not any(node.accused for node in net.nodes)
    others, lost = [one for one in range(4) if one != number], [2 * number, 2 * number + 1]
    passed = 3.6
    while not any(net.nodes[one].accused for one in others):
        assert not net.nodes[number].accused and passed < 4.6
        net.pass_time(TICK)
        passed += TICK
    net.pass_time(0.6)
    for one in others:
        assert all(ranks == lost and THERE in text for ranks, text, _ in net.nodes[one].accused)
        assert [fields["rank"] for fields in net.nodes[one].told("stopped")][:2] == lost
    text = next(text for one in others for _, text, _ in net.nodes[one].accused)
    assert f"no word from host n{number} (ranks {lost[0]}-{lost[1]}) over data0 for 4." in text, text
    assert all("or this host" in text for _, text, _ in net.nodes[number].accused)
    # What is found still travels, and who comes back is told of once.
    assert all(net.nodes[one].networks.cut <= {number} and not net.nodes[one].links.cut for one in others)
    net.nodes[number].links.publish("gone", rank=lost[0], text="late")
    net.mend(DATA)
    net.pass_time(1.4)
    for one in others:
        assert net.nodes[one].told("gone") == [{"rank": lost[0], "text": "late"}]
        assert {fields["rank"] for fields in net.nodes[one].told("running")} == {*lost}
        assert not net.nodes[one].networks.cut


def test_of_two_nodes_each_names_the_other(make: Callable[..., Net]) -> None:
    """Nobody else could tell which of them the network has lost; each says that it may be itself."""
    net = make(2)
    net.pass_time(1)
    net.cut_off(1, DATA)
    net.pass_time(4.6)
    assert accused(net, by=0) == [[2, 3]] and accused(net, by=1) == [[0, 1]]
    assert all(THERE in text and "or this host, n" in text for node in net.nodes for _, text, _ in node.accused)


@pytest.mark.parametrize("count", [2, 4])
def test_loss_of_the_main_network_alone_is_named(make: Callable[..., Net], count: int) -> None:
    """As where there is no other one: each side names the other; one against several only once those have."""
    net = make(count)
    net.pass_time(1)
    net.cut_off(1, MAIN)
    others = [one for one in range(count) if one != 1]
    net.pass_time(4.0)
    while count > 2 and not any(accused(net, by=one) for one in others):
        net.pass_time(TICK)
        assert not accused(net, by=1)
    net.pass_time(0.8)
    assert next(ranks for one in others for ranks in accused(net, by=one)) == [2, 3]
    assert accused(net, by=1) == [[rank for one in others for rank in (2 * one, 2 * one + 1)]]


def test_frozen_node_is_not_said_to_be_heard_elsewhere(make: Callable[..., Net]) -> None:
    """What both networks miss is no loss of one of them."""
    net = make(3)
    net.nodes[2].frozen = True
    net.pass_time(5)
    texts = [text for node in net.nodes for _, text, _ in node.accused]
    assert texts and not any("another network" in text for text in texts), texts


def test_outage_of_one_network_for_three_seconds_is_no_fault(make: Callable[..., Net]) -> None:
    """As it is where there is one network."""
    net = make(4)
    for number in (0, 3):
        net.cut_off(number, DATA)
        net.pass_time(3)
        net.mend(DATA)
        net.pass_time(2)
    assert not any(node.accused or node.told("stopped") for node in net.nodes)


def test_rank_is_back_only_once_it_is_back_on_both(make: Callable[..., Net]) -> None:
    """Where both were lost, the first that comes back says nothing."""
    net = make(3)
    for network in (MAIN, DATA):
        net.cut_off(2, network)
    net.pass_time(5)
    assert {fields["rank"] for fields in net.nodes[0].told("stopped")} == {4, 5}
    net.mend(MAIN)
    net.pass_time(1.4)
    assert not net.nodes[0].told("running") and net.nodes[0].networks.away(2)
    net.mend(DATA)
    net.pass_time(1.4)
    assert {fields["rank"] for fields in net.nodes[0].told("running")} == {4, 5} and not net.nodes[0].networks.away(2)


@pytest.mark.parametrize("network", [MAIN, DATA])
def test_rank_that_is_stopped_too_is_not_said_to_run_by_who_hears_its_node_again(
    make: Callable[..., Net], network: int
) -> None:
    """Nor the other way round; the reason that is left is told."""
    net = make(3)
    hub, leaf = net.nodes[0], net.nodes[2]
    leaf.links.publish("stopped", rank=4, text="SIGSTOP")
    net.settle()
    net.cut_off(2, network)
    net.pass_time(5)
    net.mend(network)
    net.pass_time(1.4)
    assert [fields["rank"] for fields in hub.told("running")] == [5]
    assert [fields["text"] for fields in hub.told("stopped") if fields["rank"] == 4][-1] == "SIGSTOP"
    leaf.links.publish("running", rank=4)
    net.settle()
    assert [fields["rank"] for fields in hub.told("running")] == [5, 4]


def test_ends_once_both_networks_say_that_it_may(make: Callable[..., Net]) -> None:
    """As with one network, hubs stay until the others are over."""
    net = make(3)
    assert not net.finish(0) and net.finish(2) and net.finish(1) and net.finish(0)


def test_link_is_made_again_from_the_address_that_it_had(make: Callable[..., Net]) -> None:
    """Another route may lead there once the network is lost: a link over that one would hide the loss."""
    net = make(2)
    links = net.nodes[1].networks._every[DATA]
    (address,) = links._peers[0].sources
    assert links._peers[0].sources == {address: "127.0.0.1"}
    links._peers[0].sources[address] = "127.0.0.9"
    link = links._peers[0].link
    assert link is not None
    links._connections.drop(link)
    net.pass_time(2 * TICK)
    made = net.nodes[0].networks._every[DATA]._peers[1].link
    assert made is not None and made.sock.getpeername()[0] == "127.0.0.9"
    # An address that this host has lost reaches nobody.
    links._peers[0].sources[address] = "203.0.113.7"
    net.cut(0, 1, DATA)
    net.mend(DATA)
    net.pass_time(2 * TICK)
    assert net.nodes[0].networks._every[DATA]._peers[1].link is None and "assign" in str(links._peers[0].ends)
