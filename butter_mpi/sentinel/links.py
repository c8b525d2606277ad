"""The links between the watchers of several nodes: who is linked to whom, what travels, and what silence means.

Nodes are numbered in the order of their lowest ranks. The first two are hubs: every other one calls both, the second
calls the first. What one watcher finds is told to all it is linked to, and each hands on what it has not had, so that
the loss of a hub, or of a link, parts nobody. Where a link breaks it is made again, and both ends say again what was
said before.

A node that no other one has heard for four seconds is cut off, frozen or gone. Hubs tell one another whom they do not
hear, so that one link alone accuses nobody. Time in which this process did not run does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from butter_mpi.findings import ranks_text
from butter_mpi.sentinel.connections import Connection, Connections

if TYPE_CHECKING:
    from butter_mpi.sentinel.wire import Channel

__all__ = ["COMPARED", "HUBS", "LETTERS", "REMEDY", "SIDES", "TAKEN_BACK", "Links"]

HUBS = 2
COMPARED = ("place", "lowest", "show", "shown")
"""Messages about what ranks of several nodes submit, which these links only carry."""
LETTERS = ("mail", "got")
SIDES = "sides"
"""What two nodes tell one another of sends and receives between their ranks."""
_CARRIED = (*LETTERS, SIDES)
"""Messages from one node to another, which a hub carries between two that are not linked."""
TAKEN_BACK = {"running": "stopped", "back": "cut"}
"""What is said of a rank, or of the node that it is on, and what was said before is no more so by that."""
_GATHERING = "gathering"
REMEDY = (
    "Open the TCP ports of net.ipv4.ip_local_port_range between the nodes of the job, or name the network to use by "
    "watch_interface (BUTTER_MPI_WATCH_INTERFACE); or set watch='node' (BUTTER_MPI_WATCH=node): the watcher of a node "
    "then tells no other one, and ranks elsewhere learn of a loss over MPI, or at deadlines only"
)
_SLOW = "Where hosts are slow to start a process, set a longer start_deadline (BUTTER_MPI_START_DEADLINE)"
_BEAT = 0.4
# An outage of 3 s, the beat before it and the call after it are no fault.
_SILENCE = 4.2
# Who is cut off with the one that is accused may have been heard a little later.
_TOGETHER = 3.2
_CALL_AGAIN = 1.0
_FAREWELL = 2.0
# What is said of a loss is said once for each node that is lost.
_MOST_NAMED = 8
_SUBJECTS = {"gone": "rank", "stopped": "rank", "running": "rank", "cut": "node", "back": "node", "notice": "epoch"}
_SUBJECTS |= {"agreed": "generation", "declined": "generation"}


class _Peer:
    """Another node that this one is linked to."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.link: Connection | None = None
        # ``met``: was linked once. ``up``: its ranks and links are there. ``over``: it says nothing more of ranks.
        # ``deaf``: nothing was heard of it for long. ``cut``: that was told.
        self.met = self.up = self.over = self.deaf = self.cut = False
        # What it last said of the ranks there, or that it hears of: whether one is not stopped, or is in MPI_Finalize.
        self.said = {"awake": False, "waits": False}
        self.silence = 0.0
        # The nodes that it does not hear; how calls to each of its addresses ended; and from which of its own this node
        # first reached each.
        self.misses: set[int] = set()
        self.calls = 0
        self.ends: dict[str, str] = {}
        self.sources: dict[str, str] = {}

    @property
    def heard(self) -> bool:
        """Whether it is linked, and was heard of late."""
        return self.link is not None and self.silence < _TOGETHER


class Links:
    """The end of one watcher; a node that is alone has no links.

    Parameters
    ----------
    config : dict
        ``me`` (this node), ``nodes`` (of each, in order, its host and ranks), ``network`` (its name, for messages, if
        it has one), ``hubs`` (of each hub the addresses and ports at which it listens), ``listeners`` (descriptors, of
        a hub), ``secret`` (of the job, in hexadecimal) and ``patience`` (seconds after which a call that nothing takes
        ends the start).
    hear : callable
        Is handed what another watcher found: its kind, and the fields; and of each rank of a node that is cut off, or
        back, that it is.
    accuse : callable
        Is handed the ranks that are to blame, a text and the phase, where this watcher finds what breaks.
    beside : callable, optional
        Returns whether a node is heard over another network; none: there is no other one.
    """

    def __init__(
        self,
        config: dict[str, Any],
        hear: Callable[[str, dict[str, Any]], None],
        accuse: Callable[[Sequence[int], str, str], None],
        beside: Callable[[int], bool] | None = None,
    ) -> None:
        self._hear, self._accuse, self._beside = hear, accuse, beside or (lambda number: False)
        self._over_network = f" over {config['network']}" if config["network"] else ""
        self._me: int = config["me"]
        self._nodes: list[tuple[str, list[int]]] = config["nodes"]
        self._hubs: list[list[tuple[str, int]]] = config["hubs"]
        # The ranks of each node that has any, by their newest numbers, for messages.
        self._ranks = {number: list(ranks) for number, (_, ranks) in enumerate(self._nodes)}
        self._secret, self._patience = bytes.fromhex(config["secret"]), float(config["patience"])
        every = range(len(self._nodes) if self._me < HUBS else HUBS)
        self._peers = {number: _Peer(number) for number in every if number != self._me}
        self._connections = Connections(
            self._channel,
            config["listeners"],
            len(self._peers),
            on_proved=self._link,
            on_message=self._take,
            on_end=self._unlink,
        )
        self._serial = 0
        self._heard: dict[int, int] = {}
        # What was said, by origin, kind and subject, in the order of the serial numbers of each origin.
        self._said: dict[tuple[int, str, int], dict[str, Any]] = {}
        self._cut: set[int] = set()
        # Of a leaf: the nodes of which a hub says so.
        self._told_cut: set[int] = set()
        self._complete = self._up = self._begun = self._over = self._failed = self._leaving = False
        self._beat_due = self._waited = self._left = 0.0

    def _channel(self, number: int | None) -> Channel:
        # Ciphers are loaded only where there is another node.
        from butter_mpi.sentinel.wire import Channel

        return Channel(self._secret, self._me, number, self._may_call)

    def __bool__(self) -> bool:
        """Whether there is another node."""
        return bool(self._peers)

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is something for :meth:`serve`."""
        return self._connections.fileno()

    def serve(self) -> None:
        """Take what has come."""
        self._connections.serve()

    def hears(self, number: int) -> bool:
        """Whether a node that this one is linked to was heard of late."""
        return number in self._peers and self._peers[number].heard

    @property
    def awake(self) -> bool:
        """Whether a rank of another node is not stopped, as far as this one hears."""
        return bool(self._saying("awake"))

    @property
    def waits(self) -> bool:
        """Whether a rank of another node is in MPI_Finalize, as far as this one hears."""
        return bool(self._saying("waits"))

    def _saying(self, word: str) -> list[_Peer]:
        return [peer for peer in self._peers.values() if peer.said[word] and not peer.over and peer.heard]

    # -- saying ------------------------------------------------------------------------------------------------------

    def up(self) -> None:
        """Say that every rank of this node has come."""
        self._complete = True
        self._begin()

    def publish(self, kind: str, **fields: Any) -> None:
        """Tell every other node what was found here."""
        if self._peers:
            self._serial += 1
            self._spread(kind, {"origin": self._me, "serial": self._serial, **fields}, None)

    def say(self, kind: str, to_hubs: bool, **fields: Any) -> None:
        """Send what these links only carry, to all that this node is linked to, or to the hubs alone."""
        for peer in self._peers.values():
            if peer.number < HUBS or not to_hubs:
                self._send(peer, {"kind": kind, **fields})

    def carry(self, node: int, attempt: int, kind: str, **fields: Any) -> None:
        """Send a message of those that hubs carry to a node.

        Where there is no link to it, it goes through a hub: each time through another one.
        """
        direct = self._peers.get(node)
        ways = [direct] if direct is not None and direct.heard else self._heard_hubs
        if ways:
            self._send(ways[attempt % len(ways)], {"kind": kind, **fields})

    @property
    def _heard_hubs(self) -> list[_Peer]:
        return [peer for peer in self._peers.values() if peer.number < HUBS and peer.heard]

    def _carry_on(self, message: dict[str, Any]) -> None:
        """Hand a letter on to whom it is for."""
        peer = self._peers.get(message["to"])
        if peer is not None:
            self._send(peer, message)

    @property
    def leads(self) -> bool:
        """Whether this is the hub that compares: the first with ranks, or the second if that hears a node more."""
        if self._me >= HUBS or not self._ranks.get(self._me):
            return False
        other = self._peers[HUBS - 1 - self._me]
        if not other.heard or not self._ranks.get(other.number):
            return True
        here = {peer.number for peer in self._peers.values() if peer.deaf}
        first, second = (here, other.misses) if self._me == 0 else (other.misses, here)
        return (first <= second) == (self._me == 0)

    @property
    def cut(self) -> frozenset[int]:
        """The nodes that nobody hears any more."""
        return frozenset(self._cut | self._told_cut)

    def away(self, node: int) -> bool:
        """Whether a node is cut off, or says nothing more of ranks."""
        if node == self._me:
            return self._over
        return node in self.cut or (node in self._peers and self._peers[node].over)

    def go_on(self, ranks: dict[int, list[int]]) -> None:
        """Know the ranks of each node that has any by new numbers, in messages."""
        self._ranks = ranks

    def finish(self) -> bool:
        """Say that this node says nothing more of ranks; returns whether nobody needs this process any more.

        A hub stays until the last node is over, as what that finds travels through it.
        """
        if not self._over:
            self._over = True
            self._send_all("over")
        if not self._leaving:
            if self._me < HUBS and not all(peer.over or peer.deaf for peer in self._peers.values()):
                return False
            self._leaving = True
            for peer in self._peers.values():
                # One that this end never met, or lost, shall hear that it is over.
                if self._calls(peer) and peer.link is None and not (peer.met and peer.over):
                    self._call(peer)
        self._connections.shut()
        return not self._connections or self._left >= _FAREWELL

    def _spread(self, kind: str, fields: dict[str, Any], source: _Peer | None) -> None:
        """Send it to all but the one that it came from, and keep it for whoever is linked later."""
        origin, subject = fields["origin"], fields[_SUBJECTS[kind]]
        self._heard[origin] = fields["serial"]
        for old in (kind, TAKEN_BACK.get(kind, kind)):
            self._said.pop((origin, old, subject), None)
        self._said[origin, kind, subject] = {"kind": kind, **fields}
        for peer in self._peers.values():
            if peer is not source:
                self._send(peer, {"kind": kind, **fields})

    def _send_all(self, kind: str, but: _Peer | None = None, **fields: Any) -> None:
        for peer in self._peers.values():
            if peer is not but:
                self._send(peer, {"kind": kind, **fields})

    def _send(self, peer: _Peer, message: dict[str, Any]) -> None:
        if peer.link is not None:
            self._connections.send(peer.link, **message)

    # -- links -------------------------------------------------------------------------------------------------------

    def _calls(self, peer: _Peer) -> bool:
        """Whether this end calls that one."""
        return peer.number < min(self._me, HUBS)

    def _may_call(self, number: int) -> bool:
        return number in self._peers and not self._calls(self._peers[number])

    def _call(self, peer: _Peer) -> None:
        """Call the next address of a hub."""
        address, port = self._hubs[peer.number][peer.calls % len(self._hubs[peer.number])]
        peer.calls += 1
        failed = self._connections.call(peer.number, address, port, peer.sources.get(address, ""))
        if failed:
            peer.ends[_place(address, port)] = failed

    def _link(self, connection: Connection) -> None:
        """Use a connection that has proved itself, in place of the one before, and say again what was said."""
        peer = self._peers[connection.node]
        if connection.called:
            # Once that network is lost, a route over another one must not stand in for it.
            peer.sources.setdefault(connection.called[0], connection.source)
        before, peer.link = peer.link, connection
        if before is not None:
            self._connections.drop(before)
        peer.met = True
        peer.misses.clear()
        for other in self._peers.values():
            if other.deaf and other is not peer:
                self._send(peer, {"kind": "deaf", "node": other.number})
        for fields in list(self._said.values()):
            self._send(peer, fields)
        # After what was said while it was away: what is older than that it is back would be taken for known there.
        self._alive(peer)
        for kind, so in (("up", self._up), ("begun", self._begun and self._me < HUBS), ("over", self._over)):
            if so:
                self._send(peer, {"kind": kind})
        self._begin()

    def _unlink(self, connection: Connection, why: str) -> None:
        if connection.proved:
            peer = self._peers[connection.node]
            peer.link = None if peer.link is connection else peer.link
        elif connection.called:
            self._peers[connection.node].ends[_place(*connection.called)] = why

    # -- hearing -----------------------------------------------------------------------------------------------------

    def _take(self, connection: Connection, message: dict[str, Any]) -> None:
        peer, kind = self._peers[connection.node], message["kind"]
        self._alive(peer)
        if kind == "beat":
            peer.said = {word: message[word] for word in peer.said}
        elif kind == "up":
            peer.up = True
            self._begin()
        elif kind == "begun":
            self._all_begun()
        elif kind == "over":
            self._is_over(peer)
        elif kind == "deaf":
            peer.misses.add(message["node"])
        elif kind == "hears":
            peer.misses.discard(message["node"])
        elif kind in COMPARED or kind == _GATHERING:
            self._hear(kind, {"node": peer.number, **message})
        elif kind in _CARRIED:
            if message["to"] == self._me:
                self._hear(kind, message)
            else:
                self._carry_on(message)
        else:
            self._learn(peer, **message)

    def _learn(self, source: _Peer, kind: str, origin: int, serial: int, **fields: Any) -> None:
        """Take what some watcher found, once, and hand it on."""
        known = 0 <= origin < len(self._nodes) and origin != self._me
        if not known or serial <= self._heard.get(origin, 0):
            return
        # A node speaks for its own ranks, and of nodes that there are.
        if fields.get("rank", self._nodes[origin][1][0]) not in self._nodes[origin][1]:
            return
        if not 0 <= fields.get("node", 0) < len(self._nodes):
            return
        if kind == "cut" and self._knows_better(origin, fields["node"]):
            self._heard[origin] = serial
            return
        self._spread(kind, {"origin": origin, "serial": serial, **fields}, source)
        if kind not in ("cut", "back"):
            self._hear(kind, fields)
        elif fields["node"] != self._me:
            if self._me >= HUBS:
                note = self._told_cut.add if kind == "cut" else self._told_cut.discard
                note(fields["node"])
            if kind == "cut" and self._me >= HUBS and not self._over:
                # Where no rank of that hub takes part any more, it has no verdict for those that do.
                self._accuse(self._nodes[fields["node"]][1], fields["text"], "")
            self._tell_of_node(kind, fields["node"], fields.get("text", ""))

    def _knows_better(self, origin: int, number: int) -> bool:
        """Whether a node that another one does not hear is heard here, or by a hub that is.

        Who was cut off itself, and comes back, says again whom it did not hear. A hub says whom it does not hear before
        it accuses, so that this one has heard that of both hubs by the time of the second one's accusation.
        """
        own = self._peers.get(number)
        if own is not None and own.heard:
            return True
        hubs = [peer for peer in self._peers.values() if peer.number < HUBS and peer.number not in (origin, number)]
        return any(hub.heard and number not in hub.misses for hub in hubs)

    def _tell_of_node(self, kind: str, number: int, text: str) -> None:
        """Tell of each rank of a node that it is not to be reached, or is again."""
        for rank in self._nodes[number][1]:
            self._hear(kind, {"rank": rank, **({"text": text} if kind == "cut" else {})})

    def _publish_of_node(self, kind: str, **fields: Any) -> None:
        """Tell others whom a hub hears; a leaf that heard neither hub knows nothing that those do not."""
        if self._me < HUBS:
            self.publish(kind, **fields)

    def _is_over(self, peer: _Peer) -> None:
        peer.over = True
        if peer.number >= HUBS and peer.link is not None:
            # It waits for this end to close.
            self._connections.drop(peer.link)

    def _alive(self, peer: _Peer) -> None:
        peer.silence = 0.0
        self._told_cut.discard(peer.number)
        if peer.deaf:
            peer.deaf = False
            self._send_all("hears", but=peer, node=peer.number)
        if peer.cut:
            peer.cut = False
            # Behind a hub all others are reached again.
            for number in [one for one in self._cut if one == peer.number or one not in self._peers]:
                self._cut.discard(number)
                self._tell_of_node("back", number, "")
                self._publish_of_node("back", node=number)

    # -- start -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Say that this node is up once its ranks and links are there; a hub: that all are."""
        peers = self._peers.values()
        if not self._complete or not all(peer.link is not None or peer.over for peer in peers):
            return
        if not self._up:
            self._up = True
            self._send_all("up")
        if self._me < HUBS and all(peer.up or peer.over for peer in peers):
            self._all_begun()

    def _all_begun(self) -> None:
        if not self._begun:
            self._begun = True
            self._hear("begun", {})
            if self._me < HUBS:
                self._send_all("begun")

    def _fail(self) -> None:
        """End the start where a node cannot be reached, or does not come."""
        missing = [peer for peer in self._peers.values() if not peer.met and not peer.over]
        if self._failed or self._waited < self._patience or not missing:
            return
        called = [f"{self._name(peer.number)} at {_ends(peer.ends)}" for peer in missing if self._calls(peer)]
        host = f"the watcher of host {self._nodes[self._me][0]}"
        if called:
            text = f"{host} cannot reach{self._over_network} that of {'; and that of '.join(called)}"
        else:
            own = ", ".join(_place(address, port) for address, port in self._hubs[self._me])
            text = f"{host}, at {own}, was not reached{self._over_network} by that of {self._names(missing)}"
        self._failed = True
        text += f", within {self._waited:.1f} s (half of the start deadline)"
        self._accuse((), f"{text}. {REMEDY}. {_SLOW}", "start")

    # -- silence -----------------------------------------------------------------------------------------------------

    def tick(self, passed: float, awake: bool, waits: bool = False) -> None:
        """Look after links and silence, `passed` more seconds of this process's own running later.

        Parameters
        ----------
        passed : float
            Seconds.
        awake : bool
            Whether a rank of this node is not stopped.
        waits : bool
            Whether one is in MPI_Finalize.
        """
        if not self._peers:
            return
        self._connections.tick(passed)
        self._waited += passed
        self._left += passed if self._leaving else 0.0
        self._beat(passed, {"awake": awake, "waits": waits})
        for peer in self._peers.values():
            self._look_after(peer, passed)
        if not self._over:
            self._fail()
        if not self._leaving:
            self._judge()

    def _beat(self, passed: float, own: dict[str, bool]) -> None:
        """Show all that this one is there; a leaf hears what holds of any other rank, a hub what holds of one here."""
        self._beat_due -= passed
        if self._beat_due > 0:
            return
        self._beat_due = _BEAT
        said = {word: self._saying(word)[:2] for word in own}
        for peer in self._peers.values():
            others = said if peer.number >= HUBS else {}
            told = {word: so or any(one is not peer for one in others.get(word, ())) for word, so in own.items()}
            self._send(peer, {"kind": "beat", **told})

    def _look_after(self, peer: _Peer, passed: float) -> None:
        peer.silence += passed
        if self._over and not peer.met and self._waited >= self._patience:
            # Nobody waits for one that never came.
            peer.over = True
        if peer.over:
            return
        if peer.met and not peer.deaf and peer.silence >= _SILENCE:
            peer.deaf = True
            self._send_all("deaf", but=peer, node=peer.number)
        # Beside a link that is silent: after an outage, what waits there to be sent again may come late.
        if self._calls(peer) and (peer.link is None or peer.silence >= _CALL_AGAIN) and not self._leaving:
            self._call(peer)

    def _witnessed(self, peer: _Peer) -> bool:
        """Whether another one that is heard here may hear this peer: it is linked to it, and has not said otherwise."""
        for other in self._peers.values():
            if other is peer or not other.heard:
                continue
            # A leaf does not know whom others hear: that is for the hubs to say.
            if self._me >= HUBS or (min(other.number, peer.number) < HUBS and peer.number not in other.misses):
                return True
        return False

    @property
    def _hears_nobody(self) -> bool:
        return not any(peer.heard for peer in self._peers.values())

    def _leaves_it_to_others(self, silent: Sequence[_Peer]) -> bool:
        """Whether others may soon name this node, as the one that is cut off: their word comes by another way."""
        soon = max(peer.silence for peer in silent) < _SILENCE + _BEAT
        return soon and len(self._nodes) > HUBS and self._hears_nobody

    def _judge(self) -> None:
        """Accuse the nodes that nobody hears any more, and with them those that are silent nearly as long.

        A hub whose ranks are over only tells it: who has no link to the other one hears of that through here.
        """
        silent = [peer for peer in self._peers.values() if peer.met and not (peer.over or peer.cut)]
        silent = [peer for peer in silent if peer.silence >= _TOGETHER]
        if not any(peer.deaf for peer in silent):
            return
        silent = [peer for peer in silent if not self._witnessed(peer)]
        if not any(peer.deaf for peer in silent) or self._leaves_it_to_others(silent):
            return
        numbers = [peer.number for peer in silent]
        if self._me >= HUBS:
            # Without a hub no other node is heard of.
            numbers += [number for number in range(HUBS, len(self._nodes)) if number != self._me]
        seconds = max(peer.silence for peer in silent)
        text = f"no word from {self._names(silent)}{self._over_network} for {seconds:.1f} s: cut off"
        if all(self._beside(peer.number) for peer in silent):
            text += " there, as it is heard over another network"
        else:
            text += ", frozen or gone, or its watcher is"
        if self._hears_nobody:
            text += f"; or this host, {self._nodes[self._me][0]}, is cut off"
        if not self._over:
            # First: of many nodes, all the rest is much to say.
            self._accuse([rank for number in numbers for rank in self._nodes[number][1]], text, "")
        for peer in silent:
            peer.cut = True
        for number in numbers:
            self._cut.add(number)
            self._tell_of_node("cut", number, text)
            self._publish_of_node("cut", node=number, text=text)

    def _names(self, peers: Sequence[_Peer]) -> str:
        named = ", ".join(self._name(peer.number) for peer in peers[:_MOST_NAMED])
        return f"{named} and {len(peers) - _MOST_NAMED} more hosts" if len(peers) > _MOST_NAMED else named

    def _name(self, number: int) -> str:
        ranks = self._ranks.get(number)
        return f"host {self._nodes[number][0]} ({ranks_text(ranks) if ranks else 'no rank any more'})"


def _place(address: str, port: int) -> str:
    return f"{address} port {port}"


def _ends(ends: dict[str, str]) -> str:
    return ", ".join(f"{address} ({end})" for address, end in ends.items()) or "its address (no answer)"
