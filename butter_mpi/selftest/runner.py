"""One rank's run: start, checks with one outcome on every rank, receipt, one exit status."""

from __future__ import annotations

import datetime
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from butter_mpi import bootstrap
from butter_mpi.communicator import Communicator
from butter_mpi.environment import c_environment
from butter_mpi.errors import CommunicatorBrokenError, CUDAError, ReceiptError
from butter_mpi.policy import policy_values
from butter_mpi.receipt import Receipt, build
from butter_mpi.selftest import receipts, report, start
from butter_mpi.selftest.catalogue import CHECKS
from butter_mpi.selftest.checks import Check, Context, Types
from butter_mpi.selftest.console import one_line, say
from butter_mpi.selftest.options import FAILED, PASSED, USAGE, Options
from butter_mpi.selftest.places import place_of
from butter_mpi.selftest.start import Phases, Refused, Together

__all__ = ["run"]

_MOST_FACTS = 5
_LONGEST_FACT = 500
_SETTLE_SECONDS = 5.0
_CUDA_OUT_OF_MEMORY = 2


Instead = Callable[[bool], int]


@dataclass(frozen=True, slots=True)
class _Job:
    """What one rank was started with."""

    options: Options
    usage: str
    speaks: bool
    policy_set: dict[str, str]
    began: float
    when: str
    out: TextIO | None
    json_out: TextIO | None
    instead: Instead | None


def run(options: Options, usage: str, speaks: bool, policy_set: dict[str, str], instead: Instead | None = None) -> int:
    """Run on this rank and return its exit status.

    Parameters
    ----------
    options : Options
        What was asked for; the defaults where `usage` says what is wrong with it.
    usage : str
        What is wrong with this rank's arguments; empty: nothing.
    speaks : bool
        Whether this is rank 0 by the launcher's variables, which has printed its `usage`.
    policy_set : dict of str to str
        The policy variables that were set here.
    instead : callable, optional
        What to do instead of the checks, without a communicator, once all ranks are known to want the same; it is told
        whether this rank prints, and returns the exit status.
    """
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    out, json_out = _outputs(options.json)
    job = _Job(options, usage, speaks, policy_set, time.monotonic(), when, out, json_out, instead)
    phases = Phases()
    seconds = bootstrap.start_deadline()
    try:
        with phases.measured("mpi"):
            mpi = start.load_mpi(seconds)
    except Refused as refused:
        if instead is not None:
            return instead(speaks)
        sys.stderr.write(f"butter_mpi.selftest: {refused.text}\n")
        return USAGE if usage else refused.status
    try:
        return _assembled(job, phases, mpi, Together(mpi, seconds))
    except BaseException as error:
        return _crashed(mpi, error)


def _outputs(json_asked: bool) -> tuple[TextIO | None, TextIO | None]:
    """Return where lines go and where the receipt goes; with ``--json`` not even a library gets to stdout.

    ``None`` is a stdout that was closed before this process began.
    """
    if not json_asked:
        return sys.stdout, sys.stdout
    stdout: TextIO | None = sys.stdout
    if stdout is not None:
        stdout.flush()
    kept = None if stdout is None else os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return sys.stderr, kept


def _crashed(mpi: Any, error: BaseException) -> int:
    """Print this rank's traceback and end every rank: the others would wait for this one in MPI_Finalize."""
    world = mpi.COMM_WORLD
    text = "interrupted" if isinstance(error, KeyboardInterrupt) else "".join(traceback.format_exception(error))
    sys.stderr.write(start.prefixed(f"rank {world.rank}/{world.size}", text))
    sys.stderr.flush()
    if world.size > 1:
        bootstrap.abort_job(FAILED)
    return FAILED


def _assembled(job: _Job, phases: Phases, mpi: Any, together: Together) -> int:
    try:
        with phases.measured("options"):
            start.agree_on_options(together, job.usage, job.options.common())
        if job.instead is not None:
            return _without_checks(job.instead, job.speaks, together)
        with phases.measured("communicator"):
            communicator = start.connect(together, mpi, job.options)
    except Refused as refused:
        # Where MPI made N worlds of one rank out of a job of N, each of them is rank 0.
        speaks = job.speaks if together.size == 1 else together.rank == 0
        if speaks and not job.usage:
            sys.stderr.write(f"butter_mpi.selftest: {refused.text}\n")
        together.close()
        return refused.status
    with communicator:
        status = _Run(job, phases, mpi, together, communicator).whole()
    together.close()
    return status


def _without_checks(instead: Instead, speaks: bool, together: Together) -> int:
    # Where MPI made N worlds of one rank out of a job of N, the launcher knows better who is rank 0.
    status = instead(speaks if together.size == 1 else together.rank == 0)
    status = max(map(int, together.gather(status, "agreeing on the status")))
    together.close()
    return status


class _Run:
    """The checks of one communicator, and what is told of them."""

    def __init__(self, job: _Job, phases: Phases, mpi: Any, together: Together, communicator: Communicator) -> None:
        self._job, self._phases, self._mpi = job, phases, mpi
        self._together, self._comm = together, communicator
        self._checks: list[dict[str, Any]] = []
        self._facts: dict[str, Any] = {}
        self._found: Sequence[str] = ()
        self._place = place_of(communicator)
        self._types = Types()
        self._unsaid: OSError | None = None

    def whole(self) -> int:
        """Run everything; the status is the same on every rank."""
        try:
            self._prepare()
            for check in self._chosen():
                self._check(check)
            self._place.close()
        except CommunicatorBrokenError as error:
            self._stopped(error)
        failed = any(check["outcome"] == "failed" for check in self._checks)
        problems = self._together.gather(self._finish("failed" if failed else "passed"), "agreeing on the status")
        return FAILED if failed or any(problems) else PASSED

    def _prepare(self) -> None:
        comm = self._comm
        comm.gather_records()
        own_seed = self._job.options.seed
        seed = comm.all_gather_json(secrets.randbits(63) if own_seed is None else own_seed)[0]
        policy = {"values": policy_values(c_environment()), "set": self._job.policy_set}
        self._facts = {
            "plane": report.plane_facts(comm),
            "versions": report.all_versions(self._mpi),
            "policy": report.policy_facts(comm.all_gather_json(policy)),
            "seed": seed,
            "found": report.transports(comm),
        }
        self._types = Types.of(comm)
        self._say(report.head(self._facts, comm, self._types.missing))

    def _chosen(self) -> list[Check]:
        return [check for check in CHECKS if self._job.options.faults or not check.faults]

    def _say(self, text: str) -> None:
        if self._comm.rank == 0 and self._unsaid is None:
            self._unsaid = say(self._job.out, f"{text}\n")

    def _check(self, check: Check) -> None:
        context = Context(
            self._comm,
            self._place,
            self._types,
            self._facts["seed"],
            check.number,
            lambda: bootstrap.init(self._mpi.COMM_SELF),
        )
        reason = check.hindrance(context)
        began, self._found = time.monotonic(), ()
        self._found = () if reason else _few(check.run(context))
        everyone = [[]] if reason else self._comm.all_gather_json(self._found)
        failures = [{"rank": rank, "facts": facts} for rank, facts in enumerate(everyone) if facts]
        self._done(check, reason, time.monotonic() - began, failures)

    def _done(self, check: Check, reason: str, seconds: float, failures: list[dict[str, Any]]) -> None:
        outcome = "failed" if failures else "not run" if reason else "passed"
        row = {"number": check.number, "id": check.id, "title": check.title, "outcome": outcome, "reason": reason}
        self._checks.append({**row, "seconds": round(seconds, 6), "failures": failures})
        self._say(report.check_lines(self._checks[-1]))

    def _stopped(self, error: CommunicatorBrokenError) -> None:
        """Tell of a communicator that broke under a check, write what is known, and end the job.

        MPI_Finalize would wait for a rank that may be lost, so the job cannot end in the ordinary way.
        """
        done = len(self._checks)
        for check in self._chosen()[done:]:
            first = len(self._checks) == done
            facts = [*self._found, f"the communicator broke: {error}"]
            failures = [{"rank": self._comm.rank, "facts": facts}] if first else []
            self._done(check, "" if first else "the communicator broke", 0.0, failures)
        where = f"check {self._checks[done]['id']}" if self._checks[done:] else "the start"
        reasons = [*self._found, f"the communicator is poisoned: {error}"]
        self._together.tell(f"selftest stopped in {where}: {'; '.join(reasons)}")
        problem = self._finish("broken") if self._facts else ""
        # Rank 0 writes the receipt: give it the time, unless it is the lost one.
        self._together.settle(problem, _SETTLE_SECONDS)
        bootstrap.abort_job(FAILED)

    def _finish(self, status: str) -> str:
        """Say the end and write the receipt, on rank 0; returns what prevented that."""
        if self._comm.rank:
            return ""
        seconds = time.monotonic() - self._job.began
        try:
            self._write(self._receipt(status, seconds))
        except ReceiptError as error:
            sys.stderr.write(f"butter_mpi.selftest: {error}\n")
            return str(error)
        self._say(report.ending(status, self._checks, self._comm.plane, self._comm.world_size, seconds))
        if self._unsaid is None:
            return ""
        text = f"stdout cannot be written: {self._unsaid.strerror}"
        sys.stderr.write(f"butter_mpi.selftest: {text}\n")
        return text

    def _receipt(self, status: str, seconds: float) -> Receipt:
        timings = {
            "start": {**self._phases.seconds, **{name: round(s, 6) for name, s in self._comm.start_seconds.items()}},
            "checks": round(sum(check["seconds"] for check in self._checks), 6),
            "total": round(seconds, 6),
        }
        return build(
            records=self._comm.records,
            when=self._job.when,
            command=sys.orig_argv,
            status=status,
            checks=self._checks,
            timings=timings,
            preflight=self._comm.preflight.to_json(),
            **self._facts,
        )

    def _write(self, receipt: Receipt) -> None:
        path: Path | None = self._job.options.receipt
        if path is not None:
            receipts.write(receipt, path)
            self._say(f"receipt: {one_line(str(path))}")
        if self._job.options.json:
            receipts.check(receipt.to_json(), "the receipt of this run")
            self._unsaid = self._unsaid or say(self._job.json_out, receipt.text())


def _few(facts: Iterable[str]) -> Sequence[str]:
    """Return the first facts, cut to a length; all of them are drawn, since a check goes on while it yields.

    Memory that cannot be had ends the check on this rank, and is its first fact.
    """
    kept: list[str] = []
    dropped = 0
    try:
        for fact in facts:
            if len(kept) < _MOST_FACTS:
                kept.append(fact[:_LONGEST_FACT])
            else:
                dropped += 1
    except (MemoryError, CUDAError) as error:
        if isinstance(error, CUDAError) and error.code != _CUDA_OUT_OF_MEMORY:
            raise
        kept.insert(0, f"ended early, no memory: {one_line(str(error))}"[:_LONGEST_FACT])
    return [*kept, f"and {dropped} more"] if dropped else kept
