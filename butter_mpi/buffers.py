"""What an array is to an operation: pointer, count, element type; and why one is refused."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from butter_mpi import dlpack
from butter_mpi.enums import DType

__all__ = [
    "READERS",
    "ArrayView",
    "Holder",
    "Reader",
    "check_apart",
    "check_counts",
    "check_pair",
    "current_stream",
    "device_view",
    "reader_of",
    "starts",
    "stream_handle",
    "view",
]

_KINDS = {"f": "float", "i": "int", "u": "uint", "c": "complex"}
_JAX = ("jax", "jaxlib")
_FOREIGN_ENDIAN = ">" if sys.byteorder == "little" else "<"
# By class, and by a library's own object for an element type: what was found out of arrays before.
_LIBRARIES: dict[type, str] = {}
_DTYPES: dict[Any, DType] = {}
# By what an array says of its elements, shape and strides: their number and type, where it is contiguous.
_LAYOUTS: dict[Any, tuple[int, DType]] = {}
_MOST_KNOWN = 256
_MOST_BYTES = 2**63 - 1


class Holder:
    """What holds an array as ``array``, and as a context manager gives it; operations do not take it itself."""


@dataclass(slots=True)
class ArrayView:
    """A contiguous array as an operation sees it; ``owner`` keeps its memory alive, and ``name`` is the argument's.

    ``stream`` is what the array names in ``__cuda_array_interface__``: work on it may be under way there. ``follow``
    lets a stream come after what the array's library has under way; it is there where only the library knows.
    """

    pointer: int
    count: int
    dtype: DType
    owner: Any
    stream: int | None = None
    follow: Callable[[int], None] | None = None
    name: object = ""

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self.count * self.dtype.itemsize


Reader = Callable[[Any, object, bool], ArrayView]
READERS: dict[type, Reader] = {}
"""By class: what reads an array in device memory, of those classes that were met; see :func:`reader_of`."""


def view(array: Any, name: object, *, writable: bool) -> ArrayView:
    """Return how an operation sees `array`, without copying it.

    Parameters
    ----------
    array : NumPy array, PyTorch tensor, or object with ``__array_interface__`` or ``__dlpack__``
        Any shape, C-contiguous, in this machine's byte order, host memory.
    name : str, or what gives one
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
    if _library_of(array) == "torch":
        return _tensor_view(array, name, writable, on_device=False)
    if not hasattr(array, "__array_interface__") and hasattr(array, "__dlpack__"):
        return _dlpack_view(array, name, writable=writable, on_device=False)
    interface = getattr(array, "__array_interface__", {})
    # A NumPy scalar shows the protocol too, over memory that is gone when this returns.
    if not isinstance(interface.get("data"), tuple) or not hasattr(array, "__setitem__"):
        remedy = _inside(array) or "numpy.asarray makes one"
        raise TypeError(f"{name} must be a NumPy array; got {_typename(array)} ({remedy})")
    if type(array).__module__.startswith("numpy.ma"):
        raise TypeError(f"{name} is a masked array, and operations know no masks; pass its data or its filled() copy")
    return _interface_view(array, interface, name, writable=writable)


def _interface_view(array: Any, interface: Mapping[str, Any], name: object, *, writable: bool) -> ArrayView:
    """Return what the array protocol says of host or device memory."""
    shape = interface["shape"]
    said = interface["typestr"], getattr(array, "dtype", None), shape, interface.get("strides")
    try:
        count, dtype = _LAYOUTS[said]
    except (KeyError, TypeError):
        # Not met before; or what is shown as a type can be no key.
        count, dtype = _layout(said, name)
    pointer, readonly = interface["data"]
    stream = interface.get("stream")
    if writable and readonly:
        raise ValueError(f"{name} is read-only and would be written to (shape {shape}, {dtype.label})")
    if stream is not None and stream.__class__ is not int:
        stream = _named_stream(stream, name)
    if not count or not pointer or pointer.__class__ is not int:
        pointer = _memory(pointer, count, name)
    return ArrayView(pointer, count, dtype, array, stream)


def _layout(said: tuple[Any, ...], name: object) -> tuple[int, DType]:
    """Return the number of elements and their type, by what an array says of them: the same for the same words."""
    typestr, shown, shape, strides = said
    dtype = _dtype(shown, typestr, name)
    count = _count(shape, dtype, name)
    if strides is not None and not _contiguous(shape, strides, dtype.itemsize):
        raise ValueError(
            f"{name} is not C-contiguous (shape {shape}, strides {strides} bytes); ascontiguousarray makes a copy"
        )
    _make_room(_LAYOUTS)
    with contextlib.suppress(TypeError):
        _LAYOUTS[said] = count, dtype
    return count, dtype


def _count(shape: tuple[int, ...], dtype: DType, name: object) -> int:
    """Return the number of elements; what an array says of its shape is taken for true only where it can be."""
    try:
        # What is no Python int (4.0, say) can be equal to one, and would be found under its key.
        count = math.prod(map(operator.index, shape))
    except TypeError:
        raise TypeError(f"{name} says of itself that its shape is {shape!r}; it must be a tuple of ints") from None
    if not 0 <= count * dtype.itemsize <= _MOST_BYTES or (len(shape) > 1 and min(shape) < 0):
        raise ValueError(
            f"{name} says of itself that its shape is {shape} of {dtype.label}; extents must be 0 or more, and all of "
            "it at most 2**63 - 1 bytes. Look at what makes this array"
        )
    return count


def _memory(pointer: int | None, count: int, name: object) -> int:
    """Return the address, 0 where there are no elements."""
    if count and not pointer:
        raise ValueError(f"{name} has {count} elements and no memory; it was freed")
    return int(pointer or 0) if count else 0


def _named_stream(stream: Any, name: object) -> int:
    try:
        return stream_handle(stream)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def device_view(array: Any, name: object, *, writable: bool) -> ArrayView:
    """Return how an operation sees an array in device memory, without copying it.

    Parameters
    ----------
    array : CuPy array, PyTorch tensor, or any object with ``__cuda_array_interface__`` or ``__dlpack__``
        Any shape, C-contiguous.
    name : str, or what gives one
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
        Not an array, or a host array, or its stream is none.
    ValueError
        Strided, read-only while it is to be written, or an element type that no operation has.
    """
    return (READERS.get(array.__class__) or reader_of(array))(array, name, writable)


def reader_of(array: Any) -> Reader:
    """Return what reads arrays of this class, and keep it in :data:`READERS`: how a class is read does not change.

    Parameters
    ----------
    array : object
        The first of its class.

    Returns
    -------
    callable
        Returns the view of an array, by a name and whether it is written; see :func:`device_view`.
    """
    _make_room(READERS)
    reader = READERS[array.__class__] = _find_reader(array)
    return reader


def _find_reader(array: Any) -> Reader:
    library, kind = _library_of(array), array.__class__
    if library == "torch":
        return _tensor_view
    # JAX's array interface knows neither streams nor bfloat16.
    if library in _JAX and hasattr(array, "__dlpack__"):
        return _read_dlpack
    if library == "cupy" and kind is getattr(sys.modules.get("cupy"), "ndarray", None):
        return _cupy_reader(array, sys.modules["cupy"])
    if kind is getattr(sys.modules.get("cuda.core"), "Buffer", None) and hasattr(kind, "is_closed"):
        return _read_buffer
    return _read_shown


def _read_dlpack(array: Any, name: object, writable: bool) -> ArrayView:
    return _dlpack_view(array, name, writable=writable, on_device=True)


def _cupy_reader(first: Any, module: Any) -> Reader:
    """Return what reads CuPy's arrays by their attributes: their interface costs several times as much to make.

    It names the current stream, unless CuPy was told not to name any, which does not change once it is imported.
    """
    # Where there is no CUDA below, CuPy has none.
    if (getattr(first, "__cuda_array_interface__", None) or {}).get("stream") is None:
        return _read_shown
    current = module.cuda.get_current_stream

    def read(array: Any, name: object, writable: bool) -> ArrayView:
        if not array.flags.c_contiguous:
            return _read_shown(array, name, writable)
        shown = array.dtype
        dtype = _DTYPES.get(shown) or _kept(shown, _dtype(shown, shown.str, name))
        pointer, count = array.data.ptr, array.size
        if not count or not pointer:
            pointer = _memory(pointer, count, name)
        return ArrayView(pointer, count, dtype, array, current().ptr)

    return read


def _read_buffer(buffer: Any, name: object, writable: bool) -> ArrayView:
    """Return what a buffer of cuda.core says of itself, which is what it says by DLPack: bytes, and no stream."""
    if buffer.is_closed or buffer.is_host_accessible or not buffer.is_device_accessible:
        return _read_dlpack(buffer, name, writable)
    pointer, count = buffer.handle, buffer.size
    if not count or not pointer:
        pointer = _memory(pointer, count, name)
    return ArrayView(pointer, count, DType.INT8, buffer)


def _read_shown(array: Any, name: object, writable: bool) -> ArrayView:
    """Return what an array says by whichever protocol it has."""
    # Some make it anew each time that they are asked.
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        if hasattr(array, "__dlpack__") and not _shows(array):
            return _read_dlpack(array, name, writable)
        remedy = _inside(array)
        raise TypeError(
            f"{name} must be an array in device memory (CuPy, PyTorch, JAX, Numba), which this plane works on; got "
            f"{_typename(array)}{remedy and f' ({remedy})'}"
        )
    if interface.get("mask") is not None:
        raise TypeError(f"{name} is a masked array, and operations know no masks; pass its data")
    return _interface_view(array, interface, name, writable=writable)


def _inside(array: Any) -> str:
    """Return how to come by the array of what only holds one."""
    return "pass its .array, or what a with block gives" if isinstance(array, Holder) else ""


def _shows(array: Any) -> bool:
    return hasattr(array, "__cuda_array_interface__") or hasattr(array, "__array_interface__")


def _tensor_view(tensor: Any, name: object, _writable: bool, *, on_device: bool = True) -> ArrayView:
    """PyTorch's array interface refuses bfloat16 and what needs gradients, so a tensor is asked itself.

    It names no stream there: streams other than the current one are the user's to order, by PyTorch's rules.
    """
    if tensor.is_cuda is not on_device:
        wanted, how = ("device", ".cuda()") if on_device else ("host", ".cpu()")
        raise TypeError(f"{name} is a PyTorch tensor on {tensor.device}; this plane works on {wanted} memory: {how}")
    shown = tensor.dtype
    dtype = _DTYPES.get(shown) or _kept(shown, _parsed(str(shown).removeprefix("torch."), name))
    count = tensor.numel()
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} is not contiguous (shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())} elements); "
            ".contiguous() makes a copy"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"{name} is a conjugate, or a part of one, that PyTorch has not computed yet; "
            "resolve_conj().resolve_neg() makes a copy"
        )
    pointer = tensor.data_ptr()
    if not count or not pointer:
        pointer = _memory(pointer, count, name)
    return ArrayView(pointer, count, dtype, tensor)


def _dlpack_view(array: Any, name: object, *, writable: bool, on_device: bool) -> ArrayView:
    """Return what an array says by DLPack; what its library has under way, an operation is ordered after."""
    try:
        # JAX takes any number for a stream's handle, also the one that means none.
        jax = _library_of(array) in _JAX
        seen = dlpack.look(array, dlpack.LEGACY_STREAM if jax else dlpack.NO_ORDER)
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} ({_typename(array)}) does not give its memory by DLPack: {error}") from None
    if seen.on_device is not on_device:
        wanted = "device" if on_device else "host"
        raise TypeError(f"{name} ({_typename(array)}) is not in {wanted} memory, which this plane works on")
    dtype = _parsed(seen.dtype, name)
    count = _count(seen.shape, dtype, name)
    # Strides there are in elements, which only matters for what is refused.
    if seen.strides is not None and not _contiguous(seen.shape, seen.strides, 1):
        raise ValueError(
            f"{name} is not C-contiguous (shape {seen.shape}, strides {seen.strides} elements); make a copy that is"
        )
    readonly = seen.readonly or jax
    if writable and readonly:
        raise ValueError(f"{name} is read-only and would be written to (shape {seen.shape}, {dtype.label})")
    follow = (lambda stream: dlpack.follow(array, stream)) if on_device else None
    return ArrayView(_memory(seen.pointer, count, name), count, dtype, array, follow=follow)


def _library_of(array: Any) -> str:
    kind = array.__class__
    library = _LIBRARIES.get(kind)
    if library is None:
        _make_room(_LIBRARIES)
        library = _LIBRARIES[kind] = str(kind.__module__).split(".")[0]
    return library


def _make_room(known: dict[Any, Any]) -> None:
    """Forget everything where much is known: what comes again is found out again."""
    if len(known) >= _MOST_KNOWN:
        known.clear()


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
    if seen.stream is not None:
        return seen.stream
    library = _library_of(seen.owner)
    module = sys.modules.get(library)
    if library == "cupy" and module is not None:
        return int(module.cuda.get_current_stream().ptr)
    if library == "torch" and module is not None:
        return int(module.cuda.current_stream(seen.owner.device).cuda_stream)
    return None


def check_pair(
    send: ArrayView, recv: ArrayView, blocks: tuple[int, int], rank: int, what: object, *, in_place: bool = True
) -> int:
    """Return the count of one block after checking two buffers against each other.

    Parameters
    ----------
    send, recv : ArrayView
        The two buffers.
    blocks : tuple of two int
        Blocks in each.
    rank : int
        This rank: its block is the one that may be in place.
    what : str, or what gives one
        Who and what, for messages.
    in_place : bool, default True
        Whether this rank's own block may be in place.

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
    _check_types(send, recv, what)
    sends, receives = send.count, recv.count
    if sends * recv_blocks != receives * send_blocks:
        raise ValueError(f"{what}: {_wrong_count(sends, receives, blocks)}")
    one = sends // send_blocks
    if one * send_blocks != sends:
        raise ValueError(f"{what}: sendbuf has {sends} elements, which are no {send_blocks} equal blocks")
    own = rank * one
    if in_place:
        _check_overlap(send, recv, (own if send_blocks > 1 else 0, own if recv_blocks > 1 else 0), what)
    else:
        check_apart(send, recv, what)
    return one


def _wrong_count(sends: int, receives: int, blocks: tuple[int, int]) -> str:
    send_blocks, recv_blocks = blocks
    if times := recv_blocks // send_blocks:
        return f"recvbuf has {receives} elements, needs {sends * times} (sendbuf {sends} x {times})"
    return f"sendbuf has {sends} elements, needs {receives * send_blocks} (recvbuf {receives} x {send_blocks})"


def _check_types(send: ArrayView, recv: ArrayView, what: object) -> None:
    if send.dtype is not recv.dtype:
        raise ValueError(f"{what}: sendbuf is {send.dtype.label} and recvbuf {recv.dtype.label}; they must be equal")


def _check_overlap(send: ArrayView, recv: ArrayView, own: tuple[int, int], what: object) -> None:
    """Refuse buffers that share memory, but for this rank's own block, which begins at element `own` of each."""
    size = send.dtype.itemsize
    if send.pointer + own[0] * size != recv.pointer + own[1] * size:
        check_apart(send, recv, what, ", or for in place this rank's own block")


def check_apart(send: ArrayView, recv: ArrayView, what: object, remedy: str = "") -> None:
    """Refuse buffers that share memory.

    Raises
    ------
    ValueError
        They do.
    """
    source, target = send.pointer, recv.pointer
    if source + send.count * send.dtype.itemsize <= target or target + recv.count * recv.dtype.itemsize <= source:
        return
    if send.count and recv.count:
        raise ValueError(f"{what}: sendbuf and recvbuf overlap; pass buffers that do not{remedy}")


def check_counts(
    send: ArrayView,
    recv: ArrayView,
    counts: tuple[Sequence[int] | None, Sequence[int] | None],
    rank: int,
    what: object,
) -> None:
    """Check two buffers against the counts that say how each is cut; ``None``: it is one block.

    Raises
    ------
    ValueError
        Types or counts differ, or the buffers overlap other than in place.
    """
    _check_types(send, recv, what)
    own = []
    for name, buffer, cuts in zip(("sendbuf", "recvbuf"), (send, recv), counts, strict=True):
        own.append((buffer.count, 0) if cuts is None else (cuts[rank], sum(cuts[:rank])))
        if cuts is not None and sum(cuts) != buffer.count:
            raise ValueError(f"{what}: {name} has {buffer.count} elements, needs {sum(cuts)} (the sum of its counts)")
    (sends, send_at), (receives, recv_at) = own
    if sends != receives:
        raise ValueError(f"{what}: this rank's own block is {sends} elements of sendbuf and {receives} of recvbuf")
    if None in counts:
        _check_overlap(send, recv, (send_at, recv_at), what)
    else:
        check_apart(send, recv, what)


def starts(counts: Sequence[int]) -> list[int]:
    """Return where each block begins, of blocks that lie one behind another."""
    return [0, *itertools.accumulate(counts)][: len(counts)]


def _typename(array: Any) -> str:
    return f"{type(array).__module__}.{type(array).__qualname__}"


def _dtype(shown: Any, typestr: str, name: object) -> DType:
    """Return an element type by what an array shows as its type, and by the code that the protocol has for it."""
    label = getattr(shown, "name", None) or _label(typestr)
    if typestr.startswith(_FOREIGN_ENDIAN):
        raise ValueError(f"{name} is {label} in foreign byte order ({typestr}); astype to the native one first")
    return _parsed(label, name)


def _kept(shown: Any, dtype: DType) -> DType:
    """Keep what a library's own object for an element type means."""
    _make_room(_DTYPES)
    _DTYPES[shown] = dtype
    return dtype


def _parsed(label: str, name: object) -> DType:
    try:
        return DType.parse(label)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _label(typestr: str) -> str:
    """Return the name of an element type in the array protocol: ``<f4`` is ``float32``."""
    if typestr[1:] == "b1":
        return "bool"
    kind, size = _KINDS.get(typestr[1:2]), typestr[2:]
    return f"{kind}{8 * int(size)}" if kind and size.isdigit() else typestr


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    if 0 in shape:
        return True
    expected = itemsize
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True
