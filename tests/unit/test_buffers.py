"""Array views and pairs of buffers, against what NumPy itself says of them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from butter_mpi.buffers import check_pair, current_stream, device_view, stream_handle, view
from butter_mpi.enums import DType

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@given(shapes, st.sampled_from(["int8", "float32", "float64"]))
def test_contiguous_arrays_are_seen_as_they_are(shape: tuple[int, ...], dtype: str) -> None:
    """Pointer, count and type of a contiguous array are NumPy's own, whatever its shape."""
    array = np.zeros(shape, dtype)
    seen = view(array, "x", writable=True)
    assert (seen.count, seen.nbytes, seen.dtype.label) == (array.size, array.nbytes, dtype)
    assert seen.pointer == (array.ctypes.data if array.size else 0)


@given(shapes.filter(lambda shape: shape and 0 not in shape), st.data())
def test_views_are_taken_just_when_numpy_calls_them_contiguous(shape: tuple[int, ...], data: st.DataObject) -> None:
    """A view is taken if and only if its elements lie one after another."""
    array = np.zeros(tuple(extent * 2 for extent in shape), np.float32)
    steps = [data.draw(st.sampled_from([1, 2, -1])) for _ in shape]
    piece = array[tuple(slice(None, None, step) for step in steps)]
    if piece.flags.c_contiguous:
        assert view(piece, "x", writable=False).count == piece.size
    else:
        with pytest.raises(ValueError, match="not C-contiguous"):
            view(piece, "x", writable=False)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12), st.integers(1, 4), st.integers(0, 3))
def test_overlap_is_refused_unless_in_place(start: int, other: int, one: int, ranks: int, rank: int) -> None:
    """Two buffers may share no element, but for this rank's own block in its place."""
    rank %= ranks
    memory = np.zeros(128, np.int32)
    send = view(memory[start : start + one], "s", writable=False)
    recv = view(memory[other : other + one * ranks], "r", writable=True)
    common = set(range(start, start + one)) & set(range(other, other + one * ranks))
    if common and start != other + rank * one:
        with pytest.raises(ValueError, match="overlap"):
            check_pair(send, recv, (1, ranks), rank, "test")
    else:
        assert check_pair(send, recv, (1, ranks), rank, "test") == one


def test_the_message_has_the_facts() -> None:
    """A wrong count is told with what there is, what is needed, and why."""
    send, recv = view(np.zeros(1000), "s", writable=False), view(np.zeros(128), "r", writable=True)
    with pytest.raises(ValueError, match=r"^rank 3/8: sendbuf has 1000 elements, needs 1024 \(recvbuf 128 x 8\)$"):
        check_pair(send, recv, (8, 1), 3, "rank 3/8")


def test_every_type_has_its_size() -> None:
    """The table of element types agrees with NumPy's and ml_dtypes' sizes."""
    for dtype in DType:
        assert np.dtype(getattr(ml_dtypes, dtype.label, dtype.label)).itemsize == dtype.itemsize
    assert [dtype.nccl for dtype in DType] == list(range(len(DType)))


class _Shown:
    """An array that shows only the protocol of device memory."""

    def __init__(self, **interface: object) -> None:
        shown = {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3}
        self.__cuda_array_interface__ = {**shown, **interface}


NATIVE, FOREIGN = ("<", ">") if sys.byteorder == "little" else (">", "<")


@pytest.mark.parametrize(
    "name",
    [
        *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
        *("float16", "float32", "float64", "bool", "complex64", "complex128"),
    ],
)
def test_types_by_the_protocol_alone(name: str) -> None:
    """An array without a dtype of its own has that of the protocol."""
    seen = device_view(_Shown(typestr=np.dtype(name).str), "x", writable=True)
    assert (seen.pointer, seen.count, seen.dtype.label) == (4096, 4, name)


def test_one_code_of_several_types() -> None:
    """What was found out of one array is not taken for another one's that only looks the same in the protocol."""
    code = np.dtype(ml_dtypes.bfloat16).str
    for _ in range(2):
        for shown in (np.dtype(ml_dtypes.bfloat16), SimpleNamespace(name="bfloat16")):  # the second can be no key
            array: Any = _Shown(typestr=code)
            array.dtype = shown
            assert device_view(array, "x", writable=True).dtype is DType.BFLOAT16
        with pytest.raises(ValueError, match="dtype must be one of"):
            device_view(_Shown(typestr=code), "x", writable=True)


@pytest.mark.parametrize(
    ("interface", "error", "text"),
    [
        ({"typestr": f"{FOREIGN}f4"}, ValueError, "foreign byte order"),
        ({"typestr": "|V2"}, ValueError, "dtype must be one of"),
        ({"typestr": f"{NATIVE}c32"}, ValueError, "got 'complex256'"),
        ({"typestr": f"{NATIVE}i16"}, ValueError, "got 'int128'"),
        ({"data": (0, False)}, ValueError, "x has 4 elements and no memory; it was freed"),
        ({"strides": (8,)}, ValueError, "not C-contiguous"),
        ({"data": (4096, True)}, ValueError, "x is read-only"),
        ({"mask": object()}, TypeError, "masked"),
        ({"shape": (-3,)}, ValueError, r"x says of itself that its shape is \(-3,\) of float32; extents must"),
        ({"shape": (-2, -2)}, ValueError, r"its shape is \(-2, -2\)"),
        ({"shape": (2**61,)}, ValueError, r"all of it at most 2\*\*63 - 1 bytes"),
    ],
)
def test_device_arrays_that_are_refused(interface: dict[str, object], error: type[Exception], text: str) -> None:
    """What is no plain array is refused by name."""
    with pytest.raises(error, match=text):
        device_view(_Shown(**interface), "x", writable=True)


LOOKALIKES = [
    name
    for name in dir(ml_dtypes)
    if name.startswith(("bfloat", "float", "int", "uint")) and name not in {dtype.label for dtype in DType}
]
"""Element types of the same sizes as those that operations have, and of other meanings."""


@pytest.mark.parametrize("name", [*LOOKALIKES, "float128", "void16"])
def test_types_that_look_like_others_are_refused_by_name(name: str) -> None:
    """A type of the same size is never read as another one: an 8-bit float has five namesakes."""
    known: dict[str, Any] = {"void16": "V2", "float128": np.longdouble}
    dtype = np.dtype(known.get(name) or getattr(ml_dtypes, name))
    array = np.zeros(4, dtype)
    shown = SimpleNamespace(dtype=dtype, __cuda_array_interface__=_Shown(typestr=dtype.str).__cuda_array_interface__)
    for look in (lambda: view(array, "x", writable=True), lambda: device_view(shown, "x", writable=True)):
        with pytest.raises(ValueError, match=f"x: dtype must be one of .*; got '{name}'"):
            look()


class _Tensor:
    """As much of a PyTorch tensor as an operation looks at, on a device."""

    is_cuda, device = True, "cuda:0"
    lazily_negative = False

    def __init__(self, like: np.ndarray, label: str = "float32") -> None:
        self._like, self.dtype, self.shape = like, f"torch.{label}", like.shape

    def numel(self) -> int:
        return self._like.size

    def is_contiguous(self) -> bool:
        return self._like.flags.c_contiguous

    def is_conj(self) -> bool:
        return False

    def is_neg(self) -> bool:
        return self.lazily_negative

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self._like.itemsize for step in self._like.strides)

    def data_ptr(self) -> int:
        return self._like.ctypes.data


_Tensor.__module__ = "torch"


def test_tensor_whose_sign_is_not_computed_yet() -> None:
    """A real tensor may hold its negative, as the imaginary part of a conjugate does: its memory is not its value."""
    tensor = _Tensor(np.zeros(1, np.float32))
    tensor.lazily_negative = True
    with pytest.raises(ValueError, match=r"has not computed yet; resolve_conj\(\)\.resolve_neg\(\)"):
        device_view(tensor, "x", writable=True)


def test_tensors_that_are_refused() -> None:
    """A tensor of strides, and of a type that no operation has, is refused with its shape and strides, or its type."""
    whole = np.zeros((4, 6), np.float32)
    assert device_view(_Tensor(whole), "x", writable=True).count == 24
    for piece, text in (
        (whole[:, 0], r"shape \(4,\), strides \(6,\) elements"),
        (whole.T, r"shape \(6, 4\), strides \(1, 6\) elements"),
        (whole[:, ::2], r"shape \(4, 3\), strides \(6, 2\) elements"),
    ):
        with pytest.raises(ValueError, match=f"x is not contiguous .{text}"):
            device_view(_Tensor(piece), "x", writable=True)
    for label in ("complex32", "float8_e4m3fnuz", "float8_e5m2fnuz", "quint8"):
        with pytest.raises(ValueError, match=f"x: dtype must be one of .*; got '{label}'"):
            device_view(_Tensor(whole, label), "x", writable=True)


def test_extents_that_are_equal_to_ints() -> None:
    """They are refused by name, or are ints from then on: what is kept of one array is found for others."""
    floats, numbers, plain = (
        SimpleNamespace(__cuda_array_interface__={"shape": (one,), "typestr": "<f8", "data": (8, False), "version": 3})
        for one in (173.0, np.int64(173), 173)
    )
    with pytest.raises(TypeError, match=r"x says of itself that its shape is \(173\.0,\); it must be a tuple of ints"):
        device_view(floats, "x", writable=False)
    for one in (numbers, plain):
        assert type(device_view(one, "x", writable=False).count) is int


def test_array_that_changes_between_two_looks() -> None:
    """What was found out of an array before is not taken for what it says now: where it is, its shape, its type."""
    array, other = _Shown(), _Shown(typestr="<i8")
    changes: list[tuple[dict[str, object], tuple[int, int, DType]]] = [
        ({}, (4096, 4, DType.FLOAT32)),
        ({"data": (8192, False)}, (8192, 4, DType.FLOAT32)),
        ({"shape": (2, 3)}, (4096, 6, DType.FLOAT32)),
        ({"shape": (2, 3), "strides": (12, 4)}, (4096, 6, DType.FLOAT32)),
        ({"typestr": np.dtype("i8").str}, (4096, 4, DType.INT64)),
        ({}, (4096, 4, DType.FLOAT32)),
    ]
    for interface, wanted in changes:
        array.__cuda_array_interface__ = _Shown(**interface).__cuda_array_interface__
        seen = device_view(array, "x", writable=True)
        assert (seen.pointer, seen.count, seen.dtype) == wanted
    assert device_view(other, "x", writable=True).dtype is DType.INT64
    refused: list[tuple[dict[str, object], str]] = [
        ({"shape": (2, 3), "strides": (4, 8)}, "not C-contiguous"),
        ({"data": (4096, True)}, "read-only"),
        ({"data": (0, False)}, "no memory; it was freed"),
        ({"typestr": f"{FOREIGN}f4"}, "foreign byte order"),
    ]
    for interface, text in refused:
        array.__cuda_array_interface__ = _Shown(**interface).__cuda_array_interface__
        with pytest.raises(ValueError, match=text):
            device_view(array, "x", writable=True)


class _Cupy:
    """As much of CuPy as an operation looks at: its arrays by attributes, the interface, and the current stream."""

    def __init__(self, *, names_streams: bool = True) -> None:
        self.stream, self.interfaces = 64, 0
        self.cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=self.stream))
        module = self

        class ndarray:  # noqa: N801 - CuPy's name
            def __init__(self, like: np.ndarray, pointer: int = 4096) -> None:
                self.like, self.data = like, SimpleNamespace(ptr=pointer)

            size = property(lambda self: self.like.size)
            dtype = property(lambda self: self.like.dtype)
            flags = property(lambda self: self.like.flags)

            @property
            def __cuda_array_interface__(self) -> dict[str, object]:
                module.interfaces += 1
                strides = None if self.like.flags.c_contiguous else self.like.strides
                shown = {"shape": self.like.shape, "typestr": self.like.dtype.str, "strides": strides, "version": 3}
                named = {"stream": module.stream or 1} if names_streams else {}
                return {**shown, **named, "data": (self.data.ptr if self.size else 0, False)}

        ndarray.__module__ = "cupy"
        self.ndarray: Any = ndarray


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> _Cupy:
    """CuPy as it usually is."""
    made = _Cupy()
    monkeypatch.setitem(sys.modules, "cupy", made)
    return made


@given(shapes, st.sampled_from(["int8", "float32", "bool", "complex128"]), st.booleans())
def test_cupy_arrays_are_read_as_their_interface_says(shape: tuple[int, ...], dtype: str, turned: bool) -> None:
    """By attributes, without the interface once the class is known, an array is what it would be by the interface."""
    with pytest.MonkeyPatch.context() as patch:
        cupy = _Cupy()
        patch.setitem(sys.modules, "cupy", cupy)
        like = np.zeros(shape, dtype)
        array = cupy.ndarray(like.T if turned else like)
        shown = SimpleNamespace(dtype=array.dtype, __cuda_array_interface__=array.__cuda_array_interface__)
        device_view(cupy.ndarray(np.zeros(2, np.float32)), "x", writable=True)
        asked = cupy.interfaces
        if array.like.flags.c_contiguous:
            one, other = (device_view(which, "x", writable=True) for which in (array, shown))
            assert (one.pointer, one.count, one.dtype, one.stream) == (other.pointer, other.count, other.dtype, 64)
            assert one.owner is array and cupy.interfaces == asked
        else:
            with pytest.raises(ValueError, match="not C-contiguous"):
                device_view(array, "x", writable=True)


def test_cupy_array_that_changes_between_two_looks(cupy: _Cupy) -> None:
    """Each look sees where an array is now, and which stream is current now; what is no more to be had is refused."""
    array = cupy.ndarray(np.zeros(4, np.float32))
    assert device_view(array, "x", writable=True).pointer == 4096
    array.data.ptr, cupy.stream = 8192, 0
    seen = device_view(array, "x", writable=True)
    assert (seen.pointer, seen.stream, current_stream(seen)) == (8192, 0, 0)
    array.like = np.zeros((2, 5), np.int32)
    seen = device_view(array, "x", writable=True)
    assert (seen.count, seen.dtype) == (10, DType.INT32)
    for like, pointer, text in (
        (np.zeros((4, 4), np.float32)[:, 0], 8192, r"not C-contiguous \(shape \(4,\), strides \(16,\) bytes\)"),
        (np.zeros(4, f"{FOREIGN}f4"), 8192, "float32 in foreign byte order"),
        (np.zeros(4, np.longdouble), 8192, "dtype must be one of"),
        (np.zeros(4, np.float32), 0, "4 elements and no memory; it was freed"),
    ):
        array.like, array.data.ptr = like, pointer
        with pytest.raises(ValueError, match=text):
            device_view(array, "x", writable=True)
    array.like = np.zeros((0, 3))
    assert device_view(array, "x", writable=True).pointer == 0


def test_cupy_that_was_told_to_name_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CuPy names no stream an operation is ordered with none of its own; its current one can still be asked."""
    cupy = _Cupy(names_streams=False)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    array = cupy.ndarray(np.zeros(4, np.float32))
    for _ in range(2):
        seen = device_view(array, "x", writable=True)
        assert seen.stream is None and current_stream(seen) == 64


def test_subclass_of_cupys_arrays(cupy: _Cupy) -> None:
    """What a class of somebody else says by the interface is taken as it says it."""

    class Masked(cupy.ndarray):  # type: ignore[misc,name-defined]
        @property
        def __cuda_array_interface__(self) -> dict[str, object]:
            return {**super().__cuda_array_interface__, "mask": self}

    for _ in range(2):
        with pytest.raises(TypeError, match="masked"):
            device_view(Masked(np.zeros(4, np.float32)), "x", writable=True)


def test_empty_and_host_arrays_on_the_device() -> None:
    """An array without elements has no pointer; host memory and lists are no device memory."""
    assert device_view(_Shown(shape=(0, 3)), "x", writable=True).pointer == 0
    for wrong in (np.zeros(3), [1.0], None):
        with pytest.raises(TypeError, match="x must be an array in device memory"):
            device_view(wrong, "x", writable=True)


def test_stream_handles() -> None:
    """The protocol of streams, the two libraries' own attributes, and integers; nothing else."""
    assert stream_handle(SimpleNamespace(__cuda_stream__=lambda: (0, 64), ptr=8)) == 64
    assert stream_handle(SimpleNamespace(ptr=72)) == 72 and stream_handle(SimpleNamespace(cuda_stream=80)) == 80
    assert stream_handle(np.int64(88)) == 88
    for wrong in (None, True, 1.0, "0"):
        with pytest.raises(TypeError, match="must be a CUDA stream or its handle"):
            stream_handle(wrong)


def test_current_stream_by_the_protocol() -> None:
    """An array tells of its stream, or of none; what is no stream is refused by the buffer's name."""

    def stream(**interface: object) -> int | None:
        return current_stream(device_view(_Shown(**interface), "x", writable=True))

    assert stream(stream=7) == 7 and stream() is None and stream(stream=None) is None
    with pytest.raises(TypeError, match=r"^x: stream must be a CUDA stream or its handle; got builtins\.str"):
        stream(stream="first")


def test_tensors_name_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's current stream is asked of PyTorch; beside one that is given, its tensors name none."""
    seen = device_view(_Tensor(np.zeros(4, np.float32)), "x", writable=True)
    current = SimpleNamespace(current_stream=lambda _device: SimpleNamespace(cuda_stream=64))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=current))
    assert current_stream(seen) == 64 and seen.stream is None
