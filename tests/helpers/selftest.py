"""The selftest as a job: on small data, with arguments of each rank's own and its exit status for all to see."""

from __future__ import annotations

import json
from typing import Any

from helpers.mpirun import JobResult, run_job

__all__ = ["MAIN", "arguments", "outcomes", "run_selftest", "statuses", "told"]

MAIN = """
import json, os, sys
from butter_mpi.selftest import checks, cli, collectives, devices, runner
collectives._LARGE = 65
{extra}
status = cli.main(json.loads(os.environ["BUTTER_MPI_TEST_ARGUMENTS"]))
print("status", status, file=sys.stderr)
sys.exit(status)
"""


def arguments(*words: str) -> dict[str, str]:
    """Return the variable that carries a rank's arguments."""
    return {"BUTTER_MPI_TEST_ARGUMENTS": json.dumps(words)}


def run_selftest(n: int, *words: str, extra: str = "", env: dict[str, str] | None = None, **how: Any) -> JobResult:
    """Run the selftest on small data."""
    given: dict[str, str | None] = {**arguments(*words), **(env or {})}
    return run_job(n, MAIN.format(extra=extra), env=given, timeout=how.pop("timeout", 40), **how)


def statuses(result: JobResult) -> list[str]:
    """Return each rank's exit status."""
    return [err.splitlines()[-1].removeprefix("status ") for err in result.rank_err]


def told(result: JobResult) -> list[str]:
    """Return what each rank wrote to stderr before its status."""
    return [err.rpartition("status ")[0] for err in result.rank_err]


def outcomes(text: str) -> dict[str, str]:
    """Return the outcome of each check by the printed lines."""
    rows = [line.split() for line in text.splitlines()]
    return {row[1]: row[2] for row in rows if len(row) > 3 and row[0].isdigit()}
