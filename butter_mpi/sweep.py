"""Time of an operation by size: the plane beside the bare C call on the same communicator, as ratios of one run.

``mpirun -np 2 python -m butter_mpi.sweep`` on GPUs (or ``--share-gpu`` on one); like the selftest it sets the policy
variables where they are unset. Every variant's result is compared with what is expected, all of it, before its time is
taken; the variants take turns, so that a machine that gets slower meets all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from butter_mpi import nccl
from butter_mpi.benchmarking import command_line, parsed, run, wait
from butter_mpi.communicator import Communicator
from butter_mpi.device import Device
from butter_mpi.enums import DType
from butter_mpi.errors import ButterError, NotSupportedError
from butter_mpi.kernels import bf16_add_inplace
from butter_mpi.sweep_operations import OPERATIONS, PATTERNS, Operation, Place, Span, Torch, Variant, pattern

__all__ = ["main"]

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
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


def _operations(text: str) -> list[Operation]:
    """Return the operations of a list with commas."""
    names = text.split(",")
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no operation {unknown[0]!r}: it is {', '.join(OPERATIONS)}")
    return [OPERATIONS[name] for name in dict.fromkeys(names)]


class Sweep:
    """Measures one communicator.

    Parameters
    ----------
    comm : Communicator
        On the nccl plane, of two ranks or more.
    most : int
        Bytes of the largest size.
    torch : Torch, optional
        torch.distributed, to be measured beside it.
    """

    def __init__(self, comm: Communicator, most: int, torch: Torch | None = None) -> None:
        self._comm, self._torch = comm, torch
        plane: Any = comm.backend
        self._plane = plane
        self._device: Device = plane.device
        self._stream: int = plane.stream
        self._library, self._handle = plane.native()
        most = self._place(0, most, DType.FLOAT32).nbytes
        self._plain = self._device.alloc(most)
        self._registered = self._device.alloc(most)
        self._plane.register_buffer(self._registered, most)
        self._symmetric = self._plane.symmetric_alloc(most)
        self._windowed = self._window(most)
        self.without: dict[str, str] = {} if self._windowed else {"symmetric": "this NCCL gives no symmetric window"}
        self._kernel = self._made_kernel()

    def _place(self, pointer: int, nbytes: int, dtype: DType) -> Place:
        """Return a buffer of a size, rounded up to whole blocks of elements that 4 bytes divide."""
        ranks = self._comm.world_size
        block = -(-nbytes // (ranks * DType.FLOAT32.itemsize)) * DType.FLOAT32.itemsize
        return Place(pointer, block, self._comm.rank, ranks, dtype)

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

    def variants(self, operation: Operation, nbytes: int, dtype: DType) -> list[Variant]:
        """Return what is compared at a size; the first is what the others are ratios of."""
        plain = self._place(self._plain, nbytes, dtype)
        by_plane = operation.by_plane(self._plane, plain)
        found = [self._bare(BARE, operation, plain), Variant("plane", plain, by_plane)]
        if dtype is DType.FLOAT32:
            plan = operation.plan(self._comm, self._device, self._stream, plain)
            found.append(Variant("plan", plain, plan))
            graph = operation.plan(self._comm, self._device, self._stream, plain, graph=True)
            if graph.graph:
                found.append(Variant("graph", plain, graph))
        found.append(self._bare("registered", operation, plain._replace(pointer=self._registered)))
        if self._windowed:
            found.append(self._bare("symmetric", operation, plain._replace(pointer=self._symmetric)))
        if self._kernel and dtype is DType.BFLOAT16 and operation.name == "all_reduce":
            found.append(Variant("add path", plain, by_plane, self._adding))
        if self._torch:
            found.append(Variant("torch", plain, self._torch.call(operation, plain), self._torch.on_stream))
        return found

    def _bare(self, name: str, operation: Operation, place: Place) -> Variant:
        return Variant(name, place, operation.bare(self._library, place, self._handle, self._stream))

    @contextlib.contextmanager
    def _adding(self) -> Iterator[None]:
        self._plane.set_add_kernel(self._kernel)
        yield
        self._plane.set_add_kernel(0)

    # -- one size ------------------------------------------------------------------------------------------------------

    def measure(self, operation: Operation, nbytes: int, dtype: DType) -> dict[str, Any]:
        """Return the median over rounds of the mean time of a call, in microseconds, by variant; and the real size."""
        variants = self.variants(operation, nbytes, dtype)
        calls = 0
        for variant in variants:
            with variant.ready():
                self._check(variant, operation)
                calls = max(calls, self._calls(variant))
        times: dict[str, list[float]] = {variant.name: [] for variant in variants}
        for number in range(_ROUNDS):
            turn = number % len(variants)
            for variant in variants[turn:] + variants[:turn]:
                with variant.ready():
                    times[variant.name].append(self._time(variant, calls) / calls * 1e6)
        us = {name: statistics.median(some) for name, some in times.items()}
        return {"operation": operation.name, "dtype": dtype.label, "bytes": variants[0].place.nbytes, "us": us}

    def _check(self, variant: Variant, operation: Operation) -> None:
        """Raise unless every element is what it must be: before that a speed means nothing."""
        place = variant.place
        for span in operation.given(place):
            self._fill(place, span)
        variant.call()
        for span in operation.expected(place):
            self._compare(variant, operation, span)
        # What is summed again and again must stay a number, and the same one.
        self._fill(place, Span(0, place.nbytes, 0))
        self._wait()

    def _fill(self, place: Place, span: Span) -> None:
        self._device.make_current()
        count = span.nbytes // place.dtype.itemsize
        bits = pattern(span.value, place.dtype)
        self._device.call(PATTERNS[place.dtype][0], place.pointer + span.begin, bits, count, self._stream)

    def _compare(self, variant: Variant, operation: Operation, span: Span) -> None:
        place = variant.place
        kind, expected = PATTERNS[place.dtype][1], pattern(span.value, place.dtype)
        host = np.empty(min(span.nbytes, _CHUNK), np.uint8)
        for begin in range(span.begin, span.begin + span.nbytes, _CHUNK):
            part = host[: min(_CHUNK, span.begin + span.nbytes - begin)]
            self._device.copy(part.ctypes.data, place.pointer + begin, part.nbytes, self._stream)
            self._wait()
            wrong = np.flatnonzero(part.view(kind) != expected)
            if wrong.size:
                what = f"{operation.name} of {place.nbytes // place.dtype.itemsize} {place.dtype.label}"
                at = begin // place.dtype.itemsize + int(wrong[0])
                raise ButterError(f"{variant.name}: {what} is wrong at element {at}")

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


def _head(comm: Communicator, torch: Torch | None) -> dict[str, Any]:
    plane: Any = comm.backend
    library, _ = plane.native()
    version = ctypes.c_int()
    nccl.call(library, "ncclGetVersion", ctypes.byref(version))
    head = {"nccl": version.value, "ranks": comm.world_size, "transport": sorted(plane.transport)}
    return {**head, "torch": torch.version()} if torch else head


def _shown(nbytes: int) -> str:
    for unit, factor in reversed(_UNITS.items()):
        if not nbytes % factor:
            return f"{nbytes // factor} {unit and unit + 'i'}B"
    raise AssertionError


def _row(row: dict[str, Any], ranks: int, names: Sequence[str]) -> str:
    times = row["us"]
    bus = row["bytes"] * OPERATIONS[row["operation"]].bus(ranks) / times[BARE] / 1e3
    ratios = "".join(f"{times[name] / times[BARE]:11.3f}" if name in times else " " * 11 for name in names)
    return f"{row['dtype']:9}{_shown(row['bytes']):>9}{times[BARE]:12.2f}{bus:9.2f}{ratios}"


def _part(operation: str, found: dict[str, Any]) -> list[str]:
    """Return the table of one operation."""
    rows = [row for row in found["rows"] if row["operation"] == operation]
    names = list(dict.fromkeys(name for row in rows for name in row["us"] if name != BARE))
    transport = ", ".join(found["transport"]) or "none"
    function = OPERATIONS[operation].function
    return [
        f"{operation}, {found['ranks']} ranks, NCCL {found['nccl']}, transport {transport}",
        f"bare: {function} by ctypes, arguments prepared, in us and GB/s of the bus; others as multiples of its time",
        f"{'dtype':9}{'size':>9}{'bare us':>12}{'GB/s':>9}" + "".join(f"{name:>11}" for name in names),
        *(_row(row, found["ranks"], names) for row in rows),
    ]


def _table(found: dict[str, Any]) -> str:
    parts = [_part(operation, found) for operation in dict.fromkeys(row["operation"] for row in found["rows"])]
    notes = [f"{name}: {why}" for name, why in found["without"].items()]
    if "torch" in found:
        notes.append("torch: torch.distributed of PyTorch {torch}, NCCL {nccl}".format(**found["torch"]))
    return "\n\n".join(["\n".join(part) for part in parts] + ["\n".join(notes)]).rstrip()


def _sizes(least: int, most: int) -> list[int]:
    """Return sizes from the smallest to the largest, each four times the one before but for the last."""
    sizes = [least]
    while sizes[-1] < most:
        sizes.append(min(4 * sizes[-1], most))
    return sizes


def _run(comm: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    torch = Torch(comm) if options.torch else None
    sweep = Sweep(comm, options.most, torch)
    rows = [
        sweep.measure(operation, nbytes, dtype)
        for operation in options.operations
        for dtype in PATTERNS
        for nbytes in _sizes(options.least, options.most)
    ]
    head = _head(comm, torch)
    if torch:
        torch.close()
    return {**head, "rows": rows, "without": sweep.without}


def _write(file: Path | None, found: dict[str, Any]) -> int:
    """Write what rank 0 has found, where a file is named; return the status of that."""
    if file and found:
        try:
            file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            sys.stderr.write(f"butter_mpi.sweep: {file} cannot be written: {error.strerror}\n")
            return 3
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; rank 0 prints the tables.

    Parameters
    ----------
    arguments : sequence of str, optional
        The command line.

    Returns
    -------
    int
        0; 2 for a wrong argument; 3 where there is no nccl plane, or a file cannot be written.
    """
    parser = command_line("sweep", __doc__ or "")
    parser.add_argument("--from", dest="least", type=_size, default=8, metavar="SIZE", help="smallest size (8)")
    parser.add_argument("--to", dest="most", type=_size, default=2**30, metavar="SIZE", help="largest size (1G)")
    parser.add_argument(
        "--op",
        dest="operations",
        type=_operations,
        default="all_reduce",
        metavar="NAME,...",
        help=f"of {', '.join(OPERATIONS)} (all_reduce)",
    )
    parser.add_argument("--torch", action="store_true", help="measure torch.distributed of the same ranks beside them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rank 0 writes the times there as well")

    def check(options: argparse.Namespace) -> None:
        if options.least > options.most:
            parser.error("--from must not be larger than --to")
        if options.torch and importlib.util.find_spec("torch") is None:
            parser.error("--torch needs PyTorch, and it is not installed here")

    options = parsed("sweep", parser, arguments, check)
    if isinstance(options, int):
        return options

    found: dict[str, Any] = {}

    def measure(comm: Communicator) -> None:
        times = _run(comm, options)
        if comm.rank == 0:
            found.update(times)
            print(_table(found))

    return run("sweep", options, measure) or _write(options.json, found)


if __name__ == "__main__":
    sys.exit(main())
