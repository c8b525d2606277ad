"""DLPack by ctypes: what an array says of its memory, read and given back at once; and memory shown to others."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

__all__ = ["LEGACY_STREAM", "NO_ORDER", "ON_DEVICE", "Seen", "follow", "look", "show"]

_OLD, _VERSIONED = b"dltensor", b"dltensor_versioned"
_HOST = (1, 3)  # the CPU's, also pinned for CUDA
_CUDA = (2, 13)  # a CUDA device's, also managed
ON_DEVICE = 2
"""A CUDA device's memory, as ``__dlpack_device__`` names it."""
LEGACY_STREAM = 1
"""What the legacy default stream is called there."""
NO_ORDER = -1
"""Asks for no order at all."""
_READ_ONLY = 1
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool", 10: "float8_e4m3fn", 12: "float8_e5m2"}


class _Tensor(ctypes.Structure):
    """``DLTensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """``DLManagedTensorVersioned``."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


class _Managed(ctypes.Structure):
    """``DLManagedTensor``."""

    _fields_ = (("tensor", _Tensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


@dataclass(frozen=True, slots=True)
class Seen:
    """What an array says: ``strides`` are in elements, ``None`` for contiguous; ``dtype`` a name, known here or not."""

    pointer: int
    on_device: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str
    readonly: bool


def look(array: Any, stream: int = NO_ORDER) -> Seen:
    """Return what an array says of its memory.

    `stream` is what a device array's library is asked to order with its own work: none, where it knows that answer.
    The capsule is not consumed: its own destructor gives back what the array's library holds for it, and whoever has
    the array has its memory.

    Raises
    ------
    ValueError
        It is in memory of a kind that is neither the host's nor CUDA's.
    """
    kind = int(array.__dlpack_device__()[0])
    if kind not in _HOST + _CUDA:
        raise ValueError(f"its device is of DLPack's kind {kind}, neither host nor CUDA")
    capsule = _capsule(array, stream if kind in _CUDA else None)
    tensor, readonly = _read(capsule)
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None
    pointer = (tensor.data or 0) + tensor.byte_offset
    return Seen(pointer if tensor.data else 0, kind in _CUDA, shape, strides, _dtype(tensor), readonly)


def follow(array: Any, stream: int) -> None:
    """Let a stream come after what an array's library has under way on the array: the library does it, when asked."""
    _capsule(array, stream or LEGACY_STREAM)


def _capsule(array: Any, stream: int | None) -> Any:
    try:
        return array.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:
        # A library of before version 1 of the protocol.
        return array.__dlpack__(stream=stream)


_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _read(capsule: Any) -> tuple[_Tensor, bool]:
    if _is_valid(capsule, _VERSIONED):
        whole = _Versioned.from_address(_pointer_of(capsule, _VERSIONED))
        return whole.tensor, bool(whole.flags & _READ_ONLY)
    return _Tensor.from_address(_pointer_of(capsule, _OLD)), False


def _dtype(tensor: _Tensor) -> str:
    kind = _KINDS.get(tensor.code, f"DLPack kind {tensor.code} ")
    whole = kind == "bool" or kind.startswith("float8")
    return (kind if whole else f"{kind}{tensor.bits}") + (f"x{tensor.lanes}" if tensor.lanes != 1 else "")


# -- showing ---------------------------------------------------------------------------------------------------------

# By address: what others hold, with the owner of its memory.
_SHOWN: dict[int, tuple[Any, ...]] = {}


def _let_go(address: int) -> None:
    """Let go of what was shown; whoever has taken the capsule calls this once, from any thread."""
    _SHOWN.pop(address, None)


def _end(capsule: int) -> None:
    """Let go of what nobody has taken: a capsule that was taken has another name. The object is on its way out."""
    if _valid(capsule, _OLD):
        _let_go(_pointer(capsule, _OLD))


_Deleter, _Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p), ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_delete, _destruct = _Deleter(_let_go), _Destructor(_end)
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Destructor)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def show(pointer: int, shape: tuple[int, ...], dtype: str, ordinal: int, owner: Any) -> Any:
    """Return the capsule of contiguous device memory; whoever takes it keeps `owner` alive as long as it is used.

    Parameters
    ----------
    pointer : int
        The address.
    shape : tuple of int
        Its extents.
    dtype : str
        The name of an element type.
    ordinal : int
        The device.
    owner : object
        What the memory is of.

    Returns
    -------
    object
        The capsule.
    """
    extents = (ctypes.c_int64 * len(shape))(*shape)
    managed = _Managed()
    tensor = managed.tensor
    tensor.data, tensor.device_type, tensor.device_id, tensor.ndim = pointer, ON_DEVICE, ordinal, len(shape)
    tensor.code, tensor.bits = _code(dtype)
    tensor.lanes, tensor.shape = 1, ctypes.cast(extents, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = ctypes.cast(_delete, ctypes.c_void_p)
    address = ctypes.addressof(managed)
    _SHOWN[address] = managed, extents, owner
    return _new(address, _OLD, _destruct)


def _code(dtype: str) -> tuple[int, int]:
    """Return the kind and the bits of an element type: a name that is a kind's whole is of 8 bits."""
    codes = {name: code for code, name in _KINDS.items()}
    if dtype in codes:
        return codes[dtype], 8
    kind = dtype.rstrip("0123456789")
    return codes[kind], int(dtype[len(kind) :])
