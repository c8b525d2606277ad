"""Jobs of a real Slurm: the start, its refusals, and a lost rank that no launcher ends."""

from __future__ import annotations

import signal
import sys

import pytest
from helpers.mpirun import find_mpi
from helpers.slurm import PMI, Slurm
from helpers.standin import build

PROGRAM = """
import threading
import numpy as np
import butter_mpi
comm = butter_mpi.init(plane="host", fault=butter_mpi.FaultPolicy(collective_deadline=10, start_deadline=20))
data = np.full(3, comm.rank + 1.0)
comm.all_reduce(data)
print("sum", data[0], flush=True)
"""
GOES_ON = PROGRAM + "for turn in range(10**9):\n    comm.all_reduce(data); threading.Event().wait(0.01)\n"


SAYS_WHAT_ENDED_IT = f"""
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
{PROGRAM}
try:
    while True:
        comm.all_reduce(data); threading.Event().wait(0.01)
except butter_mpi.PeerLostError as error:
    print("PeerLostError", error, "told", file=sys.stderr, flush=True)
    signal.sigwait([signal.SIGUSR1])
    raise
"""


SHRINKS = """
import os, signal, sys
import butter_mpi
import numpy as np
from helpers.memory import DeviceMemory
comm = butter_mpi.init(plane="nccl", fault=butter_mpi.FaultPolicy(start_deadline=20, action="shrink"))
if comm.rank == 1:
    print("lost", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    comm.wait_for_async_error(10)
except butter_mpi.PeerLostError as error:
    print(error, file=sys.stderr)
with comm.shrink() as comm:
    memory, data = DeviceMemory(comm.backend.device, comm.backend.stream), np.full(1000, comm.rank + 2.5, np.float32)
    pointer = memory.put(data)
    comm.backend.all_reduce(pointer, data.nbytes, dtype=butter_mpi.DType.FLOAT32)
    print(memory.get(pointer, data)[0], flush=True)
"""


@pytest.mark.parametrize("mpi", PMI)
def test_ranks_of_a_step_find_each_other(slurm: Slurm, mpi: str) -> None:
    """Under srun with the PMI that the MPI understands, a job of four ranks on two nodes runs."""
    result = slurm.run_job(4, PROGRAM + "comm.close()", mpi=mpi)
    assert result.rc == 0 and result.rank_out == ["sum 10.0\n"] * 4, result.text


@pytest.mark.parametrize(("mpi", "pmi"), [("mpich", "none"), ("openmpi", "none"), ("openmpi", "pmi2")])
def test_false_green_is_refused(slurm: Slurm, mpi: str, pmi: str) -> None:
    """Srun with the wrong PMI would give jobs of one rank each: start is refused with the option to try."""
    result = slurm.run_job(2, PROGRAM, mpi=mpi, pmi=pmi, options=["--kill-on-bad-exit=0"])
    assert result.rc != 0 and not any("sum" in out for out in result.rank_out), result.text
    for err in result.rank_err:
        assert "PreflightError" in err and "--mpi=" in err, result.text


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_killed_rank(slurm: Slurm, mpi: str) -> None:
    """A killed rank ends the step with -K, as our own batch scripts ask."""
    with slurm.start_job(3, GOES_ON, mpi=mpi) as job:
        for rank in range(3):
            job.wait_for("sum", rank)
        job.signal(1, signal.SIGKILL)
        result = job.wait(15)
    assert result.rc != 0, result.text


def test_killed_rank_in_a_step_that_goes_on(slurm: Slurm) -> None:
    """Where the step goes on after a death, the survivors of both nodes name the rank at once, and end the job."""
    with slurm.start_job(3, SAYS_WHAT_ENDED_IT, options=["--kill-on-bad-exit=0"]) as job:
        for rank in range(3):
            job.wait_for("sum", rank)
        job.signal(1, signal.SIGKILL)
        # Rank 0 has rank 1's watcher, rank 2 is on the other node; the first to leave ends the job.
        for rank in (0, 2):
            job.wait_for("told\n", rank)
        job.signal(0, signal.SIGUSR1)
        result = job.wait(25)
    assert result.rc != 0, result.text
    for err in (result.rank_err[0], result.rank_err[2]):
        assert "PeerLostError" in err and "was killed by SIGKILL; last submitted all_reduce #" in err, result.text


def test_survivors_of_a_step_go_on(slurm: Slurm) -> None:
    """Where the step goes on after a death, ranks of one node do so without MPI, which cannot be used any more."""
    env = {**build().env(), "NCCL_IB_TIMEOUT": "10", "NCCL_IB_RETRY_CNT": "1"}
    result = slurm.run_job(3, SHRINKS, env=env, options=["--kill-on-bad-exit=0", "--nodes=1"])
    assert [out.splitlines()[-1] for out in result.rank_out] == ["6.0", "lost", "6.0"], result.text
    assert "rank 1/3" in result.rank_err[0] and "was killed by SIGKILL" in result.rank_err[0], result.text


def test_exception_on_one_rank(slurm: Slurm) -> None:
    """An uncaught exception on one rank ends the step, with its traceback, also where the step would go on."""
    program = PROGRAM + "if comm.rank == 1: raise ZeroDivisionError('rank 1 fails')\n" + "comm.barrier()\n"
    result = slurm.run_job(3, program, options=["--kill-on-bad-exit=0"], timeout=20)
    assert result.rc != 0 and "ZeroDivisionError: rank 1 fails" in result.rank_err[1], result.text


def test_selftest_outside_a_step_is_refused(slurm: Slurm) -> None:
    """Inside an allocation of several tasks but outside any step the selftest says how to start it."""
    command = [sys.executable, "-m", "butter_mpi.selftest", "--plane", "host"]
    result = slurm.run("salloc", "-n2", *command)
    assert result.returncode != 0 and "srun" in result.stderr and "Traceback" not in result.stderr, result.stderr
    alone = slurm.run("salloc", "-n2", *command, "--np-expected", "1")
    assert alone.returncode == 0, alone.stderr + alone.stdout


def test_interactive_step_is_no_step_of_ranks(slurm: Slurm) -> None:
    """In the shell that salloc starts the selftest refuses to run alone, and runs as two ranks with srun."""
    selftest = f"{find_mpi('mpich').python} -m butter_mpi.selftest --plane host"
    shell = f"""
echo "step $SLURM_STEP_ID tasks $SLURM_STEP_NUM_TASKS"
{selftest}
echo "alone $?"
srun --mpi={PMI["mpich"]} {selftest}
echo "with srun $?"
exit
"""
    result = slurm.run("salloc", "-n2", input=shell, timeout=120)
    text = result.stdout + result.stderr
    assert "step 4294967290 tasks 1\n" in result.stdout, text
    assert "alone 3\n" in result.stdout, text
    assert "2 tasks, but this process is outside any step and would run alone; start it with srun" in text
    assert "with srun 0\n" in result.stdout and ", 2 ranks, " in result.stdout, text


def test_library_in_the_interactive_step_warns(slurm: Slurm) -> None:
    """A program in the shell that salloc starts runs alone, and is warned."""
    program = "import logging, butter_mpi; logging.basicConfig(); print('size', butter_mpi.init().world_size)"
    result = slurm.run("salloc", "-n2", input=f'{find_mpi("mpich").python} -c "{program}"; exit\n')
    assert "size 1\n" in result.stdout, result.stdout + result.stderr
    assert "this Slurm allocation is for 2 tasks" in result.stderr, result.stderr


def test_mpich_under_pmix_is_told_before_it_aborts(slurm: Slurm) -> None:
    """Each rank says in one line who it is, what does not fit and which option of srun does, instead of an abort."""
    program = ["-m", "butter_mpi.selftest", "--plane", "host"]
    result = slurm.run_job(2, program, mpi="mpich", pmi="pmix", options=["--kill-on-bad-exit=0"])
    assert result.rc != 0, result.text
    for rank, err in enumerate(result.rank_err):
        assert err.startswith(f"butter_mpi.selftest: rank {rank}/2 on n"), result.text
        assert "--mpi=pmix, which MPICH Version: " in err and "start it with srun --mpi=pmi2 ..." in err, result.text
        assert err.count("\n") == 1, result.text


def test_mpi_failure_in_the_start(slurm: Slurm) -> None:
    """An MPI that has no way to another node fails the start on the rank that finds it, and the step ends."""
    env = {"OMPI_MCA_btl": "self,sm"}
    result = slurm.run_job(2, PROGRAM, mpi="openmpi", env=env, options=["--kill-on-bad-exit=0"], timeout=40)
    assert result.rc != 0 and result.seconds < 35, result.text
    assert any("StartError" in err and "start: MPI failed" in err for err in result.rank_err), result.text
