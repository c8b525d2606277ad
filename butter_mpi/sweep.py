"""Time of an all_reduce by size: the plane beside the bare C call on the same communicator, as ratios of one run.

``mpirun -np 2 python -m butter_mpi.sweep`` on GPUs (or ``--share-gpu`` on one); like the selftest it sets the policy
variables where they are unset. Every variant's result is compared with the sum, all of it, before its time is taken;
the variants take turns, so that a machine that gets slower meets all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from butter_mpi import nccl
from butter_mpi.benchmarking import Array, command_line, parsed, run, wait
from butter_mpi.communicator import Communicator
from butter_mpi.device import Device
from butter_mpi.enums import DType, ReduceOp
from butter_mpi.errors import ButterError, NotSupportedError
from butter_mpi.kernels import bf16_add_inplace

__all__ = ["main"]

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_ONES = {DType.FLOAT32: ("cuMemsetD32Async", np.float32), DType.BFLOAT16: ("cuMemsetD16Async", np.uint16)}
_BF16_SHIFT = 16
_CHUNK = 2**26
_ROUNDS = 7
_ROUND_SECONDS, _MOST_CALLS, _LEAST_CALLS = 0.02, 200, 3
BARE = "bare"


def _size(text: str) -> int:
    """Return the bytes of ``8``, ``64K``, ``1G``."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if unit not in _UNITS or not number.isdigit() or int(number) * _UNITS[unit] < DType.FLOAT32.itemsize:
        raise argparse.ArgumentTypeError(f"a size is a number of bytes, 4 or more, such as 8, 64K or 1G; got {text!r}")
    return int(number) * _UNITS[unit]


def _pattern(value: int, dtype: DType) -> int:
    """Return the bits of a small whole number, which both types hold exactly."""
    bits = int(np.float32(value).view(np.uint32))
    return bits >> _BF16_SHIFT if dtype is DType.BFLOAT16 else bits


@dataclass
class Variant:
    """One way to the sum: ``call`` issues it on the plane's stream, ``ready`` makes the ranks ready for its calls."""

    name: str
    pointer: int
    call: Callable[[], object]
    ready: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


class Sweep:
    """Measures one communicator.

    Parameters
    ----------
    comm : Communicator
        On the nccl plane, of two ranks or more.
    most : int
        Bytes of the largest size.
    """

    def __init__(self, comm: Communicator, most: int) -> None:
        self._comm = comm
        plane: Any = comm.backend
        self._plane = plane
        self._device: Device = plane.device
        self._stream: int = plane.stream
        self._library, self._handle = plane.native()
        self._plain = self._device.alloc(most)
        self._registered = self._device.alloc(most)
        self._plane.register_buffer(self._registered, most)
        self._symmetric = self._plane.symmetric_alloc(most)
        self._windowed = self._window(most)
        self.without: dict[str, str] = {} if self._windowed else {"symmetric": "this NCCL gives no symmetric window"}
        self._kernel = self._made_kernel()

    def _window(self, nbytes: int) -> bool:
        """Register the symmetric buffer as a window; the same answer on every rank."""
        try:
            flags = self._library.constant("NCCL_WIN_COLL_SYMMETRIC")
            nccl.window_register(self._library, self._handle, self._symmetric, nbytes, nccl.Handle(), flags)
        except ButterError:
            return all(self._comm.all_gather_json(False))
        return all(self._comm.all_gather_json(True))

    def _made_kernel(self) -> int:
        """Return the shipped kernel where every rank has it, and there are two."""
        try:
            kernel = bf16_add_inplace(self._device) if self._comm.world_size == 2 else 0
        except NotSupportedError:
            kernel = 0
        if all(self._comm.all_gather_json(bool(kernel))):
            return kernel
        self.without["add path"] = "needs two ranks, and NVRTC on both"
        return 0

    # -- variants ------------------------------------------------------------------------------------------------------

    def variants(self, nbytes: int, dtype: DType) -> list[Variant]:
        """Return what is compared at a size; the first is what the others are ratios of."""
        plane, found = self._plane, [Variant(BARE, self._plain, self._bare(self._plain, nbytes, dtype))]
        found.append(Variant("plane", self._plain, lambda: plane.all_reduce(self._plain, nbytes, dtype=dtype)))
        if dtype is DType.FLOAT32:
            array = Array(self._device, nbytes // dtype.itemsize, self._stream, self._plain)
            found.append(Variant("plan", self._plain, self._comm.plan_all_reduce(array, stream=self._stream)))
        found.append(Variant("registered", self._registered, self._bare(self._registered, nbytes, dtype)))
        if self._windowed:
            found.append(Variant("symmetric", self._symmetric, self._bare(self._symmetric, nbytes, dtype)))
        if self._kernel and dtype is DType.BFLOAT16:
            call = found[1].call
            found.append(Variant("add path", self._plain, call, self._adding))
        return found

    def _bare(self, pointer: int, nbytes: int, dtype: DType) -> Callable[[], object]:
        count, op = nbytes // dtype.itemsize, ReduceOp.SUM.nccl
        arguments = (pointer, pointer, count, dtype.nccl, op, self._handle, self._stream)
        return nccl.prepared(self._library, "ncclAllReduce", *arguments)

    @contextlib.contextmanager
    def _adding(self) -> Iterator[None]:
        self._plane.set_add_kernel(self._kernel)
        yield
        self._plane.set_add_kernel(0)

    # -- one size ------------------------------------------------------------------------------------------------------

    def measure(self, nbytes: int, dtype: DType) -> dict[str, float]:
        """Return the median over rounds of the mean time of a call, in microseconds, by variant."""
        variants = self.variants(nbytes, dtype)
        calls = 0
        for variant in variants:
            with variant.ready():
                self._check(variant, nbytes, dtype)
                calls = max(calls, self._calls(variant))
        times: dict[str, list[float]] = {variant.name: [] for variant in variants}
        for number in range(_ROUNDS):
            turn = number % len(variants)
            for variant in variants[turn:] + variants[:turn]:
                with variant.ready():
                    times[variant.name].append(self._time(variant, calls) / calls * 1e6)
        return {name: statistics.median(some) for name, some in times.items()}

    def _check(self, variant: Variant, nbytes: int, dtype: DType) -> None:
        """Raise unless ones on every rank give the world size in every element: before that a speed means nothing."""
        memset, kind = _ONES[dtype][0], np.uint16 if dtype is DType.BFLOAT16 else np.uint32
        count = nbytes // dtype.itemsize
        self._device.make_current()
        self._device.call(memset, variant.pointer, _pattern(1, dtype), count, self._stream)
        variant.call()
        expected = _pattern(self._comm.world_size, dtype)
        host = np.empty(min(nbytes, _CHUNK), np.uint8)
        for begin in range(0, nbytes, _CHUNK):
            part = host[: min(_CHUNK, nbytes - begin)]
            self._device.copy(part.ctypes.data, variant.pointer + begin, part.nbytes, self._stream)
            self._wait()
            wrong = np.flatnonzero(part.view(kind) != expected)
            if wrong.size:
                at = begin // dtype.itemsize + int(wrong[0])
                raise ButterError(f"{variant.name}: all_reduce of {count} {dtype.label} ones is wrong at element {at}")
        # What is summed again and again must stay a number, and the same one.
        self._device.call(memset, variant.pointer, 0, count, self._stream)
        self._wait()

    def _calls(self, variant: Variant) -> int:
        """Return how many calls a round takes, the same number on every rank."""
        needed = max(self._comm.all_gather_json(self._time(variant, 1)))
        return int(min(_MOST_CALLS, max(_LEAST_CALLS, _ROUND_SECONDS / needed)))

    def _time(self, variant: Variant, calls: int) -> float:
        """Return the seconds from the first call until the stream has done all of them.

        One call goes before, so that what ranks differ by when they begin is no part of it.
        """
        self._comm.all_gather_json(None)
        variant.call()
        self._wait(pause=0.0)
        began = time.perf_counter()
        for _ in range(calls):
            variant.call()
        self._wait(pause=0.0)
        return time.perf_counter() - began

    def _wait(self, pause: float = 1e-4) -> None:
        wait(self._comm, self._device, self._stream, pause)


# -- what is shown -----------------------------------------------------------------------------------------------------


def _head(comm: Communicator) -> dict[str, Any]:
    plane: Any = comm.backend
    library, _ = plane.native()
    version = ctypes.c_int()
    nccl.call(library, "ncclGetVersion", ctypes.byref(version))
    return {"nccl": version.value, "ranks": comm.world_size, "transport": sorted(plane.transport)}


def _shown(nbytes: int) -> str:
    for unit, factor in reversed(_UNITS.items()):
        if not nbytes % factor:
            return f"{nbytes // factor} {unit and unit + 'i'}B"
    raise AssertionError


def _row(row: dict[str, Any], ranks: int, names: Sequence[str]) -> str:
    times = row["us"]
    bus = row["bytes"] * 2 * (ranks - 1) / ranks / times[BARE] / 1e3
    ratios = "".join(f"{times[name] / times[BARE]:11.3f}" if name in times else " " * 11 for name in names)
    return f"{row['dtype']:9}{_shown(row['bytes']):>9}{times[BARE]:12.2f}{bus:9.2f}{ratios}"


def _table(found: dict[str, Any]) -> str:
    names = list(dict.fromkeys(name for row in found["rows"] for name in row["us"] if name != BARE))
    transport = ", ".join(found["transport"]) or "none"
    lines = [
        f"all_reduce, {found['ranks']} ranks, NCCL {found['nccl']}, transport {transport}",
        "bare: ncclAllReduce by ctypes, arguments prepared, in us and GB/s of the bus; others as multiples of its time",
        f"{'dtype':9}{'size':>9}{'bare us':>12}{'GB/s':>9}" + "".join(f"{name:>11}" for name in names),
        *(_row(row, found["ranks"], names) for row in found["rows"]),
    ]
    return "\n".join(lines + [f"{name}: {why}" for name, why in found["without"].items()])


def _sizes(least: int, most: int) -> list[int]:
    """Return sizes from the smallest to the largest, each four times the one before but for the last."""
    sizes = [least]
    while sizes[-1] < most:
        sizes.append(min(4 * sizes[-1], most))
    return sizes


def _run(comm: Communicator, least: int, most: int) -> dict[str, Any]:
    sweep = Sweep(comm, most)
    rows = [
        {"dtype": dtype.label, "bytes": nbytes, "us": sweep.measure(nbytes, dtype)}
        for dtype in _ONES
        for nbytes in _sizes(least, most)
    ]
    return {**_head(comm), "rows": rows, "without": sweep.without}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; rank 0 prints the table.

    Parameters
    ----------
    arguments : sequence of str, optional
        The command line.

    Returns
    -------
    int
        0; 2 for a wrong argument; 3 where there is no nccl plane.
    """
    parser = command_line("sweep", __doc__ or "")
    parser.add_argument("--from", dest="least", type=_size, default=8, metavar="SIZE", help="smallest size (8)")
    parser.add_argument("--to", dest="most", type=_size, default=2**30, metavar="SIZE", help="largest size (1G)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rank 0 writes the times there as well")

    def check(options: argparse.Namespace) -> None:
        if options.least > options.most:
            parser.error("--from must not be larger than --to")

    options = parsed("sweep", parser, arguments, check)
    if isinstance(options, int):
        return options

    def measure(comm: Communicator) -> None:
        found = _run(comm, options.least, options.most)
        if comm.rank == 0:
            print(_table(found))
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    return run("sweep", options, measure)


if __name__ == "__main__":
    sys.exit(main())
