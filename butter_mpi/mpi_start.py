"""Starting mpi4py's MPI: seen to fit the launcher before MPI_Init, which would say less, and within a bound."""

from __future__ import annotations

import contextlib
import faulthandler
import socket
import sys
from typing import Any

from butter_mpi.environment import c_environment
from butter_mpi.errors import StartError
from butter_mpi.launch import cannot_join, false_green, read_launch
from butter_mpi.mapped import mapped_files

__all__ = ["load_mpi"]

_ON = (True, "yes")  # as mpi4py.rc takes it


def load_mpi(seconds: float) -> Any:
    """Return ``mpi4py.MPI``, started; ends this process if ``MPI_Init`` does not return within `seconds`.

    Where mpi4py was told not to start MPI (``mpi4py.rc.initialize``), it is not started here either.

    Parameters
    ----------
    seconds : float
        The start deadline.

    Returns
    -------
    module
        ``mpi4py.MPI``.

    Raises
    ------
    ImportError, RuntimeError
        There is no MPI for this Python.
    StartError
        ``MPI_Init`` of this library would end this process, since it does not understand the launcher.
    """
    loaded = sys.modules.get("mpi4py.MPI")
    if loaded is not None and loaded.Is_initialized():
        return loaded
    return _start_mpi_or_end_this_process_at_the_start_deadline(seconds)


def _start_mpi_or_end_this_process_at_the_start_deadline(seconds: float) -> Any:
    # MPI_Init holds the interpreter lock while it waits for the other ranks, so no Python thread could end it.
    with contextlib.suppress(RuntimeError, OSError, ValueError, AttributeError):
        faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        return _start_mpi()
    finally:
        faulthandler.cancel_dump_traceback_later()


def _start_mpi() -> Any:
    """Load the library, see that it fits the launcher, and only then do what importing mpi4py's MPI does."""
    import mpi4py

    rc = mpi4py.rc
    initialize, finalize = rc.initialize, rc.finalize
    rc(initialize=False, finalize=initialize if finalize is None else finalize)
    try:
        from mpi4py import MPI
    finally:
        rc(initialize=initialize, finalize=finalize)
    _refuse_mpi_that_cannot_join(MPI)
    if initialize in _ON:
        level = rc.thread_level if rc.threads in _ON else "single"
        MPI.Init_thread(getattr(MPI, f"THREAD_{level.upper()}"))
    return MPI


def _refuse_mpi_that_cannot_join(mpi: Any) -> None:
    """Speak while it is possible: an MPI that aborts in MPI_Init names neither the launcher nor a remedy."""
    info, library = read_launch(c_environment()), mpi.Get_library_version()
    # One rank alone may start as a job of its own, which is what was asked for.
    if (info.claimed_size or 1) > 1 and cannot_join(info, library, mapped_files()):
        cause, remedy = false_green(info, library)
        raise StartError(
            f"rank {info.claimed_rank}/{info.claimed_size} on {socket.gethostname()}: start: {cause}: MPI_Init would "
            f"abort, or give each rank a job of its own; {remedy}",
            phase="MPI",
        )
