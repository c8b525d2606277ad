"""Arrays in the memory of a communicator's plane, whichever that is."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import numpy.typing as npt

from butter_mpi import Communicator
from butter_mpi.device import Device
from helpers.memory import DeviceArray, DeviceMemory

__all__ = ["Array", "Arrays"]

Array = npt.NDArray[Any]


class Arrays:
    """Makes arrays in the memory of the plane, and looks at them, in the order of a stream: the plane's, or another."""

    def __init__(self, comm: Communicator, *, own_stream: bool = False) -> None:
        plane: Any = comm.backend
        self.device: Device | None = plane.device if plane.on_device else None
        self.stream: int | None = None
        self._memory: DeviceMemory | None = None
        if self.device is not None:
            self.stream = self.device.make_stream() if own_stream else plane.stream
            self._memory = DeviceMemory(self.device, self.stream)

    def __call__(self, content: Array) -> Any:
        """Return an array of the plane's memory."""
        if self._memory is None:
            return content.copy()
        return DeviceArray(self._memory, content, stream=self._memory.stream)

    def part(self, whole: Any, start: int, count: int) -> Any:
        """Return a part of an array: the same memory."""
        if self._memory is None:
            return whole[start : start + count]
        shown = whole.__cuda_array_interface__
        at = shown["data"][0] + start * whole.dtype.itemsize
        interface = {**shown, "shape": (count,), "data": (at, False)}
        return types.SimpleNamespace(dtype=whole.dtype, __cuda_array_interface__=interface, under=whole)

    def get(self, array: Any) -> Array:
        """Return what is in it."""
        return array if self._memory is None else array.get()

    def fill(self, array: Any, value: int) -> None:
        """Write a value into all of an array that came from elsewhere."""
        if self._memory is None:
            array[...] = value
            return
        content = np.full(array.shape, value, array.dtype)
        self._copy(array.__cuda_array_interface__["data"][0], content.ctypes.data, content.nbytes)

    def read(self, array: Any) -> Array:
        """Return what is in an array that came from elsewhere."""
        if self._memory is None:
            return array.copy()
        out = np.empty(array.shape, array.dtype)
        self._copy(out.ctypes.data, array.__cuda_array_interface__["data"][0], out.nbytes)
        return out

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        assert self.device is not None and self._memory is not None
        self.device.copy(target, source, nbytes, self._memory.stream)
        self._memory.wait()
