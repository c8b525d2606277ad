"""Descriptors of our own: none takes the place of a standard stream that was closed, where anything may write to it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator

__all__ = ["beyond_standard", "local_socket", "memory_file", "other_end"]

_STANDARD = (0, 1, 2)
_NOEXEC_SEAL = 8  # MFD_NOEXEC_SEAL, which Python does not name


@contextlib.contextmanager
def beyond_standard() -> Iterator[None]:
    """Keep what is opened in the body from the numbers 0 to 2, also what Python duplicates by itself."""
    with contextlib.ExitStack() as taken:
        while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) in _STANDARD:
            taken.callback(os.close, fd)
        os.close(fd)
        yield


def memory_file(name: str) -> int:
    """Return a new file in memory, which can be sealed and never be run.

    Raises
    ------
    OSError
        The kernel does not give one.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    with beyond_standard():
        try:
            # Where vm.memfd_noexec is 2 there is no other one.
            return os.memfd_create(name, flags | _NOEXEC_SEAL)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Linux before 6.3 does not know the flag.
            return os.memfd_create(name, flags)


def local_socket() -> socket.socket:
    """Return a new local socket that keeps the bounds of messages."""
    with beyond_standard():
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def other_end(sock: socket.socket) -> tuple[int, int]:
    """Return the process and user at the other end of a local socket: who connected, or who listens."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid
