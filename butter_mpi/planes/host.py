"""The plane of host memory: mpi4py's own collectives on buffers of this plane, each bounded by a deadline.

Before data moves, the ranks tell one another what they submit (``meeting.py``), so a mismatch is named and nothing is
exchanged. Data goes through staging buffers in pieces: a request that MPI cannot cancel keeps one of those, never the
user's memory, and no count is too large for any MPI.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from butter_mpi.collectives import Operation
from butter_mpi.control import Control, Overdue, Pause, Ticket, Watch, duplicate
from butter_mpi.enums import DType, ReduceOp
from butter_mpi.errors import CollectiveTimeoutError, CommunicatorBrokenError, PeerLostError
from butter_mpi.findings import ranks_text
from butter_mpi.planes.base import Numbered, Plane
from butter_mpi.planes.meeting import Meeting
from butter_mpi.planes.memory import Allocator, at, copy, numpy_dtype
from butter_mpi.planes.waiting import Waiting, error_from, notice_of

__all__ = ["HostPlane"]

_STAGE_BYTES = 8 << 20
_GRACE = 0.5
_TAG = 1
_TAGS = 1 << 14
_RETIRING: list[tuple[Control, tuple[Any, ...]]] = []

# Narrow floats are reduced in single precision and rounded once: MPI has no operator for them.
_WIDE_FLOATS = dict.fromkeys(
    (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT8_E4M3, DType.FLOAT8_E5M2),
    DType.FLOAT32,
)
# Narrow integers are summed in 32 bits and cut: Open MPI's vector code saturates where they should wrap.
_WIDE_INTEGERS = {DType.INT8: DType.INT32, DType.UINT8: DType.UINT32}
_MPI_TYPES = {
    DType.INT8: "INT8_T",
    DType.UINT8: "UINT8_T",
    DType.INT32: "INT32_T",
    DType.UINT32: "UINT32_T",
    DType.INT64: "INT64_T",
    DType.UINT64: "UINT64_T",
    DType.FLOAT32: "FLOAT",
    DType.FLOAT64: "DOUBLE",
}
_MPI_OPS = {ReduceOp.SUM: "SUM", ReduceOp.AVG: "SUM", ReduceOp.PROD: "PROD", ReduceOp.MIN: "MIN", ReduceOp.MAX: "MAX"}

Task = Iterator[bool]
"""A transfer: yields whether it has moved on since the last look."""


def sweep() -> None:
    """Free the communicators of closed planes whose every rank has said goodbye."""
    for entry in list(_RETIRING):
        control, others = entry
        if control.settled():
            _RETIRING.remove(entry)
            control.free()
            for comm in others:
                comm.Free()


def _wide(operation: Operation) -> DType:
    """Return the element type in which an operation is reduced."""
    wide = dict(_WIDE_FLOATS)
    if operation.op not in (ReduceOp.MIN, ReduceOp.MAX):
        wide |= _WIDE_INTEGERS
    return wide.get(operation.dtype, operation.dtype)


class HostPlane(Plane):
    """Collectives on host memory over MPI.

    Parameters
    ----------
    comms : tuple of three mpi4py communicators
        Duplicates that nobody else uses: control, data, and one in reserve for a reconnect.
    mpi : module
        ``mpi4py.MPI``.
    start_deadline : float
        Seconds that a reconnect may take.
    **options
        Of ``Plane``.
    """

    NAME = "host"

    def __init__(self, comms: tuple[Control, Any, Any], mpi: Any, *, start_deadline: float, **options: Any) -> None:
        self._control, self._data, self._reserve = comms
        self._mpi, self._start_deadline = mpi, start_deadline
        super().__init__(self._control.rank, self._control.size, **options)
        self._memory = Allocator()
        self._transport_errors = (mpi.Exception,)
        sweep()

    # -- operations --------------------------------------------------------------------------------------------------

    def _execute(self, numbered: Sequence[Numbered]) -> None:
        limit = None if any(operation.waits_for_ever for operation, _ in numbered) else self.deadline
        meeting = Meeting(self._control, self._records(numbered))
        self._finish(self._tasks(numbered, meeting), meeting, numbered[0][1], limit)

    def _records(self, numbered: Sequence[Numbered]) -> dict[int, list[dict[str, Any]]]:
        """Return, for each peer, what this rank tells it."""
        return {
            peer: [record for operation, record in numbered if operation.peer in (None, peer)]
            for peer in self._control.peers
        }

    def _tasks(self, numbered: Sequence[Numbered], meeting: Meeting) -> list[Task]:
        """Return every pair as a task, and the collectives as one: MPI wants those one after another."""
        for send, recv in self._own_pairs([operation for operation, _ in numbered]):
            assert send is not None and recv is not None
            copy(recv.recv, send.send, send.nbytes)
        tasks, collectives = [], []
        for operation, record in numbered:
            if not operation.rule.paired:
                collectives.append(self._when_met(record, meeting, getattr(self, f"_{operation.kind}")(operation)))
            elif operation.peer != self._rank:
                data = getattr(self, f"_{operation.kind}")(operation, _TAG + record["n"] % _TAGS)
                tasks.append(self._when_met(record, meeting, data))
        return [*tasks, itertools.chain.from_iterable(collectives)]

    def _when_met(self, record: dict[str, Any], meeting: Meeting, data: Task) -> Task:
        while not meeting.met(record):
            yield False
        yield from data

    def _finish(self, tasks: list[Task], meeting: Meeting, record: dict[str, Any], limit: float | None) -> None:
        """Run tasks side by side until all are done; whatever ends this early, their buffers stay with MPI."""
        waiting = Waiting(self._control, self.who, limit, lambda: self.health.check(self.who, record["kind"]))
        while tasks:
            came = waiting.take()
            came = meeting.match(waiting) or came
            steps = [(task, next(task, None)) for task in tasks]
            tasks = [task for task, step in steps if step is not None]
            moved = any(step for _, step in steps)
            if moved:
                waiting.restart()
            if tasks:
                waiting.look(record, meeting.missing(), moved or came)

    def _wait(self, buffers: tuple[Any, ...], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Task:
        """Start a request on `buffers` and yield until it is done."""
        ticket = Ticket(*buffers).start(call, *args, **kwargs)
        while not ticket.done():
            yield False
        yield True

    def _pieces(self, operation: Operation, blocks: int) -> Iterator[tuple[int, int]]:
        """Yield (first element, elements) of pieces of a block, so that `blocks` of them fit the staging size."""
        step = max(1, _STAGE_BYTES // (blocks * operation.dtype.itemsize))
        for first in range(0, operation.count, step):
            yield first, min(step, operation.count - first)

    def _barrier(self, _operation: Operation) -> Task:
        """Nothing to move: every rank's record has come, so every rank has."""
        yield from ()

    def _broadcast(self, operation: Operation) -> Task:
        for first, count in self._pieces(operation, 1):
            user = at(operation.recv + first * operation.dtype.itemsize, count, operation.dtype)
            is_root = operation.root == self._rank
            stage = user.copy() if is_root else np.empty_like(user)
            yield from self._wait((stage,), self._data.Ibcast, self._bytes(stage), root=operation.root)
            if not is_root:
                user[:] = stage

    def _all_gather(self, operation: Operation) -> Task:
        size = operation.dtype.itemsize
        for first, count in self._pieces(operation, self._world_size):
            stage = at(operation.send + first * size, count, operation.dtype).copy()
            gathered = np.empty((self._world_size, count), stage.dtype)
            both = self._bytes(stage), self._bytes(gathered)
            yield from self._wait((stage, gathered), self._data.Iallgather, *both)
            for rank, block in enumerate(gathered):
                at(operation.recv + (rank * operation.count + first) * size, count, operation.dtype)[:] = block

    def _all_reduce(self, operation: Operation) -> Task:
        for first, count in self._pieces(operation, 1):
            offset = first * operation.dtype.itemsize
            stage = self._widened(operation, operation.send + offset, count)
            total = np.empty_like(stage)
            both = self._typed(operation, stage, total)
            yield from self._wait((stage, total), self._data.Iallreduce, *both, op=self._mpi_op(operation))
            self._store(operation, total, at(operation.recv + offset, count, operation.dtype))

    def _reduce_scatter(self, operation: Operation) -> Task:
        size, ranks = operation.dtype.itemsize, range(self._world_size)
        for first, count in self._pieces(operation, self._world_size):
            starts = [operation.send + (rank * operation.count + first) * size for rank in ranks]
            stage = np.stack([self._widened(operation, start, count) for start in starts])
            total = np.empty(count, stage.dtype)
            both = self._typed(operation, stage, total)
            yield from self._wait((stage, total), self._data.Ireduce_scatter_block, *both, op=self._mpi_op(operation))
            self._store(operation, total, at(operation.recv + first * size, count, operation.dtype))

    def _send(self, operation: Operation, tag: int) -> Task:
        for first, count in self._pieces(operation, 1):
            stage = at(operation.send + first * operation.dtype.itemsize, count, operation.dtype).copy()
            yield from self._wait((stage,), self._data.Isend, self._bytes(stage), dest=operation.peer, tag=tag)

    def _recv(self, operation: Operation, tag: int) -> Task:
        for first, count in self._pieces(operation, 1):
            stage = np.empty(count, numpy_dtype(operation.dtype))
            yield from self._wait((stage,), self._data.Irecv, self._bytes(stage), source=operation.peer, tag=tag)
            at(operation.recv + first * operation.dtype.itemsize, count, operation.dtype)[:] = stage

    # -- element types -----------------------------------------------------------------------------------------------

    def _bytes(self, array: npt.NDArray[Any]) -> list[Any]:
        return [array.view(np.uint8), self._mpi.BYTE]

    def _typed(self, operation: Operation, *arrays: npt.NDArray[Any]) -> list[list[Any]]:
        kind = getattr(self._mpi, _MPI_TYPES[_wide(operation)])
        return [[array, kind] for array in arrays]

    def _mpi_op(self, operation: Operation) -> Any:
        assert operation.op is not None
        return getattr(self._mpi, _MPI_OPS[operation.op])

    def _widened(self, operation: Operation, pointer: int, count: int) -> npt.NDArray[Any]:
        user = at(pointer, count, operation.dtype)
        return user.astype(numpy_dtype(_wide(operation)))

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

    # -- control plane -----------------------------------------------------------------------------------------------

    def _exchange(self, payload: bytes, record: dict[str, Any]) -> list[bytes]:
        meeting = Meeting(self._control, {peer: [record] for peer in self._control.peers})
        gathered: list[bytes] = []
        self._finish([self._when_met(record, meeting, self._gather(payload, gathered))], meeting, record, self.deadline)
        return gathered

    def _gather(self, payload: bytes, gathered: list[bytes]) -> Task:
        lengths, own = np.empty(self._world_size, np.int64), np.array([len(payload)])
        yield from self._wait((own, lengths), self._data.Iallgather, self._bytes(own), self._bytes(lengths))
        stage = np.frombuffer(payload.ljust(int(lengths.max()), b"\0"), np.uint8)
        blocks = np.empty((self._world_size, stage.size), np.uint8)
        yield from self._wait((stage, blocks), self._data.Iallgather, self._bytes(stage), self._bytes(blocks))
        gathered.extend(block[:n].tobytes() for block, n in zip(blocks, lengths, strict=True))

    def _announce(self, cause: CommunicatorBrokenError) -> None:
        if self._control.broken is not None:
            return
        # Best effort: a rank that MPI cannot reach any more needs no notice.
        with contextlib.suppress(self._mpi.Exception):
            self._control.send(self._control.peers, "broken", notice_of(cause))

    def _failed(self, record: dict[str, Any], error: BaseException) -> CommunicatorBrokenError:
        """Return the error that names the rank, if MPI says of one in a moment that it lost it."""
        watch, pause = Watch(_GRACE), Pause()
        while self._control.broken is None and not watch.tick():
            self._control.pump()
            pause()
        if self._control.broken is not None:
            return error_from(self.who, *self._control.broken)
        return super()._failed(record, error)

    def _ended(self) -> bool:
        return bool(self._mpi.Is_finalized())

    def _listen(self) -> None:
        self._control.pump()
        if self._control.broken is not None:
            self.poison(error_from(self.who, *self._control.broken))

    def _release(self) -> None:
        self._retire("left", {"why": f"closed its communicator after {self.last or 'no operation'}"})

    def _retire(self, last_word: str, body: dict[str, Any]) -> None:
        """Say the last word on the control communicator, which goes as soon as every peer has said its own.

        What broke may have left data under way, which no later communicator may meet: its data communicator stays.
        """
        with contextlib.suppress(self._mpi.Exception):
            self._control.send(self._control.peers, last_word, body)
        idle = (self._reserve,) if self.health.cause is not None else (self._data, self._reserve)
        _RETIRING.append((self._control, tuple(comm for comm in idle if comm is not None)))
        sweep()

    def _reconnect(self) -> None:
        if self._reserve is None:
            raise CommunicatorBrokenError(f"{self.who}: attempt_reconnect: an earlier one failed; only a new job helps")
        reserve, self._reserve = self._reserve, None
        watch = Watch(self._start_deadline)
        try:
            control = Control(duplicate(reserve, self._mpi, watch, self._everybody_there), self._mpi)
            data = duplicate(reserve, self._mpi, watch, self._everybody_there)
            own = struct.pack("<qq", self.sequence, max(self._pairs.values(), default=0))
            every = control.all_gather(own, watch, "agreeing on the sequence", self._everybody_there)
        except Overdue as error:
            raise CollectiveTimeoutError(
                f"{self.who}: attempt_reconnect: not every rank came within {error.elapsed:.1f} s ({error.phase}). "
                "Every rank must call it together",
                operation="attempt_reconnect",
                phase="reconnect",
                elapsed=error.elapsed,
            ) from error
        self._retire("moved on", {})
        numbers = [struct.unpack("<qq", x) for x in every]
        self._control, self._data, self._reserve = control, data, reserve
        self.sequence = max(sequence for sequence, _ in numbers)
        self._pairs.clear()
        self._pairs_from = max(pair for _, pair in numbers)

    def _everybody_there(self) -> None:
        """Raise where a rank has left for good: nobody can reconnect without it."""
        self._control.pump()
        gone = sorted({*self._control.left, *self._control.gone})
        if gone:
            why = self._control.gone.get(gone[0], {}).get("text") or self._control.left[gone[0]]["why"]
            raise PeerLostError(
                f"{self.who}: attempt_reconnect: {ranks_text(gone)} left: {why}; every rank must take part",
                lost_ranks=tuple(gone),
                operation="attempt_reconnect",
                phase="reconnect",
            )

    def symmetric_alloc(self, nbytes: int) -> int:
        """Allocate aligned host memory."""
        return self._memory.alloc(nbytes)

    def symmetric_free(self, ptr: int) -> None:
        """Free it."""
        self._memory.free(ptr)
