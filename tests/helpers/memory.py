"""Memory of a plane behind raw pointers, for tests that run on every plane: allocate, upload, download, guard."""

from __future__ import annotations

import os
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

PLANE = os.environ.get("BUTTER_MPI_TEST_PLANE", "host")
"""The plane that the suites under tests/ranks run on."""

_GUARD = 64
_PATTERN = 0xA5


class Memory(Protocol):
    """What a plane's memory offers to tests."""

    stream: int

    def put(self, array: npt.NDArray[Any]) -> int:
        """Return the pointer of a copy of `array`, with guard bytes around it."""

    def blank(self, nbytes: int) -> int:
        """Return the pointer of poisoned memory, with guard bytes around it."""

    def get(self, pointer: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return what lies at `pointer` in the shape and type of `like`, after checking its guards."""


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
