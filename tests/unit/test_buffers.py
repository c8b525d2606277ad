"""Array views and pairs of buffers, against what NumPy itself says of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from butter_mpi.buffers import check_pair, view
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
    import ml_dtypes

    for dtype in DType:
        assert np.dtype(getattr(ml_dtypes, dtype.label, dtype.label)).itemsize == dtype.itemsize
    assert [dtype.nccl for dtype in DType] == list(range(len(DType)))
