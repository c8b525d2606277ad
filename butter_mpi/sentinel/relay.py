"""The watcher's part in what ranks do after a loss: it has them agree on who goes on, and carries their letters.

After a loss most MPIs cannot be used, and every rank has a socket to the watcher of its node. Letters are short, go to
ranks of the newest agreement only, and are not read here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from butter_mpi.findings import ranks_text
from butter_mpi.sentinel.gathering import SHRINK, Agreed, Gathering, Refused
from butter_mpi.sentinel.judging import Verdict
from butter_mpi.sentinel.watched import Rank

__all__ = ["KINDS", "LETTER_BYTES", "Relay"]

KINDS = ("come", "elsewhere", "post")
"""The messages that it takes."""
LETTER_BYTES = 48 << 10
"""The longest body of a letter, as JSON."""
_MOST_UNSENT = 1024


class Relay:
    """Agreements and letters between the ranks of one node.

    Parameters
    ----------
    ranks : callable
        Returns the ranks that take part, by number.
    name : callable
        Returns a rank as messages name it.
    begin : callable
        Numbers the ranks that go on anew, in the order in which it is given their old numbers.
    judge : callable
        Takes a verdict on a rank that reads no letters.
    """

    def __init__(
        self,
        ranks: Callable[[], Mapping[int, Rank]],
        name: Callable[[Rank], str],
        begin: Callable[[Sequence[int]], None],
        judge: Callable[[Verdict], None],
    ) -> None:
        self._ranks, self._name, self._begin, self._judge = ranks, name, begin, judge
        self._gathering = Gathering()
        self._generation = 0

    def hear(self, rank: Rank, message: Mapping[str, Any]) -> None:
        """Take a message of one of :data:`KINDS`."""
        if self._ranks().get(rank.number) is not rank:
            # It has been told.
            return
        if message["kind"] == "post":
            self._carry(rank, message)
        elif message["kind"] == "elsewhere":
            self._gathering.elsewhere(rank.number, message["what"])
        else:
            facts = message["what"], message["sequence"], message["pairs"], message["limit"]
            self._gathering.come(rank.number, *facts)

    def _leave_out(self, rank: Rank) -> None:
        """Tell a rank that lives that it is none any more."""
        others = ranks_text(sorted(one.first_number for one in self._ranks().values()))
        text = f"{others} went on without this rank, which was stopped or had closed its communicator"
        rank.tell("left_out", text=text)

    def _carry(self, rank: Rank, message: Mapping[str, Any]) -> None:
        # One of an older generation means ranks by their old numbers.
        if message["generation"] != self._generation or len(json.dumps(message["body"])) > LETTER_BYTES:
            return
        letter = {name: message[name] for name in ("letter", "body", "generation")}
        for number in {one for one in message["to"] if type(one) is int}:
            other = self._ranks().get(number)
            if other is None or not other.lives:
                continue
            if other.unsent < _MOST_UNSENT:
                other.tell("letter", by=rank.number, **letter)
            else:
                text = f"{self._name(other)} takes no more messages of other ranks: {other.unsent} wait for it"
                self._judge(Verdict("PeerLostError", (number,), text))

    def look(self, passed: float) -> None:
        """Decide what can be decided, `passed` seconds after the last look."""
        if not self._gathering.open:
            return
        ranks = self._ranks()
        lost = {number: why for number, rank in ranks.items() if (why := self._lost(rank))}
        expected = ranks.keys() - lost.keys()
        decided = self._gathering.look(expected, lost, passed, lambda number: self._name(ranks[number]))
        for decision in decided:
            if isinstance(decision, Agreed):
                self._agree(decision)
            else:
                self._refuse(decision)

    def _lost(self, rank: Rank) -> str:
        """Return why a rank cannot go on; empty: it can."""
        if verdict := rank.death or rank.stop:
            return verdict.text
        if not rank.lives:
            return f"{self._name(rank)} {rank.end()}"
        return f"{self._name(rank)} closed its communicator" if rank.closed else ""

    def _agree(self, agreed: Agreed) -> None:
        self._generation += 1
        numbers = {"sequence": agreed.sequence, "pairs": agreed.pairs, "generation": self._generation}
        if agreed.what == SHRINK:
            left_out = [rank for number, rank in self._ranks().items() if rank.lives and number not in agreed.ranks]
            self._begin(agreed.ranks)
            for rank in left_out:
                self._leave_out(rank)
        for rank in self._ranks().values():
            rank.tell("gathered", what=agreed.what, ranks=list(agreed.ranks), **numbers)

    def _refuse(self, refused: Refused) -> None:
        ranks = self._ranks()
        for number in refused.ranks:
            ranks[number].tell("refused", error=refused.error, text=refused.text, lost=list(refused.lost))
