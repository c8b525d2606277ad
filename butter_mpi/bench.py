"""Host time of one all_reduce: what each layer adds to the C call, as ratios of one run.

``mpirun -np 2 python -m butter_mpi.bench`` on GPUs (or ``--share-gpu`` on one); like the selftest it sets the policy
variables where they are unset. Every rank makes the same calls in the
same order; the variants take turns, so that a machine that gets slower meets all of them. The data is checked first.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from butter_mpi import bootstrap, nccl
from butter_mpi.communicator import Communicator
from butter_mpi.device import Device
from butter_mpi.enums import DType, ReduceOp
from butter_mpi.environment import c_environment
from butter_mpi.errors import ButterError
from butter_mpi.launch import read_launch
from butter_mpi.policy import set_unset_policy

__all__ = ["fitting", "main"]

_COUNT = 16
_CALLS, _ROUNDS = 500, 9
_SECONDS = 30.0
_OTHER_PLANE = re.compile(r',? or (run without a GPU: |take )plane="host"[^;\n]*')


class _Array:
    """A small array in device memory."""

    def __init__(self, device: Device, stream: int) -> None:
        self.pointer = device.alloc(4 * _COUNT)
        shape = {"shape": (_COUNT,), "typestr": "<f4", "version": 3, "stream": stream}
        self.__cuda_array_interface__ = {**shape, "data": (self.pointer, False)}


def _wait(device: Device, stream: int) -> None:
    end = time.monotonic() + _SECONDS
    while not device.ready(stream):
        if time.monotonic() > end:
            raise ButterError(f"the stream was not done within {_SECONDS:g} s")
        time.sleep(1e-4)


def _check(comm: Communicator, device: Device, array: _Array, stream: int) -> None:
    """Raise unless the sum of ones is the world size: before that its speed means nothing."""
    host = (ctypes.c_float * _COUNT)(*[1.0] * _COUNT)
    device.copy(array.pointer, ctypes.addressof(host), ctypes.sizeof(host), stream)
    comm.all_reduce(array, stream=stream)
    device.copy(ctypes.addressof(host), array.pointer, ctypes.sizeof(host), stream)
    _wait(device, stream)
    comm.check_async_error()
    if list(host) != [float(comm.world_size)] * _COUNT:
        raise ButterError(f"all_reduce of ones gave {list(host)}, expected {comm.world_size} everywhere")


def _variants(comm: Communicator, array: _Array, stream: int) -> dict[str, Callable[[], Any]]:
    plane: Any = comm.backend
    library, handle = plane.native()
    dtype, op, at = DType.FLOAT32, ReduceOp.SUM, array.pointer
    arguments = (at, at, _COUNT, dtype.nccl, op.nccl, handle, stream)
    typed = library.function("ncclAllReduce")
    return {
        "ctypes, arguments prepared": nccl.prepared(library, "ncclAllReduce", *arguments),
        "ctypes, arguments typed": lambda: typed(*arguments),
        "backend.all_reduce": lambda: plane.all_reduce(at, 4 * _COUNT, dtype=dtype),
        "Communicator.all_reduce": lambda: comm.all_reduce(array, stream=stream),
    }


def _measure(comm: Communicator, device: Device, stream: int) -> dict[str, float]:
    """Return the median over rounds of the mean host time of a call, in microseconds."""
    if comm.world_size < 2:
        raise ButterError("one rank makes no NCCL call; start it with mpirun -np 2")
    array = _Array(device, stream)
    _check(comm, device, array, stream)
    variants = _variants(comm, array, stream)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(_ROUNDS + 1):
        for name, call in variants.items():
            comm.all_gather_json(None)
            began = time.perf_counter()
            for _ in range(_CALLS):
                call()
            elapsed = time.perf_counter() - began
            _wait(device, stream)
            if number:  # the first round warms up
                times[name].append(1e6 * elapsed / _CALLS)
    return {name: statistics.median(some) for name, some in times.items()}


def _table(medians: dict[str, float], comm: Communicator) -> str:
    floor = next(iter(medians.values()))
    transport = ", ".join(getattr(comm.backend, "transport", {})) or "none"
    lines = [f"host time of one all_reduce of {_COUNT} float32, {comm.world_size} ranks, transport {transport}"]
    lines += [f"  {name:28} {value:8.2f} us  {value / floor:6.2f} x" for name, value in medians.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; rank 0 prints the table.

    Parameters
    ----------
    arguments : sequence of str, optional
        The command line.

    Returns
    -------
    int
        0, or 3 where there is no nccl plane.
    """
    parser = argparse.ArgumentParser(prog="python -m butter_mpi.bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--share-gpu", action="store_true", help="allow two ranks on one GPU")
    options = parser.parse_args(arguments)
    set_unset_policy()
    try:
        with bootstrap.init(plane="nccl", share_gpu=options.share_gpu or None) as comm:
            plane: Any = comm.backend
            medians = _measure(comm, plane.device, plane.stream)
            if comm.rank == 0:
                print(_table(medians, comm))
    except ButterError as error:
        # A refusal is the same on every rank, and once is enough.
        if not read_launch(c_environment()).claimed_rank:
            sys.stderr.write(f"butter_mpi.bench: {fitting(str(error))}\n")
        return 3
    return 0


def fitting(text: str) -> str:
    """Return what refused a start, without the way round it that a benchmark has not: another plane.

    Parameters
    ----------
    text : str
        Of the error.

    Returns
    -------
    str
        The text, with what the benchmark needs.
    """
    fitting = _OTHER_PLANE.sub("", text)
    return fitting if fitting == text else f"{fitting}\n  The benchmark measures NCCL's calls, so it needs GPUs"


if __name__ == "__main__":
    sys.exit(main())
