"""Jobs of several users on one machine at one time: neither meets, hears or harms the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers.job import Job, Plan
from helpers.mpirun import find_mpi
from helpers.require import need

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
# Without accounts, as in many containers.
USERS = (54321, 54322)
# Operations without an end. Beside them rank 0 does what a file in its working folder asks for: "look" at all that the
# other user's job has here, or "end".
PROGRAM = """
import array, contextlib, json, os, socket, struct, time
import numpy as np
import butter_mpi
from butter_mpi.sentinel import messages

def names():
    with open("/proc/net/unix") as table:
        return {line.split()[-1][1:] for line in table if "@butter_mpi-" in line}

def call(name, *, first):
    '''Connect to a socket of the other user's watcher, and show what comes from there; None: it is not the other's.'''
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(10)
        sock.connect("\\0" + name)
        if struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1] not in {OTHERS}:
            return None
        with contextlib.suppress(OSError):
            first(sock)
        try:
            return sock.recv(1 << 16).decode()
        except ConnectionResetError:
            return ""

def hello(name):
    def say(sock):
        data = messages.pack("hello", rank=0, secret=name.removeprefix("butter_mpi-") * 2, older=[])
        descriptor = array.array("i", [os.memfd_create("recorder")])
        sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor)])
    return say

def taken(name):
    '''Whether a name cannot be had a second time.'''
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.bind("\\0" + name)
    except OSError:
        return True
    return False

def opened(path):
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        file.read(1)
        return True
    return False

def look():
    '''All that this user can have of the other one's job.'''
    said, found = {}, []
    for name in sorted(names()):
        attempts = [lambda sock: None, hello(name), lambda sock: sock.send(messages.pack("bye"))]
        heard = [call(name, first=first) for first in attempts]
        if None not in heard:
            said[name] = [heard, taken(name)]
    looked = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/cmdline", "rb") as line:
                ours = b"python" in line.read()
            if os.stat(f"/proc/{pid}").st_uid in {OTHERS} and ours:
                looked += 1
                found += [f"/proc/{pid}/{one}" for one in ("environ", "mem", "maps") if opened(f"/proc/{pid}/{one}")]
                found += [f"/proc/{pid}/fd/{one}" for one in os.listdir(f"/proc/{pid}/fd")]
    for place in ("/dev/shm", "/tmp"):
        for folder, _, files in os.walk(place):
            for path in (os.path.join(folder, one) for one in files):
                with contextlib.suppress(OSError):
                    if os.lstat(path).st_uid in {OTHERS} and opened(path):
                        found.append(path)
    return {"said": said, "looked": looked, "found": found}

comm = butter_mpi.init(plane="host")
signs = 0
while True:
    asked = np.array([comm.rank == 0 and os.path.exists(name) for name in ("look", "end")], np.int32)
    comm.all_reduce(asked)
    if asked[0] and comm.rank == 0:
        os.rename("look", "looked")
        print("looked " + json.dumps(look()), flush=True)
    if asked[1]:
        break
    signs += 1
    if signs % 50 == 1:
        print(f"sign {signs} .", flush=True)
comm.close()
"""


def python(user: int) -> tuple[str, dict[str, str | None]]:
    """Return a Python that a user may run, and what its environment needs for the packages and the MPI of the tests.

    That of the environment may lie in the home of root.
    """
    own = Path(find_mpi("mpich").python)
    packages = own.parents[1] / f"lib/python3.{sys.version_info.minor}/site-packages"
    path = os.pathsep.join([str(TESTS), str(ROOT), str(packages)])
    env: dict[str, str | None] = {"PYTHONPATH": path, "MPI4PY_LIBMPI": str(own.parents[1] / "lib/libmpi.so.12")}
    tried = {}
    for one in (str(own), f"/usr/bin/python3.{sys.version_info.minor}"):
        try:
            whole = {name: str(value) for name, value in env.items()}
            subprocess.run([one, "-c", "import numpy, mpi4py.MPI"], env=whole, user=user, check=True)
            return one, env
        except (OSError, subprocess.CalledProcessError) as error:
            tried[one] = str(error)
    need("user", False, f"another user can run no Python here: {tried}")
    raise AssertionError


def start(user: int) -> Job:
    """Start one user's job; the other one's is what it looks at."""
    others = {one for one in USERS if one != user}
    files = {"BUTTER_MPI_VERDICT_FILE": "verdict.jsonl", "BUTTER_MPI_RECORDER_FILE": "recorder.jsonl"}
    interpreter, env = python(user)
    plan = Plan(2, PROGRAM.replace("{OTHERS}", str(others)), interpreter, {**env, **files}, user=user)
    return Job([find_mpi("mpich").mpirun, "-np", "2"], plan, {})


def look(job: Job) -> dict[str, Any]:
    """Have a job look at what it can have of the other one."""
    (job.folder / "cwd" / "look").touch()
    job.wait_for("looked ", 0)
    job.wait_for("}\n", 0)
    line = next(line for line in job.read(0, "out").splitlines() if line.startswith("looked "))
    return dict(json.loads(line.removeprefix("looked ")))


def test_jobs_of_two_users_do_not_meet() -> None:
    """Neither reads, joins or takes anything of the other; a death in one is told there, and the other goes on."""
    need("root", os.geteuid() == 0, "other users cannot be had")

    with start(USERS[0]) as first, start(USERS[1]) as second:
        for job in (first, second):
            job.wait_for("sign ", 0)
        for job, other in ((first, second), (second, first)):
            seen = look(job)
            assert seen["looked"] >= 2 and seen["found"] == [], seen
            assert len(seen["said"]) == 1 and list(seen["said"].values()) == [[["", "", ""], True]], seen
            assert all(not other.read(rank, "err") for rank in range(2)), other.read(0, "err")
        first.signal(1, signal.SIGKILL)
        ended = first.wait()
        shown = second.read(1, "out").count("sign ")
        second.wait_for(f"sign {shown * 50 + 1} ", 1)
        (second.folder / "cwd" / "end").touch()
        well = second.wait()
        verdict = json.loads((first.folder / "cwd" / "verdict.jsonl").read_text())["verdict"]
        assert ended.rc != 0 and verdict["lost"] == [1] and "was killed by SIGKILL" in verdict["text"], ended.text
        assert well.rc == 0 and well.rank_err == ["", ""], well.text
        assert not list((second.folder / "cwd").glob("*.jsonl")), well.text
