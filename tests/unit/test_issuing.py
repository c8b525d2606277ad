"""What each operation is in C, on a recorder that has NCCL's functions with the recorded prototypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.nccl_recorder import FACTS, Recorder

from butter_mpi.collectives import RULES, Operation
from butter_mpi.enums import DType, PreMulSum, ReduceOp
from butter_mpi.errors import NCCLError
from butter_mpi.planes.issuing import Issuer, Kept
from butter_mpi.planes.memory import factor_of

WIDE = 0xFEDC_BA98_7654_3210
COMM, STREAM, SEND, RECV, COUNT = WIDE, WIDE + 1, WIDE + 2, WIDE + 3, 2**33 + 1

COMMON = {"datatype": "7", "comm": hex(COMM), "stream": hex(STREAM)}
BOTH = {"sendbuff": hex(SEND), "recvbuff": hex(RECV)}
WHOLE = COMMON | {"count": str(COUNT)}

CALLS: dict[str, tuple[dict[str, Any], str, dict[str, str]]] = {
    "all_reduce": ({"op": ReduceOp.MAX}, "ncclAllReduce", WHOLE | BOTH | {"op": "2"}),
    "all_gather": ({}, "ncclAllGather", COMMON | BOTH | {"sendcount": str(COUNT)}),
    "reduce_scatter": (
        {"op": ReduceOp.MIN},
        "ncclReduceScatter",
        COMMON | BOTH | {"recvcount": str(COUNT), "op": "3"},
    ),
    "broadcast": ({"root": 3}, "ncclBroadcast", WHOLE | BOTH | {"root": "3"}),
    "reduce": ({"op": ReduceOp.AVG, "root": 3}, "ncclReduce", WHOLE | BOTH | {"op": "4", "root": "3"}),
    "gather": ({"root": 3}, "ncclGather", WHOLE | BOTH | {"root": "3"}),
    "scatter": ({"root": 3}, "ncclScatter", WHOLE | BOTH | {"root": "3"}),
    "all_to_all": ({}, "ncclAlltoAll", WHOLE | BOTH),
    "send": ({"peer": 5}, "ncclSend", WHOLE | {"sendbuff": hex(SEND), "peer": "5"}),
    "recv": ({"peer": 5}, "ncclRecv", WHOLE | {"recvbuff": hex(RECV), "peer": "5"}),
}
"""What is more in an operation of each kind, the C function, and every argument that must arrive there."""


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """The recorder as the newest known release."""
    return Recorder(tmp_path_factory.mktemp("recorder"), FACTS["headers"][0][-1])


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """The recorder as the oldest known release."""
    return Recorder(tmp_path_factory.mktemp("oldest"), FACTS["headers"][0][0])


@pytest.fixture
def issuer(recorder: Recorder) -> Issuer:
    """An issuer of rank 1 of 8, on a device that makes events and nothing else."""
    recorder.answer(0)
    device: Any = SimpleNamespace(make_event=lambda: 8, destroy_event=lambda _event: None)
    return Issuer(recorder.library, device, Kept(device), 1, 8)


def made(kind: str) -> Operation:
    """Return an operation whose numbers would show a wrong width or a wrong place."""
    return Operation(kind, COUNT, DType.FLOAT32, SEND, RECV, stream=STREAM, **CALLS[kind][0])


def test_every_operation_is_tried_here() -> None:
    """A barrier is no call of its own (the plane makes an all_reduce of it), nor is what pairs of ranks move."""
    assert CALLS.keys() == {kind for kind, rule in RULES.items() if not rule.uneven} - {"barrier"}


@pytest.mark.parametrize("kind", CALLS)
def test_every_argument_arrives_whole(issuer: Issuer, recorder: Recorder, kind: str) -> None:
    """The function of this kind is called, once, with all of its arguments in their places."""
    issuer.issue(COMM, [made(kind)])
    assert recorder.said == CALLS[kind][1:]


PAIRWISE = {
    "gather": ([("send", 3, SEND)], [(peer, RECV + peer * 4 * COUNT) for peer in range(8)]),
    "scatter": ([("recv", 3, RECV)], [(peer, SEND + peer * 4 * COUNT) for peer in range(8)]),
    "all_to_all": (
        [("send", peer, SEND + peer * 4 * COUNT) for peer in range(8)]
        + [("recv", peer, RECV + peer * 4 * COUNT) for peer in range(8)],
        [],
    ),
}
"""Where it moves, by rank 1, and by the root, which does the other half for each peer besides."""


@pytest.mark.parametrize("kind", PAIRWISE)
def test_an_older_library_gets_sends_and_receives(
    issuer: Issuer, oldest: Recorder, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came with 2.28 is composed for an older library, in one group, block by block; newer ones get the call."""
    device: Any = SimpleNamespace(make_event=lambda: 8, destroy_event=lambda _event: None)
    old = Issuer(oldest.library, device, Kept(device), 1, 8)
    said: list[tuple[str, int, int]] = []

    def hear(_comm: int, calls: Sequence[Operation]) -> None:
        said.extend((call.kind, call.peer or 0, call.send if call.kind == "send" else call.recv) for call in calls)
        assert {(call.count, call.root) for call in calls} == {(COUNT, None)}

    monkeypatch.setattr(old, "_group", hear)
    monkeypatch.setattr(old, "_call", lambda comm, call: hear(comm, [call]))
    old.issue(COMM, [made(kind)])
    assert said == PAIRWISE[kind][0]
    # The first exchange of two ranks connects them, whatever call it is of.
    wanted = {(peer, way) for way, peer, _ in PAIRWISE[kind][0]}
    assert old.pairs([made(kind)]) == issuer.pairs([made(kind)]) == wanted
    if PAIRWISE[kind][1]:
        said.clear()
        old.issue(COMM, [replace(made(kind), root=1)])
        other, own = ("recv", "send") if kind == "gather" else ("send", "recv")
        at = {"send": SEND, "recv": RECV}[own]
        both = [(own, 1, at)], [(other, peer, where) for peer, where in PAIRWISE[kind][1]]
        assert said == [one for half in (both if kind == "gather" else both[::-1]) for one in half]


def test_a_factor_is_an_operator_while_the_call_lasts(issuer: Issuer, recorder: Recorder) -> None:
    """The operator is made of one element of the type, used, and given back."""
    names: list[str] = []
    real = issuer._library

    def named(how: Callable[[str], Any]) -> Callable[[str], Any]:
        def call(name: str) -> Any:
            names.append(name)
            return how(name)

        return call

    library: Any = SimpleNamespace(function=named(real.function), untyped=named(real.untyped), constant=real.constant)
    issuer._library = library
    operation = replace(made("all_reduce"), op=PreMulSum(0.5))
    issuer.issue(COMM, [operation])
    wanted = ["ncclRedOpCreatePreMulSum", "ncclAllReduce", "ncclRedOpDestroy"]
    assert list(dict.fromkeys(names)) == wanted
    assert recorder.said == ("ncclRedOpDestroy", {"op": "42", "comm": hex(COMM)})
    assert factor_of(operation).tobytes() == np.float32(0.5).tobytes()


@pytest.mark.parametrize("kind", CALLS)
def test_a_failure_names_the_function(issuer: Issuer, recorder: Recorder, kind: str) -> None:
    """Whatever is not success is raised; "in progress" is none either, as the communicator is a blocking one."""
    for result in (1, 6, 7, 99):
        recorder.answer(result)
        with pytest.raises(NCCLError) as caught:
            issuer.issue(COMM, [made(kind)])
        assert (caught.value.call, caught.value.result) == (CALLS[kind][1], result)
