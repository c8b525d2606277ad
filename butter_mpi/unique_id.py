"""NCCL's unique ID: made on rank 0, carried to every rank together with rank 0's outcome."""

from __future__ import annotations

from collections.abc import Callable

from butter_mpi.control import Control, Overdue, Pause, Watch
from butter_mpi.errors import ButterError, StartError, text_of

__all__ = ["NO_ID", "SHARING", "share_unique_id"]

NO_ID = "unique ID"
"""The phase of the error where rank 0 could not make one."""

SHARING = "sharing the unique ID"
"""The step of the start."""

_LONGEST_REASON = 2048


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
    if control.rank == 0:
        try:
            said = {"id": make_id().hex()}
        except Exception as error:  # whatever it is, the other ranks wait for this message
            reason = error.message if isinstance(error, ButterError) else text_of(error)
            said = {"error": reason[:_LONGEST_REASON]}
        control.send(control.peers, "tell", said)
    else:
        said = _heard(control, watch, look)
    if "id" in said:
        return bytes.fromhex(said["id"])
    text = f"rank 0/{control.size}: start: no unique ID: {said['error']}"
    raise StartError(text, phase=NO_ID, elapsed=watch.elapsed)


def _heard(control: Control, watch: Watch, look: Callable[[], None]) -> dict[str, str]:
    """Wait for rank 0's message: not a broadcast, of which one that nobody took could reach a later communicator."""
    pause = Pause()
    while not control.told[0]:
        if watch.tick():
            raise Overdue(SHARING, watch.elapsed)
        control.pump()
        if not control.told[0]:
            look()
            pause()
    return control.told[0].popleft()
