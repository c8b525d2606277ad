"""Buffers that work on a stream still uses, kept alive until the stream has passed that work."""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Callable, Sequence

from butter_mpi.collectives import Owners
from butter_mpi.device import Device
from butter_mpi.errors import CUDAError
from butter_mpi.planes.submitting import Used

__all__ = ["Keeping"]


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
