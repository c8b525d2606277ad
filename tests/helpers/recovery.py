"""Back to work after a loss: a sum whose data is looked at, a rank that is lost meanwhile, and how long it took."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from butter_mpi import Communicator, DType
from butter_mpi.planes.host import HostPlane
from butter_mpi.planes.nccl_life import NcclLife
from helpers.memory import DeviceMemory


def total(comm: Communicator) -> int:
    """Return the sum of 1, 2, ... as many as there are ranks, by an all-reduce on the communicator's plane."""
    data = np.full(1000, comm.rank + 1, np.float32)
    plane: Any = comm.backend
    if plane.on_device:
        place = DeviceMemory(plane.device, plane.stream)
        pointer = place.put(data)
        plane.all_reduce(pointer, data.nbytes, dtype=DType.FLOAT32)
        data = place.get(pointer, data)
    else:
        comm.all_reduce(data)
    assert (data == data[0]).all(), data
    return int(data[0])


def die_in_recovery(plane: str, die: Callable[[], object]) -> None:
    """Let this rank die in its next recovery, once the survivors have agreed and start what they go on with."""
    owner, step = (HostPlane, "numbers_of") if plane == "host" else (NcclLife, "_connect")
    setattr(owner, step, lambda *_: die())


def waits(deaths: Iterable[float], backs: Sequence[Sequence[float]]) -> list[float]:
    """Return the seconds from the first death after each return to work to the next one, of the slowest survivor.

    ``backs`` are the times at which each survivor was back, as often as it was.
    """
    ends = [max(same) for same in zip(*backs, strict=True)]
    begins = [min(at for at in deaths if at > before) for before in [0.0, *ends[:-1]]]
    return [end - begin for begin, end in zip(begins, ends, strict=True)]
