"""A debugger as a rank meets it: stops every thread of a process by ptrace, and leaves it stopped by a signal.

Run by path: ``debugging.py PID SECONDS``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_WALL = 0x40000000
_LEFT_STOPPED = 5.0
"""Seconds of the whole in which the state is that of SIGSTOP: longer than a rank may be stopped without the switch."""

_libc = ctypes.CDLL(None, use_errno=True)


def ptrace(request: int, thread: int) -> None:
    """Call ptrace."""
    if _libc.ptrace(request, thread, None, None):
        raise OSError(ctypes.get_errno(), f"ptrace {request:#x} of thread {thread}")


def main() -> None:
    """Stop the process for so long, and let it go on."""
    pid, seconds = int(sys.argv[1]), float(sys.argv[2])
    threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    for thread in threads:
        ptrace(_SEIZE, thread)
        ptrace(_INTERRUPT, thread)
        os.waitpid(thread, _WALL)
    time.sleep(seconds - _LEFT_STOPPED)
    os.kill(pid, signal.SIGSTOP)
    for thread in threads:
        ptrace(_DETACH, thread)
    time.sleep(_LEFT_STOPPED)
    os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    main()
