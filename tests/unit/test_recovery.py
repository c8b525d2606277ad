"""Whether survivors of a loss can go on under a launcher, and what is said where they cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from butter_mpi.launch import read_launch
from butter_mpi.recovery import cannot_recover, left_alone, started_by

OPEN_MPI, MPICH = "Open MPI v5.0.11", "MPICH Version: 5.0.2"
PRTE = {"OMPI_COMM_WORLD_SIZE": "3"}
HYDRA = {"PMI_SIZE": "3", "MPI_LOCALRANKID": "0"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}
ULFM = {**PRTE, "OMPI_MCA_mpi_ft_enable": "1"}


def said(env: dict[str, str], library: str, *mpirun: str, over_mpi: bool = False) -> str:
    """Return what is said of a job; the launcher may be started by others, and be out of sight."""
    ancestors = [[*mpirun], ["timeout", "9", *mpirun], ["bash"]] if mpirun else [["prted"], ["bash"]]
    return cannot_recover(read_launch(env), library, env, left_alone(ancestors), over_mpi=over_mpi)


@pytest.mark.parametrize(
    ("env", "library", "mpirun", "more"),
    [
        (ULFM, OPEN_MPI, ["mpirun", "-np", "3"], {}),
        (ULFM, OPEN_MPI, [], {"over_mpi": True}),
        (PRTE, OPEN_MPI, ["/opt/bin/mpirun", "--enable-recovery", "-np", "3"], {}),
        (PRTE, OPEN_MPI, ["prterun", "--continuous"], {}),
        ({**STEP, "PMI_SIZE": "3"}, MPICH, [], {}),
        ({}, OPEN_MPI, [], {}),
    ],
)
def test_launchers_that_leave_survivors_alone(
    env: dict[str, str], library: str, mpirun: list[str], more: dict[str, Any]
) -> None:
    """Nothing is said against those."""
    assert said(env, library, *mpirun, **more) == ""


@pytest.mark.parametrize(
    ("env", "library", "mpirun", "more", "cause"),
    [
        (PRTE, OPEN_MPI, ["mpirun", "-np", "3"], {}, "mpirun of Open MPI ends every rank"),
        (PRTE, OPEN_MPI, [], {}, "mpirun is seen from no rank"),
        (PRTE, OPEN_MPI, ["mpirun", "--enable-recovery"], {"over_mpi": True}, "Open MPI does not go on"),
        (HYDRA, MPICH, ["mpirun"], {}, "mpirun of MPICH and its kin ends every rank"),
        (HYDRA, MPICH, ["mpirun"], {"over_mpi": True}, "MPICH does not go on"),
        ({**HYDRA, "OMPI_MCA_mpi_ft_enable": "1"}, MPICH, ["mpirun"], {"over_mpi": True}, "MPICH does not go on"),
        ({}, "Another MPI", [], {"over_mpi": True}, "this MPI does not go on"),
        (STEP, OPEN_MPI, [], {}, "srun ends a step of Open MPI"),
        ({**STEP, "SLURM_KILL_BAD_EXIT": "1"}, MPICH, [], {}, "SLURM_KILL_BAD_EXIT has srun end a step"),
    ],
)
def test_launchers_and_mpis_that_end_them(
    env: dict[str, str], library: str, mpirun: list[str], more: dict[str, Any], cause: str
) -> None:
    """The cause comes first, then how to start the job."""
    text = said(env, library, *mpirun, **more)
    assert text.startswith(cause) and "start it with" in text


def test_ancestors_are_seen() -> None:
    """The command lines of a process's ancestors are there, in whole words, nearest first."""
    code = "import json; from butter_mpi.recovery import started_by; print(json.dumps(started_by()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    own, found = Path("/proc/self/cmdline").read_text().rstrip("\0").split("\0"), json.loads(done.stdout)
    assert found == [own, *started_by()][: len(found)] and len(found) > 1
