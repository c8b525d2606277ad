"""Threads that are inside calls on a NCCL communicator: an abort would free what they use."""

from __future__ import annotations

import time
from collections.abc import Callable

from butter_mpi.control import Pause

__all__ = ["Inside"]

# By looks and not by the clock: a process that was stopped meanwhile has given its threads no time to come out.
_LOOKS, _BETWEEN = 50, 2e-3


class Inside:
    """Marks a thread as inside, as a context; whoever wants to abort waits until none is.

    The handle must be read inside, and be taken away before the wait: then nobody enters with it any more.

    Parameters
    ----------
    otherwise : callable, optional
        Tells whether somebody may be inside without this mark, by one of another kind that is set as long.
    """

    def __init__(self, otherwise: Callable[[], bool] = bool) -> None:
        # Not a number: adding to one is not atomic between threads.
        self._marks: list[None] = []
        self._otherwise = otherwise

    def __enter__(self) -> None:
        self._marks.append(None)

    def __exit__(self, *_: object) -> None:
        self._marks.pop()

    @property
    def none(self) -> bool:
        """Whether nobody is inside."""
        return not (self._marks or self._otherwise())

    def wait_until_none(self) -> None:
        """Wait without a bound until nobody is inside; only in a thread that can be left to itself."""
        pause = Pause()
        while not self.none:
            pause()

    def soon_none(self) -> bool:
        """Wait for as long as a call takes that waits for nothing; returns whether nobody is inside."""
        for _ in range(_LOOKS):
            if self.none:
                return True
            time.sleep(_BETWEEN)
        return self.none
