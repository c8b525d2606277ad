"""Fixtures of the suites that run as ``mpirun -np N python -m pytest --with-mpi tests/ranks``, each plane alike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.memory import PLANE, HostMemory, Memory
from mpi4py import MPI

import butter_mpi
from butter_mpi.planes import CommBackend


@pytest.fixture
def comm() -> Iterator[butter_mpi.Communicator]:
    """A fresh communicator over all ranks, closed afterwards."""
    with butter_mpi.init(MPI.COMM_WORLD, plane=PLANE, fault=butter_mpi.FaultPolicy(collective_deadline=10)) as made:
        yield made


@pytest.fixture
def backend(comm: butter_mpi.Communicator) -> CommBackend:
    """The data plane of `comm`."""
    return comm.backend


@pytest.fixture
def memory() -> Memory:
    """Memory that the plane works on."""
    return HostMemory()
