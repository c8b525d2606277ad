"""Operations as data: signatures, call sites, plans."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from butter_mpi.collectives import Operation, call_site, carried, check_plan, describe, signature
from butter_mpi.enums import DType, PreMulSum, ReduceOp


def test_signature_reads_well() -> None:
    """What the other ranks are told names operation, number, type, count, operator and place."""
    operation = Operation("all_reduce", 1024, DType.FLOAT32, op=ReduceOp.SUM, site="train.py:33")
    assert describe(signature(operation, 41)) == "all_reduce #41 (float32 x 1024, sum) at train.py:33"
    operation = Operation("broadcast", 2**40, DType.UINT8, root=0, site="train.py:34")
    assert describe(signature(operation, 42)) == "broadcast #42 (uint8 x 1099511627776, root 0) at train.py:34"
    record = signature(operation, 43) | {"way": "mail"}
    assert describe(record) == "broadcast #43 (uint8 x 1099511627776, root 0, by mail) at train.py:34"


def test_uneven_operations_tell_no_count() -> None:
    """What every rank has its own counts of names none; its data is compared pair by pair."""
    operation = Operation("gather_v", 0, DType.FLOAT32, root=1, site="train.py:35")
    assert describe(signature(operation, 44)) == "gather_v #44 (float32, root 1) at train.py:35"


def test_types_that_nccl_lacks_are_carried_by_others() -> None:
    """Truth values go as bytes that are "or" or "and", complex numbers as pairs, 16-bit integers as bytes."""

    def way(dtype: DType, op: ReduceOp | PreMulSum | None = None) -> tuple[DType, int, object]:
        found = carried(Operation("all_reduce" if op else "broadcast", 3, dtype, op=op))
        return found.dtype, found.count, found.op

    assert way(DType.FLOAT32, ReduceOp.SUM) == (DType.FLOAT32, 3, ReduceOp.SUM)
    assert way(DType.BOOL, ReduceOp.SUM) == way(DType.BOOL, ReduceOp.MAX) == (DType.UINT8, 3, ReduceOp.MAX)
    assert way(DType.BOOL, ReduceOp.PROD) == way(DType.BOOL, ReduceOp.MIN) == (DType.UINT8, 3, ReduceOp.MIN)
    assert way(DType.COMPLEX128, PreMulSum(2)) == (DType.FLOAT64, 6, PreMulSum(2))
    assert way(DType.COMPLEX64) == (DType.FLOAT32, 6, None) and way(DType.INT16) == (DType.UINT8, 6, None)
    assert way(DType.UINT16, ReduceOp.SUM) == (DType.UINT16, 3, ReduceOp.SUM)


def test_operators_that_multiply_differently_differ() -> None:
    """Operations are kept by their operators: zeros of two signs are two factors, and what is no number is one."""
    assert len({PreMulSum(0.0), PreMulSum(-0.0)}) == 2
    assert len({PreMulSum(float("nan")), PreMulSum(float("nan"))}) == 1
    assert PreMulSum(0.5) == PreMulSum(0.5) != 0.5


def test_call_site_is_here() -> None:
    """The call site is the caller outside the library, and not long."""
    assert call_site().startswith("unit/test_collectives.py:") and len(call_site()) <= 120


def test_call_site_goes_with_the_line() -> None:
    """Each place gives its own line, again and again; frames below `depth` are not looked at."""

    def here(depth: int) -> str:
        return call_site(depth)

    for _ in range(2):
        first = here(1)
        second, third = here(2), here(2)
        fourth = here(2)
    lines = [int(one.rpartition(":")[2]) for one in (first, second, third, fourth)]
    assert lines[0] < lines[1] == lines[2] == lines[3] - 1
    assert call_site(10**6) == "?"


def test_two_places_at_one_instruction() -> None:
    """Two functions of the same instructions, and of other lines, are told apart, in whichever order they come."""

    def one() -> str:
        return call_site()

    def other() -> str:
        return call_site()

    assert one.__code__.co_code == other.__code__.co_code
    turns = [int(function().rpartition(":")[2]) for function in (one, other, other, one)]
    assert turns[0] == turns[3] < turns[1] == turns[2] == turns[0] + 3


def test_plan_in_one_form() -> None:
    """A plan is checked and completed; members and names mean the same."""
    plan = {"operation": "all_reduce", "count": 3, "dtype": DType.BFLOAT16, "op": ReduceOp.MAX}
    assert check_plan(plan) == {"operation": "all_reduce", "count": 3, "dtype": "bfloat16", "op": "max", "root": None}
    assert (check_plan({"operation": "barrier"}) or {})["dtype"] == "uint8"
    assert check_plan(None) is None
    reduced = {"operation": "reduce", "count": 3, "dtype": "bool", "op": "premul_sum", "root": 1}
    assert check_plan(reduced) == {**reduced} and check_plan({**reduced, "op": PreMulSum(2)}) == reduced


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"operation": "gather_v", "root": 0}, "plan operation must be one of all_reduce, all_gather"),
        ({"operation": "send"}, "plan operation must be one of all_reduce, all_gather"),
        (
            {"operation": "barrier", "shape": 3},
            "plan key must be one of operation, count, dtype, op, root; got 'shape'",
        ),
        ({"operation": "barrier", "count": -1}, "plan count must be a number of elements, 0 or more; got -1"),
        ({"operation": "barrier", "count": True}, "got True"),
        ({"operation": "barrier", "op": "sum"}, "barrier has no 'op'; got 'sum'"),
        ({"operation": "broadcast", "count": 1}, "broadcast needs 'root'; got None"),
        ({"operation": "broadcast", "count": 1, "root": 4}, "^plan root must be a rank, 0 to 3; got 4$"),
        ({"operation": "broadcast", "count": 1, "root": -1}, "^plan root must be a rank, 0 to 3; got -1$"),
        ({"operation": "broadcast", "count": 1, "root": True}, "^plan root must be a rank, 0 to 3; got True$"),
        ({"operation": "broadcast", "count": 1, "root": "0"}, "^plan root must be a rank, 0 to 3; got '0'$"),
        ({"operation": "broadcast", "count": 1, "root": 1.0}, "^plan root must be a rank, 0 to 3; got 1.0$"),
        ({"operation": "barrier", "count": 10**5000}, "^plan count must be a number of elements, 0 or more; got a "),
        ({"operation": "barrier", "count": 2**63}, "^plan count must be a number of elements, 0 or more; got 9"),
        ({"operation": "all_reduce", "count": 1, "op": "sum", "dtype": "int7"}, "dtype must be one of int8"),
    ],
)
def test_wrong_plans(plan: dict, message: str) -> None:
    """A plan that names what an operation has not is refused with what it may have."""
    with pytest.raises(ValueError, match=message):
        check_plan(plan, 4)


def test_root_of_a_plan() -> None:
    """A root is held against the world size where that is known, and may be no rank of any world where it is not."""
    plan = {"operation": "broadcast", "count": 1, "root": 3}
    assert (check_plan(plan, 4) or {})["root"] == (check_plan(plan) or {})["root"] == 3
    with pytest.raises(ValueError, match=r"^plan root must be a rank, 0 or more; got -3$"):
        check_plan({**plan, "root": -3})


@pytest.mark.parametrize("plan", [3, "barrier", ["barrier"], []])
def test_plan_of_another_kind_is_refused_by_name(plan: object) -> None:
    """What is no mapping is refused with the argument's name."""
    with pytest.raises(
        TypeError, match=r"^plan must be a mapping with the keys operation, count, dtype, op, root; got "
    ):
        check_plan(plan)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "factor",
    [np.int8(-2), np.uint64(2**64 - 1), np.float16(0.1), np.float32(0.1), np.float64(0.1), np.longdouble(0.5)],
    ids=lambda factor: factor.dtype.name,
)
def test_factors_of_numpy(factor: Any) -> None:
    """NumPy's real numbers are factors, each of its own value exactly, as a number of Python."""
    found = PreMulSum(factor).factor
    assert type(found) in (int, float) and found == factor
    no_number: Any = np.float32("nan")
    assert np.isnan(PreMulSum(no_number).factor)


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        *(
            (wrong, "int() or float() makes one")
            for wrong in (True, np.True_, "2", 2j, np.complex64(2), Fraction(1, 2))
        ),
        *((wrong, "int() or float() makes one") for wrong in (np.ones(()), np.timedelta64(2, "ns"), None)),
        (np.nextafter(np.longdouble(1), np.longdouble(2)), "float() rounds it"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_factor(factor: Any, said: str) -> None:
    """Anything else is refused, with what to do."""
    with pytest.raises(TypeError, match=re.escape(said)):
        PreMulSum(factor)
