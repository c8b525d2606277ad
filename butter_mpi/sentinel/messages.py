"""Messages between a rank and the watcher of its node: JSON objects over a local socket that keeps their bounds.

Each kind has the fields of :data:`FIELDS`, of these types; anything else is refused, whoever sent it. Nothing is
unpickled, and sizes are bounded.
"""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

__all__ = ["FIELDS", "LIMIT", "Garbled", "pack", "receive", "send", "unpack"]

LIMIT = 1 << 16
_LONGEST_TEXT = 8000

FIELDS: dict[str, dict[str, type]] = {
    # from a rank
    "hello": {"rank": int, "secret": str},
    "judge": {},
    "bye": {},
    "broken": {"notice": dict, "epoch": int},
    "resume": {"sequence": int, "pairs": int, "epoch": int},
    # from the watcher
    "ready": {"pid": int},
    "notice": {"notice": dict, "epoch": int},
    "warning": {"text": str},
}


class Garbled(ValueError):
    """What came is no message."""


def pack(kind: str, **fields: Any) -> bytes:
    """Return a message; a text that is too long is cut, the message never lost."""
    data = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode()
    if len(data) <= LIMIT:
        return data
    return json.dumps({"kind": kind, **_shortened(fields)}, separators=(",", ":")).encode()


def _shortened(fields: dict[str, Any]) -> dict[str, Any]:
    notice = fields.get("notice")
    if isinstance(notice, dict):
        cut = {**notice, "text": str(notice.get("text"))[:_LONGEST_TEXT], "records": {}, "lost": []}
        return {**fields, "notice": cut}
    return {name: value[:_LONGEST_TEXT] if isinstance(value, str) else value for name, value in fields.items()}


def unpack(data: bytes) -> dict[str, Any]:
    """Return the message in `data`.

    Raises
    ------
    Garbled
        It is none, or lacks a field, or has one too many, or one of another type.
    """
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Garbled(str(error)) from None
    fields = (
        FIELDS.get(message.get("kind", "")) if isinstance(message, dict) and _is(message.get("kind"), str) else None
    )
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
    with contextlib.suppress(OSError):
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
