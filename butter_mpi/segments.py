"""The files in shared memory that MPI libraries leave behind where a process does not come out of MPI_Finalize."""

from __future__ import annotations

import contextlib
import os
import re

__all__ = ["OPEN_EVERYWHERE", "SEGMENTS", "unlink_mapped"]

SEGMENTS = re.compile(r"/dev/shm/(mpich_shm_|sm_segment\.|vader_segment\.).*")
"""Those of MPICH and Open MPI."""
OPEN_EVERYWHERE = re.compile(r"/dev/shm/mpich_shm_[0-9a-f]+_0")
"""MPICH's first one, which every rank has open once all have started."""


def unlink_mapped(process: int | str = "self", pattern: re.Pattern[str] = SEGMENTS) -> None:
    """Unlink those that a process has mapped, as far as that can be done; other processes keep what they have open.

    Parameters
    ----------
    process : int or str
        Its number.
    pattern : re.Pattern
        Which of them.
    """
    # What cannot be done must not keep a process from its end.
    with contextlib.suppress(Exception), open(f"/proc/{process}/maps", encoding="utf-8", errors="replace") as maps:
        for path in {line.split(None, 5)[-1].rstrip("\n") for line in maps}:
            if pattern.fullmatch(path):
                with contextlib.suppress(OSError):
                    os.unlink(path)
