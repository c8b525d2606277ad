"""The selftest's reference: exact in any order, sensitive to every rank; its buffers show stray bytes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from butter_mpi.enums import DType, ReduceOp
from butter_mpi.selftest.data import Buffer, Case, Expected, Values, differing
from butter_mpi.selftest.places import HostPlace

WORLDS = (1, 2, 3, 5, 64)
REDUCERS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
}
TYPES = tuple(dtype for dtype in DType if dtype.native)
INTEGERS = tuple(dtype for dtype in TYPES if "int" in dtype.label)
FLOATS = tuple(dtype for dtype in TYPES if dtype not in INTEGERS)
EACH = pytest.mark.parametrize(
    ("dtype", "op"), list(itertools.product(TYPES, ReduceOp)), ids=lambda value: getattr(value, "label", None)
)


def reduce_in_type(values: list[Any], op: ReduceOp) -> Any:
    """Reduce one after another, rounding to the element type each time, as the worst plane would."""
    total = values[0].copy()
    with np.errstate(over="ignore"):
        for value in values[1:]:
            total = REDUCERS[op](total, value)
    return total


def averaged(total: Any, ranks: int) -> Any:
    """Divide a sum in its own type, towards zero."""
    if total.dtype.kind == "u":
        return (total // np.uint64(ranks)).astype(total.dtype)
    if total.dtype.kind == "i":
        return (np.sign(total) * (np.abs(total) // np.int64(ranks))).astype(total.dtype)
    return (total.astype(np.float64) / ranks).astype(total.dtype)


@EACH
@pytest.mark.parametrize("ranks", WORLDS)
def test_reference_holds_in_any_order(dtype: DType, op: ReduceOp, ranks: int) -> None:
    """A reduction in the element type itself, in rank order and backwards, gives what the reference expects."""
    values = Values(Case(11, 2, dtype, 501, op), ranks)
    given = [values.of(rank) for rank in range(ranks)]
    for ordered in (given, given[::-1]):
        total = reduce_in_type(ordered, op)
        result = averaged(total, ranks) if op is ReduceOp.AVG else total
        assert differing(result, values.expected()) is None


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("ranks", WORLDS)
def test_reference_holds_for_averages_by_products(dtype: DType, ranks: int) -> None:
    """Multiplying by a rounded 1/n before adding, as NCCL does, stays within the tolerance."""
    values = Values(Case(12, 2, dtype, 501, ReduceOp.AVG), ranks)
    given = [values.of(rank) for rank in range(ranks)]
    factor = np.array(1 / ranks).astype(given[0].dtype)
    assert differing(reduce_in_type([value * factor for value in given], ReduceOp.SUM), values.expected()) is None


@EACH
@pytest.mark.parametrize("ranks", [2, 3, 64])
def test_reference_sees_a_missing_rank(dtype: DType, op: ReduceOp, ranks: int) -> None:
    """A result that lacks one rank's contribution is told, whichever rank it is."""
    values = Values(Case(13, 2, dtype, 20_000, op), ranks)
    given = [values.of(rank) for rank in range(ranks)]
    for missing in {0, ranks // 2, ranks - 1}:
        total = reduce_in_type([value for rank, value in enumerate(given) if rank != missing], op)
        result = averaged(total, ranks) if op is ReduceOp.AVG else total
        assert differing(result, values.expected()) is not None, f"rank {missing}"


@EACH
def test_reference_of_a_part(dtype: DType, op: ReduceOp) -> None:
    """The expected values of a share are that share of the whole."""
    values = Values(Case(14, 2, dtype, 9, op), 3)
    whole, part = values.expected(), values.expected(slice(3, 6))
    assert np.array_equal(whole.values[3:6], part.values)


def test_data_is_fresh_for_each_case() -> None:
    """Another seed, check, count, operator or rank gives other data; the same ones give the same."""
    base = Case(1, 2, DType.INT64, 8, ReduceOp.SUM)
    others = [
        Case(2, 2, DType.INT64, 8, ReduceOp.SUM),
        Case(1, 3, DType.INT64, 8, ReduceOp.SUM),
        Case(1, 2, DType.UINT64, 8, ReduceOp.SUM),
        Case(1, 2, DType.INT64, 8, ReduceOp.MAX),
    ]
    drawn = [case.raw(0).tobytes() for case in (base, *others)] + [base.raw(1).tobytes()]
    assert len(set(drawn)) == len(drawn)
    assert base.raw(0).tobytes() == drawn[0]


def test_integers_overflow() -> None:
    """Sums of whole numbers do leave the range, so that wrapping is tried."""
    values = Values(Case(15, 2, DType.INT8, 1000, ReduceOp.SUM), 2)
    exact = values.of(0).astype(int) + values.of(1).astype(int)
    assert (np.abs(exact) > 127).any()
    assert np.array_equal(values.expected().values, exact.astype(np.int8))


def test_difference_is_told_with_its_place() -> None:
    """The first differing element is named with both values, and the differing ones are counted."""
    expected = Expected(np.array([1.0, 2.0, 3.0, 4.0]), 0.0)
    found = differing(np.array([1, 2.5, 3, np.nan], np.float32), expected)
    assert found == "element 1 is 2.5, expected 2.0 (2 of 4 differ)"


@pytest.mark.parametrize("count", [0, 1, 3])
def test_stray_bytes_are_told(count: int) -> None:
    """A byte written before or after the array is told with its side; none is, none."""
    buffer = Buffer(HostPlace(), DType.FLOAT64, count)
    assert buffer.harm() == []
    outside = buffer.bytes.base
    assert outside is not None
    outside[63] ^= 1
    assert buffer.harm() == ["wrote before the buffer"]
    outside[63] ^= 1
    outside[64 + 8 * count] ^= 1
    assert buffer.harm() == ["wrote after the buffer"]


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.label)
def test_poison_differs_in_every_byte(dtype: DType) -> None:
    """A poisoned buffer has no byte of the expected result."""
    expected = Case(16, 2, dtype, 100).raw(0)
    buffer = Buffer(HostPlace(), dtype, 100)
    buffer.poison(expected)
    assert not (buffer.bytes == expected.view(np.uint8)).any()
