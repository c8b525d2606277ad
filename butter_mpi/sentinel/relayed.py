"""The control plane of ranks that went on after a loss: their messages go through the watcher, not over MPI."""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any

from butter_mpi.control import Control, Overdue, Pause, Watch, fitting
from butter_mpi.sentinel.client import Sentinel

__all__ = ["MOST_BYTES", "RelayedControl"]

MOST_BYTES = 1 << 20
"""The longest payload that a rank gives to an exchange."""
_PART_BYTES = 24 << 10


class RelayedControl(Control):
    """The control plane of ranks over the sockets that each has to its watcher, and the links between these.

    Parameters
    ----------
    sentinel : Sentinel
        This rank's end of the watcher, after the ranks have agreed on who goes on.
    """

    def __init__(self, sentinel: Sentinel) -> None:
        self._sentinel, self._generation = sentinel, sentinel.reunion.generation
        self.comm = None
        self._unsent: deque[tuple[list[int], str, dict[str, Any]]] = deque()
        self._sends = []
        self._begin(sentinel.rank, len(sentinel.descent.ranks))
        self._half = {peer: bytearray() for peer in self.peers}
        self._whole: dict[int, deque[bytes]] = {peer: deque() for peer in self.peers}

    def send(self, peers: Iterable[int], kind: str, body: dict[str, Any]) -> None:
        """Send one message to each of `peers`; nothing waits here."""
        to = list(peers)
        if to and self._sendable(kind):
            self._post_letter(to, kind, fitting(kind, body)[0])

    def _post_letter(self, to: list[int], kind: str, body: dict[str, Any]) -> None:
        self._unsent.append((to, kind, body))
        self._send_all()

    def _send_all(self) -> None:
        while self._unsent and self._sentinel.reunion.post(*self._unsent[0], self._generation):
            self._unsent.popleft()

    def _take(self) -> bool:
        self._send_all()
        letters, moved = self._sentinel.reunion.letters, False
        # What is of an older agreement means ranks by their old numbers; what is of a newer one is for another.
        while letters and letters[0]["generation"] <= self._generation:
            letter = letters.popleft()
            if letter["generation"] == self._generation:
                moved = True
                self._deliver(letter["by"], letter["letter"], letter["body"])
        return moved

    def _deliver(self, peer: int, kind: str, body: dict[str, Any]) -> None:
        if kind != "part":
            super()._deliver(peer, kind, body)
            return
        self._half[peer] += base64.b64decode(body["data"])
        if body["last"]:
            self._whole[peer].append(bytes(self._half[peer]))
            self._half[peer].clear()

    def gathering(self, payload: bytes) -> Generator[bool, None, list[bytes]]:
        """Give `payload` to every rank; yields until each one's is there, then returns them in rank order."""
        for start in range(0, len(payload) or 1, _PART_BYTES):
            part, last = payload[start : start + _PART_BYTES], start + _PART_BYTES >= len(payload)
            body = {"data": base64.b64encode(part).decode(), "last": last}
            if self.peers:
                self._post_letter(list(self.peers), "part", body)
        while not all(self._whole.values()):
            yield False
        every = {peer: whole.popleft() for peer, whole in self._whole.items()} | {self.rank: payload}
        return [every[rank] for rank in range(self.size)]

    def all_gather(
        self, payload: bytes, watch: Watch, phase: str, look: Callable[[], None] = lambda: None
    ) -> list[bytes]:
        """Return every rank's `payload` in rank order.

        Raises
        ------
        Overdue
            Not every rank came before `watch` ran out.
        """
        steps, pause = self.gathering(payload), Pause()
        while True:
            moved = self.pump()
            try:
                next(steps)
            except StopIteration as end:
                return list(end.value)
            if watch.tick():
                raise Overdue(phase, watch.elapsed)
            look()
            if moved:
                pause.reset()
            else:
                pause()

    def all_gather_any(
        self, payload: bytes, watch: Watch, phase: str, look: Callable[[], None] = lambda: None
    ) -> list[bytes]:
        """Return every rank's `payload`, of any lengths, in rank order."""
        return self.all_gather(payload, watch, phase, look)

    @property
    def everyone_left(self) -> bool:
        """Whether every peer has closed and said so, or nothing can be heard of it any more."""
        return self._sentinel.left or super().everyone_left

    def settled(self) -> bool:
        """Whether every peer has said its last word, and this rank's are sent; or none can come or be sent any more."""
        if self._sentinel.left or self._sentinel.reunion.generation != self._generation:
            return True
        return super().settled() and not self._unsent

    def retire(self) -> None:
        """Stop listening."""
        self.abandon()

    def free(self) -> None:
        """Stop listening; there is nothing to free."""
        self.retire()
