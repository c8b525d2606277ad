"""A short Python program in a process of its own, for what is per process: loaded libraries, the C environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["run_child"]

_ROOT = Path(__file__).resolve().parents[2]


def run_child(code: str, *arguments: object, env: dict[str, str] | None = None, timeout: float = 30.0) -> Any:
    """Run ``code`` with ``sys.argv[1:]`` as given and only this environment; return the JSON value that it prints.

    Installed packages are out of its sight (``-S``), so that an installed NCCL wheel decides no test.
    """
    clean = {"PATH": os.environ["PATH"], "PYTHONPATH": str(_ROOT), **(env or {})}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, *map(str, arguments)],
        env=clean,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}{done.stderr}"
    return json.loads(done.stdout)
