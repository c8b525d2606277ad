"""Header lines, and marks that are checked instead of trusted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.require import required

# Each rank would start threads when it imports NumPy; they spin for a while, and a job has more ranks than cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

UNDER_MPIRUN = [Path(__file__).parent / name for name in ("ranks", "gpu")]
_MARKS = {"mpi": {"min_size"}}
_SHOWN = (
    "BUTTER_MPI_TEST_MPICH",
    "BUTTER_MPI_TEST_OPENMPI",
    "BUTTER_MPI_TEST_SYSTEM",
    "BUTTER_MPI_TEST_NCCL",
)


def pytest_report_header() -> list[str]:
    """Say what the tests find on this machine, and what they must find."""
    found = [f"{name.removeprefix('BUTTER_MPI_TEST_').lower()}: {os.environ.get(name) or 'none'}" for name in _SHOWN]
    return [*found, f"required: {', '.join(sorted(required())) or 'nothing'}"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave tests/ranks and tests/gpu to sessions under mpirun: their files start MPI on import."""
    return True if collection_path in UNDER_MPIRUN and not config.getoption("--with-mpi") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a misspelt keyword of the mpi mark (pytest-mpi ignores it, so the test would mean less than it says)."""
    for item in items:
        for mark in item.iter_markers():
            known = _MARKS.get(mark.name)
            if known is not None and (mark.args or mark.kwargs.keys() - known):
                raise pytest.UsageError(
                    f"{item.nodeid}: mark {mark.name} takes only {', '.join(sorted(known))}; "
                    f"got {', '.join([*map(repr, mark.args), *mark.kwargs])}"
                )
