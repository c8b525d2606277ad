"""The README program for GPUs; apart from PyTorch, whose own libnccl would be a second one in this process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mpi4py import MPI

import butter_mpi

pytestmark = pytest.mark.mpi

TOTAL = MPI.COMM_WORLD.size * (MPI.COMM_WORLD.size + 1) // 2


def test_readme_program_on_gpus(capfd: pytest.CaptureFixture[str]) -> None:
    """It prints the sum."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    program = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[1]
    exec(compile(program, "README.md", "exec"), {"butter_mpi": butter_mpi})
    assert f"[{TOTAL}. {TOTAL}. {TOTAL}.]" in capfd.readouterr().out
