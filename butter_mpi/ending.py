"""How a process leaves: communicators that nobody closed, and jobs that cannot end by MPI_Finalize.

MPI_Finalize waits for every rank while it holds the interpreter lock. Where a rank is lost, or this one ends by an
exception that others do not know of, it would wait for ever: the job is ended with MPI_Abort instead, under an alarm.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import sys
import time
import weakref
from typing import Any, NoReturn

from butter_mpi.control import retire_all, unfinished
from butter_mpi.errors import PeerLostError
from butter_mpi.planes.base import Plane

__all__ = ["ENDING", "Ending"]

_ABORT_SECONDS = 2
_LAST_WORDS_SECONDS = 0.25
_STATUS = 1
_OPEN_EVERYWHERE = re.compile(r"/dev/shm/mpich_shm_[0-9a-f]+_0")
_SEGMENTS = re.compile(r"/dev/shm/(mpich_shm_|sm_segment\.|vader_segment\.).*")


class Ending:
    """What this process knows about its own end; registered at exit with the first communicator."""

    def __init__(self) -> None:
        self._planes: weakref.WeakSet[Plane] = weakref.WeakSet()
        self._orphans: list[Plane] = []
        self._broken: list[Plane] = []
        self._alone = self._met = False
        self._status = _STATUS
        self._mpi: Any = None
        self._pid = 0

    def register(self, mpi: Any) -> None:
        """Arrange to be called at the interpreter's exit, before mpi4py's own MPI_Finalize."""
        if self._mpi is None:
            self._mpi, self._pid = mpi, os.getpid()
            atexit.register(self.leave)
        self._tidy()

    def watch(self, plane: Plane) -> None:
        """Look at `plane` when the process leaves."""
        self._planes.add(plane)

    def orphan(self, plane: Plane) -> None:
        """Take over a plane that was dropped without being closed: a finalizer must not talk to other ranks."""
        self._orphans.append(plane)

    def broken(self, plane: Plane) -> None:
        """Remember a poisoned plane, also after it was dropped."""
        self._broken.append(plane)

    def met(self, status: int) -> None:
        """Remember that every rank has come to its end: none is lost, and an abort is with `status`."""
        self._met, self._status = True, status

    def everybody_started(self) -> None:
        """Remove the name of MPICH's first shared segment: every rank has it open, and no ending can leave it then."""
        _unlink_mapped(_OPEN_EVERYWHERE)

    def alone(self) -> None:
        """Remember that this rank failed in a way that the others cannot know of."""
        self._alone = True

    def _tidy(self) -> None:
        while self._orphans:
            self._orphans.pop().close("dropped")

    def leave(self) -> None:
        """Say goodbye to the peers of every open communicator, then end the job if MPI_Finalize would hang."""
        if os.getpid() != self._pid or self._mpi.Is_finalized():
            return
        error = getattr(sys, "last_value", None)
        causes = [plane.health.cause for plane in self._broken]
        lost = not self._met and any(cause is not None and cause.lost_ranks for cause in causes)
        unsafe = self._alone or unfinished() or lost
        for plane in [*self._planes, *self._orphans]:
            if plane.health.closed:
                continue
            unsafe = unsafe or plane.health.cause is not None or (error is not None and plane.world_size() > 1)
            if plane.in_flight:
                unsafe = True
                _say(f"{plane.who}: leaving while another thread is in {plane.in_flight}; the job is ended")
            plane.close("closed at exit", None if error is None else _ended_by(plane, error))
        if unsafe:
            # MPI_Abort kills the others at once; those that have just been told shall have the time to say so.
            time.sleep(_LAST_WORDS_SECONDS)
            self.abort_job(self._status)
        retire_all()

    def abort_job(self, status: int) -> NoReturn:
        """End every rank of the job; bounded by an alarm, as MPI_Abort can itself wait in a partition."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_ABORT_SECONDS)
        # An aborted MPI leaves them behind.
        _unlink_mapped(_SEGMENTS)
        if self._mpi is not None and self._mpi.Is_initialized() and not self._mpi.Is_finalized():
            self._mpi.COMM_WORLD.Abort(status)
        os._exit(status)


def _unlink_mapped(pattern: re.Pattern[str]) -> None:
    """Unlink the shared-memory files that this process has mapped; other processes keep what they have open."""
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for path in {line.split(None, 5)[-1].rstrip("\n") for line in maps}:
            if pattern.fullmatch(path):
                with contextlib.suppress(OSError):
                    os.unlink(path)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"butter_mpi: {line}\n".encode(errors="replace"))


def _ended_by(plane: Plane, error: BaseException) -> PeerLostError:
    return PeerLostError(
        f"{plane.who}: ended by {type(error).__name__}: {error} (after {plane.last or 'no operation'})",
        lost_ranks=(plane.rank(),),
        phase="exit",
    )


ENDING = Ending()
