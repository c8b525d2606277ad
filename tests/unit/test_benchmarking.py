"""What the benchmarks say where measuring fails."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import pytest

from butter_mpi import benchmarking, bootstrap
from butter_mpi.errors import ButterError, PeerLostError


class _Comm(contextlib.AbstractContextManager[Any]):
    rank, world_size = 1, 2

    def __exit__(self, *_: object) -> None:
        return None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ButterError("plane: wrong at element 0"), "rank 1: plane: wrong at element 0"),
        (PeerLostError("rank 1/2 on n01: told by rank 0/2"), "rank 1/2 on n01: told by rank 0/2"),
    ],
)
def test_failure_names_its_rank_once(
    error: ButterError, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors of the communicator begin with the rank, others do not."""
    monkeypatch.setattr(bootstrap, "init", lambda **_: _Comm())
    monkeypatch.setattr(benchmarking, "set_unset_policy", dict)

    def measure(_comm: Any) -> None:
        raise error

    assert benchmarking.run("bench", argparse.Namespace(share_gpu=False), measure) == 3
    assert capsys.readouterr().err == f"butter_mpi.bench: {said}\n"
