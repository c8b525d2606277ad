"""What the operations of a NCCL communicator need: element types, operators of one's own, registered buffers.

In every function ``library`` is the library, ``comm`` the communicator as an integer, and ``dtype`` comes from
:func:`data_type`. The operations themselves (``ncclAllReduce``, ``ncclSend`` ...) have no function here: the nccl plane
issues them straight through the library's typed functions (``planes.issuing``), as a step between would cost every
call; by hand, use :func:`butter_mpi.nccl.call`. With a count of zero NCCL does nothing, and synchronises nothing.
"""

from __future__ import annotations

import ctypes

from butter_mpi._libnccl import Library
from butter_mpi.enums import DType
from butter_mpi.nccl.calls import Handle, call

__all__ = [
    "create_premul_sum",
    "data_type",
    "deregister",
    "destroy_redop",
    "register",
    "window_deregister",
    "window_register",
]

_DATA_TYPES = {
    DType.INT8: "ncclInt8",
    DType.UINT8: "ncclUint8",
    DType.INT32: "ncclInt32",
    DType.UINT32: "ncclUint32",
    DType.INT64: "ncclInt64",
    DType.UINT64: "ncclUint64",
    DType.FLOAT16: "ncclFloat16",
    DType.FLOAT32: "ncclFloat32",
    DType.FLOAT64: "ncclFloat64",
    DType.BFLOAT16: "ncclBfloat16",
    DType.FLOAT8_E4M3: "ncclFloat8e4m3",
    DType.FLOAT8_E5M2: "ncclFloat8e5m2",
}


def data_type(library: Library, dtype: DType) -> int:
    """Return the ``ncclDataType_t`` of an element type, if this library has it (NotSupportedError where it has not)."""
    return int(library.constant(_DATA_TYPES[dtype]))


def create_premul_sum(library: Library, scalar: bytes | int, dtype: int, comm: int) -> int:
    """Return an operator that multiplies each element by a scalar and then adds (``ncclRedOpCreatePreMulSum``).

    Parameters
    ----------
    library : Library
        The library.
    scalar : bytes or int
        The bytes of one element, which NCCL copies now; or the device address of one, which it reads at each use.
    dtype : int
        From :func:`data_type`.
    comm : int
        The communicator, which alone may use the operator.

    Returns
    -------
    int
        The operator, for :func:`destroy_redop`.
    """
    op = ctypes.c_int(-1)
    residence = library.constant("ncclScalarHostImmediate" if isinstance(scalar, bytes) else "ncclScalarDevice")
    call(library, "ncclRedOpCreatePreMulSum", ctypes.byref(op), scalar, dtype, residence, comm)
    return op.value


def destroy_redop(library: Library, op: int, comm: int) -> None:
    """Give an operator of one's own back (``ncclRedOpDestroy``)."""
    call(library, "ncclRedOpDestroy", op, comm)


def register(library: Library, comm: int, buffer: int, nbytes: int) -> int | None:
    """Register a buffer (``ncclCommRegister``, NCCL 2.19 or newer).

    Parameters
    ----------
    library : Library
        The library.
    comm : int
        The communicator; the registration is its own.
    buffer : int
        The device address.
    nbytes : int
        Its size in bytes.

    Returns
    -------
    int or None
        The handle, to be given back before the memory or the communicator goes. NCCL may succeed without one.
    """
    handle = ctypes.c_void_p()
    call(library, "ncclCommRegister", comm, buffer, nbytes, ctypes.byref(handle))
    return handle.value


def deregister(library: Library, comm: int, handle: int | None) -> None:
    """Give a registration back (``ncclCommDeregister``)."""
    call(library, "ncclCommDeregister", comm, handle)


def window_register(library: Library, comm: int, buffer: int, nbytes: int, window: Handle, flags: int = 0) -> int:
    """Register a buffer as a window, on all ranks together (``ncclCommWindowRegister``, NCCL 2.27 or newer).

    Parameters
    ----------
    library : Library
        The library.
    comm : int
        The communicator.
    buffer : int
        The device address, inside memory of :func:`mem_alloc`, at a multiple of ``NCCL_WIN_REQUIRED_ALIGNMENT``.
    nbytes : int
        Its size in bytes.
    window : Handle
        Gets the window. NCCL may succeed and leave NULL; before 2.29 one that is not NULL proves nothing.
    flags : int, default 0
        ``NCCL_WIN_COLL_SYMMETRIC`` and the like.

    Returns
    -------
    int
        ``SUCCESS`` or ``IN_PROGRESS``.
    """
    return call(library, "ncclCommWindowRegister", comm, buffer, nbytes, window.out(), flags, in_progress=True)


def window_deregister(library: Library, comm: int, window: int) -> None:
    """Give a window back (``ncclCommWindowDeregister``); each rank for itself."""
    call(library, "ncclCommWindowDeregister", comm, window)
