"""A watcher that cannot be started: every reason is told where the start ends."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from butter_mpi.control import Watch
from butter_mpi.descent import Descent
from butter_mpi.errors import StartError
from butter_mpi.sentinel.client import Offer, Sentinel
from butter_mpi.sentinel.needs import STARTED_BY, needs

_ROOT = Path(__file__).resolve().parents[2]


def start(file: str = "", recorder_file: str = "") -> None:
    """Start a rank alone with its watcher, and leave again."""
    offer = Offer("on", 10, file, recorder_file)
    alone = Descent.of_init("init", 1)
    said = [json.loads(offer.payload())]
    one = Sentinel(offer, said, 0, descent=alone, start_deadline=20, frozen=True, file="")
    try:
        one.wait_until_ready(Watch(20))
    finally:
        one.close()
        one.leave()


def test_everything_is_there() -> None:
    """On this machine nothing is missing, and a watcher starts."""
    assert set(needs().values()) == {""}
    start()


def no_such_call(*_: object) -> int:
    """What an old kernel answers."""
    raise OSError(38, os.strerror(38))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda patch: patch.delattr(os, "pidfd_open"), "pidfd_open: "),
        (lambda patch: patch.setattr(os, "pidfd_open", no_such_call), "pidfd_open: Function not implemented"),
        (lambda patch: patch.delattr(os, "memfd_create"), "memfd_create: "),
        (lambda patch: patch.setattr(os, "readlink", lambda _: "1"), "/proc: it is that of another PID namespace"),
        (lambda patch: patch.setattr(sys, "frozen", True, raising=False), "is a frozen program"),
        (lambda patch: patch.setattr(sys, "executable", "/none"), "/none (sys.executable) is no program"),
    ],
    ids=["old Python", "old kernel", "no memfd", "another /proc", "frozen", "no interpreter"],
)
def test_what_is_missing_is_told(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None], reason: str
) -> None:
    """The start ends with what is missing, and the way round it."""
    change(monkeypatch)
    with pytest.raises(StartError) as told:
        start()
    assert reason in str(told.value) and "watch='off'" in str(told.value)


def test_recorder_file_that_cannot_be_written(tmp_path: Path) -> None:
    """What is looked at is the file of this host, which has its name; a folder is none."""
    (tmp_path / f"r.{socket.gethostname()}.jsonl").mkdir()
    for name, said in (("r.jsonl", f"r.{socket.gethostname()}.jsonl: no"), ("", "no"), ("none/r", "none: no such")):
        with pytest.raises(StartError) as told:
            start(recorder_file=f"{tmp_path}/{name}")
        text = str(told.value)
        assert "recorder_file (BUTTER_MPI_RECORDER_FILE) cannot be appended to" in text and said in text, text


def test_verdict_file_in_a_folder_of_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The setting is named, and the remedy is another file: the watcher itself can run."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(StartError) as told:
        start(str(tmp_path / "v.json"))
    said = f"cannot be appended to (rank 0: {tmp_path}: not a folder to write to); name a file"
    assert f"verdict_file (BUTTER_MPI_VERDICT_FILE) {said}" in str(told.value) and "watch='off'" not in str(told.value)


def test_package_in_a_zip_file(tmp_path: Path) -> None:
    """The watcher is started by file name, which a package in a zip file has not; it is told so."""
    shutil.make_archive(str(tmp_path / "package"), "zip", _ROOT, "butter_mpi")
    code = f"from butter_mpi.sentinel.needs import *; print(needs()[{STARTED_BY!r}])"
    env = {"PYTHONPATH": str(tmp_path / "package.zip")}
    said = subprocess.check_output([sys.executable, "-c", code], env=env, cwd=tmp_path, text=True, timeout=60)
    assert "package.zip" in said and "not in a zip file" in said


def test_last_words_of_a_watcher_that_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a watcher that came to its end wrote on its standard error is the reason that the start gives."""
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexec /bin/sh -c 'echo first; echo cannot run here; exit 1' >&2\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(StartError, match=r"the watcher of this node has ended \(cannot run here\)"):
        start()
