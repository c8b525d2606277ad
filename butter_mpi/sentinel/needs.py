"""What the watcher needs of a machine and of this Python, and the command that starts it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from butter_mpi.descriptors import memory_file

__all__ = ["STARTED_BY", "command", "needs", "why"]

STARTED_BY = "interpreter"
"""What only the rank needs that starts the watcher."""


def why(error: Exception) -> str:
    """Return the reason of an error of the system, with its file."""
    if not isinstance(error, OSError):
        return str(error)
    return (f"{error.filename}: " if error.filename else "") + (error.strerror or str(error))


def command() -> list[str]:
    """Return the command that starts the watcher.

    Raises
    ------
    OSError
        This Python cannot start it; the text says why.
    """
    if not sys.executable:
        raise OSError("this program has no Python interpreter of its own (sys.executable)")
    if getattr(sys, "frozen", False):
        raise OSError(f"{sys.executable} is a frozen program and no Python interpreter that could start it")
    if not os.access(sys.executable, os.X_OK):
        raise OSError(f"{sys.executable} (sys.executable) is no program that can be started")
    script = Path(__file__).with_name("__main__.py")
    if not script.is_file():
        raise OSError(f"{script} is no file: the package must lie on disk, not in a zip file")
    return [sys.executable, "-S", "-E", "-s", "-B", str(script)]


def _see_processes() -> None:
    """Read one's own state in /proc, which may be missing, or that of another PID namespace."""
    seen = os.readlink("/proc/self")
    if seen != str(os.getpid()):
        raise OSError(f"it is that of another PID namespace, and calls process {os.getpid()} {seen}")
    Path("/proc/sys/kernel/random/boot_id").read_bytes()


_NEEDS: dict[str, Callable[[], object]] = {
    "/proc": _see_processes,
    "pidfd_open": lambda: os.close(os.pidfd_open(os.getpid())),
    "memfd_create": lambda: os.close(memory_file("butter_mpi-try")),
    STARTED_BY: command,
}


def needs() -> dict[str, str]:
    """Return everything that the watcher needs, each with the reason why it is not to be had; empty: it is."""
    found = {}
    for what, attempt in _NEEDS.items():
        try:
            attempt()
            found[what] = ""
        except (OSError, AttributeError) as error:
            # A Python that was built for an older kernel lacks the very function.
            found[what] = why(error)
    return found
