"""What all planes share: the twenty methods, as checked operations on raw pointers and byte counts."""

from __future__ import annotations

import itertools
from typing import Any

from butter_mpi.collectives import RULES, Operation, call_site, check_op, control_signature, graph_facts
from butter_mpi.enums import DType, PreMulSum, ReduceOp, parse_op
from butter_mpi.lane import LANE
from butter_mpi.planes.memory import Allocator, host_block
from butter_mpi.planes.submitting import Submitting

__all__ = ["HOST_STREAM", "NAMED", "Plane"]

HOST_STREAM = 0
"""The one stream of host memory: the caller itself, one operation at a time."""

NAMED = "A buffer names this one, and {} is ordered with it too"
"""What is said of a stream that is refused and that nobody has given; for the kind of an operation."""

_LARGEST = 2**63
_LARGEST_POINTER = 2**64
_MOST_OPERATIONS = 4096
_CALLER = 3
"""Frames from ``call_site`` to whoever called one of the twenty methods."""


def _whole(name: str, value: int, low: int, high: int, kind: str = "") -> int:
    name = f"{kind}: {name}" if kind else name
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int; got {type(value).__name__}")
    if not low <= value < high:
        raise ValueError(f"{name} must be from {low} to {high - 1}; got {value}")
    return value


class Plane(Submitting):
    """Base of the planes; see ``CommBackend`` for the twenty methods. Groups and health come with ``Submitting``.

    Parameters
    ----------
    rank, world_size, who, **options
        Of ``Submitting``.
    """

    __slots__ = ("_handles", "_memory", "_next_handle", "_operations", "stream")

    NAME: str
    on_device = False
    """Whether operations work on device memory."""

    def __init__(self, rank: int, world_size: int, *, who: str, **options: Any) -> None:
        super().__init__(rank, world_size, who=who, **options)
        self.stream = HOST_STREAM
        self._handles: dict[int, Any] = {}
        self._next_handle = itertools.count(1)
        self._memory = Allocator(who, self._allocate, self._free)
        self._operations: dict[tuple[Any, ...], Operation] = {}

    # -- the twenty methods ------------------------------------------------------------------------------------------

    def rank(self) -> int:
        """Return this rank."""
        return self._rank

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._world_size

    def all_reduce(
        self, ptr: int, nbytes: int, *, dtype: DType = DType.BFLOAT16, op: ReduceOp | PreMulSum = ReduceOp.SUM
    ) -> None:
        """Reduce over all ranks, in place."""
        self.submit(self._make("all_reduce", nbytes, dtype, send=ptr, recv=ptr, op=op))

    def all_reduce_async(
        self,
        ptr: int,
        nbytes: int,
        compute_stream: int,
        *,
        dtype: DType = DType.BFLOAT16,
        op: ReduceOp | PreMulSum = ReduceOp.SUM,
    ) -> None:
        """Reduce in place, between what `compute_stream` holds and what comes later."""
        stream = self.check_handle(compute_stream)
        self.submit(self._make("all_reduce", nbytes, dtype, send=ptr, recv=ptr, op=op, stream=stream, aside=True))

    def all_gather(self, send: int, recv: int, nbytes: int) -> None:
        """Gather `nbytes` from each rank, in rank order."""
        self.submit(self._make("all_gather", nbytes, DType.UINT8, send=send, recv=recv))

    def reduce_scatter(
        self, send: int, recv: int, nbytes: int, *, dtype: DType = DType.UINT8, op: ReduceOp | PreMulSum = ReduceOp.SUM
    ) -> None:
        """Reduce, and keep this rank's share."""
        self.submit(self._make("reduce_scatter", nbytes, dtype, send=send, recv=recv, op=op))

    def broadcast(self, ptr: int, nbytes: int, root: int) -> None:
        """Copy root's bytes to every rank."""
        self.submit(self._make("broadcast", nbytes, DType.UINT8, send=ptr, recv=ptr, root=root, waits=True))

    def recv_command_u32(self, ptr: int, root: int) -> None:
        """Wait for root's next command."""
        if root == self._rank:
            raise ValueError(f"{self.who}: recv_command_u32: root {root} is this rank; root sends it with broadcast")
        self.submit(self._make("broadcast", 4, DType.UINT8, send=ptr, recv=ptr, root=root, waits_for_ever=True))

    def barrier(self) -> None:
        """Wait until every rank has come."""
        self.submit(self._make("barrier", 0, DType.UINT8))

    def send_to(self, ptr: int, nbytes: int, dest: int, stream: int) -> None:
        """Send to one rank."""
        stream = self.check_handle(stream)
        self.submit(self._make("send", nbytes, DType.UINT8, send=ptr, peer=dest, stream=stream))

    def recv_from(self, ptr: int, nbytes: int, src: int, stream: int) -> None:
        """Receive from one rank."""
        stream = self.check_handle(stream)
        self.submit(self._make("recv", nbytes, DType.UINT8, recv=ptr, peer=src, stream=stream))

    def register_buffer(self, ptr: int, nbytes: int) -> int:
        """Register memory under a handle of this communicator."""
        with LANE.held(self.who, "register_buffer", self.deadline):
            self._check("register_buffer")
            _whole("ptr", ptr, 1, _LARGEST)
            _whole("nbytes", nbytes, 1, _LARGEST)
            handle = next(self._next_handle)
            self._handles[handle] = self._register(ptr, nbytes)
        return handle

    def deregister_buffer(self, handle: int) -> None:
        """Give a handle back."""
        with LANE.held(self.who, "deregister_buffer", self.deadline):
            if handle not in self._handles:
                raise ValueError(f"{self.who}: handle {handle!r} is not of this communicator, or void since its end")
            self._deregister(self._handles.pop(handle))

    def give_back(self, handle: int) -> None:
        """Give a handle back as soon as nothing that was submitted uses its memory; a void one is forgotten.

        Raises
        ------
        ButterError
            Streams have not come to their end within the collective deadline; it can be tried again.
        """
        if LANE.forked:
            return
        if self._usable():
            self.drain("giving a registered buffer back")
        with LANE.held(self.who, "deregister_buffer", self.deadline):
            if handle in self._handles:
                self._deregister(self._handles.pop(handle))

    def drain(self, what: str) -> None:
        """Wait until streams have passed what was submitted, which uses its memory until then.

        Raises
        ------
        ButterError
            They have not within the collective deadline, or, of what is broken or closed, within a moment.
        """

    def _register(self, ptr: int, nbytes: int) -> Any:
        """Return what the data plane's library knows this memory by; host memory gains nothing from it."""
        return ptr, nbytes

    def _deregister(self, registered: Any) -> None:
        """Give that back."""

    def symmetric_alloc(self, nbytes: int) -> int:
        """Allocate aligned memory."""
        return self._memory.alloc(nbytes)

    def device_memory_free(self) -> int | None:
        """Return the bytes of device memory that nobody has; ``None``: there is no device, or it does not say."""
        return None

    def symmetric_free(self, ptr: int) -> None:
        """Free it once nothing that was submitted uses it."""
        self._memory.block(ptr)
        self.drain("symmetric_free")
        self._memory.free(ptr)

    def check_open(self, what: str) -> None:
        """Raise where this communicator is closed or broken, before something is made for it."""
        self._check(what)

    def symmetric_block(self, ptr: int) -> Any:
        """Return what holds it, as the plane allocated it."""
        return self._memory.block(ptr)

    def symmetric_leave(self, ptr: int) -> None:
        """Leave it to the end of this communicator: nobody else knows it any more. Waits for nothing."""
        self._memory.leave(ptr)

    def symmetric_meet(self, failure: str, count: int, dtype: DType) -> list[str]:
        """Return what keeps each rank from having its part of a symmetric array, empty where it has it (collective)."""
        every = self._exchanged("symmetric", failure.encode(), count=count, dtype=dtype.label)
        return [said.decode() for said in every]

    def symmetric_register(self, ptr: int, nbytes: int, count: int, dtype: DType) -> int:
        """Register memory of ``symmetric_alloc`` under a handle: each rank reaches every other's (collective)."""
        with LANE.held(self.who, "symmetric", self.deadline):
            self._check("symmetric")
            record = control_signature("symmetric", self.sequence, call_site())
            record |= {"count": count, "dtype": dtype.label}
            with self._poisoning(record):
                registered = self._register_symmetric(ptr, nbytes, record)
            handle = next(self._next_handle)
            self._handles[handle] = registered
        return handle

    def _register_symmetric(self, ptr: int, nbytes: int, record: dict[str, Any]) -> Any:
        """Return what the data plane's library knows this memory by, of all ranks together."""
        return self._register(ptr, nbytes)

    def _allocate(self, nbytes: int) -> tuple[int, Any]:
        """Return a block for ``Allocator``; planes of host memory take that."""
        return host_block(nbytes)

    def _free(self, block: Any) -> None:
        """Give a block back."""

    def set_add_kernel(self, handle: int) -> None:
        """Agree with every rank that all set a kernel here, or none, and use it from the next operation on."""
        _whole("handle", handle, 0, _LARGEST)
        with LANE.held(self.who, "set_add_kernel", self.deadline):
            self._exchanged("set_add_kernel", b"\0", way="a kernel" if handle else "no kernel")
            self._use_kernel(handle)

    def _use_kernel(self, handle: int) -> None:
        """Use a kernel that every rank has set; 0: none."""

    def make_graph(self, operation: Operation) -> Any:
        """Agree with every rank on a graph of an operation; ``None``: all go on without one (collective)."""
        self._meet_for_graph(operation, "no device")
        return None

    def _meet_for_graph(self, operation: Operation, hindrance: str) -> list[str]:
        """Return what keeps each rank from a graph; empty: nothing does."""
        every = self._exchanged("plan_graph", hindrance.encode(), **graph_facts(operation))
        return [said.decode() for said in every]

    def uses_graph(self, operation: Operation) -> bool:
        """Return whether an operation with a graph is launched as one now."""
        return False

    def lend(self, operation: Operation, stream: Any) -> Any:
        """Return what stands for a plan, of its operation and the stream that it was given; ``None``: nothing does."""
        return None

    def recording(self) -> dict[str, Any] | None:
        """Return what the recorder of this rank holds; ``None`` where there is none: one rank alone has none."""
        return None

    def _void(self) -> None:
        self._handles.clear()

    def attempt_reconnect(self) -> None:
        """Make the communicator anew with every other rank; handles of the old one are void."""
        with LANE.held(self.who, "attempt_reconnect", self.deadline):
            if self.health.closed or self._ended():
                self._check("attempt_reconnect")
            self.check_no_group("attempt_reconnect")
            self._void()
            # What broke may have been the agreement on it.
            self._use_kernel(0)
            with self._poisoning(control_signature("attempt_reconnect", self.sequence, call_site())):
                self._reconnect()
            self.health.cause = None

    # -- arguments ---------------------------------------------------------------------------------------------------

    def check_stream(self, stream: int) -> int:
        """Return a stream that this plane puts operations on.

        Raises
        ------
        ValueError
            Another one; nothing was sent.
        """
        if stream != self.stream:
            raise ValueError(f"{self.who}: stream must be {self.stream}, the one stream of this plane; got {stream!r}")
        return stream

    def check_handle(self, stream: int) -> int:
        """Return a stream as :meth:`check_stream` does, but for what is asked again when an operation is submitted."""
        return self.check_stream(stream)

    def check_pointer(self, pointer: int, what: object) -> None:
        """Raise ``ValueError`` where memory is not of this plane."""

    def _make(
        self,
        kind: str,
        nbytes: int,
        dtype: DType,
        *,
        send: int = 0,
        recv: int = 0,
        op: ReduceOp | PreMulSum | None = None,
        root: int | None = None,
        peer: int | None = None,
        stream: int | None = None,
        aside: bool = False,
        waits: bool = False,
        waits_for_ever: bool = False,
    ) -> Operation:
        """Return a checked operation on raw pointers."""
        rule = RULES[kind]
        dtype = dtype if dtype.__class__ is DType else DType.parse(dtype)
        if op is not None:
            op = op if op.__class__ is ReduceOp else parse_op(op)
            try:
                check_op(op, dtype)
            except ValueError as error:
                raise ValueError(f"{self.who}: {kind}: {error}") from None
        if nbytes.__class__ is not int or not 0 <= nbytes < _LARGEST:
            _whole("nbytes", nbytes, 0, _LARGEST)
        count = nbytes // dtype.itemsize
        if count * dtype.itemsize != nbytes:
            raise ValueError(f"{self.who}: {kind}: {nbytes} bytes are no whole number of {dtype.label} elements")
        least = 1 if nbytes else 0
        if rule.send_blocks and (send.__class__ is not int or not least <= send < _LARGEST_POINTER):
            _whole("send pointer", send, least, _LARGEST_POINTER, kind)
        if rule.recv_blocks and (recv.__class__ is not int or not least <= recv < _LARGEST_POINTER):
            _whole("recv pointer", recv, least, _LARGEST_POINTER, kind)
        if root is not None:
            _whole("root", root, 0, self._world_size, kind)
        if peer is not None:
            _whole("peer", peer, 0, self._world_size, kind)
        waits = waits or waits_for_ever
        ordered = self.stream if stream is None else stream
        site = call_site(_CALLER)
        facts = kind, count, dtype, send, recv, op, root, peer, site, ordered, aside, waits, waits_for_ever
        return self._operations.get(facts) or self.operation(facts)

    def operation(self, facts: tuple[Any, ...]) -> Operation:
        """Return the operation with these facts, in the order of its fields: the one that was made before, if any.

        Loops ask for the same ones again and again, and what was found out of one (how it is recorded and called) is
        kept in it.
        """
        made = self._operations.get(facts)
        if made is None:
            if len(self._operations) >= _MOST_OPERATIONS:
                self._operations.clear()
            made = self._operations[facts] = Operation(*facts)
        return made
