"""Importing butter_mpi, or its pytest plugin, loads nothing heavy and touches no device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

HEAVY = {"mpi4py", "numpy", "ml_dtypes", "cuda", "jsonschema", "cupy", "torch"}

# The audit hook sees also what C code opens, loads and starts.
PROGRAM = """
import json, sys
events = []
watched = ("open", "ctypes.dlopen", "subprocess.Popen", "os.fork", "os.exec", "socket.__new__")
sys.addaudithook(lambda event, args: events.append([event, str(args[0])]) if event in watched else None)
before = set(sys.modules)
import {module}
loaded = sorted(set(sys.modules) - before)
print(json.dumps({{"loaded": loaded, "events": events}}))
"""


def observe(module: str) -> dict[str, Any]:
    """Import a module in a fresh interpreter; return what it loaded and did."""
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", PROGRAM.format(module=module)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=env)
    return dict(json.loads(done.stdout))


MODULES = ["butter_mpi", "butter_mpi.pytest_plugin", "butter_mpi.errors", "butter_mpi.settings", "butter_mpi.receipt"]


@pytest.mark.parametrize("module", MODULES)
def test_nothing_heavy_is_imported(module: str) -> None:
    """No MPI, array or CUDA package is loaded."""
    loaded = {name.split(".")[0] for name in observe(module)["loaded"]}
    assert "butter_mpi" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize("module", MODULES)
def test_no_library_device_or_process_is_touched(module: str) -> None:
    """No shared library is opened by name, no device file, no socket, and no process is started."""
    for event, subject in observe(module)["events"]:
        if event == "open":
            assert not subject.startswith(("/dev/nvidia", "/dev/infiniband", "/dev/shm", "/proc")), subject
        else:
            assert (event, subject) == ("ctypes.dlopen", "None"), (event, subject)


def test_the_door_opens_one_module() -> None:
    """``import butter_mpi`` loads the door, the version and what sees the program's end, and little else."""
    loaded = observe("butter_mpi")["loaded"]
    own = {"butter_mpi", "butter_mpi._version", "butter_mpi.outcome"}
    assert {name for name in loaded if name.startswith("butter_mpi")} == own
    roots = {name.split(".")[0] for name in loaded} - {"butter_mpi"}
    assert roots <= sys.stdlib_module_names
    plain = observe("typing, importlib")["loaded"]
    assert set(loaded) - set(plain) <= {"__future__", "atexit", *own}
