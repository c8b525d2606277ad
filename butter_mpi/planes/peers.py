"""What every plane with peers shares: the control plane, the last word, and the way back after a failure."""

from __future__ import annotations

import contextlib
import struct
import weakref
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from butter_mpi.collectives import call_site, control_signature
from butter_mpi.control import Control, Duplicate, Overdue, Pause, Ticket, Watch, duplicate
from butter_mpi.detached import Detached
from butter_mpi.errors import CollectiveMismatchError, CollectiveTimeoutError, CommunicatorBrokenError, PeerLostError
from butter_mpi.lane import LANE
from butter_mpi.planes.base import Plane
from butter_mpi.planes.meeting import Meeting
from butter_mpi.planes.submitting import Signed
from butter_mpi.planes.surviving import Surviving
from butter_mpi.planes.waiting import Waiting, error_from, farewells, notice_of
from butter_mpi.sentinel.client import Sentinel
from butter_mpi.sentinel.gathering import RECONNECT
from butter_mpi.sentinel.relayed import MOST_BYTES, RelayedControl

__all__ = ["PeerPlane", "Task"]

_GRACE = 0.5
_NEWS_SECONDS = 0.3
_WORD_SECONDS = 0.3
_RETIRING: list[tuple[Control, tuple[Any, ...]]] = []
_PLANES: weakref.WeakSet[PeerPlane] = weakref.WeakSet()

Task = Generator[bool | None, None, None]
"""A transfer: yields whether it has moved on since the last look; ``None``: not begun, as not all ranks are there."""
_DONE = object()


def sweep() -> None:
    """Free the communicators of closed planes whose every rank has said goodbye."""
    for _ in range(len(_RETIRING)):
        # Taken out first: another thread may sweep too, and what is freed must not be asked.
        try:
            entry = _RETIRING.pop(0)
        except IndexError:
            return
        control, others = entry
        if control.settled():
            control.free()
            for comm in others:
                comm.Free()
        else:
            _RETIRING.append(entry)


def _whereabouts() -> str:
    """Return which operation of which communicator this process is in; empty: none."""
    return next((f"{what} as {plane.who}" for plane in list(_PLANES) if (what := plane.in_flight)), "")


class PeerPlane(Surviving):
    """A plane of several ranks, which tell one another over MPI what they submit and what broke.

    Parameters
    ----------
    comms : tuple of three mpi4py communicators
        Duplicates that nobody else uses: control, data, and one in reserve for a reconnect. After a shrink there is a
        ``RelayedControl`` alone, and no MPI.
    mpi : module
        ``mpi4py.MPI``.
    start_deadline : float
        Seconds that a reconnect may take.
    sentinel : Sentinel, optional
        This rank's end of the watcher.
    on_verdict : callable
        Called once with this plane when the watcher says that it broke, in the thread that listens to it.
    **options
        Of ``Plane``.
    """

    def __init__(
        self,
        comms: tuple[Control, Any, Any],
        mpi: Any,
        *,
        start_deadline: float,
        sentinel: Sentinel | None = None,
        on_verdict: Callable[[Plane], None] = lambda _plane: None,
        **options: Any,
    ) -> None:
        self._control, self._data, self._reserve = comms
        self._begun: Duplicate | None = None
        self._meeting: Meeting | None = None
        self.family = self._data
        self._sentinel, self._on_verdict = sentinel, on_verdict
        self._untold = self._verdict_heard = False
        self._mpi, self.start_deadline = mpi, start_deadline
        super().__init__(self._control.rank, self._control.size, **options)
        self._transport_errors = (mpi.Exception,)
        self._ended = mpi.Is_finalized
        self._write = None if sentinel is None else sentinel.recorder.write
        _PLANES.add(self)
        sweep()

    # -- the watcher -------------------------------------------------------------------------------------------------

    @property
    def relayed(self) -> bool:
        """Whether ranks tell one another through their watchers, as others were lost, and no MPI is used."""
        return isinstance(self._control, RelayedControl)

    @property
    def _judged(self) -> bool:
        """Whether the watcher compares what ranks submit: where they do not compare it themselves."""
        return False

    def _attend(self) -> None:
        """Answer who asks where this rank is; and let the watcher say first how a rank was lost: it knows more."""
        self._control.where = _whereabouts
        self._control.patience = 0.0 if self._sentinel is None else _WORD_SECONDS

    def listen_to_watcher(self) -> None:
        """Take the watcher's verdicts from now on, one that has come at once; the communicator stands."""
        self._attend()
        if self._sentinel is None:
            return
        # The thread that listens must not keep this plane, and with it a communicator that its user has dropped.
        hear, look = weakref.WeakMethod(self._hear), weakref.WeakMethod(self._broken_here)

        def deliver(notice: Mapping[str, Any]) -> None:
            alive = hear()
            if alive is not None:
                alive(notice)

        def broken_here() -> dict[str, Any] | None:
            alive = look()
            cause = None if alive is None else alive()
            return None if cause is None else notice_of(cause)

        self._sentinel.deliver_to(deliver, broken_here, self._judged)

    def _broken_here(self) -> CommunicatorBrokenError | None:
        """Return what broke without a call, in the thread that listens: it calls no MPI, and waits for nothing."""
        return None

    def _hear(self, notice: Mapping[str, Any]) -> None:
        """Take a verdict, in the thread that listens: it calls no MPI, and waits for nothing."""
        self._verdict_heard = True
        flight = self._in_flight()
        here = {} if flight is None else {"n": flight["n"], "operation": flight["kind"], "phase": "collective"}
        # What differs is the same on every rank; else this rank says what it was in itself.
        here = {} if notice["error"] == "CollectiveMismatchError" else here
        facts = {"phase": "idle", **{name: value for name, value in notice.items() if value or name == "lost"}, **here}
        cause = error_from(self.who, notice.get("by", -1), facts)
        if self.health.closed:
            self._give_up(cause)
        elif self.health.poison(cause):
            self._untold = True
            self._stop_from_outside()
            self._on_verdict(self)

    def _pass_on(self) -> None:
        """Tell ranks that have another watcher what this one's has found, once a thread that may call MPI comes by."""
        if not self._untold:
            return
        with LANE.tried() as held:
            if held and self._untold and self.health.cause is not None and not self._ended():
                self._untold = False
                self._send_broken(self.health.cause)

    def poison(self, cause: CommunicatorBrokenError) -> None:
        """Refuse every later operation with the first cause; whoever does not know it yet is told."""
        if self._sentinel is not None:
            self._sentinel.mark_broken()
        super().poison(cause)
        if self._sentinel is not None:
            # Where a peer tells of it before a watcher does. The other one breaks this one in turn: it has its cause.
            self._sentinel.break_other({**notice_of(cause), "here": True})
        self._pass_on()

    def close(self, *arguments: Any, **options: Any) -> None:
        """End this communicator, as ``Submitting.close`` says."""
        # First: what it refuses from now on, others of this process may do before its turn on the lane.
        if self._sentinel is not None:
            self._sentinel.mark_broken()
        super().close(*arguments, **options)

    def recording(self) -> dict[str, Any] | None:
        """Return what the recorder of this rank holds, also after a failure; ``None`` where there is none."""
        LANE.check_fork(self.who, "dump_recorder")
        return None if self._sentinel is None else self._sentinel.recording()

    def _refuse(self, what: str) -> None:
        self._pass_on()
        super()._refuse(what)

    def _stop_from_outside(self) -> None:
        """Stop what is under way, while another thread may be in a call on it."""

    def _give_up(self, cause: CommunicatorBrokenError) -> None:
        """Hope no more for what is under way after the close."""

    # -- meeting -----------------------------------------------------------------------------------------------------

    def _records(self, submitted: Sequence[Signed]) -> dict[int, list[dict[str, Any]]]:
        """Return, for each peer, what this rank tells it."""
        return {
            peer: [record for operation, record in submitted if operation.peer in (None, peer)]
            for peer in self._control.peers
        }

    def _when_met(self, record: dict[str, Any], meeting: Meeting, data: Task) -> Task:
        while not meeting.met(record):
            yield None
        # Where this rank was stopped others may have given it up, and what is begun with them would never end.
        if self._sentinel is not None:
            grace = Watch(_GRACE)
            while self._sentinel.behind and not grace.tick():
                yield False
            # What has been heard by now ends this, also where it was heard since the last look.
            yield True
        while not meeting.begin(record):
            yield None
        yield from data

    def _finish(self, tasks: list[Task], meeting: Meeting, record: dict[str, Any], limit: float | None) -> None:
        """Run tasks side by side until all are done; whatever ends this early, their buffers stay with MPI."""
        waiting, self._meeting = self._waiting(record, limit), meeting
        try:
            while tasks:
                came = waiting.take()
                came = meeting.match(waiting) or came
                steps = [(task, next(task, _DONE)) for task in tasks]
                tasks = [task for task, step in steps if step is not _DONE]
                moved = any(step is True for _, step in steps)
                if moved:
                    waiting.restart()
                if tasks:
                    waiting.look(record, meeting.missing(), moved or came)
        except CollectiveMismatchError:
            self._end_met(tasks, meeting, waiting)
            raise
        finally:
            for task in tasks:
                task.close()

    def _end_met(self, tasks: list[Task], meeting: Meeting, waiting: Waiting) -> None:
        """Bring to their end the operations of a group to which all ranks came, where they differ in another one.

        Some ranks may have begun those, and MPI_Finalize would wait for them; every rank comes here.
        """
        grace, pause = Watch(_GRACE), Pause()
        with contextlib.suppress(self._mpi.Exception):
            while not grace.tick():
                waiting.take()
                meeting.match_rest()
                if {next(task, None) for task in tasks} <= {None}:
                    return
                pause()

    def _waiting(self, record: dict[str, Any], limit: float | None, **more: Any) -> Waiting:
        """Return a wait for other ranks, which ends too when this communicator is closed or poisoned meanwhile."""
        return Waiting(self._control, self.who, limit, lambda: self.health.check(self.who, record["kind"]), **more)

    def _wait(self, buffers: tuple[Any, ...], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Task:
        """Start a request on `buffers` and yield until it is done."""
        ticket = Ticket(*buffers).start(call, *args, **kwargs)
        while not ticket.done():
            yield False
        yield True

    def _wait_for_receive(self, buffer: Any, **kwargs: Any) -> Task:
        """Receive into `buffer` and yield until it is there; given up, the receive is cancelled."""
        ticket = Ticket(buffer).start(self._data.Irecv, self._raw(buffer), **kwargs)
        try:
            while not ticket.done():
                yield False
        except GeneratorExit:
            ticket.cancel()
            raise
        yield True

    # -- control plane -----------------------------------------------------------------------------------------------

    def _raw(self, array: npt.NDArray[Any]) -> list[Any]:
        return [array.view(np.uint8), self._mpi.BYTE]

    def all_gather_json(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, as ``Submitting`` says; what the watcher carries is bounded."""
        if self.relayed and len(payload) > MOST_BYTES:
            raise ValueError(
                f"{self.who}: all_gather_json: {len(payload)} bytes; after a shrink the watcher carries it, at most "
                f"{MOST_BYTES}"
            )
        return super().all_gather_json(payload)

    def _exchange(self, payload: bytes, record: dict[str, Any]) -> list[bytes]:
        if self._sentinel is not None:
            self._sentinel.recorder.exchange(record["kind"], record["n"], record["at"])
        meeting = Meeting(self._control, {peer: [record] for peer in self._control.peers})
        gathered: list[bytes] = []
        self._finish(
            [self._when_met(record, meeting, self._gather_bytes(payload, gathered))], meeting, record, self.deadline
        )
        return gathered

    def _gather_bytes(self, payload: bytes, gathered: list[bytes]) -> Task:
        if isinstance(self._control, RelayedControl):
            gathered.extend((yield from self._control.gathering(payload)))
            return
        lengths, own = np.empty(self._world_size, np.int64), np.array([len(payload)])
        yield from self._wait((own, lengths), self._data.Iallgather, self._raw(own), self._raw(lengths))
        stage = np.frombuffer(payload.ljust(int(lengths.max()), b"\0"), np.uint8)
        blocks = np.empty((self._world_size, stage.size), np.uint8)
        yield from self._wait((stage, blocks), self._data.Iallgather, self._raw(stage), self._raw(blocks))
        gathered.extend(block[:n].tobytes() for block, n in zip(blocks, lengths, strict=True))

    def divide(self, what: str, color: int | None, key: int) -> Any:
        """Return a new MPI communicator of the ranks with the same color, or ``None``; every rank has agreed on it.

        MPI has no such call that could be polled (``MPI_Comm_split``), so it is made in a thread that can be left to
        itself. Meanwhile this one calls no MPI, whose thread level may not allow it: only the watcher is heard.

        Raises
        ------
        CollectiveTimeoutError, CommunicatorBrokenError
            It did not come back, or a rank ended in it: this communicator is poisoned.
        """
        record = control_signature(what, self.sequence, call_site())
        given = self._mpi.UNDEFINED if color is None else color
        with self._poisoning(record):
            unfinished = f"{self.who}: {what}: MPI_Comm_split has not come back"
            call = Detached(lambda: self._data.Split(given, key), unfinished)
            try:
                made = call.result(Watch(self.deadline), what, lambda: self.health.check(self.who, what))
            except Overdue as error:
                raise CollectiveTimeoutError(
                    f"{self.who}: {what}: every rank came, and MPI_Comm_split has not come back within "
                    f"{error.elapsed:.1f} s (collective deadline {self.deadline:g} s); only a new job helps",
                    operation=what,
                    phase="collective",
                    elapsed=error.elapsed,
                ) from error
        return None if color is None else made

    def _announce(self, cause: CommunicatorBrokenError) -> None:
        self._announce_aside(cause)
        if self._control.broken is None:
            self._send_broken(cause)

    def _announce_aside(self, cause: CommunicatorBrokenError) -> None:
        if self._sentinel is not None and self._control.broken is None:
            self._sentinel.tell(notice_of(cause))

    def _send_broken(self, cause: CommunicatorBrokenError) -> None:
        # Best effort: a rank that MPI cannot reach any more needs no notice.
        with contextlib.suppress(self._mpi.Exception):
            notice, meeting = notice_of(cause), self._meeting
            for peer in self._control.peers:
                # Whoever comes later must not begin what would wait for this one for ever.
                given_up = {} if meeting is None else meeting.not_begun(peer)
                self._control.send([peer], "broken", {**notice, "given_up": given_up})

    def _failed(self, record: dict[str, Any], error: BaseException) -> CommunicatorBrokenError:
        """Return the error that names the rank, if MPI says of one in a moment that it lost it, or the watcher does."""
        watch, pause = Watch(_GRACE), Pause()
        while self._control.broken is None and self.health.cause is None and not watch.tick():
            self._control.pump()
            pause()
        if self._control.broken is not None:
            return error_from(self.who, *self._control.broken)
        return super()._failed(record, error)

    def _listen(self) -> None:
        self._control.pump()
        if self._control.broken is not None:
            self.poison(error_from(self.who, *self._control.broken))

    def _peer_broke(self) -> bool:
        """Return whether something is known to have broken, over MPI or by the watcher, also since closing began."""
        self._hear_last_words()
        return self._gave_up_there

    @property
    def _gave_up_there(self) -> bool:
        """Whether something is known to have broken, as far as it has been taken what peers and the watcher say."""
        return self._verdict_heard or self._control.broken is not None

    def _hear_last_words(self) -> None:
        with contextlib.suppress(self._mpi.Exception):
            self._control.pump()

    def _release(self) -> None:
        self._pass_on()
        why = f"closed its communicator after {self.last or 'no operation'}"
        came = {
            peer: {kind: self._pairs.get((peer, kind), self._pairs_from) for kind in ("send", "recv")}
            for peer in self._control.peers
        }
        self._say_last_word("left", {peer: {"why": why, "n": self.sequence, **came[peer]} for peer in came})
        if self._sentinel is not None:
            self._sentinel.close()
        try:
            self._end_data_plane()
        finally:
            # Behind it: until then this thread takes what peers say, and no other one may.
            self._retire()

    def _end_data_plane(self) -> None:
        """Give back what the data plane has, after this rank's last word, and maybe those of its peers."""

    def _left_out(self, record: dict[str, Any], peer: int | None) -> list[int]:
        """Return the peers that have left for good without having come to an operation."""
        other = {"send": "recv", "recv": "send"}.get(record["kind"], "n")
        asked = self._control.peers if peer is None else (peer,)
        return [p for p in asked if p in self._control.left and self._control.left[p][other] < record["n"]]

    def _say_last_word(self, last_word: str, bodies: dict[int, dict[str, Any]]) -> None:
        with contextlib.suppress(self._mpi.Exception):
            for peer in self._control.peers:
                self._control.send([peer], last_word, bodies.get(peer, {}))

    def _retire(self) -> None:
        """Let the control communicator go as soon as every peer has said its last word.

        What broke may have left data under way, which no later communicator may meet: its data communicator stays.
        """
        idle = (self._reserve,) if self.health.cause is not None else (self._data, self._reserve)
        _RETIRING.append((self._control, tuple(comm for comm in idle if comm is not None)))
        sweep()

    def attempt_reconnect(self) -> None:
        """Make the communicator anew with every other rank; handles of the old one are void."""
        super().attempt_reconnect()
        if self._sentinel is not None:
            self._sentinel.repeat()

    def _reconnect(self) -> None:
        self._refuse_unwatched()
        if self.relayed:
            self._reconnect_relayed()
        else:
            self._reconnect_over_mpi()
        self._verdict_heard = self._untold = False
        self._attend()

    def _reconnect_over_mpi(self) -> None:
        first = self._first_step()
        watch = Watch(self.start_deadline)
        if self._sentinel is not None:
            self._sentinel.reunion.call_elsewhere(RECONNECT)
        try:
            control = Control(self._come_together(first, watch), self._mpi)
            look = self._since_all_came()
            data = duplicate(first.comm, self._mpi, watch, look)
            own = struct.pack("<qq", self.sequence, max(self._pairs.values(), default=0))
            every = control.all_gather(own, watch, "agreeing on the sequence", look)
        except Overdue as error:
            raise CollectiveTimeoutError(
                f"{self.who}: attempt_reconnect: not every rank came within {error.elapsed:.1f} s ({error.phase}). "
                "Every rank must call it together",
                operation="attempt_reconnect",
                phase="reconnect",
                elapsed=error.elapsed,
            ) from error
        finally:
            if self._sentinel is not None:
                self._sentinel.reunion.call_elsewhere("")
        self._say_last_word("moved on", {})
        self._retire()
        numbers = [struct.unpack("<qq", x) for x in every]
        self._control, self._data, self._reserve = control, data, first.comm
        self.family = data
        self.go_on_from(max(sequence for sequence, _ in numbers), max(pair for _, pair in numbers))
        if self._sentinel is not None:
            self._sentinel.all_came()
            self._sentinel.resume(self.sequence, self._pairs_from)

    def _first_step(self) -> Duplicate:
        """Return the step that waits for every rank to come: a new one, or that which an earlier attempt began."""
        begun, reserve, self._begun, self._reserve = self._begun, self._reserve, None, None
        if begun is None and reserve is None:
            raise CommunicatorBrokenError(f"{self.who}: attempt_reconnect: an earlier one failed; only a new job helps")
        return begun or Duplicate(reserve, self._mpi)

    def _come_together(self, first: Duplicate, watch: Watch) -> Any:
        """Return the new control communicator, once every rank has come.

        Nobody goes on without one that has not: where it was stopped, and runs again, another attempt meets it there.
        """
        try:
            self._await_continued(watch)
            return first.wait(watch, self._come_by)
        except CommunicatorBrokenError:
            self._begun = first
            raise

    def _come_by(self) -> None:
        """Raise where a rank will not come: it is lost, or calls something else; which counts until all have come."""
        answer = None if self._sentinel is None else self._sentinel.reunion.answer()
        if answer is not None:
            raise self.refused(RECONNECT, answer)
        self._everybody_there()

    def _await_continued(self, watch: Watch) -> None:
        """Leave the watcher the time to see that ranks which were stopped run again."""
        grace, pause = Watch(_GRACE), Pause()
        while self._sentinel is not None and self._sentinel.stopped and not grace.tick():
            watch.tick()
            pause()

    def _refuse_unwatched(self) -> None:
        if self._sentinel is not None and self._sentinel.lost:
            raise CommunicatorBrokenError(
                f"{self.who}: attempt_reconnect: the watcher of this node is gone, and nobody would see the ranks; "
                "only a new job helps"
            )

    def _since_all_came(self) -> Callable[[], None]:
        """Return the look of the steps in which all ranks are: there is no other attempt for who gives up there.

        A rank that was taken for stopped has come, and what another node says of it may be older than that; it lasts
        where it is stopped anew.
        """
        stopped = {} if self._sentinel is None else self._sentinel.stopped
        stale, fresh = set(stopped), dict[int, Watch]()

        def look() -> None:
            now = set(stopped)
            stale.intersection_update(now)
            for rank in fresh.keys() - now:
                del fresh[rank]
            for rank in now - stale:
                fresh.setdefault(rank, Watch(_NEWS_SECONDS))
            self._everybody_there(stale.union(rank for rank, watch in fresh.items() if not watch.tick()))

        return look

    def _everybody_there(self, ignored: Collection[int] = ()) -> None:
        """Raise where a rank is gone for good or stopped: nobody can reconnect without it, nor without a watcher.

        That some are stopped may be `ignored`.
        """
        self._refuse_unwatched()
        self._control.pump()
        if not self._control.left and not self._lost(ignored):
            return
        # Whoever was lost is the cause, and others leave because of it: they may be heard of first.
        watch, pause = Watch(_GRACE), Pause()
        while not self._lost(ignored) and not watch.tick():
            self._control.pump()
            pause()
        lost = self._lost(ignored)
        gone = sorted(lost or self._control.left)
        reasons = "; ".join(lost.values()) or farewells(self._control, gone)
        raise PeerLostError(
            f"{self.who}: attempt_reconnect: {reasons}. Every rank must take part",
            lost_ranks=tuple(gone),
            operation="attempt_reconnect",
            phase="reconnect",
        )

    def _lost(self, ignored: Collection[int] = ()) -> dict[int, str]:
        """Return the ranks that died or are stopped, as the watcher saw, or failed, as they said; each with why."""
        seen: dict[int, str] = {}
        if self._sentinel is not None:
            stopped = {rank: why for rank, why in dict(self._sentinel.stopped).items() if rank not in ignored}
            seen = {**stopped, **self._sentinel.gone}
        # What a rank said itself before its end says more.
        return {**seen, **{rank: str(body["text"]) for rank, body in self._control.gone.items()}}
