"""Bounded exchange between ranks over MPI: no call blocks, and no request writes into memory that is gone.

The MPI communicator and mpi4py's module are handed in; nothing here imports them. A communicator with a timed-out
request is finished (MPI cannot cancel a collective): its requests and buffers are kept for the life of the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

__all__ = [
    "Control",
    "Duplicate",
    "Overdue",
    "Pause",
    "Ticket",
    "Watch",
    "closed_elsewhere",
    "duplicate",
    "fitting",
    "keep_for_ever",
    "listen_everywhere",
    "poll",
    "retire_all",
    "unfinished",
    "wait",
]

_TAG = 1
_LAST_WORDS = ("left", "moved on")
_MESSAGE_BYTES = 4096
_LENGTH_BYTES = 4
_MOST_LOST = 100
_LONGEST_TICK = 0.5
_CANCEL_SECONDS = 1.0
_GOODBYE_SECONDS = 0.5
_OPEN: set[Ticket] = set()
_LISTENING: set[Control] = set()


class Overdue(Exception):
    """A polled request was not done in time; it is kept, and its communicator is finished."""

    def __init__(self, phase: str, elapsed: float) -> None:
        super().__init__(f"{phase}: not done after {elapsed:.1f} s")
        self.phase, self.elapsed = phase, elapsed
        self.where = ""
        """Where the other ranks are, where they could be asked."""
        self.missing = ""
        """Which ranks have not come at all, where that is known."""


class Ticket:
    """A request and its buffers, which are held from before it is started until it is seen to be done.

    Whatever ends the wait early, an interrupt between the start and the next line included, MPI may still write: an
    open ticket is never collected.

    Parameters
    ----------
    *buffers
        What MPI reads or writes.
    counts : bool, default True
        Whether MPI_Finalize would wait for it (a collective, data), or it can be cancelled (a mailbox).
    """

    __slots__ = ("buffers", "counts", "request")

    def __init__(self, *buffers: Any, counts: bool = True) -> None:
        self.buffers, self.counts = buffers, counts
        self.request: Any = None
        _OPEN.add(self)

    def start(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Ticket:
        """Start the request by a call that returns it."""
        try:
            self.request = call(*args, **kwargs)
        except Exception:
            _OPEN.discard(self)
            raise
        return self

    def done(self) -> bool:
        """Whether it is done; asking again is harmless."""
        if self.request is None or not self.request.Test():
            return False
        _OPEN.discard(self)
        return True

    def over(self) -> bool:
        """Whether it is done or failed."""
        try:
            return self.done()
        except Exception:
            _OPEN.discard(self)
            return True

    def cancel(self) -> None:
        """Cancel a receive, and wait a moment for that."""
        with contextlib.suppress(Exception):
            if self.request:
                self.request.Cancel()
                poll(self, Watch(_CANCEL_SECONDS))


def keep_for_ever(request: Any, *buffers: Any) -> None:
    """Keep a request that was started elsewhere, and its buffers, until it is done."""
    Ticket(*buffers).request = request


def unfinished() -> bool:
    """Whether a request that was given up is not done to this day: MPI_Finalize would wait for it."""
    return any(ticket.counts and not ticket.over() for ticket in list(_OPEN))


def retire_all() -> None:
    """Stop every mailbox that still listens; before MPI_Finalize.

    Peers that leave now too get a moment to say their last word: MPI complains of messages that nobody received.
    """
    watch, pause = Watch(_GOODBYE_SECONDS), Pause()
    while not all(control.settled() for control in _LISTENING) and not watch.tick():
        pause()
    for control in list(_LISTENING):
        control.retire()


def listen_everywhere() -> None:
    """Take what has arrived on every communicator that stands: who waits on one is asked on another where it is.

    Only by the thread that holds the lane. A start that another thread is in takes its own.
    """
    for control in [one for one in list(_LISTENING) if one.where is not None]:
        control.pump()


def closed_elsewhere(control: Control) -> bool:
    """Whether a peer that is waited for here has closed another communicator first, which this rank has not closed yet.

    By what has been taken: each may wait for the other one's close then, and neither comes to it.
    """
    missing = set(control.peers) - control.left.keys()
    standing = [one for one in list(_LISTENING) if one.where is not None and one.open]
    return any(one.left and not missing.isdisjoint(control.numbers_here(one, sorted(one.left))) for one in standing)


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
        self.phases: dict[str, float] = {}
        self._last = time.monotonic()
        self._passed = 0.0

    def tick(self) -> bool:
        """Count the time since the last tick (at most half a second of it); returns whether the limit is over."""
        now = time.monotonic()
        self.elapsed += min(now - self._last, _LONGEST_TICK)
        self._last = now
        return self.limit is not None and self.elapsed >= self.limit

    def passed(self, phase: str) -> None:
        """Note that a wait has come to its end: the time since the last one was for it."""
        self.tick()
        self.phases[phase] = self.phases.get(phase, 0.0) + self.elapsed - self._passed
        self._passed = self.elapsed


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


def poll(ticket: Ticket, watch: Watch, look: Callable[[], None] = lambda: None) -> bool:
    """Poll until `ticket` is done (true) or `watch` runs out (false); `look` may raise what else ends the wait."""
    pause = Pause()
    while not ticket.done():
        if watch.tick():
            return False
        look()
        pause()
    return True


def wait(ticket: Ticket, watch: Watch, phase: str, look: Callable[[], None] = lambda: None) -> None:
    """Poll until `ticket` is done.

    Raises
    ------
    Overdue
        The watch ran out first.
    """
    if not poll(ticket, watch, look):
        raise Overdue(phase, watch.elapsed)
    watch.passed(phase)


class Duplicate:
    """A duplicate of a communicator that is being made (``MPI_Comm_idup``, polled).

    Parameters
    ----------
    comm : mpi4py communicator
        Of which.
    mpi : module
        ``mpi4py.MPI``.
    """

    def __init__(self, comm: Any, mpi: Any) -> None:
        self.comm, self._mpi = comm, mpi
        self._twins: list[Any] = []
        self._ticket = Ticket(self._twins).start(self._begin)

    def _begin(self) -> Any:
        twin, request = self.comm.Idup()
        self._twins.append(twin)
        return request

    def wait(self, watch: Watch, look: Callable[[], None] = lambda: None) -> Any:
        """Return it, whose errors are returned, not fatal; a wait that was given up may be taken up again."""
        wait(self._ticket, watch, "duplicating the communicator", look)
        self._twins[0].Set_errhandler(self._mpi.ERRORS_RETURN)
        return self._twins[0]


def duplicate(comm: Any, mpi: Any, watch: Watch, look: Callable[[], None] = lambda: None) -> Any:
    """Return a duplicate of `comm`; its errors are returned, not fatal."""
    return Duplicate(comm, mpi).wait(watch, look)


def _packed(kind: str, body: dict[str, Any]) -> bytes:
    """Return a message: its length, then JSON."""
    text = json.dumps({"kind": kind, "body": body}, separators=(",", ":"), ensure_ascii=False)
    payload = text.encode(errors="replace")
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload


def fitting(kind: str, body: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return what is short enough, and packed: a long text is cut, a long list of ranks too, never the message lost."""
    body = {**body, "lost": body["lost"][:_MOST_LOST]} if "lost" in body else body
    while len(payload := _packed(kind, body)) > _MESSAGE_BYTES:
        if body.get("records"):
            body = {**body, "records": {}}
        else:
            longest = max(body, key=lambda name: len(str(body[name])))
            body = {**body, longest: str(body[longest])[: len(str(body[longest])) // 2]}
    return body, payload


class Control:
    """The control plane of one communicator: a mailbox of short messages from each peer, in order.

    A message is a kind and a JSON object. Kinds: ``op`` (a submission's signature), ``left`` (closed, all is well),
    ``moved on`` (reconnected elsewhere), ``tell`` (a value of a step of the start), ``broken`` (poisoned, with the
    facts), ``ping`` and ``pong``, ``where`` (which operation of any communicator are you in?) and ``here``. Messages of
    one peer arrive in the order in which they were sent; after ``left`` or ``moved on`` no ``op`` follows.

    Parameters
    ----------
    comm : mpi4py communicator
        A duplicate that nobody else uses.
    mpi : module
        ``mpi4py.MPI``.
    """

    lost_ranks_seen = False
    """Whether MPI has ever told this process that it lost a rank."""

    def __init__(self, comm: Any, mpi: Any) -> None:
        self.comm, self._mpi = comm, mpi
        self._receives: dict[int, Ticket] = {}
        self._sends: list[Ticket] = []
        self._half_done = False
        self._begin(comm.rank, comm.size)
        for peer in self.peers:
            self._post(peer)

    def _begin(self, rank: int, size: int) -> None:
        """Begin to listen, with nothing heard."""
        self.rank, self.size = rank, size
        self.peers = tuple(p for p in range(self.size) if p != self.rank)
        self.inbox: dict[int, deque[dict[str, Any]]] = {p: deque() for p in self.peers}
        self.seen: dict[int, dict[str, Any]] = {}
        self.left: dict[int, dict[str, Any]] = {}
        self.gone: dict[int, dict[str, Any]] = {}
        self.told: dict[int, deque[dict[str, Any]]] = {p: deque() for p in self.peers}
        # Of each peer that broke, the first collective, send and receive whose data it never began to move.
        self.given_up: dict[int, dict[str, int]] = {}
        self._moved_on: set[int] = set()
        self._broken: tuple[int, dict[str, Any]] | None = None
        # What MPI itself says of a loss, and since when.
        self._lost: tuple[Watch, int, dict[str, Any]] | None = None
        self.patience = 0.0
        """Seconds in which somebody who knows more of a loss than MPI does may say it first."""
        self._mailbox, self._parted = threading.Lock(), False
        self._asked: set[int] = set()
        self.where: Callable[[], str] | None = None
        """Returns the operation that this process is in, for others who ask, once the communicator stands."""
        self.step = ""
        """Which step of its start this rank is in, until then."""
        self.whereabouts: dict[int, str] = {}
        # MPI writes into the posted buffers until they are cancelled: a collected Control would be a wild write.
        _LISTENING.add(self)

    def _post(self, peer: int) -> None:
        buffer = bytearray(_MESSAGE_BYTES)
        ticket = self._receives[peer] = Ticket(buffer, counts=False)
        ticket.start(self.comm.Irecv, [buffer, self._mpi.BYTE], source=peer, tag=_TAG)

    def send(self, peers: Iterable[int], kind: str, body: dict[str, Any]) -> None:
        """Send one message to each of `peers`; it is buffered, so nothing waits here.

        An ``op`` behind the last word is not sent: it could meet a later communicator. A signal handler may have closed
        this one inside of a submission.
        """
        _, payload = fitting(kind, body)
        for peer in peers if self._sendable(kind) else ():
            ticket = Ticket(payload, counts=False)
            self._sends.append(ticket.start(self.comm.Isend, [payload, self._mpi.BYTE], dest=peer, tag=_TAG))

    def _sendable(self, kind: str) -> bool:
        self._parted |= kind in _LAST_WORDS
        return not (self._parted and kind == "op")

    def pump(self) -> bool:
        """Take what has arrived; returns whether anything has.

        An interrupt in here may cost a message, so the mailbox takes no more after it: whoever interrupts poisons.
        Where another thread is in here, that one takes it.
        """
        if not self._mailbox.acquire(blocking=False):
            return False
        moved = self._take()
        self._mailbox.release()
        return moved

    def _take(self) -> bool:
        moved = False
        for peer in list(self._receives):
            while peer in self._receives and self._arrived(peer):
                moved = True
        self._sends = [ticket for ticket in self._sends if not ticket.over()]
        return moved

    def _arrived(self, peer: int) -> bool:
        ticket = self._receives.get(peer)
        try:
            if ticket is None or not ticket.done() or self._receives.get(peer) is not ticket:
                # Another thread may have stopped listening meanwhile, which ends a receive too.
                return False
        except self._mpi.Exception as error:
            self._receives.pop(peer, None)
            text = f"MPI lost rank {peer}: {error}"
            notice = {"error": "PeerLostError", "text": text, "lost": [peer], "here": True}
            self._lost = self._lost or (Watch(self.patience), peer, notice)
            Control.lost_ranks_seen = True
            return True
        (buffer,) = ticket.buffers
        end = _LENGTH_BYTES + int.from_bytes(buffer[:_LENGTH_BYTES], "little")
        message = json.loads(bytes(buffer[_LENGTH_BYTES:end]))
        self._post(peer)
        self._deliver(peer, message["kind"], message["body"])
        return True

    def _deliver(self, peer: int, kind: str, body: dict[str, Any]) -> None:
        if kind == "op":
            self.inbox[peer].append(body)
            self.seen[peer] = body
        elif kind == "left":
            self.left[peer] = body
        elif kind == "moved on":
            self._moved_on.add(peer)
        elif kind == "tell":
            self.told[peer].append(body)
        elif kind == "ping":
            self.send([peer], "pong", {})
        elif kind == "pong":
            self._asked.discard(peer)
        elif kind == "where":
            self.send([peer], "here", {"at": self.where() if self.where else self.step})
        elif kind == "here":
            self.whereabouts[peer] = body["at"]
        else:
            if body.get("phase") in ("abort", "exit"):
                self.gone[peer] = body
            self.given_up[peer] = body.get("given_up", {})
            self._break(peer, body)

    def _break(self, peer: int, body: dict[str, Any]) -> None:
        if self._broken is None:
            self._broken = (peer, body)

    @property
    def broken(self) -> tuple[int, dict[str, Any]] | None:
        """The first failure that a peer told of, or MPI, and which peer; ``None``: there was none."""
        if self._broken is None and self._lost is not None and self._lost[0].tick():
            self._broken = self._lost[1:]
        return self._broken

    def ping(self) -> None:
        """Ask every peer for a sign of life; one that waits in an operation too answers by itself."""
        self._asked = set(self.peers)
        self.send(self.peers, "ping", {})

    def ask_where(self, peers: Iterable[int]) -> None:
        """Ask peers where they are, also in operations of other communicators; answers are in :attr:`whereabouts`."""
        self.whereabouts.clear()
        self.send(peers, "where", {})

    def silent(self) -> list[int]:
        """Return the peers that have not answered the last :meth:`ping`."""
        return sorted(self._asked)

    def all_gather(
        self, payload: bytes, watch: Watch, phase: str, look: Callable[[], None] = lambda: None
    ) -> list[bytes]:
        """Return every rank's `payload` (all of one length) in rank order (``MPI_Iallgather``, polled).

        Raises
        ------
        Overdue
            Not every rank came before `watch` ran out.
        """
        received = bytearray(len(payload) * self.size)
        ticket = Ticket(payload, received)
        ticket.start(self.comm.Iallgather, [payload, self._mpi.BYTE], [received, self._mpi.BYTE])
        self._half_done = True
        wait(ticket, watch, phase, look)
        self._half_done = False
        step = len(payload)
        return [bytes(received[i * step : (i + 1) * step]) for i in range(self.size)]

    def all_gather_any(
        self, payload: bytes, watch: Watch, phase: str, look: Callable[[], None] = lambda: None
    ) -> list[bytes]:
        """Return every rank's `payload`, of any lengths, in rank order."""
        own = len(payload).to_bytes(8, "little")
        lengths = [int.from_bytes(x, "little") for x in self.all_gather(own, watch, phase, look)]
        padded = self.all_gather(payload.ljust(max(lengths), b"\0"), watch, phase, look)
        return [x[:n] for x, n in zip(padded, lengths, strict=True)]

    @property
    def open(self) -> bool:
        """Whether this rank has not said its last word."""
        return not self._parted

    def numbers_here(self, other: Control, ranks: Sequence[int]) -> list[int]:
        """Return the numbers that ranks of another communicator have in this one, where MPI knows both."""
        if self.comm is None or other.comm is None:
            return []
        groups = [one.comm.Get_group() for one in (other, self)]
        try:
            return [int(number) for number in groups[0].Translate_ranks(list(ranks), groups[1])]
        finally:
            for group in groups:
                group.Free()

    @property
    def everyone_left(self) -> bool:
        """Whether every peer has closed and said so, as far as messages have been taken."""
        return self.left.keys() == set(self.peers)

    def settled(self) -> bool:
        """Whether every peer has said its last word, so that no message can still be under way."""
        self.pump()
        return self._moved_on | self.left.keys() == set(self.peers) and not self._sends

    def retire(self) -> None:
        """Stop listening (receives can be cancelled); unsent messages stay with MPI."""
        receives, self._receives = self._receives, {}
        for ticket in receives.values():
            ticket.cancel()
        _LISTENING.discard(self)
        self._sends = [ticket for ticket in self._sends if not ticket.over()]

    def abandon(self) -> None:
        """Listen no more, without a call of MPI's: other ranks are not counted on any more."""
        _LISTENING.discard(self)
        self._mailbox.acquire(blocking=False)

    def free(self) -> None:
        """Free the communicator; only after :meth:`settled`, or a stale message could meet its successor.

        One with a collective that this rank gave up is not freed: the others may still be in it.
        """
        self.retire()
        if not self._half_done:
            self.comm.Free()
