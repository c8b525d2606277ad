"""Whether survivors can go on after the loss of a rank: what the launcher and MPI do then."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from butter_mpi.launch import LaunchInfo, mpi_family

__all__ = ["cannot_recover", "fault_tolerant", "leaves_survivors", "left_alone", "started_by"]

_KEEPS_SURVIVORS = ("--enable-recovery", "--continuous")
_LAUNCHERS = ("mpirun", "mpiexec", "prterun", "prun", "orterun")
_MOST_ANCESTORS = 8
_ULFM = "start it with Open MPI 5 and its fault tolerance: mpirun --with-ft ulfm ..."
_USE = "start it with Open MPI: mpirun --with-ft ulfm ..., or mpirun --enable-recovery ... for the nccl plane"


def fault_tolerant(env: Mapping[str, str]) -> bool:
    """Return whether Open MPI was started with its fault tolerance (``mpirun --with-ft ulfm``).

    Parameters
    ----------
    env : mapping of str to str
        The C environment.

    Returns
    -------
    bool
        False with every other MPI.
    """
    return env.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "enabled")


def leaves_survivors(env: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> bool:
    """Return whether Open MPI's launcher was told to leave the ranks alone that are left of a job.

    Parameters
    ----------
    env : mapping of str to str
        The C environment.
    ancestors : sequence of sequence of str
        As :func:`started_by` returns them.

    Returns
    -------
    bool
        Whether it was.
    """
    return fault_tolerant(env) or bool(left_alone(ancestors))


def left_alone(ancestors: Sequence[Sequence[str]]) -> bool | None:
    """Return whether Open MPI's launcher was told to leave survivors alone, as far as this process can see.

    Parameters
    ----------
    ancestors : sequence of sequence of str
        As :func:`started_by` returns them.

    Returns
    -------
    bool or None
        ``None``: no launcher is seen, as it runs on another node.
    """
    lines = _of_launchers(ancestors)
    return any(word in _KEEPS_SURVIVORS for line in lines for word in line) if lines else None


def started_by() -> list[list[str]]:
    """Return the command lines of this process's ancestors on this machine, nearest first.

    Returns
    -------
    list of list of str
        Those that can be read.
    """
    return [line.rstrip("\0").split("\0") for line in _command_lines()]


def _command_lines() -> Iterator[str]:
    pid = os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        for _ in range(_MOST_ANCESTORS):
            if pid <= 1:
                return
            yield Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()[1])


def cannot_recover(
    info: LaunchInfo, mpi_library: str, env: Mapping[str, str], alone: bool | None, *, over_mpi: bool
) -> str:
    """Return why the ranks of this job cannot go on after they have lost one, with the remedy; empty: they can.

    Parameters
    ----------
    info : LaunchInfo
        The launcher.
    mpi_library : str
        What ``MPI_Get_library_version`` says.
    env : mapping of str to str
        The C environment.
    alone : bool or None
        As :func:`left_alone` returns it, for whichever rank sees the launcher.
    over_mpi : bool
        Whether the data goes over MPI, which must then go on without the rank.

    Returns
    -------
    str
        A cause and a remedy.
    """
    family = mpi_family(mpi_library)
    if family == "Open MPI" and info.launcher == "openmpi" and fault_tolerant(env):
        return ""
    if over_mpi:
        return f"{family if family != 'unknown' else 'this MPI'} does not go on once a rank is lost; {_ULFM}"
    if info.launcher == "mpich":
        return f"mpirun of MPICH and its kin ends every rank of a job that has lost one; {_USE}"
    if info.launcher == "slurm":
        return _under_slurm(family, env)
    if info.launcher != "openmpi":
        return ""
    return "" if alone else _under_mpirun(seen=alone is not None)


def _under_slurm(family: str, env: Mapping[str, str]) -> str:
    if family == "Open MPI":
        return f"srun ends a step of Open MPI that has lost a rank; {_USE}"
    if env.get("SLURM_KILL_BAD_EXIT", "0") not in ("", "0"):
        return "SLURM_KILL_BAD_EXIT has srun end a step that has lost a rank; start it with srun --kill-on-bad-exit=0"
    return ""


def _of_launchers(ancestors: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    return [line for line in ancestors if line and os.path.basename(line[0]) in _LAUNCHERS]


def _under_mpirun(*, seen: bool) -> str:
    if seen:
        return f"mpirun of Open MPI ends every rank of a job that has lost one, unless told otherwise; {_USE}"
    return f"mpirun is seen from no rank, so whether it leaves survivors alone cannot be told; {_ULFM}"
