"""What operations must give: small numbers of each rank, and each reduction of them by NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from mpi4py import MPI

from butter_mpi import DType, PreMulSum, ReduceOp
from helpers.arrays import Array

__all__ = ["TYPES", "check", "contribution", "factor", "operators", "raw", "reduced"]

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
RANKS = range(SIZE)
TYPES = {dtype: np.dtype(getattr(ml_dtypes, dtype.label, dtype.label)) for dtype in DType}
WHOLE = [dtype for dtype in DType if "int" in dtype.label]
COMPLEX = [DType.COMPLEX64, DType.COMPLEX128]
SAME = {ReduceOp.SUM: np.add, ReduceOp.PROD: np.multiply, ReduceOp.MAX: np.maximum, ReduceOp.MIN: np.minimum}


def factor(rank: int, dtype: DType) -> int | float:
    """Return what a rank multiplies by; with three bits of fraction less would be rounded on the way."""
    return 0.5 if dtype is DType.FLOAT8_E5M2 else 2 - rank % 2


def operators(dtype: DType) -> list[ReduceOp | PreMulSum]:
    """Return the reductions that an element type has."""
    if dtype is DType.BOOL:
        return [op for op in ReduceOp if op is not ReduceOp.AVG]
    return [*((ReduceOp.SUM, ReduceOp.AVG) if dtype in COMPLEX else ReduceOp), PreMulSum(factor(RANK, dtype))]


def contribution(rank: int, count: int, dtype: DType) -> Array:
    """Return small numbers that no reduction here rounds, different by rank and place."""
    numbers = 1 + (np.arange(count) + rank) % 2
    if dtype is DType.BOOL:
        return (np.arange(count) + rank) % 3 == 0
    if dtype in COMPLEX:
        return (numbers + 1j * (rank - numbers)).astype(TYPES[dtype])
    return numbers.astype(TYPES[dtype])


def reduced(count: int, dtype: DType, op: ReduceOp | PreMulSum) -> Array:
    """Return what a reduction of all contributions must give."""
    every = [contribution(r, count, dtype) for r in RANKS]
    if dtype is DType.BOOL:
        either = op in (ReduceOp.SUM, ReduceOp.MAX)
        return np.logical_or.reduce(every) if either else np.logical_and.reduce(every)
    wide = [values.astype(np.complex128 if dtype in COMPLEX else np.float64) for values in every]
    if isinstance(op, PreMulSum):
        total = np.add.reduce([factor(r, dtype) * values for r, values in enumerate(wide)])
    elif op is ReduceOp.AVG:
        total = np.add.reduce(wide) / SIZE
        total = np.trunc(total) if dtype in WHOLE else total
    else:
        total = SAME[op].reduce(wide)
    return np.asarray(total).astype(TYPES[dtype])


def check(got: Array, wanted: Array, what: object) -> None:
    """Compare; only an average of a number of ranks that is no power of two may be rounded, by a unit."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, what
    if "avg" in str(what) and SIZE & (SIZE - 1) and got.dtype.kind in "fcV":
        eps = 2.0 ** -(3 if got.dtype.itemsize == 1 else 7 if got.dtype.itemsize == 2 else 22)
        wide = np.complex128 if got.dtype.kind == "c" else np.float64
        assert np.allclose(got.astype(wide), wanted.astype(wide), rtol=eps, atol=0), what
        return
    assert (got.view(np.uint8) == wanted.view(np.uint8)).all(), (what, got, wanted)


def raw(rank: int, count: int, dtype: np.dtype[Any]) -> Array:
    """Return random bytes, also such as are no number."""
    return np.frombuffer(np.random.default_rng([rank, count]).bytes(count * dtype.itemsize), dtype)
