"""What all planes share: the twenty methods as operations, and the one path on which operations are submitted."""

from __future__ import annotations

import contextlib
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from butter_mpi.collectives import RULES, Operation, call_site, control_signature, describe, signature
from butter_mpi.enums import DType, ReduceOp
from butter_mpi.errors import ButterError, CommunicatorBrokenError, PeerLostError, text_of
from butter_mpi.lane import LANE, Health
from butter_mpi.planes.memory import Allocator, host_block

__all__ = ["HOST_STREAM", "Numbered", "Plane"]

HOST_STREAM = 0
"""The one stream of host memory: the caller itself, one operation at a time."""

Numbered = tuple[Operation, dict[str, Any]]
_CLOSE_PATIENCE = 1.0
_LARGEST = 2**63


def _whole(name: str, value: int, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int; got {type(value).__name__}")
    if not low <= value < high:
        raise ValueError(f"{name} must be from {low} to {high - 1}; got {value}")
    return value


class Plane(ABC):
    """Base of the planes; see ``CommBackend`` for the twenty methods.

    Parameters
    ----------
    rank, world_size : int
        Identity.
    who : str
        This rank, as messages name it.
    deadline : float
        The collective deadline in seconds.
    on_poison : callable
        Called once with this plane when it is poisoned (the bootstrap ends the job there if asked to).
    """

    NAME: str
    on_device = False
    """Whether operations work on device memory."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        who: str,
        deadline: float,
        on_poison: Callable[[Plane], None] = lambda _plane: None,
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self.who, self.deadline = who, deadline
        self.stream = HOST_STREAM
        self.health = Health()
        self.sequence = 0
        self._last: dict[str, Any] | None = None
        self._flight: dict[str, Any] | None = None
        self._pairs: dict[tuple[int, str], int] = {}
        self._pairs_from = 0
        self._on_poison = on_poison
        self.exit_status = 1
        self.owner: object = None
        self._transport_errors: tuple[type[Exception], ...] = ()
        self._group: list[Operation] | None = None
        self._group_marks: list[int] = []
        self._group_thread = 0
        self._handles: dict[int, Any] = {}
        self._next_handle = itertools.count(1)
        self._memory = Allocator(who, self._allocate, self._free)

    # -- the one path ------------------------------------------------------------------------------------------------

    def submit(self, operation: Operation) -> None:
        """Submit one checked operation: its turn on the lane, health, number, execution; or keep it for its group."""
        with LANE.held(self.who, operation.kind, self.deadline):
            self._check(operation.kind)
            self._admit(operation)
            if self._group is None:
                self._run([operation])
            else:
                self._group.append(replace(operation, waits=False))

    def _run(self, operations: Sequence[Operation]) -> None:
        ordered = self._ordered(operations)
        self._check_own_pairs(ordered)
        with self._poisoning(signature(ordered[0], self._next_number(ordered[0]))):
            numbered = [(operation, signature(operation, self._number(operation))) for operation in ordered]
            self._execute(numbered)
            self._last = numbered[-1][1]

    @contextmanager
    def _poisoning(self, record: dict[str, Any]) -> Iterator[None]:
        """Mark what is in flight, and poison this communicator with whatever ends the body."""
        self._flight = record
        try:
            yield
        except CommunicatorBrokenError as error:
            self.poison(error)
            raise
        except self._transport_errors as error:
            cause = self._failed(record, error)
            self.poison(cause)
            raise cause from error
        except BaseException as error:
            self.poison(self._interrupted(record, error))
            raise
        finally:
            self._flight = None

    @property
    def last(self) -> str:
        """The last operation, as messages name it; empty: there was none."""
        return "" if self._last is None else describe(self._last)

    @property
    def in_flight(self) -> str:
        """The operation that a thread is in now; empty: none."""
        record = self._flight
        return "" if record is None else describe(record)

    def all_gather_json(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload over the control plane; compared like an operation, it takes no number."""
        return self._exchanged("all_gather_json", payload)

    def _exchanged(self, what: str, payload: bytes, **compared: Any) -> list[bytes]:
        """Return every rank's payload of a call that all ranks make together, with the same `compared`."""
        record = {**control_signature(what, self.sequence, call_site()), **compared}
        with LANE.held(self.who, what, self.deadline):
            self._check(what)
            if self._group is not None:
                raise ValueError(f"{self.who}: {what} inside a group; end it first")
            with self._poisoning(record):
                return self._exchange(payload, record)

    def _admit(self, operation: Operation) -> None:  # noqa: B027 - most planes take everything
        """Raise ``ValueError`` or ``NotSupportedError`` where this plane cannot take an operation."""

    @abstractmethod
    def _execute(self, numbered: Sequence[Numbered]) -> None:
        """Move the data of operations that are numbered and in the order that all ranks agree on."""

    @abstractmethod
    def _exchange(self, payload: bytes, record: dict[str, Any]) -> list[bytes]:
        """Return every rank's payload."""

    @abstractmethod
    def _reconnect(self) -> None:
        """Make the communicator anew, with every other rank."""

    @abstractmethod
    def _announce(self, cause: CommunicatorBrokenError) -> None:
        """Tell the peers the first cause."""

    @abstractmethod
    def _listen(self) -> None:
        """Take news of the peers."""

    def _stop(self) -> None:  # noqa: B027 - host planes have nothing under way by themselves
        """Stop what is under way, after a failure; waits for nothing."""

    @abstractmethod
    def _release(self) -> None:
        """Say goodbye and give the plane's resources back; called once, on the lane where it can be had."""

    def _ordered(self, operations: Sequence[Operation]) -> list[Operation]:
        """Return collectives in program order, then pairs: the order in which peers compare them."""
        return sorted(operations, key=lambda operation: operation.rule.paired)

    def _next_number(self, operation: Operation) -> int:
        if operation.rule.paired:
            assert operation.peer is not None
            return self._pairs.get((operation.peer, operation.kind), self._pairs_from) + 1
        return self.sequence + 1

    def _number(self, operation: Operation) -> int:
        number = self._next_number(operation)
        if operation.rule.paired:
            assert operation.peer is not None
            self._pairs[operation.peer, operation.kind] = number
        else:
            self.sequence = number
        return number

    def _check_own_pairs(self, operations: Sequence[Operation]) -> None:
        for send, recv in self._own_pairs(operations):
            if send is None or recv is None or (send.count, send.dtype) != (recv.count, recv.dtype):
                raise ValueError(
                    f"{self.who}: a send to this rank itself needs its recv, of the same count and dtype, in one group"
                )

    def _own_pairs(self, operations: Sequence[Operation]) -> list[tuple[Operation | None, Operation | None]]:
        own = [operation for operation in operations if operation.peer == self._rank]
        sends = [operation for operation in own if operation.kind == "send"]
        return list(itertools.zip_longest(sends, [operation for operation in own if operation.kind == "recv"]))

    def _failed(self, record: dict[str, Any], error: BaseException) -> CommunicatorBrokenError:
        return CommunicatorBrokenError(
            f"{self.who}: {describe(record)}: {error if isinstance(error, ButterError) else f'MPI failed: {error}'}",
            sequence=record["n"],
            operation=record["kind"],
            phase="collective",
        )

    def _gave_up(self, how: str) -> CommunicatorBrokenError:
        return PeerLostError(
            f"{self.who}: {how} while in {self.in_flight}",
            lost_ranks=(self._rank,),
            sequence=self.sequence,
            phase="abort",
        )

    def _interrupted(self, record: dict[str, Any], error: BaseException) -> CommunicatorBrokenError:
        return CommunicatorBrokenError(
            f"{self.who}: {describe(record)}: interrupted by {text_of(error)}. Others may have gone on",
            lost_ranks=(self._rank,),
            sequence=record["n"],
            operation=record["kind"],
            phase="collective",
        )

    # -- health and lifecycle ----------------------------------------------------------------------------------------

    def poison(self, cause: CommunicatorBrokenError) -> None:
        """Refuse every later operation with this first cause, tell the peers, then the policy."""
        if self.health.poison(cause):
            if not self.health.closed and not self._ended():
                self._announce(cause)
                self._stop()
            self._on_poison(self)

    def _check(self, what: str) -> None:
        """Raise if no operation is taken."""
        LANE.check_fork(self.who, what)
        if not self.health.closed and self._ended():
            self.health.closed = "ended by MPI.Finalize"
        self.health.check(self.who, what)

    def _ended(self) -> bool:
        """Return whether what the plane stands on is gone."""
        return False

    def check(self) -> None:
        """Raise the first cause, also one that a peer has told meanwhile."""
        LANE.check_fork(self.who, "check_async_error")
        self.is_healthy()
        self._check("check_async_error")

    def close(
        self,
        how: str = "closed",
        cause: CommunicatorBrokenError | None = None,
        patience: float = _CLOSE_PATIENCE,
    ) -> None:
        """End this communicator; a second time, it does nothing. With a `cause`, peers are told that it broke.

        An operation that another thread (or the code that a signal handler interrupted) waits in ends by this.
        """
        if self.health.closed or LANE.forked:
            return
        if cause is None and self.in_flight:
            cause = self._gave_up(how)
        if cause is not None:
            self.health.poison(cause)
        self.health.closed = how
        try:
            LANE.take(self.who, "close", patience)
        except ButterError:
            # The thread that holds the lane may be gone for good: what it left half done can only be given up.
            self._on_poison(self)
            return
        try:
            if not self._ended():
                if cause is not None:
                    self._announce(cause)
                    self._stop()
                self._release()
            if cause is not None:
                self._on_poison(self)
        finally:
            self._handles.clear()
            LANE.give()

    # -- the twenty methods ------------------------------------------------------------------------------------------

    def rank(self) -> int:
        """Return this rank."""
        return self._rank

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._world_size

    def all_reduce(self, ptr: int, nbytes: int, *, dtype: DType = DType.BFLOAT16, op: ReduceOp = ReduceOp.SUM) -> None:
        """Reduce over all ranks, in place."""
        self.submit(self._make("all_reduce", nbytes, dtype, send=ptr, recv=ptr, op=op))

    def all_reduce_async(
        self,
        ptr: int,
        nbytes: int,
        compute_stream: int,
        *,
        dtype: DType = DType.BFLOAT16,
        op: ReduceOp = ReduceOp.SUM,
    ) -> None:
        """Reduce in place, between what `compute_stream` holds and what comes later."""
        stream = self.check_stream(compute_stream)
        self.submit(self._make("all_reduce", nbytes, dtype, send=ptr, recv=ptr, op=op, stream=stream, aside=True))

    def all_gather(self, send: int, recv: int, nbytes: int) -> None:
        """Gather `nbytes` from each rank, in rank order."""
        self.submit(self._make("all_gather", nbytes, DType.UINT8, send=send, recv=recv))

    def reduce_scatter(
        self, send: int, recv: int, nbytes: int, *, dtype: DType = DType.UINT8, op: ReduceOp = ReduceOp.SUM
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
        stream = self.check_stream(stream)
        self.submit(self._make("send", nbytes, DType.UINT8, send=ptr, peer=dest, stream=stream))

    def recv_from(self, ptr: int, nbytes: int, src: int, stream: int) -> None:
        """Receive from one rank."""
        stream = self.check_stream(stream)
        self.submit(self._make("recv", nbytes, DType.UINT8, recv=ptr, peer=src, stream=stream))

    def group_start(self) -> None:
        """Begin a group; the lane stays held."""
        LANE.take(self.who, "group", self.deadline)
        try:
            self._check("group")
        except BaseException:
            LANE.give()
            raise
        if self._group is None:
            self._group, self._group_thread = [], threading.get_ident()
        self._group_marks.append(len(self._group))

    def group_end(self) -> None:
        """Submit the group if it is the outermost one."""
        operations = self._leave_group("group_end", keep=True)
        try:
            if operations:
                self._check("group")
                for operation in operations:
                    # What held when it was called may not hold any more.
                    self._admit(operation)
                self._run(operations)
        finally:
            LANE.give()

    def group_discard(self) -> None:
        """Leave a group whose body failed: nothing of it is sent, no number is taken."""
        self._leave_group("group_discard", keep=False)
        LANE.give()

    def _leave_group(self, what: str, *, keep: bool) -> list[Operation]:
        if self._group is None or self._group_thread != threading.get_ident():
            raise ValueError(f"{self.who}: {what} without a group_start of this thread")
        mark = self._group_marks.pop()
        if not keep:
            del self._group[mark:]
        if self._group_marks:
            return []
        operations, self._group = self._group, None
        return operations

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

    def _register(self, ptr: int, nbytes: int) -> Any:
        """Return what the data plane's library knows this memory by; host memory gains nothing from it."""
        return ptr, nbytes

    def _deregister(self, registered: Any) -> None:  # noqa: B027 - host memory was not registered anywhere
        """Give that back."""

    def symmetric_alloc(self, nbytes: int) -> int:
        """Allocate aligned memory."""
        return self._memory.alloc(nbytes)

    def symmetric_free(self, ptr: int) -> None:
        """Free it."""
        self._memory.free(ptr)

    def _allocate(self, nbytes: int) -> tuple[int, Any]:
        """Return a block for ``Allocator``; planes of host memory take that."""
        return host_block(nbytes)

    def _free(self, block: Any) -> None:  # noqa: B027 - host memory goes with the last reference to it
        """Give a block back."""

    def set_add_kernel(self, handle: int) -> None:
        """Agree with every rank that all set a kernel here, or none, and use it from the next operation on."""
        _whole("handle", handle, 0, _LARGEST)
        with LANE.held(self.who, "set_add_kernel", self.deadline):
            self._exchanged("set_add_kernel", b"\0", way="a kernel" if handle else "no kernel")
            self._use_kernel(handle)

    def _use_kernel(self, handle: int) -> None:  # noqa: B027 - host memory has no use for one
        """Use a kernel that every rank has set; 0: none."""

    def is_healthy(self) -> bool:
        """Return whether the next operation would be taken, by what is known now."""
        with LANE.tried() as held:
            if held and self._usable() and not self.in_flight:
                record = control_signature("listening", self.sequence, "is_healthy")
                with contextlib.suppress(CommunicatorBrokenError), self._poisoning(record):
                    self._listen()
        return self._usable()

    def state(self) -> str:
        """Return ``"healthy"``, ``"poisoned"``, or how it was closed."""
        if self._usable():
            return "healthy"
        return self.health.closed or ("poisoned" if self.health.cause is not None else "not usable in this process")

    def _usable(self) -> bool:
        return not (LANE.forked or self.health.closed or self.health.cause is not None or self._ended())

    def attempt_reconnect(self) -> None:
        """Make the communicator anew with every other rank; handles of the old one are void."""
        with LANE.held(self.who, "attempt_reconnect", self.deadline):
            if self.health.closed or self._ended():
                self._check("attempt_reconnect")
            if self._group is not None:
                raise ValueError(f"{self.who}: attempt_reconnect inside a group; end it first")
            self._handles.clear()
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

    def check_pointer(self, pointer: int, what: str) -> None:  # noqa: B027 - arrays of host memory are host memory
        """Raise ``ValueError`` where memory is not of this plane."""

    def _make(
        self,
        kind: str,
        nbytes: int,
        dtype: DType,
        *,
        send: int = 0,
        recv: int = 0,
        op: ReduceOp | None = None,
        root: int | None = None,
        peer: int | None = None,
        stream: int | None = None,
        aside: bool = False,
        waits: bool = False,
        waits_for_ever: bool = False,
    ) -> Operation:
        """Return a checked operation on raw pointers."""
        rule, dtype = RULES[kind], DType.parse(dtype)
        op = ReduceOp.parse(op) if op is not None else None
        _whole("nbytes", nbytes, 0, _LARGEST)
        if nbytes % dtype.itemsize:
            raise ValueError(f"{self.who}: {kind}: {nbytes} bytes are no whole number of {dtype.label} elements")
        for name, ptr, blocks in (("send", send, rule.send_blocks), ("recv", recv, rule.recv_blocks)):
            if blocks:
                _whole(f"{kind}: {name} pointer", ptr, 1 if nbytes else 0, 2**64)
        for name, value in (("root", root), ("peer", peer)):
            if value is not None:
                _whole(f"{kind}: {name}", value, 0, self._world_size)
        count, stream = nbytes // dtype.itemsize, self.stream if stream is None else stream
        return Operation(
            kind,
            count,
            dtype,
            send,
            recv,
            op,
            root,
            peer,
            call_site(),
            stream,
            aside,
            waits or waits_for_ever,
            waits_for_ever,
        )
