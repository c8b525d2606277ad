"""Wait for a change in a folder, or for the end of a process, without polling."""

from __future__ import annotations

import ctypes
import os
import select
from pathlib import Path
from types import TracebackType

_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE = 0x2, 0x80, 0x100


class FolderWatch:
    """Events of the files in one folder, from the moment of its making."""

    def __init__(self, folder: Path, pid: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._events = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        mask = _IN_MODIFY | _IN_MOVED_TO | _IN_CREATE
        if self._events < 0 or libc.inotify_add_watch(self._events, os.fsencode(folder), mask) < 0:
            raise OSError(ctypes.get_errno(), "inotify", str(folder))
        self._process = os.pidfd_open(pid)

    def __enter__(self) -> FolderWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._events)
        os.close(self._process)

    def wait(self, timeout: float) -> str:
        """Return what came first: ``"changed"``, ``"ended"`` (the process) or ``"timeout"``."""
        poll = select.poll()
        poll.register(self._events, select.POLLIN)
        poll.register(self._process, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll(max(0.0, timeout) * 1000)]
        if self._events in ready:
            os.read(self._events, 65536)
            return "changed"
        return "ended" if ready else "timeout"
