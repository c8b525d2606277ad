"""The links between watchers, over real connections of this machine: what travels, what silence means, and strangers.

Time is what a test says that it is.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.net import TICK, Net, Node, listener

from butter_mpi.sentinel import connections
from butter_mpi.sentinel.door import ALONE

FUZZ_SECONDS = float(os.environ.get("BUTTER_MPI_TEST_FUZZ_SECONDS") or 1)


@pytest.fixture
def make() -> Iterator[Callable[..., Net]]:
    """Make nets, and close them."""
    made: list[Net] = []

    def one(*arguments: Any, **options: Any) -> Net:
        made.append(Net(*arguments, **options))
        return made[-1]

    yield one
    for net in made:
        net.close()


GONE: dict[str, Any] = {"rank": 4, "text": "rank 4 was killed"}


def test_a_node_alone_begins_and_ends_by_itself() -> None:
    """Without other nodes nothing is waited for."""
    node = Node(ALONE)
    node.networks.up()
    node.links.publish("gone", rank=0, text="")
    node.networks.tick(100, False)
    assert node.told("begun") == [{}] and not node.accused and not node.links.awake and node.networks.finish()


@pytest.mark.parametrize("count", [2, 3, 5])
def test_what_one_finds_all_others_hear_once(make: Callable[..., Net], count: int) -> None:
    """From a leaf and from each hub."""
    net = make(count)
    for number, node in enumerate(net.nodes):
        fields = {"rank": 2 * number, "text": f"rank {2 * number} was killed"}
        node.links.publish("gone", **fields)
        net.settle()
        for other in net.nodes:
            assert other.told("gone").count(fields) == (other is not node)


def test_begins_only_with_the_ranks_and_links_of_all(make: Callable[..., Net]) -> None:
    """One node whose ranks have not all come keeps every other one from its start."""
    net = make(4, start=False)
    for node in net.nodes[:3]:
        node.links.up()
    net.pass_time(1)
    assert not any(node.told("begun") for node in net.nodes)
    net.nodes[3].links.up()
    net.settle()
    assert all(node.told("begun") == [{}] for node in net.nodes)


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_lost_node_is_named_by_every_other(make: Callable[..., Net], number: int, how: str) -> None:
    """Within five seconds, hub or not; and the others still hear one another."""
    net = make(4)
    net.pass_time(1)
    if how == "frozen":
        net.nodes[number].frozen = True
    else:
        net.kill(number)
    net.pass_time(3.6)
    others = [node for node in net.nodes if node is not net.nodes[number]]
    assert not any(node.accused for node in others)
    net.pass_time(1.2)
    lost = [2 * number, 2 * number + 1]
    accusations = [one for node in others for one in node.accused]
    assert accusations and all(ranks == lost and f"host n{number} (ranks " in text for ranks, text, _ in accusations)
    for node in others:
        assert [fields["rank"] for fields in node.told("stopped")][:2] == lost
    others[0].links.publish("gone", rank=others[0].links._nodes[others[0].links._me][1][0], text="late")
    net.settle()
    assert all(len(node.told("gone")) == 1 for node in others[1:])


@pytest.mark.parametrize(("hub", "other"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("over", [True, False])
def test_loss_of_a_hub_is_judged_where_the_other_one_has_no_rank_any_more(
    make: Callable[..., Net], hub: int, other: int, over: bool
) -> None:
    """That one's watcher stays, and tells it; those whose ranks went on without it have the verdict themselves."""
    net = make(4)
    assert not over or not net.finish(other)
    net.nodes[hub].frozen = True
    net.pass_time(5)
    assert bool(net.nodes[other].accused) != over
    for node in net.nodes[2:]:
        assert [ranks for ranks, _, _ in node.accused] == [[2 * hub, 2 * hub + 1]], node.accused


def test_frozen_node_that_comes_back_is_no_more_stopped(make: Callable[..., Net]) -> None:
    """Everyone hears that it can be reached again; and it hears what it missed."""
    net = make(3)
    net.nodes[2].frozen = True
    net.pass_time(5)
    net.nodes[0].links.publish("gone", rank=0, text="rank 0 was killed")
    net.nodes[2].frozen = False
    net.pass_time(1)
    for node in net.nodes[:2]:
        assert {fields["rank"] for fields in node.told("running")} == {4, 5}
    assert net.nodes[2].told("gone") == [{"rank": 0, "text": "rank 0 was killed"}] and not net.nodes[2].accused


def test_leaf_that_comes_back_speaks_for_no_other_node(make: Callable[..., Net]) -> None:
    """It named all others while it heard no hub; one of them that is lost meanwhile stays so."""
    net = make(4)
    net.nodes[3].frozen = True
    leaf = net.nodes[2].links
    call, leaf._connections.call = leaf._connections.call, lambda *_: "No route to host"  # type: ignore[method-assign]
    for peer in leaf._peers.values():
        assert peer.link is not None
        leaf._connections.drop(peer.link)
    net.pass_time(5)
    leaf._connections.call = call  # type: ignore[method-assign]
    net.pass_time(1)
    for node in net.nodes[:2]:
        assert {fields["rank"] for fields in node.told("running")} == {4, 5}
    last = {fields["rank"]: kind for kind, fields in net.nodes[2].heard if kind in ("running", "stopped")}
    assert last == {0: "running", 1: "running", 2: "running", 3: "running", 6: "stopped", 7: "stopped"}


@pytest.mark.parametrize("hub", [0, 1])
def test_hub_that_comes_back_is_not_believed_of_nodes_that_are_heard(make: Callable[..., Net], hub: int) -> None:
    """Cut off, it named all others; what it said comes when it is reached again, to those that hear one another."""
    net = make(4)
    cut_off = net.nodes[hub]
    kept = list(cut_off.links._connections._all.values())
    # Nothing comes there, and what it says stays there.
    cut_off.frozen = True
    for connection in kept:
        connection.flush = lambda: None  # type: ignore[method-assign]
    for _ in range(25):
        cut_off.links.tick(TICK, True)
        net.pass_time(TICK)
    for connection in kept:
        del connection.flush
    cut_off.frozen = False
    net.pass_time(3)
    lost = {2 * hub, 2 * hub + 1}
    for number, node in enumerate(net.nodes):
        expected = lost if number != hub else set(range(8)) - lost
        assert {fields["rank"] for fields in node.told("stopped")} == expected, number
        assert {fields["rank"] for fields in node.told("running")} >= expected, number


def test_two_nodes_that_hear_nothing_name_each_other(make: Callable[..., Net]) -> None:
    """Each side says that the other one, or itself, is cut off."""
    net = make(2)
    for node, links in ((node, node.links) for node in net.nodes):
        # Whatever is sent is lost, and no call comes through.
        links._connections.call = lambda *_: "No route to host"  # type: ignore[method-assign]
        links._connections.send = lambda *_args, **_fields: None  # type: ignore[method-assign]
        assert not node.accused
    net.pass_time(5)
    ((first, text, _),), ((second, _, _),) = (node.accused for node in net.nodes)
    assert (first, second) == ([2, 3], [0, 1])
    assert "no word from host n1 (ranks 2-3) for 4." in text and "or this host, n0, is cut off" in text


def test_node_without_both_hubs_names_all_others(make: Callable[..., Net]) -> None:
    """What it cannot reach but through them is lost to it too."""
    net = make(4)
    net.nodes[0].frozen = net.nodes[1].frozen = net.nodes[3].frozen = True
    net.pass_time(5)
    ((ranks, text, _),) = net.nodes[2].accused
    assert sorted(ranks) == [0, 1, 2, 3, 6, 7] and "host n0 (ranks 0-1), host n1 (ranks 2-3)" in text


@pytest.mark.parametrize(("hub", "leaf"), [(0, 2), (1, 2), (0, 1)])
def test_loss_of_one_link_accuses_nobody(make: Callable[..., Net], hub: int, leaf: int) -> None:
    """While another way leads around it, and what is found travels there."""
    net = make(4)
    other = net.nodes[leaf].links
    net.cut(hub, leaf)
    net.pass_time(8)
    assert not any(node.accused for node in net.nodes)
    other.publish("gone", rank=2 * leaf, text="rank was killed")
    net.settle()
    assert all(len(node.told("gone")) == (number != leaf) for number, node in enumerate(net.nodes))


def test_second_hub_compares_where_the_first_does_not_hear_a_leaf(make: Callable[..., Net]) -> None:
    """What ranks submit goes to both hubs, and that one compares which hears all; the first again once it does."""
    net = make(4)
    leaf = net.nodes[3].links

    def leading() -> list[int]:
        return [number for number, node in enumerate(net.nodes) if node.links.leads]

    assert leading() == [0]
    call = leaf._connections.call
    refuse = lambda number, *at: call(number, *at) if number else "No route to host"  # noqa: E731
    leaf._connections.call = refuse  # type: ignore[method-assign]
    assert leaf._peers[0].link is not None
    leaf._connections.drop(leaf._peers[0].link)
    net.pass_time(5)
    assert leading() == [1]
    leaf.say("show", True, epoch=0, first=1, last=2)
    net.nodes[1].links.say("show", False, epoch=0, first=3, last=4)
    net.settle()
    assert net.nodes[1].told("show") and not net.nodes[0].accused
    assert [fields["first"] for fields in net.nodes[3].told("show")] == [3]
    leaf._connections.call = call  # type: ignore[method-assign]
    net.pass_time(1)
    assert leading() == [0]
    net.nodes[0].frozen = True
    net.pass_time(5)
    assert leading() == [0, 1]


def test_outage_of_three_seconds_accuses_nobody(make: Callable[..., Net]) -> None:
    """Whenever it begins between two beats, and though the old connection is of no use after it."""
    net = make(3)
    for begin in (TICK, 2 * TICK, 3 * TICK):
        net.pass_time(begin)
        kept = [(links, links._connections.send, links._connections.call) for links in (n.links for n in net.nodes)]
        for links, _, _ in kept:
            links._connections.call = lambda *_: "No route to host"  # type: ignore[method-assign]
            links._connections.send = lambda *_args, **_fields: None  # type: ignore[method-assign]
        net.pass_time(3)
        for links, send, call in kept:
            links._connections.call, links._connections.send = call, send  # type: ignore[method-assign]
            for peer in links._peers.values():
                if peer.link is not None:
                    # Its numbers have a gap now, as after bytes that were lost.
                    links._connections.drop(peer.link)
        net.pass_time(1)
        assert not any(node.accused for node in net.nodes)


@pytest.mark.parametrize("ticks", [1, 2])
def test_slow_links_accuse_nobody(make: Callable[..., Net], monkeypatch: pytest.MonkeyPatch, ticks: int) -> None:
    """Where every byte takes 200 or 400 ms: the links stand as soon as it can be, and go on; what is found comes."""
    under_way: list[tuple[int, Any, bytes]] = []
    now = [0]

    def flush(connection: Any) -> None:
        if connection.channel.out and not connection._connecting:
            under_way.append((now[0] + ticks, connection, bytes(connection.channel.out)))
            connection.channel.out.clear()

    monkeypatch.setattr(connections.Connection, "flush", flush)
    net = make(3, start=False)

    def pass_time(seconds: float) -> None:
        for _ in range(round(seconds / TICK)):
            now[0] += 1
            while under_way and under_way[0][0] <= now[0]:
                _, connection, data = under_way.pop(0)
                with contextlib.suppress(OSError):
                    connection.sock.sendall(data)
            net.settle()
            net.pass_time(TICK)

    for node in net.nodes:
        node.links.up()
    pass_time(10 * ticks * TICK)
    assert all(node.told("begun") == [{}] for node in net.nodes)
    links = [peer.link for node in net.nodes for peer in node.links._peers.values()]
    pass_time(12)
    assert links == [peer.link for node in net.nodes for peer in node.links._peers.values()]
    net.nodes[2].links.publish("gone", **GONE)
    pass_time(2 * ticks * TICK)
    assert [node.told("gone") for node in net.nodes] == [[GONE], [GONE], []]
    assert not any(node.accused for node in net.nodes)


def test_own_time_that_did_not_pass_accuses_nobody(make: Callable[..., Net]) -> None:
    """A watcher that was stopped itself for an hour has ticked once; what came meanwhile is heard first."""
    net = make(2)
    for _ in range(100):
        net.nodes[0].links.tick(TICK, True)
        net.settle()
    net.nodes[1].links.serve()
    net.nodes[1].links.tick(0.5, True)
    assert not net.nodes[1].accused


def test_who_is_awake_is_known_everywhere(make: Callable[..., Net]) -> None:
    """A stopped rank alone on its node counts, where one elsewhere is awake; nobody where all are stopped.

    So it is with those that wait in MPI_Finalize.
    """
    net = make(4)
    net.pass_time(1)
    assert all(node.links.awake for node in net.nodes)
    for number, node in enumerate(net.nodes):
        node.awake = number == 3
    net.pass_time(1)
    assert [node.links.awake for node in net.nodes] == [True, True, True, False]
    net.nodes[3].awake, net.nodes[2].waits = False, True
    net.pass_time(1.4)
    assert not any(node.links.awake for node in net.nodes)
    assert [node.links.waits for node in net.nodes] == [True, True, False, True]


def test_hub_stays_to_the_end_of_the_last(make: Callable[..., Net]) -> None:
    """A leaf ends at once, a hub when nobody needs it any more; nobody is accused of ending."""
    net = make(4)
    assert not net.finish(0) and not net.finish(1) and net.finish(2)
    net.pass_time(6)
    net.nodes[3].links.publish("gone", rank=6, text="late")
    net.settle()
    assert not any(node.accused for node in net.nodes)
    assert net.nodes[0].told("gone") == [{"rank": 6, "text": "late"}]
    assert net.finish(3)
    assert net.finish(0) and net.finish(1)


def test_hub_whose_leaf_is_killed_ends(make: Callable[..., Net]) -> None:
    """It waits for the goodbye of nobody who is silent."""
    net = make(3)
    net.kill(2)
    assert not net.finish(0) and not net.finish(1)
    net.pass_time(5)
    assert net.finish(0) and net.finish(1)


def test_start_that_fails_at_once_ends_all(make: Callable[..., Net]) -> None:
    """Ranks that have left before there are links: the hubs hear that from the leaves, which call for that alone."""
    net = make(4, start=False)
    assert [net.finish(number) for number in (3, 2, 1, 0)] == [True, True, False, False]
    net.pass_time(TICK)
    assert net.finish(0) and net.finish(1)


def test_node_that_ends_while_its_links_are_broken_accuses_nobody(make: Callable[..., Net]) -> None:
    """It calls once more, to say that it is over: else its silence would be taken for a loss."""
    net = make(3)
    for peer in net.nodes[2].links._peers.values():
        assert peer.link is not None
        net.nodes[2].links._connections.drop(peer.link)
    assert not net.nodes[2].links.finish() and net.finish(2)
    net.pass_time(6)
    assert not any(node.accused for node in net.nodes)
    assert not net.finish(0) and net.finish(1) and net.finish(0)


def test_loss_of_many_nodes_is_said_shortly_and_first(make: Callable[..., Net]) -> None:
    """A text that names all of them, once for each, is more than links take; the verdict comes before the rest."""
    net = make(30)
    told: list[str] = []
    for node in net.nodes[:2]:
        node.links._accuse = lambda *_: told.append("verdict")
        node.links._hear = lambda kind, _: told.append(kind)
    for node in net.nodes[2:]:
        node.frozen = True
    net.pass_time(5)
    assert told[0] == "verdict" and told.count("cut") == 4 * 28 * 2 and told.count("verdict") == 2
    texts = {said["text"] for said in net.nodes[0].links._said.values() if said["kind"] == "cut"}
    for text in texts:
        assert "host n2 (ranks 4-5)" in text and "and 20 more hosts" in text and "host n20" not in text, text


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_node_that_was_cut_off_hears_all_that_was_said_meanwhile(make: Callable[..., Net], lost: int) -> None:
    """By whom, of the others, whatever: that they hear it again is the last that they say."""
    net = make(3)
    net.pass_time(1)
    net.cut_off(lost, 0)
    net.pass_time(5)
    others = [number for number in range(3) if number != lost]
    for number in others:
        net.nodes[number].links.publish("gone", rank=2 * number, text="late")
    net.mend(0)
    net.pass_time(2)
    assert {fields["rank"] for fields in net.nodes[lost].told("gone")} == {2 * number for number in others}
    assert not any(node.networks.cut for node in net.nodes)


def test_addresses_are_tried_in_turn(make: Callable[..., Net]) -> None:
    """One that nobody can reach does not keep a node from the next."""
    net = make(2, start=False)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    net.nodes[1].links._hubs[0].insert(0, ("127.0.0.1", port))
    for node in net.nodes:
        node.links.up()
    net.pass_time(3 * TICK)
    assert all(node.told("begun") == [{}] for node in net.nodes)


def test_closed_port_ends_the_start_with_who_and_where(make: Callable[..., Net]) -> None:
    """The one that calls names the address and the reason, the other one whom it misses; both say what helps."""
    net = make(2, patience=2, start=False)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    net.nodes[1].links._hubs[0][:] = [("127.0.0.1", port)]
    net.pass_time(4)
    ((_, own, _),), ((ranks, text, phase),) = (node.accused for node in net.nodes)
    assert (ranks, phase) == ([], "start")
    said = (
        f"the watcher of host n1 cannot reach that of host n0 (ranks 0-1) at 127.0.0.1 port {port} (Connection refused)"
    )
    assert text.startswith(said), text
    assert "n0, at 127.0.0.1 port " in own and "was not reached by that of host n1 (ranks 2-3), within 2." in own
    for one in (own, text):
        assert "Open the TCP ports" in one and "BUTTER_MPI_WATCH_INTERFACE" in one and "BUTTER_MPI_WATCH=node" in one


# -- strangers ---------------------------------------------------------------------------------------------------------


def test_two_jobs_do_not_meet(make: Callable[..., Net]) -> None:
    """A node of another job at the right address is refused, and its job's start fails; this one goes on."""
    net, other = make(2), make(2, secret=bytes(32), patience=2, start=False)
    other.nodes[1].links._hubs[0][:] = [net.addresses[0]]
    for _ in range(20):
        other.pass_time(TICK)
        net.pass_time(TICK)
    assert not net.nodes[0].accused and net.nodes[0].links._peers[1].link is not None
    assert other.nodes[1].accused and not other.nodes[1].told("begun")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """Fewer strangers than a test can make."""
    monkeypatch.setattr(connections, "_MOST_STRANGERS", 64)
    monkeypatch.setattr(connections, "_MOST_BETWEEN_TICKS", 64)
    return 64


def test_silent_strangers_are_ended_and_keep_out_nobody(make: Callable[..., Net], few: int) -> None:
    """Of too many the oldest goes, each after two seconds; who knows the secret comes in between them."""
    net = make(3, start=False)
    held = [net.stranger() for _ in range(3 * few)]
    net.settle()
    assert len(net.nodes[0].links._connections._strangers) <= few + 2
    for node in net.nodes:
        node.links.up()
    net.pass_time(1)
    assert all(node.told("begun") == [{}] for node in net.nodes)
    net.pass_time(3)
    assert not net.nodes[0].links._connections._strangers
    assert all(sock.recv(1) == b"" for sock in held)
    assert not any(node.accused for node in net.nodes)


def test_flood_does_not_keep_a_watcher_from_its_work(make: Callable[..., Net], few: int) -> None:
    """In one turn it takes in one, and no more between two ticks than it may."""
    net = make(2)
    held = [net.stranger() for _ in range(4 * few)]
    taken = 0
    while select.select([net.nodes[0].links.fileno()], [], [], 0.05)[0]:
        net.nodes[0].links.serve()
        taken += 1
        assert taken < 5000
    assert net.nodes[0].links._connections._allowed == 0
    net.nodes[1].links.publish("gone", rank=2, text="in the flood")
    net.settle()
    assert net.nodes[0].told("gone") and len(held) == 4 * few


@pytest.mark.parametrize("kind", ["cut", "gone", "notice", "hears"])
def test_odd_numbers_of_an_authenticated_peer_are_left_alone(make: Callable[..., Net], kind: str) -> None:
    """A node that does not exist, or speaks for another one's ranks, is no fault and no crash."""
    net = make(3)
    odd: dict[str, dict[str, Any]] = {
        "cut": {"origin": 2, "serial": 1, "node": 99, "text": ""},
        "gone": {"origin": 2, "serial": 1, "rank": 0, "text": ""},
        "notice": {"origin": -1, "serial": 1, "epoch": 0, "notice": {}},
        "hears": {"node": -7},
    }
    net.nodes[2].links._send_all(kind, **odd[kind])
    net.pass_time(1)
    assert all(not node.told("stopped") and not node.told("gone") and not node.told("notice") for node in net.nodes)


def _garbage(chance: random.Random, net: Net, recorded: bytes) -> bytes:
    """What a stranger may send: noise, or pieces of what was once heard, changed or not."""
    noise = chance.randbytes(chance.randrange(1, 300))
    piece = recorded[chance.randrange(len(recorded)) :]
    return chance.choice([noise, piece, piece + noise, recorded, recorded[:86] + noise, recorded[:86]])


def test_whatever_strangers_send_changes_nothing(make: Callable[..., Net]) -> None:
    """Seeded: noise, replays and pieces of them, to both hubs, and to a node that calls a stranger.

    For as long as BUTTER_MPI_TEST_FUZZ_SECONDS says.
    """
    net = make(3)
    calling = net.nodes[2].links._channel(0)
    recorded = bytes(calling.out) + bytes(range(256)) * 4
    chance, end, turns = random.Random(1), time.monotonic() + FUZZ_SECONDS, 0
    with listener() as trap:
        # Node 2 calls a stranger whenever it looks for hub 1 anew.
        net.nodes[2].links._hubs[1].append(trap.getsockname())
        while time.monotonic() < end or turns < 10:
            turns += 1
            link = net.nodes[2].links._peers[1].link
            if turns % 4 == 0 and link is not None:
                net.nodes[2].links._connections.drop(link)
            for hub in (0, 1):
                with net.stranger(hub) as sock, contextlib.suppress(OSError):
                    sock.sendall(_garbage(chance, net, recorded))
                    net.settle()
                    sock.settimeout(0)
                    assert len(sock.recv(4096)) in (0, 32)
            with contextlib.suppress(BlockingIOError):
                called, _ = trap.accept()
                with called, contextlib.suppress(OSError):
                    called.sendall(_garbage(chance, net, recorded))
                    net.settle()
            net.pass_time(TICK)
    net.pass_time(1)
    assert not any(node.accused or node.told("gone") or node.told("stopped") for node in net.nodes)
    net.nodes[2].links.publish("gone", **GONE)
    net.settle()
    assert [node.told("gone") for node in net.nodes] == [[GONE], [GONE], []]
