"""Starts of the nccl plane that fail: told to every rank at once, or ended by the deadline with the stuck step."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.mpirun import Job, run_job, start_job
from helpers.standin import build

POLICY = {"NCCL_IB_TIMEOUT": "10", "NCCL_IB_RETRY_CNT": "1"}

HEAD = """
import os, sys, time, threading
import numpy as np
import butter_mpi
from butter_mpi import nccl
from butter_mpi.planes import joining
from mpi4py import MPI
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
def say(text):
    print(text, flush=True)
def start(comm=None, start_deadline=20, **more):
    fault = butter_mpi.FaultPolicy(start_deadline=start_deadline, collective_deadline=10)
    return butter_mpi.init(comm, plane="nccl", fault=fault, **more)
"""

FAILS = """
began = time.monotonic()
try:
    start()
except butter_mpi.StartError as error:
    say(f"{type(error).__name__} [{error.phase}] {error}")
assert time.monotonic() - began < 5, time.monotonic() - began
"""

AGAIN = """
comm = start()
x = comm.backend
assert x.is_healthy()
x.barrier(); x.broadcast(x.symmetric_alloc(64), 64, 0)
comm.close()
"""


def env(faults: str) -> dict[str, str]:
    """Return the variables of a job."""
    return {**build().env(faults=faults), **POLICY}


SCENES = {
    "init": ("1@ncclCommInitRankConfig#1=3", "NCCL init", "ncclCommInitRankConfig failed with ncclInternalError"),
    "unique ID": ("0@ncclGetUniqueId#1=2", "unique ID", "ncclGetUniqueId failed with ncclSystemError"),
    "split": ("2@ncclCommSplit#1=1", "NCCL init", "ncclCommSplit failed with ncclUnhandledCudaError"),
    "user rank": ("1@ncclCommUserRank#1=wrong", "NCCL init", "another communicator than was asked for: rank 2, not 1"),
    "first operation": ("1@ncclAllReduce#1=5", "NCCL init", "ncclAllReduce failed with ncclInvalidUsage"),
    "its work": ("1@collective#1=6", "NCCL init", "ncclRemoteError"),
    "memory": ("2@cuMemAlloc#1=2", "NCCL init", "CUDA_ERROR_OUT_OF_MEMORY"),
    "destroy": ("0@ncclCommDestroy#1=3", "NCCL init", "ncclCommDestroy failed with ncclInternalError"),
}


@pytest.mark.parametrize("scene", SCENES)
def test_one_rank_fails_and_all_know(scene: str, tmp_path: Path) -> None:
    """What fails on one rank of three is told to all at once, and is in the verdict file; a second start works."""
    faults, phase, text = SCENES[scene]
    file = tmp_path / "verdict.jsonl"
    result = run_job(3, HEAD + FAILS + AGAIN, env={**env(faults), "BUTTER_MPI_VERDICT_FILE": str(file)})
    assert result.rc == 0, result.text
    guilty = faults[0]
    if scene != "unique ID":
        (line,) = file.read_text().splitlines()
        verdict = json.loads(line)["verdict"]
        assert (verdict["lost"], verdict["phase"]) == ([int(guilty)], "start") and text in verdict["text"], verdict
    for rank, out in enumerate(result.rank_out):
        who = "rank 0/3: start: no unique ID" if scene == "unique ID" else f"rank {rank}/3"
        assert out.startswith(f"StartError [{phase}] {who}") and text in out, result.text
        assert f"rank {guilty}/3" in out, result.text


@pytest.mark.parametrize(
    ("question", "answer", "text"), [("comm_count", 5, "world size 5, not 2"), ("comm_cu_device", 7, "CUDA device 7")]
)
def test_answers_of_nccl_are_checked(question: str, answer: int, text: str) -> None:
    """A communicator of another size, or on another device, is no communicator."""
    program = f"if RANK == 1: nccl.{question} = lambda *_: {answer}\n" + FAILS
    result = run_job(2, HEAD + program, env=env(""))
    assert result.rc == 0 and all("rank 1/2 on" in out and text in out for out in result.rank_out), result.text


def test_leaked_group() -> None:
    """A group that another package began on this thread would swallow every call: it is found, and told to all."""
    program = "library = butter_mpi.library.open_library(os.environ)[0]\nif RANK == 1: nccl.group_start(library)\n"
    result = run_job(2, HEAD + "import butter_mpi.library\n" + program + FAILS + AGAIN, env=env(""))
    assert result.rc == 0, result.text
    assert all("inside 1 NCCL group level(s)" in out and "rank 1/2 on" in out for out in result.rank_out), result.text


def test_group_leaked_by_a_failed_start() -> None:
    """NCCL's own start leaves the thread in a group where it finds no device; the next one must not be queued in it."""
    program = """
from helpers.standin_rank import driver
real = nccl.init_rank_config
def without_device(*arguments):
    nccl.init_rank_config = real
    driver.cuCtxSetCurrent(0)
    return real(*arguments)
if RANK == 1: nccl.init_rank_config = without_device
"""
    result = run_job(2, HEAD + program + FAILS + AGAIN, env=env(""))
    assert result.rc == 0, result.text
    assert all("rank 1/2 on" in out and "ncclUnhandledCudaError" in out for out in result.rank_out), result.text


STUCK = {
    "init": ("1@ncclCommInitRankConfig=hang", "making the NCCL communicator"),
    "split": ("1@ncclCommSplit=hang", "splitting off the blocking communicator"),
    "first operation": ("1@ncclAllReduce=hang", "connecting"),
    "its work": ("1@collective=hang", "the first operation"),
}


@pytest.fixture(scope="module")
def stuck() -> Iterator[dict[str, Job]]:
    """Jobs with a rank that is stuck in the start: they wait for their deadlines together."""
    with contextlib.ExitStack() as stack:
        program = HEAD + "start(start_deadline=5)"
        yield {
            scene: stack.enter_context(start_job(2, program, env=env(faults), timeout=40))
            for scene, (faults, _) in STUCK.items()
        }


@pytest.mark.parametrize("scene", STUCK)
def test_deadline_names_the_step(stuck: dict[str, Job], scene: str) -> None:
    """A rank that is stuck in a step of the start is waited for until the deadline; nothing hangs at exit."""
    result, step = stuck[scene].wait(), STUCK[scene][1]
    assert result.rc != 0 and result.seconds < 15, result.text
    text = "".join(result.rank_err)
    assert "StartTimeoutError" in text and f"'{step}'" in text, result.text
    # NCCL may hold the rank that is stuck inside its call, where it answers nobody.
    where = rf"((rank 1|ranks 0-1) in '{step}'|rank 1 without an answer)"
    assert re.search(rf"'{step}' has not come to its end within .* deadline 5 s\): .*{where}", text), result.text
    assert "missing" not in text, result.text


def test_deadline_names_the_rank_that_is_elsewhere() -> None:
    """Where every rank came, and one is inside a call, the message says in which step which rank is."""
    program = """
from butter_mpi.planes import nccl_life
real = nccl_life.join
def late(*arguments):
    if RANK == 1: time.sleep(20)
    return real(*arguments)
nccl_life.join = late
start(start_deadline=5)
"""
    result = run_job(2, HEAD + program, env=env(""), timeout=40)
    said = "rank 0 in 'making the NCCL communicator'; rank 1 without an answer (who does not answer has ended, or is"
    assert result.rc != 0 and f"(start deadline 5 s): {said}" in result.rank_err[0], result.text


@pytest.mark.parametrize(
    ("watch", "deadline", "said"), [("on", 60, ("StartError", "rank 1/3 on ")), ("off", 5, ("StartTimeoutError",))]
)
def test_a_rank_that_dies_in_init(watch: str, deadline: int, said: tuple[str, ...]) -> None:
    """A rank that is killed inside NCCL's start is named at once by the watcher; else others wait to the deadline."""
    environment = {**env("1@ncclCommInitRankConfig=kill"), "BUTTER_MPI_WATCH": watch}
    program = HEAD + f"start(start_deadline={deadline})"
    result = run_job(3, program, mpi="openmpi", env=environment, options=["--enable-recovery"], timeout=40)
    assert result.seconds < 15, result.text
    for rank in (0, 2):
        assert all(text in result.rank_err[rank] for text in said), result.text


WORKS = """
from helpers.memory import DeviceMemory
def works(comm):
    plane, n = comm.backend, comm.world_size
    memory = DeviceMemory(plane.device, plane.stream)
    data, got = np.full(100, comm.rank + 1, np.float32), np.zeros(100, np.float32)
    x, y = memory.put(data), memory.put(got)
    plane.all_reduce(x, 400, dtype=butter_mpi.DType.FLOAT32)
    plane.group_start()
    plane.send_to(x, 400, (comm.rank + 1) % n, plane.stream)
    plane.recv_from(y, 400, (comm.rank - 1) % n, plane.stream)
    plane.group_end()
    assert (memory.get(y, got) == n * (n + 1) / 2).all()
    return plane
"""


@pytest.mark.parametrize("version", [21805, 21903, 22203, 22706, 22907, 23004, 23203])
def test_releases_of_nccl(version: int) -> None:
    """The plane works with every release: its configuration's layout, its log, its failures."""
    program = """
with start() as comm:
    plane = works(comm)
    pointer = plane.symmetric_alloc(4096)
    plane.deregister_buffer(plane.register_buffer(pointer, 4096))
say("done")
"""
    result = run_job(2, HEAD + WORKS + program, env={**build().env(version=version), **POLICY})
    assert result.rc == 0 and result.rank_out == ["done\n"] * 2, result.text


def test_two_communicators_and_a_part_of_the_ranks() -> None:
    """One over all ranks and one over half of them live side by side, and end in any order."""
    program = """
half = MPI.COMM_WORLD.Split(RANK % 2)
whole, part = start(), start(half)
for turn in range(3):
    works(whole); works(part)
whole.close() if RANK % 2 else part.close()
whole.close(); part.close()
say("done")
"""
    result = run_job(4, HEAD + WORKS + program, env=env(""))
    assert result.rc == 0 and result.rank_out == ["done\n"] * 4, result.text


def test_shared_gpu() -> None:
    """Ranks may share a GPU if they say so."""
    program = "with start(share_gpu=True) as comm: works(comm)\nsay('done')"
    result = run_job(2, HEAD + WORKS + program, env={**build().env(devices=1), **POLICY})
    assert result.rc == 0 and result.rank_out == ["done\n"] * 2, result.text


def test_a_stream_of_ones_own() -> None:
    """The given stream is the ordered one, and is left when the communicator ends; one that is none ends the start."""
    program = """
from helpers.standin_rank import Gpu
stream = Gpu(RANK).stream()
with start(stream=stream) as comm:
    assert works(comm).stream == int(stream)
    device = comm.backend.device
assert device.ready(int(stream))
try:
    start(stream=12345 if RANK else stream)
except butter_mpi.StartError as error:
    say(error)
"""
    result = run_job(2, HEAD + WORKS + program, env=env(""))
    # The status is another matter: rank 0 may be in a broadcast that rank 1 never came to, and MPI cannot cancel one.
    assert all("rank 1/2 on" in out and "12345 is none" in out for out in result.rank_out), result.text


@pytest.mark.parametrize("required", ["NET/IB", "NET/Socket"])
def test_required_transport(required: str) -> None:
    """The start ends well on the transport that was required, and on every rank with the same error on another one."""
    program = f"""
try:
    with start(require_transport="{required}") as comm: works(comm)
    say("done")
except butter_mpi.TransportError as error:
    say(f"{{error.required}} {{error}}")
"""
    result = run_job(2, HEAD + WORKS + program, env={**build().env(transport="NET/IB"), **POLICY})
    assert result.rc == 0, result.text
    wanted = "done" if required == "NET/IB" else "NET/Socket "
    assert all(out.startswith(wanted) for out in result.rank_out) and len(set(result.rank_out)) == 1, result.text
