"""One pytest session on several ranks: its rounds, who waits how long in them, and how all leave together."""

from __future__ import annotations

import atexit
import math
import os
import signal
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, NoReturn

import pytest

from butter_mpi.agreement import Message, Rounds
from butter_mpi.findings import ranks_text

if TYPE_CHECKING:
    from butter_mpi.ending import Ending

__all__ = ["SharedSession"]

_FIRST_WARNING = 5.0


class _Patience:
    """How long one rank waits in one round, and what it says meanwhile."""

    def __init__(self, session: SharedSession, message: Message) -> None:
        self._session, self._message, self._failing = session, message, bool(message["failing"])
        self._limit = session.agree_seconds if self._failing else session.late_seconds
        self._speak_at = min(1.0, self._limit / 2) if self._failing else _FIRST_WARNING

    def __call__(self, said: dict[int, Message], elapsed: float) -> None:
        missing = [rank for rank in range(self._session.size) if rank not in said]
        if missing and elapsed >= self._speak_at:
            self._speak_at = float("inf") if self._failing else 2 * self._speak_at
            self._speak(said, missing, elapsed)
        if missing and elapsed >= self._limit:
            self._session.leave(
                f"{self._message['at']}: {ranks_text(missing)} did not come to its end within {self._limit:g} s; "
                "ending the job"
            )

    def _speak(self, said: dict[int, Message], missing: list[int], elapsed: float) -> None:
        session, at = self._session, self._message["at"]
        if self._failing:
            session.tell(
                f"{self._message['text']}\n{at}: {self._message['outcome']} here, {ranks_text(missing)} still in it; "
                f"waiting up to {self._limit:g} s (--mpi-agree-seconds) before the job is ended"
            )
        elif session.rank == min(said) and not any(message["failing"] for message in said.values()):
            session.tell(f"{at}: waiting for {ranks_text(missing)} for {elapsed:.0f} s")


class SharedSession:
    """The session that this rank shares with the others.

    Parameters
    ----------
    config : pytest.Config
        Of this session.
    rounds : Rounds
        The other ranks.
    agree_seconds : float
        Seconds that a rank whose test failed waits for the others.
    late_seconds : float
        Seconds that a rank whose test passed waits for the others.
    ending : Ending
        Ends every rank of the job, and is told when all ranks have come to their end.
    """

    def __init__(
        self,
        config: pytest.Config,
        rounds: Rounds,
        agree_seconds: float,
        late_seconds: float,
        ending: Ending,
    ) -> None:
        self.rank, self.size = rounds.rank, rounds.size
        self.agree_seconds, self.late_seconds = agree_seconds, late_seconds
        self.over = False
        self.status = 0
        self.reason = ""
        self._config, self._rounds, self._ending = config, rounds, ending
        self._pid = os.getpid()
        atexit.register(self._last_round)

    def tell(self, text: str) -> None:
        """Write to the real stderr at once, each line with this rank before it."""
        data = "".join(f"[rank {self.rank}/{self.size}] {line}\n" for line in text.splitlines())
        capture = self._config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            sys.stderr.write(data)
            sys.stderr.flush()

    def leave(self, why: str) -> NoReturn:
        """End the job on every rank, saying why."""
        self.tell(why)
        self._ending.abort_job(self.status or 1)

    def meet(
        self, kind: str, at: str, outcome: str, *, line: str = "", text: str = "", failing: bool = False
    ) -> list[Message]:
        """Hold one round and return what every rank said.

        Parameters
        ----------
        kind : str
            What this rank is at: a phase, a check, the collection, the end.
        at : str
            The same in words; it must be equal on all ranks.
        outcome, line, text : str
            How it went, why in one line, and in full.
        failing : bool, default False
            Whether this rank may have left the others in a collective.

        Returns
        -------
        list of dict
            One message a rank, with these names as keys.

        Raises
        ------
        pytest.exit.Exception
            A rank has ended its session, and this one has not.
        """
        if self.over and kind != "end":
            pytest.exit(self.reason, returncode=self.status)
        message = {"kind": kind, "at": at, "outcome": outcome, "line": line, "text": text, "failing": failing}
        said = self._rounds.hold(message, _Patience(self, message))
        ended = [rank for rank, other in enumerate(said) if other["kind"] == "end"]
        if ended and kind != "end":
            why = f"{ranks_text(ended)} of {self.size} ended the session: {said[ended[0]]['line']}"
            self.quit(why, int(said[ended[0]]["outcome"]))
        return said

    def quit(self, reason: str, status: int) -> NoReturn:
        """End this rank's session; every rank does so after the same round."""
        self.over, self.reason, self.status = True, reason, status or 1
        pytest.exit(reason, returncode=self.status)

    def end(self, status: int, reason: str, *, failing: bool) -> int:
        """End the session with the others.

        Parameters
        ----------
        status : int
            This rank's exit status.
        reason : str
            Why, where it is not the plain end of the tests.
        failing : bool
            Whether others may still be inside a test.

        Returns
        -------
        int
            The exit status, with which also a rank leaves that found nothing wrong itself.
        """
        if not self.over:
            self.over, self.status = True, status
            line = (reason.splitlines() or [f"exit status {status}"])[0]
            if self.rank and reason.count("\n"):
                self.tell(reason)
            said = self.meet("end", "the session", str(status), line=line, failing=failing)
            self.status = status or max(int(other["outcome"]) for other in said if other["kind"] == "end")
        return self.status

    def _last_round(self) -> None:
        """See every rank to the end of its process; what is left then is MPI_Finalize, under an alarm."""
        if os.getpid() != self._pid or self._rounds.finished():
            return
        sys.stdout.flush()
        sys.stderr.flush()
        at = f"the process, after the session with exit status {self.status}"
        message = {"kind": "last", "at": at, "failing": False}
        self._rounds.hold(message, _Patience(self, message))
        self._ending.met(self.status)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(math.ceil(self.late_seconds))
