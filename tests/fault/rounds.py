"""Make and end a communicator many times, and print what the process has before and after: nothing may grow.

``PYTHONPATH=.:tests mpirun -np 2 python tests/fault/rounds.py --rounds 200``, also on GPUs (``--share-gpu`` where ranks
share one). Ends take turns: closed, aborted, dropped without either, closed after a failure. Rank 0 prints one
line of JSON: what each rank had after the first rounds, which load what is loaded once, and after the last ones.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import re
import time
import warnings
from pathlib import Path
from typing import Any

from cuda.bindings import driver
from helpers.standin_rank import check
from mpi4py import MPI

import butter_mpi
from butter_mpi.detached import wait_for_all
from butter_mpi.device import Device
from butter_mpi.ending import ENDING
from butter_mpi.errors import CollectiveMismatchError

ENDS = ("close", "abort", "drop", "break")
SETTLE_SECONDS = 10.0
LOOKS = 5
LOOK_SECONDS = 0.02


def work(comm: butter_mpi.Communicator) -> None:
    """Do what makes a communicator use everything that it has: a sum, a pair, registered and symmetric memory."""
    plane: Any = comm.backend
    stream = plane.stream if plane.on_device else None
    with comm.symmetric(1000) as x, comm.symmetric(1000) as y, comm.registered(x):
        comm.all_reduce(x, stream=stream)
        comm.sendrecv(x, (comm.rank + 1) % comm.world_size, y, (comm.rank - 1) % comm.world_size, stream=stream)
    comm.barrier()


def break_it(comm: butter_mpi.Communicator) -> None:
    """Submit what differs between ranks."""
    plane: Any = comm.backend
    with contextlib.suppress(CollectiveMismatchError):
        plane.all_reduce(0, 0) if comm.rank else plane.barrier()
    assert comm.world_size == 1 or not comm.is_healthy()


def one_round(end: str, options: dict[str, Any]) -> None:
    """Make a communicator, use it, end it."""
    comm = butter_mpi.init(**options)
    work(comm)
    # Nobody ends it while another rank is in an operation.
    MPI.COMM_WORLD.Barrier()
    if end == "break":
        break_it(comm)
    if end in ("close", "break"):
        comm.close()
    elif end == "abort":
        comm.abort("the round is over")
    del comm
    gc.collect()


def settle() -> None:
    """Wait for what ends in threads of its own, and for MPI to see what other ranks sent last."""
    wait_for_all(SETTLE_SECONDS)
    MPI.COMM_WORLD.Barrier()
    gc.collect()


def figures(device: Device | None) -> dict[str, int]:
    """Return what this process has: descriptors, threads, segments of /dev/shm, KiB of memory, and of the device's."""
    status = Path("/proc/self/status").read_text()
    found = {name: int(status.split(f"\n{name}:")[1].split()[0]) for name in ("Threads", "VmRSS")}
    free, total = check(driver.cuMemGetInfo()) if device is not None else (0, 0)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": found["Threads"],
        "shm": len(set(re.findall(r"/dev/shm/\S+", Path("/proc/self/maps").read_text()))),
        "rss_kib": found["VmRSS"],
        "device_kib": (int(total) - int(free)) // 1024,
    }


def settled(device: Device | None) -> dict[str, int]:
    """Return the figures once they stand still: a thread that has done all it had to do is gone a moment later."""
    looks: list[dict[str, int]] = []
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        looks.append(figures(device))
        same = [{**look, "rss_kib": 0} for look in looks[-LOOKS:]]
        if (len(same) == LOOKS and same.count(same[0]) == LOOKS) or time.monotonic() > end:
            return looks[-1]
        time.sleep(LOOK_SECONDS)


def main() -> None:
    """Do the rounds and print the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="rounds that are measured")
    parser.add_argument("--first", type=int, default=8, help="rounds before them")
    parser.add_argument("--ends", nargs="+", default=ENDS, choices=ENDS, help="how they end, in turns")
    parser.add_argument("--plane", default="auto", choices=("auto", "host", "nccl"))
    parser.add_argument("--share-gpu", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore", ResourceWarning)
    options = {"plane": given.plane, "share_gpu": given.share_gpu, "check": "strict"}
    seen, began = [], time.monotonic()
    for rounds in (given.first, given.rounds):
        for number in range(rounds):
            one_round(given.ends[number % len(given.ends)], options)
        # The last one may have been dropped: it is closed by whoever comes next.
        with butter_mpi.init(**options) as comm:
            plane: Any = comm.backend
            device = plane.device if plane.on_device else None
        settle()
        seen.append(settled(device))
    every = MPI.COMM_WORLD.gather({"first": seen[0], "last": seen[1]})
    if every is not None:
        seconds = round(time.monotonic() - began, 1)
        print(json.dumps({"rounds": given.rounds, "plane": comm.plane, "seconds": seconds, "ranks": every}), flush=True)
    # Every abort was meant.
    ENDING.met(0)


if __name__ == "__main__":
    main()
