"""A rank's part in coming together after a failure: it comes to the watcher, hears its decision, and sends letters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from butter_mpi.control import Pause, Watch
from butter_mpi.sentinel.gathering import SHRINK
from butter_mpi.sentinel.messages import of_spans

__all__ = ["Reunion"]

# What the watcher itself takes to say that time is over.
_ANSWER_SECONDS = 3.0


class Reunion:
    """What a rank says to the watcher of its node, and hears, when ranks come together again.

    Parameters
    ----------
    send : callable
        Sends a message to the watcher; returns false where there is no room for it now, or no watcher.
    watcher_lost : callable
        Whether the watcher is gone.
    renumber : callable
        Takes the old numbers of the ranks that go on, in their new order.
    """

    def __init__(
        self, send: Callable[..., bool], watcher_lost: Callable[[], bool], renumber: Callable[[Sequence[int]], None]
    ) -> None:
        self._send, self._watcher_lost, self._renumber = send, watcher_lost, renumber
        self._answers: deque[dict[str, Any]] = deque()
        self.letters: deque[dict[str, Any]] = deque()
        """What other ranks have sent, in order."""
        self.generation = 0
        """Which agreement letters are of."""
        self.alone = False
        """Whether others may have gone on without this rank, as it does not hear them, or has no watcher any more."""
        self.left_out = ""
        """What the watcher says where others went on without this rank; empty: they did not."""

    def hear(self, message: dict[str, Any]) -> None:
        """Take a message of the watcher, in the thread that listens."""
        if message["kind"] == "letter":
            self.letters.append(message)
        elif message["kind"] == "left_out":
            self.left_out = message["text"]
        elif message["kind"] == "refused":
            self.alone = message["alone"]
            self._answers.append(message)
        elif message["kind"] == "gathered":
            self.alone = False
            self.generation = message["generation"]
            if message["what"] == SHRINK:
                self._renumber(of_spans(message["spans"]))
            self._answers.append(message)

    def gather(self, what: str, sequence: int, pairs: int, seconds: float) -> dict[str, Any]:
        """Come together with every rank that lives, and return the watcher's decision.

        Parameters
        ----------
        what : str
            What this rank calls; all must call the same.
        sequence, pairs : int
            The largest numbers that it has given.
        seconds : float
            How long it waits for the others.

        Returns
        -------
        dict
            The message ``gathered`` or ``refused``.
        """
        self._answers.clear()
        self._send("come", what=what, sequence=sequence, pairs=pairs, limit=float(seconds))
        watch, pause = Watch(seconds + _ANSWER_SECONDS), Pause()
        try:
            while (answer := self.answer()) is None:
                if self._watcher_lost() or watch.tick():
                    self.alone = self._watcher_lost()
                    state = "is gone" if self.alone else "does not answer"
                    return _refused(
                        "CommunicatorBrokenError", f"the watcher of this node {state}; only a new job helps"
                    )
                pause()
        except BaseException:
            self.call_elsewhere("")
            raise
        return answer

    def answer(self) -> dict[str, Any] | None:
        """Return a decision that has come, once."""
        if self._answers:
            return self._answers.popleft()
        return _refused("PeerLostError", self.left_out) if self.left_out else None

    def call_elsewhere(self, what: str) -> None:
        """Say what this rank calls that does not come together through the watcher; empty: nothing any more."""
        if what:
            self._answers.clear()
        self._send("elsewhere", what=what)

    def post(self, to: Sequence[int], letter: str, body: Mapping[str, Any], generation: int) -> bool:
        """Send a letter to other ranks; returns false where there is no room for it now, or nobody to carry it."""
        return self._send("post", to=list(to), letter=letter, body=dict(body), generation=generation)


def _refused(error: str, text: str) -> dict[str, Any]:
    return {"kind": "refused", "error": error, "text": text, "lost": [], "alone": False}
