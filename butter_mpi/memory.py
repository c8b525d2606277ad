"""Memory that the data plane's library knows: buffers that are registered, and arrays in memory of its own."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from butter_mpi import dlpack
from butter_mpi.arguments import Arguments
from butter_mpi.buffers import Holder
from butter_mpi.enums import DType
from butter_mpi.errors import ButterError, CUDAError, NCCLError, text_of
from butter_mpi.lane import LANE
from butter_mpi.planes.base import Plane
from butter_mpi.planes.memory import numpy_dtype

__all__ = ["DeviceArray", "Memory", "Symmetric"]

_LOG = logging.getLogger("butter_mpi")
_MOST_BYTES = 2**48
"""What processes have addresses for."""
_FREE_SOME = (
    "Ask for less, or free what CuPy and PyTorch keep for later "
    "(cupy.get_default_memory_pool().free_all_blocks(), torch.cuda.empty_cache())"
)


def _all_of(steps: Iterable[Callable[[], None]], error: BaseException | None) -> None:
    """Take every step; what fails becomes a note on what failed before."""
    first = error
    for step in steps:
        try:
            step()
        except (ButterError, ValueError) as failure:
            if first is None:
                first = failure
            else:
                first.add_note(f"afterwards: {text_of(failure)}")
    if first is not None and first is not error:
        raise first


class _Registered:
    """Arrays that are registered for the body of a ``with``."""

    def __init__(self, plane: Plane, arguments: Arguments, arrays: Sequence[Any]) -> None:
        self._plane, self._arguments, self._arrays = plane, arguments, arrays
        self._entered: list[list[int]] = []

    def __enter__(self) -> None:
        plane, handles = self._plane, []
        plane.check_open("registered")
        plane.check_no_group("registered")
        views = [self._arguments.memory("registered", array) for array in self._arrays]
        try:
            handles += [plane.register_buffer(seen.pointer, seen.nbytes) for seen in views if seen.count]
        except BaseException as error:
            _all_of([partial(plane.give_back, handle) for handle in handles], error)
            raise
        self._entered.append(handles)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        _all_of([partial(self._plane.give_back, handle) for handle in self._entered.pop()], error)


class DeviceArray:
    """An array in device memory that knows its shape and type, and is used by others: CuPy, PyTorch, operations.

    It speaks ``__cuda_array_interface__`` and ``__dlpack__``, and names no stream there: work on it is the user's to
    order, as with PyTorch's tensors. What is made of it keeps it alive, but not its memory, which ends with ``close()``
    of its ``Symmetric``: from then on it shows itself to nobody.

    Parameters
    ----------
    memory : Symmetric
        Whose memory it is.
    pointer, ordinal : int
        The address, and the device.
    shape : tuple of int
        Its extents, C-contiguous.
    dtype : DType
        Its element type.
    """

    def __init__(self, memory: Symmetric, pointer: int, ordinal: int, shape: tuple[int, ...], dtype: DType) -> None:
        self._memory, self._pointer, self._ordinal, self._type = memory, pointer, ordinal, dtype
        self.shape, self.dtype = shape, numpy_dtype(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return math.prod(self.shape) * self._type.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        self._memory.check()
        data = self._pointer if self.nbytes else 0
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (data, False), "version": 3}

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.ON_DEVICE, self._ordinal

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        self._memory.check()
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("a symmetric array shows its own memory, and makes no copy")
        return dlpack.show(self._pointer, self.shape, self._type.label, self._ordinal, self)

    def __repr__(self) -> str:
        return f"<{self._memory!r} on cuda:{self._ordinal}>"


class Symmetric(Holder):
    """Memory of ``Communicator.symmetric``, and its array; a context manager that gives the array and closes.

    Parameters
    ----------
    comm : Communicator
        Which ranks have it.
    shape : tuple of int
        Extents of the array.
    dtype : DType
        Its element type.

    Raises
    ------
    ButterError
        Some rank has no such memory.
    CommunicatorBrokenError, CommunicatorClosedError
        As for ``all_reduce``.
    """

    def __init__(self, comm: Any, shape: tuple[int, ...], dtype: DType) -> None:
        # The communicator must not be dropped before its memory.
        self._comm, self._plane = comm, comm._plane
        self._shape, self._dtype = shape, dtype
        self._pointer = self._handle = 0
        plane, count = self._plane, math.prod(shape)
        nbytes = max(1, count * dtype.itemsize)
        plane.check_open("symmetric")
        plane.check_no_group("symmetric")
        failure: Exception | None = None
        try:
            self._pointer = plane.symmetric_alloc(nbytes)
        except (NCCLError, CUDAError) as error:
            failure = self._without_memory(error, nbytes)
        except (ButterError, MemoryError) as error:
            failure = error
        try:
            self._agree(plane.symmetric_meet("" if failure is None else text_of(failure), count, dtype), failure)
            self._handle = plane.symmetric_register(self._pointer, nbytes, count, dtype)
        except BaseException as error:
            _all_of([self.close], error)
            raise

    def _without_memory(self, error: NCCLError | CUDAError, nbytes: int) -> ButterError:
        """Return an allocator's error with what was asked for; and what is free, where the device tells it."""
        free, remedy = self._plane.device_memory_free(), ""
        if free is not None:
            remedy = f" ({free} bytes of device memory are free). {_FREE_SOME}"
        text = f"{self._plane.who}: {self!r}: {nbytes} bytes cannot be had: {error.message}{remedy}"
        return type(error)(text, **{name: getattr(error, name) for name in error.FACTS})

    def _agree(self, said: Sequence[str], failure: Exception | None) -> None:
        """Raise where a rank has no memory, on every rank."""
        if isinstance(failure, ButterError):
            raise failure
        lacking = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text)
        if lacking:
            raise ButterError(f"{self._plane.who}: {self!r}: not every rank has the memory: {lacking}") from failure

    @property
    def array(self) -> Any:
        """The array: a ``DeviceArray`` of device memory, NumPy's of host memory.

        Raises
        ------
        ValueError
            It was closed.
        """
        self.check()
        if self._plane.on_device:
            return DeviceArray(self, self._pointer, self._plane.device.ordinal, self._shape, self._dtype)
        # A view of what holds the memory: that stays as long as the array.
        block: npt.NDArray[np.uint8] = self._plane.symmetric_block(self._pointer)
        first = self._pointer - block.ctypes.data
        nbytes = math.prod(self._shape) * self._dtype.itemsize
        return block[first : first + nbytes].view(numpy_dtype(self._dtype)).reshape(self._shape)

    def check(self) -> None:
        """Raise where the memory is not there any more.

        Raises
        ------
        ValueError
            It was closed.
        """
        if not self._pointer:
            raise ValueError(f"{self._plane.who}: {self!r} was closed, and its memory is freed; use it before that")

    def close(self) -> None:
        """Free the memory, once streams have passed the operations that use it; a second time, it does nothing.

        Other ranks need not come. Where the communicator is broken or closed it waits for a moment only: memory that
        may still be used then is left, with a warning in the log, until the communicator's own end or the process's.

        Raises
        ------
        ButterError
            Streams have not passed within the collective deadline; it can be tried again.
        ValueError
            Inside a group, or a stream is captured into a CUDA graph.
        """
        if not self._pointer or LANE.forked:
            return
        self._plane.check_no_group("closing a symmetric array")
        self._plane.give_back(self._handle)
        try:
            self._plane.symmetric_free(self._pointer)
        except ButterError as error:
            if self._plane.state() == "healthy":
                raise
            _LOG.warning("%s", error)
            self._plane.symmetric_leave(self._pointer)
        self._pointer = 0

    def __enter__(self) -> Any:
        return self.array

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        _all_of([self.close], error)

    def __del__(self, _warn: Callable[..., None] = warnings.warn) -> None:
        if self.__dict__.get("_pointer"):
            # Others may still be at work, and a finalizer must not wait: it goes with the communicator.
            self._plane.symmetric_leave(self._pointer)
            _warn(f"{self!r} was dropped without close(); use it as a context manager", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        return f"symmetric array {self._shape} of {self._dtype.label}"


class Memory:
    """Base of ``Communicator``: what it has besides operations for the memory that they work on."""

    _arguments: Arguments
    _plane: Plane

    def registered(self, *arrays: Any) -> AbstractContextManager[None]:
        """Register the memory of arrays with NCCL for the body of a ``with``, and give it back at its end.

        Some transports then read and write it without a copy of their own. The end waits, at most for the collective
        deadline, until streams have passed what was submitted; after a failure, on a closed communicator, and once
        ``attempt_reconnect`` has made it anew, there is nothing to give back, and it waits for nothing. Then enter it
        again to register anew. On the host planes nothing is gained, and checks are the same.

        Parameters
        ----------
        *arrays : array
            Of this plane's memory, as operations take them; they must stay where they are.

        Returns
        -------
        context manager
            Registers when it is entered; it can be entered again.

        Raises
        ------
        TypeError
            Not an array of this plane's memory.
        ValueError
            A strided or freed array, or inside a group.
        NCCLError
            NCCL refuses the memory.
        NotSupportedError
            NCCL is older than 2.19.
        ButterError
            At the end: streams have not passed within the collective deadline. The buffer stays registered.
        CommunicatorBrokenError, CommunicatorClosedError
            When it is entered, as for ``all_reduce``.

        Notes
        -----
        **Collective**: no. But NCCL asks that in one operation every rank's buffers are registered, or none.
        **Stream**: none. **Blocking**: at the end, until streams have passed. **In place**: no.

        See Also
        --------
        symmetric : Memory that every rank's operations reach. The C function is ``ncclCommRegister``.
        """
        return _Registered(self._plane, self._arguments, arrays)

    def symmetric(self, shape: int | Sequence[int], dtype: Any = DType.FLOAT32) -> Symmetric:
        """Allocate an array in memory that operations of every rank reach directly, where NCCL can.

        ::

            with comm.symmetric((1024, 1024), "bfloat16") as x:
                tensor = torch.from_dlpack(x)       # on the host planes x is a NumPy array

        On the nccl plane it comes from NCCL's allocator, and is registered as a symmetric window (NCCL 2.27 and newer),
        else as ``registered`` does; where neither helps, it is memory like any other. Its content is not defined.

        Parameters
        ----------
        shape : int or sequence of int
            Extents.
        dtype : DType, str or dtype of NumPy or PyTorch, default float32
            Element type.

        Returns
        -------
        Symmetric
            A context manager that gives the array; ``array`` and ``close()`` do the same without a ``with``.

        Raises
        ------
        TypeError, ValueError
            No shape or no element type, or inside a group; nothing was sent.
        ButterError
            Some rank has no such memory; on every rank.
        NotSupportedError
            NCCL is older than 2.19.
        CommunicatorBrokenError, CommunicatorClosedError
            As for ``all_reduce``.

        Notes
        -----
        **Collective**: every rank, in order with the collectives, with the same number of elements and dtype; it takes
        no sequence number. Closing is not. **Stream**: none. **Blocking**: until every rank has come. **In place**: no.

        On device memory the array's views (of CuPy, PyTorch) and plans must not be used after ``close()``: they keep
        the array alive, and not its memory. On host memory NumPy's array stays what it is as long as somebody has it.
        After ``attempt_reconnect`` the memory is still there, and no window any more: make a new one for that.

        See Also
        --------
        registered : For memory that exists. The C functions are ``ncclMemAlloc`` and ``ncclCommWindowRegister``.
        """
        who = f"{self._plane.who}: symmetric"
        extents, kind = _shape(shape, who), _dtype(dtype, who)
        if math.prod(extents) * kind.itemsize > _MOST_BYTES:
            raise ValueError(f"{who}: shape {extents} of {kind.label} is more than 2**48 bytes")
        return Symmetric(self, extents, kind)


def _shape(shape: Any, who: str) -> tuple[int, ...]:
    extents = [shape] if hasattr(shape, "__index__") else shape
    if isinstance(extents, str | bytes) or not hasattr(extents, "__iter__"):
        raise TypeError(f"{who}: shape must be an int or a sequence of ints; got {type(shape).__name__}")
    found = []
    for extent in extents:
        if isinstance(extent, bool) or not hasattr(extent, "__index__"):
            raise TypeError(f"{who}: shape must be an int or a sequence of ints; got {type(extent).__name__} in it")
        if int(extent) < 0:
            raise ValueError(f"{who}: shape must be numbers of elements, 0 or more; got {extent} in it")
        found.append(int(extent))
    return tuple(found)


def _dtype(dtype: Any, who: str) -> DType:
    """Return the element type for a name, or for what NumPy or PyTorch calls one."""
    name = dtype
    if dtype is not None and not isinstance(dtype, DType | str):
        name = str(dtype).removeprefix("torch.")
        with contextlib.suppress(TypeError):
            name = np.dtype(dtype).name
    try:
        return DType.parse(name)
    except ValueError as error:
        raise ValueError(f"{who}: {error}") from None
