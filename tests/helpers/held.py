"""A CUDA stream that is held up until a test lets it go on, by means that every driver has."""

from __future__ import annotations

import ctypes
import threading
from types import TracebackType

from cuda.bindings import driver

from butter_mpi.device import Device

__all__ = ["Held"]

_LONGEST = 30
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_ALL: list[Held] = []


class Held:
    """Hold a stream: what is put on it later does not begin before ``go``; use it in a ``with``."""

    def __init__(self, device: Device, stream: int) -> None:
        self._go = threading.Event()
        self._function = _FUNCTION(lambda _: self._go.wait(_LONGEST) and None)
        # The driver calls it from a thread of its own, also when the test has ended early.
        _ALL.append(self)
        device.call("cuLaunchHostFunc", stream, driver.CUhostFn(ctypes.cast(self._function, ctypes.c_void_p).value), 0)

    def go(self) -> None:
        """Let the stream go on."""
        self._go.set()

    def __enter__(self) -> Held:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.go()
