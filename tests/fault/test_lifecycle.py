"""How jobs end: each scene is a job of its own, under each launcher, with a time limit; nothing may be left of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.mpirun import MPIS, Job, run_job, start_job
from helpers.require import need

HEAD = """
import os, sys, time, threading, signal
import numpy as np
import butter_mpi
from mpi4py import MPI
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
def say(text):
    print(text, flush=True)
def start(**fault):
    return butter_mpi.init(plane="host", fault=butter_mpi.FaultPolicy(**{"collective_deadline": 10, **fault}))
"""
RANKS = "RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size"
FOR_EVER = "threading.Event().wait()\n"

every_launcher = pytest.mark.parametrize("mpi", MPIS)


@every_launcher
def test_never_closed(mpi: str) -> None:
    """A communicator that nobody closes is no reason to fail or to wait."""
    result = run_job(2, HEAD + "comm = start(); comm.barrier(); say('done')", mpi=mpi)
    assert result.rc == 0 and result.rank_out == ["done\n"] * 2, result.text


@every_launcher
def test_finalized_by_the_user(mpi: str) -> None:
    """After MPI.Finalize a communicator is closed: operations say so, and closing it does nothing."""
    program = """
comm = start(); comm.barrier()
MPI.Finalize()
for call in (comm.barrier, comm.check_async_error, comm.attempt_reconnect, lambda: comm.all_gather_json(1)):
    try:
        call()
    except butter_mpi.CommunicatorClosedError as error:
        assert "MPI.Finalize" in str(error)
        say("refused")
assert not comm.is_healthy()
comm.close(); comm.abort()
"""
    result = run_job(2, HEAD + program, mpi=mpi)
    assert result.rc == 0 and result.rank_out == ["refused\n" * 4] * 2, result.text


@every_launcher
def test_exception_on_one_rank(mpi: str) -> None:
    """An uncaught exception on one rank ends the job within seconds; every rank says what broke, and where."""
    program = "comm = start(); comm.barrier()\nif RANK == 1: raise ZeroDivisionError('rank 1 fails')\ncomm.barrier()"
    result = run_job(3, HEAD + program, mpi=mpi, timeout=20)
    assert result.rc != 0 and result.seconds < 8, result.text
    assert "Traceback" in result.rank_err[1] and "ZeroDivisionError: rank 1 fails" in result.rank_err[1], result.text
    for rank in (0, 2):
        assert "PeerLostError" in result.rank_err[rank] and "told by rank 1" in result.rank_err[rank], result.text
        assert "ended by ZeroDivisionError: rank 1 fails (after barrier #1" in result.rank_err[rank], result.text


@every_launcher
def test_exception_in_a_with_block_reaches_the_peer(mpi: str) -> None:
    """An exception that leaves the `with` aborts: the peer is told what happened and where, within the second."""
    program = """
comm = start()
try:
    with comm:
        comm.barrier()
        if RANK == 1:
            raise ZeroDivisionError("rank 1 fails")
        begin = time.monotonic()
        comm.all_reduce(np.zeros(3))
except butter_mpi.PeerLostError as error:
    say(f"{time.monotonic() - begin < 1} {error.lost_ranks} {error}")
except ZeroDivisionError:
    signal.pause() if SIZE > 1 and RANK == 1 else None
"""
    with start_job(2, HEAD + program, mpi=mpi, timeout=20) as job:
        job.wait_for("told by rank 1", 0)
        result = job.wait()
    assert result.rc != 0, result.text
    assert "True (1,)" in result.rank_out[0] and "ZeroDivisionError: rank 1 fails" in result.rank_out[0], result.text


@every_launcher
def test_early_exit_is_named(mpi: str) -> None:
    """A rank that leaves early with status 0 is named to the rank that counts on it, and the job fails."""
    program = """
comm = start(); comm.barrier()
if RANK == 1:
    sys.exit(0)
try:
    comm.all_reduce(np.zeros(3))
except butter_mpi.PeerLostError as error:
    say(f"{error.lost_ranks} {error}")
"""
    result = run_job(2, HEAD + program, mpi=mpi, timeout=20)
    assert result.rc != 0 and result.seconds < 8, result.text
    assert "(1,)" in result.rank_out[0] and "rank 1 closed its communicator after barrier #1" in result.rank_out[0]
    # Who left is named once.
    assert result.rank_out[0].count("rank 1") == 1, result.text


SEGMENTS = """
import re
def segments():
    names = re.compile(r"/dev/shm/(?:mpich_shm_|sm_segment|vader_segment)\\S*")
    return sorted(set(names.findall(open("/proc/self/maps").read())))
"""


@every_launcher
@pytest.mark.parametrize("how", ["signal.raise_signal(9)", "MPI.COMM_WORLD.Abort(3)", "raise ZeroDivisionError"])
def test_lost_rank_ends_the_job_and_leaves_nothing(mpi: str, how: str) -> None:
    """A rank that is killed, aborts or fails ends the job; no process, and no shared memory of the MPI is left."""
    program = f"""
before = segments()
comm = start()
say(" ".join(before))
comm.barrier()
if RANK == 1: {how}
signal.pause()
"""
    result = run_job(2, HEAD + SEGMENTS + program, mpi=mpi, timeout=20)
    assert result.rc != 0, result.text
    if mpi == "mpich":
        assert result.rank_out[0].startswith("/dev/shm/mpich_shm_"), result.text
        left = [path for out in result.rank_out for path in out.split() if Path(path).exists()]
        assert not left, result.text


def test_killed_rank_is_named_at_once_where_mpi_lives_on() -> None:
    """With Open MPI's fault tolerance survivors live on: a killed rank is named on each of them within the second."""
    program = """
comm = start(); comm.barrier(); say(f"up")
try:
    while True:
        comm.all_reduce(np.zeros(3)); time.sleep(0.001)
except butter_mpi.CommunicatorBrokenError as error:
    say(f"at {time.monotonic()} {type(error).__name__} {error.lost_ranks}")
    raise
"""
    with start_job(3, HEAD + program, mpi="openmpi", options=["--with-ft", "ulfm"], timeout=30) as job:
        for rank in range(3):
            job.wait_for("up", rank)
        killed = job.signal(1, signal.SIGKILL)
        for rank in (0, 2):
            job.wait_for("PeerLostError (1,)", rank)
        said = [job.read(rank, "out") for rank in (0, 2)]
        result = job.wait()
    for out in said:
        assert float(out.split("at ")[1].split()[0]) - killed < 1, result.text


UNWATCHED = {"BUTTER_MPI_WATCH": "off"}


def test_job_that_lost_a_rank_fails_where_mpi_alone_knows_it() -> None:
    """Survivors end by their own status also where nobody watches, as mpirun makes 0, or no end, of MPI_Abort."""
    program = """
comm = start(); comm.barrier()
if RANK == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        comm.all_reduce(np.zeros(3))
except butter_mpi.PeerLostError as error:
    say(f"raised {error}")
comm.close()
"""
    ulfm = ["--with-ft", "ulfm"]
    result = run_job(3, HEAD + program, mpi="openmpi", options=ulfm, env=UNWATCHED, timeout=30)
    assert result.rc == 1 and all("MPI lost rank 1" in result.rank_out[rank] for rank in (0, 2)), result.text
    assert "MPI_ABORT" not in result.text, result.text


FROZEN = [("mpich", 3), ("openmpi", 3), ("mpich", 8_000_000)]


@pytest.fixture(scope="module")
def frozen(suspended: tuple[Job, float]) -> Iterator[list[Job]]:
    """Jobs with a stopped rank, which wait out the shortest collective deadline together, beside the patient ones."""
    program = """
comm = start(); comm.all_reduce(np.zeros({count})); say("up")
for turn in range(10**9):
    comm.all_reduce(np.zeros({count})); time.sleep(0.001)
"""
    with contextlib.ExitStack() as stack:
        jobs = []
        for mpi, count in FROZEN:
            text = HEAD + program.format(count=count)
            job = stack.enter_context(start_job(2, text, mpi=mpi, env=UNWATCHED, timeout=60))
            jobs.append(job)
            for rank in range(2):
                job.wait_for("up", rank)
            job.signal(1, signal.SIGSTOP)
        yield jobs


@pytest.mark.parametrize("which", range(len(FROZEN)), ids=[f"{mpi}-{count}" for mpi, count in FROZEN])
def test_frozen_rank_is_named_at_the_deadline(frozen: list[Job], which: int) -> None:
    """Where nobody watches, a stopped rank is warned of after 5 s and named at the deadline, with where it was seen."""
    result = frozen[which].wait(20)
    assert result.rc != 0, result.text
    assert "has waited 5 s for rank 1 (last seen at all_reduce #" in result.rank_err[0], result.text
    assert "CollectiveTimeoutError" in result.rank_err[0], result.text
    assert "from rank 1 (last seen at all_reduce #" in result.rank_err[0], result.text


LATE = "comm = start(); comm.barrier()\nif RANK == 1: time.sleep(6)\ncomm.barrier(); comm.close(); say('done')"
SUSPENDED = """
comm = start(); comm.barrier(); say("up")
if RANK == 1:
    signal.sigwait([signal.SIGUSR1])
comm.all_reduce(np.zeros(3)); comm.close(); say("done")
"""
IDLE = """
comm = start(); word = np.zeros(1, np.uint32)
if RANK == 0:
    time.sleep(11); word[0] = 7
    comm.backend.broadcast(word.ctypes.data, 4, 0)
    comm.close()
else:
    comm.backend.recv_command_u32(word.ctypes.data, 0); say(f"command {word[0]}")
    try:
        comm.backend.recv_command_u32(word.ctypes.data, 0)
    except butter_mpi.PeerLostError as error:
        say(f"left: {error}")
"""


@pytest.fixture(scope="module")
def patient() -> Iterator[dict[str, Job]]:
    """Jobs that wait for long, and are right to: they do so together."""
    block = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
    programs = {"late": HEAD + LATE, "idle": HEAD + IDLE, "suspended": block + HEAD + SUSPENDED}
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(start_job(2, program, timeout=60)) for name, program in programs.items()}


@pytest.fixture(scope="module")
def suspended(patient: dict[str, Job]) -> tuple[Job, float]:
    """The one of them whose ranks are stopped, and since when."""
    job = patient["suspended"]
    for rank in range(2):
        job.wait_for("up", rank)
    return job, [job.signal(rank, signal.SIGSTOP) for rank in range(2)][-1]


def test_suspended_job_is_no_fault(suspended: tuple[Job, float]) -> None:
    """Time in which this rank itself was stopped does not count: a job suspended whole goes on."""
    job, at = suspended
    # The time for which it is stopped is what is tested.
    signal.sigtimedwait([], max(0.0, at + 11 - time.monotonic()))
    for rank in range(2):
        job.signal(rank, signal.SIGCONT)
    job.signal(1, signal.SIGUSR1)
    result = job.wait()
    assert result.rc == 0 and all("done" in out for out in result.rank_out), result.text


def test_late_rank_is_warned_of_and_no_fault(patient: dict[str, Job]) -> None:
    """A rank that comes six seconds late is warned of once, by name and call site, and is no fault."""
    result = patient["late"].wait(30)
    assert result.rc == 0 and result.rank_out == ["done\n"] * 2, result.text
    assert result.rank_err[0].count("has waited") == 1 and "barrier #2" in result.rank_err[0], result.text
    assert "rank 1 (last seen at barrier #1" in result.rank_err[0] and not result.rank_err[1], result.text


def test_idle_command_is_never_late(patient: dict[str, Job]) -> None:
    """A worker waiting for its next command has no deadline and is not warned of; it learns of root's end at once."""
    result = patient["idle"].wait(40)
    assert "command 7" in result.rank_out[1] and "left:" in result.rank_out[1], result.text
    assert "has waited" not in result.rank_err[1], result.text


def test_short_stop_is_no_fault() -> None:
    """A rank stopped for three seconds is neither warned of nor lost."""
    program = """
comm = start(); comm.barrier(); say("up")
end = time.monotonic() + 4
while comm.all_gather_json(time.monotonic() < end)[0]:
    comm.all_reduce(np.zeros(3))
comm.close(); say("done")
"""
    with start_job(2, HEAD + program, timeout=40) as job:
        job.wait_for("up", 1)
        job.signal(1, signal.SIGSTOP)
        # The time of the stop is what is tested.
        signal.sigtimedwait([], 3)
        job.signal(1, signal.SIGCONT)
        result = job.wait()
    assert result.rc == 0 and all("done" in out for out in result.rank_out), result.text
    assert "has waited" not in result.rank_err[0] + result.rank_err[1], result.text


@pytest.fixture(scope="module")
def never_started() -> Iterator[dict[str, Job]]:
    """Jobs with a rank that never comes to init, one under each launcher: they wait for their deadlines together."""
    program = f"if RANK == 1:\n    {FOR_EVER}start(start_deadline=2)"
    with contextlib.ExitStack() as stack:
        yield {mpi: stack.enter_context(start_job(2, HEAD + program, mpi=mpi, timeout=20)) for mpi in MPIS}


@every_launcher
def test_rank_that_never_starts(never_started: dict[str, Job], mpi: str) -> None:
    """A rank that never comes to init: the others leave at the start deadline, naming the step; the job ends."""
    result = never_started[mpi].wait()
    assert result.rc != 0 and result.seconds < 8, result.text
    assert "StartTimeoutError" in result.rank_err[0], result.text
    step = "'duplicating the communicator' within 2.0 s (start deadline 2 s): rank 1 has not come. Look there"
    assert step in result.rank_err[0], result.text


@every_launcher
def test_a_communicator_is_left_without_messages(mpi: str) -> None:
    """Starts leave nothing on it, nor on a part on which some have started before."""
    program = """
part = MPI.COMM_WORLD.Split(0 if RANK < 2 else MPI.UNDEFINED)
if RANK < 2:
    butter_mpi.init(part, plane="host").close()
for _ in range(3):
    start().close()
MPI.COMM_WORLD.Barrier()
for comm in [MPI.COMM_WORLD] + [part] * (RANK < 2):
    assert not comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
say("done")
"""
    result = run_job(3, HEAD + program, mpi=mpi, timeout=30)
    assert result.rc == 0 and result.rank_out == ["done\n"] * 3, result.text


@pytest.fixture(scope="module")
def some_never_started() -> Iterator[dict[str, Job]]:
    """Jobs with two ranks that never come to init, one under each launcher, together."""
    program = f"""
if RANK in (1, 3):
    {FOR_EVER}
try:
    start(start_deadline=7 if RANK == 0 else 6)
except butter_mpi.StartTimeoutError as error:
    say(error)
    raise
"""
    with contextlib.ExitStack() as stack:
        yield {mpi: stack.enter_context(start_job(5, HEAD + program, mpi=mpi, timeout=40)) for mpi in MPIS}


@every_launcher
def test_who_has_not_come_is_named(some_never_started: dict[str, Job], mpi: str) -> None:
    """Rank 0 warns; who gives up asks it who is missing, and it asks all others, whoever gives up first."""
    result = some_never_started[mpi].wait()
    told = [out for out in result.rank_out if "ranks 1, 3 have not come. Look there" in out]
    assert result.rc != 0 and len(told) >= 1, result.text
    assert "rank 0/5 on " in result.rank_err[0], result.text
    assert "start: has waited 5 s for other ranks to come to it" in result.rank_err[0], result.text


def test_word_of_a_start_that_was_left() -> None:
    """What rank 0 says of a start does not end a later one of a rank that gave up before it."""
    program = f"""
def fail(seconds):
    began = time.monotonic()
    try:
        start(start_deadline=seconds)
    except butter_mpi.StartTimeoutError as error:
        say(time.monotonic() - began > seconds - 0.1)
if RANK == 2:
    {FOR_EVER}
fail(1 if RANK == 1 else 2)
if RANK == 1:
    fail(4)
    os._exit(1)
{FOR_EVER}
"""
    result = run_job(3, HEAD + program, timeout=30)
    assert result.rank_out[1] == "True\nTrue\n", result.text


def test_first_rank_that_has_not_come() -> None:
    """Nobody else asks all others: they say so."""
    program = f"if RANK == 0:\n    {FOR_EVER}start(start_deadline=1)"
    result = run_job(2, HEAD + program, timeout=20)
    assert result.rc != 0 and result.seconds < 8, result.text
    assert "rank 0, which asks the others, has not come or does not answer" in result.rank_err[1], result.text


@every_launcher
def test_rank_that_ends_before_init(mpi: str) -> None:
    """An exception that ends a rank before it comes to init ends the job: the others wait for it there."""
    program = """
if RANK == 1:
    print("was here")
    raise OSError("no such data")
start()
"""
    result = run_job(3, HEAD + program, mpi=mpi, timeout=30)
    assert result.rc != 0 and result.seconds < 10 and "OSError: no such data" in result.rank_err[1], result.text
    told = f"butter_mpi: rank 1/3 on {socket.gethostname()} ended by OSError: no such data before it came to init"
    assert told in result.rank_err[1] and result.rank_out[1] == "was here\n", result.text


@every_launcher
def test_rank_that_fails_before_mpi_is_started(mpi: str) -> None:
    """The others wait in MPI_Init, where no Python runs: the launcher ends the job at once; MPICH's is asked to."""
    program = """
import os, sys, threading
import butter_mpi
rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
if rank == "1":
    print("was here")
    raise OSError("no such data")
butter_mpi.init(plane="host")
"""
    result = run_job(3, program, mpi=mpi, timeout=30)
    assert result.rc != 0 and result.seconds < 10 and "OSError: no such data" in result.rank_err[1], result.text
    assert result.rank_out[1] == "was here\n", result.text
    if mpi == "mpich":
        told = f"butter_mpi: rank 1/3 on {socket.gethostname()} ended by OSError: no such data before MPI was started"
        assert told in result.rank_err[1], result.text


@every_launcher
def test_rank_on_which_the_package_cannot_be_imported(mpi: str) -> None:
    """An installation that is broken on one node ends the job: the others wait for that rank in MPI_Init."""
    program = """
import os, sys
if (os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]) == "1":
    sys.modules["ml_dtypes"] = None
import butter_mpi
butter_mpi.init(plane="host")
"""
    result = run_job(3, program, mpi=mpi, timeout=30)
    assert result.rc != 0 and result.seconds < 10, result.text
    err = result.rank_err[1]
    assert err.count("Traceback") == 1 and "import of ml_dtypes halted" in err, result.text
    if mpi == "mpich":
        told = f"butter_mpi: rank 1/3 on {socket.gethostname()} ended by ModuleNotFoundError: import of ml_dtypes"
        assert told in err and "before MPI was started; the job is ended" in err, result.text


def test_process_of_a_rank_that_fails_ends_no_job() -> None:
    """A process that a rank has started, with its environment and descriptors, is no rank."""
    program = """
import os, subprocess, sys
child = "import butter_mpi; raise OSError"
assert subprocess.run([sys.executable, "-c", child], close_fds=False, stderr=subprocess.DEVNULL).returncode == 1
with butter_mpi.init(plane="host") as comm:
    comm.barrier()
say("done")
"""
    result = run_job(2, HEAD.replace("from mpi4py import MPI", "").replace(RANKS, "") + program, timeout=30)
    assert result.rc == 0 and result.rank_out == ["done\n"] * 2, result.text


@pytest.mark.parametrize("ending", ["sys.exit(3)", "raise SystemExit('no')"])
def test_rank_that_leaves_where_nobody_waits(ending: str) -> None:
    """A rank that leaves by itself before init ends no job, whatever its status is: others may do without it."""
    program = f"if RANK == 1:\n    {ending}\nMPI.COMM_SELF.Barrier()\nsay('done')"
    result = run_job(2, HEAD + program, timeout=30)
    assert result.rank_out[0] == "done\n" and "butter_mpi:" not in result.text, result.text


@every_launcher
def test_receives_under_any_tag_get_nothing_of_ours(mpi: str) -> None:
    """Ranks that are in init already put nothing where the program of another one still takes what comes."""
    program = """
if RANK == 0:
    say([MPI.COMM_WORLD.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG) for _ in range(SIZE - 1)])
else:
    if RANK == 2:
        # Long enough for rank 1 to be in the first step of its start.
        time.sleep(2)
    MPI.COMM_WORLD.send(RANK, 0, tag=RANK)
start().close()
"""
    result = run_job(3, HEAD + program, mpi=mpi, timeout=30)
    assert result.rc == 0 and result.rank_out[0] == "[1, 2]\n", result.text


def test_test_that_is_expected_to_fail_ends_no_job(tmp_path: Path) -> None:
    """Pytest shows the exception of its last test as one that ended the program, and has caught it."""
    (tmp_path / "test_it.py").write_text("""
import os, time
import butter_mpi, pytest

@pytest.mark.xfail
def test_it():
    if os.environ["PMI_RANK"] == "1":
        time.sleep(1)
        print("came to its end", flush=True)
    raise OSError
""")
    arguments = ["-m", "pytest", "-s", "-p", "no:cacheprovider", "test_it.py"]
    result = run_job(2, arguments, cwd=tmp_path, timeout=30)
    assert result.rc == 0 and "came to its end" in result.rank_out[1], result.text


def test_start_of_survivors_that_mpi_has_put_together() -> None:
    """Where a rank that is not of a start is lost, MPI with fault tolerance fails at a look for messages of all."""
    program = """
import os, signal
if RANK == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    MPI.COMM_WORLD.Barrier()
except MPI.Exception:
    pass
with butter_mpi.init(MPI.COMM_WORLD.Shrink(), plane="host", watch="off") as comm:
    comm.barrier()
    say("done")
    comm.barrier()
sys.stdout.flush()
os._exit(0)
"""
    result = run_job(3, HEAD + program, mpi="openmpi", options=["--with-ft", "ulfm"], timeout=30)
    assert result.rank_out[:2] == ["done\n"] * 2, result.text


def test_close_that_is_interrupted() -> None:
    """An exception in the middle of close() is told like one in an operation: others may wait for what was not done."""
    program = """
comm = start(); comm.barrier()
if RANK == 1:
    def interrupted():
        raise KeyboardInterrupt
    comm.backend._release = interrupted
comm.close()
"""
    result = run_job(2, HEAD + program, timeout=20)
    assert result.rc != 0 and result.seconds < 8 and "KeyboardInterrupt" in result.rank_err[1], result.text
    assert "butter_mpi: told by rank 1/2 on" in result.text, result.text
    assert "interrupted by KeyboardInterrupt. Others may have gone on" in result.text, result.text


def test_abort_reaches_every_rank() -> None:
    """Abort is told to every peer with its reason, also to one that only looks for errors."""
    program = """
comm = start(); comm.barrier()
if RANK == 0:
    comm.abort("out of cheese")
    try:
        comm.barrier()
    except butter_mpi.CommunicatorClosedError as error:
        say(f"refused {error}")
    MPI.COMM_WORLD.Barrier()
else:
    try:
        comm.wait_for_async_error(10) if RANK == 1 else comm.barrier()
    except butter_mpi.PeerLostError as error:
        say(f"{error.lost_ranks} {error}")
    MPI.COMM_WORLD.Barrier()
"""
    result = run_job(3, HEAD + program, timeout=20)
    assert result.rc != 0 and "was aborted" in result.rank_out[0], result.text
    for out in result.rank_out[1:]:
        assert "(0,)" in out and "out of cheese" in out, result.text


@pytest.mark.parametrize(("end", "status", "said"), [("1 / 0", 1, "ZeroDivisionError"), ("sys.exit(7)", 7, "")])
def test_exception_in_a_with_block_with_action_abort(end: str, status: int, said: str) -> None:
    """The job ends inside the block: what was raised is shown with its line all the same, and a status is kept."""
    program = f"""
with start(action="abort") as comm:
    comm.barrier()
    {end}
"""
    result = run_job(1, HEAD + program, timeout=20)
    assert result.rc == status, result.text
    assert (f"    {end}" in result.rank_err[0]) == bool(said) and said in result.rank_err[0], result.text


def test_action_abort_ends_the_job() -> None:
    """With action abort a poisoned communicator ends the job, and says why."""
    program = """
comm = start(action="abort")
if RANK == 1: comm.all_reduce(np.zeros(3))
else: comm.barrier()
signal.pause()
"""
    result = run_job(2, HEAD + program, timeout=20)
    assert result.rc != 0 and result.seconds < 8, result.text
    assert any("action abort" in err and "submitted" in err for err in result.rank_err), result.text


def test_interrupt_in_a_collective() -> None:
    """An interrupt in the middle of a collective poisons it: the peer is told, and the job ends."""
    program = """
comm = start(); comm.barrier()
if RANK == 1:
    say("up")
    try:
        comm.wait_for_async_error(15)
    except butter_mpi.CommunicatorBrokenError as error:
        say(f"told: {error}")
        raise
say("waiting"); comm.barrier()
"""
    with start_job(2, HEAD + program, timeout=30) as job:
        job.wait_for("up", 1)
        job.wait_for("waiting", 0)
        signal.sigtimedwait([], 0.3)
        job.signal(0, signal.SIGINT)
        job.wait_for("told:", 1)
        result = job.wait(10)
    assert result.rc != 0 and "interrupted by KeyboardInterrupt" in result.rank_out[1], result.text


def test_lane_of_a_dead_thread() -> None:
    """A thread that ends inside a group does not hang the interpreter's exit."""
    program = """
comm = start()
thread = threading.Thread(target=comm.backend.group_start); thread.start(); thread.join()
say("leaving")
"""
    result = run_job(2, HEAD + program, timeout=20)
    assert result.rc == 0 and result.seconds < 8 and result.rank_out == ["leaving\n"] * 2, result.text


def test_exit_while_a_thread_is_in_a_collective() -> None:
    """A rank that ends while another of its threads waits in an operation ends the job, and says so."""
    program = """
comm = start(); comm.barrier()
if RANK == 1:
    threading.Thread(target=comm.barrier, daemon=True).start()
    while not comm.backend.in_flight:
        os.sched_yield()
    sys.exit(0)
signal.pause()
"""
    result = run_job(2, HEAD + program, timeout=20)
    assert result.rc != 0 and result.seconds < 10, result.text
    assert "leaving while another thread is in barrier #2" in result.rank_err[1], result.text


def test_exit_while_others_log() -> None:
    """A daemon thread that logs for ever does not disturb the interpreter's exit."""
    program = """
import logging
logging.basicConfig(stream=open(os.devnull, "w"), level=logging.INFO)
def chatter():
    while True:
        logging.getLogger("butter_mpi").info("chatter")
comm = start()
threading.Thread(target=chatter, daemon=True).start()
comm.barrier(); say("done")
"""
    result = run_job(2, HEAD + program, timeout=20)
    assert result.rc == 0 and result.rank_out == ["done\n"] * 2, result.text


def test_one_rank_without_mpirun_leaves_no_segment() -> None:
    """One rank of Open MPI that nobody launched leaves nothing in /dev/shm, as Open MPI by itself would."""
    place = os.environ.get("BUTTER_MPI_TEST_OPENMPI", "")
    need("openmpi", place, "BUTTER_MPI_TEST_OPENMPI names no environment; ./launch/test makes one")
    program = (
        HEAD
        + """
comm = start(); comm.barrier()
print([line for line in open("/proc/self/maps") if "sm_segment" in line and "(deleted)" not in line])
"""
    )
    done = subprocess.run(
        [f"{place}/bin/python", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and done.stdout == "[]\n", done


def test_forked_worker_may_end() -> None:
    """A forked worker process ends by itself without harming its parent's communicator."""
    program = """
import multiprocessing, warnings
warnings.simplefilter("ignore", DeprecationWarning)
comm = start(); comm.barrier()
def work():
    comm.close()
    say("worker")
child = multiprocessing.get_context("fork").Process(target=work); child.start(); child.join()
assert child.exitcode == 0
comm.barrier(); comm.close(); say("done")
"""
    result = run_job(2, HEAD + program, timeout=20)
    assert result.rc == 0 and all("worker" in out and "done" in out for out in result.rank_out), result.text


@every_launcher
def test_forked_child_never_comes_to_finalize(mpi: str) -> None:
    """A forked child that does not end by os._exit is ended with a failure and the reason; its parent goes on."""
    program = """
comm = start(); comm.barrier()
for end in ("pass", "sys.exit(0)", "raise ValueError('child')", "MPI.Finalize()"):
    child = os.fork()
    if child == 0:
        print("buffered before", end)
        exec(end)
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1, end
    comm.barrier()
comm.close(); say("done")
"""
    result = run_job(2, HEAD + program, mpi=mpi, timeout=20)
    assert result.rc == 0, result.text
    for out, err in zip(result.rank_out, result.rank_err, strict=True):
        assert out.count("buffered before") == 4 and "done" in out and err.count("os._exit(status)") == 4, result.text


def test_import_makes_no_context_in_the_parent() -> None:
    """Importing the package and its doctor leaves MPI, CUDA and NCCL alone, so that a fork afterwards is safe."""
    program = """
import sys
import butter_mpi, butter_mpi.doctor
butter_mpi.versions()
maps = open("/proc/self/maps").read()
assert not [name for name in ("libcuda", "libnccl", "libmpi") if name in maps], maps
print("light", flush=True)
"""
    result = run_job(1, program)
    assert result.rc == 0 and result.rank_out == ["light\n"], result.text


@pytest.mark.parametrize("how", ["thread", "signal handler"])
def test_abort_ends_an_operation_that_waits(how: str) -> None:
    """abort() from another thread, or from a signal handler, ends the operation that waits, and is told to the peer."""
    program = f"""
comm = start(); comm.barrier()
if RANK == 0:
    if {how == "thread"}:
        threading.Timer(0.3, comm.abort, ["from outside"]).start()
    else:
        signal.signal(signal.SIGUSR1, lambda *_: comm.abort("from outside"))
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGUSR1]).start()
    begin = time.monotonic()
    try:
        comm.barrier()
    except butter_mpi.CommunicatorClosedError:
        say(f"ended {{time.monotonic() - begin < 3}}")
    MPI.COMM_WORLD.Barrier()
else:
    try:
        comm.wait_for_async_error(10)
    except butter_mpi.PeerLostError as error:
        say(f"told {{error}}")
    MPI.COMM_WORLD.Barrier()
"""
    result = run_job(2, HEAD + program, timeout=30)
    assert result.rc != 0 and "ended True" in result.rank_out[0], result.text
    assert "told" in result.rank_out[1] and "from outside" in result.rank_out[1], result.text


def test_action_abort_in_a_worker_thread() -> None:
    """The job is ended from a worker thread too, and without any standard stream."""
    program = """
comm = start(action="abort")
os.close(2); sys.stdout = sys.stderr = None
threading.Thread(target=lambda: comm.all_reduce(np.zeros(3 + RANK))).start()
signal.pause()
"""
    result = run_job(2, HEAD + program, timeout=20)
    assert result.rc != 0 and result.seconds < 8, result.text


@pytest.mark.parametrize(
    "error", ["ValueError(chr(1) * 5000)", "type('Bad', (Exception,), {'__str__': lambda s: 1 / 0})()"]
)
def test_any_error_is_told(error: str) -> None:
    """An exception whose text is long, or cannot be made, is told to the peer all the same."""
    program = f"""
comm = start(); comm.barrier()
if RANK == 1: raise {error}
try:
    comm.barrier()
except butter_mpi.PeerLostError:
    say("told")
    raise
"""
    result = run_job(2, HEAD + program, timeout=20)
    assert result.rc != 0 and result.seconds < 8 and result.rank_out[0] == "told\n", result.text


@pytest.mark.parametrize(("code", "status"), [("0", 0), ("None", 0), ("5", 5)])
def test_exit_inside_a_with_block(code: str, status: int) -> None:
    """sys.exit inside the block keeps its status, and is no failure where it says that all is well."""
    result = run_job(2, HEAD + f"with start() as comm: comm.barrier(); sys.exit({code})", timeout=20)
    assert result.rc == status, result.text


def test_exit_with_a_thread_in_the_control_plane() -> None:
    """A rank that ends while another thread waits for values of the others ends the job."""
    program = """
comm = start(); comm.barrier()
if RANK == 1:
    threading.Thread(target=comm.all_gather_json, args=(1,), daemon=True).start()
    while not comm.backend.in_flight:
        os.sched_yield()
    sys.exit(0)
signal.pause()
"""
    result = run_job(2, HEAD + program, timeout=20)
    assert result.rc != 0 and result.seconds < 10, result.text


def test_shown_exception_of_a_console_is_no_failure() -> None:
    """An exception that an interactive interpreter showed, and went on, does not end the job."""
    program = """
import code
comm = start(); comm.barrier()
code.InteractiveInterpreter().runsource("1 / 0")
comm.barrier()
"""
    result = run_job(2, HEAD + program, timeout=20)
    assert result.rc == 0, result.text


def test_finalize_tells_the_peers() -> None:
    """MPI.Finalize with a communicator open is a goodbye: a peer that counts on this rank is told."""
    program = """
comm = start(); comm.barrier()
if RANK == 1:
    MPI.Finalize()
else:
    try:
        comm.barrier()
    except butter_mpi.PeerLostError as error:
        say(f"told {error}")
"""
    result = run_job(2, HEAD + program, timeout=20)
    assert "told" in result.rank_out[0] and "rank 1 closed its communicator after" in result.rank_out[0], result.text


def test_init_where_mpi_is_over() -> None:
    """Init after MPI.Finalize, and in a forked child, is refused with the reason instead of killed by MPI."""
    program = """
comm = start(); comm.close()
child = os.fork()
try:
    if child == 0:
        start()
except butter_mpi.StartError as error:
    say(f"fork: {error}")
    os._exit(0)
os.waitpid(child, 0)
MPI.Finalize()
try:
    start()
except butter_mpi.StartError as error:
    say(f"over: {error}")
"""
    result = run_job(2, HEAD + program, timeout=20)
    assert result.rc == 0, result.text
    assert all("is a fork of one that runs MPI" in out and "MPI.Finalize was called" in out for out in result.rank_out)


def test_reconnect_without_all_ranks() -> None:
    """A reconnect says at once who left for good; one that a rank does not come to ends at the deadline, poisoned."""
    program = """
comm = start(start_deadline=3); comm.barrier()
if RANK == 1:
    comm.close()
    other = start(start_deadline=3); other.barrier()
    time.sleep(5); sys.exit(0)
other = start(start_deadline=3); other.barrier()
begin = time.monotonic()
try:
    comm.attempt_reconnect()
except butter_mpi.PeerLostError as error:
    say(f"left {error.lost_ranks} {time.monotonic() - begin < 1}")
try:
    other.attempt_reconnect()
except butter_mpi.CollectiveTimeoutError as error:
    say(f"late {other.is_healthy()}")
try:
    other.attempt_reconnect()
except butter_mpi.CommunicatorBrokenError as error:
    say(str(error))
"""
    result = run_job(2, HEAD + program, timeout=30)
    assert "left (1,) True" in result.rank_out[0] and "late False" in result.rank_out[0], result.text
    assert result.rc != 0 and "an earlier one failed" in result.rank_out[0], result.text


def test_reconnect_where_one_gave_up() -> None:
    """A rank that closes its broken communicator tells those that reconnect: they do not wait for the deadline."""
    program = """
comm = start(start_deadline=30)
try:
    comm.all_reduce(np.zeros(1 + RANK))
except butter_mpi.CollectiveMismatchError:
    pass
if RANK == 1:
    comm.close(); say("gave up"); sys.exit(0)
begin = time.monotonic()
try:
    comm.attempt_reconnect()
except butter_mpi.PeerLostError as error:
    say(f"told of {error.lost_ranks} {time.monotonic() - begin < 5} {error}")
comm.close()
"""
    result = run_job(2, HEAD + program, timeout=40)
    assert "told of (1,) True" in result.rank_out[0] and "closed its communicator" in result.rank_out[0], result.text


DATA_FIRST = """
from butter_mpi.control import Control, Ticket
comm = start(); comm.barrier()
other = 1 - RANK
tell, begin = Control.send, Ticket.start
def send(self, peers, kind, body):
    tell(self, peers, kind, body)
    if RANK == 1 and kind == "op":
        Control.send = tell
        MPI.COMM_WORLD.recv()  # rank 0 hears of the second operation only after it has begun the first
def start_and_say(self, *args, **kwargs):
    begun = begin(self, *args, **kwargs)
    if RANK == 0 and self.counts:
        Ticket.start = begin
        MPI.COMM_WORLD.send(None, 1)
    return begun
Control.send, Ticket.start = send, start_and_say
"""


@every_launcher
def test_receive_that_a_mismatch_gave_up(mpi: str) -> None:
    """A receive that was posted before its group broke does not hold up the end of a job that recovered."""
    program = """
try:
    with comm.group():
        if RANK:
            comm.send(np.zeros(1), other); comm.send(np.zeros(1), other)
        else:
            comm.recv(np.zeros(1), other); comm.recv(np.zeros(2), other)
except butter_mpi.CollectiveMismatchError:
    say("caught")
comm.attempt_reconnect(); comm.barrier(); comm.close(); say("done")
"""
    result = run_job(2, HEAD + DATA_FIRST + program, mpi=mpi, timeout=30)
    assert result.rc == 0 and result.rank_out == ["caught\ndone\n"] * 2, result.text


@every_launcher
def test_data_under_way_at_a_mismatch(mpi: str) -> None:
    """A send that was begun before its group broke is received all the same, and the job that recovered ends well."""
    program = """
try:
    with comm.group():
        if RANK:
            comm.recv(np.zeros(2**20), other); comm.recv(np.zeros(1), other)
        else:
            comm.send(np.zeros(2**20), other); comm.send(np.zeros(2), other)
except butter_mpi.CollectiveMismatchError:
    say("caught")
comm.attempt_reconnect(); comm.barrier(); comm.close(); say("done")
"""
    result = run_job(2, HEAD + DATA_FIRST + program, mpi=mpi, timeout=30)
    assert result.rc == 0 and result.rank_out == ["caught\ndone\n"] * 2, result.text


@every_launcher
def test_data_that_an_interrupt_gave_up(mpi: str) -> None:
    """A send that nobody will receive cannot be taken back: the job is ended, with the reason."""
    program = """
from butter_mpi.planes.peers import PeerPlane
comm = start(); comm.barrier()
other = 1 - RANK
def interrupted(self, buffer, **kwargs):
    raise KeyboardInterrupt
    yield
PeerPlane._wait_for_receive = interrupted
try:
    comm.recv(np.zeros(2**20), other) if RANK else comm.send(np.zeros(2**20), other)
except (KeyboardInterrupt, butter_mpi.CommunicatorBrokenError):
    say("caught")
comm.attempt_reconnect(); comm.barrier(); comm.close(); say("done")
"""
    result = run_job(2, HEAD + program, mpi=mpi, timeout=30)
    assert result.rank_out == ["caught\ndone\n"] * 2, result.text
    assert result.rc != 0 and "data of an operation that broke" in result.text, result.text


@every_launcher
def test_mismatch_caught_and_left_open(mpi: str) -> None:
    """A job that leaves a broken communicator open fails, and says why also where the program caught the error."""
    program = """
comm = start()
try:
    comm.all_reduce(np.zeros(1 + RANK))
except butter_mpi.CollectiveMismatchError:
    say("caught")
"""
    result = run_job(2, HEAD + program, mpi=mpi, timeout=20)
    assert result.rc != 0 and "that nobody closed" in result.text and "all_reduce #1" in result.text, result.text


EXCHANGES = {
    "comparing preflight digests": "preflight.digest = wait",
    "comparing preflight records": "preflight.complete = wait",
    "duplicating the communicator": "preflight.judge = wait",
}


@pytest.fixture(scope="module")
def cut_short() -> Iterator[dict[str, Job]]:
    """Jobs with a rank that stops in the start: they wait for their deadlines together."""
    program = """
from butter_mpi import bootstrap, preflight
def wait(*_):
    threading.Event().wait()
if RANK == 1:
    os.environ["NCCL_DEBUG"] = "WARN"
    PATCH
start(start_deadline=3)
"""
    with contextlib.ExitStack() as stack:
        yield {
            phase: stack.enter_context(start_job(2, HEAD + program.replace("PATCH", patch), timeout=20))
            for phase, patch in EXCHANGES.items()
        }


@pytest.mark.parametrize("phase", EXCHANGES)
def test_every_exchange_of_the_start_is_bounded(cut_short: dict[str, Job], phase: str) -> None:
    """A rank that stops at any step of the start leaves nobody waiting: the others name the step at the deadline."""
    result = cut_short[phase].wait()
    assert result.rc != 0 and result.seconds < 9, result.text
    assert "StartTimeoutError" in result.rank_err[0] and f"'{phase}' within 3.0 s" in result.rank_err[0], result.text


def test_thread_level_of_one_rank() -> None:
    """MPI at a thread level below SERIALIZED on one rank is told on every rank, with what to set."""
    program = """
import mpi4py, os
mpi4py.rc.thread_level = "single" if os.environ["PMI_RANK"] == "1" else "multiple"
import butter_mpi
try:
    butter_mpi.init(plane="host")
except butter_mpi.PreflightError as error:
    print(error)
"""
    result = run_job(2, program, timeout=20)
    assert result.rc == 0 and result.rank_out[0] == result.rank_out[1], result.text
    assert "rank 1: MPI runs at thread level SINGLE" in result.rank_out[0], result.text
    assert "SERIALIZED or higher" in result.rank_out[0], result.text


def test_rank_that_never_comes_to_mpi() -> None:
    """Where a rank never gets to MPI_Init, init on the others ends at the start deadline, and shows where it stood."""
    program = """
import os, sys, threading
if os.environ["PMI_RANK"] == "1":
    threading.Event().wait()
import butter_mpi
butter_mpi.init(plane="host", fault=butter_mpi.FaultPolicy(start_deadline=2))
"""
    result = run_job(2, program, timeout=20)
    assert result.rc != 0 and result.seconds < 8, result.text
    assert "_start_mpi_or_end_this_process_at_the_start_deadline" in result.rank_err[0], result.text


def test_dropped_communicator_is_told_at_the_next_start() -> None:
    """The peers of a communicator that was dropped open are told of it when its owner starts another."""
    program = """
import gc, warnings
warnings.simplefilter("ignore", ResourceWarning)
comm = start(); comm.barrier()
if RANK == 1:
    del comm; gc.collect()
other = start(); other.barrier()
if RANK == 0:
    try:
        comm.barrier()
    except butter_mpi.PeerLostError as error:
        say(f"told {error.lost_ranks}")
"""
    result = run_job(2, HEAD + program, timeout=20)
    assert result.rank_out[0] == "told (1,)\n", result.text
