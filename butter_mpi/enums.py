"""Element types and reduction operators, with the numbers that NCCL gives them."""

from __future__ import annotations

import enum
import numbers
from dataclasses import dataclass
from typing import Any, ClassVar

__all__ = ["DType", "PreMulSum", "ReduceOp", "parse_op"]

_NCCL_TYPES = 12


class DType(enum.Enum):
    """Element type of a buffer: name, bytes an element, ``ncclDataType_t`` (from 12 on: NCCL has no such type)."""

    INT8 = ("int8", 1, 0)
    """8-bit signed integer."""
    UINT8 = ("uint8", 1, 1)
    """8-bit unsigned integer."""
    INT32 = ("int32", 4, 2)
    """32-bit signed integer."""
    UINT32 = ("uint32", 4, 3)
    """32-bit unsigned integer."""
    INT64 = ("int64", 8, 4)
    """64-bit signed integer."""
    UINT64 = ("uint64", 8, 5)
    """64-bit unsigned integer."""
    FLOAT16 = ("float16", 2, 6)
    """IEEE half precision."""
    FLOAT32 = ("float32", 4, 7)
    """IEEE single precision."""
    FLOAT64 = ("float64", 8, 8)
    """IEEE double precision."""
    BFLOAT16 = ("bfloat16", 2, 9)
    """Brain floating point: 8 bits of exponent, 7 of fraction."""
    FLOAT8_E4M3 = ("float8_e4m3fn", 1, 10)
    """8-bit float, 4 bits of exponent, finite (NCCL 2.24 or newer)."""
    FLOAT8_E5M2 = ("float8_e5m2", 1, 11)
    """8-bit float, 5 bits of exponent (NCCL 2.24 or newer)."""
    INT16 = ("int16", 2, 12)
    """16-bit signed integer: moved as bytes; reduced on the planes of host memory only."""
    UINT16 = ("uint16", 2, 13)
    """16-bit unsigned integer: as ``INT16``."""
    BOOL = ("bool", 1, 14)
    """Truth value, a byte of 0 or 1: sum and max are "or", prod and min are "and"."""
    COMPLEX64 = ("complex64", 8, 15)
    """Two of ``FLOAT32``: sum, avg, and the sum that multiplies first, by a real factor."""
    COMPLEX128 = ("complex128", 16, 16)
    """Two of ``FLOAT64``: as ``COMPLEX64``."""

    def __init__(self, label: str, itemsize: int, nccl: int) -> None:
        self.label = label
        self.itemsize = itemsize
        self.nccl = nccl
        self.native = nccl < _NCCL_TYPES

    # Members are equal only to themselves. Enum's own hash is a Python function, and operations are looked up by them.
    __hash__ = object.__hash__

    @classmethod
    def parse(cls, value: DType | str) -> DType:
        """Return the member for a member or a NumPy/ml_dtypes name.

        Parameters
        ----------
        value : DType or str
            For example ``"float32"`` or ``"bfloat16"``.

        Returns
        -------
        DType
            The member.

        Raises
        ------
        ValueError
            Another value; the message lists the allowed names.
        """
        if isinstance(value, cls):
            return value
        found = _DTYPES.get(value) if isinstance(value, str) else None
        if found is not None:
            return found
        raise ValueError(f"dtype must be one of {', '.join(m.label for m in cls)}; got {value!r}")


_DTYPES = {member.label: member for member in DType}


class ReduceOp(enum.Enum):
    """Reduction operator: name and ``ncclRedOp_t``."""

    SUM = ("sum", 0)
    """Sum; integers wrap round."""
    PROD = ("prod", 1)
    """Product; integers wrap round."""
    MAX = ("max", 2)
    """Largest."""
    MIN = ("min", 3)
    """Smallest."""
    AVG = ("avg", 4)
    """Sum divided by the world size; integers are divided towards zero."""

    def __init__(self, label: str, nccl: int) -> None:
        self.label = label
        self.nccl = nccl

    __hash__ = object.__hash__

    @classmethod
    def parse(cls, value: ReduceOp | str) -> ReduceOp:
        """Return the member for a member or its name.

        Parameters
        ----------
        value : ReduceOp or str
            For example ``"sum"``.

        Returns
        -------
        ReduceOp
            The member.

        Raises
        ------
        ValueError
            Another value; the message lists the allowed names.
        """
        if isinstance(value, cls):
            return value
        found = _OPS.get(value) if isinstance(value, str) else None
        if found is not None:
            return found
        raise ValueError(f"op must be one of {', '.join(m.label for m in cls)}; got {value!r}")


_OPS = {member.label: member for member in ReduceOp}


@dataclass(frozen=True, slots=True, eq=False)
class PreMulSum:
    """Reduction operator: each rank's elements times that rank's own factor, then the sum.

    Parameters
    ----------
    factor : int or float, or one of NumPy's integers or floats
        This rank's factor, which other ranks need not share; kept as Python's int or float of the same value. It is
        converted to the element type, once; for a buffer of integers it must be one of them.

    Raises
    ------
    TypeError
        `factor` is no real number, or has more digits than a float.
    """

    factor: int | float
    label: ClassVar[str] = "premul_sum"
    nccl: ClassVar[int] = 5

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", _python_number(self.factor))

    # Operations are looked up by it: 0.0 and -0.0 are two factors, and what is no number is one.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, PreMulSum) and str(self.factor) == str(other.factor)

    def __hash__(self) -> int:
        return hash(str(self.factor))


def _python_number(factor: Any) -> int | float:
    """Return a real number of Python or NumPy as Python's, of the same value."""
    # NumPy is asked by what its numbers show: durations are Integral too, and fractions are Real.
    kind = getattr(getattr(factor, "dtype", None), "kind", "") if isinstance(factor, numbers.Real) else ""
    number = int(factor) if kind in ("i", "u") else float(factor) if kind == "f" else factor
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TypeError(
            f"factor of PreMulSum must be an int or a float, of Python or NumPy; got {type(factor).__name__}: int() or "
            "float() makes one of a real number"
        )
    if number != factor and factor == factor:
        raise TypeError(f"factor of PreMulSum must be what a float can hold; got {factor!r}: float() rounds it")
    return number


def parse_op(value: ReduceOp | PreMulSum | str) -> ReduceOp | PreMulSum:
    """Return the operator for an operator or the name of a ``ReduceOp``.

    Raises
    ------
    ValueError
        Another value; the message lists the allowed names.
    """
    if isinstance(value, PreMulSum):
        return value
    if value == PreMulSum.label:
        raise ValueError(f"op {PreMulSum.label} needs its factor: pass butter_mpi.PreMulSum(factor)")
    return ReduceOp.parse(value)
