"""Fixtures of the suites that run as ``mpirun -np N python -m pytest --with-mpi tests/ranks``, each plane alike."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.memory import PLANE, DeviceMemory, HostMemory, Memory
from mpi4py import MPI

import butter_mpi
from butter_mpi import kernels
from butter_mpi.device import Device
from butter_mpi.planes import CommBackend

CHECK = os.environ.get("BUTTER_MPI_TEST_CHECK", "strict")
REUSE = os.environ.get("BUTTER_MPI_TEST_REUSE", "").split(",")
SHARE = bool(os.environ.get("BUTTER_MPI_TEST_SHARE_GPU"))


def _made() -> butter_mpi.Communicator:
    fault = butter_mpi.FaultPolicy(collective_deadline=10)
    return butter_mpi.init(MPI.COMM_WORLD, plane=PLANE, check=CHECK, share_gpu=SHARE, fault=fault)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the stand-in's kernels there, in place of what NVRTC would compile."""
    if "STANDIN_DEVICES" in os.environ:
        monkeypatch.setattr(kernels, "_compiled", lambda *_: b"STANDIN\0")


@pytest.fixture(scope="module")
def kept() -> Iterator[list[butter_mpi.Communicator]]:
    """A communicator that a later test of the suite takes over; closed after the last."""
    communicators: list[butter_mpi.Communicator] = []
    yield communicators
    for one in communicators:
        one.close()


@pytest.fixture
def comm(kept: list[butter_mpi.Communicator], request: pytest.FixtureRequest) -> Iterator[butter_mpi.Communicator]:
    """A healthy communicator over all ranks: a fresh one, or the last test's where the run asks for that."""
    made = kept.pop() if kept else _made()
    yield made
    if request.path.stem in REUSE and made.is_healthy():
        kept.append(made)
    else:
        made.close()


@pytest.fixture
def backend(comm: butter_mpi.Communicator) -> CommBackend:
    """The data plane of `comm`."""
    return comm.backend


@pytest.fixture
def memory(comm: butter_mpi.Communicator) -> Memory:
    """Memory that the plane works on."""
    plane: Any = comm.backend
    return DeviceMemory(plane.device, plane.stream) if plane.on_device else HostMemory()


@pytest.fixture
def plane(comm: butter_mpi.Communicator) -> Any:
    """The plane, with what is not of the protocol."""
    return comm.backend


@pytest.fixture
def device(plane: Any) -> Device:
    """Its device."""
    return plane.device
