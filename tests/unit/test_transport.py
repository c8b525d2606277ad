"""What NCCL's log says of connections, read from every form of its lines, and the rule for each required transport."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from butter_mpi.settings import TRANSPORTS
from butter_mpi.transport import Connections, Link, chosen, judge, judge_host, read_log

PID = 4711

OTHER_LINES = """
Bootstrap : Using eth0:192.0.2.2<0>
Bootstrap: Using eth0:192.0.2.2<0>
NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
NET/IB : Using ; OOB eth0:10.0.0.1<0>
NET/IB : No device found.
NET/Socket : Using [0]eth0:192.0.2.2<0> [1]eth1:10.1.1.1<0>
Assigned NET plugin Socket to comm
Initialized NET plugin IB
Connected all rings
Connected all rings, use ring PXN 0 GDR 1
Connected all trees
Connected binomial trees
NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 24)
No transport found for rank 0[1b000] -> rank 1[1c000]
comm 0x55d0 rank 0 nranks 2 cudaDev 0 busId 1b000 commId 0xabc123 - Init COMPLETE
[Rank 1] ncclCommInitRankConfig comm 0x55d0 rank 1 nranks 2 cudaDev 0 nvmlDev 3 busId 1b000 commId 0xabc123 - Init START
ncclCommSplit comm 0x1 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1b000 parent 0x2 splitCount 1 color 0 key 0- Init START
AllReduce: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1} cgaClusterSize 4
NCCL_NET set by environment to IB.
""".strip().splitlines()
"""Lines of NCCL 2.18 to 2.32 that say nothing of a connection, though some name a network."""

CHANNELS = [
    ("Channel 03/0 : 0[1b000] -> 1[1c000] via P2P/CUMEM/read", 0, "P2P", 1, "send", "P2P/CUMEM/read"),
    ("Channel 00/1 : 0[0] -> 1[1] via P2P/MNNVL/CE", 0, "P2P", 1, "send", "P2P/MNNVL/CE"),
    ("Channel 00/0 : 0[0] -> 1[1] via P2P/direct pointer/read", 0, "P2P", 1, "send", "P2P/direct pointer/read"),
    ("Channel 12/0 : 7[7] -> 0[0] via P2P/IPC", 7, "P2P", 0, "send", "P2P/IPC"),
    ("Channel 00/1 : 0[0] -> 5[5] via P2P/indirect/4[4]", 0, "P2P", 5, "send", "P2P/indirect"),
    ("Channel 01 : 0[0] -> 1[1] via SHM/direct/CE", 0, "SHM", 1, "send", "SHM/direct/CE"),
    ("Channel 01 : 0[0] -> 1[0] via SHM/direct", 0, "SHM", 1, "send", "SHM/direct"),
    (
        "Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA(PCI)/Shared",
        *(0, "NET/IB", 1, "send", "NET/IB/0/GDRDMA(PCI)/Shared"),
    ),
    (
        "Channel 00/0 : 0[0] -> 1[0] [send] via NET/IBext_v8/3(2)/GDRDMA",
        *(0, "NET/IBext_v8", 1, "send", "NET/IBext_v8/3/GDRDMA"),
    ),
    ("Channel 01/0 : 1[0] -> 0[0] [receive] via NET/Socket/0", 0, "NET/Socket", 1, "receive", "NET/Socket/0"),
    (
        "Channel 01/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA/flush=Always",
        *(0, "NET/IB", 1, "receive", "NET/IB/0/GDRDMA"),
    ),
    (
        "Channel 02/0 : 9[1] -> 3[3] [receive] via NET/AWS Libfabric/2/GDRDMA",
        *(3, "NET/AWS Libfabric", 9, "receive", "NET/AWS Libfabric/2/GDRDMA"),
    ),
]
"""Lines of NCCL 2.18 to 2.32 with the rank that writes one, and what it says."""


def log(*messages: str, pid: int = PID) -> str:
    """Return a log in which a process says these messages."""
    return "".join(f"n01:{pid}:{pid + 1} [0] NCCL INFO {message}\n" for message in messages)


def channel(rank: int, peer: int, kind: str) -> str:
    """Return a channel line that a rank writes."""
    direction = "[send] " if kind.startswith("NET/") else ""
    return f"Channel 00/0 : {rank}[0] -> {peer}[0] {direction}via {kind}/0"


def said(*links: tuple[int, int, str], size: int, networks: Sequence[str] = ("IB", "Socket")) -> list[dict[str, Any]]:
    """Return what each rank says when the links (rank, peer, kind) are written; networks are named by all."""
    named = [f"Using network {net}" for net in networks]
    lines = [[channel(*link) for link in links if link[0] == rank] for rank in range(size)]
    return [json.loads(json.dumps(read_log(log(*named, *own), PID).as_dict())) for own in lines]


def both_ways(kind: str, *pairs: tuple[int, int]) -> list[tuple[int, int, str]]:
    """Return links from each to the other."""
    return [(a, b, kind) for pair in pairs for a, b in (pair, pair[::-1])]


def told(required: str, ranks: list[dict[str, Any]], nodes: str) -> tuple[str, str, tuple[int, ...]]:
    """Return outcome, message and ranks of the error that is found; one letter of ``nodes`` a rank."""
    finding = judge(required, ranks, list(nodes))
    assert finding is not None and finding.severity == "error" and finding.remedy
    return finding.outcome, finding.message, finding.ranks


@pytest.mark.parametrize(("line", "rank", "kind", "peer", "direction", "via"), CHANNELS)
def test_every_form_of_a_channel_is_read(line: str, rank: int, kind: str, peer: int, direction: str, via: str) -> None:
    """Own rank, other end, kind, direction and route, without what names an intermediate rank."""
    sends = int(direction == "send")
    assert read_log(log(line), PID) == Connections((), (rank,), (Link(kind, (peer,), sends, 1 - sends, (via,)),))


@pytest.mark.parametrize(("line", "rank", "kind"), [case[:3] for case in CHANNELS])
def test_half_a_line_is_no_channel_of_another_kind(line: str, rank: int, kind: str) -> None:
    """Wherever a line is cut, it names its own kind or none; a last line without its end does not count at all."""
    for cut in range(len(line) + 1):
        assert read_log(log(line[:cut]), PID).as_dict()["links"].keys() <= {kind}
        assert not read_log(log(line)[: -1 - cut], PID).links


def test_collnet_is_a_channel_into_the_network() -> None:
    """Its line names no other rank."""
    link = Link("COLLNET/SHARP", (-1,), 1, 0, ("COLLNET/SHARP/0/GDRDMA",))
    assert read_log(log("CollNet 00/0 : 3 [send] via COLLNET/SHARP/0/GDRDMA"), PID) == Connections((), (), (link,))


def test_networks_are_named_whole_and_once() -> None:
    """Names may have blanks, and come in the order of the log."""
    text = log("Using network AWS Libfabric", "Using network IB", "Using network AWS Libfabric")
    assert read_log(text, PID).networks == ("AWS Libfabric", "IB")


@pytest.mark.parametrize("line", OTHER_LINES)
def test_other_lines_say_nothing(line: str) -> None:
    """A network that is there is not one in use."""
    assert read_log(log(line), PID) == Connections()


@pytest.mark.parametrize(
    "form",
    [
        "n01:{pid}:4712 [0] NCCL INFO {message}",
        "n01:{pid}:{pid} [32767] NCCL INFO {message}",
        "n01:{pid}:-1 [-1] NCCL INFO {message}",
        "[2026-11-29 12:33:51] n01:{pid}:4712 [0] NCCL INFO {message}",
        "12:33:51 n01:{pid}:4712 [0] NCCL INFO {message}",
    ],
)
def test_every_form_of_a_prefix_is_read(form: str) -> None:
    """Devices may be rubbish, and times in any format stand before a line."""
    text = "\n" + form.format(pid=PID, message="Using network IB") + "\n"
    assert read_log(text, PID).networks == ("IB",)


@pytest.mark.parametrize(
    "text",
    [
        log("Using network IB", "Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0", pid=PID + 1),
        f"n01:{PID}:4712 [0] init.cc:45 (ncclInit) NCCL WARN Using network IB\n",
        f"n01:{PID}:4712 NCCL CALL Using network IB\n",
        f"n01:{PID}:4712 [0] 0.1 ncclInit:12 NCCL TRACE Using network IB\n",
        "Using network IB\nChannel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0\n",
        f"2026 INFO trainer {PID}: NCCL INFO Using network IB\n",
        log("Using network IB").rstrip("\n"),
        log("The Channel 00/0 : 0[0] -> 1[0] via P2P/CUMEM", "Channel 00/0 : 0[0] -> 1[0] via \0\0"),
        "",
    ],
)
def test_foreign_lines_do_not_count(text: str) -> None:
    """Another process, another level, another package, a line without its end."""
    assert read_log(text, PID) == Connections()


@given(st.text())
def test_no_text_is_an_error(text: str) -> None:
    """Whatever a file holds, it can be read."""
    assert read_log(text + "\n" + log("Using network IB"), PID).networks[-1:] == ("IB",)


def test_many_channels_make_few_words() -> None:
    """What is sent to all has a kind once, with its peers and counts."""
    lines = [f"Channel {c:02}/0 : 2[2] -> {p}[{p}] via P2P/CUMEM" for c in range(24) for p in (1, 3)]
    lines += [f"Channel {c:02}/0 : 9[1] -> 2[2] [receive] via NET/IB/{c % 2}/GDRDMA" for c in range(24)]
    connections = read_log(log("Using network IB", *lines), PID)
    assert connections.as_dict() == {
        "networks": ["IB"],
        "ranks": [2],
        "hindrance": "",
        "links": {
            "NET/IB": {"peers": [9], "sends": 0, "receives": 24, "via": ["NET/IB/0/GDRDMA", "NET/IB/1/GDRDMA"]},
            "P2P": {"peers": [1, 3], "sends": 48, "receives": 0, "via": ["P2P/CUMEM"]},
        },
    }
    assert json.loads(json.dumps(connections.as_dict())) == connections.as_dict()


def test_chosen_names_ranks_at_either_end() -> None:
    """P2P is written by the sender alone; a rank that told nothing is not guessed at."""
    ranks = said((0, 1, "P2P"), *both_ways("NET/IB", (1, 2)), size=4)
    ranks[0]["links"] |= {"SHM": {"peers": [9], "sends": 1, "receives": 0, "via": ["SHM/direct"]}}
    assert chosen(ranks) == {"NET/IB": [1, 2]}
    del ranks[0]["links"]["SHM"]
    assert list(chosen(ranks).items()) == [("NET/IB", [1, 2]), ("P2P", [0, 1])]


RING = [(0, 1, "P2P"), *both_ways("NET/IB", (1, 2)), (2, 3, "P2P"), *both_ways("NET/IB", (3, 0))]

AS_REQUIRED = {
    "one rank a node": ("NET/IB", both_ways("NET/IB", (0, 1), (1, 2), (2, 0)), "abc"),
    "several ranks a node": ("NET/IB", RING, "aabb"),
    "a rank that only reaches its node": ("NET/IB", [*both_ways("P2P", (0, 1)), *both_ways("NET/IB", (1, 2))], "aab"),
    "shared memory beside it": ("NET/IB", [*both_ways("SHM", (0, 1)), *both_ways("NET/IB", (1, 2))], "aab"),
    "ranks of one node that NCCL takes for hosts": ("NET/Socket", both_ways("NET/Socket", (0, 1)), "aa"),
    "sockets": ("NET/Socket", both_ways("NET/Socket", (0, 1)), "ab"),
    "P2P written at one end": (
        "P2P",
        [(0, 1, "P2P"), *both_ways("NET/IB", (1, 2)), (2, 3, "P2P"), (3, 0, "NET/IB")],
        "aabb",
    ),
    "P2P on one node": ("P2P", [(0, 1, "P2P"), (1, 2, "P2P"), (2, 0, "P2P")], "aaa"),
    "SHM": ("SHM", both_ways("SHM", (0, 1)), "aa"),
}


@pytest.mark.parametrize("case", AS_REQUIRED)
def test_what_is_as_required_is_no_finding(case: str) -> None:
    """The required kind, wherever the rule wants one."""
    required, links, nodes = AS_REQUIRED[case]
    assert judge(required, said(*links, size=len(nodes)), list(nodes)) is None


OTHERWISE = {
    "a socket fallback": (
        *("NET/IB", both_ways("NET/Socket", (0, 1)), "ab"),
        *("is required between nodes; NCCL's log names NET/Socket on ranks 0-1", (0, 1)),
    ),
    "a socket on one side": (
        *("NET/IB", [(0, 1, "NET/IB"), (1, 0, "NET/IB"), (1, 2, "NET/Socket"), (2, 1, "NET/Socket")], "abc"),
        *("NET/IB on rank 0, NET/IB and NET/Socket on rank 1, NET/Socket on rank 2", (1, 2)),
    ),
    "a socket between ranks of one node": (
        *("NET/IB", [*both_ways("NET/Socket", (0, 1)), *both_ways("NET/IB", (1, 2))], "aab"),
        *("NET/Socket on rank 0, NET/IB and NET/Socket on rank 1, NET/IB on rank 2", (0, 1)),
    ),
    "a plug-in's": ("NET/IB", both_ways("NET/IBext_v8", (0, 1)), "ab", "NET/IBext_v8 on ranks 0-1", (0, 1)),
    "NVLink between nodes": (
        *("NET/IB", [*both_ways("NET/IB", (0, 1)), (0, 1, "P2P")], "ab"),
        *("NET/IB and P2P on ranks 0-1", (0, 1)),
    ),
    "no way out": (
        *("NET/IB", both_ways("P2P", (0, 1)), "aa"),
        *("NCCL's log names no channel to another node (P2P inside its node) on ranks 0-1", (0, 1)),
    ),
    "IB for sockets": ("NET/Socket", both_ways("NET/IB", (0, 1)), "ab", "NET/IB on ranks 0-1", (0, 1)),
    "SHM for P2P": (
        *("P2P", [*both_ways("P2P", (0, 1)), *both_ways("SHM", (1, 2)), *both_ways("P2P", (2, 0))], "aaa"),
        *("is required inside a node; NCCL's log names P2P on rank 0, P2P and SHM on ranks 1-2", (1, 2)),
    ),
    "a network for P2P": ("P2P", both_ways("NET/Socket", (0, 1)), "aa", "NET/Socket on ranks 0-1", (0, 1)),
    "P2P for SHM": ("SHM", both_ways("P2P", (0, 1)), "aa", "P2P on ranks 0-1", (0, 1)),
    "a rank alone on its node": (
        *("P2P", [*both_ways("P2P", (0, 1)), *both_ways("NET/IB", (1, 2))], "aab"),
        *("P2P on ranks 0-1, no channel to a rank of its node on rank 2", (2,)),
    ),
    "P2P to another node only": (
        *("P2P", both_ways("P2P", (0, 1)), "ab"),
        *("no channel to a rank of its node on ranks 0-1", (0, 1)),
    ),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_anything_else_is_told_by_rank(case: str) -> None:
    """Also where the required kind is there too."""
    required, links, nodes, text, wrong = OTHERWISE[case]
    outcome, message, ranks = told(required, said(*links, size=len(nodes)), nodes)
    assert outcome == "differ" and message.startswith(f"transport {required} is required ")
    assert message.endswith(text) and ranks == wrong


def test_collnet_beside_the_required_network_is_another_way_out() -> None:
    """The switches carry data that the required network should."""
    ranks = said(*both_ways("NET/IB", (0, 1)), size=2)
    line = "CollNet 00/0 : 1 [receive] via COLLNET/SHARP/0/GDRDMA"
    ranks[1]["links"] |= read_log(log(line), PID).as_dict()["links"]
    assert told("NET/IB", ranks, "ab")[1].endswith("NET/IB on rank 0, COLLNET/SHARP and NET/IB on rank 1")
    assert chosen(ranks) == {"COLLNET/SHARP": [1], "NET/IB": [0, 1]}


@pytest.mark.parametrize(("networks", "named"), [((), "none"), (("Socket",), '"Socket"')])
def test_channel_without_its_network_is_not_enough(networks: tuple[str, ...], named: str) -> None:
    """Both lines are needed."""
    ranks = said(*both_ways("NET/IB", (0, 1)), size=2)
    ranks[1]["networks"] = list(networks)
    message = told("NET/IB", ranks, "ab")[1]
    assert message.endswith(f'NET/IB on rank 0, NET/IB (but as network in use {named}, not "IB") on rank 1')


def test_network_without_a_channel_is_not_enough() -> None:
    """NCCL names a network also where no channel uses one."""
    assert told("NET/IB", said(*both_ways("P2P", (0, 1)), size=2, networks=["IB"]), "aa")[0] == "differ"


def test_rank_without_another_node_is_wrong_where_each_has_its_own() -> None:
    """With one rank a node, each must have the required channel."""
    ranks = said(*both_ways("NET/IB", (0, 1)), (2, 2, "P2P"), size=3)
    _, message, wrong = told("NET/IB", ranks, "abc")
    assert message.endswith(
        "NET/IB on ranks 0-1, no channel to another node (nothing inside its node) on rank 2"
    ) and wrong == (2,)


@pytest.mark.parametrize("required", TRANSPORTS)
def test_rank_that_tells_nothing_cannot_be_told(required: str) -> None:
    """No line, a hindrance, or another communicator's lines: an error, whatever the others say."""
    ranks = said(*both_ways(required, (0, 1), (2, 3), (3, 4)), size=5)
    ranks[1] = read_log(log("Using network IB"), PID).as_dict()
    ranks[2] = Connections(hindrance="NCCL_DEBUG is unreadable").as_dict()
    ranks[4] = read_log(log(channel(4, 3, required), channel(1, 3, required)), PID).as_dict()
    outcome, message, wrong = told(required, ranks, "aabbc")
    assert outcome == "cannot tell" and wrong == (1, 2, 4)
    assert message == (
        f"transport {required} is required, and cannot be verified: no channel is named in NCCL's log on rank 1, "
        "NCCL_DEBUG is unreadable on rank 2, "
        "the channels of another communicator (ranks 1, 3-4) are in NCCL's log on rank 4"
    )


def test_peer_outside_the_communicator_is_another_one() -> None:
    """A larger communicator's channels do not count for a smaller one."""
    assert told("P2P", said((0, 7, "P2P"), (1, 0, "P2P"), size=2), "aa")[0] == "cannot tell"


@pytest.mark.parametrize("required", TRANSPORTS)
def test_remedy_names_what_to_look_at(required: str) -> None:
    """Every transport that can be required has its own variables."""
    other = "SHM" if required != "SHM" else "P2P"
    finding = judge(required, said(*both_ways(other, (0, 1)), size=2), ["a", "a"])
    assert finding is not None and "NCCL_" in finding.remedy
    assert {"NET/IB": "NCCL_IB_HCA", "NET/Socket": "NCCL_SOCKET_IFNAME", "P2P": "NCCL_P2P_", "SHM": "NCCL_SHM_"}[
        required
    ] in finding.remedy


@pytest.mark.parametrize("plane", ["host", "solo"])
def test_required_transport_fails_closed_without_nccl(plane: str) -> None:
    """Where NCCL carries nothing, a required transport cannot be told, and that is an error."""
    finding = judge_host("NET/IB", plane)
    assert finding is not None
    assert (finding.outcome, finding.severity) == ("cannot tell", "error")
    assert "NET/IB" in finding.message and plane in finding.message and "require_transport" in finding.remedy


def test_nothing_required_is_nothing_to_tell() -> None:
    """Without a requirement there is no finding."""
    assert judge_host(None, "host") is None
    assert judge(None, [Connections().as_dict()], ["a"]) is None
