"""Threads that are inside calls on a NCCL communicator: an abort would free what they use."""

from __future__ import annotations

from butter_mpi.control import Pause

__all__ = ["Inside"]


class Inside:
    """Marks a thread as inside, as a context; whoever wants to abort waits until none is.

    The handle must be read inside, and be taken away before the wait: then nobody enters with it any more.
    """

    def __init__(self) -> None:
        # Not a number: adding to one is not atomic between threads. The path that every operation takes marks by hand.
        self.marks: list[None] = []

    def __enter__(self) -> None:
        self.marks.append(None)

    def __exit__(self, *_: object) -> None:
        self.marks.pop()

    def wait_until_none(self) -> None:
        """Wait without a bound until nobody is inside; only in a thread that can be left to itself."""
        pause = Pause()
        while self.marks:
            pause()
