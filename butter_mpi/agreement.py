"""What the ranks of one test session tell each other, and what follows from it; no pytest inside.

Each step of a session (a phase of a test, an ``all_ranks`` check, the collection, the end) is one *round*: every rank
sends one message to every other and waits for theirs. How long a rank waits is the caller's to say: a rank that is slow
but alive is no fault, while one whose test has failed may have left the others inside a collective.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from butter_mpi.control import Pause, Watch, keep_for_ever

__all__ = ["FAILED", "PASSED", "SKIPPED", "XFAILED", "XPASSED", "Look", "Message", "Rounds", "judge"]

Message = dict[str, Any]
Look = Callable[[dict[int, Message], float], None]

PASSED, FAILED, SKIPPED, XFAILED, XPASSED = "passed", "failed", "skipped", "xfailed", "xpassed"
_TAG = 1


class _Round:
    """One message to and from each peer."""

    def __init__(self, comm: Any, mpi: Any, message: Message) -> None:
        self._comm, self._mpi = comm, mpi
        self.said: dict[int, Message] = {comm.rank: message}
        self._missing = [peer for peer in range(comm.size) if peer != comm.rank]
        self._receives: dict[int, tuple[Any, bytearray]] = {}
        self._payload = json.dumps(message).encode()
        self._sends = [comm.Isend([self._payload, mpi.BYTE], dest=peer, tag=_TAG) for peer in self._missing]

    def done(self) -> bool:
        for peer in self._missing:
            if peer not in self._receives:
                self._match(peer)
            elif self._receives[peer][0].Test():
                self.said[peer] = json.loads(bytes(self._receives[peer][1]))
        self._missing = [peer for peer in self._missing if peer not in self.said]
        self._sends = [request for request in self._sends if not request.Test()]
        return not self._missing and not self._sends

    def under_way(self) -> list[tuple[Any, ...]]:
        """Return every request that MPI may still work on, each with its buffer."""
        received = [entry for peer, entry in self._receives.items() if peer not in self.said]
        return received + [(request, self._payload) for request in self._sends]

    def _match(self, peer: int) -> None:
        status = self._mpi.Status()
        found = self._comm.Improbe(source=peer, tag=_TAG, status=status)
        if found is not None:
            buffer = bytearray(status.Get_count(self._mpi.BYTE))
            self._receives[peer] = (found.Irecv([buffer, self._mpi.BYTE]), buffer)


class Rounds:
    """Rounds over a communicator of their own; nothing in here blocks.

    Parameters
    ----------
    world : mpi4py communicator
        It is duplicated without waiting: a rank may be late for the first round.
    mpi : module
        ``mpi4py.MPI``.
    """

    def __init__(self, world: Any, mpi: Any) -> None:
        self.rank: int = world.rank
        self.size: int = world.size
        self._mpi = mpi
        self._comm, self._duplicated = world.Idup()

    def finished(self) -> bool:
        """Whether MPI has been finalised, so that no round can be held any more.

        Returns
        -------
        bool
            True after ``MPI_Finalize``.
        """
        return bool(self._mpi.Is_finalized())

    def hold(self, message: Message, look: Look) -> list[Message]:
        """Send `message` to every rank and return every rank's, in rank order.

        Parameters
        ----------
        message : dict
            JSON-able.
        look : callable
            Called again and again with what has arrived (by rank) and the seconds waited; to end the wait it raises or
            leaves the process.

        Returns
        -------
        list of dict
            One message a rank.
        """
        watch, pause = Watch(None), Pause()
        current: _Round | None = None
        try:
            while current is None or not current.done():
                if current is None and self._duplicated.Test():
                    current = _Round(self._comm, self._mpi, message)
                pause()
                watch.tick()
                look(current.said if current else {self.rank: message}, watch.elapsed)
        except BaseException:
            for request, *buffers in [(self._duplicated, self._comm), *(current.under_way() if current else ())]:
                keep_for_ever(request, *buffers)
            raise
        return [current.said[rank] for rank in range(self.size)]


def judge(outcomes: Iterable[str]) -> str:
    """Return the one outcome that a phase has on every rank.

    Parameters
    ----------
    outcomes : iterable of str
        Each rank's own.

    Returns
    -------
    str
        Theirs where it is one; ``xfailed`` where an expected failure came on some ranks only; else ``failed``. Also a
        skip on some ranks only is a failure, since the ranks then ran different tests.
    """
    found = set(outcomes)
    if len(found) == 1:
        return found.pop()
    return XFAILED if found <= {XFAILED, XPASSED} else FAILED
