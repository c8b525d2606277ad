"""Asking a child process what could harm this one: it may be killed, hang or end by a traceback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["Untold", "ask", "output"]

_SECONDS = 30.0
_OWN_ERROR = re.compile(r"^butter_mpi\.errors\.\w+: ")
_OF_A_JOB = ("OMPI_", "OPAL_", "PMIX_", "PRTE_", "PMI_", "HYDRA_", "MPI_LOCAL")


class Untold(Exception):
    """What was asked cannot be told; the text says why."""


def output(command: Sequence[str], what: str, *, merge: bool = False, outside: bool = False) -> str:
    """Return what a command prints.

    Parameters
    ----------
    command : sequence of str
        The command.
    what : str
        What it does, for messages.
    merge : bool, default False
        Whether stderr belongs to the answer.
    outside : bool, default False
        Whether to hide from it that this process is a rank of a job.

    Returns
    -------
    str
        Its stdout.

    Raises
    ------
    Untold
        It did not start, hung, was killed or failed.
    """
    env = {name: value for name, value in os.environ.items() if not (outside and name.startswith(_OF_A_JOB))}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merge else subprocess.PIPE,
            env=env,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Untold(f"{what} gave no answer within {_SECONDS:g} s") from None
    except OSError as error:
        raise Untold(f"{what} cannot be started: {error.strerror}") from None
    if done.returncode < 0:
        raise Untold(f"{what} was ended by {signal.Signals(-done.returncode).name}")
    if done.returncode:
        raise Untold(_reason(done.stderr or done.stdout, what))
    return done.stdout


def _reason(said: str, what: str) -> str:
    """Return the last line of a traceback, or of what else was written; our own errors are whole sentences."""
    lines = [line for line in said.splitlines() if line and not line[0].isspace()] or ["it says nothing"]
    return _OWN_ERROR.sub("", lines[-1]) if _OWN_ERROR.match(lines[-1]) else f"{what} failed: {lines[-1]}"


def ask(code: str, what: str) -> Any:
    """Return the JSON value that a piece of Python prints last.

    Parameters
    ----------
    code : str
        The program.
    what : str
        What it does, for messages.

    Returns
    -------
    object
        The value.

    Raises
    ------
    Untold
        It did not start, hung, was killed or failed.
    """
    return json.loads(output([sys.executable, "-c", code], what).splitlines()[-1])
