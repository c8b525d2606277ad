"""Threads that are inside calls on a NCCL communicator: an abort would free what they use."""

from __future__ import annotations

from collections.abc import Callable

from butter_mpi.control import Pause

__all__ = ["Inside"]


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

    def wait_until_none(self) -> None:
        """Wait without a bound until nobody is inside; only in a thread that can be left to itself."""
        pause = Pause()
        while self._marks or self._otherwise():
            pause()
