"""NCCL calls that need no communicator: the version, a unique ID, groups, memory."""

from __future__ import annotations

import ctypes

from butter_mpi._libnccl import Library
from butter_mpi._nccl_types import OLDEST, UniqueId, version_text
from butter_mpi.errors import NCCLError, NotSupportedError
from butter_mpi.nccl.calls import SUCCESS, call, check, prepared

__all__ = [
    "close_leaked_groups",
    "get_unique_id",
    "get_version",
    "group_end",
    "group_start",
    "mem_alloc",
    "mem_free",
    "require",
]

_INVALID_USAGE = 5
_MOST_LEVELS = 1000


def get_version(library: Library) -> int:
    """Return the version that the library itself reports (``ncclGetVersion``).

    Parameters
    ----------
    library : Library
        The library.

    Returns
    -------
    int
        For example 23203.

    Raises
    ------
    NCCLError
        The call failed.
    """
    version = ctypes.c_int(-1)
    call(library, "ncclGetVersion", ctypes.byref(version))
    return version.value


def require(library: Library) -> int:
    """Return the library's version if it is one that butter_mpi can work with.

    Parameters
    ----------
    library : Library
        The library.

    Returns
    -------
    int
        Its version.

    Raises
    ------
    NotSupportedError
        It lacks a required function, or is older than NCCL 2.18; the message names the file.
    NCCLError
        It cannot tell its version.
    """
    needs = f"NCCL {version_text(OLDEST)}"
    remedy = f"another libnccl may stand before the right one: install {needs} or newer, or name it with NCCL_LIBRARY"
    missing = library.missing()
    if missing:
        raise NotSupportedError(f"{library.path} has no {', '.join(missing)}; {remedy}", needs=needs)
    version = get_version(library)
    if version < OLDEST:
        raise NotSupportedError(f"{library.path} is NCCL {version_text(version)} ({version}); {remedy}", needs=needs)
    return version


def get_unique_id(library: Library) -> bytes:
    """Return a fresh unique ID (``ncclGetUniqueId``); it starts a thread that lives until every rank has come.

    Parameters
    ----------
    library : Library
        The library.

    Returns
    -------
    bytes
        All 128 of them; zeros may be among them.

    Raises
    ------
    NCCLError
        The call failed, for example because no network interface matches ``NCCL_SOCKET_IFNAME``.
    """
    unique_id = UniqueId()
    call(library, "ncclGetUniqueId", ctypes.byref(unique_id))
    return bytes(unique_id)


def group_start(library: Library) -> None:
    """Open a group on this thread (``ncclGroupStart``); the calls and one :func:`group_end` follow on the same thread.

    Parameters
    ----------
    library : Library
        The library.
    """
    call(library, "ncclGroupStart")


def group_end(library: Library) -> int:
    """Close this thread's group and submit it (``ncclGroupEnd``); needed exactly once, also after a call that failed.

    Parameters
    ----------
    library : Library
        The library.

    Returns
    -------
    int
        ``SUCCESS`` or ``IN_PROGRESS``. A failure of any call in the group is raised here again, and nothing of the
        group was submitted.
    """
    return call(library, "ncclGroupEnd", in_progress=True)


def close_leaked_groups(library: Library) -> int:
    """Close groups that a failed call left open on this thread, outside of any group of one's own.

    A start that fails, or destroying a broken communicator, can leave the thread inside a group that nobody sees: from
    then on NCCL queues every call of this thread, answers success, and does nothing. This writes over NCCL's last
    error, so it comes after the failed call was checked.

    Parameters
    ----------
    library : Library
        The library.

    Returns
    -------
    int
        How many were open; 0 is what should be.

    Raises
    ------
    NCCLError
        Closing failed.
    """
    end = prepared(library, "ncclGroupEnd")
    for level in range(_MOST_LEVELS):
        result = end()
        if result == _INVALID_USAGE:
            return level
        check(library, "ncclGroupEnd", result, in_progress=True)
    text = f"ncclGroupEnd closed {_MOST_LEVELS} groups on this thread and finds no end"
    raise NCCLError(text, call="ncclGroupEnd", result=SUCCESS)


def mem_alloc(library: Library, nbytes: int) -> int:
    """Allocate on the calling thread's current device (``ncclMemAlloc``, NCCL 2.19 or newer).

    Parameters
    ----------
    library : Library
        The library.
    nbytes : int
        Bytes, rounded up by NCCL.

    Returns
    -------
    int
        The address, to be freed by :func:`mem_free` only.
    """
    pointer = ctypes.c_void_p()
    call(library, "ncclMemAlloc", ctypes.byref(pointer), nbytes)
    return int(pointer.value or 0)


def mem_free(library: Library, pointer: int) -> None:
    """Free what :func:`mem_alloc` gave (``ncclMemFree``).

    Parameters
    ----------
    library : Library
        The library.
    pointer : int
        The address.
    """
    call(library, "ncclMemFree", pointer)
