"""Element types and reduction operators, with the numbers that NCCL gives them."""

from __future__ import annotations

import enum

__all__ = ["DType", "ReduceOp"]


class DType(enum.Enum):
    """Element type of a buffer: name, bytes an element, ``ncclDataType_t``."""

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

    def __init__(self, label: str, itemsize: int, nccl: int) -> None:
        self.label = label
        self.itemsize = itemsize
        self.nccl = nccl

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
