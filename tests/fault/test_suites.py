"""The suites of tests/ranks, each in its own job under a real mpirun, on the planes that this machine can have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from helpers.job import TESTS
from helpers.mpirun import run_job
from helpers.standin import build

RANKS = TESTS / "ranks"
SUITES = sorted(RANKS.glob("test_*.py"))
HOST = [suite for suite in SUITES if not suite.stem.startswith(("test_nccl", "test_properties"))]
JOBS = [("mpich", 1), ("mpich", 2), ("mpich", 3), ("openmpi", 2), ("debian-openmpi", 2)]
OWN = ("test_memory.py", "test_operations.py", "test_plans.py", "test_splits.py")
NCCL = [[RANKS / "test_backend.py"], [*sorted(RANKS.glob("test_nccl*.py")), *[RANKS / name for name in OWN]]]
ON_STANDIN = [("mpich", 2, "strict"), ("mpich", 4, "strict"), ("openmpi", 2, "strict"), ("mpich", 2, "light")]
# Where more than two ranks do what two do not; the others are about one rank and its device.
OF_MANY = ("test_backend", "test_nccl", "test_operations", "test_splits")
# Light ranks do not compare what they submit: there is no mismatch to be told of.
LEFT_OUT = {"light": ["test_reconnect_after_a_mismatch"]}
# A hundred tests of what the stand-in computes, which depends on neither the check nor the MPI.
ARITHMETIC = ["test_all_reduce_types_and_sizes", "test_all_reduce_operators"]
# Gigabytes, of which an MPI sees a small piece at a time, as test_data_goes_in_pieces shows: the newest and the oldest.
LARGE = [f"test_large_{name}" for name in ("all_reduce", "broadcast", "pair", "all_gather", "reduce_scatter")]
WITH_LARGE = [("mpich", 1), ("mpich", 2), ("debian-openmpi", 2)]
# Twenty starts of more ranks than cores show no more than those of two.
ROUNDS = ["test_twenty_rounds_leave_nothing"]


def run(suites: Sequence[Path], mpi: str, ranks: int, folder: Path, env: Mapping[str, str], *more: str) -> None:
    """Run suites that pass (the plugin makes every rank's outcome rank 0's)."""
    options = ["--with-mpi", "-p", "no:cacheprovider", "-rs", f"--basetemp={folder}/suite", *more]
    arguments = ["-m", "pytest", *options, *map(str, suites)]
    result = run_job(ranks, arguments, mpi=mpi, timeout=240, cwd=TESTS.parent, env=env)
    assert result.rc == 0, result.text
    lines = result.rank_out[0].rstrip().splitlines()
    assert re.search(r"\d+ passed", lines[-1]), result.text
    for skip in [line for line in lines if line.startswith("SKIPPED")]:
        wanted = re.search(r"(?:needs|requires) (\d+) (?:MPI processes|ranks)", skip)
        assert wanted and int(wanted[1]) > ranks, skip


def left_out(file: str, names: Sequence[str]) -> list[str]:
    """Return the options that leave tests of a suite out."""
    return [f"--deselect=tests/ranks/{file}::{name}" for name in names]


@pytest.mark.parametrize(("mpi", "ranks"), JOBS, ids=[f"{mpi}-{ranks}" for mpi, ranks in JOBS])
@pytest.mark.parametrize("suite", HOST, ids=[suite.stem for suite in HOST])
def test_suite_passes_on_every_rank(suite: Path, mpi: str, ranks: int, tmp_path: Path) -> None:
    """On host memory the suite passes, and skips only what needs more ranks."""
    out = LARGE if (mpi, ranks) not in WITH_LARGE else []
    rounds = ROUNDS if ranks > 2 else []
    options = [*left_out("test_communicator.py", out), *left_out("test_splits.py", rounds)]
    run([suite], mpi, ranks, tmp_path, {}, *options)


def test_contract_of_one_rank_on_a_device(tmp_path: Path) -> None:
    """One rank on a device passes the suites of contract, memory and operations, and skips only what needs more."""
    env = {**build().env(), "BUTTER_MPI_TEST_PLANE": "nccl"}
    suites = ["test_backend.py", "test_memory.py", "test_nccl_order.py", "test_operations.py"]
    run([RANKS / suite for suite in suites], "mpich", 1, tmp_path, env)


@pytest.mark.parametrize(("mpi", "ranks", "check"), ON_STANDIN, ids=["-".join(map(str, job)) for job in ON_STANDIN])
@pytest.mark.parametrize("suites", NCCL, ids=["contract", "own"])
def test_suites_pass_on_nccl(suites: list[Path], mpi: str, ranks: int, check: str, tmp_path: Path) -> None:
    """On the stand-ins for CUDA and NCCL the suites pass, and skip nothing."""
    standin = build().env(NCCL_IB_TIMEOUT="10", NCCL_IB_RETRY_CNT="1")
    env = {**standin, "BUTTER_MPI_TEST_PLANE": "nccl", "BUTTER_MPI_TEST_CHECK": check}
    if ranks > 2 and suites == NCCL[0]:  # with so many a start is slow; each test has its own with two
        env["BUTTER_MPI_TEST_REUSE"] = "1"
    suites = [suite for suite in suites if ranks == 2 or suite.stem in OF_MANY]
    out = LEFT_OUT.get(check, []) + (ARITHMETIC if (mpi, ranks, check) != ("mpich", 2, "strict") else [])
    options = [*left_out("test_backend.py", out), *left_out("test_splits.py", ROUNDS if ranks > 2 else [])]
    run(suites, mpi, ranks, tmp_path, env, *options)


@pytest.mark.parametrize(("ranks", "plane"), [(4, "host"), (3, "nccl")])
def test_splits_of_many_ranks(ranks: int, plane: str, tmp_path: Path) -> None:
    """Whatever is split computes what it should with the numbers of ranks that no job above has on that plane."""
    standin = build().env(NCCL_IB_TIMEOUT="10", NCCL_IB_RETRY_CNT="1") if plane == "nccl" else {}
    env = {**standin, "BUTTER_MPI_TEST_PLANE": plane}
    run([RANKS / "test_splits.py"], "mpich", ranks, tmp_path, env, "-k", "whatever or whole or orders")


@pytest.mark.parametrize(("plane", "ranks"), [("host", 2), ("host", 3), ("nccl", 2), ("nccl", 4)])
def test_random_programs_are_right(plane: str, ranks: int, tmp_path: Path) -> None:
    """Some programs of operations that were drawn at random give what NumPy gives."""
    standin = build().env(NCCL_IB_TIMEOUT="10", NCCL_IB_RETRY_CNT="1") if plane == "nccl" else {}
    run([RANKS / "test_properties.py"], "mpich", ranks, tmp_path, {**standin, "BUTTER_MPI_TEST_PLANE": plane})
