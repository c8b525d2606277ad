"""NCCL calls, checked: Python values in and out, and one error class for every result that is not success."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from butter_mpi._libnccl import OLDEST, Library, UniqueId
from butter_mpi.errors import NCCLError, NotSupportedError

__all__ = ["RESULTS", "check", "get_unique_id", "get_version", "last_error", "require", "version_text"]

RESULTS: Mapping[int, str] = {
    0: "ncclSuccess",
    1: "ncclUnhandledCudaError",
    2: "ncclSystemError",
    3: "ncclInternalError",
    4: "ncclInvalidArgument",
    5: "ncclInvalidUsage",
    6: "ncclRemoteError",
    7: "ncclInProgress",
    8: "ncclTimeout",
}
"""``ncclResult_t`` of NCCL 2.18 to 2.32; another number is an error without a name."""


def version_text(version: int) -> str:
    """Return the dotted form of ``ncclGetVersion``'s integer.

    Parameters
    ----------
    version : int
        For example 23203.

    Returns
    -------
    str
        For example ``"2.32.3"``.
    """
    major, rest = divmod(version, 10000 if version >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def last_error(library: Library) -> str:
    """Return NCCL's latest warning of this process, of whatever call and communicator.

    Parameters
    ----------
    library : Library
        The library.

    Returns
    -------
    str
        One line, or nothing.
    """
    text = library.function("ncclGetLastError")(None)
    return " ".join((text or b"").decode(errors="replace").split())


def check(library: Library, call: str, result: int) -> None:
    """Raise unless a call's result is success.

    Parameters
    ----------
    library : Library
        The library, which is asked for its texts.
    call : str
        The C function.
    result : int
        What it returned.

    Raises
    ------
    NCCLError
        Any other result, also one that this version has no name for.
    """
    if result == 0:
        return
    if result in RESULTS:
        what = (library.function("ncclGetErrorString")(result) or b"").decode(errors="replace")
        name = f"{RESULTS[result]} ({result}): {what}"
    else:
        name = f"result {result}, which NCCL 2.18 to 2.32 does not define"
    detail = last_error(library)
    text = f"{call} failed with {name}" + (f"; NCCL says: {detail}" if detail else "")
    raise NCCLError(text, call=call, result=result, detail=detail)


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
    check(library, "ncclGetVersion", library.function("ncclGetVersion")(ctypes.byref(version)))
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
    check(library, "ncclGetUniqueId", library.function("ncclGetUniqueId")(ctypes.byref(unique_id)))
    return bytes(unique_id)
