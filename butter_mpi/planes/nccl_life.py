"""The life of the communicator that the nccl plane stands on: started within a bound, ended, and made again.

NCCL has no timeout of its own in any of these: each call that can wait for other ranks is polled, or made in a thread
of its own that can be left.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from butter_mpi import nccl
from butter_mpi._libnccl import Library
from butter_mpi.collectives import Operation
from butter_mpi.control import Control, Overdue, Pause, Watch, closed_elsewhere, listen_everywhere
from butter_mpi.detached import Detached
from butter_mpi.device import LEGACY_STREAMS, Device
from butter_mpi.enums import DType, ReduceOp
from butter_mpi.errors import (
    ButterError,
    CollectiveTimeoutError,
    CommunicatorBrokenError,
    CUDAError,
    NCCLError,
    StartError,
    TransportError,
    text_of,
)
from butter_mpi.findings import by_value, ranks_text
from butter_mpi.nccl_log import Capture
from butter_mpi.planes.entering import Inside
from butter_mpi.planes.graphs import LAUNCH, Graphs
from butter_mpi.planes.issuing import Issuer, Kept
from butter_mpi.planes.joining import ABORT_SECONDS, Bound, abort, join
from butter_mpi.planes.keeping import Keeping
from butter_mpi.planes.on_device import OnDevice
from butter_mpi.planes.peers import PeerPlane
from butter_mpi.planes.waiting import error_from
from butter_mpi.sentinel.client import WATCHED
from butter_mpi.transport import chosen, judge
from butter_mpi.unique_id import NO_ID

__all__ = ["GivenBack", "NcclLife"]

GivenBack = Callable[[int], None]
"""Gives back what was registered with a communicator, of which it takes the handle."""

_LOG = logging.getLogger("butter_mpi")
_ANSWER_SECONDS = 0.5
_BARRIER_BYTES = 4
_CLOSE_SECONDS = 2.0
_DESTROY_WAITS = 23102
"""From this release on a destroy waits for those of the other ranks of the host, without a limit, and for no abort."""
_FIRST_SAY, _FIRST_SAY_FAR = 1.0, 4.3
"""Seconds that the watcher has to name a rank first; of another node it says after 4.2 s of silence."""


class NcclLife(OnDevice, PeerPlane):
    """Base of ``NcclPlane``: it has a NCCL communicator, and what operations need on the device.

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
    required : str, optional
        The transport that NCCL must be seen to use.
    **options
        Of ``PeerPlane``.
    """

    def __init__(
        self,
        comms: tuple[Control, Any, Any],
        mpi: Any,
        *,
        library: Library,
        ordinal: int,
        node: str,
        stream: int | None = None,
        required: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(comms, mpi, **options)
        self._transport_errors = (mpi.Exception, NCCLError, CUDAError)
        self._library, self._ordinal, self._given_stream = library, ordinal, stream
        self._node, self._required = node, required
        self.transport: dict[str, list[int]] = {}
        self._comm: int | None = None
        # An error of a start is said before another rank ends the job for it.
        self._close_seconds = 0.0
        self._inside = Inside(self._in_plain_flight)
        self._graphs, self._launching = Graphs(), Inside(self._in_graph_flight)
        # The same of calls that this rank may leave to themselves.
        self._left_inside = Inside()
        self._stopping: list[Detached] = []
        self._ending: Detached | None = None
        self._closing: Detached | None = None
        self._hopeless: CommunicatorBrokenError | None = None
        self._agreeing = False
        self._failing: Watch | None = None
        self._asking = Inside()

    def _open(self) -> None:
        """Take the device, and make what every operation needs."""
        if self._device is not None:
            return
        self._device = device = Device.of(self._ordinal)
        self._kept = kept = Kept(device)
        own, self._aside = kept.stream(), kept.stream()
        self.stream = own if self._given_stream is None else self.check_stream(self._given_stream)
        self._lasting = (own, *LEGACY_STREAMS)
        self._event = kept.event()
        self._keeping = Keeping(device)
        kept.callback(self._keeping.clear)
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
        bound = Bound(watch, self._look_at_start, self._begin_step)
        self._close_seconds = 0.0
        try:
            self._open()
            with Capture() as log:
                self._comm = join(self._library, self.device, self._control, bound)
                self._connect(bound)
                found = log.connections().as_dict()
            self._verify(found, bound)
            self._close_seconds = _CLOSE_SECONDS
        except Overdue as error:
            error.where = self._roll_call()
            self._stop()
            raise
        except TransportError:
            self._stop()
            raise
        except BaseException as error:
            self._stop()
            if isinstance(error, StartError) and error.phase == NO_ID:
                # Every rank has been told, in the same words.
                raise
            failed = self._start_failed(error, watch.elapsed)
            if isinstance(error, Exception) and failed is not error:
                raise failed from error
            raise

    def _begin_step(self, step: str) -> None:
        self._control.step = step

    def _roll_call(self) -> str:
        """Return in which step of this start each rank is, by what it answers now, as messages append it."""
        control, watch, pause = self._control, Watch(_ANSWER_SECONDS), Pause()
        with contextlib.suppress(self._mpi.Exception):
            # Who comes here later must not find this rank without an answer, as it has given up by then.
            control.send(control.peers, "here", {"at": control.step})
            control.send(control.peers, "where", {})
            while len(control.whereabouts) < len(control.peers) and not watch.tick():
                control.pump()
                pause()
        said = {rank: f"in '{step}'" if step else "not in this step" for rank, step in control.whereabouts.items()}
        said[control.rank] = f"in '{control.step}'"
        answers = [(rank, said.get(rank, "without an answer")) for rank in range(control.size)]
        every = "; ".join(f"{ranks_text(ranks)} {answer}" for answer, ranks in by_value(answers).items())
        hint = " (who does not answer has ended, or is inside a call)" if len(said) < control.size else ""
        return f": {every}{hint}"

    def _start_failed(self, error: BaseException, elapsed: float) -> StartError:
        """Return the error, after telling it to the other ranks: they wait for this one."""
        told = self._control.broken is not None
        watched = isinstance(error, StartError) and error.phase == WATCHED
        if told and isinstance(error, StartError):
            return error
        hint = ". Look at NCCL's log (NCCL_DEBUG=INFO)" if isinstance(error, NCCLError) else ""
        said = error.message if isinstance(error, ButterError) else text_of(error)
        text = said if watched else f"{self.who}: start: {said}{hint}"
        phase = error.phase if isinstance(error, StartError) else "NCCL init"
        if not told:
            notice = {"error": "StartError", "text": text, "lost": [], "phase": phase}
            self._control.send(self._control.peers, "broken", notice)
            # An exit is told by whoever made this; why there was a reconnect has been told.
            start_alone = isinstance(error, Exception) and not watched and self.health.cause is None
            if self._sentinel is not None and start_alone:
                self._sentinel.tell_of(text, lost=False)
        if isinstance(error, StartError) and watched:
            return error
        return StartError(text, phase=phase, elapsed=elapsed)

    def _verify(self, found: dict[str, Any], bound: Bound) -> None:
        """Tell every rank what NCCL's log says of this one: the communicator stands everywhere, on what is required."""
        mine = json.dumps({"node": self._node, "found": found}).encode()
        with bound.step("comparing transports") as step:
            every = self._control.all_gather_any(mine, bound.watch, step, bound.look)
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
        if self._sentinel is not None:
            self._sentinel.look_at_start()

    def _connect(self, bound: Bound) -> None:
        """Connect by one small operation: the host call makes connections, and would wait without a bound."""
        with bound.step("connecting") as step:
            self._aside_until_done(lambda: self._issue([self._barrier_operation()], self._left_inside), bound, step)
        with bound.step("the first operation") as step:
            while not self.device.ready(self.stream):
                if bound.watch.tick():
                    raise Overdue(step, bound.watch.elapsed)
                self._ask_nccl()
                bound.look()

    def _aside_until_done(self, call: Callable[[], Any], bound: Bound, phase: str) -> None:
        """Make a host call that can wait for other ranks inside NCCL, in a thread that can be left to itself."""
        device = self.device

        def run() -> None:
            device.make_current()
            call()

        Detached(run).result(bound.watch, phase, bound.look)

    # -- calls -------------------------------------------------------------------------------------------------------

    def _issue(self, operations: Sequence[Operation], mark: Inside | None = None) -> None:
        with mark or self._inside:
            self._issuer.issue(self._handle("submitting"), operations)

    def _issue_again(self, operation: Operation) -> None:
        """Issue one that is a single call, and was issued before most times: being in flight is mark enough."""
        call = operation.call
        if call is None or call[0] != self._comm:
            call = self._prepare(operation)
        result = call[1]()
        if result != nccl.SUCCESS:
            self._check_issued(call[2], result)

    def _prepare(self, operation: Operation) -> Any:
        comm = self._handle("submitting")
        if operation.graph is None:
            return self._issuer.prepare(comm, operation)
        operation.call = operation.graph.call
        return operation.call

    def _check_issued(self, name: str, result: int) -> None:
        if name == LAUNCH:
            self.device.check(name, result)
        nccl.check(self._library, name, result)

    def _in_plain_flight(self) -> bool:
        """Whether a thread may be inside NCCL without another mark: these are soon over, and wait for nobody."""
        return any(one.plain and one.graph is None for one in self._in_flights())

    def _in_graph_flight(self) -> bool:
        """Whether a thread may be launching a graph, where the host waits if many are pending: an abort frees it."""
        return any(one.graph is not None for one in self._in_flights())

    def _in_flights(self) -> list[Operation]:
        """Return what a thread is in, and what a signal handler has interrupted."""
        return [flight[0] for flight in (self._flight, *self._suspended) if isinstance(flight, tuple)]

    def _handle(self, what: str) -> int:
        """Return the communicator's handle, to a thread that is marked as inside; another may have taken it away."""
        comm = self._comm
        if comm is None:
            self.health.check(self.who, what)
            raise CommunicatorBrokenError(f"{self.who}: {what}: there is no NCCL communicator")
        return comm

    def _barrier_operation(self, stream: int | None = None) -> Operation:
        """NCCL returns at once from an empty operation and synchronises nothing: a barrier reduces one element."""
        own, where = self._barrier_buffer, self.stream if stream is None else stream
        return Operation("all_reduce", 1, DType.FLOAT32, own, own, ReduceOp.SUM, stream=where)

    def _ask_nccl(self) -> None:
        with self._inside:
            comm = self._comm
            if comm is not None:
                state = nccl.get_async_error(self._library, comm)
                nccl.check(self._library, "a communication in the background", state, in_progress=True)

    def _broken_here(self) -> CommunicatorBrokenError | None:
        """Return what NCCL says of work under way, for which every thread of this rank may wait where it asks nobody.

        A rank that dies breaks NCCL too: the watcher knows better, and so does a thread that is in a wait of ours. Both
        are given time to say it first.
        """
        if self.health.cause is not None or self.health.closed:
            return None
        try:
            with self._asking:
                self._ask_nccl()
        except NCCLError as error:
            far = self._sentinel is not None and self._sentinel.several and len(set(self._sentinel.nodes)) > 1
            self._failing = self._failing or Watch(_FIRST_SAY_FAR if far else _FIRST_SAY)
            if self._failing.tick():
                return CommunicatorBrokenError(f"{self.who}: after {self.last or 'the start'}: {error}")
        else:
            self._failing = None
        return None

    # -- end and return ----------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        # Whoever closes what broke before has an error to tell, and others wait for that.
        self._close_seconds = self._close_seconds if self.health.closed else 0.0
        self._stop_from_outside()

    def _stop_from_outside(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            graphs, self._graphs = self._graphs, Graphs()
            if graphs.living or not self._left_inside.none:
                # The abort waits for that, and frees whoever waits in a launch.
                self._stopping.append(graphs.end(self.device, self._left_inside, self._launching))
            self._stopping.append(abort(self._library, self.device, comm, self._inside, self._left_inside))

    def _release(self) -> None:
        if self._peer_broke():
            # A healthy end would wait for a peer that has given up.
            self._stop()
        super()._release()

    def _end_data_plane(self) -> None:
        comm, self._comm = self._comm, None
        stuck = f"{self.who}: closing: {self.last or 'the start'} has not completed within {self.deadline:g} s"
        registered = list(self._handles.values())
        graphs, self._graphs = self._graphs, Graphs()

        def destroy() -> None:
            assert comm is not None
            self._destroy(comm, registered, graphs)

        ending = None if comm is None else Detached(destroy, stuck, self.deadline)
        self._ending = ending
        if self._hopeless is not None:
            # It was heard of since this began.
            self._give_up(self._hopeless)
        watch = Watch(self._close_seconds)

        def look() -> None:
            self._hear_every_last_word()
            with contextlib.suppress(self._mpi.Exception):
                if self._agreeing and closed_elsewhere(self._control):
                    # It goes on by itself, and this rank comes to the close that the other one waits in.
                    raise Overdue("closing", watch.elapsed)

        try:
            self._closing = Detached(lambda: self._clean_up(ending))
            self._closing.result(watch, "closing", look)
        except Overdue:
            # It goes on by itself; if the communicator has not come to its end when the process ends, the job fails.
            if ending is not None and not ending.done and watch.tick():
                _LOG.warning("%s: closing: still waiting for %s", self.who, self.last or "what is under way")
        except (NCCLError, CUDAError) as error:
            _LOG.warning("%s: closing: %s", self.who, error)

    def _hear_every_last_word(self) -> None:
        """Hear those of communicators that were closed before too: peers may be waiting for the end of these."""
        self._hear_last_words()
        with contextlib.suppress(self._mpi.Exception):
            listen_everywhere()

    def _give_up(self, cause: CommunicatorBrokenError) -> None:
        """Fail the job at its end for what is under way then, as it will not come to its end any more."""
        self._hopeless, ending = cause, self._ending
        # Without a watcher nothing is known of the others.
        if ending is not None and not (self._sentinel and self._sentinel.lost):
            why = cause.message.removeprefix(f"{self.who}: ")
            ending.give_up(f"{self.who}: closing: {self.last or 'the start'} has not completed: {why}")

    def _destroy(self, comm: int, registered: Sequence[GivenBack], graphs: Graphs) -> None:
        """End a healthy communicator, once its work is done; by an abort where a peer does not end it so."""
        # A call that never came back stays inside for ever; only the thread that listens is soon out.
        self._asking.wait_until_none()
        self.device.make_current()
        # NCCL waits for that. What is in flight goes on.
        graphs.clear()
        waits, pause = self._library.version >= _DESTROY_WAITS, Pause()
        if registered or waits:
            self._keeping.mark_plans()
        # A stream that was given may be gone by now.
        while (registered or waits) and not self._quiet(*([self.stream] if self._given_stream is None else [])):
            pause()
        if waits and not self._agreed_to_close():
            nccl.abort(self._library, comm)
            return
        with contextlib.ExitStack() as ends:
            ends.callback(nccl.destroy, self._library, comm)
            for give_back in registered:
                ends.callback(give_back, comm)

    def _agreed_to_close(self) -> bool:
        """Wait for the last word of every peer, which other threads take; returns whether none gave up instead.

        Without a bound: what keeps a peer from it is heard of too, and the end of this process does not wait for ever.
        """
        self._agreeing, pause = True, Pause()
        while not self._gave_up_there:
            if self._control.everyone_left:
                return True
            pause()
        return False

    def _quiet(self, *streams: int) -> bool:
        """Return whether streams, one's own among them, have passed what was put on them, arrays' ones too."""
        with self.device.beside_captures():
            self._keeping.release()
            return self._keeping.empty and all(map(self.device.ready, (self._aside, *streams)))

    def _clean_up(self, ending: Detached | None) -> None:
        """Give back what this communicator has, last made first, once nothing can use it any more.

        A call that never came back from NCCL may still, and keeps it.
        """
        for call in [*self._stopping, *([ending] if ending is not None else [])]:
            call.wait()
        if self._device is not None:
            self._device.make_current()
            self._kept.callback(self._free_left)
            self._kept.close()
        if ending is not None:
            ending.result(Watch(None), "destroying")

    def _free_left(self) -> None:
        """Free memory that its user has left to this; what a stream still uses then stays to the process's end."""
        watch, pause = Watch(_CLOSE_SECONDS), Pause()
        if self._memory.has_left:
            self._keeping.mark_plans()
        while self._memory.has_left and not watch.tick():
            if self._quiet():
                self._memory.free_left()
            pause()

    def stop_for_good(self) -> None:
        """Abort what broke, and wait a moment for that: what comes next uses the same device."""
        self._stop()
        for stopping in self._stopping:
            with contextlib.suppress(Overdue, NCCLError):
                stopping.result(Watch(ABORT_SECONDS), "aborting")

    def replace(self, by: str) -> None:
        """End this broken communicator, as survivors go on in another one; its device memory is given back."""
        super().replace(by)
        self._closing = Detached(lambda: self._clean_up(None))

    def _reconnect(self) -> None:
        self.stop_for_good()
        if all(stopping.done for stopping in self._stopping):
            # Later operations may have none that marks it, and a close would wait for that.
            self._keeping.forget_unmarked()
        super()._reconnect()
        try:
            self.start(Watch(self.start_deadline))
        except (StartError, Overdue) as error:
            late = isinstance(error, Overdue)
            kind = CollectiveTimeoutError if late else CommunicatorBrokenError
            raise kind(
                f"{self.who}: attempt_reconnect: {str(error).removeprefix(f'{self.who}: ')}",
                operation="attempt_reconnect",
                phase="reconnect",
            ) from error

    def native(self) -> tuple[Library, int]:
        """Return NCCL and the handle of the communicator, which is void once this one breaks or ends.

        Raises
        ------
        CommunicatorBrokenError, CommunicatorClosedError
            It is void.
        """
        self._check("native")
        return self._library, self._handle("native")
