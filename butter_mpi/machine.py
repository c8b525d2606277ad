"""What this machine offers to NCCL and to shared memory, read from the kernel's files; nothing is opened or started."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

__all__ = [
    "infiniband",
    "pid_namespace",
    "ptrace_scope",
    "remove_ipc",
    "shared_memory",
]

_LOGIND_FILES = ("/etc/systemd/logind.conf", "/etc/systemd/logind.conf.d", "/run/systemd/logind.conf.d")
_SYSTEM_USERS_END = 1000
_FIRST_PID_NAMESPACE = "pid:[4026531836]"


def infiniband(folder: str = "/sys/class/infiniband") -> list[str]:
    """Return the RDMA ports of this machine.

    Parameters
    ----------
    folder : str, default "/sys/class/infiniband"
        Where the kernel lists them.

    Returns
    -------
    list of str
        Device, port, state and link layer of each.
    """
    ports = []
    for port in sorted(Path(folder).glob("*/ports/*")):
        facts = []
        for name in ("state", "link_layer"):
            with contextlib.suppress(OSError):
                facts.append((port / name).read_text().strip())
        ports.append(f"{port.parent.parent.name} port {port.name}: {', '.join(facts)}")
    return ports


def shared_memory(folder: str = "/dev/shm") -> dict[str, int]:
    """Return the size of the shared-memory file system.

    Parameters
    ----------
    folder : str, default "/dev/shm"
        Where it is mounted.

    Returns
    -------
    dict of str to int
        ``size`` and ``free`` in bytes.

    Raises
    ------
    OSError
        It is not there.
    """
    facts = os.statvfs(folder)
    return {"size": facts.f_frsize * facts.f_blocks, "free": facts.f_frsize * facts.f_bavail}


def remove_ipc(
    user: int, running: str = "/run/systemd/system", files: Sequence[str] = _LOGIND_FILES
) -> tuple[bool, str]:
    """Return whether systemd removes an ordinary user's shared memory at log-out, under a running job, and why.

    Parameters
    ----------
    user : int
        The user's number; objects of system users stay.
    running : str
        The folder that tells that systemd runs.
    files : sequence of str
        Configuration files, or folders of them; later ones win.

    Returns
    -------
    removes, why : bool, str
        The answer in words, with the file that says so.
    """
    if not Path(running).is_dir():
        return False, "systemd does not run here"
    value, source = "yes", "systemd's default"
    for place in map(Path, files):
        for file in sorted(place.glob("*.conf")) if place.is_dir() else [place]:
            with contextlib.suppress(OSError):
                for setting in re.findall(r"(?m)^\s*RemoveIPC\s*=\s*(\S+)", file.read_text(errors="replace")):
                    value, source = setting.lower(), str(file)
    if value not in ("yes", "true", "on", "1"):
        return False, f"RemoveIPC={value} ({source})"
    if user < _SYSTEM_USERS_END:
        return False, f"RemoveIPC={value} ({source}), but user {user} is a system user"
    return True, f"RemoveIPC={value} ({source})"


def ptrace_scope(file: str = "/proc/sys/kernel/yama/ptrace_scope") -> str:
    """Return what one process may do with another of the same user, as far as the watcher's verdicts depend on it.

    Parameters
    ----------
    file : str
        Where the kernel's security module tells it.

    Returns
    -------
    str
        The value, and what it means for verdicts.
    """
    try:
        value = Path(file).read_text().strip()
    except OSError:
        return "not restricted (no Yama)"
    if value == "0":
        return "0: not restricted"
    return f"{value}: verdicts reach a rank's standard error where it is a file, pipe or terminal, but no socket"


def pid_namespace(file: str = "/proc/self/ns/pid") -> str:
    """Return whether this process sees every process of the machine.

    Parameters
    ----------
    file : str
        The kernel's name of its PID namespace.

    Returns
    -------
    str
        The answer in words: a watcher sees ranks of its own PID namespace only.
    """
    name = os.readlink(file)
    if name == _FIRST_PID_NAMESPACE:
        return "the machine's own"
    return f"{name}, a container's own: ranks in another container have a watcher of their own, which sees them alone"
