"""What the planes of device memory share: which streams and which memory they take."""

from __future__ import annotations

from butter_mpi.device import Device

__all__ = ["OnDevice"]


class OnDevice:
    """A plane whose operations are put on streams of one device."""

    on_device = True
    who: str
    device: Device

    def check_stream(self, stream: int) -> int:
        """Return a stream of this device's primary context, not captured."""
        try:
            return self.device.check_stream(stream)
        except ValueError as error:
            raise ValueError(f"{self.who}: {error}") from None

    def check_pointer(self, pointer: int, what: str) -> None:
        """Refuse memory of the host, or of another device."""
        owner = self.device.owner(pointer) if pointer else self.device.ordinal
        if owner != self.device.ordinal:
            where = "host memory" if owner is None else f"memory of cuda:{owner}"
            raise ValueError(f"{what} is {where}; this communicator works on memory of cuda:{self.device.ordinal}")
