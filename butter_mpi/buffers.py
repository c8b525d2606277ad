"""What an array is to an operation: pointer, count, element type; and why one is refused."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from butter_mpi.enums import DType

__all__ = ["ArrayView", "check_pair", "current_stream", "device_view", "stream_handle", "view"]

_KINDS = {"f": "float", "i": "int", "u": "uint"}
_FOREIGN_ENDIAN = ">" if sys.byteorder == "little" else "<"


@dataclass(slots=True)
class ArrayView:
    """A contiguous array as an operation sees it; ``owner`` keeps its memory alive. Nobody changes one.

    ``stream`` is what the array names in ``__cuda_array_interface__``: work on it may be under way there.
    """

    pointer: int
    count: int
    dtype: DType
    readonly: bool
    owner: Any
    stream: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self.count * self.dtype.itemsize


def view(array: Any, name: object, *, writable: bool) -> ArrayView:
    """Return how an operation sees `array`, without copying it.

    Parameters
    ----------
    array : object with ``__array_interface__``
        Any shape, C-contiguous, in this machine's byte order, host memory.
    name : object
        The argument's name, for messages: its text.
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
    return _interface_view(array, interface, name, writable=writable)


def _interface_view(array: Any, interface: Mapping[str, Any], name: object, *, writable: bool) -> ArrayView:
    """Return what the array protocol says of host or device memory."""
    dtype = _dtype(array, interface["typestr"], name)
    shape, strides = interface["shape"], interface.get("strides")
    count = _count(shape)
    if strides is not None and not _contiguous(shape, strides, dtype.itemsize):
        raise ValueError(
            f"{name} is not C-contiguous (shape {shape}, strides {strides} bytes); ascontiguousarray makes a copy"
        )
    pointer, readonly = interface["data"]
    if writable and readonly:
        raise ValueError(f"{name} is read-only and would be written to (shape {shape}, {dtype.label})")
    return ArrayView(pointer if count else 0, count, dtype, readonly, array, _named_stream(interface, name))


def _named_stream(interface: Mapping[str, Any], name: object) -> int | None:
    stream = interface.get("stream")
    try:
        return None if stream is None else stream_handle(stream)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def device_view(array: Any, name: object, *, writable: bool) -> ArrayView:
    """Return how an operation sees an array in device memory, without copying it.

    Parameters
    ----------
    array : CuPy array, PyTorch tensor, or any object with ``__cuda_array_interface__``
        Any shape, C-contiguous.
    name : object
        The argument's name, for messages: its text.
    writable : bool
        Whether the operation writes into it.

    Returns
    -------
    ArrayView
        Pointer (0 where there are no elements), element count and type.

    Raises
    ------
    TypeError
        Not an array, or a host array, or its stream is none.
    ValueError
        Strided, read-only while it is to be written, or an element type that no operation has.
    """
    if _library_of(array) == "torch":
        return _tensor_view(array, name)
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        raise TypeError(
            f"{name} must be an array in device memory (CuPy, PyTorch, Numba), which this plane works on; got "
            f"{_typename(array)}"
        )
    if interface.get("mask") is not None:
        raise TypeError(f"{name} is a masked array, and operations know no masks; pass its data")
    return _interface_view(array, interface, name, writable=writable)


def _tensor_view(tensor: Any, name: object) -> ArrayView:
    """PyTorch's array interface refuses bfloat16 and what needs gradients, so a tensor is asked itself.

    It names no stream there: streams other than the current one are the user's to order, by PyTorch's rules.
    """
    if not tensor.is_cuda:
        raise TypeError(f"{name} is a PyTorch tensor on {tensor.device}; this plane works on device memory: .cuda()")
    label = str(tensor.dtype).removeprefix("torch.")
    try:
        dtype = DType.parse(label)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    count = int(tensor.numel())
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} is not contiguous (shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())} elements); "
            ".contiguous() makes a copy"
        )
    return ArrayView(int(tensor.data_ptr()) if count else 0, count, dtype, False, tensor)


def _library_of(array: Any) -> str:
    return type(array).__module__.split(".")[0]


def stream_handle(stream: Any) -> int:
    """Return the handle of a CUDA stream.

    Parameters
    ----------
    stream : int or object
        A handle, an object with ``__cuda_stream__`` (cuda.core, PyTorch), or one of CuPy or PyTorch with the handle as
        ``ptr`` or ``cuda_stream``.

    Returns
    -------
    int
        The handle; whether it is one, the plane checks.

    Raises
    ------
    TypeError
        Nothing of these.
    """
    if stream.__class__ is int:
        return int(stream)
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for name in ("ptr", "cuda_stream"):
        if hasattr(stream, name):
            return int(getattr(stream, name))
    if isinstance(stream, bool) or not hasattr(stream, "__index__"):
        raise TypeError(f"stream must be a CUDA stream or its handle; got {_typename(stream)}")
    return int(stream.__index__())


def current_stream(seen: ArrayView) -> int | None:
    """Return the current stream of the library that an array is of, ``None`` where that cannot be told.

    Parameters
    ----------
    seen : ArrayView
        An array in device memory.

    Returns
    -------
    int or None
        The handle.
    """
    library = _library_of(seen.owner)
    module = sys.modules.get(library)
    if library == "cupy" and module is not None:
        return int(module.cuda.get_current_stream().ptr)
    if library == "torch" and module is not None:
        return int(module.cuda.current_stream(seen.owner.device).cuda_stream)
    return seen.stream


def check_pair(send: ArrayView, recv: ArrayView, blocks: tuple[int, int], rank: int, what: object) -> int:
    """Return the count of one block after checking two buffers against each other.

    Parameters
    ----------
    send, recv : ArrayView
        The two buffers.
    blocks : tuple of two int
        Blocks in each; one of them is 1.
    rank : int
        This rank: its block is the one that may be in place.
    what : object
        Who and what, for messages: its text.

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


def _dtype(array: Any, typestr: str, name: object) -> DType:
    label = getattr(getattr(array, "dtype", None), "name", None) or _label(typestr)
    if typestr.startswith(_FOREIGN_ENDIAN):
        raise ValueError(f"{name} is {label} in foreign byte order ({typestr}); astype to the native one first")
    try:
        return DType.parse(label)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _label(typestr: str) -> str:
    """Return the name of an element type in the array protocol: ``<f4`` is ``float32``."""
    kind, size = _KINDS.get(typestr[1:2]), typestr[2:]
    return f"{kind}{8 * int(size)}" if kind and size.isdigit() else typestr


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
