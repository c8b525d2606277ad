"""Messages between a rank and the watcher of its node: JSON objects over a local socket that keeps their bounds.

Each kind has the fields of :data:`FIELDS`, of these types; anything else is refused, whoever sent it. Nothing is
unpickled, and sizes are bounded.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["FIELDS", "LIMIT", "MOST_OLDER", "Garbled", "of_spans", "pack", "receive", "send", "spans", "unpack"]

LIMIT = 1 << 16
MOST_OLDER = 16
"""As many older communicators of its process a rank shows to the watcher of a new one: the newest of them."""
_SHORTEST_TEXT = 1000
_MOST_LOST = 100

FIELDS: dict[str, dict[str, type]] = {
    # from a rank
    "hello": {"rank": int, "secret": str, "older": list},
    "judge": {},
    "closed": {},
    "leaving": {},
    "bye": {},
    "broken": {"notice": dict, "epoch": int},
    "resume": {"sequence": int, "pairs": int, "epoch": int},
    "come": {"what": str, "sequence": int, "pairs": int, "limit": float},
    "elsewhere": {"what": str},
    "post": {"to": list, "letter": str, "body": dict, "generation": int},
    # from the watcher
    "ready": {"pid": int},
    "notice": {"notice": dict, "epoch": int},
    "gone": {"rank": int, "text": str},
    "stopped": {"rank": int, "text": str},
    "running": {"rank": int},
    "warning": {"text": str},
    "gathered": {"what": str, "spans": list, "sequence": int, "pairs": int, "generation": int},
    "left_out": {"text": str},
    "refused": {"error": str, "text": str, "lost": list, "alone": bool},
    "letter": {"by": int, "letter": str, "body": dict, "generation": int},
}


def spans(ranks: Iterable[int]) -> list[list[int]]:
    """Return ranks, in their order, as first and last of each that follow one another: of thousands a few lines."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return found


def of_spans(said: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks of :func:`spans`."""
    return [rank for first, last in said for rank in range(first, last + 1)]


class Garbled(ValueError):
    """What came is no message."""


def pack(kind: str, **fields: Any) -> bytes:
    """Return a message; a text or list that is too long is cut, the message never lost.

    Raises
    ------
    Garbled
        It is too long, and has no text or list that could be cut.
    """
    data = _packed(kind, fields)
    while len(data) > LIMIT:
        longer, fields = fields, _shorter(fields)
        if fields == longer:
            raise Garbled(f"{kind}: {len(data)} bytes, of which none can be left out")
        data = _packed(kind, fields)
    return data


def _packed(kind: str, fields: dict[str, Any]) -> bytes:
    return json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode()


def _shorter(fields: dict[str, Any]) -> dict[str, Any]:
    """Return less: of a notice first the records go, then half of the text again and again, then the list of ranks.

    Of all else, and of a notice that is too long still, half of its longest text or list.
    """
    notice = fields.get("notice")
    if not isinstance(notice, dict):
        return _half_of(fields)
    if notice.get("records"):
        cut: dict[str, Any] = {"records": {}}
    elif len(notice.get("text", "")) > _SHORTEST_TEXT:
        cut = {"text": notice["text"][: len(notice["text"]) // 2]}
    else:
        cut = {"lost": notice.get("lost", [])[:_MOST_LOST], "operation": "", "phase": ""}
    shorter = {**notice, **cut}
    return {**fields, "notice": shorter if shorter != notice else _half_of(notice)}


def _half_of(facts: dict[str, Any]) -> dict[str, Any]:
    """Return them with half of the longest, be it a text or a list: ranks may garble any of them."""
    longest = max(facts, key=lambda name: len(str(facts[name])))
    value = facts[longest]
    if isinstance(value, dict) and value:
        return {**facts, longest: _half_of(value)}
    return {**facts, longest: value[: len(value) // 2]} if isinstance(value, str | list) else facts


def unpack(data: bytes, known: Mapping[str, Mapping[str, type]] = FIELDS) -> dict[str, Any]:
    """Return the message in `data`, one of the `known` kinds.

    Raises
    ------
    Garbled
        It is none, or lacks a field, or has one too many, or one of another type.
    """
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Garbled(str(error)) from None
    fields = known.get(message.get("kind", "")) if isinstance(message, dict) and _is(message.get("kind"), str) else None
    if fields is None or message.keys() != fields.keys() | {"kind"}:
        raise Garbled("not a known message with its fields")
    for name, kind in fields.items():
        if not _is(message[name], kind):
            raise Garbled(f"{message['kind']}: {name} must be {kind.__name__}")
    return dict(message)


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def send(sock: socket.socket, kind: str, **fields: Any) -> bool:
    """Send without waiting; returns false if the other end is gone, or has not read for long."""
    with contextlib.suppress(OSError, Garbled):
        data = pack(kind, **fields)
        return sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) == len(data)
    return False


def receive(sock: socket.socket) -> dict[str, Any] | None:
    """Return the next message, or ``None`` once the other end is gone or sends garbage.

    Raises
    ------
    BlockingIOError
        Nothing has come, on a socket that does not wait.
    """
    try:
        data = sock.recv(LIMIT)
        return unpack(data) if data else None
    except BlockingIOError:
        raise
    except (OSError, Garbled):
        return None
