"""Kill some ranks at once with a collective in flight: who learns what and when, and when a sum is right again.

``mpirun --enable-recovery -np 8 python tests/gpu/losses.py --lost 2`` under Open MPI (one GPU a rank; ``--share-gpu``
otherwise). Ranks 1 to K kill themselves at one moment while the others are in an ``all_reduce`` that needs them; every
survivor writes down which ranks it was told of after how many milliseconds, calls ``shrink()`` (again while more losses
come to light), and sums. The first survivor prints the table; ``--json FILE`` writes it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from helpers.memory import DeviceMemory

import butter_mpi
from butter_mpi import DType, FaultPolicy

_ELEMENTS = 1 << 22
_SECONDS = 30.0


def total(comm: butter_mpi.Communicator, *, waits: bool = True) -> float:
    """Sum one of each rank, and return the sum; it is the same in every element."""
    plane: Any = comm.backend
    memory = DeviceMemory(plane.device, plane.stream)
    ones = np.ones(_ELEMENTS, np.float32)
    pointer = memory.put(ones)
    plane.all_reduce(pointer, ones.nbytes, dtype=DType.FLOAT32)
    if not waits:
        return 0.0
    summed = memory.get(pointer, ones)
    comm.check_async_error()
    assert (summed == summed[0]).all(), "not the same sum everywhere"
    return float(summed[0])


def moment(comm: butter_mpi.Communicator) -> float:
    """Return one moment soon, on this host's clock."""
    return float(comm.all_gather_json(time.monotonic())[0] + 0.5)


def learned(comm: butter_mpi.Communicator, at: float) -> tuple[float, list[int], str]:
    """Wait until this communicator says that it is broken: after how many milliseconds, whom it names, its text."""
    try:
        comm.wait_for_async_error(_SECONDS)
    except butter_mpi.PeerLostError as error:
        return 1e3 * (time.monotonic() - at), list(error.lost_ranks), error.message
    raise SystemExit(f"rank {comm.rank}: nothing was told within {_SECONDS:g} s")


def back(comm: butter_mpi.Communicator, at: float) -> tuple[butter_mpi.Communicator, int]:
    """Return the survivors' communicator once a sum on it is right, and how many calls of ``shrink`` it took."""
    calls = 0
    while time.monotonic() < at + _SECONDS:
        calls += 1
        try:
            comm = comm.shrink()
            if total(comm) == comm.world_size:
                return comm, calls
        except (butter_mpi.PeerLostError, butter_mpi.StartError):
            # Another of the lost came to light meanwhile.
            continue
    raise SystemExit(f"rank {comm.rank}: not back to work within {_SECONDS:g} s")


def main() -> None:
    """Run, and let the first survivor say what was seen."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lost", type=int, default=1, metavar="K", help="how many ranks are killed (1)")
    parser.add_argument("--share-gpu", action="store_true", help="let ranks share a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the first survivor writes what was seen there")
    options = parser.parse_args()
    fault = FaultPolicy(action="shrink", start_deadline=_SECONDS)
    comm = butter_mpi.init(plane="nccl", fault=fault, share_gpu=options.share_gpu or None)
    if not 1 <= options.lost < comm.world_size:
        parser.error(f"--lost is 1 to {comm.world_size - 1} of {comm.world_size} ranks")
    assert total(comm) == comm.world_size
    at = moment(comm)
    if 1 <= comm.rank <= options.lost:
        time.sleep(max(0.0, at - time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    rank, before = comm.rank, comm.world_size
    total(comm, waits=False)
    told, named, text = learned(comm, at)
    new, calls = back(comm, at)
    mine = {"rank": rank, "told_ms": told, "named": named, "text": text, "calls": calls}
    every = new.all_gather_json({**mine, "back_ms": 1e3 * (time.monotonic() - at)})
    expected = [one for one in range(before) if not 1 <= one <= options.lost]
    assert [row["rank"] for row in every] == expected, every
    if new.rank == 0:
        report(before, options.lost, every, options.json)
    new.close()


def report(ranks: int, lost: int, every: list[dict[str, Any]], file: Path | None) -> None:
    """Print what was seen, and write it."""
    print(f"{lost} of {ranks} ranks killed at once, an all_reduce of {_ELEMENTS * 4 >> 20} MiB in flight")
    print("rank  told ms  back ms  shrinks  named")
    for row in every:
        print(f"{row['rank']:4}{row['told_ms']:9.1f}{row['back_ms']:9.1f}{row['calls']:9}  {row['named']}")
    print(f"rank {every[0]['rank']}: {every[0]['text']}", flush=True)
    if file is not None:
        file.write_text(json.dumps({"ranks": ranks, "lost": lost, "seen": every}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
