"""What the launcher's variables say about this job, and how this launcher hands a variable to every rank."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from butter_mpi.findings import quoted

__all__ = [
    "LaunchInfo",
    "cannot_join",
    "false_green",
    "forwarding",
    "mpi_family",
    "outside_any_step",
    "read_launch",
    "srun_line",
]

_COUNTS = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
    "SLURM_JOB_NUM_NODES",
)
_INDICES = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "PMI_RANK",
    "MPI_LOCALRANKID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
)
_TEXTS = ("PMIX_RANK", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_MPI_TYPE")
_MOST_DIGITS = 18
# Steps that no srun of the user's started: the batch script, the shell of salloc, what pam_slurm_adopt takes in. Slurm
# keeps every number above this one for them; which of them means what has changed between its versions.
_LAST_NORMAL_STEP = 0xFFFFFFF0
_SPECIAL_STEPS = ("batch", "extern", "interactive")


@dataclass(frozen=True, slots=True)
class LaunchInfo:
    """What a launcher's variables claim.

    Parameters
    ----------
    launcher : {"openmpi", "mpich", "slurm", "none"}
        Who started this process: ``mpich`` stands for every Hydra-like ``mpirun`` (MPICH, Intel MPI), ``slurm`` for
        a step that ``srun`` started.
    claimed_size, claimed_rank : int or None
        The world size and rank by its variables.
    local_rank : int or None
        The rank among those of this node.
    size_variable : str
        The variable that gave ``claimed_size``.
    in_allocation, in_step : bool
        Whether this is inside a Slurm allocation, and inside a step of it that ``srun`` started; the batch script and
        the interactive shell of ``salloc`` are inside none.
    allocation_tasks : int or None
        The tasks that the allocation was asked for: ``SLURM_NTASKS``, which may be there without an allocation, else
        one a node.
    variables : dict of str to str
        Every launcher variable that was read.
    malformed : tuple of str
        A sentence for each variable that holds no usable number.
    """

    launcher: str = "none"
    claimed_size: int | None = None
    claimed_rank: int | None = None
    local_rank: int | None = None
    size_variable: str = ""
    in_allocation: bool = False
    in_step: bool = False
    allocation_tasks: int | None = None
    variables: dict[str, str] = field(default_factory=dict)
    malformed: tuple[str, ...] = ()


def _whole(name: str, text: str, low: int, malformed: list[str]) -> int | None:
    # Python refuses to read thousands of digits, and no job has that many ranks.
    if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and int(text) >= low:
        return int(text)
    malformed.append(f"{name} must be a whole number, {low} or more; got {quoted(text)}")
    return None


def _who(variables: Mapping[str, str]) -> str:
    if "OMPI_COMM_WORLD_SIZE" in variables:
        return "openmpi"
    in_step = _in_step(variables)
    if "PMI_SIZE" in variables and ("MPI_LOCALRANKID" in variables or not in_step):
        return "mpich"
    return "slurm" if in_step else "none"


def _in_step(variables: Mapping[str, str]) -> bool:
    """Whether srun started this; a step is also one whose number a container has dropped."""
    step = variables.get("SLURM_STEP_ID")
    if step is None:
        return "SLURM_STEP_NUM_TASKS" in variables
    number = step.isascii() and step.isdigit() and len(step) <= _MOST_DIGITS and int(step) > _LAST_NORMAL_STEP
    return not number and step.lower() not in _SPECIAL_STEPS


def _first(numbers: Mapping[str, int | None], *names: str) -> tuple[int | None, str]:
    for name in names:
        if numbers.get(name) is not None:
            return numbers[name], name
    return None, ""


def read_launch(env: Mapping[str, str]) -> LaunchInfo:
    """Return what the launcher's variables claim about this process.

    Under an ``mpirun`` inside a Slurm allocation the ``SLURM_`` variables are those of the launcher's own daemon, so
    they count last.

    Parameters
    ----------
    env : mapping of str to str
        The C environment.

    Returns
    -------
    LaunchInfo
        The claims; ``None`` where no variable makes one.
    """
    variables = {name: env[name] for name in (*_COUNTS, *_INDICES, *_TEXTS) if name in env}
    malformed: list[str] = []
    numbers = {name: _whole(name, variables[name], 1, malformed) for name in _COUNTS if name in variables}
    numbers |= {name: _whole(name, variables[name], 0, malformed) for name in _INDICES if name in variables}
    in_step = _in_step(variables)
    size, size_variable = _first(numbers, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", *(["SLURM_STEP_NUM_TASKS"] * in_step))
    rank_of = {"OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK", "PMI_SIZE": "PMI_RANK"}
    locals_ = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", *(["SLURM_LOCALID"] * in_step))
    return LaunchInfo(
        launcher=_who(variables),
        claimed_size=size,
        claimed_rank=numbers.get(rank_of.get(size_variable, "SLURM_PROCID")) if size else None,
        local_rank=_first(numbers, *locals_)[0],
        size_variable=size_variable,
        in_allocation="SLURM_JOB_ID" in variables,
        in_step=in_step,
        # Without a number of tasks srun starts one a node.
        allocation_tasks=_first(numbers, "SLURM_NTASKS", "SLURM_JOB_NUM_NODES")[0],
        variables=variables,
        malformed=tuple(malformed),
    )


def outside_any_step(info: LaunchInfo) -> str:
    """Return that several tasks were asked for and nothing started this process as one of them, or nothing.

    ``SLURM_NTASKS`` alone counts as well: somebody exported it, or a container dropped what stood beside it. An
    ``mpirun`` in a batch script makes a claim of its own, so its ranks are not meant.

    Parameters
    ----------
    info : LaunchInfo
        The launcher.

    Returns
    -------
    str
        A clause; empty: it does not apply.
    """
    tasks = info.allocation_tasks or 1
    if tasks < 2 or info.claimed_size is not None:
        return ""
    if info.in_allocation:
        return f"this Slurm allocation is for {tasks} tasks, but this process is outside any step"
    return f"SLURM_NTASKS says {tasks} tasks, but this process is outside any Slurm step"


def forwarding(info: LaunchInfo, name: str, value: str) -> str:
    """Return how this launcher gives a variable to every rank.

    Parameters
    ----------
    info : LaunchInfo
        The launcher.
    name, value : str
        The variable.

    Returns
    -------
    str
        A piece of command line.
    """
    word = shlex.quote(value)
    return {
        "openmpi": f"mpirun -x {name}={word} ...",
        "mpich": f"mpirun -genv {name} {word} ...",
        "slurm": f"srun --export=ALL,{name}={word} ...",
    }.get(info.launcher, f"export {name}={word}")


def srun_line(mpi_library: str) -> str:
    """Return the ``srun`` line to try for an MPI library.

    Parameters
    ----------
    mpi_library : str
        What ``MPI_Get_library_version`` says.

    Returns
    -------
    str
        The line, with the PMI plug-in that this library speaks.
    """
    if "Open MPI" in mpi_library:
        return "srun --mpi=pmix ... (Open MPI speaks PMIx; `srun --mpi=list` shows what this Slurm has)"
    if any(word in mpi_library for word in ("MPICH", "Intel", "MVAPICH")):
        return "srun --mpi=pmi2 ... (MPICH and its kin speak PMI2; `srun --mpi=list` shows what this Slurm has)"
    return "srun --mpi=pmi2 ... or srun --mpi=pmix ... (`srun --mpi=list` shows what this Slurm has)"


def mpi_family(mpi_library: str) -> str:
    """Return whose MPI a version text is of.

    Parameters
    ----------
    mpi_library : str
        What ``MPI_Get_library_version`` or ``mpirun --version`` says.

    Returns
    -------
    {"Open MPI", "Intel MPI", "MPICH", "unknown"}
        The family.
    """
    words = {"Open MPI": "Open MPI", "OpenRTE": "Open MPI", "Intel": "Intel MPI", "HYDRA": "MPICH", "MPICH": "MPICH"}
    return next((family for word, family in words.items() if word in mpi_library), "unknown")


def cannot_join(info: LaunchInfo, mpi_library: str, mapped: Iterable[str]) -> bool:
    """Return whether this is an MPICH under a launcher that speaks PMIx, which MPICH by itself does not.

    Parameters
    ----------
    info : LaunchInfo
        The launcher.
    mpi_library : str
        What ``MPI_Get_library_version`` says.
    mapped : iterable of str
        The files that are mapped into the process that loaded the library. An MPICH that was built with a PMI library
        of the system, ``libpmix.so`` or a vendor's, may speak what that speaks.

    Returns
    -------
    bool
        True only where it is certain: ``MPI_Init`` would abort, or give this process a job of its own.
    """
    pmix = info.launcher == "openmpi" or info.variables.get("SLURM_MPI_TYPE", "").startswith("pmix")
    other = "PMI_SIZE" in info.variables or any("/libpmi" in path for path in mapped)
    return pmix and info.launcher in ("openmpi", "slurm") and mpi_family(mpi_library) == "MPICH" and not other


def false_green(info: LaunchInfo, mpi_library: str) -> tuple[str, str]:
    """Return why MPI sees fewer ranks than the launcher started, and what to do.

    Parameters
    ----------
    info : LaunchInfo
        The launcher.
    mpi_library : str
        What ``MPI_Get_library_version`` says.

    Returns
    -------
    cause, remedy : str
        One clause each.
    """
    first = re.split(r"\n|,|\sMPICH Release", mpi_library.strip())[0]
    library = " ".join(first.split())[:60] or "its MPI library"
    if info.launcher == "slurm":
        plugin = quoted(info.variables.get("SLURM_MPI_TYPE", "none"))[1:-1]
        cause = f"srun started this step with --mpi={plugin}, which {library} does not speak"
        return cause, f"start it with {srun_line(mpi_library)}"
    family = {"openmpi": "Open MPI", "mpich": "MPICH or Intel MPI"}.get(info.launcher, "another MPI")
    cause = f"this job was started by mpirun of {family}, but mpi4py runs on {library}"
    remedy = "use the mpirun of the MPI library that mpi4py loads; `python -m mpi4py --mpi-library` names it"
    return cause, remedy
