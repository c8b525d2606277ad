"""Run a command line as a person does, with a time limit, and see that nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from helpers import processes
from helpers.job import GRACE, JobFailure, clean_environment
from helpers.watch import FolderWatch

NOBODY = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")


@dataclass(frozen=True)
class ScriptResult:
    """How a command ended."""

    rc: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Everything, for a message."""
        return f"status {self.rc}\n{self.out}\n--- stderr\n{self.err}"


class Script:
    """A running command; ``env`` is added to this process's environment, ``None`` takes a variable away."""

    def __init__(self, command: Sequence[str | Path], *, env: Mapping[str, str | None], cwd: Path) -> None:
        self.id = uuid.uuid4().hex
        self._before = processes.listing()
        merged: dict[str, str | None] = {**clean_environment(), "PYTHONPATH": None, processes.MARK: self.id, **env}
        self._process = subprocess.Popen(
            [os.fspath(part) for part in command],
            env={name: value for name, value in merged.items() if value is not None},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait(self, timeout: float) -> ScriptResult:
        """Wait for the end; fail if the time runs out or something is left."""
        try:
            out, err = self._process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as expired:
            self.kill()
            raise JobFailure(f"{expired.cmd} was cut after {timeout:g} s") from None
        result = ScriptResult(self._process.returncode, out, err)
        left = [f"process {pid}: {processes.command_line(pid)}" for pid in processes.await_all_gone(self.id, GRACE)]
        files = processes.left_behind(self._before)
        unforgiven = processes.sweep(files)
        left += files if result.rc == 0 and processes.alone() else unforgiven
        self.kill()
        if left:
            raise JobFailure("left behind:\n  " + "\n  ".join(left) + f"\n{result.text}")
        return result

    def await_file(self, file: Path, timeout: float) -> None:
        """Wait until a file is there; fail if the command ends or the time runs out before."""
        with FolderWatch(file.parent, self._process.pid) as watch:
            while not file.exists():
                came = watch.wait(timeout)
                if came != "changed" and not file.exists():
                    self.kill()
                    raise JobFailure(f"{came} before {file} was there")

    def interrupt(self) -> None:
        """Do what Ctrl-C does in a terminal."""
        os.killpg(self._process.pid, signal.SIGINT)

    def kill(self) -> None:
        """End every process of it at once, as a power cut would."""
        processes.kill_all(lambda: processes.marked(self.id))
        self._process.communicate()
        processes.sweep(processes.left_behind(self._before))


def run_script(
    command: Sequence[str | Path], *, cwd: Path, env: Mapping[str, str | None] | None = None, timeout: float = 60.0
) -> ScriptResult:
    """Run a command to its end."""
    return Script(command, env=env or {}, cwd=cwd).wait(timeout)
