"""What launchers' variables say, read from environments that real launchers gave."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from butter_mpi.launch import (
    LaunchInfo,
    cannot_join,
    false_green,
    forwarding,
    mpi_family,
    outside_any_step,
    read_launch,
    srun_line,
)

HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "11"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_RANK": "1",
}
SLURM_STEP = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
DAEMON = {**SLURM_STEP, "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
PMI2 = {**SLURM_STEP, "PMI_RANK": "3", "PMI_SIZE": "4", "SLURM_MPI_TYPE": "pmi2"}
PMIX = {**SLURM_STEP, "PMIX_RANK": "3", "SLURM_MPI_TYPE": "pmix"}
INTERACTIVE = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_MPI_TYPE": "none",
}
BATCH_SCRIPT = {"SLURM_JOB_ID": "9", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("env", "launcher", "size", "rank", "local_rank"),
    [
        (HYDRA, "mpich", 2, 1, 1),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "mpich", 2, 0, None),
        (OPEN_MPI, "openmpi", 2, 1, 1),
        (SLURM_STEP, "slurm", 4, 3, 1),
        (PMI2, "slurm", 4, 3, 1),
        (PMIX, "slurm", 4, 3, 1),
        ({**DAEMON, **HYDRA}, "mpich", 2, 1, 1),
        ({**DAEMON, **OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "openmpi", 4, 1, 1),
        (BATCH_SCRIPT, "none", None, None, None),
        (INTERACTIVE, "none", None, None, None),
        ({**INTERACTIVE, **HYDRA}, "mpich", 2, 1, 1),
        ({**INTERACTIVE, "PMI_RANK": "1", "PMI_SIZE": "2"}, "mpich", 2, 1, None),
        ({**INTERACTIVE, **OPEN_MPI}, "openmpi", 2, 1, 1),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, "slurm", 2, 1, None),
        ({}, "none", None, None, None),
    ],
)
def test_each_launcher_is_read(
    env: dict[str, str], launcher: str, size: int | None, rank: int | None, local_rank: int | None
) -> None:
    """Size, rank and local rank come from the launcher itself; a daemon's Slurm variables count last."""
    info = read_launch({**env, "PATH": "/bin"})
    assert (info.launcher, info.claimed_size, info.claimed_rank, info.local_rank) == (launcher, size, rank, local_rank)
    assert set(info.variables) <= set(env) and not info.malformed


@pytest.mark.parametrize(
    ("env", "in_allocation", "in_step", "tasks"),
    [
        (SLURM_STEP, True, True, 4),
        (BATCH_SCRIPT, True, False, 4),
        (INTERACTIVE, True, False, 2),
        ({"SLURM_NTASKS": "2"}, False, False, 2),
        ({"SLURM_JOB_ID": "6"}, True, False, None),
        (HYDRA, False, False, None),
    ],
)
def test_allocation_and_step_are_told_apart(
    env: dict[str, str], in_allocation: bool, in_step: bool, tasks: int | None
) -> None:
    """A batch script and salloc's shell are inside the allocation, but outside any step."""
    info = read_launch(env)
    assert (info.in_allocation, info.in_step, info.allocation_tasks) == (in_allocation, in_step, tasks)


@pytest.mark.parametrize(
    ("step", "started"),
    [
        ("0", True),
        ("4294967280", True),
        ("4294967290", False),  # interactive
        ("4294967291", False),  # batch
        ("4294967292", False),  # extern
        ("4294967294", False),  # batch, before Slurm 20.11
        ("interactive", False),
        ("batch", False),
        ("extern", False),
    ],
)
def test_step_that_no_srun_started_is_none(step: str, started: bool) -> None:
    """The steps that Slurm makes for itself claim no ranks, by number or by name."""
    info = read_launch({**INTERACTIVE, "SLURM_STEP_ID": step})
    assert (info.in_step, info.claimed_size) == ((True, 1) if started else (False, None))


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (INTERACTIVE, "this Slurm allocation is for 2 tasks, but this process is outside any step"),
        (BATCH_SCRIPT, "this Slurm allocation is for 4 tasks, but this process is outside any step"),
        (
            {"SLURM_JOB_ID": "9", "SLURM_JOB_NUM_NODES": "2"},
            "this Slurm allocation is for 2 tasks, but this process is outside any step",
        ),
        ({"SLURM_JOB_ID": "9", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "1"}, ""),
        ({"SLURM_NTASKS": "2"}, "SLURM_NTASKS says 2 tasks, but this process is outside any Slurm step"),
        ({**INTERACTIVE, "SLURM_NTASKS": "1"}, ""),
        ({"SLURM_NTASKS": "1"}, ""),
        ({**INTERACTIVE, **HYDRA}, ""),
        ({**BATCH_SCRIPT, **OPEN_MPI}, ""),
        ({**BATCH_SCRIPT, "PMI_SIZE": "1"}, ""),
        ({"SLURM_NTASKS": "2", **HYDRA}, ""),
        ({"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}, ""),
        (SLURM_STEP, ""),
        ({}, ""),
    ],
)
def test_tasks_that_nobody_started_are_told(env: dict[str, str], said: str) -> None:
    """Several tasks asked for and no launcher: told, also where only SLURM_NTASKS is left; under mpirun it is not."""
    assert outside_any_step(read_launch(env)) == said


@pytest.mark.parametrize(
    ("env", "library", "mapped", "cannot"),
    [
        (OPEN_MPI, "MPICH Version: 5.0.2", ["/v/lib/libmpi.so.12"], True),
        (PMIX, "MPICH Version: 5.0.2", [], True),
        ({**PMIX, "SLURM_MPI_TYPE": "pmix_v4"}, "MPICH Version: 5.0.2", [], True),
        (OPEN_MPI, "MPICH Version: 4.3.0", ["/lib/libmpich.so.12", "/lib/libpmix.so.2"], False),
        (PMIX, "MPICH Version: 4.0", ["/opt/lib/libpmi2.so.0"], False),
        (OPEN_MPI, "Open MPI v5.0.11", [], False),
        (PMIX, "Intel(R) MPI Library 2021.18", [], False),
        (PMIX, "Some MPI", [], False),
        (PMI2, "MPICH Version: 5.0.2", [], False),
        (HYDRA, "MPICH Version: 5.0.2", [], False),
        ({**PMIX, **HYDRA}, "MPICH Version: 5.0.2", [], False),
        ({**OPEN_MPI, **HYDRA}, "MPICH Version: 5.0.2", [], False),
        ({**INTERACTIVE, "SLURM_MPI_TYPE": "pmix"}, "MPICH Version: 5.0.2", [], False),
        ({}, "MPICH Version: 5.0.2", [], False),
    ],
)
def test_only_an_mpich_that_speaks_no_pmix_cannot_join(
    env: dict[str, str], library: str, mapped: list[str], cannot: bool
) -> None:
    """Under PMIx an MPICH without a PMI library of the system has no way into the job; every other pair may have."""
    assert cannot_join(read_launch(env), library, mapped) is cannot


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("Open MPI v5.0.11, package: x", "Open MPI"),
        ("mpirun (OpenRTE) 2.1", "Open MPI"),
        ("HYDRA build details:", "MPICH"),
        ("MPICH Version: 5.0.2", "MPICH"),
        ("Intel(R) MPI Library 2021.18", "Intel MPI"),
        ("MVAPICH Version : 3.0", "unknown"),
    ],
)
def test_family_of_an_mpi(text: str, family: str) -> None:
    """The family is read from what a library or its mpirun says of itself."""
    assert mpi_family(text) == family


@pytest.mark.parametrize("value", ["two", "-1", "0", "", "2.0", "٣", "9" * 5000, "0" * 5000 + "2", "\udcff"])
def test_malformed_number_is_told_and_not_used(value: str) -> None:
    """A variable that holds no usable number makes no claim, and the fault says what is allowed."""
    info = read_launch({**HYDRA, "PMI_SIZE": value})
    assert info.claimed_size is None
    assert len("".join(info.malformed)) < 400 and "".join(info.malformed).isprintable()
    assert len(info.malformed) == 1 and info.malformed[0].startswith("PMI_SIZE must be a whole number, 1 or more; got ")


@pytest.mark.parametrize(
    ("env", "line"),
    [
        (HYDRA, "mpirun -genv NCCL_PROTO LL ..."),
        (OPEN_MPI, "mpirun -x NCCL_PROTO=LL ..."),
        (SLURM_STEP, "srun --export=ALL,NCCL_PROTO=LL ..."),
        ({}, "export NCCL_PROTO=LL"),
    ],
)
def test_remedy_names_the_option_of_this_launcher(env: dict[str, str], line: str) -> None:
    """Each launcher hands variables on in its own way."""
    assert forwarding(read_launch(env), "NCCL_PROTO", "LL") == line


def test_forwarded_value_survives_a_shell() -> None:
    """A value with blanks and quotes is quoted for the shell."""
    line = forwarding(LaunchInfo("none"), "NCCL_ALGO", "it's a; value")
    out = subprocess.run(
        ["sh", "-c", f'{line}; printf %s "$NCCL_ALGO"'], capture_output=True, text=True, timeout=10, check=True
    )
    assert out.stdout == "it's a; value" == shlex.split(line)[1].partition("=")[2]


@pytest.mark.parametrize(
    ("library", "plugins"),
    [
        ("Open MPI v5.0.11, package: x", ["pmix"]),
        ("MPICH Version:      5.0.2", ["pmi2"]),
        ("Intel(R) MPI Library 2021.18", ["pmi2"]),
        ("Some MPI", ["pmi2", "pmix"]),
    ],
)
def test_srun_line_names_the_plugin_that_the_library_speaks(library: str, plugins: list[str]) -> None:
    """The line to try has the PMI plug-in of this MPI, or both where it is unknown."""
    assert [p for p in ("pmi2", "pmix") if f"--mpi={p} ..." in srun_line(library)] == plugins


def test_cause_of_a_false_green_names_both_sides() -> None:
    """The launcher and the library are both in the cause; the remedy fits the launcher."""
    cause, remedy = false_green(read_launch(HYDRA), "Open MPI v5.0.11, package: x\nmore")
    assert "mpirun of MPICH or Intel MPI" in cause and cause.endswith("mpi4py runs on Open MPI v5.0.11")
    assert "mpirun of the MPI library that mpi4py loads" in remedy
    cause, remedy = false_green(read_launch({**SLURM_STEP, "SLURM_MPI_TYPE": "none"}), "MPICH Version:  5.0.2")
    assert "--mpi=none" in cause and "MPICH Version" in cause
    assert remedy.startswith("start it with srun --mpi=pmi2 ...")


def test_cause_of_a_false_green_is_one_short_line() -> None:
    """A plug-in name of any content is cut and escaped."""
    cause, _ = false_green(read_launch({**SLURM_STEP, "SLURM_MPI_TYPE": "a\n\x1b[1m" + "x" * 10**6}), "MPICH")
    assert cause.isprintable() and len(cause) < 400
