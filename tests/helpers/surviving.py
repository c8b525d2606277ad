"""Programs whose ranks go on after a loss, and how they are started where survivors are left alone."""

from __future__ import annotations

import re
from typing import Any

from helpers import recovery
from helpers.job import JobResult
from helpers.standin import build

__all__ = ["HEAD", "NCCL", "on_standins", "waits"]

HEAD = """
import os, select, signal, sys, time
import numpy as np
import butter_mpi
from helpers.memory import DeviceMemory
from helpers.recovery import die_in_recovery, total
from mpi4py import MPI
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
def say(text):
    print(text, flush=True)
def leave(status, leave=os._exit):
    say(f"leaves with {status}")
    leave(status)
os._exit = leave
def start(check="light", seconds=20, plane=os.environ["PLANE"], **more):
    fault = butter_mpi.FaultPolicy(start_deadline=seconds, collective_deadline=10, **more)
    return butter_mpi.init(plane=plane, check=check, fault=fault)
def memory(comm):
    return DeviceMemory(comm.backend.device, comm.backend.stream)
def die():
    say(f"dies {time.monotonic()}")
    os.kill(os.getpid(), signal.SIGKILL)
def raised(call, kind=butter_mpi.ButterError):
    try:
        call()
    except kind as error:
        say(f"raised {type(error).__name__}: {error}")
        return error
    raise AssertionError("nothing came")
def lost(comm):
    return raised(lambda: comm.wait_for_async_error(10), butter_mpi.PeerLostError)
"""

NCCL = {"NCCL_IB_TIMEOUT": "10", "NCCL_IB_RETRY_CNT": "1", "PLANE": "nccl"}
OPEN_MPI: dict[str, Any] = {"mpi": "openmpi", "options": ["--enable-recovery"]}


def on_standins() -> dict[str, Any]:
    """Return how a job is started on the nccl plane, under a launcher that leaves survivors alone."""
    return {"env": {**build().env(), **NCCL}, **OPEN_MPI}


def waits(result: JobResult, survivors: list[int]) -> list[float]:
    """The seconds from the first death after the last return to work to the next sum, of the slowest survivor."""
    deaths = [float(at) for out in result.rank_out for at in re.findall(r"^dies (\S+)", out, re.MULTILINE)]
    backs = [re.findall(r"^back (\S+)", result.rank_out[rank], re.MULTILINE) for rank in survivors]
    return recovery.waits(deaths, [[float(at) for at in those] for those in backs])
