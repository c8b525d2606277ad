"""Letters between the watchers of several nodes: each once, in order, also where a link breaks on the way.

What one node sends to another is numbered. The other end says up to which number it has everything, and what it does
not say so of in time is sent again, by another way if there is one. Little is under way at one time, so that no link
is filled by it. Pure: sending is handed in.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Mail"]

_AGAIN = 1.0
_MOST_UNDER_WAY = 64 << 10
# What has come is acknowledged at the next look, or after so many bytes or letters.
_SOON_BYTES, _SOON_LETTERS = 16 << 10, 16

Carry = Callable[..., None]
"""Sends a message: to which node, at which attempt, its kind, and its fields."""


@dataclass
class _Letter:
    number: int
    size: int
    fields: Mapping[str, Any]


@dataclass
class _Out:
    """What goes to one node."""

    last: int = 0
    under_way: deque[_Letter] = field(default_factory=deque)
    queued: deque[_Letter] = field(default_factory=deque)
    waited: float = 0.0
    attempt: int = 0


@dataclass
class _In:
    """What comes from one node."""

    last: int = 0
    letters: int = 0
    size: int = 0
    owed: bool = False


class Mail:
    """One node's letters to and from others.

    Parameters
    ----------
    me : int
        This node.
    carry : callable
        See :data:`Carry`.
    deliver : callable
        Takes the fields of a letter that has come.
    """

    def __init__(self, me: int, carry: Carry, deliver: Callable[[dict[str, Any]], None]) -> None:
        self._me, self._carry, self._deliver = me, carry, deliver
        self._out: dict[int, _Out] = {}
        self._in: dict[int, _In] = {}

    def waiting(self, node: int) -> int:
        """Return how many letters wait for a node to take others."""
        out = self._out.get(node)
        return 0 if out is None else len(out.under_way) + len(out.queued)

    def post(self, node: int, **fields: Any) -> None:
        """Send a letter to a node."""
        out = self._out.setdefault(node, _Out())
        out.last += 1
        out.queued.append(_Letter(out.last, len(json.dumps(fields)), fields))
        self._fill(node, out)

    def _fill(self, node: int, out: _Out) -> None:
        size = sum(letter.size for letter in out.under_way)
        while out.queued and (not out.under_way or size + out.queued[0].size <= _MOST_UNDER_WAY):
            letter = out.queued.popleft()
            out.under_way.append(letter)
            size += letter.size
            self._send(node, out, letter)

    def _send(self, node: int, out: _Out, letter: _Letter) -> None:
        fields = {"origin": self._me, "to": node, "n": letter.number, **letter.fields}
        self._carry(node, out.attempt, "mail", **fields)

    def hear(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Take a ``mail`` or a ``got``."""
        node, number = fields["origin"], fields["n"]
        if kind == "got":
            self._acknowledged(node, number)
            return
        come = self._in.setdefault(node, _In())
        # One that came before is acknowledged again; one that is too early comes again.
        come.owed = True
        if number == come.last + 1:
            come.last = number
            come.letters += 1
            come.size += len(json.dumps(fields["body"]))
            self._deliver({name: value for name, value in fields.items() if name not in ("kind", "origin", "to", "n")})
        if come.letters >= _SOON_LETTERS or come.size >= _SOON_BYTES:
            self._acknowledge(node, come)

    def _acknowledge(self, node: int, come: _In) -> None:
        come.owed, come.letters, come.size = False, 0, 0
        self._carry(node, 0, "got", origin=self._me, to=node, n=come.last)

    def _acknowledged(self, node: int, number: int) -> None:
        out = self._out.get(node)
        while out is not None and out.under_way and out.under_way[0].number <= number:
            out.under_way.popleft()
            out.waited = 0.0
        if out is not None:
            self._fill(node, out)

    def tick(self, passed: float) -> None:
        """Acknowledge what has come, and send again what was not acknowledged in time."""
        for node, come in self._in.items():
            if come.owed:
                self._acknowledge(node, come)
        for node, out in self._out.items():
            out.waited = out.waited + passed if out.under_way else 0.0
            if out.waited >= _AGAIN:
                out.waited = 0.0
                out.attempt += 1
                for letter in list(out.under_way):
                    self._send(node, out, letter)

    def go_on(self, nodes: Collection[int]) -> None:
        """Keep letters to these nodes only."""
        self._out = {node: out for node, out in self._out.items() if node in nodes}
