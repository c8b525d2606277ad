"""Declarations of NCCL's C interface: one row a function, in the order of ``nccl.h``; nothing is decided here."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from butter_mpi.errors import NotSupportedError

__all__ = ["FUNCTIONS", "OLDEST", "REQUIRED", "UNIQUE_ID_BYTES", "Function", "Library", "UniqueId"]

OLDEST = 21800
"""The oldest ``ncclGetVersion`` that is supported."""

UNIQUE_ID_BYTES = 128


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``: bytes, zeros among them, so no ``c_char`` array (which ends at the first zero)."""

    _fields_ = (("internal", ctypes.c_ubyte * UNIQUE_ID_BYTES),)


@dataclass(frozen=True, slots=True)
class Function:
    """One C function: its name, what it returns, what it takes, and the first NCCL that has it."""

    name: str
    restype: Any
    argtypes: tuple[Any, ...]
    since: str = "2.18"


_result = ctypes.c_int
_comm = ctypes.c_void_p

FUNCTIONS = (
    # ncclResult_t ncclGetVersion(int *version)
    Function("ncclGetVersion", _result, (ctypes.POINTER(ctypes.c_int),)),
    # ncclResult_t ncclGetUniqueId(ncclUniqueId *uniqueId)
    Function("ncclGetUniqueId", _result, (ctypes.POINTER(UniqueId),)),
    # ncclResult_t ncclCommInitRankConfig(ncclComm_t *, int nranks, ncclUniqueId, int rank, ncclConfig_t *)
    Function(
        "ncclCommInitRankConfig",
        _result,
        (ctypes.POINTER(_comm), ctypes.c_int, UniqueId, ctypes.c_int, ctypes.c_void_p),
    ),
    # ncclResult_t ncclCommAbort(ncclComm_t comm)
    Function("ncclCommAbort", _result, (_comm,)),
    # const char *ncclGetErrorString(ncclResult_t result)
    Function("ncclGetErrorString", ctypes.c_char_p, (_result,)),
    # const char *ncclGetLastError(ncclComm_t comm)
    Function("ncclGetLastError", ctypes.c_char_p, (_comm,)),
)

REQUIRED = tuple(row.name for row in FUNCTIONS if row.since == "2.18")
"""Functions without which a library is of no use here."""


class Library:
    """One opened ``libnccl.so.2``.

    Parameters
    ----------
    path : str
        The file.

    Raises
    ------
    OSError
        The dynamic loader refuses it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._handle = ctypes.CDLL(path)
        self._rows = {row.name: row for row in FUNCTIONS}

    def missing(self) -> tuple[str, ...]:
        """Return the names of required functions that this library lacks.

        Returns
        -------
        tuple of str
            In the order of ``nccl.h``.
        """
        return tuple(name for name in REQUIRED if not hasattr(self._handle, name))

    def function(self, name: str) -> Any:
        """Return a function with its types set.

        Parameters
        ----------
        name : str
            The C name.

        Returns
        -------
        callable
            The function.

        Raises
        ------
        NotSupportedError
            This library lacks it.
        """
        row = self._rows[name]
        try:
            pointer = getattr(self._handle, name)
        except AttributeError:
            text = f"{self.path} has no {name}: it needs NCCL {row.since} or newer"
            raise NotSupportedError(text, needs=f"NCCL {row.since}") from None
        pointer.restype, pointer.argtypes = row.restype, row.argtypes
        return pointer
