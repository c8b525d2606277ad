"""Where the buffers of checks are: in host memory, or in device memory that is reached in the order of a stream."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from butter_mpi.communicator import Communicator
from butter_mpi.control import Pause, Watch
from butter_mpi.errors import CollectiveTimeoutError, CommunicatorBrokenError, CUDAError

__all__ = ["DeviceArray", "DevicePlace", "HostPlace", "Place", "place_of"]

Array = npt.NDArray[Any]


class Place(Protocol):
    """Memory that a plane works on; the host has a copy of each array, which only ``put`` and ``get`` bring over."""

    on_device: bool

    def array(self, host: Array) -> Any:
        """Return memory for the bytes of `host`, as operations take it."""

    def put(self, array: Any, host: Array) -> None:
        """Make the memory what the host's copy is, after what was submitted before."""

    def get(self, array: Any, host: Array) -> None:
        """Make the host's copy what the memory is, after what was submitted before."""

    def read_only(self, array: Any) -> Any:
        """Return the same memory as an array that may not be written to."""

    def wait(self) -> None:
        """Wait, bounded, until what was submitted is done."""

    def close(self) -> None:
        """Free the memory, once what was submitted is done."""


class HostPlace:
    """Host memory: an array is its own copy, and an operation has completed when it returns."""

    on_device = False

    def array(self, host: Array) -> Array:
        """Return the copy itself."""
        return host

    def put(self, array: Array, host: Array) -> None:
        """Nothing to bring."""

    def get(self, array: Array, host: Array) -> None:
        """Nothing to bring."""

    def read_only(self, array: Array) -> Array:
        """Return a view without the right to write."""
        fixed = array.view()
        fixed.flags.writeable = False
        return fixed

    def wait(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing to free."""


class _Block:
    """Memory that goes back to those who take it next when nobody has it any more."""

    def __init__(self, pointer: int, unused: list[int]) -> None:
        self.pointer, self._unused = pointer, unused

    def __del__(self) -> None:
        self._unused.append(self.pointer)


class _Pool:
    """Blocks of memory, kept by size until the end: to allocate and free can make the host wait for the device."""

    def __init__(self, allocate: Callable[[int], int], free: Callable[[int], None]) -> None:
        self._allocate, self._free = allocate, free
        self._made: list[int] = []
        self._unused: dict[int, list[int]] = {}

    def take(self, nbytes: int) -> _Block:
        """Return a block of at least that size."""
        size = 1 << (nbytes - 1).bit_length()
        unused = self._unused.setdefault(size, [])
        if not unused:
            self._made.append(self._allocate(size))
            unused.append(self._made[-1])
        return _Block(unused.pop(), unused)

    def close(self) -> None:
        """Free all of them."""
        for pointer in self._made:
            self._free(pointer)
        self._made.clear()
        self._unused.clear()


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """Elements in device memory, one dimension, as the array protocol of CUDA shows them."""

    block: Any
    pointer: int
    count: int
    dtype: np.dtype[Any]
    stream: int | None
    step: int = 1
    readonly: bool = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.count,),
            "typestr": self.dtype.str,
            "data": (self.pointer, self.readonly),
            "strides": None if self.step == 1 else (self.step * self.dtype.itemsize,),
            "version": 3,
            "stream": self.stream,
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.count * self.dtype.itemsize

    def __getitem__(self, part: slice) -> DeviceArray:
        start, stop, step = part.indices(self.count)
        pointer = self.pointer + start * self.dtype.itemsize
        return replace(self, pointer=pointer, count=len(range(start, stop, step)), step=step)

    def view(self, dtype: np.dtype[Any]) -> DeviceArray:
        """Return the same bytes as elements of another type."""
        return replace(self, count=self.nbytes // dtype.itemsize, dtype=dtype)


class DevicePlace:
    """Device memory; bytes come and go in the order of one stream, which arrays name as theirs.

    They go by way of page-locked host memory: with any other the driver makes the host wait for the stream, unbounded.

    Parameters
    ----------
    comm : Communicator
        On a plane of device memory.
    stream : int, optional
        Default: the plane's ordered stream.
    allocate, free : callable, optional
        Where memory comes from; default: the driver.
    """

    on_device = True

    def __init__(
        self,
        comm: Communicator,
        stream: int | None = None,
        allocate: Callable[[int], int] | None = None,
        free: Callable[[int], None] | None = None,
    ) -> None:
        plane: Any = comm.backend
        self._comm, self.plane, self.device = comm, plane, plane.device
        self.stream: int = plane.stream if stream is None else stream
        self._blocks = _Pool(allocate or plane.device.alloc, free or plane.device.free)
        self._locked = _Pool(partial(self._call, "cuMemAllocHost"), partial(self._call, "cuMemFreeHost"))
        self._under_way: list[_Block] = []

    def _call(self, name: str, argument: int) -> Any:
        self.device.make_current()
        return self.device.call(name, argument)

    def array(self, host: Array) -> DeviceArray:
        """Return device memory; what it holds is not said."""
        block = self._blocks.take(host.nbytes)
        return DeviceArray(block, block.pointer, host.nbytes, np.dtype(np.uint8), self.stream)

    def put(self, array: DeviceArray, host: Array) -> None:
        """Queue the copy to the device; the host's bytes may be changed at once."""
        locked = self._locked.take(host.nbytes)
        ctypes.memmove(locked.pointer, host.ctypes.data, host.nbytes)
        self._under_way.append(locked)
        self._copy(array.pointer, locked.pointer, host.nbytes)

    def get(self, array: DeviceArray, host: Array) -> None:
        """Queue the copy to the host, and wait for it."""
        locked = self._locked.take(host.nbytes)
        self._under_way.append(locked)
        self._copy(locked.pointer, array.pointer, host.nbytes)
        self.wait()
        ctypes.memmove(host.ctypes.data, locked.pointer, host.nbytes)

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        """Queue a copy on the device."""
        self._copy(target.pointer, source.pointer, source.nbytes)

    def read_only(self, array: DeviceArray) -> DeviceArray:
        """Return an array that says so."""
        return replace(array, readonly=True)

    def ready(self) -> bool:
        """Whether the stream's work is done."""
        with self._poisoning():
            return bool(self.device.ready(self.stream))

    def wait(self) -> None:
        """Wait for the stream; its work also counts as done after an abort, so the communicator has the last word.

        Raises
        ------
        CommunicatorBrokenError
            It broke meanwhile, or the work is not done by the collective deadline.
        """
        watch, pause = Watch(self._comm.settings.collective_deadline), Pause()
        while not self.ready():
            self._comm.check_async_error()
            if watch.tick():
                raise self._overdue(watch.elapsed)
            pause()
        self._comm.check_async_error()
        self._under_way.clear()

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        with self._poisoning():
            self.device.copy(target, source, nbytes, self.stream)

    @contextmanager
    def _poisoning(self) -> Iterator[None]:
        """Poison the communicator with a failure of the device: no operation on it could succeed."""
        try:
            yield
        except CUDAError as error:
            plane = self.plane
            text = f"{plane.who}: the device failed, after {plane.last or 'no operation'}: {error}"
            broken = CommunicatorBrokenError(text, lost_ranks=(plane.rank(),), sequence=plane.sequence, phase="device")
            plane.poison(broken)
            raise broken from error

    def _overdue(self, elapsed: float) -> CollectiveTimeoutError:
        plane = self.plane
        text = f"{plane.who}: the work on the stream is not done after {elapsed:.1f} s; the last was {plane.last}"
        error = CollectiveTimeoutError(text, sequence=plane.sequence, phase="waiting for the stream", elapsed=elapsed)
        plane.poison(error)
        return error

    def close(self) -> None:
        """Free the memory once its work is done; arrays in it are void."""
        self.wait()
        self._blocks.close()
        self._locked.close()


def place_of(comm: Communicator) -> HostPlace | DevicePlace:
    """Return the place that a communicator's plane works on."""
    plane: Any = comm.backend
    return DevicePlace(comm) if plane.on_device else HostPlace()
