"""What the watcher of a node knows of ranks on other nodes, and of its own among them.

Between watchers a rank has its first number for good; ranks and people know it by that of the newest agreement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from butter_mpi.sentinel.links import HUBS
from butter_mpi.sentinel.networks import Networks

__all__ = ["Elsewhere"]


class Elsewhere:
    """Ranks by node.

    Parameters
    ----------
    links : Networks
        The links to the watchers of other nodes.
    nodes : sequence
        Of each node, in order, its host and the first numbers of its ranks.
    size : int
        How many ranks there are.
    me : int
        This node.
    """

    def __init__(self, links: Networks, nodes: Sequence[tuple[str, Sequence[int]]], size: int, me: int) -> None:
        self.links, self._me = links, me
        self._hosts = [host for host, _ in nodes]
        self._node_of = {first: node for node, (_, ranks) in enumerate(nodes) for first in ranks}
        self._number(range(size))
        # By first number, what is said of those that have died, and of those that are stopped or cannot be reached.
        self._said: dict[str, dict[int, str]] = {"gone": {}, "stopped": {}}
        self._dead_here: set[int] = set()

    def _number(self, firsts: Iterable[int]) -> None:
        self._numbers = {first: number for number, first in enumerate(firsts)}
        # One that is alone lists no ranks.
        self._places = {number: self._node_of.get(first, 0) for first, number in self._numbers.items()}
        self._of_node: dict[int, list[int]] = {}
        for first in self._numbers:
            self._of_node.setdefault(self._node_of.get(first, 0), []).append(first)

    def number(self, first: int) -> int | None:
        """Return a rank's number by the newest agreement; ``None``: it is none any more."""
        return self._numbers.get(first)

    def numbers(self, firsts: Sequence[int]) -> list[int]:
        """Return the numbers of those that are ranks."""
        return [self._numbers[first] for first in firsts if first in self._numbers]

    def first_numbers(self, numbers: Sequence[int]) -> list[int]:
        """Return the first numbers of ranks."""
        firsts = {number: first for first, number in self._numbers.items()}
        return [firsts[number] for number in numbers]

    def hear(self, kind: str, fields: dict[str, Any]) -> None:
        """Take what another watcher, or the links, say of a rank."""
        if kind == "running":
            self._said["stopped"].pop(fields["rank"], None)
        else:
            self._said[kind][fields["rank"]] = fields["text"]

    def died_here(self, first: int) -> None:
        """Note the death of a rank of this node."""
        self._dead_here.add(first)

    def said(self) -> Iterator[tuple[str, int, str]]:
        """Yield what ranks are told of those elsewhere: a word, the number, and the text."""
        for word, every in self._said.items():
            for first, text in every.items():
                if first in self._numbers:
                    yield word, self._numbers[first], text

    def of(self, word: str) -> dict[int, str]:
        """Return the ranks elsewhere that have died (``gone``), or that are ``stopped`` or cannot be reached."""
        return {number: text for one, number, text in self.said() if one == word}

    def node(self, number: int) -> int | None:
        """Return the node of a rank."""
        return self._places.get(number)

    def host(self, number: int) -> str:
        """Return the host of a rank."""
        node = self.node(number)
        return "" if node is None else self._hosts[node]

    @property
    def nodes(self) -> set[int]:
        """The nodes that have ranks."""
        return set(self._of_node)

    @property
    def several(self) -> bool:
        """Whether ranks are on more than one node."""
        return len(self._of_node) > 1

    @property
    def ranks(self) -> range:
        """All ranks, by the newest agreement."""
        return range(len(self._numbers))

    def silent(self) -> set[int]:
        """Return the ranks of nodes that are cut off: what became of them is not known."""
        return self.ranks_of(self.links.cut)

    def ranks_of(self, nodes: Iterable[int]) -> set[int]:
        """Return the ranks of some nodes that are not known to have died."""
        dead = self._said["gone"]
        return {self._numbers[one] for node in nodes for one in self._of_node.get(node, ()) if one not in dead}

    @property
    def decides(self) -> int | None:
        """The node whose watcher has ranks agree; ``None``: there is none, or it is not heard.

        The first hub that has a rank which has not died, and is heard; or the one node that has such a rank at all.
        """
        dead = self._dead_here | self._said["gone"].keys()
        living = [node for node, firsts in self._of_node.items() if any(first not in dead for first in firsts)]
        if living == [self._me]:
            return self._me
        return next((node for node in sorted(living) if node < HUBS and not self.links.away(node)), None)

    def go_on(self, survivors: Sequence[int]) -> None:
        """Give new numbers to the ranks that go on, in the order in which their old ones are given."""
        self._number(self.first_numbers(survivors))
        self.links.go_on({node: self.numbers(every) for node, every in self._of_node.items()})
