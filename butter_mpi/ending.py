"""How a process leaves: communicators that nobody closed, and jobs that cannot end by MPI_Finalize.

MPI_Finalize waits for every rank while it holds the interpreter lock. Where a rank is lost, or this one ends by an
exception that others do not know of, it would wait for ever: the job is ended with MPI_Abort instead, under an alarm.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import logging
import os
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from butter_mpi.control import Control, listen_everywhere, retire_all, unfinished
from butter_mpi.detached import wait_for_all
from butter_mpi.environment import c_environment
from butter_mpi.errors import PeerLostError, text_of
from butter_mpi.lane import LANE
from butter_mpi.outcome import FAILED, OUTCOME
from butter_mpi.recovery import leaves_survivors, started_by
from butter_mpi.segments import OPEN_EVERYWHERE, SEGMENTS, unlink_mapped
from butter_mpi.sentinel import client

# What ends a job in which this package cannot be imported needs this module, and none that may be what is missing.
if TYPE_CHECKING:
    from butter_mpi.planes.base import Plane

__all__ = ["ENDING", "Ending", "flush", "say", "uncaught"]

_ABORT_SECONDS = 2
_LANE_SECONDS = 1.0
_LAST_WORDS_SECONDS = 0.25
_DETACHED_SECONDS = 2.0
_STATUS = 1


class Ending:
    """What this process knows about its own end; called at exit, or by MPI_Finalize if that comes first."""

    def __init__(self) -> None:
        # In the order in which they were started, which is the same on every rank.
        self._planes: weakref.WeakValueDictionary[int, Plane] = weakref.WeakValueDictionary()
        self._started = itertools.count()
        self._orphans: list[Plane] = []
        self._broken: list[Plane] = []
        self._lost_status = 0
        self._alone = self._met = self._shrunk = False
        self._starting = 0
        self._status = 0
        self._mpi: Any = None
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this is a fork of the process that MPI runs in."""
        return self._mpi is not None and os.getpid() != self._pid

    def register(self, mpi: Any) -> None:
        """Arrange to be called at the interpreter's exit, before mpi4py's own MPI_Finalize, and by MPI_Finalize."""
        if self._mpi is None:
            self._mpi, self._pid = mpi, os.getpid()
            atexit.register(self.leave)
            # MPI_Finalize begins with this.
            key = mpi.Comm.Create_keyval(delete_fn=lambda *_: self.leave("ended by MPI.Finalize"))
            mpi.COMM_SELF.Set_attr(key, True)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Mark a start that is under way: MPI_Finalize in another thread would wait for it.

        Before it, what was dropped is closed.
        """
        while self._orphans:
            self._orphans.pop().close("dropped")
        self._starting += 1
        try:
            yield
        finally:
            self._starting -= 1

    def watch(self, plane: Plane) -> None:
        """Look at `plane` when the process leaves."""
        self._settle()
        self._planes[next(self._started)] = plane

    def orphan(self, plane: Plane) -> None:
        """Take over a plane that was dropped without being closed: a finalizer must not talk to other ranks."""
        self._orphans.append(plane)

    def broken(self, plane: Plane) -> None:
        """Remember a poisoned plane, also after it was dropped."""
        self._broken.append(plane)

    def _settle(self) -> None:
        """Keep of broken planes that are closed only what they mean for the end: nobody can reconnect them."""
        for plane in [plane for plane in self._broken if plane.health.closed]:
            self._broken.remove(plane)
            self._lost_status = self._lost_status or _status_of(plane)

    def met(self, status: int) -> None:
        """Remember that every rank has come to its end: none is lost, and an abort is with `status`."""
        self._met, self._status = True, status

    def shrunk(self) -> None:
        """Remember that ranks went on without others, for which MPI_Finalize would wait."""
        self._shrunk = True
        OUTCOME.observe()

    def everybody_started(self) -> None:
        """Remove the names of shared segments that nobody will open any more: no ending can leave them then.

        MPICH's first one is open on every rank; a process without peers has its segments for itself, and Open MPI
        leaves them also where all goes well.
        """
        unlink_mapped(pattern=SEGMENTS if self._mpi.COMM_WORLD.size == 1 else OPEN_EVERYWHERE)

    def alone(self) -> None:
        """Remember that this rank failed in a way that the others cannot know of."""
        self._alone = True

    def leave(self, how: str = "closed at exit") -> None:
        """Say goodbye to the peers of every open communicator, then end the job if MPI_Finalize would hang."""
        if self.forked:
            self._leave_child()
        if self._mpi.Is_finalized():
            client.finalized()
            return
        unsafe = True
        try:
            # MPI would wait for those that went on without this rank.
            unsafe = self._goodbye(how) or client.left_out()
            for what in [] if unsafe else self._under_way():
                unsafe = True
                say(f"{what}; the job is ended")
        except Exception as error:
            say(f"leaving: {text_of(error)}; the job is ended")
        if unsafe:
            # MPI_Abort kills the others at once; those that have just been told shall have the time to say so.
            time.sleep(_LAST_WORDS_SECONDS)
            self.abort_job(self._status or _STATUS)
        retire_all()
        if self._shrunk:
            self._leave_without_mpi()
        client.finalizing(self._mpi.Is_finalized)

    def _under_way(self) -> Iterator[str]:
        """Yield what has not come to its end, and never will."""
        for text in client.deaths():
            yield f"leaving: MPI would wait for a rank that is lost: {text}"
        # After a loss even a question to MPI can end this process.
        if not self._shrunk and unfinished():
            yield "leaving: MPI would wait for data of an operation that broke"
        # Communicators that are being closed, and use the device, until their peers have said that they close too.
        yield from wait_for_all(_DETACHED_SECONDS, _listen)

    def _leave_without_mpi(self) -> NoReturn:
        """End this process, whose MPI_Finalize would wait for ranks that the others went on without."""
        status = FAILED if uncaught() is not None else OUTCOME.status()
        if status is None:
            say(f"ended by a SystemExit whose status cannot be known: ends with {FAILED}; use sys.exit(status)")
            status = FAILED
        client.finalized()
        logging.shutdown()
        flush()
        unlink_mapped()
        os._exit(status)

    def _leave_child(self) -> NoReturn:
        """End a forked child here: MPI_Finalize, which mpi4py calls next, would hang or disturb the parent.

        The status that the program asked for cannot be known at this point; one that it did not ask for must not be 0.
        """
        say(
            f"process {os.getpid()} is a forked child of a process that runs MPI and cannot end through MPI_Finalize; "
            f"it ends here, with status {_STATUS}. End such a child with os._exit(status), or start it with "
            "multiprocessing, which does that"
        )
        flush()
        os._exit(_STATUS)

    def _goodbye(self, how: str) -> bool:
        """Close what is open; returns whether MPI_Finalize would hang."""
        error = uncaught()
        unsafe = self._alone or self._starting > 0
        patience = _LANE_SECONDS
        for plane in [*self._planes.values(), *self._orphans]:
            if plane.health.closed:
                continue
            several = plane.world_size() > 1
            unsafe = unsafe or (several and (plane.health.cause is not None or error is not None))
            if several and plane.health.cause is not None and error is None:
                first_line = plane.health.cause.message.splitlines()[0]
                say(f"leaving with a broken communicator that nobody closed; the job is ended. It broke: {first_line}")
            if plane.in_flight:
                unsafe = True
                say(f"{plane.who}: leaving while another thread is in {plane.in_flight}; the job is ended")
            plane.close(how, None if error is None else _ended_by(plane, error), patience)
            # A lane that a dead thread holds is waited for once.
            patience = 0.0
        self._settle()
        for status in (self._lost_status, *map(_status_of, self._broken)):
            if status and not self._met:
                unsafe = True
                self._status = self._status or status
        return unsafe

    def abort_job(self, status: int, mpi: Any = None) -> NoReturn:
        """End every rank of the job; bounded by an alarm, as MPI_Abort can itself wait in a partition.

        By `mpi`, where no start has brought one.
        """
        self._mpi = self._mpi or mpi
        _arm()
        flush()
        # An aborted MPI leaves them behind.
        unlink_mapped()
        _arm()
        if client.left_out():
            _end_alone()
        died = client.deaths_seen() or Control.lost_ranks_seen
        if died and (client.survivors_left_alone() or leaves_survivors(c_environment(), started_by())):
            # Where its last ranks call MPI_Abort, this launcher can end with 0, or not at all.
            os._exit(status)
        with contextlib.suppress(Exception):
            if self._mpi is not None and self._mpi.Is_initialized() and not self._mpi.Is_finalized():
                self._mpi.COMM_WORLD.Abort(status)
        os._exit(status)

    def end_process(self, status: int) -> NoReturn:
        """End this process at once, without MPI: from any thread. Launchers end the job when a rank fails."""
        unlink_mapped()
        os._exit(status)


def _status_of(plane: Plane) -> int:
    """Return the status with which the job ends because of a plane that lost ranks; 0: it lost none."""
    cause = plane.health.cause
    if plane.health.replaced:
        return 0
    return plane.exit_status if cause is not None and cause.lost_ranks and plane.world_size() > 1 else 0


def _listen() -> None:
    """Take what peers say, unless another thread is at it."""
    with LANE.tried() as held:
        if held:
            listen_everywhere()


def flush() -> None:
    """Write what Python's own streams still hold, whatever has become of them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _arm() -> None:
    """End this process in a moment, whatever handlers it has set."""
    _let_end(signal.SIGALRM)
    signal.alarm(_ABORT_SECONDS)


def _end_alone() -> None:
    """End this process, without which others went on, and not the job.

    By a signal, as a rank that is lost: where one has ended with another status than 0, Open MPI's launcher ends the
    others once the next one leaves.
    """
    say("others went on without this rank: it ends alone, by SIGTERM")
    _let_end(signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


def _let_end(number: signal.Signals) -> None:
    """Let a signal end this process again; by C, since Python's own is for the main thread."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).signal(int(number), None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])


def uncaught() -> BaseException | None:
    """Return the exception that ends this process; an interactive one shows exceptions and goes on.

    One that others have shown there (pytest does so with a test that fails) has been caught inside the program: it has
    not left the outermost frame.
    """
    error = getattr(sys, "last_value", None)
    if error is None or hasattr(sys, "ps1") or sys.flags.interactive:
        return None
    if error.__traceback__ is not None and error.__traceback__.tb_frame.f_back is not None:
        return None
    files = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)}
    return None if files & {"<input>", "<console>"} else error


def say(line: str) -> None:
    """Write a line to stderr, wherever Python's own stream is."""
    with contextlib.suppress(OSError):
        os.write(2, f"butter_mpi: {line}\n".encode(errors="replace"))


def _ended_by(plane: Plane, error: BaseException) -> PeerLostError:
    return PeerLostError(
        f"{plane.who}: ended by {text_of(error)} (after {plane.last or 'no operation'})",
        lost_ranks=(plane.rank(),),
        phase="exit",
    )


ENDING = Ending()
