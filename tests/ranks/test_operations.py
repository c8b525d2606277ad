"""Every operation with every element type and operator, beside NumPy; and what is refused, or found to differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers.arrays import Array, Arrays
from helpers.memory import PLANE
from helpers.model import TYPES, check, contribution, operators, raw, reduced
from mpi4py import MPI

from butter_mpi import Communicator, DType, PreMulSum, ReduceOp
from butter_mpi.errors import CollectiveMismatchError

pytestmark = pytest.mark.mpi

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
RANKS = range(SIZE)
COUNTS = [(3 * r + 2) % 5 for r in RANKS]
"""One count a rank, of which the second is zero."""
TOTAL = sum(COUNTS)
STARTS = [sum(COUNTS[:r]) for r in RANKS]
NOT_REDUCED = [DType.INT16, DType.UINT16] if PLANE == "nccl" else []


@pytest.fixture
def arrays(comm: Communicator) -> Arrays:
    """What makes arrays for `comm`."""
    return Arrays(comm)


def cases() -> Iterator[tuple[DType, ReduceOp | PreMulSum]]:
    """Every reduction that there is on this plane."""
    for dtype in DType:
        if dtype not in NOT_REDUCED:
            yield from ((dtype, op) for op in operators(dtype))


def test_every_reduction(comm: Communicator, arrays: Arrays) -> None:
    """all_reduce, reduce, reduce_scatter and reduce_scatter_v, out of place: each type with each operator."""
    for number, (dtype, op) in enumerate(cases()):
        root, what = number % SIZE, f"{dtype.label} {op.label}"
        blank = np.invert(contribution(0, 5, dtype).view(np.uint8)).view(TYPES[dtype])
        send, recv = arrays(contribution(RANK, 5, dtype)), arrays(blank)
        comm.all_reduce(send, recv, op=op)
        check(arrays.get(recv), reduced(5, dtype, op), f"all_reduce {what}")
        recv = arrays(blank)
        comm.reduce(send, recv if root == RANK else None, root, op=op)
        check(arrays.get(recv), reduced(5, dtype, op) if root == RANK else blank, f"reduce {what}")
        check(arrays.get(send), contribution(RANK, 5, dtype), f"send buffer {what}")
        for counts, scatter in (([3] * SIZE, comm.reduce_scatter), (COUNTS, comm.reduce_scatter_v)):
            at = sum(counts[:RANK])
            own = slice(at, at + counts[RANK])
            send, recv = arrays(contribution(RANK, sum(counts), dtype)), arrays(np.zeros(counts[RANK], TYPES[dtype]))
            more = (counts,) if counts is COUNTS else ()
            scatter(send, recv, *more, op=op)
            wanted = reduced(sum(counts), dtype, op)[own]
            check(arrays.get(recv), wanted, f"{scatter.__name__} {what}")


def moves(comm: Communicator, arrays: Arrays, dtype: np.dtype[Any]) -> Iterator[tuple[str, Array, Array]]:
    """Yield what each operation that moves data left, and what it must be, for an element type."""

    def blank(count: int) -> Any:
        return arrays(np.zeros(count, dtype))

    n, root = 4, SIZE - 1
    whole = np.concatenate([raw(r, n, dtype) for r in RANKS])
    own = arrays(raw(RANK, n, dtype))
    buf = arrays(raw(RANK, n, dtype))
    comm.broadcast(buf, root)
    yield "broadcast", arrays.get(buf), raw(root, n, dtype)
    every = blank(n * SIZE)
    comm.all_gather(own, every)
    yield "all_gather", arrays.get(every), whole
    every = blank(n * SIZE)
    comm.gather(own, every if root == RANK else None, root)
    yield "gather", arrays.get(every), whole if root == RANK else np.zeros(n * SIZE, dtype)
    share = blank(n)
    comm.scatter(arrays(whole) if root == RANK else None, share, root)
    yield "scatter", arrays.get(share), raw(RANK, n, dtype)
    came = blank(n * SIZE)
    comm.all_to_all(arrays(raw(RANK, n * SIZE, dtype)), came)
    blocks = [raw(r, n * SIZE, dtype)[RANK * n : (RANK + 1) * n] for r in RANKS]
    yield "all_to_all", arrays.get(came), np.concatenate(blocks)
    uneven = np.concatenate([raw(r, COUNTS[r], dtype) for r in RANKS])
    mine, every = arrays(raw(RANK, COUNTS[RANK], dtype)), blank(TOTAL)
    comm.all_gather_v(mine, every, COUNTS)
    yield "all_gather_v", arrays.get(every), uneven
    every = blank(TOTAL)
    comm.gather_v(mine, every if root == RANK else None, COUNTS if root == RANK else None, root)
    yield "gather_v", arrays.get(every), uneven if root == RANK else np.zeros(TOTAL, dtype)
    share = blank(COUNTS[RANK])
    comm.scatter_v(arrays(uneven) if root == RANK else None, share, COUNTS if root == RANK else None, root)
    yield "scatter_v", arrays.get(share), raw(RANK, COUNTS[RANK], dtype)
    matrix = [[(source + 2 * target) % 3 for target in RANKS] for source in RANKS]
    sends, receives = matrix[RANK], [row[RANK] for row in matrix]
    came = blank(sum(receives))
    comm.all_to_all_v(arrays(raw(RANK, sum(sends), dtype)), came, sends, receives)
    cut = [raw(r, sum(matrix[r]), dtype)[sum(matrix[r][:RANK]) :][: matrix[r][RANK]] for r in RANKS]
    yield "all_to_all_v", arrays.get(came), np.concatenate(cut)
    came = blank(n)
    comm.sendrecv(own, (RANK + 1) % SIZE, came, (RANK - 1) % SIZE)
    yield "sendrecv", arrays.get(came), raw((RANK - 1) % SIZE, n, dtype)
    yield "what was sent", arrays.get(own), raw(RANK, n, dtype)


@pytest.mark.parametrize("calls", ["of NCCL 2.28", "composed"] if PLANE == "nccl" and SIZE > 1 else ["own"])
def test_every_move(comm: Communicator, arrays: Arrays, calls: str) -> None:
    """What moves data moves any bytes of any type; an older NCCL gets gather, scatter and all_to_all composed."""
    plane: Any = comm.backend
    if calls == "composed":
        plane._issuer._has = dict.fromkeys(("ncclGather", "ncclScatter", "ncclAlltoAll"), False)
    for dtype in TYPES.values() if calls != "composed" else (TYPES[DType.COMPLEX64],):
        for what, got, wanted in moves(comm, arrays, dtype):
            check(got, wanted, f"{what} {dtype}")


def test_in_place(comm: Communicator, arrays: Arrays) -> None:
    """This rank's own block in place: reduce, gather, scatter and all that have counts, but an all_to_all."""
    dtype, whole = np.dtype(np.int32), np.arange(TOTAL, dtype=np.int32)
    held = arrays(np.full(3, RANK + 1, dtype))
    comm.reduce(held, root=0)
    assert (arrays.get(held) == (SIZE * (SIZE + 1) // 2 if RANK == 0 else RANK + 1)).all()
    even = np.concatenate([raw(r, 4, dtype) for r in RANKS])
    mine = np.where(np.arange(4 * SIZE) // 4 == RANK, even, 0).astype(dtype)
    every = arrays(mine)
    comm.gather(arrays.part(every, 4 * RANK, 4), every, 0)
    assert (arrays.get(every) == (even if RANK == 0 else mine)).all()
    spread, share = arrays(even), arrays(np.zeros(4, dtype))
    comm.scatter(spread, arrays.part(spread, 0, 4) if RANK == 0 else share, 0)
    assert (arrays.get(spread)[:4] == even[:4]).all() and (
        RANK == 0 or (arrays.get(share) == raw(RANK, 4, dtype)).all()
    )
    own = slice(STARTS[RANK], STARTS[RANK] + COUNTS[RANK])
    mine = np.zeros(TOTAL, dtype)
    mine[own] = whole[own]
    for name in ("all_gather_v", "gather_v"):
        every = arrays(mine)
        part = arrays.part(every, STARTS[RANK], COUNTS[RANK])
        comm.all_gather_v(part, every, COUNTS) if name == "all_gather_v" else comm.gather_v(part, every, COUNTS)
        assert (arrays.get(every) == (whole if name == "all_gather_v" or RANK == 0 else mine)).all(), name
    spread = arrays(whole)
    comm.reduce_scatter_v(spread, arrays.part(spread, STARTS[RANK], COUNTS[RANK]), COUNTS)
    assert (arrays.get(spread)[own] == SIZE * whole[own]).all()
    spread, share = arrays(whole), arrays(np.zeros(COUNTS[RANK], dtype))
    comm.scatter_v(spread, arrays.part(spread, 0, COUNTS[0]) if RANK == 0 else share, COUNTS)
    assert RANK == 0 or (arrays.get(share) == whole[own]).all()


def test_numbers_and_zero_counts(comm: Communicator, arrays: Arrays) -> None:
    """No elements are legal on all ranks alike; a collective takes one number, those made of others one for each."""
    none, zeros = arrays(np.zeros(0)), [0] * SIZE
    calls: list[tuple[Callable[[], None], int]] = [
        (lambda: comm.reduce(none), 1),
        (lambda: comm.gather(none, none), 1),
        (lambda: comm.scatter(none, none), 1),
        (lambda: comm.all_to_all(none, none), 1),
        (lambda: comm.all_gather_v(none, none, zeros), SIZE),
        (lambda: comm.reduce_scatter_v(none, none, zeros), SIZE),
        (lambda: comm.gather_v(none, none, zeros), 1),
        (lambda: comm.scatter_v(none, none, zeros), 1),
        (lambda: comm.all_to_all_v(none, none, zeros, np.zeros(SIZE, np.int64)), 1),
        (lambda: comm.sendrecv(none, (RANK + 1) % SIZE, none, (RANK - 1) % SIZE), 0),
    ]
    for call, numbers in calls:
        before = comm.sequence
        call()
        assert comm.sequence == before + numbers
    with comm.group():
        for call, _ in calls:
            call()
    total = arrays(np.ones(2))
    comm.all_reduce(total)
    assert (arrays.get(total) == SIZE).all()


def refusals(comm: Communicator, arrays: Arrays) -> Iterator[tuple[Callable[[], None], type[Exception], str]]:
    """Yield calls with wrong arguments, the error, and what it says."""
    a, b, flags = arrays(np.zeros(2 * SIZE)), arrays(np.zeros(2 * SIZE)), arrays(np.zeros(2, bool))
    two, complexes = arrays(np.zeros(2)), arrays(np.zeros(2, np.complex64))
    whole, even = arrays(np.zeros(2, np.int8)), [2] * SIZE
    for op in ("avg", PreMulSum(1)):
        yield partial(comm.all_reduce, flags, op=op), ValueError, r"all_reduce #1: op \w+ is none of bool"
    for op in ("prod", "min", "max"):
        yield partial(comm.reduce, complexes, op=op), ValueError, "is none of complex64, which has sum, avg"
    yield lambda: comm.all_reduce(two, op="premul_sum"), ValueError, r"pass butter_mpi\.PreMulSum\(factor\)"
    for by in (0.5, 128, -129):
        text = f"factor of PreMulSum must be of int8, -128 to 127; got {by}"
        yield partial(comm.all_reduce, whole, op=PreMulSum(by)), ValueError, text
    yield lambda: comm.all_to_all(a, a), ValueError, r"all_to_all #1: sendbuf and recvbuf overlap; pass buffers that do"
    wrong = arrays(np.zeros(2 * SIZE + 1))
    yield lambda: comm.all_to_all(a, wrong), ValueError, f"recvbuf has {2 * SIZE + 1} elements, needs {2 * SIZE} "
    if SIZE > 1:
        other = arrays(np.zeros(2 * SIZE + 1))
        yield lambda: comm.all_to_all(wrong, other), ValueError, f"which are no {SIZE} equal blocks"
    yield lambda: comm.gather(two, None, RANK), TypeError, "gather #1: recvbuf must be a"
    yield lambda: comm.scatter(None, two, RANK), TypeError, "scatter #1: sendbuf must be a"
    yield lambda: comm.gather(two, wrong, RANK), ValueError, f"recvbuf has {2 * SIZE + 1} elements, needs {2 * SIZE}"
    yield lambda: comm.reduce(two, root=SIZE), ValueError, f"reduce #1: root must be from 0 to {SIZE - 1}; got {SIZE}"
    yield lambda: comm.reduce(two, root="0"), TypeError, "reduce #1: root must be an int; got str"  # type: ignore[arg-type]
    yield lambda: comm.sendrecv(two, SIZE, a, 0), ValueError, "dest must be from 0"
    yield lambda: comm.sendrecv(two, 0, a, -1), ValueError, "src must be from 0"
    yield lambda: comm.sendrecv(two, RANK, two, RANK), ValueError, "sendrecv #1: sendbuf and recvbuf overlap"
    yield lambda: comm.all_gather_v(two, a, [2] * (SIZE + 1)), ValueError, f"one count for each of {SIZE} ranks; got"
    yield lambda: comm.all_gather_v(two, a, 2), TypeError, "counts must be a sequence of"  # type: ignore[arg-type]
    yield lambda: comm.all_gather_v(two, a, [2.0] * SIZE), TypeError, "got float in it"  # type: ignore[list-item]
    yield lambda: comm.all_gather_v(two, a, [-1] * SIZE), ValueError, "numbers of elements, 0 or more; got -1 in it"
    yield lambda: comm.all_gather_v(two, wrong, even), ValueError, f"recvbuf has {2 * SIZE + 1} .*sum of its counts"
    text = "own block is 1 elements of sendbuf and 2 of recvbuf"
    yield lambda: comm.all_gather_v(arrays(np.zeros(1)), a, even), ValueError, text
    yield lambda: comm.gather_v(two, a, None, RANK), TypeError, "gather_v #1: counts must be a sequence"
    yield lambda: comm.all_to_all_v(a, a, even, even), ValueError, "sendbuf and recvbuf overlap"
    yield lambda: comm.all_to_all_v(a, arrays(np.zeros(2 * SIZE, np.float32)), even, even), ValueError, "be equal"
    yield lambda: comm.all_to_all_v(a, b, even, [2] * SIZE + [0]), ValueError, "recv_counts must have one count"


def test_refusals_poison_nothing(comm: Communicator, arrays: Arrays) -> None:
    """Wrong arguments are refused by name before anything is sent, and take no number."""
    for call, kind, text in refusals(comm, arrays):
        with pytest.raises(kind, match=text) as caught:
            call()
        assert str(caught.value).startswith(f"rank {RANK}/{SIZE}") and comm.sequence == 0, text
    with pytest.raises(TypeError, match="factor of PreMulSum must be an int or a float, of Python or NumPy; got str"):
        PreMulSum("2")  # type: ignore[arg-type]
    total = arrays(np.ones(2))
    comm.all_reduce(total)
    assert (arrays.get(total) == SIZE).all()


def a_count_that_root_does_not_expect(comm: Communicator, make: Arrays) -> None:
    """The last rank sends two, and root, the first one, takes three of it."""
    expected = [2] * (SIZE - 1) + [3]
    comm.gather_v(make(np.zeros(2)), make(np.zeros(sum(expected))) if RANK == 0 else None, expected)


def counts_of_two_ranks_that_do_not_fit(comm: Communicator, make: Arrays) -> None:
    """The first rank sends two to the last one, which takes one."""
    sends = [1] * (SIZE - 1) + [2 if RANK == 0 else 1]
    comm.all_to_all_v(make(np.zeros(sum(sends))), make(np.zeros(SIZE)), sends, [1] * SIZE)


def another_root(comm: Communicator, make: Arrays) -> None:
    """The first rank means another one."""
    comm.reduce(make(np.zeros(2)), root=int(RANK == 0))


def another_type_of_the_same_size(comm: Communicator, make: Arrays) -> None:
    """Truth values go as bytes, and are not bytes."""
    comm.all_reduce(make(np.zeros(2, bool if RANK else np.uint8)), op="max")


def another_operator(comm: Communicator, make: Arrays) -> None:
    """A sum that multiplies first is none that does not."""
    comm.all_reduce(make(np.zeros(2)), op=PreMulSum(1) if RANK else "sum")


def other_counts(comm: Communicator, make: Arrays) -> None:
    """The first rank has another count of the last one's."""
    counts = [2] * (SIZE - 1) + [3 if RANK == 0 else 2]
    comm.all_gather_v(make(np.zeros(2)), make(np.zeros(sum(counts))), counts)


SCENES = [
    a_count_that_root_does_not_expect,
    counts_of_two_ranks_that_do_not_fit,
    another_root,
    another_type_of_the_same_size,
    another_operator,
    other_counts,
]
ON_NCCL = [a_count_that_root_does_not_expect, another_type_of_the_same_size]
"""Fewer, as a communicator for each takes time, and the plane has no part in what is compared."""


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
@pytest.mark.parametrize("scene", SCENES if PLANE == "host" else ON_NCCL)
def test_ranks_that_differ_are_told(
    comm: Communicator, arrays: Arrays, scene: Callable[[Communicator, Arrays], None]
) -> None:
    """Another type, operator, root or count is found as for every operation, on every rank."""

    def call() -> None:
        scene(comm, arrays)
        # The watcher compares what ranks do not, and tells them a little later.
        comm.wait_for_async_error(10)

    with pytest.raises(CollectiveMismatchError):
        call()
