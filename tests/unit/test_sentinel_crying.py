"""Writing to the standard error of another process: in place, at once, and nothing is kept open."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from butter_mpi.sentinel.crying import cry, readable
from butter_mpi.sentinel.process import Process
from butter_mpi.sentinel.watched import Rank

SCRIPT = """
import os, sys
{first}
print("up", flush=True)
sys.stdin.readline()
os.write(2, b"after\\n")
"""


@contextmanager
def child(first: str, stderr: int) -> Iterator[tuple[subprocess.Popen[str], Process]]:
    """A child with this standard error, which writes to it again when it is told to go on."""
    one = subprocess.Popen(
        [sys.executable, "-S", "-c", SCRIPT.format(first=first)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )
    process = Process(one.pid)
    try:
        assert one.stdout is not None and one.stdout.readline() == "up\n"
        yield one, process
    finally:
        process.close()
        one.kill()
        one.communicate()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """The ends of a pipe: to read, to write."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def fill(end: int) -> None:
    """Fill a pipe until it takes no byte more."""
    os.set_blocking(end, False)
    while True:
        try:
            os.write(end, b"." * 4096)
        except BlockingIOError:
            break
    os.set_blocking(end, True)


def test_neither_overwrites_the_other(tmp_path: Path) -> None:
    """In a file that the process did not open to append, both go on writing one behind the other."""
    path = tmp_path / "err"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        with child('os.write(2, b"before\\n")', fd) as (one, process):
            assert cry(process, "cried \u2026\n")
            one.communicate("\n")
    finally:
        os.close(fd)
    assert path.read_text(encoding="utf-8") == "before\ncried \u2026\nafter\n"


def test_pipe(pipe: tuple[int, int]) -> None:
    """A launcher's pipe gets the text; nothing is kept open, so that its end can come."""
    before = set(os.listdir("/proc/self/fd"))
    with child("", pipe[1]) as (_, process):
        opened = set(os.listdir("/proc/self/fd"))
        assert cry(process, "cried\n")
        assert set(os.listdir("/proc/self/fd")) == opened
    assert os.read(pipe[0], 100) == b"cried\n"
    assert set(os.listdir("/proc/self/fd")) == before


def test_full_pipe(pipe: tuple[int, int]) -> None:
    """A pipe that nobody reads any more costs no time, and the answer is no."""
    fill(pipe[1])
    with child("", pipe[1]) as (_, process):
        assert told_within(3, process, "cried\n") == [False]


def test_pipe_with_less_room_than_the_text(pipe: tuple[int, int]) -> None:
    """Where the pipe has room for a part of the text only, that costs no time either."""
    fill(pipe[1])
    os.read(pipe[0], 4096)
    with child("", pipe[1]) as (_, process):
        told = told_within(3, process, "x" * 8000)
        # Whoever still waits in it is let go.
        os.read(pipe[0], 1 << 20)
    assert told


def told_within(seconds: float, process: Process, text: str) -> list[bool]:
    """What ``cry`` returned, if it did in time."""
    told: list[bool] = []
    thread = threading.Thread(target=lambda: told.append(cry(process, text)), daemon=True)
    thread.start()
    thread.join(seconds)
    return list(told)


def test_no_standard_error() -> None:
    """A closed standard error is answered with no."""
    with child("os.close(2)", subprocess.DEVNULL) as (_, process):
        assert not cry(process, "cried\n")


def test_dead_process() -> None:
    """So is that of a zombie, and of a process that is gone."""
    with child("", subprocess.DEVNULL) as (one, process):
        one.kill()
        os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
        assert not cry(process, "cried\n")
        one.wait()
        assert not cry(process, "cried\n")


def test_whom_a_rank_was_started_by() -> None:
    """Node daemon, launcher, and the script that started it: its standard error is there when those are gone."""
    nested = "sh -c 'sh -c \"echo \\$\\$; read line\"; true'; true"
    with subprocess.Popen(["sh", "-c", nested], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        known: dict[int, Process] = {}
        pid = int(script.stdout.readline())
        rank, other = Rank(0, pid, known), Rank(1, pid, known)
        found = [one.pid for one in rank.ancestors]
        # Descriptors may be few, where a node has many ranks.
        assert list(map(id, other.ancestors)) == list(map(id, rank.ancestors)), "opened for each rank"
        for one in rank.ancestors:
            one.close()
        script.communicate("\n")
    assert found[1:3] == [script.pid, os.getpid()], found


@pytest.mark.parametrize(
    ("ending", "order"),
    [
        ("", ["rank", "other", "daemon", "launcher", "script"]),
        ("rank", ["other", "rank", "daemon", "launcher", "script"]),
        ("rank other", ["rank", "other", "daemon", "launcher", "script"]),
        ("rank other daemon", ["launcher", "script", "rank", "other", "daemon"]),
        ("rank other daemon launcher", ["script", "rank", "other", "daemon", "launcher"]),
        ("daemon launcher", ["rank", "other", "script", "daemon", "launcher"]),
        ("rank other script", ["rank", "other", "daemon", "launcher", "script"]),
    ],
)
def test_whose_standard_error_will_be_read(ending: str, order: list[str]) -> None:
    """Whoever lives is first; the pipe of ranks that end is read as long as their parent lives."""
    stand = {name: Stand(name, name in ending.split()) for name in ("rank", "other", "daemon", "launcher", "script")}
    ranks, ancestors = [stand["rank"], stand["other"]], [stand["daemon"], stand["launcher"], stand["script"]]
    found = readable(cast("list[Process]", ranks), cast("list[Process]", ancestors))
    assert [one.name for one in cast("list[Stand]", found)] == order


@dataclass(frozen=True)
class Stand:
    """A process by name, which has ended or not."""

    name: str
    dead: bool
