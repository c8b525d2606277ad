"""Memory behind raw pointers: host memory as arrays, and aligned blocks of any kind."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from butter_mpi.collectives import Operation
from butter_mpi.enums import DType, PreMulSum

__all__ = ["ALIGNMENT", "Allocator", "at", "copy", "factor_of", "host_block", "numpy_dtype", "premultiplied"]

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


def factor_of(operation: Operation) -> npt.NDArray[Any]:
    """Return the factor of a ``PreMulSum`` as one element."""
    assert isinstance(operation.op, PreMulSum)
    return np.asarray(operation.op.factor).astype(numpy_dtype(operation.dtype))


def premultiplied(values: npt.NDArray[Any], operation: Operation) -> npt.NDArray[Any]:
    """Return what a rank contributes to a reduction; `values` may be wider than the element type, and is changed."""
    if isinstance(operation.op, PreMulSum):
        with np.errstate(over="ignore", invalid="ignore"):
            values *= factor_of(operation).astype(values.dtype)
    return values


def host_block(nbytes: int) -> tuple[int, npt.NDArray[np.uint8]]:
    """Return zeroed host memory for an ``Allocator``: it is there as long as the array is."""
    block = np.zeros(nbytes + ALIGNMENT, np.uint8)
    return block.ctypes.data, block


class Allocator:
    """Aligned memory by pointer, whatever it is of.

    Parameters
    ----------
    who : str
        This rank, as messages name it.
    allocate : callable
        Takes a number of bytes; returns the address of a block that has them from its first aligned address on, and
        the block itself, as `free` takes it.
    free : callable
        Takes a block and gives it back.
    """

    def __init__(self, who: str, allocate: Callable[[int], tuple[int, Any]], free: Callable[[Any], None]) -> None:
        self._who, self._allocate, self._free = who, allocate, free
        self._blocks: dict[int, Any] = {}
        self._left: list[Any] = []

    def alloc(self, nbytes: int) -> int:
        """Return the pointer of `nbytes` bytes.

        Raises
        ------
        ValueError
            Not a positive number of bytes.
        MemoryError
            The host has not that many; a device says it by its own error.
        """
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
            raise ValueError(f"{self._who}: symmetric_alloc: nbytes must be 1 or more; got {nbytes!r}")
        start, block = self._allocate(nbytes)
        pointer = start + -start % ALIGNMENT
        self._blocks[pointer] = block
        return pointer

    def free(self, pointer: int) -> None:
        """Free what :meth:`alloc` returned; where that fails, it can be tried again.

        Raises
        ------
        ValueError
            It did not return this pointer, or it is freed already.
        """
        self._free(self.block(pointer))
        del self._blocks[pointer]

    def block(self, pointer: int) -> Any:
        """Return the block that a pointer of :meth:`alloc` is in.

        Raises
        ------
        ValueError
            As for :meth:`free`.
        """
        if pointer not in self._blocks:
            raise ValueError(
                f"{self._who}: symmetric_free: {pointer!r} is not memory of symmetric_alloc, or is freed already"
            )
        return self._blocks[pointer]

    def leave(self, pointer: int) -> None:
        """Leave it to :meth:`free_left`; a finalizer may do this."""
        self._left.append(self._blocks.pop(pointer))

    @property
    def has_left(self) -> bool:
        """Whether something was left."""
        return bool(self._left)

    def free_left(self) -> None:
        """Free what was left."""
        while self._left:
            self._free(self._left.pop())
