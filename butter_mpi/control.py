"""Bounded exchange between ranks over MPI: no call blocks, and no timed-out request keeps a user's memory.

The MPI communicator and mpi4py's module are handed in; nothing here imports them. A communicator with a timed-out
request is finished (MPI cannot cancel a collective): its requests and buffers are kept for the life of the process.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

__all__ = [
    "Control",
    "Overdue",
    "Pause",
    "Watch",
    "duplicate",
    "keep_for_ever",
    "poll",
    "retire_all",
    "unfinished",
    "wait",
]

_TAG = 1
_MESSAGE_BYTES = 4096
_LONGEST_TICK = 0.5
_CANCEL_SECONDS = 1.0
_GOODBYE_SECONDS = 0.5
_KEPT: list[tuple[Any, ...]] = []
_UNSENT: list[tuple[Any, ...]] = []
_LISTENING: set[Control] = set()


class Overdue(Exception):
    """A polled request was not done in time; it is kept, and its communicator is finished."""

    def __init__(self, phase: str, elapsed: float) -> None:
        super().__init__(f"{phase}: not done after {elapsed:.1f} s")
        self.phase, self.elapsed = phase, elapsed


def keep_for_ever(request: Any, *buffers: Any) -> None:
    """Keep a request that MPI may still write through, and its buffers."""
    _KEPT.append((request, *buffers))


def unfinished() -> bool:
    """Whether a request that was given up is not done to this day: MPI_Finalize would wait for it."""
    return not all(request.Test() for request, *_ in _KEPT)


def retire_all() -> None:
    """Stop every mailbox that still listens; before MPI_Finalize.

    Peers that leave now too get a moment to say their last word: MPI complains of messages that nobody received.
    """
    watch, pause = Watch(_GOODBYE_SECONDS), Pause()
    while not all(control.settled() for control in _LISTENING) and not watch.tick():
        pause()
    for control in list(_LISTENING):
        control.retire()


class Watch:
    """A stop-watch that counts no time in which this process did not run (stopped, suspended, starved).

    Parameters
    ----------
    limit : float or None
        Seconds; ``None`` never ends.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self.elapsed = 0.0
        self._last = time.monotonic()

    def tick(self) -> bool:
        """Count the time since the last tick (at most half a second of it); returns whether the limit is over."""
        now = time.monotonic()
        self.elapsed += min(now - self._last, _LONGEST_TICK)
        self._last = now
        return self.limit is not None and self.elapsed >= self.limit


class Pause:
    """Waiting between two looks: yields the core at first, then sleeps, up to 1 ms."""

    def __init__(self) -> None:
        self._looks = 0

    def __call__(self) -> None:
        """Wait a little, longer each time."""
        self._looks += 1
        if self._looks < 100:
            os.sched_yield()
        else:
            time.sleep(min(1e-3, 2e-5 * (self._looks - 99)))

    def reset(self) -> None:
        """Begin again with short waits."""
        self._looks = 0


def poll(request: Any, watch: Watch) -> bool:
    """Poll until `request` is done (true) or `watch` runs out (false)."""
    pause = Pause()
    while not request.Test():
        if watch.tick():
            return False
        pause()
    return True


def wait(request: Any, watch: Watch, phase: str, *buffers: Any) -> None:
    """Poll until `request` is done.

    Raises
    ------
    Overdue
        The watch ran out first; the request and `buffers` are kept.
    """
    if not poll(request, watch):
        keep_for_ever(request, *buffers)
        raise Overdue(phase, watch.elapsed)


def duplicate(comm: Any, mpi: Any, watch: Watch) -> Any:
    """Return a duplicate of `comm` (``MPI_Comm_idup``, polled); its errors are returned, not fatal."""
    twin, request = comm.Idup()
    wait(request, watch, "duplicating the communicator", twin)
    twin.Set_errhandler(mpi.ERRORS_RETURN)
    return twin


class Control:
    """The control plane of one communicator: a mailbox of short messages from each peer, in order.

    A message is a kind and a JSON object. Kinds: ``op`` (a submission's signature), ``left`` (closed, all is well),
    ``broken`` (poisoned, with the facts). Every message of one peer arrives in the order in which it was sent.

    Parameters
    ----------
    comm : mpi4py communicator
        A duplicate that nobody else uses.
    mpi : module
        ``mpi4py.MPI``.
    """

    def __init__(self, comm: Any, mpi: Any) -> None:
        self._comm, self._mpi = comm, mpi
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.peers = tuple(p for p in range(self.size) if p != self.rank)
        self.inbox: dict[int, deque[dict[str, Any]]] = {p: deque() for p in self.peers}
        self.seen: dict[int, dict[str, Any]] = {}
        self.left: dict[int, dict[str, Any]] = {}
        self.broken: tuple[int, dict[str, Any]] | None = None
        self._receives: dict[int, tuple[Any, bytearray]] = {}
        self._sends: list[tuple[Any, bytes]] = []
        # MPI writes into the posted buffers until they are cancelled: a collected Control would be a wild write.
        _LISTENING.add(self)
        for peer in self.peers:
            self._post(peer)

    def _post(self, peer: int) -> None:
        buffer = bytearray(_MESSAGE_BYTES)
        self._receives[peer] = (self._comm.Irecv([buffer, self._mpi.BYTE], source=peer, tag=_TAG), buffer)

    def send(self, peers: Iterable[int], kind: str, body: dict[str, Any]) -> None:
        """Send one message to each of `peers`; it is buffered, so nothing waits here.

        Raises
        ------
        ValueError
            The message is longer than a message may be.
        """
        text = json.dumps({"kind": kind, "body": body}, separators=(",", ":"), ensure_ascii=False)
        payload = text.encode(errors="replace")
        if len(payload) > _MESSAGE_BYTES:
            raise ValueError(f"a control message of {len(payload)} bytes is longer than {_MESSAGE_BYTES}")
        for peer in peers:
            self._sends.append((self._comm.Isend([payload, self._mpi.BYTE], dest=peer, tag=_TAG), payload))

    def pump(self) -> bool:
        """Take what has arrived; returns whether anything has."""
        moved = False
        for peer in list(self._receives):
            while peer in self._receives and self._arrived(peer):
                moved = True
        self._sends = [pair for pair in self._sends if not self._done(pair[0])]
        return moved

    def _done(self, request: Any) -> bool:
        try:
            return bool(request.Test())
        except self._mpi.Exception:
            return True

    def _arrived(self, peer: int) -> bool:
        request, buffer = self._receives[peer]
        status = self._mpi.Status()
        try:
            if not request.Test(status):
                return False
        except self._mpi.Exception as error:
            del self._receives[peer]
            self._break(peer, {"error": "PeerLostError", "text": f"MPI lost rank {peer}: {error}", "lost": [peer]})
            return True
        message = json.loads(bytes(buffer[: status.Get_count(self._mpi.BYTE)]))
        self._post(peer)
        self._deliver(peer, message["kind"], message["body"])
        return True

    def _deliver(self, peer: int, kind: str, body: dict[str, Any]) -> None:
        if kind == "op":
            self.inbox[peer].append(body)
            self.seen[peer] = body
        elif kind == "left":
            self.left[peer] = body
        else:
            self._break(peer, body)

    def _break(self, peer: int, body: dict[str, Any]) -> None:
        if self.broken is None:
            self.broken = (peer, body)

    def all_gather(self, payload: bytes, watch: Watch, phase: str) -> list[bytes]:
        """Return every rank's `payload` (all of one length) in rank order (``MPI_Iallgather``, polled).

        Raises
        ------
        Overdue
            Not every rank came before `watch` ran out.
        """
        received = bytearray(len(payload) * self.size)
        request = self._comm.Iallgather([payload, self._mpi.BYTE], [received, self._mpi.BYTE])
        wait(request, watch, phase, payload, received)
        step = len(payload)
        return [bytes(received[i * step : (i + 1) * step]) for i in range(self.size)]

    def all_gather_any(self, payload: bytes, watch: Watch, phase: str) -> list[bytes]:
        """Return every rank's `payload`, of any lengths, in rank order."""
        own = len(payload).to_bytes(8, "little")
        lengths = [int.from_bytes(x, "little") for x in self.all_gather(own, watch, phase)]
        padded = self.all_gather(payload.ljust(max(lengths), b"\0"), watch, phase)
        return [x[:n] for x, n in zip(padded, lengths, strict=True)]

    def broadcast(self, payload: bytes, root: int, watch: Watch, phase: str) -> bytes:
        """Return root's `payload`; on the others it gives the length (``MPI_Ibcast``, polled).

        Raises
        ------
        Overdue
            It did not come before `watch` ran out.
        """
        buffer = bytearray(payload)
        wait(self._comm.Ibcast([buffer, self._mpi.BYTE], root=root), watch, phase, buffer)
        return bytes(buffer)

    def settled(self) -> bool:
        """Whether every peer has said its last word, so that no message can still be under way."""
        self.pump()
        return len(self.left) == len(self.peers) and not self._sends

    def retire(self) -> None:
        """Stop listening (receives can be cancelled); unsent messages stay with MPI."""
        for request, buffer in self._receives.values():
            request.Cancel()
            if not poll(request, Watch(_CANCEL_SECONDS)):
                keep_for_ever(request, buffer)
        self._receives.clear()
        _LISTENING.discard(self)
        _UNSENT.extend(pair for pair in self._sends if not self._done(pair[0]))
        self._sends.clear()

    def free(self) -> None:
        """Free the communicator; only after :meth:`settled`, or a stale message could meet its successor."""
        self.retire()
        self._comm.Free()
