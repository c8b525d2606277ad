"""How a program ends, as it is known at its exit: the status is Python's own, or not known."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAD = """
import atexit, sys
from butter_mpi.outcome import OUTCOME as outcome
atexit.register(lambda: print(outcome.status(), flush=True))
def main(end):
    outcome.observe()
    end()
def caught(end):
    try:
        end()
    except SystemExit:
        pass
def leave(status):
    raise SystemExit(status)
"""

ENDS = {
    "main(lambda: None)": ("0", 0),
    "sys.exit(main(lambda: None))": ("0", 0),
    "main(lambda: sys.exit(3))": ("3", 3),
    "main(lambda: sys.exit('no'))": ("1", 1),
    "main(lambda: sys.exit(-1))": ("255", 255),
    "try:\n    main(lambda: sys.exit(3))\nfinally:\n    str()": ("3", 3),
    "main(lambda: caught(lambda: sys.exit(3)))": ("0", 0),
    "try:\n    main(lambda: sys.exit(3))\nexcept SystemExit:\n    pass": ("0", 0),
    "main(lambda: leave(3))": ("None", 3),
    "main(lambda: (caught(lambda: sys.exit(0)), leave(3)))": ("None", 3),
    "try:\n    main(lambda: sys.exit(0))\nexcept SystemExit:\n    pass\nleave(3)": ("None", 3),
    "main(lambda: None)\nprint(outcome.status())": ("0\n0", 0),
    "try:\n    main(lambda: leave(3))\nfinally:\n    print(outcome.status())": ("3\nNone", 3),
    "try:\n    main(lambda: 1 // 0)\nexcept ZeroDivisionError:\n    print(outcome.status())": ("1\n0", 0),
}


@pytest.mark.parametrize("end", ENDS)
def test_status_of_the_end(end: str) -> None:
    """No failure is taken for success, whatever was caught before; a running program has not failed."""
    done = subprocess.run([sys.executable, "-c", HEAD + end], capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout.strip(), done.returncode) == ENDS[end], done


def test_exit_of_another_thread_is_none() -> None:
    """What ends a thread ends no program."""
    end = "import threading\nthread = threading.Thread(target=sys.exit, args=(3,))\nmain(thread.start)\nthread.join()"
    done = subprocess.run([sys.executable, "-c", HEAD + end], capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout.strip(), done.returncode) == ("0", 0), done
