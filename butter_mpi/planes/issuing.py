"""How operations reach NCCL: one call, one group of calls, or an exchange and a kernel that adds."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from butter_mpi import nccl
from butter_mpi._libnccl import Library
from butter_mpi.collectives import Operation, pairs_of
from butter_mpi.device import Device
from butter_mpi.enums import DType, PreMulSum, ReduceOp
from butter_mpi.errors import NCCLError
from butter_mpi.planes.memory import factor_of

__all__ = ["ADDING", "Issuer", "Kept"]

ADDING = "send, receive and add"
"""The way of a sum that does not go by NCCL's own, as messages name it."""

_ADDED = ("all_reduce", DType.BFLOAT16, ReduceOp.SUM)
_FUNCTIONS = {
    "all_reduce": "ncclAllReduce",
    "all_gather": "ncclAllGather",
    "reduce_scatter": "ncclReduceScatter",
    "broadcast": "ncclBroadcast",
    "send": "ncclSend",
    "recv": "ncclRecv",
    "reduce": "ncclReduce",
    "gather": "ncclGather",
    "scatter": "ncclScatter",
    "all_to_all": "ncclAlltoAll",
}
_BY_PAIRS = ("gather", "scatter", "all_to_all")
"""What moves between pairs of ranks, also where NCCL (2.28 and newer) has a call for it."""
_THREADS = 256
_MOST_BLOCKS = 1024


class Kept(contextlib.ExitStack):
    """What was made on a device for one communicator; ``close`` gives it back, last made first, whatever fails.

    Parameters
    ----------
    device : Device
        The device.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def stream(self) -> int:
        """Make a stream."""
        stream = self._device.make_stream()
        self.callback(self._device.destroy_stream, stream)
        return stream

    def event(self) -> int:
        """Make an event."""
        event = self._device.make_event()
        self.callback(self._device.destroy_event, event)
        return event

    def buffer(self, nbytes: int) -> int:
        """Allocate memory."""
        pointer = self._device.alloc(nbytes)
        self.callback(self._device.free, pointer)
        return pointer


class Issuer:
    """Puts operations on their streams, by calls on one communicator.

    Parameters
    ----------
    library : Library
        NCCL.
    device : Device
        The device.
    kept : Kept
        What the communicator has on it.
    rank, world_size : int
        Identity.
    """

    def __init__(self, library: Library, device: Device, kept: Kept, rank: int, world_size: int) -> None:
        self._library, self._device, self._kept = library, device, kept
        self._rank, self._world_size = rank, world_size
        self._received = (0, 0)
        self._types: dict[DType, int] = {}
        self._has: dict[str, bool] = {}
        self.added = kept.event()
        self.add_kernel = 0

    def pairs(self, operations: Sequence[Operation]) -> set[tuple[int, str]]:
        """Return the peers that data goes to and comes from directly."""
        if operations and self.adds(operations):
            return {(1 - self._rank, "send"), (1 - self._rank, "recv")}
        return {
            (part.peer, part.kind)
            for operation in operations
            for part in (self._pairs_of(operation) if operation.kind in _BY_PAIRS else (operation,))
            if part.peer is not None
        }

    def _pairs_of(self, operation: Operation) -> list[Operation]:
        return pairs_of(operation, self._rank, self._world_size)

    def issue(self, comm: int, operations: Sequence[Operation]) -> None:
        """Issue operations together."""
        if self.adds(operations):
            self._exchange_and_add(comm, operations[0])
            return
        calls = [call for operation in operations for call in self._calls_of(operation)]
        if len(calls) == 1:
            self._call(comm, calls[0])
        else:
            self._group(comm, calls)

    def _calls_of(self, operation: Operation) -> Sequence[Operation]:
        """Return what this library has calls for: an operation, or the sends and receives that do the same."""
        if operation.kind not in _BY_PAIRS or self._knows(_FUNCTIONS[operation.kind]):
            return (operation,)
        return self._pairs_of(operation)

    def _knows(self, function: str) -> bool:
        if function not in self._has:
            self._has[function] = self._library.has(function)
        return self._has[function]

    def _group(self, comm: int, operations: Sequence[Operation]) -> None:
        try:
            nccl.group_start(self._library)
            for operation in operations:
                self._call(comm, operation)
            nccl.group_end(self._library)
        except BaseException:
            # Whatever ended this, and where: the thread must not stay in the group, which would swallow its calls.
            with contextlib.suppress(NCCLError):
                nccl.close_leaked_groups(self._library)
            raise

    def data_type(self, dtype: DType) -> int:
        """Return the number of an element type, where this library has it."""
        if dtype not in self._types:
            self._types[dtype] = nccl.data_type(self._library, dtype)
        return self._types[dtype]

    def _call(self, comm: int, operation: Operation) -> None:
        op = operation.op
        if not isinstance(op, PreMulSum):
            call = operation.call
            if call is None or call[0] != comm:
                call = self.prepare(comm, operation)
            nccl.check(self._library, call[2], call[1]())
            return
        # NCCL has read the operator when the call that takes it returns, in a group as well.
        data_type = self.data_type(operation.dtype)
        number = nccl.create_premul_sum(self._library, factor_of(operation).tobytes(), data_type, comm)
        try:
            name, call = _FUNCTIONS[operation.kind], self._converted(comm, operation, number)
            nccl.check(self._library, name, call())
        finally:
            nccl.destroy_redop(self._library, number, comm)

    def prepare(self, comm: int, operation: Operation) -> tuple[int, Callable[[], int], str]:
        """Return the communicator, the call with its arguments as ctypes passes them, and the function's name.

        They are kept in the operation, which may come again.
        """
        op = None if operation.op is None else operation.op.nccl
        call = comm, self._converted(comm, operation, op), _FUNCTIONS[operation.kind]
        operation.call = call
        return call

    def _converted(self, comm: int, operation: Operation, op: int | None) -> Callable[[], int]:
        name, rule = _FUNCTIONS[operation.kind], operation.rule
        arguments: list[int | None] = [operation.send] if rule.send_blocks else []
        arguments += [operation.recv] if rule.recv_blocks else []
        arguments += [operation.count, self.data_type(operation.dtype)]
        arguments += [op] if rule.reduces else []
        arguments += [operation.root] if rule.rooted else []
        arguments += [operation.peer] if rule.paired else []
        kinds = self._library.function(name).argtypes
        # Every number was checked when the operation was made.
        values = zip(kinds, [*arguments, comm, operation.stream], strict=True)
        converted = [kind.from_param(value) for kind, value in values]
        return functools.partial(self._library.untyped(name), *converted)

    # -- two ranks: send, receive and add ----------------------------------------------------------------------------

    def adds(self, operations: Sequence[Operation]) -> bool:
        """Return whether operations go by an exchange and the kernel, and not by NCCL's own sum."""
        first = operations[0]
        fits = len(operations) == 1 and (first.kind, first.dtype, first.op) == _ADDED and first.count
        return bool(self.add_kernel and self._world_size == 2 and fits)

    def _exchange_and_add(self, comm: int, operation: Operation) -> None:
        """Exchange the buffers with the other rank, then add what came to one's own."""
        peer, nbytes, stream = 1 - self._rank, operation.nbytes, operation.stream
        received = self._receive_buffer(nbytes)
        there = replace(operation, kind="send", peer=peer)
        back = replace(operation, kind="recv", recv=received, peer=peer)
        # The last kernel, perhaps on another stream, reads this buffer, and NCCL orders only what is its own.
        self._device.wait(stream, self.added)
        self._group(comm, [there, back])
        self._device.copy(operation.recv, operation.send, nbytes, stream)
        types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        blocks = min(-(-operation.count // _THREADS), _MOST_BLOCKS)
        arguments = ((operation.recv, received, operation.count), types)
        self._device.launch(self.add_kernel, blocks, _THREADS, stream, arguments)
        self._device.record(self.added, stream)

    def _receive_buffer(self, nbytes: int) -> int:
        """Return this communicator's own buffer; a smaller one goes with the communicator, as work may still use it."""
        if self._received[1] < nbytes:
            self._received = (self._kept.buffer(nbytes), nbytes)
        return self._received[0]
