"""Where watchers of several nodes listen, and what ranks bring so that they find one another."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from butter_mpi.sentinel import door
from butter_mpi.sentinel.door import Door, leaders, networks

ROWS: list[dict[str, Any]] = [
    {"name": "lo", "up": True, "addresses": ["127.0.0.1", "::1"]},
    {"name": "docker0", "up": True, "addresses": ["172.17.0.1"]},
    {"name": "eth0", "up": True, "addresses": ["10.0.0.7", "fe80::1"]},
    {"name": "ib0", "up": True, "addresses": ["10.1.0.7", "fd00::7"]},
    {"name": "eth1", "up": False, "addresses": ["10.2.0.7"]},
    {"name": "usb0", "up": True, "addresses": ["169.254.1.1"]},
]


@pytest.mark.parametrize(
    ("names", "data", "named", "found"),
    [
        (None, None, ["10.0.0.7"], [("", ["10.0.0.7"])]),
        (None, None, ["127.0.1.1"], [("", ["10.0.0.7", "10.1.0.7", "fd00::7"])]),
        (None, None, ["203.0.113.9"], [("", ["10.0.0.7", "10.1.0.7", "fd00::7"])]),
        (None, None, [], [("", ["10.0.0.7", "10.1.0.7", "fd00::7"])]),
        (None, "ib0", ["10.0.0.7"], [("", ["10.0.0.7"]), ("ib0", ["10.1.0.7", "fd00::7"])]),
        (None, "ib0", [], [("", ["10.0.0.7", "10.1.0.7", "fd00::7"]), ("ib0", ["10.1.0.7", "fd00::7"])]),
        (None, "lo", ["10.0.0.7"], [("", ["10.0.0.7"])]),
        (None, "hsn0", ["10.0.0.7"], [("", ["10.0.0.7"])]),
        (None, "eth0", ["10.0.0.7"], [("", ["10.0.0.7"])]),
        (None, "eth1", ["10.0.0.7"], [("", ["10.0.0.7"])]),
        ("ib0,eth0,ib0", "lo", ["10.0.0.7"], [("ib0", ["10.1.0.7", "fd00::7"]), ("eth0", ["10.0.0.7"])]),
        ("eth0,hsn0|ib0|lo", None, [], [("eth0", ["10.0.0.7"]), ("ib0", ["10.1.0.7", "fd00::7"])]),
        ("eth0|ib0,hsn0|eth0", None, [], [("eth0", ["10.0.0.7"])]),
        ("hsn0|usb0,ib0", None, [], [("hsn0|usb0", []), ("ib0", ["10.1.0.7", "fd00::7"])]),
        ("eth1", None, ["10.0.0.7"], [("eth1", [])]),
        ("lo", None, [], [("lo", ["127.0.0.1", "::1"])]),
    ],
)
def test_networks(
    monkeypatch: pytest.MonkeyPatch,
    names: str | None,
    data: str | None,
    named: list[str],
    found: list[tuple[str, list[str]]],
) -> None:
    """Those that are named; else that of the host's name, where others can use it, or all; and that of the data."""
    monkeypatch.setattr(door, "interfaces", lambda: ROWS)
    monkeypatch.setattr(door, "_named", lambda: named)
    monkeypatch.setattr(door, "_own", lambda address: any(address in row["addresses"] for row in ROWS))
    assert networks(names, data) == found


def test_machine_without_a_network_has_its_inner_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several nodes of one machine (containers, say) meet there."""
    monkeypatch.setattr(door, "interfaces", lambda: ROWS[:2])
    monkeypatch.setattr(door, "_named", lambda: ["127.0.1.1"])
    assert networks(None) == [("", ["127.0.0.1", "::1", "172.17.0.1"])]


def test_own_address_is_known() -> None:
    """By the kernel, which listens on no other."""
    assert door._own("127.0.0.1") and not door._own("203.0.113.9")


OFFERS = [
    {"node": node, "unable": unable} for node, unable in (("a", "no"), ("b", ""), ("a", ""), ("c", ""), ("c", ""))
]


@pytest.fixture
def doors() -> Iterator[Callable[..., list[Door]]]:
    """Make the doors of all ranks, and close them."""
    made: list[Door] = []

    def make(offers: list[dict[str, str]], names: str | None = "lo") -> list[Door]:
        made.extend(Door(offers, rank, names, lambda: None, 60) for rank in range(len(offers)))
        return made

    yield make
    for one in made:
        one.close()


def test_first_that_is_able_leads_its_node() -> None:
    """So it is for the watcher's start too."""
    assert leaders(OFFERS) == {"a": 2, "b": 1, "c": 3}


def test_only_the_first_two_nodes_listen_and_only_rank_0_makes_the_secret(
    doors: Callable[..., list[Door]],
) -> None:
    """What all bring makes what each watcher is told; the secret is a new one each time."""
    every = doors(OFFERS)
    said: list[dict[str, Any]] = [json.loads(one.payload()) for one in every]
    assert [bool(one.get("at")) for one in said] == [False, True, True, False, False]
    assert ["secret" in one for one in said] == [True, False, False, False, False] and len(said[0]["secret"]) == 64
    assert json.loads(every[0].payload())["secret"] != said[0]["secret"]
    assert not any(one.refusal(said) for one in every)
    configs = [one.config(said) for one in every]
    assert [one["me"] for one in configs] == [0, 1, 0, 2, 2]
    assert [ranks for _, ranks in configs[4]["nodes"]] == [[0, 2], [1], [3, 4]]
    assert all(one["patience"] == 30 and [each["network"] for each in one["networks"]] == ["lo"] for one in configs)
    assert all(one["networks"][0]["hubs"] == [said[2]["at"][0][1], said[1]["at"][0][1]] for one in configs)
    assert [len(one["networks"][0]["listeners"]) for one in configs] == [0, 2, 2, 0, 0]
    for address, port in said[2]["at"][0][1]:
        socket.create_connection((address, port), timeout=5).close()


def test_job_of_one_node_opens_nothing(doors: Callable[..., list[Door]]) -> None:
    """It needs no network at all."""
    (one,) = doors([{"node": "a", "unable": ""}], None)
    assert not one.needed and json.loads(one.payload())["at"] == []


def test_where_a_hub_cannot_listen_all_say_so(doors: Callable[..., list[Door]]) -> None:
    """With the interfaces that there are, and what helps."""
    every = doors(OFFERS, "lo,hsn7")
    said = [json.loads(one.payload()) for one in every]
    for one in every:
        refusal = one.refusal(said)
        assert "rank 1: hsn7 of watch_interface=lo,hsn7 has no address; there are lo (127.0.0.1" in refusal
        assert "rank 2: " in refusal and "rank 3: " not in refusal
        assert "Name interfaces that these hosts have" in refusal and "Open" not in refusal


def test_interface_that_is_down_is_said_to_be(
    monkeypatch: pytest.MonkeyPatch, doors: Callable[..., list[Door]]
) -> None:
    """Its address is there, and nobody reaches it."""
    monkeypatch.setattr(door, "interfaces", lambda: ROWS)
    said = json.loads(doors(OFFERS, "eth1")[2].payload())
    assert "eth1 of watch_interface=eth1 has no address; there are lo" in said["failure"]
    assert "ib0 (10.1.0.7, fd00::7), eth1 (10.2.0.7, down), usb0" in said["failure"]


def test_further_networks_have_secrets_and_listeners_of_their_own(
    monkeypatch: pytest.MonkeyPatch, doors: Callable[..., list[Door]]
) -> None:
    """A network that only one of the first two hosts has for its data is none; one that is named must be on both."""
    rows = [{"name": name, "up": True, "addresses": [f"127.0.0.{end}"]} for name, end in (("a0", 2), ("b0", 3))]
    monkeypatch.setattr(door, "interfaces", lambda: rows)
    every = doors(OFFERS, "a0,b0")
    said = [json.loads(one.payload()) for one in every]
    (first, second) = every[2].config(said)["networks"]
    assert [first["network"], second["network"]] == ["a0", "b0"] and first["secret"] != second["secret"]
    assert [at for (at,) in second["hubs"]] == [said[2]["at"][1][1][0], said[1]["at"][1][1][0]]
    (listener,) = second["listeners"]
    with socket.socket(fileno=os.dup(listener)) as own:
        assert own.getsockname()[0] == "127.0.0.3"
    said[1] |= {"names": "a0", "at": said[1]["at"][:1]}
    refusal = every[0].refusal(said)
    assert "names more networks on one host than on another: a0,b0 on rank 2, a0 on rank 1. Name as many" in refusal
    said[1]["names"] = said[2]["names"] = None
    assert not every[0].refusal(said) and len(every[4].config(said)["networks"]) == 1


@pytest.mark.parametrize(
    ("first", "second", "refused"),
    [
        ("a0,b0", "b0,c0", False),
        ("a0,b0", "a0|b0,a0", True),
        ("a0,b0,a0", "a0,b0,c0", True),
        ("a0,a0", "a0", False),
        (None, "a0", False),
        (None, "a0,b0", True),
    ],
)
def test_first_two_hosts_name_as_many_networks(
    monkeypatch: pytest.MonkeyPatch,
    doors: Callable[..., list[Door]],
    first: str | None,
    second: str,
    refused: bool,
) -> None:
    """One that is named twice is one; what only one of them has by default is not watched."""
    rows = [{"name": f"{name}0", "up": True, "addresses": [f"127.0.0.{end}"]} for end, name in enumerate("abc", 2)]
    monkeypatch.setattr(door, "interfaces", lambda: rows)
    monkeypatch.setattr(door, "_named", list)
    offers = [{"node": node, "unable": ""} for node in "ab"]
    said = [json.loads(doors(offers, names)[-2:][rank].payload()) for rank, names in enumerate((first, second))]
    assert bool(doors(offers)[0].refusal(said)) == refused
