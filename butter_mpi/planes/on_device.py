"""What the planes of device memory share: their device, and which streams and which memory they take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from butter_mpi.collectives import Operation, call_site, control_signature
from butter_mpi.device import LEGACY_STREAMS, Device
from butter_mpi.errors import CUDAError
from butter_mpi.lane import LANE
from butter_mpi.planes.base import NAMED, Plane
from butter_mpi.planes.keeping import Keeping, Lease
from butter_mpi.planes.submitting import Used

__all__ = ["OnDevice"]


def _keeps_its_handle(stream: Any) -> bool:
    """Return whether a stream that was given is an object which keeps its handle valid, as those of libraries do.

    CuPy, PyTorch and Numba have such for handles of others too, which say so.
    """
    if stream is None or hasattr(stream, "__index__"):
        return False
    return not type(stream).__name__.startswith("External") and not getattr(stream, "external", False)


class OnDevice(Plane):
    """A plane whose operations are put on streams of one device."""

    on_device = True
    _device: Device | None = None
    _event = 0
    _keeping: Keeping
    _lasting: tuple[int, ...] = LEGACY_STREAMS
    """Streams that are there as long as this plane."""

    @property
    def device(self) -> Device:
        """This rank's device, once it was taken."""
        assert self._device is not None, "the start takes the device"
        return self._device

    def device_memory_free(self) -> int | None:
        """Return the bytes of device memory that nobody has; ``None``: the device does not say."""
        try:
            return self.device.memory_free()
        except CUDAError:
            return None

    def check_stream(self, stream: int) -> int:
        """Return a stream of this device's primary context, not captured."""
        device = self._device
        assert device is not None
        checked: int = self._ask(device.check_stream, stream)
        return checked

    def check_handle(self, stream: int) -> int:
        """Return a stream of this device's primary context; whether it is captured is asked when it is used."""
        device = self._device
        assert device is not None
        checked: int = self._ask(device.check_handle, stream)
        return checked

    def check_pointer(self, pointer: int, what: object) -> None:
        """Refuse memory of the host, or of another device."""
        device = self._device
        assert device is not None
        if not pointer:
            return
        owner = self._ask(device.owner, pointer, what)
        if owner != device.ordinal:
            where = "host memory, or was freed" if owner is None else f"memory of cuda:{owner}"
            raise ValueError(f"{what} is {where}; this communicator works on memory of cuda:{device.ordinal}")

    def lend(self, operation: Operation, stream: Any) -> Lease | None:
        """Return what stands for a plan: with its stream where that is there as long as the plan, or this plane.

        What is ordered with streams that arrays name needs an event behind each call all the same.
        """
        lasts = not operation.named and (operation.stream in self._lasting or _keeps_its_handle(stream))
        if not lasts and operation.graph is None:
            return None
        return self._keeping.lend(operation.stream if lasts else None, stream, operation.graph)

    def _admit(self, operation: Operation) -> None:
        """Refuse a stream that is captured now: nobody asked before, and a group may end late."""
        device: Any = self._device
        try:
            device.refuse_capture(operation.stream, operation.named)
        except (CUDAError, ValueError) as error:
            self._refuse_captured(device, operation, error)
        if operation.call is None:
            self._check_supported(operation)

    def _refuse_captured(self, device: Device, operation: Operation, error: CUDAError | ValueError) -> NoReturn:
        """Raise what a question about the streams of an operation ended by."""
        if isinstance(error, ValueError) and operation.named:
            with contextlib.suppress(CUDAError, ValueError):
                device.refuse_capture(operation.stream)
                # So it is about another one.
                error = ValueError(f"{error}. {NAMED.format(operation.kind)}")
        self._answer("refuse_capture", self.who, error)

    def _check_supported(self, operation: Operation) -> None:
        """Raise ``NotSupportedError`` where device or library lack an operation; asked until it was issued once."""

    def _follow(self, operation: Operation) -> None:
        for stream in operation.named:
            self._order(stream, operation.stream)

    def _keep(self, used: Sequence[Used]) -> None:
        self._keeping.keep(used)

    def _mark(self) -> None:
        self._keeping.mark()

    def _lead(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            for stream in operation.named:
                # What names streams has arrays, and their mark is behind all of these operations.
                self.device.wait(stream, self._keeping.newest(operation.stream))

    def _order(self, earlier: int, later: int) -> None:
        """Let what comes later on one stream wait for what another one holds now; the event can be used again."""
        self.device.order(earlier, later, self._event)

    def _ask(self, question: Callable[[Any], Any], subject: Any, what: object = None) -> Any:
        """Ask the driver; where it fails at a mere question its context is lost, and this communicator is poisoned.

        A closed communicator asks nothing: its streams are gone, and drivers crash on what is no stream any more.
        """
        health = self.health
        if health.cause is not None or health.closed or LANE.forked:
            self._refuse(question.__name__)
        try:
            return question(subject)
        except (CUDAError, ValueError) as error:
            self._answer(question.__name__, what or self.who, error)

    def _answer(self, name: str, what: object, error: CUDAError | ValueError) -> NoReturn:
        """Raise what a question ended by."""
        if isinstance(error, ValueError):
            raise ValueError(f"{what}: {error}") from None
        record = control_signature(name, self.sequence, call_site())
        with LANE.held(self.who, name, self.deadline), self._poisoning(record):
            raise error
