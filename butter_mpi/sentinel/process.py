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

# PF_EXITING, PF_DUMPCORE, PF_SIGNALED: a large process or a core dump takes long to go, the flags come at once.
_DYING = 0x604
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

    def _fields(self) -> list[bytes]:
        try:
            return os.pread(self._stat, 4096, 0).rpartition(b") ")[2].split()
        except OSError:
            return []

    def state(self) -> str:
        """Return ``"gone"``, ``"dying"``, ``"stopped"`` (by a signal, not by a debugger) or ``"alive"``."""
        fields = self._fields()
        if not fields:
            return "gone"
        if int(fields[_FLAGS]) & _DYING or fields[_STATE] in (b"Z", b"X"):
            return "dying"
        return "stopped" if fields[_STATE] == b"T" else "alive"

    def cpu(self) -> int:
        """Return the processor time that it has had, in clock ticks."""
        fields = self._fields()
        return int(fields[_USER_TIME]) + int(fields[_SYSTEM_TIME]) if fields else 0

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
        code = self._code()
        if code is None:
            return "ended"
        if code & 0x7F:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(code & 0x7F).name}"
            return f"was killed by signal {code & 0x7F}"
        return f"ended with exit status {code >> 8} without closing its communicator"

    def _code(self) -> int | None:
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
