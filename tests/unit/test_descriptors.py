"""Our own descriptors beside standard streams that are closed, and files in memory on old and strict kernels."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from butter_mpi.descriptors import memory_file

_ROOT = Path(__file__).resolve().parents[2]

# A rank alone with its watcher, started without standard streams; tells which descriptors stay open, and that it works.
CLOSED = """
import json, os, sys
os.closerange(0, 3)
from butter_mpi.control import Watch
from butter_mpi.descent import Descent
from butter_mpi.sentinel.client import Offer, Sentinel
from butter_mpi.sentinel.process import Process
offer = Offer("on", 10)
process = Process(os.getpid())
alone, said = Descent.of_init("init", 1), [json.loads(offer.payload())]
sentinel = Sentinel(offer, said, 0, descent=alone, start_deadline=20, frozen=True, file="")
sentinel.wait_until_ready(Watch(20))
with open(sys.argv[1], "w") as file:
    taken = [fd for fd in range(3) if os.path.exists(f"/proc/self/fd/{fd}") and fd != file.fileno()]
    json.dump(taken, file)
sentinel.leave()
"""


def test_nothing_of_ours_takes_the_place_of_a_standard_stream(tmp_path: Path) -> None:
    """Where 0 to 2 are closed they stay so: what a library writes there must not reach a recorder or a socket."""
    file = tmp_path / "taken"
    command = [sys.executable, "-c", CLOSED, str(file)]
    done = subprocess.run(command, env={"PYTHONPATH": str(_ROOT)}, timeout=60, check=False)
    assert done.returncode == 0 and json.loads(file.read_text()) == []


@pytest.mark.parametrize(
    ("kernel", "refused"), [("old", errno.EINVAL), ("strict", errno.EACCES)], ids=["before Linux 6.3", "memfd_noexec=2"]
)
def test_memory_file_of_any_kernel(monkeypatch: pytest.MonkeyPatch, kernel: str, refused: int) -> None:
    """A kernel that does not know the seal against execution gives one without, one that demands it one with."""
    create = os.memfd_create

    def memfd_create(name: str, flags: int) -> int:
        if bool(flags & 8) == (kernel == "old"):
            raise OSError(refused, os.strerror(refused))
        return create(name, flags & ~8)

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    os.close(memory_file("try"))
