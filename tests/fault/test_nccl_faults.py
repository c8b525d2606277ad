"""Failures of the nccl plane in a running job: found on one rank, told to all, and left behind by a reconnect."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.mpirun import Job, run_job, start_job
from helpers.standin import build

POLICY = {"NCCL_IB_TIMEOUT": "10", "NCCL_IB_RETRY_CNT": "1"}
WAITS_FOR_NOBODY = "23007"
"""The last release whose destroy does not wait for other ranks."""

HEAD = """
import os, sys, time, threading
import numpy as np
import butter_mpi
from butter_mpi import DType, nccl
from helpers.memory import DeviceMemory
from helpers.standin_rank import Gpu, driver, until
from mpi4py import MPI
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
def say(text):
    print(text, flush=True)
def start(check="light", **fault):
    fault = butter_mpi.FaultPolicy(**{"start_deadline": 20, "collective_deadline": 10, **fault})
    return butter_mpi.init(plane="nccl", check=check, fault=fault)
def broken(call):
    began = time.monotonic()
    try:
        call()
    except butter_mpi.CommunicatorBrokenError as error:
        assert time.monotonic() - began < 5, time.monotonic() - began
        say(f"{type(error).__name__} {error}")
        return error
    raise AssertionError("nothing came")
comm = start()
plane = comm.backend
memory = DeviceMemory(plane.device, plane.stream)
"""

WORKS = """
assert not comm.is_healthy()
comm.attempt_reconnect()
data = np.full(1000, RANK + 1, np.float32)
x = memory.put(data)
plane.all_reduce(x, 4000, dtype=DType.FLOAT32)
assert (memory.get(x, data) == SIZE * (SIZE + 1) / 2).all() and comm.is_healthy()
comm.close()
"""


def env(faults: str = "", **more: str) -> dict[str, str]:
    """Return the variables of a job."""
    return {**build().env(faults=faults), **POLICY, **more}


def passed(n: int, program: str, faults: str = "") -> list[str]:
    """Run a program that ends well on every rank; return what each one wrote."""
    result = run_job(n, HEAD + program, env=env(faults))
    assert result.rc == 0, result.text
    return result.rank_out


def passed_alone(n: int, program: str, faults: str = "") -> list[str]:
    """Run a program that makes its own communicators."""
    result = run_job(n, HEAD.split("comm = start()")[0] + program, env=env(faults), timeout=60)
    assert result.rc == 0, result.text
    return result.rank_out


def test_death_that_nccl_sees_first() -> None:
    """A rank that looks for who broke, as its own NCCL failed, takes the watcher's word when it comes.

    NCCL over NET/Socket sees the end of a peer before the watcher does.
    """
    program = """
plane.barrier(); plane.barrier()
if RANK:
    time.sleep(60)
try:
    say("asks")
    until(lambda: comm.check_async_error(), 10)
except butter_mpi.CommunicatorBrokenError as error:
    say(f"raised {time.monotonic()} {type(error).__name__} {error.lost_ranks}")
    raise
"""
    how: dict[str, Any] = {"mpi": "openmpi", "options": ["--enable-recovery"]}
    with start_job(2, HEAD + program, env=env("0@collective#3=6"), **how) as job:
        job.wait_for("asks", 0)
        killed = time.monotonic()
        job.signal(1, signal.SIGKILL)
        job.wait_for("raised ", 0)
        job.wait_for("\n", 0)
        at, text = job.read(0, "out").split("raised ", 1)[1].split(" ", 1)
        assert float(at) - killed < 0.3 and text.startswith("PeerLostError (1,)"), (float(at) - killed, text)


@pytest.mark.parametrize("call", ["comm.wait_for_async_error(10)", "until(lambda: comm.check_async_error(), 5)"])
def test_error_in_the_background(call: str) -> None:
    """An error that NCCL found in the background of one rank poisons every rank; a reconnect works."""
    program = f"plane.barrier(); plane.barrier()\nbroken(lambda: {call})\n" + WORKS
    for rank, out in enumerate(passed(3, program, "1@collective#3=6")):
        assert f"rank {rank}/3" in out and "ncclRemoteError" in out and "rank 1/3 on" in out


@pytest.mark.parametrize("call", ["comm.all_gather_json(RANK)", "plane.set_add_kernel(0)"])
def test_exchange_that_one_rank_left_out(call: str) -> None:
    """A collective of one rank where the others meet over MPI is told to all within 2 s, with both call sites."""
    what = re.split(r"[.(]", call)[1]
    program = f"""
plane.barrier()
comm.all_gather_json(RANK)
began = time.monotonic()
if RANK == 1:
    plane.barrier(); error = broken(lambda: comm.wait_for_async_error(10))
else:
    error = broken(lambda: {call})
assert time.monotonic() - began < 2, time.monotonic() - began
kinds = ["{what} #1", "barrier #2", "{what} #1"]
assert all("program.py:" in text and kind in text for text, kind in zip(error.records.values(), kinds)), error.records
"""
    for out in passed(3, program + WORKS):
        assert out.startswith("CollectiveMismatchError"), out


# Each rank is taken for one of another node.
APART = """
from butter_mpi.sentinel import client
own = client.node_key()
client.node_key = lambda: f"{own} {RANK}"
"""


def test_ranks_of_other_nodes_that_differ() -> None:
    """One rank a node: who submitted another count is named on all, from the recorders, with each call site."""
    head = HEAD.replace("comm = start()", f"{APART}\ncomm = start()")
    program = """
for _ in range(3):
    plane.barrier()
plane.all_reduce(memory.blank(4096), 4000 if RANK == 1 else 2000, dtype=DType.FLOAT32)
error = broken(lambda: comm.wait_for_async_error(10))
assert list(error.records) == [0, 1, 2] and all("program.py:" in text for text in error.records.values()), error.records
"""
    result = run_job(3, head + program + WORKS, env=env(), timeout=40)
    for out in result.rank_out:
        assert out.startswith("CollectiveMismatchError"), result.text
        assert "rank 1: all_reduce #4 (float32 x 1000, sum)" in out, result.text
        assert "ranks 0, 2: all_reduce #4 (float32 x 500, sum)" in out, result.text


LEFT_OUT = """
if RANK == 0:
    plane.all_reduce(memory.put(np.ones(4, np.float32)), 16, dtype=DType.FLOAT32)
comm.close()
say("closed")
"""
NEVER_CLOSED = "plane.all_reduce(memory.blank(4), 4) if RANK == 0 else None\nsay('done')"
NO_RETURN = """
p = memory.blank(4)
began = time.monotonic()
try:
    plane.broadcast(p, 4, 0)
except butter_mpi.CollectiveTimeoutError as error:
    assert 9 < time.monotonic() - began < 15
    say(f"{error}")
os._exit(0)
"""


LONG_WORK = """
gpu = Gpu(plane.device.ordinal)
gpu.launch("delay_us", plane.stream, 6_000_000)
plane.all_reduce(memory.blank(16), 16, dtype=DType.FLOAT32)
comm.close()
"""


@pytest.fixture(scope="module")
def unanswered() -> Iterator[dict[str, Job]]:
    """Jobs that wait for seconds for what comes late or not at all; they do so together."""
    hang = "0@ncclBroadcast#1=hang,1@ncclBroadcast#1=hang"
    programs = {
        "left out": (LEFT_OUT, env()),
        "never closed": (NEVER_CLOSED, env(BUTTER_MPI_WATCH="off")),
        "no return": (NO_RETURN, env(hang)),
        "long work": (LONG_WORK, env()),
    }
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(start_job(2, HEAD + program, env=variables, timeout=60))
            for name, (program, variables) in programs.items()
        }


def test_operation_that_one_rank_left_out_fails_the_job(unanswered: dict[str, Job]) -> None:
    """An operation that never completes fails the job by name when it ends: the watcher sees it after the close too."""
    result = unanswered["left out"].wait()
    assert result.rc != 0 and result.rank_out == ["closed\n"] * 2, result.text
    assert "closing: still waiting for all_reduce #1" in result.rank_err[0], result.text
    assert "closing: all_reduce #1 (float32 x 4, sum)" in result.rank_err[0], result.text
    assert "has not completed: all_reduce #1 (float32 x 4, sum) at" in result.rank_err[0], result.text
    said = r"rank 1/2 on .* closed its communicator after no operation\. Every rank must submit the same"
    assert re.search(said, result.rank_err[0]) and result.seconds < 9, result.text


def test_many_never_closed() -> None:
    """All ranks close at exit in one order: none of them waits for another in a communicator that is not its turn."""
    program = "parts = [comm.dup() for _ in range(6)]\nfor part in parts: part.barrier()"
    result = run_job(2, HEAD + program, env=env(), timeout=40)
    assert result.rc == 0 and "still waiting" not in result.text, result.text


def test_never_closed_with_work_under_way(unanswered: dict[str, Job]) -> None:
    """Where nobody watches, an operation that no other rank comes to holds up no exit for longer than the deadline."""
    result = unanswered["never closed"].wait(25)
    assert result.rank_out == ["done\n"] * 2, result.text
    assert "has not completed within 10 s; the job is ended" in result.rank_err[0], result.text


def test_broadcast_that_does_not_come_back_from_nccl(unanswered: dict[str, Job]) -> None:
    """A broadcast whose host call never returns ends at the deadline all the same; the job can end."""
    result = unanswered["no return"].wait()
    assert all("no answer within" in out and "Stop all ranks" in out for out in result.rank_out), result.text


def test_long_work_is_waited_for_at_the_end(unanswered: dict[str, Job]) -> None:
    """Work that takes longer than closing waits is no failure: the process ends after it, with status 0."""
    result = unanswered["long work"].wait()
    assert result.rc == 0 and result.seconds > 6, result.text


@pytest.mark.parametrize("wait", ["plane.recv_command_u32(p, 1)", "plane.broadcast(p, 4, 1)", "send()"])
def test_rank_that_left_is_told_to_who_waits(wait: str) -> None:
    """A wait for a rank that has closed without coming ends at once, with its name, also where it has no deadline."""
    program = f"""
p = memory.blank(4)
def send():
    plane.send_to(p, 4, 1, plane.stream)
if RANK == 1:
    comm.close(); sys.exit(0)
error = broken(lambda: {wait})
assert error.lost_ranks == (1,)
"""
    result = run_job(2, HEAD + program, env=env(), timeout=30)
    assert "rank 1 closed its communicator after no operation" in result.rank_out[0], result.text


def test_rank_that_left_is_found_by_asking() -> None:
    """An operation that a rank left without coming to is found by check_async_error."""
    program = """
if RANK == 1:
    comm.close(); sys.exit(0)
plane.barrier()
error = broken(lambda: comm.wait_for_async_error(10))
assert error.lost_ranks == (1,) and "collective #1" in str(error)
"""
    result = run_job(2, HEAD + program, env=env(), timeout=30)
    assert "PeerLostError" in result.rank_out[0], result.text


def test_failed_starts_do_no_harm_to_later_ones() -> None:
    """A start that failed on one rank leaves no message that a later one takes for its own."""
    program = """
for turn in range(5):
    try:
        start(start_deadline=8).close()
        say(f"started {turn}")
    except butter_mpi.StartError as error:
        assert "CUDA_ERROR_OUT_OF_MEMORY" in str(error), error
        say("failed")
"""
    outs = passed_alone(3, program, "1@cuMemAlloc#1=2,2@cuMemAlloc#1=2")
    assert outs == ["failed\n" + "".join(f"started {turn}\n" for turn in range(1, 5))] * 3


def test_some_ranks_start_before_the_others() -> None:
    """What a start sets for NCCL is no difference between ranks in the next one."""
    program = """
some = MPI.COMM_WORLD.Split(0 if RANK < 2 else MPI.UNDEFINED)
if RANK < 2:
    butter_mpi.init(some, plane="nccl").close()
start().close(); say("started")
"""
    assert passed_alone(3, program) == ["started\n"] * 3


@pytest.mark.parametrize("n", [1, 2])
def test_closed_communicator_asks_the_driver_nothing(n: int) -> None:
    """After close the streams are gone, and a driver may crash on them: the question is refused, alone as with many."""
    program = """
comm.close()
for ask in (lambda: plane.check_stream(plane.stream), lambda: plane.check_pointer(8, "x")):
    try:
        ask()
    except butter_mpi.CommunicatorClosedError as error:
        say("refused")
"""
    assert passed(n, program) == ["refused\n" * 2] * n


def test_thread_without_a_context() -> None:
    """A thread that has never used CUDA may submit first of all."""
    program = """
done = []
thread = threading.Thread(target=lambda: done.append(plane.barrier()))
thread.start(); thread.join(20)
assert done == [None] and comm.is_healthy()
comm.close()
"""
    passed(2, program)


@pytest.mark.parametrize("n", [1, 2])
def test_capture_that_begins_inside_a_group(n: int) -> None:
    """A stream that is captured by the time the group ends is refused: nothing of the group is sent."""
    program = """
mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
p, stream = memory.blank(16), plane.device.make_stream()
try:
    with comm.group():
        plane.all_reduce_async(p, 16, stream, dtype=DType.FLOAT32)
        plane.device.call("cuStreamBeginCapture", stream, mode)
except ValueError as error:
    assert "captured into a CUDA graph" in str(error)
plane.device.call("cuStreamEndCapture", stream)
assert comm.sequence == 0 and comm.is_healthy()
plane.barrier(); comm.close(); say("done")
"""
    assert passed(n, program) == ["done\n"] * n


@pytest.mark.parametrize("n", [1, 2])
def test_capture_of_the_ordered_stream(n: int) -> None:
    """Nothing is put on the plane's own stream while a program captures it, alone as with many; the capture stays."""
    program = """
mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
p = memory.blank(64)
plane.device.call("cuStreamBeginCapture", plane.stream, mode)
for call in (lambda: plane.all_gather(p, p + 32, 4), lambda: comm.barrier(), lambda: plane.all_reduce(p, 16)):
    try:
        call()
    except ValueError as error:
        assert "captured into a CUDA graph" in str(error)
        say("refused")
assert int(plane.device.call("cuStreamEndCapture", plane.stream))
assert comm.sequence == 0
plane.barrier(); comm.close()
"""
    assert passed(n, program) == ["refused\n" * 3] * n


def test_is_healthy_says_no_and_does_not_raise() -> None:
    """is_healthy finds the error by itself, and returns."""
    program = "plane.barrier()\nassert until(lambda: not comm.is_healthy(), 5)\nbroken(comm.check_async_error)\n"
    assert all("ncclRemoteError" in out for out in passed(2, program + WORKS, "0@collective#2=6"))


@pytest.mark.parametrize("command", ["broadcast(p, 4, 0)", "recv_command_u32(p, 0)"])
def test_error_while_waiting(command: str) -> None:
    """A wait for a broadcast or a command ends with the error on every rank, not at the deadline."""
    program = f"p = memory.blank(4)\nbroken(lambda: plane.{command} if RANK else plane.broadcast(p, 4, 0))\n" + WORKS
    outs = passed(2, program, "1@collective#2=6")
    assert all("ncclRemoteError" in out and "Stop all ranks before retrying" in out for out in outs), outs


def test_error_while_every_rank_waits_for_its_stream() -> None:
    """NCCL fails in the background of one rank, and no thread asks here: the waits end, and all ranks say why."""
    program = """
x = memory.put(np.ones(1000, np.float32))
plane.all_reduce(x, 4000, dtype=DType.FLOAT32)
began = time.monotonic()
driver.cuStreamSynchronize(plane.stream)
assert time.monotonic() - began < 5
error = broken(lambda: plane.barrier())
assert "after all_reduce #1 (float32 x 1000, sum)" in str(error) and "ncclRemoteError" in str(error), error
"""
    said = passed(2, program + WORKS, "1@collective#2=6")
    assert "CommunicatorBrokenError rank 1/2" in said[1] and "told by rank 1/2" in said[0]


def test_error_inside_a_group() -> None:
    """A call that fails inside NCCL's group ends the group, exactly once: the thread is in none afterwards."""
    program = """
p = memory.blank(64)
def group():
    with comm.group():
        for peer in range(SIZE):
            plane.send_to(p, 4, peer, plane.stream)
            plane.recv_from(p + 16, 4, peer, plane.stream)
group()     # The first one connects, in a thread of its own.
broken(group if RANK == 1 else lambda: comm.wait_for_async_error(10))
assert nccl.close_leaked_groups(plane._library) == 0
"""
    for out in passed(2, program + WORKS, "1@ncclRecv#4=4"):
        assert "ncclRecv failed with ncclInvalidArgument" in out and "rank 1/2 on" in out


def test_error_of_one_operation() -> None:
    """An operation that fails on one rank is told to the others; the first cause stays until all reconnect."""
    program = """
def twice():
    plane.barrier(); plane.barrier()
first = broken(twice if RANK == 1 else lambda: comm.wait_for_async_error(10))
assert str(broken(plane.barrier)) == str(first)
"""
    assert all("barrier #2" in out for out in passed(3, program + WORKS, "1@ncclAllReduce#3=3"))


@pytest.mark.parametrize(
    "found_by", ["plane.barrier()", "comm.check_async_error()", "plane.broadcast(p, 4, 0)", "lent()"]
)
def test_broken_context(found_by: str) -> None:
    """A kernel that breaks the CUDA context of one rank is that rank's fault; the others are told so, and all end."""
    program = f"""
p = memory.blank(64)
plane.barrier()
memory.wait()
def lent():
    comm.all_reduce(type("X", (), dict(__cuda_array_interface__=dict(
        shape=(4,), typestr="<f4", data=(p, False), version=3, stream=plane.stream)))())
if RANK == 1:
    gpu, stream = Gpu(plane.device.ordinal), plane.device.make_stream()
    gpu.launch("fill_f32", stream, 8, 1.0, 100)
    assert until(lambda: int(driver.cuStreamQuery(stream)[0]) not in (0, 600))
    broken(lambda: {found_by})
    broken(plane.barrier)
else:
    broken(lambda: comm.wait_for_async_error(10))
"""
    result = run_job(2, HEAD + program + "comm.close(); comm.close()", env=env())
    assert all("rank 1/2 on" in out and "no other rank is the cause" in out for out in result.rank_out), result.text
    assert "Traceback" not in "".join(result.rank_err) and result.seconds < 15, result.text


def test_abort_that_never_returns() -> None:
    """NCCL's abort may wait for ever: neither abort(), nor a reconnect, nor the exit waits with it."""
    program = """
began = time.monotonic()
plane.all_reduce(memory.blank(4), 4) if RANK == 0 else None
MPI.COMM_WORLD.Barrier()
comm.abort("enough")
assert time.monotonic() - began < 4
with start() as again:
    again.barrier()
say("done")
MPI.COMM_WORLD.Barrier()
"""
    result = run_job(2, HEAD + program, env=env("ncclCommAbort=hang"), timeout=30)
    assert result.rank_out == ["done\n"] * 2 and result.seconds < 15, result.text


@pytest.mark.parametrize("handler", ["contextlib.nullcontext()", "plane._poisoning(plane._in_flight())"])
def test_abort_comes_after_the_call_that_is_under_way(handler: str) -> None:
    """A verdict while a thread is inside NCCL takes the communicator away; it is aborted when the call has returned.

    So it is when a signal handler of that thread has something of its own in flight.
    """
    program = f"""
import contextlib
x = memory.put(np.ones(1000, np.float32))
def add():
    plane.all_reduce(x, 4000, dtype=DType.FLOAT32)
add(); memory.wait()
operation = plane._last[0]
handle, real, name = operation.call
looked, in_flight = threading.Semaphore(0), plane._inside._otherwise
def otherwise():
    found = in_flight()
    looked.release()
    return found
plane._inside._otherwise = otherwise
def call():
    with {handler}:
        plane._stop_from_outside()
        for _ in range(3):
            assert looked.acquire(timeout=10)
        say("aborted under the call: " + str(plane._stopping[-1].done))
    return real()
operation.call = handle, call, name
add()
plane._stopping[-1].wait()
assert plane._comm is None and looked.acquire(timeout=10)
MPI.COMM_WORLD.Barrier()
comm.abort("enough")
MPI.COMM_WORLD.Barrier()
"""
    result = run_job(2, HEAD + program, env=env(), timeout=30)
    assert result.rank_out == ["aborted under the call: False\n"] * 2, result.text


def test_close_that_fails() -> None:
    """What cannot be given back is told in the log; closing goes on, and is no exception."""
    program = "plane.barrier(); memory.wait()\nMPI.COMM_WORLD.Barrier()\ncomm.close(); comm.close(); say(plane.state())"
    result = run_job(2, HEAD + program, env=env("1@ncclCommDestroy#2=3", STANDIN_NCCL_VERSION=WAITS_FOR_NOBODY))
    assert result.rc == 0 and result.rank_out == ["closed\n"] * 2, result.text
    assert "closing: ncclCommDestroy failed" in result.rank_err[1] and not result.rank_err[0], result.text


@pytest.mark.parametrize("watch", ["on", "off"])
@pytest.mark.parametrize("first", ["abort", "close"])
def test_close_beside_an_abort(first: str, watch: str) -> None:
    """NCCL may wait in its destroy for a peer that has aborted: who closes after that aborts too, and waits for nobody.

    Whoever has closed before is not disturbed by the abort, with an NCCL whose destroy waits for nobody; with another
    one it aborts then (``ranks/test_nccl_endings.py``).
    """
    program = f"""
plane.barrier(); memory.wait()
heard, hear = threading.Event(), plane._hear
def closing(notice):
    '''Hear a verdict as one that comes when closing has begun, but before NCCL is called.'''
    plane.health.closed = "closing"
    hear(notice)
    plane.health.closed = ""
    heard.set()
if plane._sentinel is None or {first == "close"}: heard.set()
elif RANK == 0: plane._sentinel._on_notice = closing
else: plane._send_broken = lambda cause: None  # What goes over MPI comes later than that.
MPI.COMM_WORLD.Barrier()
def close():
    assert heard.wait(10)
    began = time.monotonic()
    comm.close()
    assert time.monotonic() - began < 1, time.monotonic() - began
turns = [lambda: comm.abort("enough") if RANK else None, lambda: None if RANK else close()]
for turn in turns{"" if first == "abort" else "[::-1]"}:
    turn(); MPI.COMM_WORLD.Barrier()
say(plane.state())
MPI.COMM_WORLD.Barrier()
"""
    how = {"STANDIN_NCCL_VERSION": WAITS_FOR_NOBODY} if first == "close" else {}
    faults = "0@ncclCommDestroy#2=hang" if first == "abort" else ""
    result = run_job(2, HEAD + program, env=env(faults, BUTTER_MPI_WATCH=watch, **how))
    assert result.rank_out == ["closed\n", "aborted\n"], result.text
    assert "still waiting" not in result.rank_err[0] and result.seconds < 10, result.text


def test_exit_with_a_stuck_call() -> None:
    """A first message whose peer never comes ends at the deadline; the exit does not wait for the call inside NCCL."""
    program = """
if RANK == 0:
    try:
        plane.send_to(memory.blank(8), 8, 1, plane.stream)
    except butter_mpi.CollectiveTimeoutError as error:
        say(error)
else:
    try:
        comm.wait_for_async_error(30)
    except butter_mpi.CollectiveTimeoutError as error:
        say(error)
comm.close()
"""
    result = run_job(2, HEAD + "plane.deadline = 1\n" + program, env=env(), timeout=40)
    assert all("send #1" in out for out in result.rank_out) and result.seconds < 15, result.text


CONNECTING_LATE = {
    "ncclAllReduce#3": ("plane.all_reduce(p, 4096)", "all_reduce #2 (bfloat16 x 2048, sum)"),
    "ncclAllGather#1": ("plane.all_gather(p, p + 2048, 1024)", "all_gather #2 (uint8 x 1024)"),
    "ncclReduceScatter#1": ("group()", "barrier #2 (uint8 x 0)"),
}


@pytest.fixture(scope="module")
def connecting_late() -> Iterator[dict[str, Job]]:
    """Jobs with a rank that stands still in connecting: they wait for their deadlines together."""
    program = """
p = memory.blank(8192)
def group():
    with comm.group():
        plane.barrier()
        plane.reduce_scatter(p, p + 4096, 1024)
plane.deadline = 20
plane.all_reduce(p, 4)
if RANK == 1:
    plane.deadline = 1
    error = broken(lambda: {call})
    assert isinstance(error, butter_mpi.CollectiveTimeoutError) and error.lost_ranks == ()
else:
    {call}
    broken(lambda: comm.wait_for_async_error(20))
comm.close()
"""
    with contextlib.ExitStack() as stack:
        jobs = {}
        for fault, (call, _) in CONNECTING_LATE.items():
            variables = env(f"1@{fault}=hang", NCCL_RUNTIME_CONNECT="1")
            job = start_job(2, HEAD + program.replace("{call}", call), env=variables, timeout=30)
            jobs[fault] = stack.enter_context(job)
        yield jobs


@pytest.mark.parametrize("fault", CONNECTING_LATE)
def test_connecting_late(connecting_late: dict[str, Job], fault: str) -> None:
    """Where the user lets NCCL connect late, an operation that stands still in that is given up at the deadline."""
    result, what = connecting_late[fault].wait(), CONNECTING_LATE[fault][1]
    assert result.seconds < 15, result.text
    assert all(out.startswith("CollectiveTimeoutError") for out in result.rank_out), result.text
    assert all(f"{what} at " in out and "no answer within 1" in out for out in result.rank_out), result.text


KERNEL = """
module = plane.device.call("cuModuleLoadData", b"STANDIN\\0")
kernel = int(plane.device.call("cuModuleGetFunction", module, b"bf16_add_inplace"))
"""


def test_kernel_that_one_rank_sets() -> None:
    """A rank that sets an add kernel alone is told at its deadline who has not; no sum begins in two ways."""
    program = (
        KERNEL
        + """
if RANK == 0:
    plane.deadline = 1
    error = broken(lambda: plane.set_add_kernel(kernel))
    assert error.lost_ranks == (1,) and "Every rank must call it" in str(error)
else:
    broken(lambda: comm.wait_for_async_error(10))
"""
    )
    outs = passed(2, program + WORKS)
    assert all("set_add_kernel #0" in out and "no answer within 1.0 s" in out for out in outs), outs


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("plane.set_add_kernel(0)", "set_add_kernel #0 (json x 0, by no kernel)"),
        ("plane.all_reduce(p, 64)", "all_reduce #1 (bfloat16 x 32, sum)"),
    ],
)
def test_kernel_that_differs(call: str, said: str) -> None:
    """What a strict rank does instead of setting the kernel is named on both ranks."""
    program = f"""
comm.close(); comm = start("strict"); plane = comm.backend
{KERNEL}
p = memory.blank(64)
error = broken(lambda: {call} if RANK else plane.set_add_kernel(kernel))
assert isinstance(error, butter_mpi.CollectiveMismatchError)
comm.close()
"""
    for out in passed(2, program):
        assert "set_add_kernel #0 (json x 0, by a kernel)" in out and said in out, out


def test_sum_that_one_rank_adds() -> None:
    """A sum that one rank adds itself and the other has in a group is named; a reconnect takes kernels back."""
    program = f"""
comm.close(); comm = start("strict"); plane = comm.backend
{KERNEL}
p = memory.blank(128)
plane.set_add_kernel(kernel)
def grouped():
    with comm.group():
        plane.all_reduce(p, 64)
        plane.send_to(p, 4, RANK, plane.stream); plane.recv_from(p + 64, 4, RANK, plane.stream)
error = broken(grouped if RANK else lambda: plane.all_reduce(p, 64))
assert isinstance(error, butter_mpi.CollectiveMismatchError)
comm.attempt_reconnect()
plane.all_reduce(p, 64)
assert plane._connected == set()
comm.close()
"""
    for out in passed(2, program):
        assert "all_reduce #1 (bfloat16 x 32, sum, by send, receive and add) at" in out, out
        assert "all_reduce #1 (bfloat16 x 32, sum) at" in out and "do it in the same way: with a kernel" in out, out


def test_kernel_inside_a_group() -> None:
    """A kernel cannot be set in a group, whose operations are moved at its end; nothing is sent or poisoned."""
    program = """
with comm.group():
    try:
        plane.set_add_kernel(0)
    except ValueError as error:
        say(error)
plane.barrier(); comm.close()
"""
    assert all("set_add_kernel inside a group; end it first" in out for out in passed(2, program))


def test_exception_while_an_operation_is_stuck() -> None:
    """An exception that ends one rank while others wait on the device ends the job, with every rank's reason."""
    program = "if RANK == 1: raise ZeroDivisionError('bug')\nplane.broadcast(memory.blank(4), 4, 0)"
    result = run_job(2, HEAD + program, env=env(), timeout=40)
    assert result.rc != 0 and result.seconds < 15, result.text
    assert "ZeroDivisionError: bug" in result.rank_err[1], result.text
    assert "PeerLostError" in result.rank_err[0] and "ZeroDivisionError" in result.rank_err[0], result.text


FLAT = """
def facts():
    threads = sum(1 for _ in os.scandir("/proc/self/task"))
    files = sum(1 for _ in os.scandir("/proc/self/fd"))
    shared = sum(1 for name in os.listdir("/dev/shm") if "nccl" in name)
    free = plane.device.call("cuMemGetInfo")
    return threads, files, shared, free
def settled():
    '''What threads and their ends cost is given back soon after.'''
    seen = []
    until(lambda: len(seen) > 20 and len(set(seen[-20:])) == 1 or seen.append(facts()), 3)
    return seen[-1]
comm.close()
"""


@pytest.mark.parametrize("ending", ["close", "abort", "a failed operation", "a failed start"])
def test_endings_leave_nothing(ending: str) -> None:
    """Twelve communicators one after another leave files, threads, shared memory and device memory as they were."""
    once = {
        "close": "c = start(); c.barrier(); c.close()",
        "abort": "c = start(); c.barrier(); MPI.COMM_WORLD.Barrier(); c.abort('so')",
        "a failed operation": """
c = start()
try:
    c.backend.reduce_scatter(p, p, 4)
except butter_mpi.CommunicatorBrokenError:
    c.attempt_reconnect()
c.close()""",
        "a failed start": """
try:
    start(); raise AssertionError
except butter_mpi.StartError:
    pass""",
    }[ending]
    faults = {"a failed operation": "ncclReduceScatter=3", "a failed start": "1@ncclCommSplit#2+=3"}.get(ending, "")
    program = f"""
p = memory.blank(64)
def once():
    {once.strip().replace(chr(10), chr(10) + "    ")}
for turn in range(12):
    once()
    MPI.COMM_WORLD.Barrier()
    if turn == 4: before = settled()
after = settled()
assert after == before, (before, after)
say("flat")
"""
    result = run_job(2, HEAD + FLAT + program + "MPI.COMM_WORLD.Barrier()", env=env(faults))
    assert result.rank_out == ["flat\n"] * 2, result.text
