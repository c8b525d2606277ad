"""The plane of device memory: NCCL's operations, put on the ordered CUDA stream; the host does not wait for them.

Each call costs the host what NCCL costs and the checks. What NCCL does not tell is found elsewhere: which rank failed
comes over the control plane, and after an abort CUDA reports the work of a stream as done, so every wait of this plane
looks at the communicator's health before it reports success.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from butter_mpi import nccl
from butter_mpi.collectives import Operation, carried, signature
from butter_mpi.control import Control, Pause, Watch
from butter_mpi.enums import DType
from butter_mpi.errors import (
    ButterError,
    CommunicatorBrokenError,
    CUDAError,
    NotSupportedError,
    PeerLostError,
)
from butter_mpi.lane import LANE
from butter_mpi.nccl_setup import connects_late
from butter_mpi.planes.issuing import ADDING
from butter_mpi.planes.joining import Bound
from butter_mpi.planes.launching import UNKNOWN, NcclGraphs
from butter_mpi.planes.meeting import Meeting
from butter_mpi.planes.memory import ALIGNMENT
from butter_mpi.planes.nccl_life import GivenBack
from butter_mpi.planes.peers import Task
from butter_mpi.planes.submitting import Numbered, signed
from butter_mpi.planes.waiting import Waiting, farewells

__all__ = ["NcclPlane"]

_FLOAT8 = (DType.FLOAT8_E4M3, DType.FLOAT8_E5M2)
_FLOAT8_CAPABILITY = (9, 0)
_INTEGERS16 = (DType.INT16, DType.UINT16)
# What was on its way when a peer broke is there by then; a peer that exits lets the others speak for a little longer.
_GRACE = 0.1
_LAST_SECONDS = 2.0
_DEVICE_LOST = "CUDA work of this rank failed, now or earlier; no other rank is the cause"
_STOP_ALL = "Stop all ranks before retrying"


def nothing() -> Task:
    """No data goes over MPI."""
    yield from ()


class NcclPlane(NcclGraphs):
    """Collectives on device memory by NCCL.

    Parameters
    ----------
    comms, mpi : tuple, module
        Of ``PeerPlane``.
    strict : bool, default False
        Whether ranks compare what they submit before each operation, at the price of a round of MPI messages.
    **options
        Of ``NcclLife``.
    """

    NAME = "nccl"

    def __init__(self, comms: tuple[Control, Any, Any], mpi: Any, *, strict: bool = False, **options: Any) -> None:
        super().__init__(comms, mpi, **options)
        self._strict = strict
        self._connected: set[tuple[int, str]] = set()
        self._connects_late = connects_late()
        self._marked = False

    # -- operations --------------------------------------------------------------------------------------------------

    def _check_supported(self, operation: Operation) -> None:
        if operation.op is not None and operation.dtype in _FLOAT8 and self.device.capability < _FLOAT8_CAPABILITY:
            raise NotSupportedError(
                f"{self.who}: {operation.kind} of {operation.dtype.label}: this device has compute capability "
                f"{'.'.join(map(str, self.device.capability))}; NCCL reduces 8-bit floats from 9.0 on",
                needs="compute capability 9.0",
            )
        if operation.op is not None and operation.dtype in _INTEGERS16:
            raise NotSupportedError(
                f"{self.who}: {operation.kind} of {operation.dtype.label}: NCCL reduces integers of 8, 32 and 64 bits; "
                "it moves these as bytes",
                needs="another element type",
            )
        self._issuer.data_type(carried(operation).dtype)

    def _execute(self, numbered: Sequence[Numbered]) -> None:
        if self._keeping.dropped:
            self._keeping.take_back()
        if self._strict:
            self._meet(numbered)
        first = numbered[0][0]
        at_once = first.plain and len(numbered) == 1 and not (self._connects_late or self._issuer.add_kernel)
        if at_once or first.graph is not None:
            self._issue_again(first)
        else:
            operations = [self._issued(operation) for operation, _ in numbered if not operation.rule.uneven]
            self._execute_all(operations, numbered)

    def _execute_all(self, operations: Sequence[Operation], numbered: Sequence[Numbered]) -> None:
        """Execute what may be several, run beside its stream, be waited for, or wait inside NCCL."""
        aside = {operation.stream for operation, _ in numbered if operation.aside}
        for stream in aside:
            self._order(stream, self._aside)
        waits = len(numbered) == 1 and numbered[0][0].waits
        if waits or self._connects_late or not self._issuer.pairs(operations) <= self._connected:
            self._issue_bounded(operations, numbered)
        else:
            self._issue(operations)
        for stream in aside:
            self._order(self._aside, stream)
        if waits:
            self._wait_for(*numbered[0])

    def _meet(self, numbered: Sequence[Numbered]) -> None:
        """Compare what ranks submit, and how it will be moved: a rank that adds waits for one that adds."""
        submitted = signed(numbered)
        if self._issuer.adds([operation for operation, _ in numbered]):
            submitted = [(operation, {**record, "way": ADDING}) for operation, record in submitted]
        meeting = Meeting(self._control, self._records(submitted))
        limit = None if all(operation.waits_for_ever for operation, _ in numbered) else self.deadline
        tasks = [self._when_met(record, meeting, nothing()) for _, record in submitted]
        self._finish(tasks, meeting, submitted[0][1], limit)

    def _issued(self, operation: Operation) -> Operation:
        """Return an operation as it is put on a stream: a barrier as a sum, what runs aside on this plane's own."""
        if not operation.aside and operation.kind != "barrier" and operation.dtype.native:
            return operation
        if operation.issued is None:
            barrier = operation.kind == "barrier"
            whole = self._barrier_operation(operation.stream) if barrier else carried(operation)
            operation.issued = replace(whole, stream=self._aside) if operation.aside else whole
        issued: Operation = operation.issued
        return issued

    def _issue_bounded(self, operations: Sequence[Operation], numbered: Sequence[Numbered]) -> None:
        """Issue what has a deadline or could wait inside NCCL, where the first call between two ranks connects them.

        So does, where the user has NCCL connect late, the first operation of each algorithm; NCCL alone knows which of
        them it takes, by size, type and group.
        """
        record = signature(*numbered[0])
        limit = None if all(operation.waits_for_ever for operation in operations) else self.deadline
        waiting = self._waiting(record, limit, unknown=UNKNOWN)
        bound = Bound(Watch(None), lambda: waiting.look(record, self._gone(numbered), waiting.take()))
        self._aside_until_done(lambda: self._issue(operations, self._left_inside), bound, "connecting")
        # One that moved nothing may have connected nothing.
        self._connected |= self._issuer.pairs([op for op in operations if op.count] or operations[:0])

    def _gone(self, numbered: Sequence[Numbered]) -> dict[int, dict[str, Any]]:
        """Return the ranks that have left without coming to an operation, each with the operation."""
        submitted = signed(numbered)
        return {peer: record for op, record in submitted for peer in self._left_out(record, op.peer)}

    def _use_kernel(self, handle: int) -> None:
        self._issuer.add_kernel = handle

    @property
    def _judged(self) -> bool:
        return not self._strict

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _waiting(self, record: dict[str, Any], limit: float | None, **more: Any) -> Waiting:
        agrees = record["kind"] in ("set_add_kernel", "symmetric", "plan_graph")
        what = "Every rank must call it at the same place" if agrees else _STOP_ALL
        remedy = f"{what}, or set a longer collective_deadline"
        return super()._waiting(record, limit, **{"remedy": remedy, "grace": _GRACE, **more})

    def _wait_for(self, operation: Operation, number: int) -> None:
        """Poll the stream; its work also counts as done after an abort, so health has the last word."""
        record = signature(operation, number)
        waiting = self._waiting(record, None if operation.waits_for_ever else self.deadline, unknown=UNKNOWN)
        # Once it is poisoned NCCL is being aborted, and the driver answers no question before that is done.
        while self.health.cause is None and not self.device.ready(operation.stream):
            self._ask_nccl()
            waiting.look(record, self._gone([(operation, number)]), waiting.take())
        if self.health.cause is None:
            self._ask_nccl()
        self.health.check(self.who, record["kind"])

    def _listen(self) -> None:
        super()._listen()
        gone = self._left_out({"kind": "collective", "n": self.sequence}, None)
        if gone and self.health.cause is None:
            self.poison(
                PeerLostError(
                    f"{self.who}: {farewells(self._control, gone)}, and did not come to what this rank has submitted "
                    f"(collective #{self.sequence})",
                    lost_ranks=tuple(gone),
                    sequence=self.sequence,
                    phase="collective",
                )
            )
        if self.health.cause is None:
            self._ask_nccl()
            self.device.check_context(self._aside)
            self._keeping.take_back()
            self._keeping.release()

    def _failed(self, record: dict[str, Any], error: BaseException) -> CommunicatorBrokenError:
        facts = [str(error) if isinstance(error, ButterError) else f"MPI failed: {error}"]
        facts += [_DEVICE_LOST] if isinstance(error, CUDAError) else []
        facts += [_STOP_ALL] if record["kind"] == "broadcast" else []
        return super()._failed(record, ButterError(". ".join(facts)))

    def _reconnect(self) -> None:
        self._connected.clear()
        # What failed may have been a capture that is not over.
        self._capturing = 0
        super()._reconnect()

    # -- memory ------------------------------------------------------------------------------------------------------

    def _register(self, ptr: int, nbytes: int) -> GivenBack:
        self.device.enter()
        with self._inside:
            number = nccl.register(self._library, self._handle("register_buffer"), ptr, nbytes)
        return lambda comm: nccl.deregister(self._library, comm, number)

    def _register_symmetric(self, ptr: int, nbytes: int, record: dict[str, Any]) -> GivenBack:
        """Register a window of all ranks; a library without any, or that gives none here, knows the buffer at most."""
        if not self._library.has("ncclCommWindowRegister"):
            return self._register(ptr, nbytes)
        window, flags = nccl.Handle(), self._library.constant("NCCL_WIN_COLL_SYMMETRIC")

        def register() -> None:
            with self._left_inside:
                comm = self._handle("symmetric")
                result = nccl.window_register(self._library, comm, ptr, nbytes, window, flags)
                nccl.check(self._library, "ncclCommWindowRegister", result)

        waiting = self._waiting(record, self.deadline, unknown=UNKNOWN)
        # Every rank has come, and waits inside NCCL for the others; one that has closed since had its window before.
        bound = Bound(Watch(None), lambda: waiting.look(record, {}, waiting.take()))
        self._aside_until_done(register, bound, "registering a window")
        number = window.value
        return lambda comm: None if number is None else nccl.window_deregister(self._library, comm, number)

    def _deregister(self, registered: GivenBack) -> None:
        with self._inside:
            comm = self._comm
            if comm is not None:
                registered(comm)

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
        """Free it (``ncclMemFree``)."""
        self.device.enter()
        nccl.mem_free(self._library, base)

    def drain(self, what: str) -> None:
        """Wait for the streams of this communicator, and for those that its operations on arrays were put on."""
        watch, pause = Watch(self.deadline if self._usable() else _LAST_SECONDS), Pause()
        self._marked = False
        while not self._passed(what):
            if watch.tick():
                raise ButterError(f"{self.who}: {what}: a stream is still busy; nothing was freed or given back")
            # What a peer says ends the work that waits for it.
            self.is_healthy()
            pause()

    def _passed(self, what: str) -> bool:
        """Return whether nothing uses memory any more."""
        if self.health.closed:
            return self._closing is not None and self._closing.done
        # An abort that is under way keeps the driver from answering.
        if not all(stopping.done for stopping in self._stopping):
            return False
        with LANE.held(self.who, what, self.deadline):
            for stream in {self.stream, self._aside, *self._keeping.lent}:
                try:
                    self.device.refuse_capture(stream)
                except ValueError as error:
                    raise ValueError(f"{self.who}: {what}: {error}") from None
            if not self._marked:
                self._marked = True
                self._keeping.mark_plans()
            return self._quiet(self.stream)
