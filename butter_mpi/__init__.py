"""NCCL and host collectives for SPMD programs under MPI; nothing hangs and nothing is guessed.

::

    import numpy, butter_mpi

    with butter_mpi.init() as comm:          # every rank; compares, connects, bounded
        x = numpy.ones(4, numpy.float32)
        comm.all_reduce(x)                   # in place; the sum over all ranks

The names in ``__all__`` are the public ones. Importing this module starts no MPI, opens no library, makes no CUDA
context and imports no NumPy: each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from butter_mpi._version import __version__, versions

if TYPE_CHECKING:
    from butter_mpi.bootstrap import init
    from butter_mpi.communicator import Communicator
    from butter_mpi.enums import DType, PreMulSum, ReduceOp
    from butter_mpi.errors import (
        ButterError,
        CollectiveMismatchError,
        CollectiveTimeoutError,
        CommunicatorBrokenError,
        CommunicatorClosedError,
        CUDAError,
        LibraryNotFoundError,
        NCCLError,
        NotSupportedError,
        PeerLostError,
        PreflightError,
        ReceiptError,
        StartError,
        StartTimeoutError,
        TransportError,
    )
    from butter_mpi.findings import PreflightReport
    from butter_mpi.receipt import Receipt
    from butter_mpi.settings import FaultPolicy

__all__ = [
    "ButterError",
    "CUDAError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "Communicator",
    "CommunicatorBrokenError",
    "CommunicatorClosedError",
    "DType",
    "FaultPolicy",
    "LibraryNotFoundError",
    "NCCLError",
    "NotSupportedError",
    "PeerLostError",
    "PreMulSum",
    "PreflightError",
    "PreflightReport",
    "Receipt",
    "ReceiptError",
    "ReduceOp",
    "StartError",
    "StartTimeoutError",
    "TransportError",
    "__version__",
    "init",
    "versions",
]

_HOME = {
    "Communicator": "communicator",
    "DType": "enums",
    "FaultPolicy": "settings",
    "PreMulSum": "enums",
    "PreflightReport": "findings",
    "Receipt": "receipt",
    "ReduceOp": "enums",
    "init": "bootstrap",
}


if not TYPE_CHECKING:  # or a type checker would take any misspelt name

    def __getattr__(name: str) -> Any:
        """Load a public name on first use; the errors live in ``butter_mpi.errors``."""
        if name not in __all__:
            raise AttributeError(f"module 'butter_mpi' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"butter_mpi.{_HOME.get(name, 'errors')}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """Return the public names."""
    return list(__all__)


# It sees how the program ends only where it is there before sys.exit is taken.
importlib.import_module("butter_mpi.outcome")
