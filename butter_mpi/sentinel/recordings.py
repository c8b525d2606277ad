"""What the recorders of a node hold when a communicator breaks, written to the file that the user named."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from butter_mpi.descent import Descent
from butter_mpi.recorder import Reader
from butter_mpi.recording import append, take
from butter_mpi.sentinel.watched import Rank

__all__ = ["Recordings"]

_LONGEST_CAUSE = 4000


class Recordings:
    """The recordings of the ranks of a node, each time that their communicator breaks.

    Parameters
    ----------
    file : str
        Where they are appended; empty: nowhere.
    about : dict
        What is the same in all of them: ``communicator``, ``world_size`` and ``host``.
    fail : callable
        Is handed the file and the error where it cannot be written.
    """

    def __init__(self, file: str, about: dict[str, Any], fail: Callable[[str, OSError], None]) -> None:
        self._file, self._about, self._fail = file, about, fail
        self._key: str = about["communicator"]["key"]
        self._asked: deque[tuple[Reader, dict[str, Any]]] = deque()

    @property
    def pending(self) -> bool:
        """Whether there is something to write."""
        return bool(self._asked)

    def ask(self, ranks: Iterable[Rank], cause: str) -> None:
        """Have those of all ranks that have joined written, as they are now; :meth:`write` does it."""
        if self._file:
            facts = [(rank.reader, {**self._about, **_of(rank, cause)}) for rank in ranks if rank.reader is not None]
            self._asked.extend(facts)

    def go_on(self, descent: Descent, world_size: int) -> None:
        """Let those of the ranks that went on without others be of their communicator."""
        communicator = {"key": descent.key(self._key), "name": descent.name}
        self._about = {**self._about, "communicator": communicator, "world_size": world_size}

    def write(self) -> None:
        """Write the next one: all at once would take longer than others can be left unwatched."""
        if self._asked:
            reader, facts = self._asked.popleft()
            try:
                append(self._file, take(reader, facts))
            except OSError as error:
                # Once: the others would fail alike.
                self._asked.clear()
                self._fail(self._file, error)


def _of(rank: Rank, cause: str) -> dict[str, Any]:
    state = _state(rank)
    how = rank.end() if state == "ended" else ""
    return {"rank": rank.number, "pid": rank.pid, "state": state, "how": how, "cause": cause[:_LONGEST_CAUSE]}


def _state(rank: Rank) -> str:
    """Return one of ``recording.STATES``."""
    # Another rank may have told of what broke before its end was seen here.
    if rank.gone or (rank.lives and rank.dead):
        return "ended"
    if rank.left:
        return "left"
    return "closed" if rank.closed else "stopped" if rank.stopped is not None else "alive"
