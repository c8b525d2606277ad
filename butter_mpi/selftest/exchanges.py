"""Checks of the operations with a root, between all pairs of ranks, and with a count for each rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from butter_mpi.enums import DType, PreMulSum, ReduceOp
from butter_mpi.selftest.checks import Context
from butter_mpi.selftest.collectives import moved, reduced
from butter_mpi.selftest.data import Buffer, Case, Expected, Values

__all__ = ["carried", "rooted", "uneven"]

Array = npt.NDArray[Any]

_SMALL = (0, 1, 3)
_LARGE = 2**18 + 1


def _poisoned(context: Context, expected: Array, dtype: DType) -> Buffer:
    """Return a buffer that holds nothing of what is expected."""
    buffer = context.buffer(dtype, len(expected))
    buffer.poison(expected)
    return buffer


def _filled(context: Context, content: Array, dtype: DType) -> Buffer:
    buffer = context.buffer(dtype, len(content))
    buffer.fill(content)
    return buffer


def rooted(context: Context) -> Iterator[str]:
    """Every element type with changing roots: reduce by each operator in turn, gather, scatter and all_to_all."""
    comm, ranks = context.comm, range(context.comm.world_size)
    roots, ops = itertools.cycle(ranks), itertools.cycle(ReduceOp)
    for dtype in context.types.reduced:
        for count in _SMALL:
            yield from _reduce(context, context.case(dtype, count, next(ops)), next(roots))
    sizes = [*itertools.product(context.types.moved, _SMALL), (DType.FLOAT32, (_LARGE // comm.world_size) | 1)]
    for dtype, count in sizes:
        yield from _even(context, context.case(dtype, count), next(roots))


def _reduce(context: Context, case: Case, root: int) -> Iterator[str]:
    comm, values = context.comm, Values(case, context.comm.world_size)
    own, expected = values.of(comm.rank), values.expected()
    send = _filled(context, own, case.dtype)
    recv = _poisoned(context, expected.values.astype(own.dtype), case.dtype)
    comm.reduce(send.array, recv.array, root, op=case.op or ReduceOp.SUM)
    if comm.rank == root:
        yield from reduced(f"reduce {case} to rank {root}", recv, expected)
    yield from moved(f"reduce {case}, send buffer", send, own)


def _even(context: Context, case: Case, root: int) -> Iterator[str]:
    comm, count = context.comm, case.count
    every = [case.raw(rank) for rank in range(comm.world_size)]
    own, whole = every[comm.rank], np.concatenate(every)
    send, recv = _filled(context, own, case.dtype), _poisoned(context, whole, case.dtype)
    comm.gather(send.array, recv.array, root)
    if comm.rank == root:
        yield from moved(f"gather {case} to rank {root}", recv, whole)
    yield from moved(f"gather {case}, send buffer", send, own)
    spread, share = _filled(context, whole, case.dtype), _poisoned(context, own, case.dtype)
    comm.scatter(spread.array if comm.rank == root else None, share.array, root)
    yield from moved(f"scatter {case} from rank {root}", share, own)
    block = slice(comm.rank * count, (comm.rank + 1) * count)
    sent = [Case(case.seed, case.number, case.dtype, len(whole)).raw(rank) for rank in range(comm.world_size)]
    expected = np.concatenate([content[block] for content in sent])
    send, recv = _filled(context, sent[comm.rank], case.dtype), _poisoned(context, expected, case.dtype)
    comm.all_to_all(send.array, recv.array)
    yield from moved(f"all_to_all {case}", recv, expected)


def uneven(context: Context) -> Iterator[str]:
    """Blocks of another size from each rank, one of them of none, in a type of each width."""
    for turn, dtype in enumerate((DType.UINT8, DType.FLOAT16, DType.FLOAT32, DType.INT64)):
        yield from _blocks(context, dtype, turn % context.comm.world_size)
        yield from _pairs(context, dtype)


def _blocks(context: Context, dtype: DType, root: int) -> Iterator[str]:
    comm, ranks = context.comm, range(context.comm.world_size)
    counts = [7 * ((rank + root) % comm.world_size) for rank in ranks]
    every = [context.case(dtype, counts[rank]).raw(rank) for rank in ranks]
    own, whole = every[comm.rank], np.concatenate(every)
    send, recv = _filled(context, own, dtype), _poisoned(context, whole, dtype)
    comm.all_gather_v(send.array, recv.array, counts)
    yield from moved(f"all_gather_v {dtype.label} of {counts}", recv, whole)
    recv.poison(whole)
    comm.gather_v(send.array, recv.array, counts, root)
    if comm.rank == root:
        yield from moved(f"gather_v {dtype.label} of {counts} to rank {root}", recv, whole)
    share = _poisoned(context, own, dtype)
    comm.scatter_v(_filled(context, whole, dtype).array, share.array, counts, root)
    yield from moved(f"scatter_v {dtype.label} of {counts} from rank {root}", share, own)
    values = Values(context.case(dtype, sum(counts), ReduceOp.SUM), comm.world_size)
    start = sum(counts[: comm.rank])
    expected = values.expected(slice(start, start + counts[comm.rank]))
    share = _poisoned(context, expected.values.astype(own.dtype), dtype)
    comm.reduce_scatter_v(_filled(context, values.of(comm.rank), dtype).array, share.array, counts)
    yield from reduced(f"reduce_scatter_v {dtype.label} of {counts}", share, expected)


def _pairs(context: Context, dtype: DType) -> Iterator[str]:
    comm, ranks = context.comm, range(context.comm.world_size)
    counts = [[(2 * source + target) % 5 for target in ranks] for source in ranks]
    sent = [context.case(dtype, sum(counts[rank])).raw(rank) for rank in ranks]
    starts = [sum(row[: comm.rank]) for row in counts]
    came = [row[comm.rank] for row in counts]
    expected = np.concatenate([sent[r][starts[r] : starts[r] + came[r]] for r in ranks])
    send, recv = _filled(context, sent[comm.rank], dtype), _poisoned(context, expected, dtype)
    comm.all_to_all_v(send.array, recv.array, counts[comm.rank], came)
    yield from moved(f"all_to_all_v {dtype.label} of {counts}", recv, expected)
    after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    one = _poisoned(context, sent[before], dtype)
    comm.sendrecv(send.array, after, one.array, before)
    yield from moved(f"sendrecv {dtype.label}", one, sent[before])


def carried(context: Context) -> Iterator[str]:
    """Truth values, complex numbers and 16-bit integers, and sums that multiply by each rank's own factor first."""
    comm, ranks = context.comm, range(context.comm.world_size)
    flags = [context.case(DType.UINT8, 100).raw(rank) > 127 for rank in ranks]
    for op, function in (("sum", np.logical_or), ("prod", np.logical_and)):
        held = _filled(context, flags[comm.rank], DType.BOOL)
        comm.all_reduce(held.array, op=op)
        yield from moved(f"all_reduce bool {op}", held, function.reduce(flags))
    numbers = [(np.arange(9) + rank) * (1 - 2j) for rank in ranks]
    held = _filled(context, numbers[comm.rank].astype(np.complex64), DType.COMPLEX64)
    comm.all_reduce(held.array)
    yield from moved("all_reduce complex64 sum", held, np.sum(numbers, 0).astype(np.complex64))
    shorts = context.case(DType.INT16, 5)
    held = _filled(context, shorts.raw(comm.rank), DType.INT16)
    comm.broadcast(held.array, comm.world_size - 1)
    yield from moved("broadcast int16", held, shorts.raw(comm.world_size - 1))
    if comm.plane != "solo":
        held = _filled(context, np.full(9, 3, np.float32), DType.FLOAT32)
        comm.all_reduce(held.array, op=PreMulSum(comm.rank + 0.5))
        total = np.full(9, 3 * sum(rank + 0.5 for rank in ranks))
        yield from reduced("all_reduce float32 premul_sum", held, Expected(total, 0.0))
