"""What ranks of the matrix say to the tool and to one another: lines of JSON in their output files, with the time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def say(what: str, **facts: Any) -> None:
    """Write a line at once, whole."""
    os.write(1, json.dumps({"what": what, "t": time.monotonic(), **facts}).encode() + b"\n")


def parse(text: str) -> list[dict[str, Any]]:
    """Return what was said; a line that a kill has cut is none."""
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [one for one in found if isinstance(one, dict) and "what" in one]


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll what nothing announces; return whether it came."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def folder() -> Path:
    """Return the job's folder, in which ranks and the tool meet."""
    return Path(os.readlink("/proc/self/fd/1")).parent


def verdict_is_out() -> bool:
    """Say whether a watcher's line stands on the standard error of any rank."""
    return any("butter_mpi: " in file.read_text("utf-8", "replace") for file in folder().glob("rank*.err"))


def have_said(what: str, ranks: Iterable[int]) -> bool:
    """Say whether these ranks have said it: their files lie beside this one's."""
    mark = f'{{"what": "{what}"'
    return all((file := folder() / f"rank{rank}.out").exists() and mark in file.read_text() for rank in ranks)
