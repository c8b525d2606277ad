"""Arrays that are known by DLPack alone: what is read of them, and what is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.capsule import Exporter

from butter_mpi.buffers import current_stream, device_view, view
from butter_mpi.enums import DType

FLOAT32 = np.dtype(np.float32)


@pytest.mark.parametrize("readonly", [None, False])
def test_device_arrays(readonly: bool | None) -> None:
    """Address with its offset, count and type, from capsules of both kinds; no stream is named, and none ordered."""
    array = Exporter(4096, (2, 3), FLOAT32, offset=8, readonly=readonly)
    seen = device_view(array, "x", writable=True)
    assert (seen.pointer, seen.count, seen.dtype) == (4104, 6, DType.FLOAT32)
    assert current_stream(seen) is None and array.streams == [-1]
    assert device_view(Exporter(0, (0, 3), FLOAT32), "x", writable=True).pointer == 0
    assert device_view(Exporter(4096, (3,), FLOAT32, device=(13, 0)), "x", writable=True).count == 3


def test_the_library_orders_its_own_work() -> None:
    """The array's library is asked to let the ordered stream come after what it has under way; 0 is named 1 there."""
    array = Exporter(4096, (2,), FLOAT32)
    follow = device_view(array, "x", writable=False).follow
    assert follow is not None
    follow(64)
    follow(0)
    assert array.streams == [-1, 64, 1]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((np.dtype(dtype.label), dtype) for dtype in DType if hasattr(np, dtype.label) or dtype is DType.BOOL),
        ((4, 16), DType.BFLOAT16),
        ((10, 8), DType.FLOAT8_E4M3),
        ((12, 8), DType.FLOAT8_E5M2),
    ],
    ids=str,
)
def test_types(kind: Any, dtype: DType) -> None:
    """Every element type has its kind and bits there."""
    assert device_view(Exporter(4096, (2,), kind), "x", writable=True).dtype is dtype


@pytest.mark.parametrize(
    ("array", "error", "text"),
    [
        (Exporter(4096, (2, 3), FLOAT32, strides=(1, 2)), ValueError, r"not C-contiguous .*strides \(1, 2\) elements"),
        (Exporter(4096, (2,), FLOAT32, readonly=True), ValueError, "x is read-only"),
        (Exporter(4096, (2,), (2, 8)), ValueError, "got 'float8'"),
        (Exporter(4096, (2,), (11, 8)), ValueError, "got 'DLPack kind 11 8'"),
        (Exporter(4096, (2,), FLOAT32, device=(1, 0)), TypeError, "is not in device memory"),
        (Exporter(4096, (2,), FLOAT32, device=(10, 0)), TypeError, "device is of DLPack's kind 10, neither host nor"),
        (Exporter(0, (2,), FLOAT32), ValueError, "x has 2 elements and no memory; it was freed"),
        (Exporter(4096, (-3,), FLOAT32), ValueError, r"its shape is \(-3,\) of float32; extents must be 0 or more"),
        (Exporter(4096, (2**31, 2**30), FLOAT32), ValueError, r"at most 2\*\*63 - 1 bytes"),
    ],
    ids=["strides", "read-only", "bits", "kind", "host", "another device", "freed", "negative", "too large"],
)
def test_refusals(array: Exporter, error: type[Exception], text: str) -> None:
    """What is no plain array of this memory is refused by name."""
    with pytest.raises(error, match=text):
        device_view(array, "x", writable=True)


def test_jax_arrays_are_never_written_to() -> None:
    """JAX takes its arrays for constants, whatever their capsule says; they can be sent."""

    class Array(Exporter):
        __cuda_array_interface__ = {"a": "protocol without streams and bfloat16"}

    Array.__module__ = "jaxlib._jax"
    array = Array(4096, (2,), (4, 16))
    assert device_view(array, "x", writable=False).dtype is DType.BFLOAT16
    assert array.streams == [1], "JAX would take -1 for the handle of a stream"
    with pytest.raises(ValueError, match="x is read-only"):
        device_view(array, "x", writable=True)


class _OnHost:
    """A host array that shows nothing but DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **more: Any) -> Any:
        return self._array.__dlpack__(**more)


def test_host_arrays() -> None:
    """On host memory it is the array's own memory; another is refused."""
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    seen = view(_OnHost(array[1:]), "x", writable=True)
    assert (seen.pointer, seen.count, seen.dtype, seen.follow) == (array[1:].ctypes.data, 3, DType.INT16, None)
    with pytest.raises(ValueError, match=r"not C-contiguous .*strides \(1, 3\)"):
        view(_OnHost(array.T), "x", writable=True)
    with pytest.raises(TypeError, match="is not in host memory"):
        view(Exporter(4096, (2,), FLOAT32), "x", writable=True)
