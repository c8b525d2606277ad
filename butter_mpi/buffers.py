"""What an array is to an operation: pointer, count, element type; and why one is refused."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from butter_mpi.enums import DType

__all__ = ["ArrayView", "check_pair", "view"]

_FOREIGN_ENDIAN = ">" if sys.byteorder == "little" else "<"


@dataclass(frozen=True, slots=True)
class ArrayView:
    """A contiguous host array as an operation sees it; ``owner`` keeps its memory alive."""

    pointer: int
    count: int
    dtype: DType
    readonly: bool
    owner: Any

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self.count * self.dtype.itemsize


def view(array: Any, name: str, *, writable: bool) -> ArrayView:
    """Return how an operation sees `array`, without copying it.

    Parameters
    ----------
    array : object with ``__array_interface__``
        Any shape, C-contiguous, in this machine's byte order, host memory.
    name : str
        The argument's name, for messages.
    writable : bool
        Whether the operation writes into it.

    Returns
    -------
    ArrayView
        Pointer (0 where there are no elements), element count and type.

    Raises
    ------
    TypeError
        Not an array, or a device array.
    ValueError
        Strided, read-only while it is to be written, foreign byte order, or an element type that no operation has.
    """
    if hasattr(array, "__cuda_array_interface__"):
        raise TypeError(
            f"{name} is device memory ({_typename(array)}); this plane works on host memory: pass NumPy arrays"
        )
    interface = getattr(array, "__array_interface__", {})
    # A NumPy scalar shows the protocol too, over memory that is gone when this returns.
    if not isinstance(interface.get("data"), tuple) or not hasattr(array, "__setitem__"):
        raise TypeError(f"{name} must be a NumPy array; got {_typename(array)} (numpy.asarray makes one)")
    if type(array).__module__.startswith("numpy.ma"):
        raise TypeError(f"{name} is a masked array, and operations know no masks; pass its data or its filled() copy")
    dtype = _dtype(array, interface["typestr"], name)
    shape, strides = interface["shape"], interface.get("strides")
    count = _count(shape)
    if strides is not None and not _contiguous(shape, strides, dtype.itemsize):
        raise ValueError(
            f"{name} is not C-contiguous (shape {shape}, strides {strides} bytes); numpy.ascontiguousarray makes a copy"
        )
    pointer, readonly = interface["data"]
    if writable and readonly:
        raise ValueError(f"{name} is read-only and would be written to (shape {shape}, {dtype.label})")
    return ArrayView(pointer if count else 0, count, dtype, readonly, array)


def check_pair(send: ArrayView, recv: ArrayView, blocks: tuple[int, int], rank: int, what: str) -> int:
    """Return the count of one block after checking two buffers against each other.

    Parameters
    ----------
    send, recv : ArrayView
        The two buffers.
    blocks : tuple of two int
        Blocks in each; one of them is 1.
    rank : int
        This rank: its block is the one that may be in place.
    what : str
        Who and what, for messages.

    Returns
    -------
    int
        Elements of one block.

    Raises
    ------
    ValueError
        Types or counts differ, or the buffers overlap other than in place.
    """
    send_blocks, recv_blocks = blocks
    if send.dtype is not recv.dtype:
        raise ValueError(f"{what}: sendbuf is {send.dtype.label} and recvbuf {recv.dtype.label}; they must be equal")
    if send.count * recv_blocks != recv.count * send_blocks:
        side, have, need, other = (
            ("recvbuf", recv.count, send.count * recv_blocks, f"sendbuf {send.count} x {recv_blocks}")
            if send_blocks == 1
            else ("sendbuf", send.count, recv.count * send_blocks, f"recvbuf {recv.count} x {send_blocks}")
        )
        raise ValueError(f"{what}: {side} has {have} elements, needs {need} ({other})")
    one = send.count // send_blocks
    step = one * send.dtype.itemsize
    apart = send.pointer + send.nbytes <= recv.pointer or recv.pointer + recv.nbytes <= send.pointer
    in_place = recv.pointer + (rank * step if recv_blocks > 1 else 0) == send.pointer + (
        rank * step if send_blocks > 1 else 0
    )
    if one and not apart and not in_place:
        raise ValueError(
            f"{what}: sendbuf and recvbuf overlap; pass buffers that do not, or for in place this rank's own block"
        )
    return one


def _typename(array: Any) -> str:
    return f"{type(array).__module__}.{type(array).__qualname__}"


def _dtype(array: Any, typestr: str, name: str) -> DType:
    label = getattr(getattr(array, "dtype", None), "name", typestr)
    if typestr.startswith(_FOREIGN_ENDIAN):
        raise ValueError(f"{name} is {label} in foreign byte order ({typestr}); astype to the native one first")
    try:
        return DType.parse(label)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    if 0 in shape:
        return True
    expected = itemsize
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True
