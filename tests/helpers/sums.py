"""A sum over all ranks on the nccl plane, and whether it is right; for suites that run under mpirun."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from butter_mpi import DType
from helpers.memory import DeviceMemory

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
TOTAL = SIZE * (SIZE + 1) // 2
F32 = DType.FLOAT32


def own(count: int = 1000) -> np.ndarray:
    """Return what this rank adds to a sum of ``TOTAL``."""
    return np.full(count, RANK + 1, np.float32)


def works(plane: Any, memory: DeviceMemory) -> bool:
    """Whether a sum over all ranks is right."""
    pointer = memory.put(own())
    plane.all_reduce(pointer, 4000, dtype=F32)
    return bool((memory.get(pointer, own()) == TOTAL).all())
