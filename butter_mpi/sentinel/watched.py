"""A rank as the watcher knows it."""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
from collections import deque
from typing import Any

from butter_mpi.recorder import Reader
from butter_mpi.sentinel import messages
from butter_mpi.sentinel.judging import Verdict
from butter_mpi.sentinel.process import Process

__all__ = ["Rank"]

# A launcher's node daemon; where that is a child of the launcher, this one, and the shell or script that started it and
# outlives it; and what may stand between them, such as timeout(1) and a script that a rank is started by.
_ANCESTORS = 5
_INIT = 1
_SIGNAL = 0x7F
_OF_LAUNCHERS = (signal.SIGKILL, signal.SIGTERM)


class Rank:
    """What is known of one rank: its process from the start, its recorder once it has joined.

    Parameters
    ----------
    number : int
        The rank.
    pid : int
        Its process.
    known : dict of int to Process
        Ancestors of other ranks, by their numbers: each is opened once, as descriptors may be few. It is added to.

    Raises
    ------
    OSError
        The kernel or its rules do not let this process watch that one.
    """

    def __init__(self, number: int, pid: int, known: dict[int, Process]) -> None:
        # Its number changes where ranks go on without others.
        self.number = self.first_number = number
        self.pid = pid
        self.process: Process | None = None
        self.ancestors: list[Process] = []
        self.sock: socket.socket | None = None
        self.reader: Reader | None = None
        # Of the older communicators of its process, by their keys: their names, and what it submits there.
        self.older: dict[str, tuple[str, Reader]] = {}
        # ``judged``: what it submits is compared. ``closed``: it submits no more. ``leaving``: it is in MPI_Finalize.
        # ``left``: it has said goodbye. ``gone``: its process has ended. ``freed``: the watcher has ended it.
        self.judged = self.closed = self.leaving = self.left = self.gone = self.freed = False
        self.death: Verdict | None = None
        # Seconds that another one has waited for it in MPI_Finalize since it was gone.
        self.missed = 0.0
        # Seconds that it is stopped by now; and what the others were told of that, until it runs again.
        self.stopped: float | None = None
        self.stop: Verdict | None = None
        self.epoch = 0
        self.ran = False
        self._cpu = 0
        self._unsent: deque[tuple[str, dict[str, Any]]] = deque()
        try:
            self.process = Process(pid)
        except OSError as error:
            # One that has ended already will be found so.
            if error.errno not in (errno.ESRCH, errno.ENOENT):
                raise
        else:
            with contextlib.suppress(OSError):
                above = self.process.parent()
                while len(self.ancestors) < _ANCESTORS and above > _INIT:
                    known[above] = one = known.get(above) or Process(above)
                    self.ancestors.append(one)
                    above = one.parent()

    @property
    def lives(self) -> bool:
        """Whether it has neither said goodbye nor ended."""
        return not (self.left or self.gone)

    @property
    def joined(self) -> bool:
        """Whether it has come."""
        return self.reader is not None

    @property
    def dead(self) -> bool:
        """Whether its process has ended, or is about to."""
        return self.process is None or self.process.dead

    def look(self) -> str:
        """Return the state of its process, and note whether that has had a processor since the last look."""
        state, cpu = ("gone", 0) if self.process is None else self.process.look()
        self.ran, self._cpu = cpu != self._cpu, cpu
        return state

    @property
    def code(self) -> int | None:
        """How its process ended, as ``wait`` says it, if that can be known."""
        return None if self.process is None else self.process.code()

    @property
    def missing(self) -> bool:
        """Whether its end, which has come, leaves others waiting: it had not closed, or did not come to MPI_Finalize.

        What the status of a process means that came there cannot be known, but a signal was not its own will.
        """
        code = self.code
        if self.leaving:
            return bool(code and code & _SIGNAL)
        # Where the status cannot be known either, others that wait in MPI_Finalize will show it.
        return not self.closed or code not in (0, None)

    @property
    def killed(self) -> bool:
        """Whether it ended by a signal that launchers send."""
        return self.code is not None and self.code & _SIGNAL in _OF_LAUNCHERS

    def end(self) -> str:
        """Return how its process ended."""
        how, code = ("ended", None) if self.process is None else (self.process.end(), self.code)
        if self.leaving:
            return f"{how} in MPI_Finalize or after it"
        if self.closed:
            return f"{how} after closing its communicator, without MPI_Finalize"
        return how if code is None or code & _SIGNAL else f"{how} without closing its communicator"

    def finish(self) -> None:
        """End its process: at first by a signal that says that nobody else did, then by one that nothing withstands."""
        if self.process is not None:
            number = signal.SIGKILL if self.freed else signal.SIGALRM
            self.freed = True
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self.process.pidfd, number)

    def join(self, sock: socket.socket, reader: Reader, older: dict[str, tuple[str, Reader]]) -> None:
        """Let it in."""
        self.sock, self.reader, self.older = sock, reader, older

    def tell(self, kind: str, **fields: Any) -> None:
        """Send it a message, if it has come; one for which it has no room now is sent later."""
        if self.sock is not None:
            self._unsent.append((kind, fields))
            self.send_again()

    @property
    def unsent(self) -> int:
        """How many messages wait until it has read others."""
        return len(self._unsent)

    def send_again(self) -> None:
        """Send what it had no room for."""
        while self.sock is not None and self._unsent:
            kind, fields = self._unsent[0]
            if not messages.send(self.sock, kind, **fields):
                return
            self._unsent.popleft()

    def mention(self, kind: str, **fields: Any) -> None:
        """Send it what may be lost."""
        if self.sock is not None and not self._unsent:
            messages.send(self.sock, kind, **fields)

    def newest(self, most: int) -> list[str]:
        """Return its newest submissions."""
        return [] if self.reader is None else [entry.text() for entry in self.reader.newest(most)]

    def last(self) -> str:
        """Return its last submission, for a message."""
        if not self.joined:
            return "it was in the start"
        newest = self.newest(1)
        return f"last submitted {newest[-1]}" if newest else "it had submitted nothing"
