"""DLPack capsules, made by hand as an array's library makes them."""

from __future__ import annotations

import ctypes
from typing import Any

from butter_mpi import dlpack

__all__ = ["Exporter"]

_new = ctypes.pythonapi.PyCapsule_New
_new.restype = ctypes.py_object
_new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}


class Exporter:
    """An array that only speaks DLPack, and remembers the streams that it was asked to order.

    Parameters
    ----------
    pointer, shape, dtype
        What it says of its memory; `dtype` is NumPy's, or (code, bits).
    device : tuple of two int
        DLPack's kind, and ordinal.
    strides : tuple of int, optional
        In elements.
    offset : int
        Bytes from the pointer to the first element.
    readonly : bool, optional
        Said in a versioned capsule; without it, the capsule is of before version 1.
    """

    def __init__(
        self,
        pointer: int,
        shape: tuple[int, ...],
        dtype: Any,
        *,
        device: tuple[int, int] = (2, 0),
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
        readonly: bool | None = None,
    ) -> None:
        code, bits = dtype if isinstance(dtype, tuple) else (CODES[dtype.kind], 8 * dtype.itemsize)
        self._device, self._readonly = device, readonly
        self.streams: list[int | None] = []
        kind = dlpack._Versioned if readonly is not None else dlpack._Tensor
        self._whole: Any = kind()
        tensor = self._whole.tensor if readonly is not None else self._whole
        tensor.data, tensor.device_type, tensor.device_id = pointer, *device
        tensor.ndim, tensor.code, tensor.bits, tensor.lanes, tensor.byte_offset = len(shape), code, bits, 1, offset
        self._kept = (ctypes.c_int64 * len(shape))(*shape), strides and (ctypes.c_int64 * len(strides))(*strides)
        tensor.shape = ctypes.cast(self._kept[0], ctypes.POINTER(ctypes.c_int64))
        if self._kept[1]:
            tensor.strides = ctypes.cast(self._kept[1], ctypes.POINTER(ctypes.c_int64))
        if readonly is not None:
            self._whole.major, self._whole.flags = 1, int(readonly)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, *, stream: int | None = None, **more: Any) -> Any:
        if self._readonly is None and more:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.streams.append(stream)
        name = b"dltensor" if self._readonly is None else b"dltensor_versioned"
        return _new(ctypes.addressof(self._whole), name, None)
