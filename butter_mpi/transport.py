"""The transport that a job requires, and what NCCL's log says of the one it chose."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from butter_mpi.findings import Finding, grouped, quoted, ranks_text

__all__ = ["Connections", "Link", "chosen", "judge", "judge_host", "read_log"]

_NO_RANK = -1
"""The peer of a channel that ends in the network itself (CollNet: the switches reduce)."""

_LINE_OF = re.compile(r":(?P<pid>\d+):-?\d+(?: \[-?\d+\])?$")
_NETWORK = re.compile(r"Using network (?P<net>.+)")
_CHANNEL = re.compile(
    r"Channel \d+(?:/\d+)? : (?P<src>\d+)\[[0-9a-f]+\] -> (?P<dst>\d+)\[[0-9a-f]+\]"
    r"(?: \[(?P<direction>send|receive)\])? via (?P<via>(?P<kind>NET/[^/]+|(?!NET/)[^/]+)/.+)"
)
_COLLNET = re.compile(r"CollNet \d+/\d+ : \d+ \[(?P<direction>send|receive)\] via (?P<via>(?P<kind>COLLNET/[^/]+)/.+)")
_OF_ONE_CHANNEL = re.compile(r"/-?\d+\[[0-9a-f]+\]|(?<=\d)\(\d+\)|/flush=\w+")
"""Parts of a channel's route that name a rank or a channel, not a kind: an intermediate GPU, another rank's proxy."""

_LOOK_AT = {
    "NET/IB": (
        "look at NCCL_IB_HCA, NCCL_IB_DISABLE, NCCL_NET, NCCL_NET_PLUGIN (none: no plug-in in place of the built-in "
        "provider) and the devices on those hosts (ibv_devinfo); with NCCL_NET=IB, NCCL itself takes nothing else"
    ),
    "NET/Socket": (
        "look at NCCL_NET (Socket: nothing else) and NCCL_NET_PLUGIN, and at NCCL_SOCKET_IFNAME for the interface"
    ),
    "P2P": (
        "look at NCCL_P2P_DISABLE, NCCL_P2P_LEVEL and NCCL_HOSTID, at the links between the GPUs (nvidia-smi topo -m), "
        "and at what a container keeps apart (IPC, /dev/shm)"
    ),
    "SHM": (
        "look at NCCL_SHM_DISABLE, NCCL_HOSTID and /dev/shm; NCCL takes SHM only where P2P is not to be had "
        "(NCCL_P2P_DISABLE=1)"
    ),
}
_TO_TELL = (
    "leave NCCL_DEBUG, NCCL_DEBUG_FILE and NCCL_DEBUG_SUBSYS unset, so that butter_mpi reads NCCL's log itself; "
    "or leave require_transport (BUTTER_MPI_REQUIRE_TRANSPORT) out"
)


@dataclass(frozen=True, slots=True)
class Link:
    """The channels of one kind that a rank has.

    Parameters
    ----------
    kind : str
        ``"P2P"``, ``"SHM"``, ``"NET/IB"``, ``"NET/Socket"``, or ``"NET/"`` or ``"COLLNET/"`` and a plug-in's name.
    peers : tuple of int
        The ranks at their other ends; -1 for the network itself.
    sends, receives : int
        Lines about sending and about receiving. NCCL logs P2P and SHM only where it sends.
    via : tuple of str
        The different routes as NCCL writes them, for example ``"P2P/CUMEM/read"`` or ``"NET/IB/0/GDRDMA"``.
    """

    kind: str
    peers: tuple[int, ...]
    sends: int
    receives: int
    via: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Connections:
    """What NCCL's log says of the connections of one process.

    Parameters
    ----------
    networks : tuple of str
        Every X of a line "Using network X", which NCCL also writes where no channel uses X.
    ranks : tuple of int
        The rank that the process has in its channels; more than one where several communicators wrote.
    links : tuple of Link
        One a kind.
    hindrance : str
        Why the log says nothing, where that is known.
    """

    networks: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    links: tuple[Link, ...] = ()
    hindrance: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return what this rank sends to all: plain values, as they come back from JSON.

        Returns
        -------
        dict
            ``networks``, ``ranks``, ``hindrance``, and ``links`` by kind: ``peers``, ``sends``, ``receives``, ``via``.
        """
        links = {
            link.kind: {
                "peers": list(link.peers),
                "sends": link.sends,
                "receives": link.receives,
                "via": list(link.via),
            }
            for link in self.links
        }
        return {
            "networks": list(self.networks),
            "ranks": list(self.ranks),
            "hindrance": self.hindrance,
            "links": links,
        }


_NOTHING = Connections().as_dict()


@dataclass(frozen=True, slots=True)
class _Channel:
    kind: str
    rank: int
    peer: int
    receives: bool
    via: str


def _messages(text: str, pid: int) -> Iterator[str]:
    """Yield what a process said at level INFO; a last line without its end may be half of another word."""
    for line in text.split("\n")[:-1]:
        head, separator, message = line.partition(" NCCL INFO ")
        found = _LINE_OF.search(head) if separator else None
        if found and int(found["pid"]) == pid:
            yield message


def _channel(message: str) -> _Channel | None:
    if found := _CHANNEL.fullmatch(message):
        receives = found["direction"] == "receive"
        ends = int(found["src"]), int(found["dst"])
        rank, peer = reversed(ends) if receives else ends
    elif found := _COLLNET.fullmatch(message):
        receives, rank, peer = found["direction"] == "receive", _NO_RANK, _NO_RANK
    else:
        return None
    return _Channel(found["kind"], rank, peer, receives, _OF_ONE_CHANNEL.sub("", found["via"]))


def _link(kind: str, channels: Sequence[_Channel]) -> Link:
    peers, via = sorted({c.peer for c in channels}), sorted({c.via for c in channels})
    receives = sum(c.receives for c in channels)
    return Link(kind, tuple(peers), len(channels) - receives, receives, tuple(via))


def read_log(text: str, pid: int) -> Connections:
    """Return what a stretch of NCCL's log says of the connections of a process.

    Lines of other processes, other levels and other packages do not count, nor does a last line without its end. A
    line names no communicator: pass only what was written since the one in question was begun.

    Parameters
    ----------
    text : str
        The stretch.
    pid : int
        The process, as NCCL writes it.

    Returns
    -------
    Connections
        Networks in the order of the log, kinds in alphabetical order.
    """
    networks: dict[str, None] = {}
    channels: dict[str, list[_Channel]] = {}
    for message in _messages(text, pid):
        if network := _NETWORK.fullmatch(message):
            networks[network["net"]] = None
        elif channel := _channel(message):
            channels.setdefault(channel.kind, []).append(channel)
    ranks = {c.rank for found in channels.values() for c in found} - {_NO_RANK}
    links = tuple(_link(kind, found) for kind, found in sorted(channels.items()))
    return Connections(tuple(networks), tuple(sorted(ranks)), links)


def _ends(said: Sequence[Mapping[str, Any]]) -> list[set[tuple[int, str]]]:
    """Return each rank's (peer, kind), also of the channels that only the rank at the other end logged."""
    ends: list[set[tuple[int, str]]] = [set() for _ in said]
    for rank, own in enumerate(said):
        for kind, link in own["links"].items():
            for peer in link["peers"]:
                ends[rank].add((peer, kind))
                if peer != _NO_RANK:
                    ends[peer].add((rank, kind))
    return ends


def chosen(said: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return which kinds of transport are in use, for a receipt.

    Parameters
    ----------
    said : sequence of mapping
        :meth:`Connections.as_dict` of each rank, in rank order.

    Returns
    -------
    dict of str to list of int
        By kind, the ranks that have a channel of it, whichever end logged it; a log that cannot be judged is left out.
    """
    judged = [_NOTHING if _untold(rank, own, len(said)) else own for rank, own in enumerate(said)]
    found: dict[str, list[int]] = {}
    for rank, ends in enumerate(_ends(judged)):
        for kind in sorted({kind for _, kind in ends}):
            found.setdefault(kind, []).append(rank)
    return dict(sorted(found.items()))


def _untold(rank: int, own: Mapping[str, Any], world_size: int) -> str:
    """Return why a rank's log cannot be judged, or nothing."""
    if own["hindrance"]:
        return str(own["hindrance"])
    if not own["links"]:
        return "no channel is named in NCCL's log"
    ranks = set(own["ranks"]) | {peer for link in own["links"].values() for peer in link["peers"]}
    if set(own["ranks"]) - {rank} or max(ranks) >= world_size:
        return f"the channels of another communicator ({ranks_text(ranks - {_NO_RANK})}) are in NCCL's log"
    return ""


def _outside(rank: int, ends: set[tuple[int, str]], nodes: Sequence[str]) -> set[str]:
    """Return the kinds by which a rank reaches what NCCL takes for another host."""
    networks = ("NET/", "COLLNET/")
    return {kind for peer, kind in ends if kind.startswith(networks) or nodes[peer] != nodes[rank]}


def _inside(rank: int, ends: set[tuple[int, str]], nodes: Sequence[str]) -> set[str]:
    """Return the kinds by which a rank reaches other ranks of its node."""
    return {kind for peer, kind in ends if peer not in (_NO_RANK, rank) and nodes[peer] == nodes[rank]}


def _kinds(kinds: set[str], nothing: str) -> str:
    return " and ".join(sorted(kinds)) or nothing


def _net_finding(required: str, said: Sequence[Mapping[str, Any]], nodes: Sequence[str]) -> Finding | None:
    network = required.removeprefix("NET/")
    kinds = [_outside(rank, ends, nodes) for rank, ends in enumerate(_ends(said))]
    must_reach = len(set(nodes)) == len(nodes) or not any(kinds)
    told, wrong = [], []
    for rank, found in enumerate(kinds):
        inside = _kinds(_inside(rank, _ends(said)[rank], nodes), "nothing")
        text = _kinds(found, f"no channel to another node ({inside} inside its node)")
        unnamed = found == {required} and network not in said[rank]["networks"]
        if unnamed:
            named = " and ".join(map(quoted, said[rank]["networks"])) or "none"
            text = f'{required} (but as network in use {named}, not "{network}")'
        told.append((rank, text))
        if unnamed or found - {required} or (must_reach and not found):
            wrong.append(rank)
    return _differ(f"transport {required} is required between nodes", required, told, wrong)


def _node_finding(required: str, said: Sequence[Mapping[str, Any]], nodes: Sequence[str]) -> Finding | None:
    kinds = [_inside(rank, ends, nodes) for rank, ends in enumerate(_ends(said))]
    told = [(rank, _kinds(found, "no channel to a rank of its node")) for rank, found in enumerate(kinds)]
    wrong = [rank for rank, found in enumerate(kinds) if found != {required}]
    return _differ(f"transport {required} is required inside a node", required, told, wrong)


def _differ(what: str, required: str, told: list[tuple[int, str]], wrong: list[int]) -> Finding | None:
    if not wrong:
        return None
    text = f"{what}; NCCL's log names {grouped(told)}"
    return Finding("transport", "differ", "error", text, _LOOK_AT[required], tuple(wrong))


def judge(required: str | None, said: Sequence[Mapping[str, Any]], nodes: Sequence[str]) -> Finding | None:
    """Return the finding about a required transport, from what every rank's log says.

    A network (``NET/x``): every channel to another node must be of that kind, and its rank must also have the line
    "Using network x". With one rank a node every rank must have such a channel; with several, at least one rank.
    A channel by way of a network counts as one to another node also between ranks of one node: NCCL takes them for two
    hosts (each has its own ``NCCL_HOSTID``), or has no other way between them, and its data goes over that network.
    Names are compared whole: neither ``NET/Socket`` nor a plug-in's ``NET/IBext_v8`` is ``NET/IB``.

    ``P2P`` and ``SHM``: every rank must have a channel of that kind to a rank of its node, and none of another kind to
    such a rank, a network included. NCCL logs these where it sends; the receiving rank counts as having them too.

    A rank whose log names no channel cannot be judged, and that is an error, as is a log in which another communicator
    wrote at the same time. NVLink SHARP (NVLS) is never named and does not count.

    Parameters
    ----------
    required : str or None
        What was asked for.
    said : sequence of mapping
        :meth:`Connections.as_dict` of each rank, in rank order.
    nodes : sequence of str
        The name of each rank's node.

    Returns
    -------
    Finding or None
        Nothing where nothing is required or all is as required; else an error.
    """
    if required is None:
        return None
    untold = [(rank, why) for rank, own in enumerate(said) if (why := _untold(rank, own, len(said)))]
    if untold:
        text = f"transport {required} is required, and cannot be verified: {grouped(untold)}"
        return Finding("transport", "cannot tell", "error", text, _TO_TELL, tuple(rank for rank, _ in untold))
    rule = _net_finding if required.startswith("NET/") else _node_finding
    return rule(required, said, nodes)


def judge_host(required: str | None, plane: str) -> Finding | None:
    """Return the finding about a required transport on a plane that has no NCCL.

    Parameters
    ----------
    required : str or None
        What was asked for.
    plane : {"host", "solo"}
        The data plane.

    Returns
    -------
    Finding or None
        Nothing where nothing is required; else an error, because a transport that nothing chose cannot be verified.
    """
    if required is None:
        return None
    why = "there is one rank and no transport" if plane == "solo" else "MPI carries the data"
    return Finding(
        "transport",
        "cannot tell",
        "error",
        f"transport {required} is required, and cannot be verified on plane {plane}: {why}",
        'run on GPUs with plane "nccl", or leave require_transport (BUTTER_MPI_REQUIRE_TRANSPORT) out',
    )
