"""The authenticated wire between two watchers: bytes in and bytes out, no socket in here.

Both ends know the job's secret, which never travels here. The caller proves first that it does, over numbers that both
ends have just drawn, so whoever calls without it is shown nothing that was made with it. After that each frame is
encrypted and has a code over its number and content, with keys of this connection and direction: what a stranger
inserts, repeats, leaves out or changes ends the connection before any of it is read as a message. Messages are JSON
objects of bounded size; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable
from typing import Any

from butter_mpi.sentinel import messages

__all__ = ["FIELDS", "SECRET_BYTES", "Channel", "Refused"]

SECRET_BYTES = 32
_MAGIC = b"butter_mpi watchers 1\n"
_NUMBER, _PROOF = 32, 32
_HELLO = struct.Struct(f">{len(_MAGIC)}sII{_NUMBER}s")
_HEAD = struct.Struct(">I")
_COUNT = struct.Struct(">Q")

_STANDING: dict[str, type] = {"low": int, "ranks": list, "said": str, "closed": bool}
_FACT: dict[str, type] = {"origin": int, "serial": int}
_LETTER: dict[str, type] = {"origin": int, "to": int, "n": int}
_DECLINED: dict[str, type] = {"error": str, "spans": list, "text": str, "lost": list, "alone": bool}
FIELDS: dict[str, dict[str, type]] = {
    # between two watchers
    "beat": {"awake": bool, "waits": bool},
    "up": {},
    "begun": {},
    "over": {},
    "deaf": {"node": int},
    "hears": {"node": int},
    # what ranks of several nodes submit, between each node and the hubs
    "place": {"epoch": int, "at": int, "chain": int, **_STANDING},
    "lowest": {"epoch": int, "at": int, **_STANDING},
    "show": {"epoch": int, "first": int, "last": int},
    "shown": {"epoch": int, "first": int, "last": int, "rank": int, "entries": list},
    # and of sends and receives, between the two nodes of each pair
    "sides": {"origin": int, "to": int, "epoch": int, "rows": list},
    # what ranks call together after a failure, from each node to the hubs; and their letters, between any two nodes
    "gathering": {"generation": int, "come": list, "elsewhere": list, "lost": list, "cut": list},
    "mail": {**_LETTER, "generation": int, "by": int, "ranks": list, "letter": str, "body": dict},
    "got": _LETTER,
    # from one watcher to all, handed on by each that has not had it
    "notice": {**_FACT, "notice": dict, "epoch": int},
    "gone": {**_FACT, "rank": int, "text": str},
    "stopped": {**_FACT, "rank": int, "text": str},
    "running": {**_FACT, "rank": int},
    "cut": {**_FACT, "node": int, "text": str},
    "back": {**_FACT, "node": int},
    "agreed": {**_FACT, "generation": int, "after": int, "what": str, "spans": list, "sequence": int, "pairs": int},
    "declined": {**_FACT, "generation": int, **_DECLINED},
}


class Refused(ValueError):
    """What came is not from a watcher of this job, or not what it sent."""


class Channel:
    """One connection as its two ends see it: from the bytes that have come to messages, and back.

    Parameters
    ----------
    secret : bytes
        The job's.
    me : int
        The node of this end.
    peer : int, optional
        The node that is called; ``None``: this end is called, and learns who calls.
    may_call : callable
        Whether a node may call this end.

    Attributes
    ----------
    out : bytearray
        What is to be sent; the caller takes it from the front.
    answered : bool
        Whether the other end has answered a call, and was given this one's proof.
    open : bool
        Whether the other end has proved that it knows the secret.
    """

    def __init__(
        self, secret: bytes, me: int, peer: int | None = None, may_call: Callable[[int], bool] = lambda _node: False
    ) -> None:
        self.out, self.peer = bytearray(), peer
        self.answered = self.open = False
        self._secret, self._me, self._may_call = secret, me, may_call
        self._buffer = bytearray()
        self._sent = self._received = 0
        self._own = os.urandom(_NUMBER)
        self._talk, self._calls = b"", peer is not None
        if peer is None:
            self._await(_HELLO.size, self._called)
        else:
            self._talk = _HELLO.pack(_MAGIC, me, peer, self._own)
            self.out += self._talk
            self._await(_NUMBER, self._answered)

    def _await(self, size: int, then: Callable[[bytes], dict[str, Any] | None]) -> None:
        self._need, self._then = size, then

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Take bytes that have come; returns the messages that they complete.

        Raises
        ------
        Refused
            The connection must be closed: what came was not made by the other end, or that does not know the secret.
        """
        self._buffer += data
        found = []
        while len(self._buffer) >= self._need:
            taken = bytes(self._buffer[: self._need])
            del self._buffer[: self._need]
            message = self._then(taken)
            if message is not None:
                found.append(message)
        return found

    def send(self, kind: str, **fields: Any) -> None:
        """Append a message to :attr:`out`."""
        body = self._masked(self._ciphers[0], self._sent, messages.pack(kind, **fields))
        self.out += _HEAD.pack(len(body)) + body + _code(self._codes[0], self._sent, body)
        self._sent += 1

    # -- opening -----------------------------------------------------------------------------------------------------

    def _called(self, hello: bytes) -> None:
        magic, caller, called, _ = _HELLO.unpack(hello)
        if magic != _MAGIC or called != self._me or not self._may_call(caller):
            raise Refused("no watcher of this job calls")
        self.peer, self._talk = caller, hello + self._own
        self.out += self._own
        self._await(_PROOF, self._proved)

    def _answered(self, number: bytes) -> None:
        self._talk += number
        self.answered = True
        self.out += self._made("caller")
        self._await(_PROOF, self._proved)

    def _proved(self, proof: bytes) -> None:
        """Take the other end's proof; the called one gives its own only now."""
        mine, theirs = ("caller", "called") if self._calls else ("called", "caller")
        if not hmac.compare_digest(proof, self._made(theirs)):
            raise Refused("the other end does not know the secret of this job")
        if not self._calls:
            self.out += self._made("called")
        self._codes = tuple(self._made(f"code of {end}") for end in (mine, theirs))
        self._ciphers = tuple(self._made(f"cipher of {end}") for end in (mine, theirs))
        self._secret, self.open = b"", True
        self._await(_HEAD.size, self._headed)

    def _made(self, what: str) -> bytes:
        """Return what only those can make who know the secret, for one purpose, of this opening."""
        return hmac.digest(self._secret, what.encode() + b"\0" + self._talk, "sha256")

    # -- messages ----------------------------------------------------------------------------------------------------

    def _headed(self, head: bytes) -> None:
        (size,) = _HEAD.unpack(head)
        if size > messages.LIMIT:
            raise Refused("a message is too long")
        self._await(size + _PROOF, self._framed)

    def _framed(self, frame: bytes) -> dict[str, Any]:
        body, code = frame[:-_PROOF], frame[-_PROOF:]
        if not hmac.compare_digest(code, _code(self._codes[1], self._received, body)):
            raise Refused("a message was changed, inserted, repeated or left out")
        text = self._masked(self._ciphers[1], self._received, body)
        self._received += 1
        self._await(_HEAD.size, self._headed)
        try:
            return messages.unpack(text, FIELDS)
        except messages.Garbled as error:
            raise Refused(str(error)) from None

    @staticmethod
    def _masked(key: bytes, count: int, body: bytes) -> bytes:
        """Encrypt or decrypt: no key and number is used twice, so each frame has a mask of its own."""
        mask = hashlib.shake_256(key + _COUNT.pack(count)).digest(len(body))
        return (int.from_bytes(body, "big") ^ int.from_bytes(mask, "big")).to_bytes(len(body), "big")


def _code(key: bytes, count: int, body: bytes) -> bytes:
    return hmac.digest(key, _COUNT.pack(count) + body, "sha256")
