"""Host memory behind raw pointers."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from butter_mpi.enums import DType

__all__ = ["ALIGNMENT", "Allocator", "at", "numpy_dtype"]

ALIGNMENT = 4096
_NUMPY: dict[DType, np.dtype[Any]] = {dtype: np.dtype(getattr(ml_dtypes, dtype.label, dtype.label)) for dtype in DType}


class _Address:
    """The array protocol for memory that is known by its address only."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return NumPy's (or ml_dtypes') element type."""
    return _NUMPY[dtype]


def at(pointer: int, count: int, dtype: DType) -> npt.NDArray[Any]:
    """Return `count` elements at `pointer` as an array; the memory is the caller's."""
    if not count:
        return np.empty(0, numpy_dtype(dtype))
    return np.asarray(_Address(pointer, count * dtype.itemsize)).view(numpy_dtype(dtype))


def copy(target: int, source: int, nbytes: int) -> None:
    """Copy bytes; nothing happens where they are already in place."""
    if target != source and nbytes:
        ctypes.memmove(target, source, nbytes)


class Allocator:
    """Aligned host memory by pointer."""

    def __init__(self) -> None:
        self._blocks: dict[int, npt.NDArray[np.uint8]] = {}

    def alloc(self, nbytes: int) -> int:
        """Return the pointer of `nbytes` zeroed bytes.

        Raises
        ------
        ValueError
            Not a positive number of bytes.
        MemoryError
            There are not that many.
        """
        self.check(nbytes)
        block = np.zeros(nbytes + ALIGNMENT, np.uint8)
        start = block.ctypes.data
        pointer = start + -start % ALIGNMENT
        self._blocks[pointer] = block
        return pointer

    @staticmethod
    def check(nbytes: int) -> None:
        """Raise ``ValueError`` for what is not a positive number of bytes."""
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
            raise ValueError(f"symmetric_alloc: nbytes must be 1 or more; got {nbytes!r}")

    def free(self, pointer: int) -> None:
        """Free what :meth:`alloc` returned.

        Raises
        ------
        ValueError
            It did not return this pointer, or it is freed already.
        """
        if self._blocks.pop(pointer, None) is None:
            raise ValueError(f"symmetric_free: {pointer!r} is not memory of symmetric_alloc, or is freed already")
