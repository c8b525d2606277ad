"""What is seen of a process from outside, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from butter_mpi.sentinel.process import Process

Start = Callable[[str], tuple[subprocess.Popen[str], Process]]

WAIT = "sys.stdin.read()"
# Whether the kernel still knows how a process ended that its parent has collected.
REMEMBERS = tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 15)


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a child that says that it is up, then does what it is told."""
    children: list[subprocess.Popen[str]] = []
    seen: list[Process] = []

    def one(code: str) -> tuple[subprocess.Popen[str], Process]:
        head = "import ctypes, os, signal, sys, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))"
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", f"{head}\nprint('up', flush=True)\n{code}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        process = Process(child.pid)
        seen.append(process)
        return child, process

    yield one
    for process in seen:
        process.close()
    for child in children:
        child.kill()
        child.communicate()


def until(child: subprocess.Popen[str], what: int) -> None:
    """Wait for a change of a child without collecting it."""
    assert os.waitid(os.P_PID, child.pid, what | os.WNOWAIT) is not None


def test_alive_stopped_and_on(start: Start) -> None:
    """A process is alive, stopped while SIGSTOP holds it, and alive again."""
    child, process = start(WAIT)
    assert process.state() == "alive"
    child.send_signal(signal.SIGSTOP)
    until(child, os.WSTOPPED)
    assert process.state() == "stopped"
    child.send_signal(signal.SIGCONT)
    until(child, os.WCONTINUED)
    assert process.state() == "alive"


def test_a_debuggers_stop_is_not_a_stop(start: Start) -> None:
    """A process that its tracer stopped is alive."""
    child, process = start("ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), signal.SIGSTOP)")
    until(child, os.WSTOPPED)
    state = process.state()
    # To its tracer, ``Popen.kill`` takes the stop for the end.
    os.kill(child.pid, signal.SIGKILL)
    assert state == "alive"


def test_main_thread_that_ends_alone(start: Start) -> None:
    """A process whose other threads go on without the main one is alive, or stopped with them, until all of it ends."""
    child, process = start(
        f"import threading; threading.Thread(target=lambda: {WAIT}).start()\nctypes.CDLL(None).pthread_exit(None)"
    )
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(") ")[2][0] != "Z":
        os.sched_yield()
    assert process.state() == "alive"
    child.send_signal(signal.SIGSTOP)
    until(child, os.WSTOPPED)
    assert process.state() == "stopped"
    child.kill()
    until(child, os.WEXITED)
    assert (process.state(), process.end()) == ("dying", "was killed by SIGKILL")


ENDINGS = [
    ("os._exit(0)", "ended with exit status 0"),
    ("os._exit(3)", "ended with exit status 3"),
    ("os._exit(255)", "ended with exit status 255"),
    ("raise ValueError", "ended with exit status 1"),
    ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
    ("signal.signal(15, signal.SIG_DFL); os.kill(os.getpid(), 15)", "was killed by SIGTERM"),
    ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
    ("os.abort()", "was killed by SIGABRT"),
    ("os.kill(os.getpid(), 40)", "was killed by signal 40"),
    ("os.kill(os.getpid(), signal.SIGRTMAX)", "was killed by SIGRTMAX"),
]


@pytest.mark.parametrize(("code", "how"), ENDINGS, ids=[code for code, _ in ENDINGS])
def test_how_it_ended(start: Start, code: str, how: str) -> None:
    """Exit status or signal are told of a zombie, and of a process that its parent has collected."""
    child, process = start(f"sys.stdin.readline(); sys.stderr = None; {code}")
    assert process.state() == "alive"
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()
    until(child, os.WEXITED)
    assert (process.state(), process.end()) == ("dying", how)
    child.wait()
    assert process.state() == "gone"
    assert process.end() == (how if REMEMBERS else "ended")


def test_no_such_process(start: Start) -> None:
    """A process that has been collected cannot be looked at, and a look costs no descriptor."""
    child, _ = start("")
    child.wait()
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):
        Process(child.pid)
    assert set(os.listdir("/proc/self/fd")) == before
