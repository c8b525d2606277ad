"""What each operation is in C, on a recorder that has NCCL's functions with the recorded prototypes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.nccl_recorder import FACTS, Recorder

from butter_mpi.collectives import RULES, Operation
from butter_mpi.enums import DType, ReduceOp
from butter_mpi.errors import NCCLError
from butter_mpi.planes.issuing import Issuer, Kept

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


@pytest.mark.parametrize("kind", CALLS)
def test_a_failure_names_the_function(issuer: Issuer, recorder: Recorder, kind: str) -> None:
    """Whatever is not success is raised; "in progress" is none either, as the communicator is a blocking one."""
    for result in (1, 6, 7, 99):
        recorder.answer(result)
        with pytest.raises(NCCLError) as caught:
            issuer.issue(COMM, [made(kind)])
        assert (caught.value.call, caught.value.result) == (CALLS[kind][1], result)
