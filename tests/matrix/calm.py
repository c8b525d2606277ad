"""What each rank of a scene runs that must end well: operations with right results, while something is slow.

Run by path: ``calm.py SCENE PLANE SECONDS DEADLINE VERDICT_FILE``.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from helpers.memory import DeviceMemory, HostMemory
from mpi4py import MPI

import butter_mpi
from butter_mpi import DType
from matrix.lines import say
from matrix.table import HOST, RANKS, VICTIM

SCENE, PLANE, _SECONDS, _DEADLINE, FILE = sys.argv[1:]
SECONDS, DEADLINE = float(_SECONDS), float(_DEADLINE)
RANK = MPI.COMM_WORLD.rank
HERE = Path(__file__).parent
_PR_SET_PTRACER, _ANY = 0x59616D61, 2**64 - 1


def memory_of(plane: Any) -> Any:
    """Return the plane's memory."""
    return HostMemory() if PLANE == HOST else DeviceMemory(plane.device, plane.stream, DEADLINE)


def reduce(plane: Any, memory: Any) -> None:
    """Sum over all ranks, and look at the sum."""
    data = np.full(100, RANK + 1, np.float32)
    pointer = memory.put(data)
    plane.all_reduce(pointer, data.nbytes, dtype=DType.FLOAT32)
    got = memory.get(pointer, data)
    assert (got == RANKS * (RANKS + 1) / 2).all(), got


def be_stopped() -> None:
    """Be stopped, and continued from outside."""
    script = f"kill -STOP {os.getpid()}; sleep {SECONDS}; kill -CONT {os.getpid()}"
    with subprocess.Popen(["sh", "-c", script]):
        pass


def be_debugged() -> None:
    """Be stopped by a debugger, which need not be an ancestor."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(_ANY))
    subprocess.run([sys.executable, "-S", str(HERE / "debugging.py"), str(os.getpid()), str(SECONDS)], check=True)


def leave_a_child() -> None:
    """Fork a child that keeps every descriptor and outlives the parent's close: no hook of Python runs in it."""
    libc = ctypes.PyDLL(None)
    if libc.fork() == 0:
        libc.sleep(int(SECONDS))
        os._exit(0)


def disturb(plane: Any) -> None:
    """Do what is slow on the victim."""
    if SCENE == "short-stop":
        be_stopped()
    elif SCENE == "debugger":
        be_debugged()
    elif SCENE == "late-in-time":
        time.sleep(SECONDS)
    elif SCENE == "lock-held":
        ctypes.PyDLL(None).sleep(int(SECONDS))
    elif SCENE == "long-kernel":
        from helpers.standin_rank import Gpu

        Gpu(plane.device.ordinal).launch("delay_us", plane.stream, int(SECONDS * 1e6))
    elif SCENE == "child":
        leave_a_child()


def main() -> None:
    """Run the scene."""
    fault = butter_mpi.FaultPolicy(start_deadline=60, collective_deadline=DEADLINE)
    watch = "debugger" if SCENE == "debugger" else "on"
    comm = butter_mpi.init(plane=PLANE, watch=watch, verdict_file=FILE, fault=fault)
    plane: Any = comm.backend
    memory = memory_of(plane)
    reduce(plane, memory)
    say("ready")
    if RANK == VICTIM:
        disturb(plane)
    lasts = SECONDS if SCENE in ("suspended", "saturated", "outage") else 0.0
    begin = time.monotonic()
    rounds = 0
    while True:
        reduce(plane, memory)
        rounds += 1
        # One rank decides, so that all do as many.
        if comm.all_gather_json(time.monotonic() - begin >= lasts)[0]:
            break
        time.sleep(0.01)
    comm.close()
    say("well", rounds=rounds)
    if RANK == VICTIM and SCENE == "child":
        os.wait()


if __name__ == "__main__":
    main()
