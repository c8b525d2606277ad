"""What a rank says of itself: everything, as plain values, and never an exception."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from helpers.records import device, make_record
from helpers.records import library as library_of

from butter_mpi import cuda, library, record
from butter_mpi.errors import CUDAError, LibraryNotFoundError
from butter_mpi.launch import LaunchInfo
from butter_mpi.record import collect_record
from butter_mpi.settings import Settings

ABSENT = CUDAError("no CUDA driver: install one", call="dlopen", code=cuda.NO_DRIVER)
BROKEN = CUDAError("cuInit failed with X (803)", call="cuInit", code=803)


def answer(value: Any) -> Any:
    """Raise an exception, return anything else."""
    if isinstance(value, Exception):
        raise value
    return value


def use(monkeypatch: pytest.MonkeyPatch, *, devices: Any, loaded: Any) -> list[Any]:
    """Replace what looks at this machine; an exception is raised, anything else returned. Returns the hashing flags."""
    asked: list[Any] = []

    def describe(env: Any, hashed: bool = True) -> Any:
        asked.append(hashed)
        return answer(loaded)

    monkeypatch.setattr(cuda, "devices", lambda env: answer(devices))
    monkeypatch.setattr(library, "describe", describe)
    return asked


def collect(plane: str, size: int = 2, local_rank: int | None = 0, **how: Any) -> dict[str, Any]:
    """The record of rank 0."""
    return collect_record(Settings(plane=plane), LaunchInfo("mpich", size, 0, local_rank), 0, size, **how)


def test_record_has_every_field_that_the_comparison_reads() -> None:
    """The records that other tests make are of the same form as the real ones."""
    real, made = collect("host"), make_record(0, 2)
    assert real.keys() == made.keys()
    assert real["launch"].keys() == made["launch"].keys() and real["settings"].keys() == made["settings"].keys()


def test_record_is_plain_and_says_where_it_is_from() -> None:
    """JSON carries it unchanged; host and process are this one's; what the caller knows is in it."""
    said = collect("host", plan={"operation": "barrier"}, failures=["a"], extra={"sequence": 7, "thread_level": 3})
    assert json.loads(json.dumps(said)) == said
    assert (said["host"], said["pid"]) == (socket.gethostname(), os.getpid())
    assert (said["plan"], said["failures"], said["sequence"]) == ({"operation": "barrier"}, ["a"], 7)
    assert said["comm_world_size"] == 2


def test_environment_is_the_effective_one_without_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Values come from the environment and from files, each with its source; a secret leaves only a stand-in."""
    path = tmp_path / "nccl.conf"
    path.write_text("NCCL_ALGO=Ring\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(path))
    monkeypatch.setenv("NCCL_PROTO", "LL")
    monkeypatch.setenv("NCCL_FOO_TOKEN", "s3cret")
    said = collect("host")
    assert said["environment"]["NCCL_PROTO"] == ["LL", "environment"]
    assert said["environment"]["NCCL_ALGO"] == ["Ring", str(path)]
    assert "s3cret" not in json.dumps(said) and said["environment"]["NCCL_FOO_TOKEN"][0].startswith("<hidden: ")


@pytest.mark.parametrize(("plane", "size"), [("host", 2), ("nccl", 1), ("auto", 1)])
def test_device_and_library_are_looked_at_only_where_needed(
    monkeypatch: pytest.MonkeyPatch, plane: str, size: int
) -> None:
    """The host plane and a single rank open no driver and no library."""
    error = AssertionError("looked at")
    asked = use(monkeypatch, devices=error, loaded=error)
    said = collect(plane, size)
    assert asked == [] and said["failures"] == []
    assert [said[k] for k in ("device", "device_absent", "device_error", "library", "library_error")] == [None] * 5


def test_nccl_plane_has_device_and_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of the local rank, with what this process sees, and the library."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    asked = use(monkeypatch, devices=[device(0), device(1)], loaded=library_of())
    said = collect("nccl", local_rank=1)
    assert said["device"] == device(1, local_rank=1, visible=2, cuda_visible_devices="2,3")
    assert said["library"] == library_of() and asked == [False]


@pytest.mark.parametrize(("local_rank", "hashed"), [(0, True), (1, False), (7, False), (None, True)])
def test_one_rank_a_node_hashes(monkeypatch: pytest.MonkeyPatch, local_rank: int | None, hashed: bool) -> None:
    """The first rank of a node reads the file; where no local rank is known, each one does."""
    asked = use(monkeypatch, devices=[device(i) for i in range(8)] if local_rank else [device()], loaded=library_of())
    collect("nccl", local_rank=local_rank)
    assert asked == [hashed]


def test_auto_without_a_device_loads_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Absence is noted with its reason; there is nothing to load NCCL for."""
    asked = use(monkeypatch, devices=ABSENT, loaded=AssertionError("looked at"))
    said = collect("auto")
    assert (said["device_absent"], said["device_error"], said["library"]) == (ABSENT.message, None, None)
    assert asked == []


def test_nccl_without_a_device_still_describes_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both findings come in one report."""
    use(monkeypatch, devices=ABSENT, loaded=library_of())
    said = collect("nccl")
    assert said["device_absent"] == ABSENT.message and said["library"] == library_of()


def test_rank_without_a_device_of_its_own_is_an_error_under_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """More ranks than devices is a fault: auto does not turn it into another plane."""
    use(monkeypatch, devices=[device(0), device(1)], loaded=library_of())
    said = collect("auto", local_rank=2)
    assert said["device_absent"] is None and said["device_error"].startswith("local rank 2 has no device: 2 visible")


@pytest.mark.parametrize("plane", ["auto", "nccl"])
def test_broken_driver_is_an_error_and_no_absence(monkeypatch: pytest.MonkeyPatch, plane: str) -> None:
    """A driver that fails is told as such, under auto too."""
    use(monkeypatch, devices=BROKEN, loaded=library_of())
    said = collect(plane)
    assert (said["device_absent"], said["device_error"]) == (None, BROKEN.message)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (LibraryNotFoundError("no file:\n tried", tried=("a",)), "no file: tried"),
        (RuntimeError("boom"), "RuntimeError: boom"),
        (MemoryError(), "MemoryError:"),
    ],
)
def test_whatever_fails_becomes_part_of_the_record(
    monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    """No exception leaves: it is one line of text in the record, so that no rank waits for another's."""
    use(monkeypatch, devices=error, loaded=error)
    monkeypatch.setattr(record, "check_policy", lambda env: answer(error))
    said = collect("nccl")
    assert said["device_error"] == said["library_error"] == text
    assert said["failures"] == [text] and said["policy"] == {}
