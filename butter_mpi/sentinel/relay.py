"""The watcher's part in what ranks do after a loss: it has them agree on who goes on, and carries their letters.

After a loss most MPIs cannot be used, and every rank has a socket to the watcher of its node. Letters are short, go to
ranks of the newest agreement only, and are not read here. With several nodes, one watcher decides: each shows the hubs
what its ranks call and which are lost, the first hub that has ranks decides, and what it decides is told to all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from butter_mpi.findings import ranks_text
from butter_mpi.sentinel.elsewhere import Elsewhere
from butter_mpi.sentinel.gathering import RECONNECT, SHRINK, Agreed, Gathering, Refused, outvoted
from butter_mpi.sentinel.judging import Verdict
from butter_mpi.sentinel.links import HUBS, LETTERS
from butter_mpi.sentinel.mailing import Mail
from butter_mpi.sentinel.messages import of_spans, spans
from butter_mpi.sentinel.watched import Rank

__all__ = ["KINDS", "LETTER_BYTES", "Relay"]

KINDS = ("come", "elsewhere", "post")
"""The messages of ranks that it takes."""
LETTER_BYTES = 48 << 10
"""The longest body of a letter, as JSON."""
_MOST_UNSENT = 1024
_MOST_EARLY = 4096
# What is known elsewhere of the dead is known here by then.
_NEWS = 1.0
_MOST_TOLD, _LONGEST_TOLD, _SHORT_TOLD, _LONGEST_TEXT, _MOST_LOST = 8, 1000, 100, 8000, 100


@dataclass
class _Scene:
    """What the ranks of one node call, which of them cannot go on, and from which nodes that one is cut off.

    Of each that has come what it calls, its numbers, its limit, and the number of that call, which no other one has.
    """

    come: dict[int, tuple[str, int, int, float, int]] = field(default_factory=dict)
    elsewhere: dict[int, str] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    cut: frozenset[int] = frozenset()

    def fields(self) -> dict[str, Any]:
        """Return it as a message says it: the texts of many are cut."""
        lost = [
            [rank, text[: _LONGEST_TOLD if place < _MOST_TOLD else _SHORT_TOLD]]
            for place, (rank, text) in enumerate(self.lost.items())
        ]
        come = [[rank, *call] for rank, call in self.come.items()]
        elsewhere = [*map(list, self.elsewhere.items())]
        return {"come": come, "elsewhere": elsewhere, "lost": lost, "cut": spans(sorted(self.cut))}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> _Scene:
        """Return what another watcher said."""
        come = {
            int(rank): (str(what), int(sequence), int(pairs), float(limit), int(turn))
            for rank, what, sequence, pairs, limit, turn in fields["come"]
        }
        elsewhere, lost = ({int(rank): str(text) for rank, text in fields[name]} for name in ("elsewhere", "lost"))
        return cls(come, elsewhere, lost, frozenset(of_spans(fields["cut"])))


class Relay:
    """Agreements and letters between the ranks of a communicator.

    Parameters
    ----------
    ranks : callable
        Returns the ranks of this node that take part, by number.
    name : callable
        Returns a rank, of any node, by its number as messages name it.
    begin : callable
        Numbers the ranks that go on anew, in the order in which it is given their old numbers.
    judge : callable
        Takes a verdict on a rank that reads no letters.
    tell_lost : callable
        Tells the ranks of this node who is lost by now.
    elsewhere : Elsewhere
        What is known of ranks on other nodes.
    me : int
        This node.
    """

    def __init__(
        self,
        ranks: Callable[[], Mapping[int, Rank]],
        name: Callable[[int], str],
        begin: Callable[[Sequence[int]], None],
        judge: Callable[[Verdict], None],
        tell_lost: Callable[[], None],
        elsewhere: Elsewhere,
        me: int,
    ) -> None:
        self._ranks, self._name, self._begin, self._judge = ranks, name, begin, judge
        self._tell_lost, self._elsewhere, self._me = tell_lost, elsewhere, me
        self._generation = self._turn = 0
        self._undecided = 0.0
        self._mail = Mail(me, elsewhere.links.main.carry, self._take_letter)
        self._early: list[dict[str, Any]] = []
        self._forget()

    def _forget(self) -> None:
        """Begin the next gathering: nobody has come."""
        self._own, self._shown = _Scene(), _Scene()
        # Of the watcher that decides: what others showed, whom it has taken from there, and which call of each rank it
        # has answered: what another node shows may be of before that.
        self._others: dict[int, _Scene] = {}
        self._taken: dict[int, set[int]] = {}
        self._answered: dict[int, int] = {}
        self._gathering = Gathering()

    # -- what ranks say ----------------------------------------------------------------------------------------------

    def hear(self, rank: Rank, message: Mapping[str, Any]) -> None:
        """Take a message of one of :data:`KINDS`."""
        if self._ranks().get(rank.number) is not rank:
            # It has been told.
            return
        if message["kind"] == "post":
            self._carry(rank, message)
            return
        self._own.come.pop(rank.number, None)
        self._own.elsewhere.pop(rank.number, None)
        if message["kind"] == "come":
            self._turn += 1
            facts = message["what"], message["sequence"], message["pairs"], message["limit"], self._turn
            self._own.come[rank.number] = facts
        elif message["what"]:
            self._own.elsewhere[rank.number] = message["what"]

    def _leave_out(self, rank: Rank, others: str) -> None:
        """Tell a rank that lives that it is none any more."""
        text = f"{others} went on without this rank, which was stopped or cut off, or had closed its communicator"
        rank.tell("left_out", text=text)

    # -- letters -----------------------------------------------------------------------------------------------------

    def _carry(self, rank: Rank, message: Mapping[str, Any]) -> None:
        # One of an older generation means ranks by their old numbers.
        if message["generation"] != self._generation or len(json.dumps(message["body"])) > LETTER_BYTES:
            return
        letter = {name: message[name] for name in ("letter", "body", "generation")}
        away: dict[int, list[int]] = {}
        for number in {one for one in message["to"] if type(one) is int}:
            node = None if number in self._ranks() else self._elsewhere.node(number)
            if node is None:
                self._hand_over(number, rank.number, letter)
            elif node != self._me:
                away.setdefault(node, []).append(number)
        for node, numbers in away.items():
            if self._mail.waiting(node) < _MOST_UNSENT:
                self._mail.post(node, by=rank.number, ranks=numbers, **letter)
            else:
                self._judge_deaf(numbers, f"{self._mail.waiting(node)} wait for its watcher")

    def _hand_over(self, number: int, by: int, letter: Mapping[str, Any]) -> None:
        other = self._ranks().get(number)
        if other is None or not other.lives:
            return
        if other.unsent < _MOST_UNSENT:
            other.tell("letter", by=by, **letter)
        else:
            self._judge_deaf([number], f"{other.unsent} wait for it")

    def _judge_deaf(self, numbers: Sequence[int], why: str) -> None:
        text = f"{self._name(numbers[0])} takes no more messages of other ranks: {why}"
        self._judge(Verdict("PeerLostError", tuple(numbers), text))

    def _take_letter(self, fields: dict[str, Any]) -> None:
        """Take a letter from another node; one of an agreement that has not come here yet is kept until it has."""
        if fields["generation"] > self._generation and len(self._early) < _MOST_EARLY:
            self._early.append(fields)
        elif fields["generation"] == self._generation:
            letter = {name: fields[name] for name in ("letter", "body", "generation")}
            for number in fields["ranks"]:
                if isinstance(number, int):
                    self._hand_over(number, fields["by"], letter)

    # -- what other watchers say -------------------------------------------------------------------------------------

    def hear_far(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Take what another watcher says of a gathering, or a letter."""
        if kind in LETTERS:
            self._mail.hear(kind, fields)
        elif kind == "agreed":
            self._agree(fields)
        elif kind == "declined":
            if fields["generation"] == self._generation:
                self._decline(fields)
        elif fields["generation"] == self._generation:
            self._others[fields["node"]] = _Scene.of(fields)

    @property
    def called(self) -> bool:
        """Whether a rank waits for a decision."""
        return self._gathering.open or any(scene.come for scene in (self._own, *self._others.values()))

    # -- deciding ----------------------------------------------------------------------------------------------------

    def look(self, passed: float) -> None:
        """Decide what can be decided, or show it to who decides, `passed` seconds after the last look."""
        if passed:
            self._mail.tick(passed)
        if not (self.called or (passed and self._elsewhere.several)):
            self._undecided = 0.0
            return
        self._own.lost = {number: why for number, rank in self._ranks().items() if (why := self._lost(rank))}
        self._own.cut = self._elsewhere.links.cut
        decides = self._elsewhere.decides
        if self._elsewhere.several:
            self._show(bool(passed))
        self._undecided = self._undecided + passed if decides is None and self._own.come else 0.0
        if decides == self._me:
            self._decide(passed)
        elif self._undecided >= _NEWS:
            self._give_up()

    def _show(self, again: bool) -> None:
        """Show the hubs what is new here; while ranks wait, at each look."""
        if self._own != self._shown or (again and self._own.come):
            self._shown = _Scene(dict(self._own.come), dict(self._own.elsewhere), dict(self._own.lost), self._own.cut)
            self._elsewhere.links.main.say("gathering", True, generation=self._generation, **self._own.fields())

    def _decide(self, passed: float) -> None:
        scenes = {**self._others, self._me: self._own}
        for node, scene in scenes.items():
            self._take(node, scene)
        if not self._gathering.open:
            return
        parted = self._elsewhere.ranks_of(self._parted())
        text = "its host hears, over one of their networks, no word from this one"
        lost = dict.fromkeys(parted, text) | self._elsewhere.of("stopped") | self._elsewhere.of("gone")
        for scene in scenes.values():
            lost |= scene.lost
        expected = set(self._elsewhere.ranks) - lost.keys()
        for decision in self._gathering.look(expected, lost, passed, self._name):
            for scene in scenes.values():
                self._answered |= {rank: call[-1] for rank, call in scene.come.items() if rank in decision.ranks}
            self._publish(self._checked(decision, parted))

    def _parted(self) -> set[int]:
        """Return the nodes that this one may hear, but that are not to be met, as they do not hear it.

        Over one of several networks they may have found that before it is found here: they go on without this node, or
        refuse to, and here nothing else must be decided. Whoever says so has cut off this node together with others,
        and goes on with the rest.
        """
        said = [scene.cut for node, scene in self._others.items() if not self._elsewhere.links.main.away(node)]
        return {node for cut in said if self._me in cut for node in self._elsewhere.nodes - cut}

    def _take(self, node: int, scene: _Scene) -> None:
        """Take over what the ranks of a node call now."""
        come = {rank: call for rank, call in scene.come.items() if call[-1] > self._answered.get(rank, 0)}
        for rank in self._taken.get(node, set()) - come.keys():
            self._gathering.elsewhere(rank, "")
        for rank, what in scene.elsewhere.items():
            self._gathering.elsewhere(rank, what)
        for rank, (what, sequence, pairs, limit, _) in come.items():
            self._gathering.come(rank, what, sequence, pairs, limit)
        self._taken[node] = {*come, *scene.elsewhere}

    def _checked(self, decision: Agreed | Refused, parted: set[int]) -> Agreed | Refused:
        """Return a decision; where ranks on nodes that are cut off may go on too, at most one part may."""
        if isinstance(decision, Refused) or decision.what != SHRINK:
            return decision
        silent = self._elsewhere.silent() | parted
        if outvoted(decision.ranks, silent):
            text = (
                f"{ranks_text(sorted(silent))} cannot be reached, and may live: only the part of more ranks goes on, "
                f"of two equal ones that of the lowest rank, and this one has {ranks_text(decision.ranks)}"
            )
            return Refused("PeerLostError", decision.ranks, text, tuple(sorted(silent)), alone=True)
        nodes = {self._elsewhere.node(rank) for rank in decision.ranks}
        if len(nodes) > 1 and min(node for node in nodes if node is not None) >= HUBS:
            text = "no rank is left on the first two hosts, whose watchers link all others; only a new job helps"
            return Refused("PeerLostError", decision.ranks, text)
        return decision

    def _publish(self, decision: Agreed | Refused) -> None:
        """Tell every node, then act on it here."""
        if isinstance(decision, Agreed):
            # Of two that decide in one round, as neither hears the other, one is the later for all.
            generation = HUBS * (self._generation // HUBS + 1) + self._me
            fields: dict[str, Any] = {
                "generation": generation,
                "after": self._generation,
                "what": decision.what,
                "spans": spans(decision.ranks),
                "sequence": decision.sequence,
                "pairs": decision.pairs,
            }
            self._elsewhere.links.main.publish("agreed", **fields)
            self._agree(fields)
        else:
            fields = {
                "generation": self._generation,
                "error": decision.error,
                "spans": spans(decision.ranks),
                "text": decision.text[:_LONGEST_TEXT],
                "lost": list(decision.lost[:_MOST_LOST]),
                "alone": decision.alone,
            }
            self._elsewhere.links.main.publish("declined", **fields)
            self._decline(fields)

    def _give_up(self) -> None:
        """Refuse where nobody is heard who could decide."""
        text = "the first two hosts, whose watchers have ranks agree, have no rank left or cannot be reached from here"
        told = {"error": "PeerLostError", "text": text, "lost": [], "alone": True}
        self._decline({"spans": spans(sorted(self._own.come)), **told})

    def _lost(self, rank: Rank) -> str:
        """Return why a rank cannot go on; empty: it can."""
        if verdict := rank.death or rank.stop:
            return verdict.text
        if not rank.lives:
            return f"{self._name(rank.number)} {rank.end()}"
        return f"{self._name(rank.number)} closed its communicator" if rank.closed else ""

    # -- decided -----------------------------------------------------------------------------------------------------

    def _agree(self, fields: Mapping[str, Any]) -> None:
        """Act on an agreement, whoever made it; one that leaves out what was agreed here was made by others."""
        if fields["generation"] <= self._generation:
            return
        follows, what, ranks = fields["after"] == self._generation, fields["what"], of_spans(fields["spans"])
        self._generation = fields["generation"]
        if not follows or what == SHRINK:
            # Those of another agreement mean ranks by numbers that nobody knows here.
            going = ranks if follows else []
            others = ranks_text(self._elsewhere.first_numbers(going)) or "others"
            left_out = [rank for rank in self._ranks().values() if rank.lives and rank.number not in going]
            self._begin(going)
            for rank in left_out:
                self._leave_out(rank, others)
            self._mail.go_on(self._elsewhere.nodes)
        numbers = {name: fields[name] for name in ("sequence", "pairs", "generation")}
        self._forget()
        for rank in self._ranks().values():
            rank.tell("gathered", what=what, spans=spans(ranks), **numbers)
        # Whoever was lost since that was decided is lost to those that go on.
        self._tell_lost()
        early, self._early = self._early, []
        for letter in early:
            self._take_letter(letter)

    def _decline(self, fields: Mapping[str, Any]) -> None:
        told = {name: fields[name] for name in ("error", "text", "lost", "alone")}
        for number in of_spans(fields["spans"]):
            call = self._own.come.pop(number, None)
            if call is not None and call[0] == RECONNECT and fields["lost"]:
                # It fails soon, and can come here then.
                self._own.elsewhere[number] = RECONNECT
            rank = self._ranks().get(number)
            if rank is not None:
                rank.tell("refused", **told)
