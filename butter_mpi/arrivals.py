"""Who has come to a start, and who never will: told over MPI, before there is a communicator of our own.

The first step of a start ends when every rank has come to it. Until then ranks have only the communicator of the
program, and its highest tag: each tells rank 0 that it is there, so that rank 0 can name who is not, to everybody.
A rank that ends before it came to any start, by an exception or with another status than 0, tells all others at its
exit. The communicator itself is left without a message of ours once a start has taken this step.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable
from typing import Any

from butter_mpi.control import Overdue, Pause, Ticket, Watch, duplicate
from butter_mpi.ending import say, uncaught
from butter_mpi.environment import c_environment
from butter_mpi.errors import StartError, text_of
from butter_mpi.findings import ranks_text
from butter_mpi.outcome import OUTCOME
from butter_mpi.recovery import started_by

__all__ = ["ARRIVAL", "duplicate_once_all_came", "tell_of_the_end"]

ARRIVAL = "arrival"
"""The phase of an error that tells of a rank which ended before it came to a start."""

_WARN_SECONDS = 5.0
_ANSWER_SECONDS = 1.0
_EXIT_SECONDS = 0.2
_LONGEST_TEXT = 500
_MOST_NAMED = 1000
_HERE, _ASK, _MISSING, _GONE = "here", "ask", "missing", "gone"
_STARTS, _ENDS = 0, 1
"""How far their tags are below the highest one."""
_KEYS: list[int] = []
_STEP = "duplicating the communicator"
_HYDRA = "hydra_pmi_proxy"
# By rank of all, what those that ended before they came to a start have said.
_ENDED: dict[int, str] = {}


def duplicate_once_all_came(
    comm: Any, mpi: Any, watch: Watch, look: Callable[[], None] = lambda: None, *, who: str
) -> Any:
    """Return a duplicate of `comm`, which is made when every rank has come here.

    Parameters
    ----------
    comm : mpi4py communicator
        Of which; on it, ranks tell who is there.
    mpi : module
        ``mpi4py.MPI``.
    watch : Watch
        What ends the wait.
    look : callable
        Looks at what else may end it, and raises that.
    who : str
        This rank, as messages name it.

    Returns
    -------
    mpi4py communicator
        Its errors are returned, not fatal.

    Raises
    ------
    Overdue
        Not every rank came in time; ``missing`` names the others.
    StartError
        A rank has said that it ends and never comes.
    """
    roll = _Roll(comm, mpi, who)
    roll.come()

    def look_at_all() -> None:
        look()
        roll.look(watch)

    try:
        twin = duplicate(comm, mpi, watch, look_at_all)
    except Overdue as error:
        error.missing = roll.missing()
        raise
    roll.end()
    return twin


def tell_of_the_end(mpi: Any) -> None:
    """At the exit of a process that came to no start: tell the others of it, if it ends by a failure.

    Parameters
    ----------
    mpi : module or None
        ``mpi4py.MPI``, started and not finalized; ``None``: this process has not started it, and the others wait in
        ``MPI_Init``, which nothing ends but the launcher.
    """
    error, status = uncaught(), OUTCOME.last_status
    if mpi is None:
        if error is not None:
            _have_the_job_ended(text_of(error)[:_LONGEST_TEXT])
    elif mpi.COMM_WORLD.size > 1 and (error is not None or status):
        how = f"with status {status}" if error is None else f"by {text_of(error)[:_LONGEST_TEXT]}"
        who = f"rank {mpi.COMM_WORLD.rank}/{mpi.COMM_WORLD.size} on {socket.gethostname()}"
        _tell_all(mpi, f"{who} ended {how} before it came to init: look at what it wrote")


def _tell_all(mpi: Any, text: str) -> None:
    world = mpi.COMM_WORLD
    with contextlib.suppress(mpi.Exception):
        post = _Post(world, mpi, _ENDS)
        post.send([rank for rank in range(world.size) if rank != world.rank], _GONE, text=text)
        post.wait(_EXIT_SECONDS)


def _have_the_job_ended(how: str) -> None:
    """Have MPICH's launcher end the job, which it does not do by itself for a rank that fails before ``MPI_Init``.

    As other launchers do. Only for a process that it started itself: what a rank starts has the same environment.
    """
    env = c_environment()
    rank, size, descriptor = (env.get(f"PMI_{name}", "") for name in ("RANK", "SIZE", "FD"))
    parent = next(iter(started_by()), [""])[0]
    if os.path.basename(parent) != _HYDRA or not (size.isdigit() and int(size) > 1 and descriptor.isdigit()):
        return
    say(f"rank {rank}/{size} on {socket.gethostname()} ended by {how} before MPI was started; the job is ended")
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(OSError):
        os.write(int(descriptor), b"cmd=abort exitcode=1\n")


class _Post:
    """Messages on a communicator that is not ours, under one of its highest tags: what is for others stays there."""

    def __init__(self, comm: Any, mpi: Any, below: int) -> None:
        self.comm, self._mpi = comm, mpi
        self._tag = mpi.COMM_WORLD.Get_attr(mpi.TAG_UB) - below
        self._sends: list[Ticket] = []

    def send(self, to: Iterable[int], kind: str, **body: Any) -> None:
        """Begin to send a message to ranks."""
        payload = json.dumps({"kind": kind, **body}).encode()
        for rank in to:
            self._sends.append(Ticket(payload, counts=False).start(self.comm.Isend, payload, rank, self._tag))

    def take(self) -> Iterable[tuple[int, dict[str, Any]]]:
        """Take what has arrived: the rank that sent it, and the message."""
        status = self._mpi.Status()
        while (message := self.comm.Improbe(self._mpi.ANY_SOURCE, self._tag, status)) is not None:
            buffer = bytearray(status.Get_count(self._mpi.BYTE))
            message.Recv(buffer)
            yield status.Get_source(), json.loads(buffer)

    def wait(self, seconds: float) -> None:
        """Wait for a while until what was sent has left."""
        watch, pause = Watch(seconds), Pause()
        while not all(send.over() for send in self._sends) and not watch.tick():
            pause()


class _Starts:
    """What a communicator has seen of starts: how many there were, and who has come to a later one already."""

    def __init__(self) -> None:
        self.count = 0
        self.early: dict[int, int] = {}

    @classmethod
    def of(cls, comm: Any, mpi: Any) -> _Starts:
        """Return that of a communicator, which has it as an attribute."""
        if not _KEYS:
            _KEYS.append(mpi.Comm.Create_keyval())
        found = comm.Get_attr(_KEYS[0])
        if found is None:
            found = cls()
            comm.Set_attr(_KEYS[0], found)
        assert isinstance(found, cls)
        return found


class _Roll:
    """What a rank knows of who has come; rank 0 hears it from each, and the others ask rank 0."""

    def __init__(self, comm: Any, mpi: Any, who: str) -> None:
        self._comm, self._who, self._error = comm, who, mpi.Exception
        self._post = _Post(comm, mpi, _STARTS)
        # Who ends tells it in the communicator of all.
        self._exits = _Post(mpi.COMM_WORLD, mpi, _ENDS)
        self._everywhere = mpi.Group.Translate_ranks(comm.group, None, mpi.COMM_WORLD.group)
        self._starts = _Starts.of(comm, mpi)
        self._starts.count += 1
        self._number = self._starts.count
        self._here = {comm.rank, *(rank for rank, number in self._starts.early.items() if number == self._number)}
        self._named: list[int] | None = None
        self._warned = False

    def come(self) -> None:
        """Tell rank 0 that this one is there."""
        OUTCOME.came = True
        if self._comm.rank:
            self._send([0], _HERE)

    def look(self, watch: Watch) -> None:
        """Take what others say.

        Raises
        ------
        StartError
            A rank of this start never comes.
        Overdue
            Rank 0 has given up waiting.
        """
        self._take()
        for rank in self._everywhere:
            if rank in _ENDED:
                raise StartError(f"{self._who}: start: {_ENDED[rank]}", phase=ARRIVAL, elapsed=watch.elapsed)
        if self._named is not None and self._comm.rank:
            raise Overdue(_STEP, watch.elapsed)
        if not self._comm.rank and not self._warned and watch.elapsed > _WARN_SECONDS:
            self._warned = True
            names = ranks_text(self._absent)
            say(f"{self._who}: start: has waited {watch.elapsed:.0f} s for {names}, not come yet")

    def missing(self) -> str:
        """Return who has not come; rank 0 tells those who have."""
        if not self._comm.rank:
            self._named = self._absent
            self._send(sorted(self._here - {0}), _MISSING, ranks=self._named)
            self._post.wait(_EXIT_SECONDS)
        elif self._named is None:
            self._ask()
        if self._named is None:
            return "rank 0, which knows who is missing, has not come or does not answer"
        return f"{ranks_text(self._named)} {'has' if len(self._named) == 1 else 'have'} not come" if self._named else ""

    def end(self) -> None:
        """Take what every rank has sent before it came: nothing stays behind on a communicator that is not ours."""
        watch, pause = Watch(_ANSWER_SECONDS), Pause()
        while not self._comm.rank and self._absent and not watch.tick():
            self._take()
            pause()
        # Rank 0 has taken what this one has sent: the requests are given back.
        self._post.wait(_ANSWER_SECONDS)

    @property
    def _absent(self) -> list[int]:
        return [rank for rank in range(self._comm.size) if rank not in self._here][:_MOST_NAMED]

    def _send(self, to: Iterable[int], kind: str, **body: Any) -> None:
        self._post.send(to, kind, start=self._number, **body)

    def _ask(self) -> None:
        self._send([0], _ASK)
        watch, pause = Watch(_ANSWER_SECONDS), Pause()
        while self._named is None and not watch.tick():
            self._take()
            pause()

    def _take(self) -> None:
        # Where a rank of all is lost, MPI with fault tolerance refuses to look: it may be none of this start.
        with contextlib.suppress(self._error):
            for rank, body in self._exits.take():
                _ENDED[rank] = body["text"]
        for rank, body in self._post.take():
            if body["start"] > self._number:
                # It has left this start, by an error of its own.
                self._starts.early[rank] = body["start"]
            elif body["start"] < self._number:
                # Of a start that this rank has left.
                continue
            elif body["kind"] == _MISSING:
                self._named = body["ranks"]
            else:
                self._here.add(rank)
                if body["kind"] == _ASK:
                    self._send([rank], _MISSING, ranks=self._absent)
