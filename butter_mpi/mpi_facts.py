"""The MPI library that mpi4py would load and the mpirun on PATH: which they are, and whether they fit."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from butter_mpi.child import Untold, ask, output
from butter_mpi.launch import LaunchInfo, cannot_join, false_green, mpi_family

__all__ = ["mpi_facts"]

_INIT_SECONDS = 60.0
_MPI_CODE = """
import json, mpi4py
mpi4py.rc(initialize=False, finalize=False)
from mpi4py import MPI
from butter_mpi.mapped import mapped_files
print(json.dumps({"library": MPI.Get_library_version().strip("\\0\\n "), "files": sorted(mapped_files())}))
"""


def mpi_facts(info: LaunchInfo) -> dict[str, Any]:
    """Return which MPI library mpi4py would load, which mpirun is on PATH, whether they fit, and what the job says.

    MPI is started only where a launcher has started this process, and its MPI is that of mpi4py.

    Parameters
    ----------
    info : LaunchInfo
        The launcher.

    Returns
    -------
    dict
        Facts in words, and the list ``warnings``.
    """
    found: dict[str, Any] = {"warnings": []}
    library = version = ""
    told: dict[str, Any] = {}
    try:
        told = ask(_MPI_CODE, "loading mpi4py's MPI library")
        library = told["library"]
        files = [path for path in told["files"] if "/libmpi" in path]
        found |= {"library": _first_line(library), "library file": ", ".join(files)}
    except Untold as error:
        found["library"] = f"cannot tell: {error}"
    mpirun = shutil.which("mpirun") or shutil.which("mpiexec")
    try:
        version = output([mpirun, "--version"], "mpirun --version", outside=True) if mpirun else ""
        found["mpirun"] = f"{mpirun} ({mpi_family(version)}: {_first_line(version)})" if mpirun else "none on PATH"
    except Untold as error:
        found["mpirun"] = f"{mpirun}: cannot tell: {error}"
    if library and version:
        _match(found, mpi_family(library), mpi_family(version))
    if library:
        _job(found, info, library, told["files"])
    return found


def _match(found: dict[str, Any], library: str, mpirun: str) -> None:
    found["match"] = f"mpi4py runs on {library}, this mpirun is of {mpirun}"
    # Intel's mpirun and MPICH's start each other's programs; any other pair gives N jobs of one rank, or none.
    if "Open MPI" in (library, mpirun) and library != mpirun:
        beside = Path(sys.executable).parent / "mpirun"
        advice = f"use {beside}" if beside.exists() else "put the mpirun of that MPI first on PATH"
        found["warnings"].append(f"{found['match']}: it would not start one job of N ranks; {advice}")


def _first_line(text: str) -> str:
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return next((line for line in lines if any(c.isdigit() for c in line)), lines[0] if lines else "")


def _job(found: dict[str, Any], info: LaunchInfo, library: str, mapped: Sequence[str]) -> None:
    """Under a launcher, what MPI itself says of the job."""
    cause, remedy = false_green(info, library)
    if info.claimed_size is None:
        found["job"] = "this process was not started by a launcher; MPI_Init was not called"
    elif cannot_join(info, library, mapped) or _foreign(info, mpi_family(library)):
        found["job"] = "MPI_Init was not called: it would abort, or give each process a job of its own"
        found["warnings"].append(f"{cause}; {remedy}")
    else:
        world = _world()
        found["job"] = f"rank {world.rank} of {world.size} (launcher: {info.claimed_size} ranks)"
        if info.claimed_size > world.size:
            found["warnings"].append(
                f"MPI says {world.size}, the launcher {info.claimed_size} ranks: {cause}; {remedy}"
            )


def _foreign(info: LaunchInfo, family: str) -> bool:
    """Whether a library is of another family than the mpirun; what is true of MPICH under PMIx is asked elsewhere."""
    if info.launcher not in ("openmpi", "mpich") or (info.launcher, family) == ("openmpi", "MPICH"):
        return False
    return (info.launcher == "openmpi") != (family == "Open MPI")


def _world() -> Any:
    """MPI_Init waits for every rank and holds the interpreter lock; only a signal's default action can end it."""
    previous = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(_INIT_SECONDS))
    from mpi4py import MPI

    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)
    return MPI.COMM_WORLD
