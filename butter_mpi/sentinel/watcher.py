"""The watcher's process: an event loop over the ranks of one node.

It sees a death by the process handle (a socket's end is no sign: a forked child may hold it) or by the process flags;
a stopped rank by its process state; what ranks submitted in their recorders. What it finds goes to the standard error
of a rank that lives, since launchers end the others within milliseconds, then to every rank, then to the verdict file.
Ranks that wait in MPI_Finalize for one that is lost hear nothing there, and are ended. It ends with its last rank.
"""

from __future__ import annotations

import array
import contextlib
import functools
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from butter_mpi.descent import Descent
from butter_mpi.descriptors import other_end
from butter_mpi.findings import ranks_text
from butter_mpi.recorder import Entry, Glance, Reader
from butter_mpi.segments import unlink_mapped
from butter_mpi.sentinel import messages
from butter_mpi.sentinel.across import Across, Standing
from butter_mpi.sentinel.crying import cry, readable
from butter_mpi.sentinel.elsewhere import Elsewhere
from butter_mpi.sentinel.facing import Facing
from butter_mpi.sentinel.judging import (
    STAY,
    Late,
    Pairs,
    Verdict,
    Waiting,
    first_difference,
    left_out_exchange,
    mismatch,
    said_here,
    told_by,
)
from butter_mpi.sentinel.links import COMPARED, SIDES
from butter_mpi.sentinel.messages import MOST_OLDER
from butter_mpi.sentinel.networks import Networks
from butter_mpi.sentinel.ordering import Orders
from butter_mpi.sentinel.process import Process
from butter_mpi.sentinel.recordings import Recordings
from butter_mpi.sentinel.relay import KINDS, Relay
from butter_mpi.sentinel.watched import Rank

__all__ = ["Watcher", "main"]

_TICK = 0.2
_SOON = 0.02
_LONGEST_PASSED = 0.5
_FROZEN = 4.0
_SHOWN = 8
# Between two looks at what takes longer to compare: ranks of several nodes, and the orders of two communicators.
_SELDOM = 0.4
_OWN_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGCHLD}
# What ranks find themselves and raise on every one of them: a program may expect it.
_RAISED_BY_ALL = ("CollectiveMismatchError", "StartError")
# What a rank that closes has submitted is in its recorder by then; it may be read before.
_LEFT_GRACE = 0.2
# MPI_Finalize of a rank that lives may come to its end all the same.
_FINALIZE_GRACE = 1.0


class Watcher:
    """The watcher.

    Parameters
    ----------
    config : dict
        ``listener`` (descriptor of the listening socket), ``secret``, ``ranks`` (of this node, each with its process),
        ``who`` (each of them, as messages name it), ``name`` (of the communicator), ``descent`` (of it, as a mapping),
        ``host``, ``start`` (seconds in which ranks must come), ``frozen`` (whether stopped ranks are judged), ``file``
        (for verdicts; empty: none), ``links`` (to the watchers of other nodes) and ``recordings`` (what
        :class:`Recordings` is made of).
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._poll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        # By epoch: ranks that go on after a failure, which all survived, begin a new one, one after another.
        self._notices: dict[int, dict[str, Any]] = {}
        self._dead: list[Rank] = []
        self._due = 0.0
        # What a look saw after which nothing was left to judge but what is new; ``None``: there is something.
        self._calm: tuple[dict[int, str], dict[int, Glance]] | None = None
        self._looked = time.monotonic()
        self._start_left = float(config["start"])
        known: dict[int, Process] = {}
        self._ranks = {int(number): Rank(int(number), pid, known) for number, pid in config["ranks"].items()}
        self._descent = Descent.of_facts(config["descent"])
        self._compare_anew()
        self._recordings = Recordings(**config["recordings"], fail=self._cry_of)
        for rank in self._ranks.values():
            if rank.process is not None:
                self._watch(rank.process.pidfd, functools.partial(self._ended, rank))
        # Those that others went on without, and that live.
        self._left_out: list[Rank] = []
        self._far_missed = 0.0
        self._said_last = False
        self._links = Networks(config["links"], self._hear_far, self._accuse_far)
        me, nodes = config["links"]["me"], config["links"]["nodes"]
        self._elsewhere = Elsewhere(self._links, nodes, len(self._descent.ranks), me)
        self._relay = Relay(
            lambda: self._ranks, self._name, self._begin, self._judge, self._tell_lost, self._elsewhere, me
        )
        self._watch(self._links.fileno(), self._links.serve)
        self._compare_across()
        listener = socket.socket(fileno=config["listener"])
        listener.setblocking(False)
        self._watch(listener.fileno(), lambda: self._accept(listener))

    def _compare_anew(self) -> None:
        """Compare what comes from now on."""
        self._late, self._pairs = Late(), Pairs(self._ranks)
        self._suspect: dict[int, Entry] | None = None
        # ``ordered``: all was compared that the last look saw.
        self._orders, self._orders_due, self._crossed, self._ordered = Orders(self._descent.name), 0.0, False, True

    def _compare_across(self) -> None:
        """Compare what ranks of several nodes submit from now on, where there are some."""
        elsewhere, me = self._elsewhere, self._config["links"]["me"]
        self._across = Across(me, elsewhere.nodes, self._links.main.say) if elsewhere.several else None
        self._facing = Facing(me, elsewhere.node, functools.partial(self._links.main.carry, kind=SIDES))
        self._across_due = 0.0

    # -- events ------------------------------------------------------------------------------------------------------

    def _watch(self, fd: int, handler: Callable[[], None]) -> None:
        self._handlers[fd] = handler
        self._poll.register(fd, select.EPOLLIN)

    def _forget(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def run(self) -> None:
        """Serve until the last rank has left or is gone."""
        while self._recordings.pending or not self._over():
            idle = 0.0 if self._recordings.pending else self._due - time.monotonic()
            for fd, _ in self._poll.poll(max(0.0, idle)):
                self._calm = None
                if fd in self._handlers:
                    self._handlers[fd]()
            self._bury()
            self._relay.look(0.0)
            now = time.monotonic()
            if now >= self._due:
                # Time in which this process itself did not run proves nothing about others.
                passed, self._looked, self._due = min(now - self._looked, _LONGEST_PASSED), now, now + _TICK
                self._look(passed)
            self._recordings.write()

    @property
    def _living(self) -> list[Rank]:
        return [rank for rank in self._ranks.values() if rank.lives]

    def _over(self) -> bool:
        living = [*self._living, *(rank for rank in self._left_out if rank.lives)]
        if living and (self._start_left > 0 or any(rank.joined for rank in living)):
            return False
        if not self._said_last:
            self._said_last = True
            # Who closed and said goodbye at once was not looked at since: other nodes would wait for it.
            self._relay.look(_TICK)
            self._across_due = 0.0
            if self._compared:
                self._judge_across(0.0, False)
        return self._links.finish()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock, _ = listener.accept()
            sock.setblocking(False)
            if other_end(sock)[1] != os.geteuid():
                sock.close()
                return
            self._watch(sock.fileno(), lambda: self._hello(sock))

    def _hello(self, sock: socket.socket) -> None:
        """Take a rank's first message, with the descriptor of its recorder; a stranger's ends the connection."""
        self._forget(sock.fileno())
        fds: list[int] = []
        try:
            data, ancillary, _, _ = sock.recvmsg(messages.LIMIT, socket.CMSG_SPACE(4 * (1 + MOST_OLDER)))
            for level, kind, raw in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds += array.array("i", raw[: len(raw) // 4 * 4])
            rank = self._introduced(sock, messages.unpack(data), fds)
        except (OSError, TypeError, ValueError):
            sock.close()
            return
        finally:
            for fd in fds:
                os.close(fd)
        self._watch(sock.fileno(), lambda: self._listen(rank))
        if self._complete:
            self._links.up()
        for epoch, notice in self._notices.items():
            rank.tell("notice", notice=notice, epoch=epoch)
        self._tell_lost(rank)

    def _tell_lost(self, newcomer: Rank | None = None) -> None:
        """Tell one rank, or all, who is lost by now."""
        said = list(self._elsewhere.said())
        for number, one in self._ranks.items():
            if lost := one.death or one.stop:
                said.append(("gone" if one.death else "stopped", number, lost.text))
        for word, number, text in said:
            for rank in self._ranks.values() if newcomer is None else [newcomer]:
                if rank.number != number:
                    rank.tell(word, rank=number, text=text)

    def _introduced(self, sock: socket.socket, message: dict[str, Any], fds: list[int]) -> Rank:
        if message["kind"] != "hello" or message["secret"] != self._config["secret"] or not fds:
            raise ValueError("a stranger")
        rank = self._ranks.get(message["rank"])
        if rank is None or rank.joined or other_end(sock)[0] != rank.pid:
            raise ValueError("no rank of this node, or one that is here already")
        own, *older = [Reader(fd) for fd in fds]
        named = zip(message["older"], older, strict=True)
        rank.join(sock, own, {str(key): (str(name), reader) for (key, name), reader in named})
        return rank

    @property
    def _complete(self) -> bool:
        """Whether every rank of this node has come."""
        return all(rank.joined for rank in self._ranks.values())

    def _listen(self, rank: Rank) -> None:
        # Where it says nothing more, the process handle tells whether it lives.
        if not self._hear(rank) and rank.dead:
            self._ended(rank)

    def _hear(self, rank: Rank) -> bool:
        """Take a message of a rank; returns whether there was one."""
        assert rank.sock is not None
        try:
            message = messages.receive(rank.sock)
        except BlockingIOError:
            return False
        if message is None:
            # Its end, or garbage.
            self._forget(rank.sock.fileno())
            return False
        kind = message["kind"]
        if kind == "closed":
            rank.closed = True
        elif kind == "leaving":
            rank.closed = rank.leaving = True
        elif kind == "bye":
            rank.closed = rank.left = True
            self._no_more_of(rank)
        elif kind == "judge":
            rank.judged = True
        elif kind == "broken":
            self._broken(rank, message["notice"], message["epoch"])
        elif kind == "resume":
            self._resume(rank, message["sequence"], message["pairs"], message["epoch"])
        elif kind in KINDS:
            self._relay.hear(rank, message)
        return True

    def _no_more_of(self, rank: Rank) -> None:
        if rank.sock is not None:
            self._forget(rank.sock.fileno())
        if rank.process is not None:
            self._forget(rank.process.pidfd)

    def _ended(self, rank: Rank) -> None:
        """Take the end of a process; what it means is judged together with those that ended with it."""
        # What it said last may not have been read yet.
        while rank.lives and rank.sock is not None and self._hear(rank):
            pass
        self._no_more_of(rank)
        if rank.lives:
            rank.gone = True
            # Others went on without one that is not among them.
            if self._ranks.get(rank.number) is rank:
                self._dead.append(rank)

    def _bury(self) -> None:
        """Judge the processes that have ended, in the order in which that was seen."""
        if not self._dead:
            return
        # A launcher may be ending the others for it; who ended by itself can take longer than those to be gone.
        for rank in self._living:
            if rank.dead:
                self._ended(rank)
        dead, self._dead = self._dead, []
        # Launchers end all ranks where one has ended badly, also those that are past MPI_Finalize.
        bad = any(rank.gone and rank.code and not rank.killed for rank in self._ranks.values())
        self._mourn([rank for rank in dead if rank.missing and not (bad and rank.leaving and rank.killed)])

    def _mourn(self, missing: Sequence[Rank]) -> None:
        """Tell of deaths; also where another cause was told before: nobody can go on without a rank that is gone.

        Of several at one moment those are to blame whose end was their own; where there is none, the first.
        """
        deaths = {rank.number: self._blame(rank, rank.end()) for rank in missing}
        own = [rank.number for rank in missing if not rank.killed] or list(deaths)[:1]
        for rank in missing:
            rank.death = deaths[rank.number]
        if own:
            texts = [deaths[number].text for number in own]
            others = deaths.keys() - own
            if others:
                texts.append(f"{ranks_text(others)} ended at the same moment, by a signal that launchers send")
            self._judge(replace(deaths[own[0]], lost=tuple(own), text="; ".join(texts)))
        for number, death in deaths.items():
            self._tell("gone", rank=number, text=death.text)
            first = self._ranks[number].first_number
            self._elsewhere.died_here(first)
            self._links.main.publish("gone", rank=first, text=death.text)

    # -- other nodes -------------------------------------------------------------------------------------------------

    def _hear_far(self, kind: str, fields: dict[str, Any]) -> None:
        """Take what the watcher of another node found, or these links say of it."""
        if kind == "begun":
            self._tell("ready", pid=os.getpid())
        elif kind in COMPARED:
            if self._across is not None:
                self._across.hear(fields["node"], kind, fields)
        elif kind == SIDES:
            with contextlib.suppress(ArithmeticError, TypeError, ValueError):
                self._facing.hear(fields["origin"], fields["epoch"], fields["rows"])
        elif kind == "notice":
            with contextlib.suppress(ArithmeticError, TypeError, ValueError):
                self._judge_far(fields["notice"], fields["epoch"])
        elif kind in ("gone", "stopped", "running"):
            self._elsewhere.hear(kind, fields)
            number = self._elsewhere.number(fields["rank"])
            if number is not None:
                self._tell(kind, **{**fields, "rank": number})
        else:
            with contextlib.suppress(ArithmeticError, TypeError, ValueError):
                self._relay.hear_far(kind, fields)

    def _judge_far(self, notice: dict[str, Any], epoch: int) -> None:
        """Keep and tell the verdict of another watcher, as one of this node's."""
        verdict = Verdict.of(notice)
        told = {"by": int(notice["by"]), "here": False} if "by" in notice else {}
        if epoch in self._notices:
            return
        self._notices[epoch] = kept = {**verdict.notice(), **told}
        # Where nobody is left to hear, the other node has said it.
        if not self._living:
            return
        if not told or verdict.error not in _RAISED_BY_ALL:
            said = told_by(told["by"], verdict.text) if told else verdict.text
            self._cry(f"butter_mpi: the watcher of {self._config['host']} hears: {said}\n", None)
        self._spread(verdict, kept, epoch, None)

    def _accuse_far(self, ranks: Sequence[int], text: str, phase: str) -> None:
        """Judge what the links found: nodes that are silent, or that cannot be reached in the start."""
        numbers = tuple(self._elsewhere.numbers(ranks))
        # Of those that others went on without nothing is said any more.
        if numbers or phase:
            self._judge(Verdict("PeerLostError", numbers, text, phase=phase))

    # -- verdicts ----------------------------------------------------------------------------------------------------

    def _who(self, rank: Rank) -> str:
        return f"{self._config['who'][str(rank.number)]} (process {rank.pid})"

    def _name(self, number: int) -> str:
        """Return a rank of any node as messages name it."""
        rank = self._ranks.get(number)
        return self._descent.who(number, self._elsewhere.host(number)) if rank is None else self._who(rank)

    def _blame(self, rank: Rank, how: str) -> Verdict:
        newest = [] if rank.reader is None else rank.reader.newest(1)
        return Verdict(
            "PeerLostError",
            (rank.number,),
            f"{self._who(rank)} {how}; {rank.last()}",
            n=newest[-1].number if newest else None,
            operation=newest[-1].kind if newest else "",
            phase="" if rank.joined else "start",
        )

    def _broken(self, rank: Rank, notice: dict[str, Any], epoch: int) -> None:
        """Take over what a rank says of its communicator: it broke."""
        with contextlib.suppress(ValueError):
            self._judge(Verdict.of(notice), epoch, said_by=rank)

    @property
    def _epoch(self) -> int:
        """The newest epoch that a rank has begun."""
        return max((rank.epoch for rank in self._ranks.values()), default=0)

    def _judge(self, verdict: Verdict, epoch: int | None = None, said_by: Rank | None = None) -> None:
        """Keep the first verdict of an epoch, and say it to people, then to the ranks, then to the file."""
        epoch = self._epoch if epoch is None else epoch
        if epoch in self._notices:
            return
        told = {} if said_by is None else {"by": said_by.number, "here": False}
        self._notices[epoch] = notice = {**verdict.notice(), **told}
        # First: a launcher may be about to end the ranks of other nodes too.
        self._links.main.publish("notice", notice=notice, epoch=epoch)
        said = said_here(verdict.text) if said_by is None else told_by(said_by.number, verdict.text)
        if said_by is None or verdict.error not in _RAISED_BY_ALL:
            self._cry(f"butter_mpi: {said}\n", said_by)
        self._spread(verdict, notice, epoch, said_by)

    def _spread(self, verdict: Verdict, notice: dict[str, Any], epoch: int, said_by: Rank | None) -> None:
        """Tell the ranks of this node, but the one that said it, then the files that the user named."""
        # What became of each rank is of now: who is told may end by that.
        self._recordings.ask(self._ranks.values(), verdict.text)
        for rank in self._ranks.values():
            if rank is not said_by and rank.lives:
                rank.tell("notice", notice=notice, epoch=epoch)
        self._write(verdict)

    def _cry(self, text: str, said_by: Rank | None) -> None:
        """Say it on the standard error of a rank that lives; where none does any more, of what started them."""
        ranks = sorted(self._ranks.values(), key=lambda one: (one.gone, one.stopped is not None, one is said_by))
        own = [rank.process for rank in ranks if rank.process is not None]
        for process in readable(own, ranks[0].ancestors if ranks else []):
            if cry(process, text):
                return

    def _write(self, verdict: Verdict) -> None:
        """Append the verdict, and what each rank submitted last, to the file that the user named."""
        if not self._config["file"]:
            return
        line = {
            "time": time.time(),
            "host": self._config["host"],
            "communicator": self._config["name"],
            "verdict": verdict.notice(),
            "submitted": {str(number): rank.newest(_SHOWN) for number, rank in self._ranks.items()},
        }
        try:
            with open(self._config["file"], "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            self._cry_of(self._config["file"], error)

    def _cry_of(self, file: str, error: OSError) -> None:
        """Say that what was found is not in the file that the user named for it."""
        self._cry(f"butter_mpi: the watcher: {file} cannot be written: {error.strerror}; this is not in it\n", None)

    def _tell(self, kind: str, **fields: Any) -> None:
        for rank in self._ranks.values():
            rank.tell(kind, **fields)

    def _tell_others(self, about: Rank, kind: str, **fields: Any) -> None:
        for rank in self._ranks.values():
            if rank is not about:
                rank.tell(kind, **fields)

    # -- looking -----------------------------------------------------------------------------------------------------

    def _look(self, passed: float) -> None:
        if not self._complete:
            self._start_left -= passed
        living = self._living
        # Before anything is judged: what comes later is seen by the next look.
        seen = {rank.number: rank.look() for rank in living}, self._glances()
        for rank in living:
            if rank.reader is not None:
                rank.reader.beat()
        if seen != self._calm:
            self._judge_all(living, seen[0], passed)
            self._calm = seen if self._settled(*seen) else None

    def _glances(self) -> dict[int, Glance]:
        return {number: rank.reader.glance() for number, rank in self._ranks.items() if rank.reader is not None}

    def _settled(self, states: dict[int, str], glances: dict[int, Glance]) -> bool:
        """Whether time alone changes nothing: nobody is stopped, and nothing waits, or is yet to be read.

        Links need time, also where no rank is left on other nodes: their watchers wait for word of this one.
        """
        awake = self._complete and set(states.values()) == {"alive"}
        if not awake or self._links or self._left_out or self._relay.called:
            return False
        if any(rank.leaving or rank.unsent for rank in self._ranks.values()):
            return False
        if not self._compared:
            return True
        level = len({glance.head for glance in glances.values()}) == 1 and self._suspect is None
        return level and self._ordered and self._pairs.settled(glances)

    def _judge_all(self, living: list[Rank], states: dict[int, str], passed: float) -> None:
        for rank in living:
            rank.send_again()
            if states[rank.number] in ("gone", "dying"):
                self._ended(rank)
        self._bury()
        awake = any(state == "alive" for state in states.values())
        # Where all are stopped, the whole job is suspended: nobody waits for anybody.
        self._judge_stopped(living, states, passed if awake or self._links.main.awake else 0.0)
        if self._compared:
            if awake:
                self._judge_submissions(passed)
                self._judge_orders(passed)
            self._judge_across(passed, awake)
        waiting = self._waiting
        self._free_waiting(waiting, passed)
        self._free_left_out()
        self._links.tick(passed, awake, bool(waiting))
        self._relay.look(passed)

    @property
    def _compared(self) -> bool:
        """Whether what ranks submit can be compared: all are there, in one epoch, of which nothing broke."""
        together = len({rank.epoch for rank in self._ranks.values() if not rank.gone}) == 1
        return together and self._complete and self._epoch not in self._notices

    def _judge_stopped(self, living: list[Rank], states: dict[int, str], passed: float) -> None:
        for rank in living:
            # Whoever is stopped and continued again and again runs, though slowly.
            if states[rank.number] != "stopped" or rank.ran:
                self._runs(rank)
                continue
            # The first look does not count: it may have been stopped just before.
            rank.stopped = 0.0 if rank.stopped is None else rank.stopped + passed
            # For one that has closed nobody waits before MPI_Finalize.
            if self._frozen(rank) and (not rank.closed or self._waiting or self._links.main.waits):
                self._halt(rank)

    def _halt(self, rank: Rank) -> None:
        """Tell of a stop; also where another cause was told before, as nobody can reconnect meanwhile."""
        stop = self._blame(rank, f"has been stopped (SIGSTOP or SIGTSTP) for {rank.stopped:.1f} s")
        self._judge(stop)
        if rank.stop is None:
            rank.stop = stop
            self._tell_others(rank, "stopped", rank=rank.number, text=stop.text)
            self._links.main.publish("stopped", rank=rank.first_number, text=stop.text)

    def _runs(self, rank: Rank) -> None:
        """Take back what was told of its stop."""
        rank.stopped = None
        if rank.stop is not None:
            rank.stop = None
            self._tell_others(rank, "running", rank=rank.number)
            self._links.main.publish("running", rank=rank.first_number)

    def _frozen(self, rank: Rank) -> bool:
        return rank.stopped is not None and rank.stopped >= _FROZEN and bool(self._config["frozen"])

    @property
    def _waiting(self) -> list[Rank]:
        """The ranks that are in MPI_Finalize, which waits for all."""
        return [rank for rank in self._living if rank.leaving and rank.stopped is None]

    def _free_waiting(self, waiting: list[Rank], passed: float) -> None:
        """End ranks that are in MPI_Finalize, where they can neither hear nor raise, once one is lost."""
        if not waiting:
            self._far_missed = 0.0
            for rank in self._ranks.values():
                rank.missed = 0.0
            return
        for rank in self._ranks.values():
            rank.missed = rank.missed + passed if rank.gone and (rank.death or not rank.leaving) else 0.0
        dead = [rank for rank in self._ranks.values() if rank.missed >= _FINALIZE_GRACE]
        self._mourn([rank for rank in dead if rank.death is None])
        lost = [rank.number for rank in [*dead, *filter(self._frozen, self._living)]]
        gone = self._elsewhere.of("gone")
        self._far_missed = self._far_missed + passed if gone else 0.0
        lost += [*gone] if self._far_missed >= _FINALIZE_GRACE else []
        lost += [*self._elsewhere.of("stopped")]
        fresh = [rank.number for rank in waiting if not rank.freed]
        if lost and fresh:
            self._cry(
                f"butter_mpi: the watcher: {ranks_text(fresh)} cannot come out of MPI_Finalize any more, as "
                f"{ranks_text(lost)} will not come there: ended here, by SIGALRM or SIGKILL\n",
                None,
            )
        for rank in waiting if lost else []:
            unlink_mapped(rank.pid)
            rank.finish()

    def _free_left_out(self) -> None:
        """End ranks in MPI_Finalize that others went on without: those do not come there."""
        for rank in self._left_out:
            if not rank.lives or not rank.leaving:
                continue
            if not rank.freed:
                self._cry(
                    f"butter_mpi: the watcher: process {rank.pid}, which others went on without, cannot come out of "
                    "MPI_Finalize any more: ended here, by SIGALRM or SIGKILL\n",
                    None,
                )
            unlink_mapped(rank.pid)
            rank.finish()

    def _judge_submissions(self, passed: float) -> None:
        readers = {number: rank.reader for number, rank in self._ranks.items() if rank.judged and rank.reader}
        if not readers:
            return
        found = first_difference(readers) or left_out_exchange(readers)
        pair = self._pairs.read(readers)
        if pair is not None:
            self._judge(mismatch(pair))
        elif found is not None:
            self._suspected(found)
        else:
            self._suspect = None
            for waiting in [*self._late.look(readers, passed), *self._pairs.look(passed)]:
                self._judge_late(waiting)

    def _judge_across(self, passed: float, awake: bool) -> None:
        """Judge what ranks of several nodes submit: who differs, and who waits here for ranks elsewhere."""
        if self._across is None or self._epoch in self._notices:
            return
        if not all(rank.judged for rank in self._ranks.values()):
            return
        readers = {number: rank.reader for number, rank in self._ranks.items() if rank.reader}
        self._across_due -= passed
        if self._across_due <= 0:
            self._across_due = _SELDOM
            differing = self._across.look(readers, self._epoch, self._standing, self._links.main.leads)
            differing = differing or self._facing.look(self._pairs, self._epoch, self._standing)
            if differing is not None:
                self._judge(differing)
                return
        passed = passed if awake else 0.0
        late, warning = self._across.wait(readers, passed)
        found = [(rank, late, warning) for rank in self._ranks]
        for number, late, warning in [*found, *self._facing.wait(self._pairs, passed)]:
            if late is not None:
                self._judge(late)
            elif warning:
                self._ranks[number].mention("warning", text=warning)

    def _standing(self, last: Sequence[int]) -> Standing:
        """Return what other nodes are told of the ranks that are last here."""
        left = [number for number in last if self._ranks[number].closed]
        if left:
            return Standing(0, tuple(left), self._farewells(left), True)
        return Standing(0, tuple(last), self._positions(last), False)

    def _judge_orders(self, passed: float) -> None:
        """Judge ranks that use this communicator and an older one in different orders; seen twice, as above."""
        if not self._older[0] or self._epoch in self._notices:
            return
        self._orders_due -= passed
        self._ordered = self._orders_due <= 0
        if not self._ordered:
            return
        readers = {number: rank.reader for number, rank in self._ranks.items() if rank.reader}
        found = self._orders.look(readers, *self._older)
        if found is not None and self._crossed:
            self._judge(found)
        self._crossed = found is not None
        self._ordered = not self._crossed
        self._orders_due = 0.0 if self._crossed else _SELDOM
        self._due = min(self._due, time.monotonic() + _SOON) if self._crossed else self._due

    @functools.cached_property
    def _older(self) -> tuple[dict[str, dict[int, Reader]], dict[str, str]]:
        """The recorders of older communicators by key, then by rank, and their names; once every rank has come."""
        older: dict[str, dict[int, Reader]] = {}
        names: dict[str, str] = {}
        for number, rank in self._ranks.items():
            for key, (name, reader) in rank.older.items():
                older.setdefault(key, {})[number], names[key] = reader, name
        return older, names

    def _suspected(self, found: dict[int, Entry]) -> None:
        """Judge what was seen twice: nobody is accused on one reading."""
        if self._suspect is not None:
            # The first reading: ranks that go on meanwhile overwrite what differed first.
            self._judge(mismatch(self._suspect))
        self._suspect, self._due = found, time.monotonic() + _SOON

    def _judge_late(self, waiting: Waiting) -> None:
        left = tuple(number for number in waiting.absent if self._ranks[number].closed)
        if left and waiting.seconds >= _LEFT_GRACE:
            self._judge(self._unanswered("PeerLostError", waiting, left, f"{self._farewells(left)}. {STAY}"))
        elif waiting.over:
            bound = f"{waiting.entry.bound:g} s" if waiting.entry.bound else "none"
            late = f"no answer within {waiting.seconds:.1f} s (collective deadline: {bound}) from"
            said = f"{late} {self._positions(waiting.absent)}"
            self._judge(self._unanswered("CollectiveTimeoutError", waiting, waiting.absent, said))
        elif waiting.warn:
            text = f"{waiting.entry.text()}: has waited {waiting.seconds:.0f} s for {self._positions(waiting.absent)}"
            for rank in self._ranks.values():
                if rank.number not in waiting.absent:
                    rank.mention("warning", text=text)

    def _positions(self, numbers: Sequence[int]) -> str:
        return "; ".join(f"{self._who(self._ranks[number])}, {self._ranks[number].last()}" for number in numbers)

    def _farewells(self, numbers: Sequence[int]) -> str:
        newest = {number: self._ranks[number].newest(1) or ["no operation"] for number in numbers}
        return "; ".join(
            f"{self._who(self._ranks[number])} closed its communicator after {entry}"
            for number, (entry,) in newest.items()
        )

    def _unanswered(self, error: str, waiting: Waiting, absent: tuple[int, ...], said: str) -> Verdict:
        entry = waiting.entry
        return Verdict(
            error,
            absent,
            f"{entry.text()}: {said}",
            n=entry.number,
            operation=entry.kind,
            elapsed=waiting.seconds,
            phase=entry.phase,
        )

    def _resume(self, rank: Rank, sequence: int, pairs: int, epoch: int) -> None:
        """Let a rank go on after a failure that all survived, from numbers that all agreed on."""
        if rank.reader is None or epoch <= rank.epoch:
            return
        if epoch > self._epoch:
            self._compare_anew()
        rank.reader.floor, rank.reader.pairs_floor, rank.epoch = sequence, pairs, epoch
        for other in self._ranks.values():
            if other.death is not None:
                # Told by its number before, where it died while the others agreed.
                self._judge(replace(other.death, lost=(other.number,)), epoch)
        for number, text in self._elsewhere.of("gone").items():
            self._judge(Verdict("PeerLostError", (number,), text), epoch)

    def _begin(self, survivors: Sequence[int]) -> None:
        """Give the ranks that go on new numbers, in their old order; the others are no ranks any more."""
        new = {old: number for number, old in enumerate(survivors)}
        self._left_out += [rank for number, rank in self._ranks.items() if number not in new]
        self._descent = self._descent.shrunk(survivors)
        self._elsewhere.go_on(survivors)
        self._ranks = {new[old]: rank for old, rank in self._ranks.items() if old in new}
        for number, rank in self._ranks.items():
            rank.number = number
        who = {str(number): self._descent.who(number, self._config["host"]) for number in self._ranks}
        self._config = {**self._config, "name": self._descent.name, "who": who}
        ranks = list(self._ranks.values())
        self._dead = [rank for rank in self._dead if rank in ranks]
        self._compare_anew()
        self._compare_across()
        self._recordings.go_on(self._descent, len(survivors))
        self.__dict__.pop("_older", None)


def main() -> None:
    """Detach from the rank that started this, then watch."""
    config = json.load(sys.stdin)
    # A launcher may have bound that rank, and so this process, to one core.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    # Nobody's child: no zombie, and nothing for the rank's own wait().
    if os.fork():
        os._exit(0)
    os.chdir("/")
    for one in signal.valid_signals() - _OWN_FAULTS:
        # Launchers and schedulers send them to whole jobs: this process ends with its last rank.
        with contextlib.suppress(OSError, ValueError):
            signal.signal(one, signal.SIG_IGN)
    # Some descriptors a rank.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    Watcher(config).run()
