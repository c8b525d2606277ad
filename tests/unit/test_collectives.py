"""Operations as data: signatures, call sites, plans."""

from __future__ import annotations

import pytest

from butter_mpi.collectives import Operation, call_site, check_plan, describe, signature
from butter_mpi.enums import DType, ReduceOp


def test_signature_reads_well() -> None:
    """What the other ranks are told names operation, number, type, count, operator and place."""
    operation = Operation("all_reduce", 1024, DType.FLOAT32, op=ReduceOp.SUM, site="train.py:33")
    assert describe(signature(operation, 41)) == "all_reduce #41 (float32 x 1024, sum) at train.py:33"
    operation = Operation("broadcast", 2**40, DType.UINT8, root=0, site="train.py:34")
    assert describe(signature(operation, 42)) == "broadcast #42 (uint8 x 1099511627776, root 0) at train.py:34"


def test_call_site_is_here() -> None:
    """The call site is the caller outside the library, and not long."""
    assert call_site().startswith("unit/test_collectives.py:") and len(call_site()) <= 120


def test_plan_in_one_form() -> None:
    """A plan is checked and completed; members and names mean the same."""
    plan = {"operation": "all_reduce", "count": 3, "dtype": DType.BFLOAT16, "op": ReduceOp.MAX}
    assert check_plan(plan) == {"operation": "all_reduce", "count": 3, "dtype": "bfloat16", "op": "max", "root": None}
    assert (check_plan({"operation": "barrier"}) or {})["dtype"] == "uint8"
    assert check_plan(None) is None


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"operation": "send"}, "plan operation must be one of all_reduce, all_gather"),
        (
            {"operation": "barrier", "shape": 3},
            "plan key must be one of operation, count, dtype, op, root; got 'shape'",
        ),
        ({"operation": "barrier", "count": -1}, "plan count must be a number of elements, 0 or more; got -1"),
        ({"operation": "barrier", "count": True}, "got True"),
        ({"operation": "barrier", "op": "sum"}, "barrier has no 'op'; got 'sum'"),
        ({"operation": "broadcast", "count": 1}, "broadcast needs 'root'; got None"),
        ({"operation": "all_reduce", "count": 1, "op": "sum", "dtype": "int7"}, "dtype must be one of int8"),
    ],
)
def test_wrong_plans(plan: dict, message: str) -> None:
    """A plan that names what an operation has not is refused with what it may have."""
    with pytest.raises(ValueError, match=message):
        check_plan(plan)
