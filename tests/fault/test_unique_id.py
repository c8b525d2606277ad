"""The unique ID, or its failure, reaches every rank in one message; by the real library, which needs no GPU for it."""

from __future__ import annotations

import os

from helpers.mpirun import run_job
from helpers.require import need

PROGRAM = """
import os
from mpi4py import MPI
from butter_mpi import StartError, library, nccl
from butter_mpi.unique_id import share_unique_id
from butter_mpi.control import Control, Overdue, Watch, duplicate
from butter_mpi.ending import ENDING
ENDING.register(MPI)
watch = Watch(20)
control = Control(duplicate(MPI.COMM_WORLD, MPI, watch), MPI)
def make():
    return nccl.get_unique_id(library.open_library(os.environ)[0])
try:
    print("id", share_unique_id(control, make, watch).hex(), flush=True)
except StartError as error:
    print("error", error, flush=True)
except Overdue:
    ENDING.alone()  # as init does
    raise
MPI.COMM_WORLD.Barrier()
control.retire()
"""


def library() -> str:
    """Return the real library's path."""
    path = os.environ.get("BUTTER_MPI_TEST_NCCL", "")
    need("nccl", path, "BUTTER_MPI_TEST_NCCL names no libnccl.so.2; ./launch/test fetches one")
    return path


def test_id_reaches_every_rank() -> None:
    """Every rank has rank 0's 128 bytes, zero bytes included."""
    result = run_job(3, PROGRAM, env={"NCCL_LIBRARY": library()})
    ids = {out.split()[1] for out in result.rank_out}
    assert result.rc == 0 and len(ids) == 1 and len(bytes.fromhex(ids.pop())) == 128, result.text


def test_failure_reaches_every_rank() -> None:
    """A unique ID that rank 0 cannot make is the same error on every rank, with NCCL's call and code."""
    rank_env = {0: {"NCCL_SOCKET_IFNAME": "=nosuchinterface"}}
    result = run_job(3, PROGRAM, env={"NCCL_LIBRARY": library()}, rank_env=rank_env)
    assert result.rc == 0 and len(set(result.rank_out)) == 1, result.text
    assert "error rank 0/3: start: no unique ID: ncclGetUniqueId" in result.rank_out[0], result.text


def test_missing_library_on_rank_0_reaches_every_rank() -> None:
    """A library that rank 0 cannot load is the same error on every rank."""
    rank_env = {0: {"NCCL_LIBRARY": "/nonexistent/libnccl.so.2"}}
    result = run_job(3, PROGRAM, env={"NCCL_LIBRARY": library()}, rank_env=rank_env)
    assert result.rc == 0 and len(set(result.rank_out)) == 1, result.text
    assert "start: no unique ID" in result.rank_out[0] and "/nonexistent/libnccl.so.2" in result.rank_out[0], (
        result.text
    )


def test_unique_id_that_does_not_come_is_bounded() -> None:
    """Where rank 0 takes for ever to make the ID, the others leave at the deadline."""
    program = PROGRAM.replace("Watch(20)", "Watch(2)").replace(
        "    return nccl", "    import threading; threading.Event().wait()\n    return nccl"
    )
    result = run_job(2, program, env={"NCCL_LIBRARY": library()}, timeout=20)
    assert result.rc != 0 and "Overdue: sharing the unique ID" in result.rank_err[1], result.text
