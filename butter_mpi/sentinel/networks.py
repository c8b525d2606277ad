"""The networks over which the watchers of several nodes are linked.

What is found travels over the main one. Each further one has links of its own, over which watchers only show one
another that they are there: so a node that one network loses is named, though it answers over another.
"""

from __future__ import annotations

import functools
import select
from collections.abc import Callable, Sequence
from typing import Any

from butter_mpi.sentinel.links import TAKEN_BACK, Links

__all__ = ["Networks"]

_MAIN = 0


class Networks:
    """The links of one watcher over all networks; a node that is alone has none.

    Parameters
    ----------
    config : dict
        ``networks`` (of each its ``network``, ``hubs``, ``listeners`` and ``secret``); all else is the same in each, as
        :class:`Links` has it.
    hear, accuse : callable
        As those of :class:`Links`.
    """

    def __init__(
        self,
        config: dict[str, Any],
        hear: Callable[[str, dict[str, Any]], None],
        accuse: Callable[[Sequence[int], str, str], None],
    ) -> None:
        self._hear = hear
        self._poll = select.epoll()
        self._begun: set[int] = set()
        # Why each rank is waited for in vain: by network, whether it is stopped, or its node cut off there.
        self._stopped: dict[int, dict[tuple[int, str], str]] = {}
        self._every: list[Links] = []
        for place, one in enumerate(config["networks"]):
            take = functools.partial(self._take, place)
            beside = self.main.hears if place else None
            self._every.append(Links({**config, **one}, take, accuse, beside))
            self._poll.register(self._every[place].fileno(), select.EPOLLIN)

    @property
    def main(self) -> Links:
        """The links that carry what is found."""
        return self._every[_MAIN]

    def __bool__(self) -> bool:
        """Whether there is another node."""
        return bool(self.main)

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is something for :meth:`serve`."""
        return self._poll.fileno()

    def serve(self) -> None:
        """Take what has come."""
        for one in self._every:
            one.serve()

    def _take(self, place: int, kind: str, fields: dict[str, Any]) -> None:
        """Hand on what the links of one network say, where that is so for all of them."""
        if kind == "begun":
            self._begun.add(place)
            if len(self._begun) < len(self._every):
                return
        elif kind in TAKEN_BACK.values():
            self._stopped.setdefault(fields["rank"], {})[place, kind] = fields["text"]
            kind = "stopped"
        elif kind in TAKEN_BACK:
            reasons = self._stopped.get(fields["rank"], {})
            if reasons.pop((place, TAKEN_BACK[kind]), None) is None:
                return
            kind = "stopped" if reasons else "running"
            fields = {"rank": fields["rank"], **({"text": [*reasons.values()][-1]} if reasons else {})}
        self._hear(kind, fields)

    def up(self) -> None:
        """Say that every rank of this node has come."""
        for one in self._every:
            one.up()

    def tick(self, passed: float, awake: bool, waits: bool = False) -> None:
        """Look after all links, as :meth:`Links.tick` does."""
        for one in self._every:
            one.tick(passed, awake, waits)

    def finish(self) -> bool:
        """Say that this node says nothing more of ranks; returns whether nobody needs this process any more."""
        done = [one.finish() for one in self._every]
        return all(done)

    def go_on(self, ranks: dict[int, list[int]]) -> None:
        """Know the ranks of each node that has any by new numbers, in messages."""
        for one in self._every:
            one.go_on(ranks)

    @property
    def cut(self) -> frozenset[int]:
        """The nodes that nobody hears any more over some network."""
        return frozenset().union(*(one.cut for one in self._every))

    def away(self, node: int) -> bool:
        """Whether a node is cut off from some network, or says nothing more of ranks."""
        return self.main.away(node) or node in self.cut
