"""The plane of device memory: NCCL's operations, put on the ordered CUDA stream; the host does not wait for them.

Each call costs the host what NCCL costs and the checks. What NCCL does not tell is found elsewhere: which rank failed
comes over the control plane, and after an abort CUDA reports the work of a stream as done, so every wait of this plane
looks at the communicator's health before it reports success.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from butter_mpi import nccl
from butter_mpi._libnccl import Library
from butter_mpi.collectives import Operation
from butter_mpi.control import Control, Overdue, Pause, Watch
from butter_mpi.detached import Detached
from butter_mpi.device import Device
from butter_mpi.enums import DType, ReduceOp
from butter_mpi.errors import (
    ButterError,
    CollectiveTimeoutError,
    CommunicatorBrokenError,
    CUDAError,
    NCCLError,
    NotSupportedError,
    PeerLostError,
    StartError,
    TransportError,
    text_of,
)
from butter_mpi.findings import ranks_text
from butter_mpi.nccl_log import Capture
from butter_mpi.nccl_setup import connects_late
from butter_mpi.planes.base import Numbered
from butter_mpi.planes.issuing import ADDING, Issuer, Kept
from butter_mpi.planes.joining import ABORT_SECONDS, Bound, abort, join
from butter_mpi.planes.meeting import Meeting
from butter_mpi.planes.memory import ALIGNMENT
from butter_mpi.planes.on_device import OnDevice
from butter_mpi.planes.peers import PeerPlane, Task
from butter_mpi.planes.waiting import Waiting, error_from
from butter_mpi.transport import chosen, judge
from butter_mpi.unique_id import NO_ID

__all__ = ["NcclPlane"]

_LOG = logging.getLogger("butter_mpi")
_FLOAT8 = (DType.FLOAT8_E4M3, DType.FLOAT8_E5M2)
_FLOAT8_CAPABILITY = (9, 0)
_BARRIER_BYTES = 4
_CLOSE_SECONDS = 2.0
# What was on its way when a peer broke is there by then; a peer that exits lets the others speak for a little longer.
_GRACE = 0.1
_DEVICE_LOST = "CUDA work of this rank failed, now or earlier; no other rank is the cause"
_STOP_ALL = "Stop all ranks before retrying"
_UNKNOWN = "ranks that are alive; which of them has not come is not known here"


def nothing() -> Task:
    """No data goes over MPI."""
    yield from ()


class NcclPlane(OnDevice, PeerPlane):
    """Collectives on device memory by NCCL.

    Parameters
    ----------
    comms, mpi : tuple, module
        Of ``PeerPlane``.
    library : Library
        NCCL.
    ordinal : int
        This rank's device, among the visible ones.
    node : str
        What tells this machine from others.
    stream : int, optional
        The ordered stream; without it, a non-blocking one of this plane.
    strict : bool, default False
        Whether ranks compare what they submit before each operation, at the price of a round of MPI messages.
    required : str, optional
        The transport that NCCL must be seen to use.
    **options
        Of ``PeerPlane``.
    """

    NAME = "nccl"

    def __init__(
        self,
        comms: tuple[Control, Any, Any],
        mpi: Any,
        *,
        library: Library,
        ordinal: int,
        node: str,
        stream: int | None = None,
        strict: bool = False,
        required: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(comms, mpi, **options)
        self._transport_errors = (mpi.Exception, NCCLError, CUDAError)
        self._library, self._ordinal, self._given_stream, self._strict = library, ordinal, stream, strict
        self._node, self._required = node, required
        self.transport: dict[str, list[int]] = {}
        self._comm: int | None = None
        # An error of a start is said before another rank ends the job for it.
        self._close_seconds = 0.0
        self._calling: Detached | None = None
        self._stopping: list[Detached] = []
        self._connected: set[tuple[int, str]] = set()
        self._connects_late = connects_late()

    def _open(self) -> None:
        """Take the device, and make what every operation needs."""
        if self._device is not None:
            return
        self._device = device = Device.of(self._ordinal)
        self._kept = kept = Kept(device)
        own, self._aside = kept.stream(), kept.stream()
        self.stream = own if self._given_stream is None else self.check_stream(self._given_stream)
        self._events = (kept.event(), kept.event())
        self._issuer = Issuer(self._library, device, kept, self._rank, self._world_size)
        self._barrier_buffer = kept.buffer(_BARRIER_BYTES)
        device.fill(self._barrier_buffer, 0, _BARRIER_BYTES, self.stream)

    # -- start -------------------------------------------------------------------------------------------------------

    def start(self, watch: Watch) -> None:
        """Make the NCCL communicator with every other rank, connected, within `watch`.

        Raises
        ------
        StartError
            It failed on this rank, or on another one, which has said so.
        Overdue
            Not every rank came in time.
        """
        bound = Bound(watch, self._look_at_start)
        self._close_seconds = 0.0
        try:
            self._open()
            with Capture() as log:
                self._comm = join(self._library, self.device, self._control, bound)
                self._connect(bound)
                found = log.connections().as_dict()
            self._verify(found, bound)
            self._close_seconds = _CLOSE_SECONDS
        except (Overdue, TransportError):
            self._stop()
            raise
        except BaseException as error:
            self._stop()
            if isinstance(error, StartError) and error.phase == NO_ID:
                # Every rank has been told, in the same words.
                raise
            failed = self._start_failed(error, watch.elapsed)
            if isinstance(error, Exception):
                raise failed from error
            raise

    def _start_failed(self, error: BaseException, elapsed: float) -> StartError:
        """Return the error, after telling it to the other ranks: they wait for this one."""
        told = self._control.broken is not None
        if told and isinstance(error, StartError):
            return error
        hint = ". Look at NCCL's log (NCCL_DEBUG=INFO)" if isinstance(error, NCCLError) else ""
        said = error.message if isinstance(error, ButterError) else text_of(error)
        text = f"{self.who}: start: {said}{hint}"
        phase = error.phase if isinstance(error, StartError) else "NCCL init"
        if not told:
            notice = {"error": "StartError", "text": text, "lost": [], "phase": phase}
            self._control.send(self._control.peers, "broken", notice)
        return StartError(text, phase=phase, elapsed=elapsed)

    def _verify(self, found: dict[str, Any], bound: Bound) -> None:
        """Tell every rank what NCCL's log says of this one: the communicator stands everywhere, on what is required."""
        mine = json.dumps({"node": self._node, "found": found}).encode()
        every = self._control.all_gather_any(mine, bound.watch, "comparing transports", bound.look)
        said = [json.loads(one) for one in every]
        finding = judge(self._required, [one["found"] for one in said], [one["node"] for one in said])
        if finding is not None:
            raise TransportError(
                f"{finding.message}; {finding.remedy}",
                required=self._required,
                found=tuple(chosen([one["found"] for one in said])),
            )
        self.transport = chosen([one["found"] for one in said])

    def _look_at_start(self) -> None:
        self._control.pump()
        if self._control.broken is not None:
            raise error_from(self.who, *self._control.broken)

    def _connect(self, bound: Bound) -> None:
        """Connect by one small operation: the host call makes connections, and would wait without a bound."""
        self._aside_until_done(lambda: self._issue([self._barrier_operation()]), bound, "connecting")
        while not self.device.ready(self.stream):
            if bound.watch.tick():
                raise Overdue("the first operation", bound.watch.elapsed)
            self._ask_nccl()
            bound.look()

    def _aside_until_done(self, call: Callable[[], Any], bound: Bound, phase: str) -> None:
        """Make a host call that can wait for other ranks inside NCCL, in a thread that can be left to itself."""
        device = self.device

        def run() -> None:
            device.make_current()
            call()

        self._calling = Detached(run)
        self._calling.result(bound.watch, phase, bound.look)

    # -- operations --------------------------------------------------------------------------------------------------

    def _admit(self, operation: Operation) -> None:
        super()._admit(operation)
        if operation.op is not None and operation.dtype in _FLOAT8 and self.device.capability < _FLOAT8_CAPABILITY:
            raise NotSupportedError(
                f"{self.who}: {operation.kind} of {operation.dtype.label}: this device has compute capability "
                f"{'.'.join(map(str, self.device.capability))}; NCCL reduces 8-bit floats from 9.0 on",
                needs="compute capability 9.0",
            )
        self._issuer.data_type(operation.dtype)

    def _execute(self, numbered: Sequence[Numbered]) -> None:
        if self._strict:
            self._meet(numbered)
        operations = [self._whole(operation) for operation, _ in numbered]
        waited = operations[0] if len(operations) == 1 and operations[0].waits else None
        with self._on_own_stream(operations):
            streamed = [self._streamed(operation) for operation in operations]
            new = self._issuer.pairs(streamed) - self._connected
            if waited or new or self._connects_late:
                self._issue_bounded(streamed, numbered)
            else:
                self._issue(streamed)
        if waited is not None:
            self._wait_for(waited, numbered[0][1])

    def _meet(self, numbered: Sequence[Numbered]) -> None:
        """Compare what ranks submit, and how it will be moved: a rank that adds waits for one that adds."""
        if self._issuer.adds([operation for operation, _ in numbered]):
            numbered = [(operation, {**record, "way": ADDING}) for operation, record in numbered]
        meeting = Meeting(self._control, self._records(numbered))
        limit = None if all(operation.waits_for_ever for operation, _ in numbered) else self.deadline
        self._finish(
            [self._when_met(record, meeting, nothing()) for _, record in numbered], meeting, numbered[0][1], limit
        )

    def _whole(self, operation: Operation) -> Operation:
        return self._barrier_operation(operation.stream) if operation.kind == "barrier" else operation

    def _barrier_operation(self, stream: int | None = None) -> Operation:
        """NCCL returns at once from an empty operation and synchronises nothing: a barrier reduces one element."""
        own, where = self._barrier_buffer, self.stream if stream is None else stream
        return Operation("all_reduce", 1, DType.FLOAT32, own, own, ReduceOp.SUM, stream=where)

    def _streamed(self, operation: Operation) -> Operation:
        return replace(operation, stream=self._aside) if operation.aside else operation

    @contextmanager
    def _on_own_stream(self, operations: Sequence[Operation]) -> Iterator[None]:
        """Order the communicator's own stream after what compute streams hold, and their later work after it."""
        before, after = self._events
        streams = {operation.stream for operation in operations if operation.aside}
        for stream in streams:
            self.device.record(before, stream)
            self.device.wait(self._aside, before)
        yield
        if streams:
            self.device.record(after, self._aside)
        for stream in streams:
            self.device.wait(stream, after)

    def _issue_bounded(self, operations: Sequence[Operation], numbered: Sequence[Numbered]) -> None:
        """Issue what has a deadline or could wait inside NCCL, where the first call between two ranks connects them.

        So does, where the user has NCCL connect late, the first operation of each algorithm; NCCL alone knows which of
        them it takes, by size, type and group.
        """
        record = numbered[0][1]
        limit = None if all(operation.waits_for_ever for operation in operations) else self.deadline
        waiting = self._waiting(record, limit, unknown=_UNKNOWN)
        bound = Bound(Watch(None), lambda: waiting.look(record, self._gone(numbered), waiting.take()))
        self._aside_until_done(lambda: self._issue(operations), bound, "connecting")
        # One that moved nothing may have connected nothing.
        self._connected |= self._issuer.pairs([op for op in operations if op.count] or operations[:0])

    def _gone(self, numbered: Sequence[Numbered]) -> dict[int, dict[str, Any]]:
        """Return the ranks that have left without coming to an operation, each with the operation."""
        return {peer: record for op, record in numbered for peer in self._left_out(record, op.peer)}

    def _issue(self, operations: Sequence[Operation]) -> None:
        assert self._comm is not None
        self._issuer.issue(self._comm, operations)

    def _use_kernel(self, handle: int) -> None:
        self._issuer.add_kernel = handle

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _waiting(self, record: dict[str, Any], limit: float | None, **more: Any) -> Waiting:
        agrees = record["kind"] == "set_add_kernel"
        what = "Every rank must call it at the same place" if agrees else _STOP_ALL
        remedy = f"{what}, or set a longer collective_deadline"
        return super()._waiting(record, limit, **{"remedy": remedy, "grace": _GRACE, **more})

    def _wait_for(self, operation: Operation, record: dict[str, Any]) -> None:
        """Poll the stream; its work also counts as done after an abort, so health has the last word."""
        waiting = self._waiting(record, None if operation.waits_for_ever else self.deadline, unknown=_UNKNOWN)
        while not self.device.ready(operation.stream):
            self._ask_nccl()
            waiting.look(record, self._gone([(operation, record)]), waiting.take())
        self._ask_nccl()
        self.health.check(self.who, record["kind"])

    def _ask_nccl(self) -> None:
        if self._comm is not None:
            state = nccl.get_async_error(self._library, self._comm)
            nccl.check(self._library, "a communication in the background", state, in_progress=True)

    def _listen(self) -> None:
        super()._listen()
        gone = self._left_out({"kind": "collective", "n": self.sequence}, None)
        if gone and self.health.cause is None:
            why = self._control.left[gone[0]]["why"]
            self.poison(
                PeerLostError(
                    f"{self.who}: {ranks_text(gone)} left: {why}, and did not come to what this rank has submitted "
                    f"(collective #{self.sequence})",
                    lost_ranks=tuple(gone),
                    sequence=self.sequence,
                    phase="collective",
                )
            )
        if self.health.cause is None:
            self._ask_nccl()
            self.device.check_context(self._aside)

    def _failed(self, record: dict[str, Any], error: BaseException) -> CommunicatorBrokenError:
        facts = [str(error) if isinstance(error, ButterError) else f"MPI failed: {error}"]
        facts += [_DEVICE_LOST] if isinstance(error, CUDAError) else []
        facts += [_STOP_ALL] if record["kind"] == "broadcast" else []
        return super()._failed(record, ButterError(". ".join(facts)))

    # -- end and return ----------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        # Whoever closes what broke before has an error to tell, and others wait for that.
        self._close_seconds = self._close_seconds if self.health.closed else 0.0
        if self._comm is not None:
            comm, self._comm = self._comm, None
            self._stopping.append(abort(self._library, self.device, comm, self._calling))

    def _release(self) -> None:
        super()._release()
        comm, self._comm = self._comm, None
        stuck = f"{self.who}: closing: {self.last or 'the start'} has not completed within {self.deadline:g} s"
        registered = list(self._handles.values())
        ending = None if comm is None else Detached(lambda: self._destroy(comm, registered), stuck, self.deadline)
        try:
            Detached(lambda: self._clean_up(ending)).result(Watch(self._close_seconds), "closing")
        except Overdue:
            # It goes on by itself; if the communicator has not come to its end when the process ends, the job fails.
            if ending is not None and not ending.done:
                _LOG.warning("%s: closing: still waiting for %s", self.who, self.last or "what is under way")
        except (NCCLError, CUDAError) as error:
            _LOG.warning("%s: closing: %s", self.who, error)

    def _destroy(self, comm: int, registered: Sequence[Any]) -> None:
        """End a healthy communicator, which waits for its work."""
        self.device.make_current()
        with contextlib.ExitStack() as ends:
            ends.callback(nccl.destroy, self._library, comm)
            for one in registered:
                ends.callback(nccl.deregister, self._library, comm, one)

    def _clean_up(self, ending: Detached | None) -> None:
        """Give back what this communicator has, last made first, once nothing can use it any more.

        A call that never came back from NCCL may still, and keeps it.
        """
        for call in [*self._stopping, *([ending] if ending is not None else [])]:
            call.wait()
        if self._device is not None:
            self._device.make_current()
            self._kept.close()
        if ending is not None:
            ending.result(Watch(None), "destroying")

    def _reconnect(self) -> None:
        self._stop()
        for stopping in self._stopping:
            with contextlib.suppress(Overdue, NCCLError):
                stopping.result(Watch(ABORT_SECONDS), "aborting")
        super()._reconnect()
        self._connected.clear()
        try:
            self.start(Watch(self._start_deadline))
        except (StartError, Overdue) as error:
            late = isinstance(error, Overdue)
            kind = CollectiveTimeoutError if late else CommunicatorBrokenError
            raise kind(
                f"{self.who}: attempt_reconnect: {error}", operation="attempt_reconnect", phase="reconnect"
            ) from error

    def native(self) -> tuple[Library, int]:
        """Return NCCL and the handle of the communicator, which is void once this one breaks or ends.

        Raises
        ------
        CommunicatorBrokenError, CommunicatorClosedError
            It is void.
        """
        self._check("native")
        assert self._comm is not None
        return self._library, self._comm

    # -- memory ------------------------------------------------------------------------------------------------------

    def _register(self, ptr: int, nbytes: int) -> Any:
        assert self._comm is not None
        self.device.enter()
        return nccl.register(self._library, self._comm, ptr, nbytes)

    def _deregister(self, registered: Any) -> None:
        if self._comm is not None:
            nccl.deregister(self._library, self._comm, registered)

    def _allocate(self, nbytes: int) -> tuple[int, int]:
        """Allocate by NCCL's allocator (``ncclMemAlloc``)."""
        self.device.enter()
        base = nccl.mem_alloc(self._library, nbytes)
        if base % ALIGNMENT:
            # NCCL falls back to the ordinary allocator where the driver's virtual memory cannot be had. Freeing waits
            # for all work, so the block that does not fit goes with the communicator.
            self._kept.callback(nccl.mem_free, self._library, base)
            base = nccl.mem_alloc(self._library, nbytes + ALIGNMENT)
        return base, base

    def _free(self, base: int) -> None:
        """Free it (``ncclMemFree``), after waiting for this communicator's streams; others must be done."""
        self.device.enter()
        self._drain()
        nccl.mem_free(self._library, base)

    def _drain(self) -> None:
        """Wait for the streams of this communicator, as freed memory that work still uses would break the device."""
        watch, pause = Watch(self.deadline), Pause()
        for stream in () if self.health.closed else (self.stream, self._aside):
            while not self.device.ready(stream):
                if watch.tick():
                    raise ButterError(f"{self.who}: symmetric_free: a stream is still busy; nothing was freed")
                # What a peer says ends the work that waits for it.
                self.is_healthy()
                pause()
