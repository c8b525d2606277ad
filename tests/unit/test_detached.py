"""Calls in threads of their own: results and errors, bounds, and an exit that does not wait."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from butter_mpi.control import Overdue, Watch
from butter_mpi.detached import Detached, wait_for_all


def test_results_and_errors_come_back() -> None:
    """What the call returns or raises is what the caller gets, each time that it asks."""
    done = Detached(lambda: 7)
    assert [done.result(Watch(10), "seven") for _ in range(2)] == [7, 7] and done.done
    failing = Detached(lambda: 1 // 0)
    failing.wait()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failing.result(Watch(10), "nothing")


def test_a_wait_is_bounded_and_the_call_goes_on() -> None:
    """At the deadline the wait ends with the step's name; the call is left to itself, and can be waited for again."""
    go = threading.Event()
    running = Detached(go.wait, "it never came", 0.01)
    with pytest.raises(Overdue, match=r"^the step: not done after 0\.\d s$"):
        running.result(Watch(0.1), "the step")
    assert not running.done and wait_for_all(0.05) == ["it never came"]
    go.set()
    assert running.result(Watch(10), "the step") is True and wait_for_all(10) == []


def test_what_must_return_is_waited_for_longer() -> None:
    """A call that must return has its own patience; one that need not is left at once, and means nothing."""
    go = threading.Event()
    left, hoped = Detached(go.wait), Detached(lambda: go.wait(0.3), "it never came", 20)
    assert wait_for_all(0.01) == [] and hoped.done and not left.done
    go.set()
    left.wait()


def test_what_else_ends_a_wait() -> None:
    """The look may raise; the call goes on."""
    go = threading.Event()
    running = Detached(go.wait)

    def look() -> None:
        raise RuntimeError("a rank is lost")

    with pytest.raises(RuntimeError, match="a rank is lost"):
        running.result(Watch(10), "the step", look)
    go.set()
    running.wait()
    assert running.done


def test_the_exit_waits_for_no_call() -> None:
    """A call that never returns, in C or Python, holds up no exit, and does not change its status."""
    program = """
import ctypes, threading
from butter_mpi.detached import Detached
libc = ctypes.CDLL(None)
started = threading.Barrier(3)
def in_c(): started.wait(); libc.pause()
def in_python(): started.wait(); threading.Event().wait()
Detached(in_c); Detached(in_python)
started.wait()
raise SystemExit(3)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (3, "")
