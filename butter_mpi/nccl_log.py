"""NCCL's own log of this process, read while a communicator starts, without a file on disk.

NCCL reads ``NCCL_DEBUG*`` at its first line of log and keeps the file that it opened then. So the log goes into a file
in memory (a memfd) for which NCCL got a path; between captures the same descriptor of NCCL's leads to a second one that
takes no byte (sealed), so that nothing grows however long the job runs, and a later capture leads it back.

``ncclResetDebugInit`` (2.24 and newer, deprecated) would make NCCL read its settings again. It is not called: it closes
the file that another package's log goes to, opening that file again empties it, and NCCL announces its removal.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import threading
from collections.abc import Mapping
from types import TracebackType

from butter_mpi.descriptors import memory_file
from butter_mpi.environment import SYSTEM_FILE, c_environment, effective_nccl, set_c
from butter_mpi.findings import quoted
from butter_mpi.transport import Connections, read_log

__all__ = ["SUBSYSTEMS", "Capture", "expanded", "hindrance_of"]

SUBSYSTEMS = "INIT,BOOTSTRAP"
"""What is asked for: every line that names a network or a channel is INIT's; BOOTSTRAP has the interface it uses."""

_LEVEL, _FILE, _SUBSYSTEMS = "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"
_OURS = (_LEVEL, _FILE, _SUBSYSTEMS)
_USERS = (*_OURS, "NCCL_DEBUG_LEVELS")
_TELLING = ("INFO", "ABORT", "TRACE")
_EXAMPLE = "nccl.%h.%p.log"
_TOGETHER = f"unset it, or set NCCL_DEBUG=INFO and NCCL_DEBUG_FILE={_EXAMPLE}"
_NESTED = "another communicator was started in this process at the same time (start one after the other)"


def expanded(pattern: str, host: str, pid: int) -> str:
    """Return the path that NCCL makes of ``NCCL_DEBUG_FILE``.

    Parameters
    ----------
    pattern : str
        The variable's value.
    host : str
        The host's name, whole.
    pid : int
        The process.

    Returns
    -------
    str
        ``%h``: the name up to its first dot; ``%p``: the process; ``%%``: a percent sign; any other pair as it stands.
    """
    values = {"h": re.sub("[%/]", "-", host.partition(".")[0]), "p": str(pid), "%": "%"}
    return re.sub("%(.)", lambda pair: values.get(pair[1], pair[0]), pattern)


def _leaves_out_init(subsystems: str) -> bool:
    """NCCL begins with nothing, or with all after a caret, and adds or takes away what is listed."""
    names = subsystems.removeprefix("^").upper().split(",")
    return ("INIT" in names or "ALL" in names) == subsystems.startswith("^")


def hindrance_of(given: Mapping[str, str]) -> str:
    """Return why NCCL's log cannot be read under the user's own settings.

    Parameters
    ----------
    given : mapping of str to str
        The ``NCCL_DEBUG*`` variables that are set and not empty.

    Returns
    -------
    str
        The reason with its remedy; nothing where the file that they name will tell.
    """
    level, pattern, subsystems = (given.get(name) for name in _OURS)
    if level is None:
        return f"{next(iter(given))} is set without NCCL_DEBUG ({_TOGETHER})"
    if level.upper() not in _TELLING:
        return f"NCCL_DEBUG is {quoted(level)}, which leaves out the lines that name the transport ({_TOGETHER})"
    if subsystems is not None and _leaves_out_init(subsystems):
        return f"NCCL_DEBUG_SUBSYS is {quoted(subsystems)}, which leaves INIT out (add INIT, or unset it)"
    if pattern is None:
        text = f"NCCL_DEBUG is {quoted(level)} without NCCL_DEBUG_FILE, so NCCL's log goes to stdout"
        return f"{text}, where it cannot be read back (set NCCL_DEBUG_FILE={_EXAMPLE}, or unset NCCL_DEBUG)"
    if expanded(pattern, "", 1) == expanded(pattern, "", 2):
        text = f"NCCL_DEBUG_FILE is {quoted(pattern)}, which several processes could write over"
        return f"{text} (give each its own with %p, for example {_EXAMPLE})"
    return ""


class _File:
    """A file that NCCL writes its log to; it counts only while NCCL of this process has it open."""

    unopened = (
        "NCCL has not opened the file that NCCL_DEBUG_FILE names: another package started NCCL first in this process, "
        "or the file cannot be made (set both variables before the program starts, and name a folder that is there)"
    )

    def __init__(self, path: str) -> None:
        self.path = path

    def writer(self) -> int | None:
        """Return NCCL's descriptor of it."""
        with contextlib.suppress(OSError):
            found = os.stat(self.path)
            if stat.S_ISREG(found.st_mode):
                return next((fd for fd in map(int, os.listdir("/proc/self/fd")) if _writes_only(fd, found)), None)
        return None

    def size(self) -> int:
        """Return where its next line comes; what a file holds that NCCL has yet to open, and empty, is no line."""
        return os.stat(self.path).st_size if self.writer() is not None else 0

    def read(self, start: int) -> bytes:
        """Return what was written from an offset on."""
        if self.writer() is None:
            return b""
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read()


def _writes_only(fd: int, file: os.stat_result) -> bool:
    """Return whether a descriptor, which may be closed by now, is one of those that NCCL opens."""
    try:
        return os.path.samestat(os.fstat(fd), file) and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
    except OSError:
        return False


class _Memory(_File):
    """A file in memory, and the second one that takes nothing."""

    unopened = (
        "NCCL read its settings before butter_mpi could set them: another package started NCCL first in this process "
        "(start butter_mpi before it)"
    )

    def __init__(self) -> None:
        self._log = memory_file("butter_mpi-nccl-log")
        self._nothing = memory_file("butter_mpi-no-log")
        fcntl.fcntl(self._nothing, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW)
        self._lent: int | None = None
        super().__init__(f"/proc/self/fd/{self._log}")

    def lead_away(self) -> bool:
        """Let NCCL's descriptor lead nowhere, and drop what was written; ``False``: NCCL never opened it."""
        self._lent = self.writer()
        if self._lent is None:
            return False
        os.dup2(self._nothing, self._lent, inheritable=False)
        os.truncate(self._log, 0)
        return True

    def lead_back(self) -> bool:
        """Let NCCL's descriptor lead here again; ``False``: NCCL has closed it since."""
        if self._lent is None or not _is(self._lent, self._nothing):
            return False
        own = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(own, self._lent, inheritable=False)
        os.close(own)
        return True

    def close(self) -> None:
        """Give both up."""
        os.close(self._log)
        os.close(self._nothing)


def _is(fd: int, other: int) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.fstat(other))
    except OSError:
        return False


_kept: list[_Memory] = []
"""The file in memory that NCCL of this process has open, once it has: NCCL asks for no second one."""

_one_at_a_time = threading.Lock()


class Capture:
    """NCCL's log of this process, between entering and leaving a ``with`` block around a start.

    Where the user has set no ``NCCL_DEBUG*`` variable they are set for the length of the block, in the C environment.
    Where the user has set them so that a file of this process's own tells the transport, that file is read. Otherwise,
    and where NCCL was started before, :attr:`hindrance` says why nothing can be told.

    Parameters
    ----------
    system_file : str, default "/etc/nccl.conf"
        The configuration file that NCCL always reads.
    """

    def __init__(self, system_file: str = SYSTEM_FILE) -> None:
        self._system_file = system_file
        self._hindrance = ""
        self._file: _File | None = None
        self._before: dict[str, str | None] = {}
        self._alone = False
        self._start = 0
        self._said = b""

    @property
    def hindrance(self) -> str:
        """Why the log tells nothing, with a remedy; empty where it does. To be asked once NCCL has started."""
        if self._file is not None and self._file.writer() is None:
            return self._file.unopened
        return self._hindrance

    def __enter__(self) -> Capture:
        env = c_environment()
        effective = effective_nccl(env, self._system_file)
        self._alone = _one_at_a_time.acquire(blocking=False)
        if not self._alone:
            self._hindrance = _NESTED
        elif _kept and _kept[0].lead_back():
            self._file = _kept[0]
        elif given := {name: effective[name][0] for name in _USERS if name in effective and effective[name][0]}:
            self._hindrance = hindrance_of(given)
            if not self._hindrance:
                self._file = _File(expanded(given[_FILE], os.uname().nodename, os.getpid()))
        else:
            self._use_memory(env)
        self._start = self.mark()
        return self

    def _use_memory(self, env: Mapping[str, str]) -> None:
        for memory in _kept:
            memory.close()
        _kept.clear()
        try:
            memory = _Memory()
        except OSError as error:
            remedy = f"set NCCL_DEBUG=INFO and NCCL_DEBUG_FILE={_EXAMPLE}"
            self._hindrance = f"no file in memory can be made for NCCL's log: {error.strerror} ({remedy})"
            return
        self._file = memory
        _kept.append(memory)
        self._before = {name: env.get(name) for name in _OURS}
        for name, value in zip(_OURS, ("INFO", memory.path, SUBSYSTEMS), strict=True):
            set_c(name, value)

    def mark(self) -> int:
        """Return where the next line comes, for a start whose own lines alone should count.

        Returns
        -------
        int
            A position for :meth:`text` and :meth:`connections`.
        """
        return self._file.size() if self._file is not None else self._start + len(self._said)

    def text(self, mark: int = 0) -> str:
        """Return what was logged; after the block, what was logged in it.

        Parameters
        ----------
        mark : int, default 0
            Where to begin; never before the block.

        Returns
        -------
        str
            Lines.
        """
        start = max(mark, self._start)
        said = self._file.read(start) if self._file is not None else self._said[start - self._start :]
        return said.decode(errors="replace")

    def connections(self, mark: int = 0) -> Connections:
        """Return what the log says of the connections of this process, or why it says nothing.

        Parameters
        ----------
        mark : int, default 0
            As in :meth:`text`.

        Returns
        -------
        Connections
            What this rank sends to all.
        """
        if why := self.hindrance:
            return Connections(hindrance=why)
        return read_log(self.text(mark), os.getpid())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
        self._hindrance = self.hindrance
        self._said = self._file.read(self._start) if self._file is not None else b""
        if isinstance(self._file, _Memory) and not self._file.lead_away():
            self._file.close()
            _kept.clear()
        self._file = None
        if self._alone:
            _one_at_a_time.release()

    def _restore(self) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                set_c(name, value)
        self._before = {}
