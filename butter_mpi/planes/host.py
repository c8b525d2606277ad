"""The plane of host memory: mpi4py's own collectives on buffers of this plane, each bounded by a deadline.

Before data moves, the ranks tell one another what they submit (``meeting.py``), so a mismatch is named and nothing is
exchanged. Data goes through staging buffers in pieces: a request that MPI cannot cancel keeps one of those, never the
user's memory, and no count is too large for any MPI.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from butter_mpi.collectives import Operation, carried
from butter_mpi.enums import DType, ReduceOp
from butter_mpi.planes.meeting import Meeting
from butter_mpi.planes.memory import at, copy, numpy_dtype, premultiplied
from butter_mpi.planes.peers import PeerPlane, Task
from butter_mpi.planes.submitting import Numbered, Signed, signed

__all__ = ["HostPlane"]

_STAGE_BYTES = 8 << 20
_TAG = 1
_TAGS = 1 << 14

# Narrow floats are reduced in single precision and rounded once: MPI has no operator for them.
_WIDE_FLOATS = dict.fromkeys(
    (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT8_E4M3, DType.FLOAT8_E5M2),
    DType.FLOAT32,
)
# Narrow integers are summed in 32 bits and cut: Open MPI's vector code saturates where they should wrap.
_WIDE_INTEGERS = {
    DType.INT8: DType.INT32,
    DType.UINT8: DType.UINT32,
    DType.INT16: DType.INT32,
    DType.UINT16: DType.UINT32,
}
_MPI_TYPES = {
    DType.INT8: "INT8_T",
    DType.UINT8: "UINT8_T",
    DType.INT16: "INT16_T",
    DType.UINT16: "UINT16_T",
    DType.INT32: "INT32_T",
    DType.UINT32: "UINT32_T",
    DType.INT64: "INT64_T",
    DType.UINT64: "UINT64_T",
    DType.FLOAT32: "FLOAT",
    DType.FLOAT64: "DOUBLE",
}
_MPI_OPS = {ReduceOp.PROD: "PROD", ReduceOp.MIN: "MIN", ReduceOp.MAX: "MAX"}


def _wide(operation: Operation) -> DType:
    """Return the element type in which an operation is reduced."""
    wide = dict(_WIDE_FLOATS)
    if operation.op not in (ReduceOp.MIN, ReduceOp.MAX):
        wide |= _WIDE_INTEGERS
    return wide.get(operation.dtype, operation.dtype)


class HostPlane(PeerPlane):
    """Collectives on host memory over MPI; made as ``PeerPlane`` says."""

    NAME = "host"

    # -- operations --------------------------------------------------------------------------------------------------

    def _execute(self, numbered: Sequence[Numbered]) -> None:
        limit = None if all(operation.waits_for_ever for operation, _ in numbered) else self.deadline
        submitted = [(carried(operation), record) for operation, record in signed(numbered)]
        meeting = Meeting(self._control, self._records(submitted))
        self._finish(self._tasks(submitted, meeting), meeting, submitted[0][1], limit)

    def _tasks(self, submitted: Sequence[Signed], meeting: Meeting) -> list[Task]:
        """Return every pair as a task, and the collectives as one: MPI wants those one after another."""
        for send, recv in self._own_pairs([operation for operation, _ in submitted]):
            assert send is not None and recv is not None
            copy(recv.recv, send.send, send.nbytes)
        tasks, collectives = [], []
        for operation, record in submitted:
            if not operation.rule.paired:
                collectives.append(self._when_met(record, meeting, getattr(self, f"_{operation.kind}")(operation)))
            elif operation.peer != self._rank:
                data = getattr(self, f"_{operation.kind}")(operation, _TAG + record["n"] % _TAGS)
                tasks.append(self._when_met(record, meeting, data))
        return [*tasks, self._one_after_another(collectives)]

    def _one_after_another(self, tasks: Sequence[Task]) -> Task:
        for task in tasks:
            yield from task

    def _pieces(self, operation: Operation, blocks: int) -> Iterator[tuple[int, int]]:
        """Yield (first element, elements) of pieces of a block, so that `blocks` of them fit the staging size."""
        step = max(1, _STAGE_BYTES // (blocks * operation.dtype.itemsize))
        for first in range(0, operation.count, step):
            yield first, min(step, operation.count - first)

    def _barrier(self, _operation: Operation) -> Task:
        """Nothing to move: every rank's record has come, so every rank has."""
        yield from ()

    # Their data goes by the sends and receives that are submitted with them.
    _gather_v = _scatter_v = _all_to_all_v = _barrier

    def _broadcast(self, operation: Operation) -> Task:
        size, is_root = operation.dtype.itemsize, operation.root == self._rank
        for first, count in self._pieces(operation, 1):
            user = at(operation.recv + first * size, count, operation.dtype)
            stage = at(operation.send + first * size, count, operation.dtype).copy() if is_root else np.empty_like(user)
            yield from self._wait((stage,), self._data.Ibcast, self._raw(stage), root=operation.root)
            if not is_root or operation.recv != operation.send:
                user[:] = stage

    def _all_gather(self, operation: Operation) -> Task:
        for first, count in self._pieces(operation, self._world_size):
            stage = self._own(operation, first, count)
            gathered = np.empty((self._world_size, count), stage.dtype)
            both = self._raw(stage), self._raw(gathered)
            yield from self._wait((stage, gathered), self._data.Iallgather, *both)
            self._put_blocks(operation, first, gathered)

    def _gather(self, operation: Operation) -> Task:
        is_root = operation.root == self._rank
        for first, count in self._pieces(operation, self._world_size):
            stage = self._own(operation, first, count)
            gathered = np.empty((self._world_size if is_root else 0, count), stage.dtype)
            both = self._raw(stage), self._raw(gathered) if is_root else None
            yield from self._wait((stage, gathered), self._data.Igather, *both, root=operation.root)
            self._put_blocks(operation, first, gathered)

    def _scatter(self, operation: Operation) -> Task:
        is_root = operation.root == self._rank
        for first, count in self._pieces(operation, self._world_size):
            stage = self._blocks(operation, first, count) if is_root else None
            share = np.empty(count, numpy_dtype(operation.dtype))
            both = None if stage is None else self._raw(stage), self._raw(share)
            yield from self._wait((stage, share), self._data.Iscatter, *both, root=operation.root)
            at(operation.recv + first * operation.dtype.itemsize, count, operation.dtype)[:] = share

    def _all_to_all(self, operation: Operation) -> Task:
        for first, count in self._pieces(operation, self._world_size):
            stage = self._blocks(operation, first, count)
            came = np.empty_like(stage)
            yield from self._wait((stage, came), self._data.Ialltoall, self._raw(stage), self._raw(came))
            self._put_blocks(operation, first, came)

    def _all_reduce(self, operation: Operation) -> Task:
        for first, count in self._pieces(operation, 1):
            offset = first * operation.dtype.itemsize
            stage = self._widened(operation, operation.send + offset, count)
            total = np.empty_like(stage)
            both = self._typed(operation, stage, total)
            yield from self._wait((stage, total), self._data.Iallreduce, *both, op=self._mpi_op(operation))
            if operation.root in (None, self._rank):
                self._store(operation, total, at(operation.recv + offset, count, operation.dtype))

    # MPI_Ireduce of Open MPI does a few KiB between two looks: seconds for 100 MiB, where this takes a tenth of one.
    _reduce = _all_reduce

    def _reduce_scatter(self, operation: Operation) -> Task:
        size, ranks = operation.dtype.itemsize, range(self._world_size)
        for first, count in self._pieces(operation, self._world_size):
            starts = [operation.send + (rank * operation.count + first) * size for rank in ranks]
            stage = np.stack([self._widened(operation, start, count) for start in starts])
            total = np.empty(count, stage.dtype)
            both = self._typed(operation, stage, total)
            yield from self._wait((stage, total), self._data.Ireduce_scatter_block, *both, op=self._mpi_op(operation))
            self._store(operation, total, at(operation.recv + first * size, count, operation.dtype))

    def _own(self, operation: Operation, first: int, count: int) -> npt.NDArray[Any]:
        """Return a copy of a piece of this rank's block."""
        return at(operation.send + first * operation.dtype.itemsize, count, operation.dtype).copy()

    def _blocks(self, operation: Operation, first: int, count: int) -> npt.NDArray[Any]:
        """Return copies of a piece of the block for each rank."""
        starts = [(rank * operation.count + first) * operation.dtype.itemsize for rank in range(self._world_size)]
        return np.stack([at(operation.send + start, count, operation.dtype) for start in starts])

    def _put_blocks(self, operation: Operation, first: int, came: npt.NDArray[Any]) -> None:
        """Put a piece of the block from each rank in its place."""
        for rank, block in enumerate(came):
            start = (rank * operation.count + first) * operation.dtype.itemsize
            at(operation.recv + start, block.size, operation.dtype)[:] = block

    def _send(self, operation: Operation, tag: int) -> Task:
        for first, count in self._pieces(operation, 1):
            stage = self._own(operation, first, count)
            yield from self._wait((stage,), self._data.Isend, self._raw(stage), dest=operation.peer, tag=tag)

    def _recv(self, operation: Operation, tag: int) -> Task:
        for first, count in self._pieces(operation, 1):
            stage = np.empty(count, numpy_dtype(operation.dtype))
            yield from self._wait_for_receive(stage, source=operation.peer, tag=tag)
            at(operation.recv + first * operation.dtype.itemsize, count, operation.dtype)[:] = stage

    # -- element types -----------------------------------------------------------------------------------------------

    def _typed(self, operation: Operation, *arrays: npt.NDArray[Any]) -> list[list[Any]]:
        kind = getattr(self._mpi, _MPI_TYPES[_wide(operation)])
        return [[array, kind] for array in arrays]

    def _mpi_op(self, operation: Operation) -> Any:
        """Return MPI's operator; an average and a sum that multiplied first are sums."""
        name = _MPI_OPS.get(operation.op, "SUM") if isinstance(operation.op, ReduceOp) else "SUM"
        return getattr(self._mpi, name)

    def _widened(self, operation: Operation, pointer: int, count: int) -> npt.NDArray[Any]:
        user = at(pointer, count, operation.dtype)
        return premultiplied(user.astype(numpy_dtype(_wide(operation))), operation)

    def _store(self, operation: Operation, total: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
        if operation.op is ReduceOp.AVG:
            total = self._divided(total)
        with np.errstate(over="ignore", invalid="ignore"):
            target[:] = total.astype(target.dtype)

    def _divided(self, total: npt.NDArray[Any]) -> npt.NDArray[Any]:
        size = total.dtype.type(self._world_size)
        if total.dtype.kind == "f":
            return np.asarray(total / size)
        quotient = total // size
        return np.asarray(quotient + ((total % size != 0) & (total < 0)).astype(total.dtype))
