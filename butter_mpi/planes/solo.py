"""The plane of world size one: no communication, the same checks, numbers and errors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from butter_mpi.collectives import Operation, carried
from butter_mpi.device import LEGACY_STREAMS, Device, same_stream
from butter_mpi.enums import PreMulSum
from butter_mpi.errors import CommunicatorBrokenError, CUDAError, NotSupportedError
from butter_mpi.kernels import premul
from butter_mpi.planes.base import Plane
from butter_mpi.planes.keeping import Keeping
from butter_mpi.planes.memory import ALIGNMENT, at, copy, factor_of, premultiplied
from butter_mpi.planes.on_device import OnDevice
from butter_mpi.planes.submitting import Numbered

__all__ = ["DeviceSoloPlane", "SoloPlane"]

_THREADS = 256
_MOST_BLOCKS = 1024


class SoloPlane(Plane):
    """One rank on host memory: an operation is the copy that its result needs, if any."""

    NAME = "solo"

    def __init__(self, **options: Any) -> None:
        super().__init__(0, 1, **options)

    def _execute(self, numbered: Sequence[Numbered]) -> None:
        operations = [carried(operation) for operation, _ in numbered]
        for operation in operations:
            if operation.rule.send_blocks and operation.rule.recv_blocks:
                self._copy(operation, operation)
            if isinstance(operation.op, PreMulSum):
                self._multiply(operation)
        for send, recv in self._own_pairs(operations):
            assert send is not None and recv is not None
            self._copy(send, recv)

    def _copy(self, source: Operation, target: Operation) -> None:
        copy(target.recv, source.send, source.nbytes)

    def _multiply(self, operation: Operation) -> None:
        """Multiply what was copied by this rank's factor."""
        premultiplied(at(operation.recv, operation.count, operation.dtype), operation)

    def _exchange(self, payload: bytes, record: dict[str, Any]) -> list[bytes]:
        return [payload]

    def _reconnect(self) -> None:
        """Nothing to make anew."""

    def _announce(self, cause: CommunicatorBrokenError) -> None:
        """Nobody to tell."""

    def _listen(self) -> None:
        """Nobody to hear from."""

    def _release(self) -> None:
        """Nothing to give back."""


class DeviceSoloPlane(OnDevice, SoloPlane):
    """One rank on the memory of a device: copies are put on the ordered stream.

    Parameters
    ----------
    device : Device
        The device.
    stream : int, optional
        The ordered stream; without it, a non-blocking one of this plane.
    **options
        Of ``Plane``.
    """

    def __init__(self, device: Device, stream: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._device = device
        self._transport_errors = (CUDAError,)
        self._keeping = Keeping(device)
        self._premul = 0
        self._own_stream, self._event = device.make_stream(), device.make_event()
        self._lasting = (self._own_stream, *LEGACY_STREAMS)
        self.stream = self._own_stream if stream is None else self.check_stream(stream)

    def _admit(self, operation: Operation) -> None:
        super()._admit(operation)
        if isinstance(operation.op, PreMulSum):
            try:
                self._premul = premul(self.device)
            except NotSupportedError as error:
                raise NotSupportedError(
                    f"{self.who}: {operation.kind}: one rank alone on a device multiplies by a kernel of its own, "
                    f"without NCCL: {error.message}; or multiply the array by the factor yourself",
                    needs=error.needs,
                ) from None

    def _execute(self, numbered: Sequence[Numbered]) -> None:
        if self._keeping.dropped:
            self._keeping.take_back()
        super()._execute(numbered)

    def _multiply(self, operation: Operation) -> None:
        if operation.count:
            factor = int.from_bytes(factor_of(operation).tobytes(), "little")
            blocks = min(-(-operation.count // _THREADS), _MOST_BLOCKS)
            values = operation.recv, operation.count, factor, operation.dtype.nccl
            arguments = values, (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_ulonglong, ctypes.c_uint)
            self.device.launch(self._premul, blocks, _THREADS, operation.stream, arguments)

    def _copy(self, source: Operation, target: Operation) -> None:
        apart = not same_stream(source.stream, target.stream)
        if apart:
            self._order(source.stream, target.stream)
        self.device.copy(target.recv, source.send, source.nbytes, target.stream)
        if apart:
            self._order(target.stream, source.stream)

    def _listen(self) -> None:
        # The thread that asks may have no context yet.
        self.device.make_current()
        self._keeping.take_back()
        self._keeping.release()

    def _release(self) -> None:
        self.device.make_current()
        self._keeping.take_back()
        self._keeping.mark_plans()
        self._keeping.leave()
        self._memory.free_left()
        # The driver destroys them once their work is done, and waits for nothing.
        self.device.destroy_event(self._event)
        self.device.destroy_stream(self._own_stream)

    def _allocate(self, nbytes: int) -> tuple[int, int]:
        """Allocate device memory."""
        base = self.device.alloc(nbytes + ALIGNMENT)
        return base, base

    def _free(self, base: int) -> None:
        """Free it once all work that uses it is done."""
        self.device.free(base)
