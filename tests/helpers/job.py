"""One job under a real launcher: start it, watch its ranks, harm one, end it, and see that nothing is left.

A job has a time limit of its own beside pytest, a mark by which every process of it is found, and its own HOME,
TMPDIR and working folder. Variables of launchers, NCCL and butter_mpi are not inherited from the person's shell. What
the MPI itself leaves in the shared folders is removed; it is forgiven where the job did not end well, or where other
people's jobs may have left it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from helpers import processes
from helpers.watch import FolderWatch

TESTS = Path(__file__).resolve().parents[1]
GRACE = 5.0

_FOREIGN = tuple(f"{name}_" for name in "BUTTER HYDRA MPI4PY MPICH MPIR MPI NCCL OMPI PMIX PMI PRTE SLURM".split())

Program = Path | str | Sequence[str]


class JobFailure(AssertionError):
    """The job did not end in time, ended too early, or left something behind."""


@dataclass(frozen=True)
class JobResult:
    """How a job ended: the launcher's status and output, every rank's output, and the seconds it took."""

    rc: int
    out: str
    rank_out: list[str]
    rank_err: list[str]
    seconds: float

    @property
    def text(self) -> str:
        """Everything that was written, for a message."""
        parts = [f"status {self.rc} after {self.seconds:.2f} s", self.out]
        for rank, (out, err) in enumerate(zip(self.rank_out, self.rank_err, strict=True)):
            parts += [f"--- rank {rank} stdout", out, f"--- rank {rank} stderr", err]
        return "\n".join(part for part in parts if part)


@dataclass(frozen=True)
class Plan:
    """What the ranks run, as which user (``None``: this one) and in which environment; ``None`` as a value: unset."""

    n: int
    program: Program
    python: str
    env: Mapping[str, str | None] = field(default_factory=dict)
    rank_env: Mapping[int, Mapping[str, str | None]] = field(default_factory=dict)
    unset: Sequence[str] = ()
    cwd: Path | None = None
    timeout: float = 60.0
    user: int | None = None

    def command(self, folder: Path) -> list[str]:
        """Return the command of every rank."""
        if isinstance(self.program, str):
            file = folder / "program.py"
            file.write_text(self.program)
            arguments = [str(file)]
        else:
            arguments = [str(self.program)] if isinstance(self.program, Path) else list(self.program)
        wrapper = [self.python, "-I", "-S", str(TESTS / "helpers" / "rank_exec.py"), str(folder)]
        return [*wrapper, self.python, *arguments]

    def ranks(self) -> dict[str, Any]:
        """Return what ``rank_exec`` has to apply."""
        cleared = [name for name, value in self.env.items() if value is None]
        return {"unset": [*self.unset, *cleared], "ranks": {str(r): dict(c) for r, c in self.rank_env.items()}}


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what would decide a test from outside."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    kept.pop("PYTHONUNBUFFERED", None)
    path = os.environ.get("PYTHONPATH")
    return {**kept, "PYTHONPATH": f"{TESTS}{os.pathsep}{path}" if path else str(TESTS)}


class Job:
    """A running job. Use it in a ``with``: leaving the block ends whatever is left of it."""

    _open: ClassVar[set[str]] = set()

    def __init__(self, launcher: Sequence[str], plan: Plan, env: Mapping[str, str]) -> None:
        self.plan = plan
        self.id = uuid.uuid4().hex
        self._open.add(self.id)
        self._before = processes.listing(plan.user)
        self.folder = Path(tempfile.mkdtemp(prefix=processes.FOLDER_PREFIX, dir="/tmp"))
        for name in ("home", "tmp", "cwd"):
            (self.folder / name).mkdir()
        (self.folder / "plan.json").write_text(json.dumps(plan.ranks()))
        # If pytest itself is killed, nobody but timeout(1) would end the job.
        limit = ["timeout", "--kill-after=5", f"{plan.timeout + 30:g}"]
        command = [*limit, *launcher, *plan.command(self.folder)]
        if plan.user is not None:
            for place in (self.folder, *self.folder.iterdir()):
                os.chown(place, plan.user, plan.user)
        self.started = time.monotonic()
        with (self.folder / "launcher.out").open("wb") as out:
            self._process = subprocess.Popen(
                command,
                env=self._environment(env),
                cwd=plan.cwd or self.folder / "cwd",
                user=plan.user,
                group=plan.user,
                extra_groups=None if plan.user is None else [],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _environment(self, launcher: Mapping[str, str]) -> dict[str, str]:
        own = {"HOME": str(self.folder / "home"), "TMPDIR": str(self.folder / "tmp"), processes.MARK: self.id}
        given = {name: value for name, value in self.plan.env.items() if value is not None}
        return {**clean_environment(), **own, **launcher, **given}

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._open.discard(self.id)
        processes.sweep(processes.left_behind(self._before, self.plan.user))
        shutil.rmtree(self.folder, ignore_errors=True)

    def read(self, rank: int, stream: str) -> str:
        """Return what a rank has written to ``"out"`` or ``"err"`` so far."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / f"rank{rank}.{stream}").read_text(errors="replace")
        return ""

    def pid(self, rank: int, timeout: float = 20.0) -> int:
        """Return the process id of a rank, waiting for its start."""
        file = self.folder / f"rank{rank}.pid"
        self._await(file.exists, f"the start of rank {rank}", timeout)
        return int(file.read_text())

    def wait_for(self, text: str, rank: int, timeout: float = 20.0) -> None:
        """Wait until a rank has written ``text`` to its stdout or stderr."""

        def written() -> bool:
            return text in self.read(rank, "out") or text in self.read(rank, "err")

        self._await(written, f"{text!r} from rank {rank}", timeout)

    def _await(self, happened: Callable[[], bool], what: str, timeout: float) -> None:
        end = time.monotonic() + timeout
        with FolderWatch(self.folder, self._process.pid) as watch:
            while not happened():
                came = watch.wait(end - time.monotonic())
                if came != "changed" and not happened():
                    reason = "the job ended" if came == "ended" else f"{timeout:g} s passed"
                    raise JobFailure(f"{reason} before {what}\n{self._result(self._process.poll()).text}")

    def signal(self, rank: int, number: int) -> float:
        """Send a signal to a rank; return the time of it by ``time.monotonic``."""
        os.kill(self.pid(rank), number)
        return time.monotonic()

    def signal_launcher(self, number: int) -> None:
        """Send a signal to the launcher, as a person or a batch system does."""
        self._process.send_signal(number)

    def wait(self, timeout: float | None = None) -> JobResult:
        """Wait for the end; fail if the time runs out, or if a process or a file is left."""
        timeout = self.plan.timeout if timeout is None else timeout
        # Popen's own wait looks at most every 50 ms: a tenth of what a short job takes.
        if self._process.poll() is None and not processes.await_exit(self._process.pid, timeout):
            self.kill()
            raise JobFailure(f"the job was cut after {timeout:g} s\n{self._result(None).text}")
        result = self._result(self._process.wait())
        self._nothing_left(result)
        return result

    def _result(self, rc: int | None) -> JobResult:
        seconds = time.monotonic() - self.started
        out = (self.folder / "launcher.out").read_text(errors="replace")
        ranks = range(self.plan.n)
        rank_out, rank_err = ([self.read(rank, stream) for rank in ranks] for stream in ("out", "err"))
        return JobResult(-1 if rc is None else rc, out, rank_out, rank_err, seconds)

    def _nothing_left(self, result: JobResult) -> None:
        left = [f"process {pid}: {processes.command_line(pid)}" for pid in processes.await_all_gone(self.id, GRACE)]
        self.kill()
        files = [*map(str, sorted((self.folder / "tmp").iterdir()))]
        files += processes.left_behind(self._before, self.plan.user)
        unforgiven = processes.sweep(files)
        # A job beside this one has files of its MPI there now.
        alone = processes.alone() and self._open == {self.id}
        left += files if result.rc == 0 and alone else unforgiven
        if left:
            raise JobFailure("the job left behind:\n  " + "\n  ".join(left) + f"\n{result.text}")

    def kill(self) -> None:
        """End every process of the job."""
        processes.kill_all(lambda: processes.marked(self.id))
        self._process.wait()
