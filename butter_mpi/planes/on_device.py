"""What the planes of device memory share: their device, and which streams and which memory they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from butter_mpi.collectives import Operation, call_site, control_signature, signature
from butter_mpi.device import Device
from butter_mpi.errors import CUDAError
from butter_mpi.lane import LANE
from butter_mpi.planes.base import Plane
from butter_mpi.planes.keeping import Keeping

__all__ = ["OnDevice"]


class OnDevice(Plane):
    """A plane whose operations are put on streams of one device."""

    on_device = True
    _device: Device | None = None
    _event = 0
    _keeping: Keeping

    @property
    def device(self) -> Device:
        """This rank's device, once it was taken."""
        assert self._device is not None, "the start takes the device"
        return self._device

    def check_stream(self, stream: int) -> int:
        """Return a stream of this device's primary context, not captured."""
        return int(self._ask(self.device.check_stream, stream))

    def check_pointer(self, pointer: int, what: str) -> None:
        """Refuse memory of the host, or of another device."""
        owner = self._ask(self.device.owner, pointer, what) if pointer else self.device.ordinal
        if owner != self.device.ordinal:
            where = "host memory, or was freed" if owner is None else f"memory of cuda:{owner}"
            raise ValueError(f"{what} is {where}; this communicator works on memory of cuda:{self.device.ordinal}")

    def _admit(self, operation: Operation) -> None:
        """Refuse a stream that is captured now: the ordered one is asked of nobody before, and a group may end late."""
        for stream in (operation.stream, *operation.named):
            self._ask(self.device.refuse_capture, stream)

    def _follow(self, operation: Operation) -> None:
        if operation.named:
            with self._poisoning(signature(operation, self._next_number(operation))):
                for stream in operation.named:
                    self._order(stream, operation.stream)

    def _keep(self, operations: Sequence[Operation]) -> None:
        self._keeping.add(operations)
        self._keeping.release()

    def _lead(self, operations: Sequence[Operation]) -> None:
        self._keeping.mark()
        for operation in operations:
            for stream in operation.named:
                self._order(operation.stream, stream)

    def _order(self, earlier: int, later: int) -> None:
        """Let what comes later on one stream wait for what another one holds now; the event can be used again."""
        self.device.record(self._event, earlier)
        self.device.wait(later, self._event)

    def _ask(self, question: Callable[[Any], Any], subject: Any, what: str = "") -> Any:
        """Ask the driver; where it fails at a mere question its context is lost, and this communicator is poisoned.

        A closed communicator asks nothing: its streams are gone, and drivers crash on what is no stream any more.
        """
        name = question.__name__
        self._check(name)
        try:
            return question(subject)
        except ValueError as error:
            raise ValueError(f"{what or self.who}: {error}") from None
        except CUDAError as error:
            record = control_signature(name, self.sequence, call_site())
            with LANE.held(self.who, name, self.deadline), self._poisoning(record):
                raise error
