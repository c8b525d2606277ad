"""The life of a NCCL communicator: how it starts, is asked, is divided, and ends."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from butter_mpi._libnccl import Library
from butter_mpi._nccl_types import UNDEFINED, UNIQUE_ID_BYTES, UniqueId
from butter_mpi.nccl.calls import Handle, call

__all__ = [
    "abort",
    "comm_count",
    "comm_cu_device",
    "comm_user_rank",
    "destroy",
    "finalize",
    "get_async_error",
    "init_rank_config",
    "make_config",
    "revoke",
    "shrink",
    "split",
]


def make_config(library: Library, **fields: Any) -> Any:
    """Return a ``ncclConfig_t`` with the layout of this library; what is not given stays unset.

    Parameters
    ----------
    library : Library
        The library.
    **fields
        Values by NCCL's names of the fields, for example ``blocking=0, netName="IB"``.

    Returns
    -------
    ctypes.Structure
        For :func:`init_rank_config`, :func:`split` and :func:`shrink`.

    Raises
    ------
    NotSupportedError
        This library's release has no such field.
    TypeError
        No release has such a field, or a value has the wrong type.
    ValueError
        A value that no release takes: -1 for "unset" (leave the field out), or ``minCTAs`` without ``maxCTAs``.
    """
    for name, value in fields.items():
        if isinstance(value, int) and value < 0 and value != UNDEFINED:
            raise ValueError(f"ncclConfig_t.{name} must not be negative; got {value}; leave it out where it is not set")
    if "minCTAs" in fields and "maxCTAs" not in fields:
        raise ValueError("ncclConfig_t.minCTAs needs maxCTAs: NCCL compares it with an unset one and refuses")
    return library.new("ncclConfig_t", **fields)


def _optional(config: Any) -> Any:
    return None if config is None else ctypes.byref(config)


def init_rank_config(library: Library, comm: Handle, world_size: int, unique_id: bytes, rank: int, config: Any) -> int:
    """Start a communicator on the calling thread's device (``ncclCommInitRankConfig``).

    It has no timeout: a rank that never comes is waited for until :func:`abort` is called with ``comm``, which NCCL
    writes at once. After a failure ``comm`` may hold a communicator, which wants :func:`abort`, and the thread may be
    in a leaked group (:func:`close_leaked_groups`).

    Parameters
    ----------
    library : Library
        The library.
    comm : Handle
        Gets the communicator.
    world_size : int
        How many ranks.
    unique_id : bytes
        The 128 bytes, equal on all ranks.
    rank : int
        This one.
    config : ctypes.Structure
        From :func:`make_config`.

    Returns
    -------
    int
        ``SUCCESS`` or ``IN_PROGRESS``.

    Raises
    ------
    ValueError
        The unique ID has another length, or ``comm`` is not NULL.
    """
    if len(unique_id) != UNIQUE_ID_BYTES:
        raise ValueError(f"unique_id must have {UNIQUE_ID_BYTES} bytes; got {len(unique_id)}")
    value, out = UniqueId.from_buffer_copy(unique_id), comm.out(config)
    arguments = (out, world_size, value, rank, ctypes.byref(config))
    return call(library, "ncclCommInitRankConfig", *arguments, in_progress=True)


def split(library: Library, comm: int, color: int, key: int, newcomm: Handle, config: Any = None) -> int:
    """Divide a communicator (``ncclCommSplit``); ask the parent for the state, not the child.

    Parameters
    ----------
    library : Library
        The library.
    comm : int
        The parent, on which nothing is in flight.
    color : int
        Ranks of one colour are together; ``NCCL_SPLIT_NOCOLOR`` takes part and gets none.
    key : int
        Orders the ranks of a colour; equal ones keep the parent's order.
    newcomm : Handle
        Gets the child.
    config : ctypes.Structure, optional
        From :func:`make_config`; the parent's where it is not given.

    Returns
    -------
    int
        ``SUCCESS`` or ``IN_PROGRESS``.
    """
    out = newcomm.out(config)
    return call(library, "ncclCommSplit", comm, color, key, out, _optional(config), in_progress=True)


def shrink(
    library: Library, comm: int, exclude: Sequence[int], newcomm: Handle, config: Any = None, flags: int = 0
) -> int:
    """Make a communicator without some ranks (``ncclCommShrink``, NCCL 2.27 or newer); only the others call it.

    Parameters
    ----------
    library : Library
        The library.
    comm : int
        The parent, which has still to be ended afterwards.
    exclude : sequence of int
        The ranks to leave out, at least one and not this one.
    newcomm : Handle
        Gets the child.
    config : ctypes.Structure, optional
        From :func:`make_config`; the parent's where it is not given.
    flags : int, default 0
        ``NCCL_SHRINK_ABORT`` stops what is in flight on the parent first.

    Returns
    -------
    int
        ``SUCCESS`` or ``IN_PROGRESS``.
    """
    # A copy, because NCCL sorts it in place.
    ranks = (ctypes.c_int * len(exclude))(*exclude)
    out = newcomm.out(config, ranks)
    arguments = (comm, ranks, len(ranks), out, _optional(config), flags)
    return call(library, "ncclCommShrink", *arguments, in_progress=True)


def finalize(library: Library, comm: int) -> int:
    """Flush a healthy communicator (``ncclCommFinalize``), which NCCL takes only once.

    Parameters
    ----------
    library : Library
        The library.
    comm : int
        The communicator.

    Returns
    -------
    int
        ``SUCCESS`` or ``IN_PROGRESS``.
    """
    return call(library, "ncclCommFinalize", comm, in_progress=True)


def destroy(library: Library, comm: int) -> None:
    """Free a healthy communicator (``ncclCommDestroy``); it blocks. One that is not healthy wants :func:`abort`.

    Parameters
    ----------
    library : Library
        The library.
    comm : int
        The communicator.
    """
    call(library, "ncclCommDestroy", comm)


def abort(library: Library, comm: int) -> None:
    """Stop and free a communicator in any state (``ncclCommAbort``); it blocks, perhaps until the peers abort too.

    Parameters
    ----------
    library : Library
        The library.
    comm : int
        The communicator; afterwards the number means nothing.
    """
    call(library, "ncclCommAbort", comm)


def revoke(library: Library, comm: int, flags: int = 0) -> int:
    """Stop what is in flight and refuse more (``ncclCommRevoke``, NCCL 2.28.7 or newer).

    Parameters
    ----------
    library : Library
        The library.
    comm : int
        The communicator, which may still be split, shrunk, destroyed and aborted.
    flags : int, default 0
        NCCL takes only ``NCCL_REVOKE_DEFAULT``.

    Returns
    -------
    int
        ``SUCCESS`` or ``IN_PROGRESS``.
    """
    return call(library, "ncclCommRevoke", comm, flags, in_progress=True)


def get_async_error(library: Library, comm: int) -> int:
    """Return the state of a communicator (``ncclCommGetAsyncError``); only one thread may ask.

    Parameters
    ----------
    library : Library
        The library.
    comm : int
        The communicator.

    Returns
    -------
    int
        A result of any kind, for :func:`check`: ``SUCCESS``, ``IN_PROGRESS``, or what broke. NCCL reports nothing about
        a lost peer of the same host.
    """
    return _asked(library, "ncclCommGetAsyncError", comm)


def comm_count(library: Library, comm: int) -> int:
    """Return the number of ranks (``ncclCommCount``).

    Parameters
    ----------
    library : Library
        The library.
    comm : int
        The communicator.

    Returns
    -------
    int
        How many.
    """
    return _asked(library, "ncclCommCount", comm)


def comm_cu_device(library: Library, comm: int) -> int:
    """Return the CUDA device (``ncclCommCuDevice``).

    Parameters
    ----------
    library : Library
        The library.
    comm : int
        The communicator.

    Returns
    -------
    int
        Its ordinal in this process.
    """
    return _asked(library, "ncclCommCuDevice", comm)


def comm_user_rank(library: Library, comm: int) -> int:
    """Return this rank (``ncclCommUserRank``).

    Parameters
    ----------
    library : Library
        The library.
    comm : int
        The communicator.

    Returns
    -------
    int
        Its number in this communicator.
    """
    return _asked(library, "ncclCommUserRank", comm)


def _asked(library: Library, name: str, comm: int) -> int:
    """Call a function that writes one integer; -1 is no answer of any of them."""
    answer = ctypes.c_int(-1)
    call(library, name, comm, ctypes.byref(answer))
    return answer.value
