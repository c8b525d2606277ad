"""Random contributions of every rank, what they must give, and buffers that show a stray byte.

The reference is independent of the planes: every rank makes every rank's contribution anew from the agreed seed and
computes the result with NumPy in float64 or whole numbers. Contributions are random, but chosen so that the result does
not depend on the order of the reduction or on the width in which it is done; then only ``avg`` needs a tolerance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from butter_mpi.enums import DType, ReduceOp
from butter_mpi.selftest.places import Place

__all__ = ["Buffer", "Case", "Expected", "Values", "differing", "numpy_dtype"]

Array = npt.NDArray[Any]

_GUARD_BYTES = 64
_GUARD = np.frombuffer(bytes((0xA5 ^ i) & 0xFF for i in range(_GUARD_BYTES)), np.uint8)
_AVG_TERMS = 2
_finfo: Any = ml_dtypes.finfo


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the NumPy (or ml_dtypes) type of `dtype`."""
    return np.dtype(getattr(ml_dtypes, dtype.label, dtype.label))


class Buffer:
    """An array of a place between guard bytes, which must be there unharmed afterwards.

    Attributes
    ----------
    array
        What operations take.
    bytes, values : NumPy arrays
        What the host knows of it: what was put in last, or found by :meth:`get`.
    """

    def __init__(self, place: Place, dtype: DType, count: int) -> None:
        nbytes = count * dtype.itemsize
        inner = slice(_GUARD_BYTES, _GUARD_BYTES + nbytes)
        self._place = place
        self._raw = np.empty(nbytes + 2 * _GUARD_BYTES, np.uint8)
        self._raw[:_GUARD_BYTES] = self._raw[inner.stop :] = _GUARD
        self._whole = place.array(self._raw)
        self.array: Any = self._whole[inner].view(numpy_dtype(dtype))
        self.bytes = self._raw[inner]
        self.values: Array = self.bytes.view(numpy_dtype(dtype))

    def fill(self, values: Array | float, start: int = 0) -> None:
        """Put `values` in, from the element `start` on."""
        self.values[start : start + np.size(values) if np.ndim(values) else None] = values
        self._place.put(self._whole, self._raw)

    def poison(self, expected: Array) -> None:
        """Put in what differs from `expected` in every byte, so that an element not written cannot pass."""
        np.invert(expected.view(np.uint8), out=self.bytes)
        self._place.put(self._whole, self._raw)

    def get(self) -> Array:
        """Look at what is there, guard bytes too, after what was submitted before; returns the values."""
        self._place.get(self._whole, self._raw)
        return self.values

    def harm(self) -> list[str]:
        """Return what is wrong with the guard bytes."""
        before, after = self._raw[:_GUARD_BYTES], self._raw[len(self._raw) - _GUARD_BYTES :]
        sides = (("before", before), ("after", after))
        return [f"wrote {side} the buffer" for side, found in sides if not np.array_equal(found, _GUARD)]


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on one element type and count; its stream of random numbers depends on all of it and the seed."""

    seed: int
    number: int
    dtype: DType
    count: int
    op: ReduceOp | None = None

    def random(self, *more: int) -> np.random.Generator:
        """Return a generator that is fresh for this case and `more` (a rank, for example)."""
        op = 0 if self.op is None else 1 + self.op.nccl
        return np.random.default_rng([self.seed, self.number, self.dtype.nccl, self.count, op, *more])

    def raw(self, rank: int) -> Array:
        """Return `count` elements of random bytes of one rank: any pattern, for operations that only move data."""
        content = self.random(rank).bytes(self.count * self.dtype.itemsize)
        return np.frombuffer(content, np.uint8).view(numpy_dtype(self.dtype))

    def __str__(self) -> str:
        op = f" {self.op.label}" if self.op else ""
        return f"{self.dtype.label}{op} x {self.count}"


@dataclass(frozen=True, slots=True)
class Expected:
    """What a reduction must give, and how far from it a result may be."""

    values: Array
    tolerance: Array | float


class Values:
    """The contributions of all ranks to one reduction, and its result.

    Floats are whole numbers (times one power of two) whose every partial sum has at most as many bits as the type
    holds; products are of powers of two and one number with all its bits. Neither is ever rounded, in whatever order.
    """

    def __init__(self, case: Case, ranks: int) -> None:
        self.case, self.ranks = case, ranks
        assert case.op is not None
        self.op, self.dtype = case.op, numpy_dtype(case.dtype)
        self.integral = self.dtype.kind in "iu"
        self._made: dict[int, Array] = {}
        common = case.random()
        self._shift = int(common.integers(ranks))
        if not self.integral:
            self._limits: Any = _finfo(self.dtype)
            self._bits = self._limits.nmant + 1
            lowest, highest = int(self._limits.minexp), int(np.frexp(float(self._limits.max))[1]) - 1
            self._lowest, self._highest = lowest, highest
            low = max(-8, lowest + self._bits + 2)
            self._scale = 2.0 ** int(common.integers(low, max(low, min(8, highest - self._bits)) + 1))

    def of(self, rank: int) -> Array:
        """Return one rank's contribution in the element type."""
        self._made[rank] = self._wide(rank)
        return self._made[rank].astype(self.dtype)

    def expected(self, part: slice = slice(None)) -> Expected:
        """Return the result of reducing `part` of all contributions."""
        total: Array | None = None
        sizes: Array | float = 0.0
        for rank in range(self.ranks):
            wide = (self._made[rank] if rank in self._made else self._wide(rank))[part]
            total = wide if total is None else self._pairwise(total, wide)
            if self._rounds():
                sizes = sizes + np.abs(wide)
        assert total is not None
        if self.op is not ReduceOp.AVG:
            return Expected(total.astype(self.dtype) if self.integral else total, 0.0)
        if self.integral:
            return Expected((np.sign(total) * (np.abs(total) // self.ranks)).astype(self.dtype), 0.0)
        return Expected(total / self.ranks, self._tolerance(sizes))

    def _rounds(self) -> bool:
        """Whether a right result may be rounded: only where the sum is divided by what is no power of two."""
        return self.op is ReduceOp.AVG and not self.integral and bool(self.ranks & (self.ranks - 1))

    def _tolerance(self, sizes: Array | float) -> Array | float:
        """Return how far an average may be off.

        NCCL multiplies each contribution by 1/n and adds; others add and divide. An element has two contributions that
        are not zero, so at most three roundings touch it (1/n, the product, one addition), each by the unit u or, below
        the normal numbers, by the smallest one: an error of at most 3u/(1-3u) of the sum of the sizes, over n.
        """
        if not self._rounds():
            return 0.0
        unit: float = 2.0**-self._bits
        smallest = float(self._limits.smallest_subnormal)
        return sizes * (3 * unit / (1 - 3 * unit) / self.ranks + smallest) + 3 * smallest

    def _pairwise(self, a: Array, b: Array) -> Array:
        """Reduce two in wide arithmetic; unsigned 64-bit wraps as every narrower whole number does after a cast."""
        functions: dict[ReduceOp, Any] = {
            ReduceOp.SUM: np.add,
            ReduceOp.AVG: np.add,
            ReduceOp.PROD: np.multiply,
            ReduceOp.MAX: np.maximum,
            ReduceOp.MIN: np.minimum,
        }
        result: Array = functions[self.op](a, b)
        return result

    def _wide(self, rank: int) -> Array:
        """Return one rank's contribution, exact, in float64 or in whole numbers of 64 bits."""
        random = self.case.random(rank)
        if self.op in (ReduceOp.MAX, ReduceOp.MIN):
            return self._any_number(rank, random)
        if self.integral and self.op is not ReduceOp.AVG:
            numbers: Array = self._any_number(rank, random).view(np.uint64)
            # A few even factors would make every product zero, and a missing rank would not show.
            return numbers | np.uint64(1) if self.op is ReduceOp.PROD else numbers
        return self._factors(rank, random) if self.op is ReduceOp.PROD else self._few(rank, random)

    def _any_number(self, rank: int, random: np.random.Generator) -> Array:
        if self.integral:
            return self.case.raw(rank).astype(np.uint64 if self.dtype.kind == "u" else np.int64)
        drawn = random.random(self.case.count, np.float64 if self.dtype.itemsize > 4 else np.float32)
        return (2 * drawn - 1).astype(self.dtype).astype(np.float64)

    def _few(self, rank: int, random: np.random.Generator) -> Array:
        """Whole numbers so few and small that no partial sum leaves the exact range; zero from the other ranks."""
        largest = int(np.iinfo(self.dtype).max) if self.integral else 2**self._bits
        terms = min(self.ranks, _AVG_TERMS if self.op is ReduceOp.AVG else largest)
        bound = largest // terms
        wide = np.uint64 if self.dtype.kind == "u" else np.int64
        numbers = random.integers(0 if self.dtype.kind == "u" else -bound, bound, self.case.count, wide, endpoint=True)
        if terms < self.ranks:
            kept = np.zeros_like(numbers)
            for place in self._places(rank, terms):
                kept[place] = numbers[place]
            numbers = kept
        return numbers if self.integral else numbers.astype(np.float64) * self._scale

    def _places(self, rank: int, terms: int) -> Iterable[slice]:
        """Return the elements to which `rank` contributes: `terms` neighbouring ranks share each one."""
        return (slice((term - rank - self._shift) % self.ranks, None, self.ranks) for term in range(terms))

    def _factors(self, rank: int, random: np.random.Generator) -> Array:
        """Powers of two and signs; at every element one rank has a number with all its bits."""
        count = self.case.count
        budget = min(-self._lowest, self._highest - 1)
        others = min(self.ranks - 1, budget)
        signs = 1.0 - 2.0 * random.integers(0, 2, count)
        factors = signs.copy()
        for index, place in enumerate(self._places(rank, others + 1)):
            size = len(range(*place.indices(count)))
            if index == 0:
                factors[place] *= 1.0 + random.integers(0, 2 ** (self._bits - 1), size) / 2.0 ** (self._bits - 1)
            else:
                power = min(8, budget // others)
                factors[place] *= 2.0 ** random.integers(-power, power, size, endpoint=True)
        return factors


def differing(got: Array, expected: Expected) -> str | None:
    """Return the first element that is not as expected, and how many are not."""
    if got.dtype.kind in "iu":
        bad = got != expected.values
    else:
        with np.errstate(invalid="ignore"):
            bad = ~(np.abs(got.astype(np.float64) - expected.values) <= expected.tolerance)
    wrong = np.flatnonzero(bad)
    if not len(wrong):
        return None
    first = int(wrong[0])
    return f"element {first} is {got[first]}, expected {expected.values[first]} ({len(wrong)} of {len(got)} differ)"
