"""Skip for a thing that the machine lacks, unless this machine must have it."""

from __future__ import annotations

import os

import pytest

VARIABLE = "BUTTER_MPI_TEST_REQUIRE"

NAMES = {
    "cc": "a C compiler",
    "debian-openmpi": "the distribution's Open MPI, and an environment without an MPI wheel",
    "mpi": "an environment with the MPICH wheel",
    "nccl": "a real libnccl.so.2",
    "netns": "a network name space of its own, and ip to furnish it",
    "network": "a package index",
    "openmpi": "an environment with the Open MPI wheel",
    "root": "the rights of root",
    "slurm": "Slurm's and munge's programs, and the rights to start them",
    "tsan": "a C compiler with a ThreadSanitizer that runs on this kernel",
    "user": "an ordinary user to change to",
}


def required() -> frozenset[str]:
    """Return the names that this machine must have; refuse one that no test knows."""
    names = frozenset(filter(None, os.environ.get(VARIABLE, "").split(",")))
    if unknown := names - NAMES.keys():
        raise pytest.UsageError(f"{VARIABLE}: unknown {', '.join(sorted(unknown))}; known are {', '.join(NAMES)}")
    return names


def need(name: str, present: object, why: str) -> None:
    """Go on if ``present``; else skip, naming what is missing, or fail where ``name`` is required."""
    if name not in NAMES:
        raise ValueError(f"need: unknown {name!r}; known are {', '.join(NAMES)}")
    if present:
        return
    if name in required():
        pytest.fail(f"{name} ({NAMES[name]}) is required by {VARIABLE} and missing: {why}", pytrace=False)
    pytest.skip(f"{name} ({NAMES[name]}): {why}")
