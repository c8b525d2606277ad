"""How a NCCL communicator is made: bounded, left cleanly at the deadline, and fast afterwards.

NCCL's start has no timeout and only a *non-blocking* communicator can be given up while it starts; but each call on one
costs five to ten times what it costs on a *blocking* one. So the ranks meet in a non-blocking communicator, which is
polled, split a blocking one off it, and close the first. ``docs/explanation/nccl.md`` has the measurements.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from butter_mpi import nccl
from butter_mpi._libnccl import Library
from butter_mpi.control import Control, Overdue, Pause, Watch
from butter_mpi.detached import Detached
from butter_mpi.device import Device
from butter_mpi.errors import NCCLError, StartError
from butter_mpi.planes.entering import Inside
from butter_mpi.unique_id import SHARING, share_unique_id

__all__ = ["ABORT_SECONDS", "Bound", "abort", "join"]

ABORT_SECONDS = 2.0
"""How long an abort is waited for; NCCL needs half a second for a stuck kernel."""

_OPEN_GROUP = (
    "this thread is inside {levels} NCCL group level(s) that nobody ended: a call on it would be queued and never run. "
    "Another package began a group, or failed to start NCCL, before butter_mpi; start the job again, init first"
)


@dataclass(slots=True)
class Bound:
    """What ends the waits of a start: a deadline, and a look at what other ranks say, which may raise.

    ``begin`` is told each step that begins, for ranks that ask where this one is.
    """

    watch: Watch
    look: Callable[[], None]
    begin: Callable[[str], None] = lambda _step: None

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[str]:
        """Take a step of this name: ranks that ask hear it, and once it has come to its end it has had its time."""
        self.begin(name)
        yield name
        self.watch.passed(name)


def abort(library: Library, device: Device, handle: int, inside: Inside, left: Inside) -> Detached:
    """Give a communicator up in a thread of its own (``ncclCommAbort``): it may take half a second, or never return.

    An abort would free what a call uses that another thread is inside. One that was `left` to itself is waited for. A
    call that the program waits in comes back by itself only while its stream takes work: the driver holds a thread that
    puts more on a full one, and a stream that waits for a rank which is lost stays full. So where it does not come back
    soon, what is on the stream is ended first (``ncclCommRevoke``), which frees nothing. NCCL before 2.28.7 has only
    the abort for that: it frees once its streams have passed everything, and such a call is out by then.
    """

    def run() -> None:
        device.make_current()
        if not inside.soon_none() and library.has("ncclCommRevoke"):
            with contextlib.suppress(NCCLError):
                nccl.revoke(library, handle)
            inside.wait_until_none()
        left.wait_until_none()
        nccl.abort(library, handle)

    return Detached(run)


def _destroy(library: Library, device: Device, handle: nccl.Handle) -> Detached:
    """End a healthy communicator in a thread of its own (``ncclCommDestroy``): it waits for its work, and for peers."""

    def run() -> None:
        device.make_current()
        assert handle.value is not None
        nccl.destroy(library, handle.value)

    return Detached(run)


def _give_up(library: Library, device: Device, *handles: nccl.Handle) -> Detached:
    """Abort what a failed start has made, parent first: until then NCCL may write the child's handle."""

    def run() -> None:
        device.make_current()
        for handle in handles:
            if handle.value is not None:
                nccl.abort(library, handle.value)

    return Detached(run)


def join(library: Library, device: Device, control: Control, bound: Bound) -> int:
    """Return a blocking communicator of all ranks of `control`, in their order.

    Parameters
    ----------
    library : Library
        NCCL.
    device : Device
        This rank's device, whose context is current in this thread.
    control : Control
        The control plane of the same ranks.
    bound : Bound
        What ends it early.

    Returns
    -------
    int
        The handle; its collectives are connected if ``NCCL_RUNTIME_CONNECT`` is 0.

    Raises
    ------
    NCCLError
        A call failed on this rank.
    StartError
        Rank 0 could not make a unique ID; this thread was in a group before; NCCL's ranks are not MPI's.
    Overdue
        Not every rank came in time.
    """
    _refuse_open_group(library)
    with bound.step(SHARING):
        unique_id = share_unique_id(control, lambda: nccl.get_unique_id(library), bound.watch, bound.look)
    parent, child = nccl.Handle(), nccl.Handle()
    try:
        config = nccl.make_config(library, blocking=0)
        with bound.step("making the NCCL communicator") as step:
            state = nccl.init_rank_config(library, parent, control.size, unique_id, control.rank, config)
            _settle(library, parent, parent, state, bound, step)
        _split(library, parent, child, control, bound)
        handle = _checked(library, device, child, control)
    except BaseException:
        # Such a failure can leave this thread in a group.
        nccl.close_leaked_groups(library)
        _give_up(library, device, parent, child)
        raise
    try:
        with bound.step("closing the first communicator") as step:
            _destroy(library, device, parent).result(bound.watch, step, bound.look)
    except BaseException:
        _give_up(library, device, child)
        raise
    return handle


def _refuse_open_group(library: Library) -> None:
    levels = nccl.close_leaked_groups(library)
    if levels:
        raise StartError(_OPEN_GROUP.format(levels=levels), phase="NCCL group")


def _settle(library: Library, handle: nccl.Handle, made: nccl.Handle, state: int, bound: Bound, step: str) -> None:
    """Poll a non-blocking communicator until its call is done and `made` is there.

    NCCL writes the handle of a communicator that was split off from a thread of its own, and may call the parent's
    state a success before.
    """
    pause = Pause()
    while state == nccl.IN_PROGRESS or made.value is None:
        if bound.watch.tick():
            raise Overdue(step, bound.watch.elapsed)
        bound.look()
        pause()
        assert handle.value is not None
        state = nccl.check(library, step, nccl.get_async_error(library, handle.value), in_progress=True)


def _split(library: Library, parent: nccl.Handle, child: nccl.Handle, control: Control, bound: Bound) -> None:
    assert parent.value is not None
    config = nccl.make_config(library, blocking=1, splitShare=0)
    with bound.step("splitting off the blocking communicator") as step:
        state = nccl.split(library, parent.value, 0, control.rank, child, config)
        _settle(library, parent, child, state, bound, step)


def _checked(library: Library, device: Device, child: nccl.Handle, control: Control) -> int:
    """Return the handle; NCCL's own answers must be MPI's."""
    handle = child.value
    assert handle is not None
    asked = {
        "rank": (nccl.comm_user_rank(library, handle), control.rank),
        "world size": (nccl.comm_count(library, handle), control.size),
        "CUDA device": (nccl.comm_cu_device(library, handle), device.ordinal),
    }
    wrong = [f"{what} {said}, not {meant}" for what, (said, meant) in asked.items() if said != meant]
    if wrong:
        raise StartError(f"NCCL made another communicator than was asked for: {'; '.join(wrong)}", phase="NCCL init")
    return handle
