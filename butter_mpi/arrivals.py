"""Who has come to a start, where it is overdue; and the end of a job of which a rank fails before it comes to any.

The first step of a start ends when every rank has come to it. Until then ranks have only the communicator of the
program, on which nothing of ours is sent while the start may still succeed: who is missing they ask one another once
the deadline of one of them is over, under a tag among the highest.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from butter_mpi.control import Overdue, Pause, Ticket, Watch, duplicate
from butter_mpi.ending import ENDING, flush, say, uncaught
from butter_mpi.environment import c_environment
from butter_mpi.errors import text_of
from butter_mpi.findings import ranks_text
from butter_mpi.outcome import OUTCOME
from butter_mpi.recovery import started_by

__all__ = ["duplicate_once_all_came", "end_before_any_start"]

_WARN_SECONDS = 5.0
_COUNT_SECONDS, _ANSWER_SECONDS = 0.4, 1.5
_LONGEST_TEXT = 500
_ASK, _WHO, _HERE, _MISSING = "ask", "who", "here", "missing"
# Far from what programs take for themselves.
_BELOW = 48611
_HYDRA = "hydra_pmi_proxy"


def duplicate_once_all_came(
    comm: Any, mpi: Any, watch: Watch, look: Callable[[], None] = lambda: None, *, who: str
) -> Any:
    """Return a duplicate of `comm`, which is made when every rank has come here.

    Parameters
    ----------
    comm : mpi4py communicator
        Of which; on it, ranks tell who is there once the start is overdue on one of them.
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
    """
    OUTCOME.came = True
    roll = _Roll(comm, mpi)
    warned = False

    def look_at_all() -> None:
        nonlocal warned
        look()
        roll.look()
        if not warned and not comm.rank and watch.elapsed > _WARN_SECONDS:
            warned = True
            say(f"{who}: start: has waited {watch.elapsed:.0f} s for other ranks to come to it")

    try:
        return duplicate(comm, mpi, watch, look_at_all)
    except Overdue as error:
        error.missing = roll.missing()
        raise


def end_before_any_start(mpi: Any) -> None:
    """At the exit of a process that came to no start: end the job if it is an exception that ends the process.

    The others may wait for it in a start, until their deadlines, and could be told of nothing.

    Parameters
    ----------
    mpi : module or None
        ``mpi4py.MPI``, started and not finalized; ``None``: this process has not started it, and the others wait in
        ``MPI_Init``, which nothing ends but the launcher.
    """
    error = uncaught()
    if error is None:
        return
    how, host = text_of(error)[:_LONGEST_TEXT], socket.gethostname()
    if mpi is None:
        _have_the_job_ended(how, host)
    elif mpi.COMM_WORLD.size > 1:
        who = f"rank {mpi.COMM_WORLD.rank}/{mpi.COMM_WORLD.size} on {host}"
        say(f"{who} ended by {how} before it came to init; the job is ended")
        logging.shutdown()
        ENDING.abort_job(1, mpi)


def _have_the_job_ended(how: str, host: str) -> None:
    """Have MPICH's launcher end the job, which it does not do by itself for a rank that fails before ``MPI_Init``.

    As other launchers do. Only for a process that it started itself: what a rank starts has the same environment.
    """
    env = c_environment()
    rank, size, descriptor = (env.get(f"PMI_{name}", "") for name in ("RANK", "SIZE", "FD"))
    parent = next(iter(started_by()), [""])[0]
    if os.path.basename(parent) != _HYDRA or not (size.isdigit() and int(size) > 1 and descriptor.isdigit()):
        return
    say(f"rank {rank}/{size} on {host} ended by {how} before MPI was started; the job is ended")
    logging.shutdown()
    flush()
    with contextlib.suppress(OSError):
        os.write(int(descriptor), b"cmd=abort exitcode=1\n")


class _Roll:
    """Who is in this step: whoever is overdue asks rank 0, which asks all, counts, and tells who is missing."""

    def __init__(self, comm: Any, mpi: Any) -> None:
        self._comm, self._mpi = comm, mpi
        highest = mpi.COMM_WORLD.Get_attr(mpi.TAG_UB)
        self._tag = max(highest - _BELOW, highest // 2)
        # What is left of an earlier start answers no question of this one.
        self._token = secrets.token_hex(8)
        self._counting: Watch | None = None
        self._here = {comm.rank}
        self._asked: dict[int, str | None] = {}
        self._named: list[int] | None = None
        self._told: list[int] | None = None
        self._sends: list[Ticket] = []

    def look(self) -> None:
        """Answer what others ask; rank 0 counts meanwhile."""
        for rank, body in self._messages():
            kind, token = body.get("kind"), body.get("token")
            if kind == _WHO:
                self._send([rank], _HERE, token)
            elif kind == _HERE and token == self._token:
                self._here.add(rank)
            elif kind == _MISSING:
                self._told = body["ranks"]
                self._named = self._told if token == self._token else self._named
            elif kind == _ASK:
                self._here.add(rank)
                self._asked[rank] = token
                self._count()
        if self._counting is not None and self._counting.tick():
            self._counting = None
            self._tell()

    def missing(self) -> str:
        """Return who has not come, as messages say it."""
        if self._comm.rank:
            self._send([0], _ASK, self._token)
        else:
            self._named = None
            self._count()
        watch, pause = Watch(_ANSWER_SECONDS), Pause()
        while self._named is None and not watch.tick():
            self.look()
            pause()
        named = self._told if self._named is None else self._named
        if named is None:
            return "rank 0, which asks the others, has not come or does not answer"
        return f"{ranks_text(named)} {'has' if len(named) == 1 else 'have'} not come" if named else ""

    def _count(self) -> None:
        """Ask every other rank whether it is here."""
        if self._counting is None:
            self._counting = Watch(_COUNT_SECONDS)
            self._send([rank for rank in range(self._comm.size) if rank != self._comm.rank], _WHO, self._token)

    def _tell(self) -> None:
        self._named = [rank for rank in range(self._comm.size) if rank not in self._here]
        for rank in self._here - {self._comm.rank}:
            self._send([rank], _MISSING, self._asked.get(rank), ranks=self._named)
        # Counted anew for whoever asks later.
        self._here, self._asked = {self._comm.rank}, {}

    def _send(self, to: Iterable[int], kind: str, token: str | None, **body: Any) -> None:
        payload = json.dumps({"kind": kind, "token": token, **body}).encode()
        with contextlib.suppress(self._mpi.Exception):
            for rank in to:
                self._sends.append(Ticket(payload, counts=False).start(self._comm.Isend, payload, rank, self._tag))

    def _messages(self) -> Iterator[tuple[int, dict[str, Any]]]:
        status = self._mpi.Status()
        with contextlib.suppress(self._mpi.Exception):
            while (message := self._comm.Improbe(self._mpi.ANY_SOURCE, self._tag, status)) is not None:
                buffer = bytearray(status.Get_count(self._mpi.BYTE))
                message.Recv(buffer)
                body = None
                with contextlib.suppress(ValueError):
                    body = json.loads(buffer)
                if isinstance(body, dict):
                    yield status.Get_source(), body
