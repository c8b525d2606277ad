"""Writing to the standard error of another process, which nobody holds open for that: not even for a moment too long.

Whoever held a launcher's pipe and was stopped would keep the launcher from its end.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterator, Sequence

from butter_mpi.sentinel.process import Process

__all__ = ["cry", "readable"]

_SYS_PIDFD_GETFD = 438  # on every architecture
_STDERR = 2


def readable(ranks: Sequence[Process], ancestors: Sequence[Process]) -> list[Process]:
    """Order processes by whether what is written to their standard error will be read.

    A pipe takes what a launcher that ends will not read any more, so whoever ends comes after whoever lives; but a
    rank's pipe is read as long as its parent lives.

    Parameters
    ----------
    ranks : sequence of Process
        Of one node, best first.
    ancestors : sequence of Process
        What started them, nearest first.
    """
    ending, outliving = [one for one in ranks if one.dead], [one for one in ancestors if not one.dead]
    living = [one for one in ranks if one not in ending]
    launched = ending if outliving and outliving[0] is ancestors[0] else []
    first = [*living, *launched, *outliving]
    return [*first, *(one for one in (*ending, *ancestors) if one not in first)]


def cry(process: Process, text: str) -> bool:
    """Write `text` to the standard error of `process`; returns whether that could be done, at once."""
    data = text.encode(errors="replace")
    for opened in (_same, _again):
        with contextlib.suppress(OSError), opened(process) as fd:
            _write(fd, data)
            return True
    return False


def _write(fd: int, data: bytes) -> None:
    """Write what there is room for, and never wait: a pipe that says it is writable takes PIPE_BUF bytes at once.

    Raises
    ------
    BlockingIOError
        There is no room at all.
    """
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    begun = False
    while data:
        if not poll.poll(0):
            if begun:
                return
            raise BlockingIOError
        data = data[os.write(fd, data[: select.PIPE_BUF]) :]
        begun = True


@contextlib.contextmanager
def _same(process: Process) -> Iterator[int]:
    """Yield the very description that the process has: in a file, both go on writing behind one another."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(_SYS_PIDFD_GETFD, process.pidfd, _STDERR, 0)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _again(process: Process) -> Iterator[int]:
    """Yield what the process has open, opened anew: where the kernel or its security module refuses the other way."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    fd = os.open(f"/proc/{process.pid}/fd/{_STDERR}", flags)
    try:
        yield fd
    finally:
        os.close(fd)
