"""NCCL's unique ID: made on rank 0, carried to every rank together with rank 0's outcome."""

from __future__ import annotations

from collections.abc import Callable

from butter_mpi._nccl_types import UNIQUE_ID_BYTES
from butter_mpi.control import Control, Watch
from butter_mpi.errors import ButterError, StartError, text_of

__all__ = ["share_unique_id"]

_ERROR_BYTES = 2048


def share_unique_id(
    control: Control, make_id: Callable[[], bytes], watch: Watch, look: Callable[[], None] = lambda: None
) -> bytes:
    """Return rank 0's unique ID on every rank, or raise rank 0's failure on every rank.

    Parameters
    ----------
    control : Control
        The control plane.
    make_id : callable
        Makes the 128 bytes (``ncclGetUniqueId``); called on rank 0 only.
    watch : Watch
        The start deadline.
    look : callable
        Called while it waits; may raise what else ends the wait.

    Returns
    -------
    bytes
        128 bytes, zero bytes included.

    Raises
    ------
    StartError
        It could not be made on rank 0: the same text on every rank.
    """
    payload = bytes(1 + _ERROR_BYTES)
    if control.rank == 0:
        try:
            payload = b"\1" + make_id()
        except Exception as error:  # whatever it is, the other ranks wait for this message
            reason = error.message if isinstance(error, ButterError) else text_of(error)
            payload = b"\0" + reason.encode(errors="replace")[:_ERROR_BYTES]
    payload = control.broadcast(payload.ljust(1 + _ERROR_BYTES, b"\0"), 0, watch, "carrying the unique ID", look)
    if payload[0]:
        return payload[1 : 1 + UNIQUE_ID_BYTES]
    reason = payload[1:].rstrip(b"\0").decode(errors="replace")
    raise StartError(f"rank 0/{control.size}: start: no unique ID: {reason}", phase="unique ID", elapsed=watch.elapsed)
