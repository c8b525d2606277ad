"""Checks of the operations: fresh data, poisoned outputs, guarded buffers, odd counts, in and out of place."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from butter_mpi.enums import DType, ReduceOp
from butter_mpi.selftest.checks import Context
from butter_mpi.selftest.data import Buffer, Case, Expected, Values, differing

__all__ = [
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "group",
    "moved",
    "reduce_scatter",
    "reduced",
    "send_recv",
]

Array = npt.NDArray[Any]

_SMALL = (0, 1, 3)
_LARGE = 2**20 + 1
_LATE_SECONDS = 0.2
_OTHER_OPS = tuple(op for op in ReduceOp if op is not ReduceOp.SUM)


def _counts(blocks: int = 1) -> tuple[int, ...]:
    """Return counts of one block; more than two blocks share the large one, so that no world makes buffers huge."""
    return (*_SMALL, _LARGE if blocks <= 2 else (2 * _LARGE // blocks) | 1)


def reduced(what: str, result: Buffer, expected: Expected) -> Iterator[str]:
    """Yield how what a reduction left differs from what it must be."""
    wrong = differing(result.get(), expected)
    yield from (f"{what}: {fact}" for fact in ([wrong] if wrong else []) + result.harm())


def moved(what: str, result: Buffer, expected: Array) -> Iterator[str]:
    """Yield how bytes differ: any pattern must come over as it is, also those that are no number."""
    result.get()
    wrong = differing(result.bytes, Expected(expected.view(np.uint8), 0.0))
    yield from (f"{what}: {fact}" for fact in ([f"bytes: {wrong}"] if wrong else []) + result.harm())


def _reductions(
    dtypes: Sequence[DType], blocks: int, *large_ops: Iterable[ReduceOp]
) -> Iterator[tuple[DType, ReduceOp, int]]:
    """Every element type with every operator on small counts; on the large one with operators from `large_ops` in turn.

    What the large count tries is how a plane cuts data into pieces and takes the fast paths of its libraries.
    """
    *small, large = _counts(blocks)
    yield from itertools.product(dtypes, ReduceOp, small)
    for dtype, *ops in zip(dtypes, *map(itertools.cycle, large_ops), strict=False):
        yield from ((dtype, op, large) for op in ops)


def all_reduce(context: Context) -> Iterator[str]:
    """Every element type and operator, out of place and then in place."""
    comm = context.comm
    for dtype, op, count in _reductions(context.types.reduced, 1, [ReduceOp.SUM], _OTHER_OPS):
        case = context.case(dtype, count, op)
        values = Values(case, comm.world_size)
        own, expected = values.of(comm.rank), values.expected()
        send, recv = context.buffer(dtype, count), context.buffer(dtype, count)
        send.fill(own)
        recv.poison(expected.values.astype(own.dtype))
        comm.all_reduce(send.array, recv.array, op=op)
        yield from reduced(f"{case}, out of place", recv, expected)
        yield from moved(f"{case}, send buffer", send, own)
        comm.all_reduce(send.array, op=op)
        yield from reduced(f"{case}, in place", send, expected)


def _broadcast(context: Context, case: Case, root: int) -> Iterator[str]:
    expected = case.raw(root)
    buffer = context.buffer(case.dtype, case.count)
    if context.comm.rank == root:
        buffer.fill(expected)
    else:
        buffer.poison(expected)
    context.comm.broadcast(buffer.array, root)
    yield from moved(f"{case} from rank {root}", buffer, expected)


def broadcast(context: Context) -> Iterator[str]:
    """Every element type and count with changing roots, then every rank as root."""
    ranks = range(context.comm.world_size)
    roots = itertools.cycle(ranks)
    for dtype, count in itertools.product(context.types.moved, _counts()):
        yield from _broadcast(context, context.case(dtype, count), next(roots))
    for root in ranks:
        yield from _broadcast(context, context.case(DType.FLOAT32, _SMALL[-1]), root)


def all_gather(context: Context) -> Iterator[str]:
    """Every element type and count, out of place, then with this rank's block in place."""
    comm = context.comm
    for dtype, count in itertools.product(context.types.moved, _counts(comm.world_size)):
        case = context.case(dtype, count)
        blocks = [case.raw(rank) for rank in range(comm.world_size)]
        expected, own = np.concatenate(blocks), blocks[comm.rank]
        send, recv = context.buffer(dtype, count), context.buffer(dtype, count * comm.world_size)
        send.fill(own)
        recv.poison(expected)
        comm.all_gather(send.array, recv.array)
        yield from moved(f"{case}, out of place", recv, expected)
        yield from moved(f"{case}, send buffer", send, own)
        recv.poison(expected)
        block = recv.array[comm.rank * count : (comm.rank + 1) * count]
        recv.fill(own, comm.rank * count)
        comm.all_gather(block, recv.array)
        yield from moved(f"{case}, in place", recv, expected)


def _scattered(context: Context, dtype: DType, op: ReduceOp, count: int) -> Iterator[str]:
    comm = context.comm
    case = context.case(dtype, count * comm.world_size, op)
    values = Values(case, comm.world_size)
    share = slice(comm.rank * count, (comm.rank + 1) * count)
    own, expected = values.of(comm.rank), values.expected(share)
    send, recv = context.buffer(dtype, case.count), context.buffer(dtype, count)
    send.fill(own)
    recv.poison(expected.values.astype(own.dtype))
    comm.reduce_scatter(send.array, recv.array, op=op)
    yield from reduced(f"{case}, out of place", recv, expected)
    yield from moved(f"{case}, send buffer", send, own)
    comm.reduce_scatter(send.array, send.array[share], op=op)
    wrong = differing(send.get()[share], expected)
    yield from (f"{case}, in place: {fact}" for fact in ([wrong] if wrong else []) + send.harm())


def reduce_scatter(context: Context) -> Iterator[str]:
    """Every element type and operator, out of place, then into this rank's block of the send buffer."""
    for dtype, op, count in _reductions(context.types.reduced, context.comm.world_size, ReduceOp):
        yield from _scattered(context, dtype, op, count)


def barrier(context: Context) -> Iterator[str]:
    """No rank leaves before a late one has come, for two late ranks.

    Needs no common clock and cannot be wrong about a slow machine: every rank begins its watch before it tells the
    others that it is there, the late rank sleeps after it heard that of all, so a barrier that holds takes at least as
    long as that sleep by every rank's own watch.
    """
    comm = context.comm
    first = context.draw(comm.world_size)
    for late in dict.fromkeys((first, (first + 1) % comm.world_size)):
        began = time.monotonic()
        comm.all_gather_json(None)
        if comm.rank == late:
            time.sleep(_LATE_SECONDS)
        comm.barrier()
        context.place.wait()
        waited = time.monotonic() - began
        if waited < _LATE_SECONDS:
            yield f"left the barrier after {waited:.3f} s, before rank {late} came to it ({_LATE_SECONDS:g} s late)"


def send_recv(context: Context) -> Iterator[str]:
    """Every rank sends to the next one and receives from the one before, in a group; then one plain pair."""
    comm = context.comm
    after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    for dtype, count in itertools.product(context.types.moved, _counts()):
        case = context.case(dtype, count)
        own, expected = case.raw(comm.rank), case.raw(before)
        send, recv = context.buffer(dtype, count), context.buffer(dtype, count)
        send.fill(own)
        recv.poison(expected)
        with comm.group():
            comm.send(send.array, after)
            comm.recv(recv.array, before)
        yield from moved(f"{case} from rank {before}", recv, expected)
        yield from moved(f"{case}, send buffer", send, own)
    if comm.world_size > 1:
        yield from _pair(context, 0, comm.world_size - 1)


def _pair(context: Context, source: int, target: int) -> Iterator[str]:
    case = context.case(DType.INT64, _SMALL[-1])
    buffer = context.buffer(case.dtype, case.count)
    expected = case.raw(source)
    if context.comm.rank == source:
        buffer.fill(expected)
        context.comm.send(buffer.array, target)
    elif context.comm.rank == target:
        buffer.poison(expected)
        context.comm.recv(buffer.array, source)
        yield from moved(f"{case} from rank {source}, without a group", buffer, expected)


def group(context: Context) -> Iterator[str]:
    """Submit collectives of all kinds and a ring of sends and receives together."""
    comm, ranks = context.comm, context.comm.world_size
    root = context.draw(ranks)
    values = Values(context.case(DType.INT32, 3 * ranks, ReduceOp.SUM), ranks)
    case = context.case(DType.FLOAT32, 3)
    total, share = context.buffer(DType.INT32, 3 * ranks), context.buffer(DType.INT32, 3)
    copied, gathered, ring = (
        context.buffer(case.dtype, 3),
        context.buffer(case.dtype, 3 * ranks),
        context.buffer(case.dtype, 3),
    )
    own, before = case.raw(comm.rank), case.raw((comm.rank - 1) % ranks)
    blocks = np.concatenate([case.raw(rank) for rank in range(ranks)])
    part = values.expected(slice(comm.rank * 3, (comm.rank + 1) * 3))
    mine, spread = context.buffer(case.dtype, 3), context.buffer(DType.INT32, 3 * ranks)
    for buffer, held in ((total, values.of(comm.rank)), (spread, values.of(comm.rank)), (copied, own), (mine, own)):
        buffer.fill(held)
    for buffer, expected in ((share, part.values), (gathered, blocks), (ring, before)):
        buffer.poison(expected)
    with comm.group():
        comm.recv(ring.array, (comm.rank - 1) % ranks)
        comm.all_gather(mine.array, gathered.array)
        comm.reduce_scatter(spread.array, share.array, op="sum")
        comm.all_reduce(total.array, op="sum")
        comm.send(mine.array, (comm.rank + 1) % ranks)
        comm.broadcast(copied.array, root)
    yield from reduced("all_reduce", total, values.expected())
    yield from reduced("reduce_scatter", share, part)
    yield from moved("all_gather", gathered, blocks)
    yield from moved("broadcast", copied, case.raw(root))
    yield from moved("send and recv", ring, before)
