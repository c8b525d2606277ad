"""Memory of a plane behind raw pointers, for tests that run on every plane: allocate, upload, download, guard."""

from __future__ import annotations

import os
import time
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from butter_mpi import DType
from butter_mpi.device import Device
from butter_mpi.planes.memory import at

PLANE = os.environ.get("BUTTER_MPI_TEST_PLANE", "host")
"""The plane that the suites under tests/ranks run on."""

_GUARD = 64
_PATTERN = 0xA5
_SECONDS = 30


class Memory(Protocol):
    """What a plane's memory offers to tests."""

    stream: int

    def put(self, array: npt.NDArray[Any]) -> int:
        """Return the pointer of a copy of `array`, with guard bytes around it."""

    def blank(self, nbytes: int) -> int:
        """Return the pointer of poisoned memory, with guard bytes around it."""

    def get(self, pointer: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return what lies at `pointer` in the shape and type of `like`, after checking its guards."""

    def wait(self) -> None:
        """Wait until what was submitted is done."""


class DeviceMemory:
    """Memory of a device, reached in the order of the plane's stream."""

    def __init__(self, device: Device, stream: int) -> None:
        self._device, self.stream = device, stream
        # What is put in must be there whatever the plane's stream does, also when it has none any more.
        self._own = device.make_stream()

    def put(self, array: npt.NDArray[Any]) -> int:
        """Copy it in."""
        pointer = self.blank(array.nbytes)
        source = np.ascontiguousarray(array)
        self._device.copy(pointer, source.ctypes.data, source.nbytes, self._own)
        self._wait(self._own)
        return pointer

    def blank(self, nbytes: int) -> int:
        """Poison it."""
        start = self._device.alloc(nbytes + 2 * _GUARD)
        self._device.fill(start, _PATTERN, nbytes + 2 * _GUARD, self._own)
        self._wait(self._own)
        return start + _GUARD

    def get(self, pointer: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Copy it out after what the stream holds."""
        block = np.empty(like.nbytes + 2 * _GUARD, np.uint8)
        self._device.copy(block.ctypes.data, pointer - _GUARD, block.nbytes, self.stream)
        self.wait()
        for guard in (block[:_GUARD], block[_GUARD + like.nbytes :]):
            assert (guard == _PATTERN).all(), "bytes beside the buffer were written"
        return block[_GUARD : _GUARD + like.nbytes].view(like.dtype).reshape(like.shape).copy()

    def wait(self) -> None:
        """Wait for what the stream holds."""
        self._wait(self.stream)

    def _wait(self, stream: int) -> None:
        end = time.monotonic() + _SECONDS
        while not self._device.ready(stream):
            assert time.monotonic() < end, "the stream did not come to an end"
            time.sleep(1e-4)


def page_locked(device: Device, count: int) -> npt.NDArray[np.float32]:
    """Return float32 zeros to which a device copies without the host waiting for it; they stay to the end."""
    array = at(int(device.call("cuMemHostAlloc", 4 * count, 0)), count, DType.FLOAT32)
    array[:] = 0
    return array


class DeviceArray:
    """What any library's array in device memory shows of itself: the array interface."""

    def __init__(self, memory: DeviceMemory, content: npt.NDArray[Any], **more: Any) -> None:
        self._memory, self._content, self.dtype = memory, content, content.dtype
        self.pointer = memory.put(content)
        self.__cuda_array_interface__ = {
            "shape": content.shape,
            "typestr": content.dtype.str,
            "data": (self.pointer, False),
            "version": 3,
            **more,
        }

    def get(self) -> npt.NDArray[Any]:
        """Copy it out in the order of the memory's stream."""
        return self._memory.get(self.pointer, self._content)


class HostMemory:
    """Host memory."""

    stream = 0

    def __init__(self) -> None:
        self._blocks: dict[int, npt.NDArray[np.uint8]] = {}

    def put(self, array: npt.NDArray[Any]) -> int:
        """Copy it in."""
        pointer = self.blank(array.nbytes)
        self._blocks[pointer][_GUARD : _GUARD + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return pointer

    def blank(self, nbytes: int) -> int:
        """Poison it."""
        block = np.full(nbytes + 2 * _GUARD, _PATTERN, np.uint8)
        pointer = block.ctypes.data + _GUARD
        self._blocks[pointer] = block
        return pointer

    def get(self, pointer: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Copy it out."""
        block = self._blocks[pointer]
        for guard in (block[:_GUARD], block[_GUARD + like.nbytes :]):
            assert (guard == _PATTERN).all(), "bytes beside the buffer were written"
        return block[_GUARD : _GUARD + like.nbytes].view(like.dtype).reshape(like.shape).copy()

    def wait(self) -> None:
        """An operation on host memory has completed when it returns."""
