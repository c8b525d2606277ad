"""The one submission lane of this process, and the health of what is submitted on it."""

from __future__ import annotations

import copy
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from butter_mpi.errors import ButterError, CommunicatorBrokenError, CommunicatorClosedError

__all__ = ["LANE", "Health", "Lane"]


class Lane:
    """Serialises submissions of all communicators: one thread at a time, a group as a whole.

    The lock is re-entrant: the thread that holds a group goes on submitting; another one waits its turn.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.give = self._lock.release
        """Give one hold back."""
        self._what = ""
        self._pid = os.getpid()
        self.forked = False
        """Whether this process is a fork of the one that the lane was made in."""
        # Told by the fork, and not asked of the system each time, which costs as much as all other checks together.
        os.register_at_fork(after_in_child=self._fork)

    def _fork(self) -> None:
        self.forked = True

    def check_fork(self, who: str, what: str) -> None:
        """Raise in a forked child: a communicator belongs to the process that made it.

        Raises
        ------
        CommunicatorClosedError
            This process is a fork.
        """
        if self.forked:
            raise CommunicatorClosedError(
                f"{who}: {what}: the communicator belongs to process {self._pid}, and this is its forked child "
                f"{os.getpid()}; use it in the parent, or start ranks with the launcher"
            )

    def take(self, who: str, what: str, patience: float) -> None:
        """Wait for the turn, then hold the lane until :meth:`give`.

        Raises
        ------
        ButterError
            Another thread held the lane for longer than `patience` seconds; nothing was sent.
        CommunicatorClosedError
            This process is a fork: a communicator belongs to the process that made it.
        """
        if self.forked:
            self.check_fork(who, what)
        # A free lock is taken three times as fast where no time is given.
        if not self._lock.acquire(False) and not self._lock.acquire(timeout=patience):
            raise ButterError(
                f"{who}: {what}: the lane was held for {patience:g} s by {self._held_by()}; nothing was sent. "
                "Submit from one thread, or end the group that the other thread opened"
            )
        self._what = what

    def _held_by(self) -> str:
        """Return who holds the lane: the lock knows the thread, and says so in its text alone."""
        owner = re.search(r"owner=(\d+)", repr(self._lock))
        names = {str(thread.ident): thread.name for thread in threading.enumerate()}
        return f"thread {names.get(owner[1], owner[1]) if owner else '?'} in {self._what}"

    @contextmanager
    def held(self, who: str, what: str, patience: float) -> Iterator[None]:
        """Hold the lane for the body."""
        self.take(who, what, patience)
        try:
            yield
        finally:
            self.give()

    @contextmanager
    def tried(self) -> Iterator[bool]:
        """Hold the lane for the body if it is free now; yields whether it is held."""
        got = not self.forked and self._lock.acquire(blocking=False)
        try:
            yield got
        finally:
            if got:
                self._lock.release()


LANE = Lane()


class Health:
    """Whether a communicator takes operations: healthy, poisoned by a first cause, or closed."""

    def __init__(self) -> None:
        self.cause: CommunicatorBrokenError | None = None
        self.closed = ""
        self.replaced = False
        """Whether survivors went on in another communicator, as the cause says; it is closed as well."""
        self.remark: Callable[[Sequence[int]], str] = lambda _lost: ""
        """Returns what the loss of ranks here means elsewhere."""

    def poison(self, cause: CommunicatorBrokenError) -> bool:
        """Keep the first cause; returns whether this is it."""
        first = self.cause is None
        if first:
            if remark := self.remark(cause.lost_ranks):
                cause.add_note(remark)
            self.cause = cause
        return first

    def replace(self, by: str) -> None:
        """Close it, as survivors went on in another communicator; every later operation tells the cause, and that."""
        assert self.cause is not None
        facts = {name: getattr(self.cause, name) for name in self.cause.FACTS}
        first = f"{self.cause.message}; replaced by {by}"
        self.cause = type(self.cause)(first, **facts)
        self.replaced, self.closed = True, f"replaced by {by}"

    def check(self, who: str, what: str) -> None:
        """Raise if no operation is taken.

        Raises
        ------
        CommunicatorClosedError
            It was closed or aborted here.
        CommunicatorBrokenError
            The first cause, again (a copy: an exception instance belongs to the place that raised it).
        """
        if self.closed and not self.replaced:
            raise CommunicatorClosedError(
                f"{who}: {what}: the communicator was {self.closed}; make a new one with init"
            )
        if self.cause is not None:
            raise copy.copy(self.cause)
