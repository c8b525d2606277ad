"""Programs on the stand-ins, in one process or on several ranks: what each begins with, and what comes back."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from helpers.standin import Ended, Standin

__all__ = ["DRIVER", "INIT", "REFERENCE", "driver_value", "start", "values"]

DRIVER = """
import ctypes, json, sys, threading
import numpy as np
from helpers.standin_rank import *

def status(result):
    return int(result[0])
"""
"""How a program begins that uses the driver alone."""

_HEAD = """
import ctypes, json, os, signal, sys, threading, time
import numpy as np
from helpers.standin_rank import *

rank, n = map(int, sys.argv[1:])
nccl = Nccl()
"""

INIT = """
gpu = Gpu(rank)
unique = first_id(nccl, rank)
status, comm = nccl.init(n, unique, rank)
assert status == 0, (status, nccl.error())
stream = gpu.stream()
"""
"""A communicator of all ranks, each on the device of its number."""

REFERENCE = """
import ml_dtypes
def numpy_type(name):
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)
def contribution(r, dtype, count, salt=0):
    return ((np.arange(count) * (r + 2) + salt) % 5 + 1).astype(dtype)
def reduced(op, dtype, count, n, salt=0):
    wide = np.stack([contribution(r, dtype, count, salt).astype(np.float64) for r in range(n)])
    named = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min, "avg": np.mean}
    with np.errstate(all="ignore"):
        out = named[op](wide, axis=0)
    return np.trunc(out).astype(dtype) if dtype.kind in "iu" else out.astype(dtype)
def same(got, expected):
    if expected.dtype.kind in "iu": return bool((got == expected).all())
    near = 0.3 if expected.itemsize == 1 else 1e-2
    return bool(np.allclose(got.astype(np.float64), expected.astype(np.float64), rtol=near))
"""
"""What each rank contributes, and what NumPy makes of it."""


def driver_value(standin: Standin, code: str, **env: str) -> Any:
    """Run one process that uses the driver alone; return what it printed."""
    return standin.run(DRIVER + textwrap.dedent(code), env=env)


def start(
    standin: Standin,
    n: int,
    code: str,
    *,
    init: str = INIT,
    env: Mapping[str, str] | None = None,
    rank_env: Mapping[int, Mapping[str, str]] | None = None,
) -> list[Ended]:
    """Run a program on every rank; return how each ended."""
    return standin.run_ranks(n, _HEAD + init + textwrap.dedent(code), env=env, rank_env=rank_env)


def values(standin: Standin, n: int, code: str, **how: Any) -> list[Any]:
    """Run a program on every rank; return what each printed."""
    return [ended.value for ended in start(standin, n, code, **how)]
