"""A rank as the watcher knows it."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections import deque
from typing import Any

from butter_mpi.recorder import Reader
from butter_mpi.sentinel import messages
from butter_mpi.sentinel.judging import Verdict
from butter_mpi.sentinel.process import Process

__all__ = ["Rank"]

# A launcher's node daemon, and where that is a child of the launcher, this one.
_ANCESTORS = 2


class Rank:
    """What is known of one rank: its process from the start, its recorder once it has joined.

    Parameters
    ----------
    number : int
        The rank.
    pid : int
        Its process.

    Raises
    ------
    OSError
        The kernel or its rules do not let this process watch that one.
    """

    def __init__(self, number: int, pid: int) -> None:
        self.number, self.pid = number, pid
        self.process: Process | None = None
        self.ancestors: list[Process] = []
        self.sock: socket.socket | None = None
        self.reader: Reader | None = None
        self.judged = self.left = self.gone = False
        self.death: Verdict | None = None
        self.stopped: float | None = None
        self.epoch = 0
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
                for _ in range(_ANCESTORS):
                    below = self.ancestors[-1] if self.ancestors else self.process
                    self.ancestors.append(Process(below.parent()))

    @property
    def lives(self) -> bool:
        """Whether it has neither said goodbye nor ended."""
        return not (self.left or self.gone)

    @property
    def joined(self) -> bool:
        """Whether it has come."""
        return self.reader is not None

    def state(self) -> str:
        """Return the state of its process."""
        return "gone" if self.process is None else self.process.state()

    def end(self) -> str:
        """Return how its process ended."""
        return "ended" if self.process is None else self.process.end()

    def join(self, sock: socket.socket, reader: Reader) -> None:
        """Let it in."""
        self.sock, self.reader = sock, reader

    def ran(self) -> bool:
        """Return whether it has had a processor since this was last asked."""
        before, self._cpu = self._cpu, 0 if self.process is None else self.process.cpu()
        return self._cpu != before

    def tell(self, kind: str, **fields: Any) -> None:
        """Send it a message, if it has come; one for which it has no room now is sent later."""
        if self.sock is not None:
            self._unsent.append((kind, fields))
            self.send_again()

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
