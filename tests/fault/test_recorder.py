"""Records of live and dead ranks of real jobs, written when a communicator breaks or a rank is asked, and merged."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

from helpers.mpirun import find_mpi, run_job, start_job
from helpers.recordings import validator
from helpers.standin import build

ROOT = Path(__file__).resolve().parents[2]

HEAD = """
import os, time
import numpy as np
import butter_mpi
from mpi4py import MPI
RANK = MPI.COMM_WORLD.rank
x = np.zeros(3, np.float32)
comm = butter_mpi.init(plane="host")
for _ in range(20):
    comm.all_reduce(x)
"""


def merged(*files: Path) -> tuple[int, str, dict[str, Any]]:
    """What the command says of files: status, text and JSON."""
    told = {}
    for option in ("--last=3", "--json"):
        command = [find_mpi("mpich").python, "-m", "butter_mpi.recorder", option, *map(str, files)]
        told[option] = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert not told[option].stderr
    found = json.loads(told["--json"].stdout)
    validator("merged").validate(found)
    return told["--last=3"].returncode, told["--last=3"].stdout, found


def test_rank_that_submits_something_else_is_named(tmp_path: Path) -> None:
    """One that differs is named by the watcher's file and by what ranks were asked for; files are made only then."""
    program = """
comm.dump_recorder("calm.jsonl")
comm.barrier()
assert os.listdir() == ["calm.jsonl"], os.listdir()
MPI.COMM_WORLD.Barrier()
alone = butter_mpi.init(MPI.COMM_SELF, plane="host")
try:
    alone.dump_recorder("alone.jsonl")
except butter_mpi.NotSupportedError as error:
    print(error)
alone.close()
try:
    if RANK == 1:
        comm.broadcast(x, root=2)
    comm.all_reduce(x)
except butter_mpi.CollectiveMismatchError:
    comm.dump_recorder(f"own{RANK}.jsonl")
comm.attempt_reconnect()
comm.all_reduce(x)
comm.sendrecv(x, (RANK + 1) % 3, x.copy(), (RANK - 1) % 3)
comm.dump_recorder("again.jsonl")
comm.close()
try:
    comm.dump_recorder("late.jsonl")
except butter_mpi.CommunicatorClosedError:
    print("closed")
MPI.COMM_WORLD.Barrier()
"""
    result = run_job(3, HEAD + program, env={"BUTTER_MPI_RECORDER_FILE": "recorder.jsonl"}, cwd=tmp_path)
    assert result.rc == 0, result.text
    assert all("dump_recorder: one rank alone has no recorder" in out for out in result.rank_out), result.text
    assert all("closed" in out for out in result.rank_out), result.text
    host = socket.gethostname()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["again.jsonl", "calm.jsonl", "own0.jsonl", "own1.jsonl", "own2.jsonl", f"recorder.{host}.jsonl"]
    )
    status, text, found = merged(tmp_path / "calm.jsonl")
    assert status == 0 and "every rank that is here submitted the same 20 collectives" in text, text
    status, text, found = merged(tmp_path / "again.jsonl")
    (communicator,) = found["communicators"]
    assert status == 0 and (communicator["epoch"], communicator["common"]) == (1, 23), text
    assert [one["pairs"]["kept"] for one in communicator["ranks"]] == [2, 2, 2], text
    assert [one["collectives"]["kept"] for one in communicator["ranks"]] == [1, 1, 1], text
    line = (HEAD + program).splitlines().index("        comm.broadcast(x, root=2)") + 1
    for files in ([tmp_path / f"recorder.{host}.jsonl"], [tmp_path / f"own{rank}.jsonl" for rank in range(3)]):
        status, text, found = merged(*files)
        (communicator,) = found["communicators"]
        assert status == 1 and communicator["divergence"]["number"] == 22 and communicator["common"] == 21, text
        groups = {tuple(group["ranks"]): group["text"] for group in communicator["divergence"]["groups"]}
        assert re.fullmatch(rf"broadcast #22 \(float32 x 3, root 2\) at .*program\.py:{line}", groups[1,]), text
        assert re.fullmatch(rf"all_reduce #22 \(float32 x 3, sum\) at .*program\.py:{line + 1}", groups[0, 2]), text
        assert "first divergence: collective number 22\n" in text, text


def test_killed_rank_is_behind(tmp_path: Path) -> None:
    """What a killed rank had submitted is there with how it ended, in each communicator of its process."""
    program = """
part = comm.dup()
part.barrier()
if RANK == 1:
    print("ready", flush=True)
    time.sleep(60)
comm.all_reduce(x)
"""
    variables = {"BUTTER_MPI_RECORDER_FILE": str(tmp_path / "recorder")}
    with start_job(3, HEAD + program, env=variables, timeout=30) as job:
        job.wait_for("ready", 1)
        job.signal(1, signal.SIGKILL)
        result = job.wait()
    status, text, found = merged(tmp_path / f"recorder.{socket.gethostname()}")
    by_name = {one["name"]: one for one in found["communicators"]}
    assert status == 1 and set(by_name) == {"init", "dup 1"}, text + result.text
    behind = by_name["init"]["behind"]
    assert (behind["after"], behind["ranks"]) == (20, [1]) and by_name["dup 1"]["behind"] is None, text
    for one in by_name.values():
        assert "rank 1/3 " in one["cause"] and "was killed by SIGKILL" in one["cause"], text
        assert (one["ranks"][1]["state"], one["ranks"][1]["how"]) == ("ended", "was killed by SIGKILL"), text
        assert not one["missing"] and one["divergence"] is None, text


def test_collective_that_a_rank_left_out_on_a_device(tmp_path: Path) -> None:
    """On the nccl plane ranks are far beyond it when the watcher sees it: what was left out is named."""
    program = """
import numpy as np
import butter_mpi
from butter_mpi import DType
from helpers.memory import DeviceMemory
from mpi4py import MPI
RANK = MPI.COMM_WORLD.rank
comm = butter_mpi.init(plane="nccl")
plane = comm.backend
x = DeviceMemory(plane.device, plane.stream).put(np.zeros(100, np.float32))
try:
    # Together: all are in the recorder before the watcher looks again.
    plane.group_start()
    for turn in range(1, 101):
        if (RANK, turn) != (1, 51):
            plane.all_reduce(x, 4 * turn, dtype=DType.FLOAT32)
    plane.group_end()
    comm.wait_for_async_error(20)
except butter_mpi.CollectiveMismatchError:
    print("differs")
comm.abort()
"""
    variables = {"BUTTER_MPI_RECORDER_FILE": str(tmp_path / "r"), "NCCL_IB_TIMEOUT": "10", "NCCL_IB_RETRY_CNT": "1"}
    result = run_job(3, program, env={**build().env(), **variables})
    assert result.rank_out == ["differs\n"] * 3, result.text
    status, text, found = merged(tmp_path / f"r.{socket.gethostname()}")
    (communicator,) = found["communicators"]
    divergence = communicator["divergence"]
    assert status == 1 and (divergence["number"], divergence["exact"]) == (51, True), text
    assert divergence["hint"].startswith("rank 1 seems to have left out all_reduce #51 (float32 x 51, sum) at "), text
