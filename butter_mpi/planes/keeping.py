"""Buffers that work on a stream still uses, kept alive until the stream has passed that work."""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from butter_mpi.collectives import Owners
from butter_mpi.device import Device
from butter_mpi.errors import CUDAError
from butter_mpi.planes.submitting import Used

__all__ = ["Keeping", "Lease"]


_LEFT: list[Keeping] = []


class _Kept:
    """What one submission uses on one stream; passed when its event is, and not before it has one.

    ``marked``: its event stands behind the last submission that uses it. ``only``: its owner, where there is one alone.
    """

    __slots__ = ("event", "marked", "only", "owners", "record")

    def __init__(self, owners: Owners, event: int, record: Callable[[], int]) -> None:
        self.owners, self.event, self.record = owners, event, record
        self.only = owners[0] if len(owners) == 1 else None
        self.marked = False


class Lease:
    """What stands for a plan, which keeps its arrays itself: its calls record no events.

    Parameters
    ----------
    line : list
        Where it is handed back.
    stream : int or None
        The stream of its calls; ``None``: they record events all the same.
    holder : object
        What keeps the stream's handle valid.
    graph : Graph or None
        What is destroyed behind the plan.
    """

    __slots__ = ("graph", "holder", "line", "owners", "stream")

    def __init__(self, line: list[Lease], stream: int | None, holder: Any, graph: Any) -> None:
        self.line: list[Lease] | None = line
        self.stream, self.holder, self.graph = stream, holder, graph
        self.owners: Owners = ()

    def give_back(self, owners: Owners) -> None:
        """Hand the arrays of a dropped plan over; a finalizer does this, in any thread, and calls nothing else."""
        line, self.owners = self.line, owners
        if line is not None:
            line.append(self)


class Keeping:
    """Holds the owners of buffers, and lets go of them in the order of each stream.

    Whoever frees an array right after it was handed over would have its memory used by others while NCCL still reads or
    writes it. An event behind each operation tells when the stream has passed; it is looked at when the next operation
    comes, and when somebody asks for the health of the communicator. The host waits for nothing.

    Parameters
    ----------
    device : Device
        The device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._streams: dict[int, deque[_Kept]] = {}
        self._newest: dict[int, _Kept] = {}
        self._number = 0
        self._unmarked: list[_Kept] = []
        self._idle: list[int] = []
        self._leases: set[Lease] = set()
        self.dropped: list[Lease] = []
        """Leases that were given back, for :meth:`take_back`."""

    def lend(self, stream: int | None, holder: Any, graph: Any) -> Lease:
        """Return what stands for a plan."""
        lease = Lease(self.dropped, stream, holder, graph)
        self._leases.add(lease)
        return lease

    def take_back(self) -> None:
        """Keep the arrays of dropped plans until their streams have passed what they hold now, and destroy graphs.

        What is of a stream that is captured now waits for the next time.
        """
        waiting = []
        while self.dropped:
            lease = self.dropped.pop()
            if lease.graph is not None:
                lease.graph.destroy()
                lease.graph = None
            if lease.stream is None or not lease.owners or self._put_behind(lease.stream, lease.owners):
                self._leases.discard(lease)
                lease.owners = ()
            else:
                waiting.append(lease)
        self.dropped += waiting

    def _put_behind(self, stream: int, owners: Owners) -> bool:
        """Keep arrays until a stream that is there has passed all that it holds; returns whether that could be."""
        if self._device.is_captured(stream):
            return False
        with self._device.beside_captures():
            if self._device.ready(stream):
                return True
        event = self._idle.pop() if self._idle else self._device.make_event()
        kept = _Kept(owners, event, self._device.recorder(event, stream))
        self._device.record(event, stream)
        kept.marked = True
        line = self._streams.setdefault(stream, deque())
        if line and not line[-1].marked:
            # Of an operation that is on its way: its mark will be the newest.
            line.insert(len(line) - 1, kept)
        else:
            line.append(kept)
            self._newest[stream] = kept
        self._number += 1
        return True

    @property
    def lent(self) -> set[int]:
        """The streams of plans whose calls record no events."""
        return {lease.stream for lease in list(self._leases) if lease.stream is not None}

    def mark_plans(self) -> None:
        """Let ``empty`` tell of the calls of plans too, up to now."""
        for stream in self.lent:
            self._put_behind(stream, ())

    def keep(self, used: Sequence[Used]) -> None:
        """Keep what is about to be used, by stream, and let go of what streams have passed."""
        for stream, owners in used:
            kept = self._newest.get(stream)
            # A loop over the same buffers moves one event on.
            if kept is None or not (kept.only is owners[0] if len(owners) == 1 else _same(kept.owners, owners)):
                self._add(stream, owners)
            # Several operations of a group may use it: one event stands behind all.
            elif kept.marked:
                kept.marked = False
                self._unmarked.append(kept)
        # After it: a loop over the same buffers has nothing to ask, as its event is about to move on.
        if self._number > len(self._unmarked):
            self.release()

    def _add(self, stream: int, owners: Owners) -> None:
        event = self._idle.pop() if self._idle else self._device.make_event()
        newest = self._newest[stream] = _Kept(owners, event, self._device.recorder(event, stream))
        line = self._streams.get(stream)
        if line is None:
            line = self._streams[stream] = deque()
        line.append(newest)
        self._unmarked.append(newest)
        self._number += 1

    def mark(self) -> None:
        """Put the events behind what was submitted since the last time."""
        # Taken first: what cannot be marked is not tried again by every later operation.
        unmarked, self._unmarked = self._unmarked, []
        for kept in unmarked:
            status = kept.record()
            if status:
                self._device.check_recorded(status)
            kept.marked = True

    def forget_unmarked(self) -> None:
        """Let go of what failed on its way, once nothing of it can run any more: no event will tell of it."""
        self._unmarked = []
        for stream, line in list(self._streams.items()):
            for kept in [one for one in line if not one.marked]:
                line.remove(kept)
                self._idle.append(kept.event)
                self._number -= 1
            if line:
                self._newest[stream] = line[-1]
            else:
                del self._streams[stream], self._newest[stream]

    def newest(self, stream: int) -> int:
        """Return the event behind all that was marked on a stream; there must be something."""
        return self._newest[stream].event

    @property
    def empty(self) -> bool:
        """Whether streams have passed everything, as of the last look."""
        return not self._streams

    def release(self) -> None:
        """Let go of what streams have passed."""
        for line in self._streams.values():
            if line[0].marked:
                break
        else:
            return
        with self._device.beside_captures():
            for stream, line in list(self._streams.items()):
                while line and line[0].marked and self._device.event_ready(line[0].event):
                    self._idle.append(line.popleft().event)
                    self._number -= 1
                if not line:
                    del self._streams[stream], self._newest[stream]

    def leave(self) -> None:
        """Let go of what streams have passed, now and, of what they have not, when the next communicator leaves."""
        _LEFT.append(self)
        for one in list(_LEFT):
            # Where the context is lost nothing runs, and nothing can be asked.
            with contextlib.suppress(CUDAError):
                one.release()
            if not one._streams:
                _LEFT.remove(one)
                one.clear()

    def clear(self) -> None:
        """Let go of everything, when nothing can use it any more, and give the events back."""
        for lease in list(self._leases):
            lease.line = None
        self._leases.clear()
        self.dropped.clear()
        events = [*self._idle, *(kept.event for line in self._streams.values() for kept in line)]
        self._streams.clear()
        self._newest.clear()
        self._number = 0
        self._unmarked.clear()
        self._idle = []
        for event in events:
            self._device.destroy_event(event)


def _same(some: Owners, others: Owners) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))
