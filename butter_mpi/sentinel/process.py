"""What can be seen of a process from outside: whether it lives, runs or is stopped, and how it ended."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import struct

from butter_mpi.descriptors import beyond_standard

__all__ = ["Process"]

# A large process or a core dump takes long to go, the flags come at once. PF_DUMPCORE and PF_SIGNALED say that all of
# it goes; PF_EXITING can be of one thread that ends.
_KILLED = 0x600
_DYING = _KILLED | 0x4
_ENDED = (b"Z", b"X")
_STATE, _PARENT, _FLAGS, _USER_TIME, _SYSTEM_TIME, _EXIT_CODE = 0, 1, 6, 11, 12, 49
_PIDFD_GET_INFO, _PIDFD_INFO_EXIT, _INFO_BYTES = 0xC040FF0B, 1 << 3, 64


class Process:
    """A process, by handles that stay with it: its number may be given away again.

    Parameters
    ----------
    pid : int
        Its number, in this PID namespace.

    Raises
    ------
    OSError
        It cannot be seen from here, or there is none.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        with beyond_standard():
            self.pidfd = os.pidfd_open(pid)
            self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)

    def _fields(self, last: int = -1) -> list[bytes]:
        """Return what the kernel says of it; fields after the `last` one that is asked for are in one piece."""
        try:
            return _split(os.pread(self._stat, 4096, 0), last + 1)
        except OSError:
            return []

    def state(self) -> str:
        """Return ``"gone"``, ``"dying"``, ``"stopped"`` (by a signal, not by a debugger) or ``"alive"``."""
        return self.look()[0]

    @property
    def dead(self) -> bool:
        """Whether it has ended, or is about to."""
        return self.state() in ("gone", "dying")

    def look(self) -> tuple[str, int]:
        """Return its state, and the processor time that it has had, in clock ticks."""
        fields = self._fields(_SYSTEM_TIME)
        if not fields:
            return "gone", 0
        state: bytes | None = fields[_STATE]
        if _ends(fields):
            # Where its main thread alone has ended, the others go on, and the process with them.
            state = None if int(fields[_FLAGS]) & _KILLED else self._other_thread()
        used = int(fields[_USER_TIME]) + int(fields[_SYSTEM_TIME])
        return "dying" if state is None else "stopped" if state == b"T" else "alive", used

    def _other_thread(self) -> bytes | None:
        """Return the state of a thread that lives, beside the main one; ``None``: there is none."""
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{self.pid}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{self.pid}/task/{thread}/stat", "rb") as file:
                    fields = _split(file.read())
                    # While this process is there, its number has not been given away.
                    if not _ends(fields) and self._fields():
                        return fields[_STATE]
        return None

    def parent(self) -> int:
        """Return the number of the process that started it.

        Raises
        ------
        OSError
            It is gone.
        """
        fields = self._fields()
        if not fields:
            raise OSError(errno.ESRCH, f"process {self.pid} is gone")
        return int(fields[_PARENT])

    def end(self) -> str:
        """Return how it ended, as far as that can be known."""
        code = self.code()
        if code is None:
            return "ended"
        if code & 0x7F:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(code & 0x7F).name}"
            return f"was killed by signal {code & 0x7F}"
        return f"ended with exit status {code >> 8}"

    def code(self) -> int | None:
        """Return the wait status: of the zombie or dying process, else asked of its pidfd (Linux 6.15 and newer)."""
        fields = self._fields()
        if len(fields) > _EXIT_CODE and int(fields[_FLAGS]) & _DYING:
            return int(fields[_EXIT_CODE])
        info = bytearray(_INFO_BYTES)
        struct.pack_into("=Q", info, 0, _PIDFD_INFO_EXIT)
        try:
            fcntl.ioctl(self.pidfd, _PIDFD_GET_INFO, info)
        except OSError:
            return None
        (mask,) = struct.unpack_from("=Q", info, 0)
        return int(struct.unpack_from("=i", info, 60)[0]) if mask & _PIDFD_INFO_EXIT else None

    def close(self) -> None:
        """Give the handles back."""
        os.close(self.pidfd)
        os.close(self._stat)


def _split(stat: bytes, most: int = 0) -> list[bytes]:
    """Return the fields after the name, which can have any characters; 0: all, else so many and the rest."""
    return stat.rpartition(b") ")[2].split(None, most or -1)


def _ends(fields: list[bytes]) -> bool:
    """Whether a thread has ended, or is about to."""
    return bool(int(fields[_FLAGS]) & _DYING) or fields[_STATE] in _ENDED
