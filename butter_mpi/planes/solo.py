"""The plane of world size one: no communication, the same checks, numbers and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from butter_mpi.errors import CommunicatorBrokenError
from butter_mpi.planes.base import Numbered, Plane
from butter_mpi.planes.memory import Allocator, copy

__all__ = ["SoloPlane"]


class SoloPlane(Plane):
    """One rank on host memory: an operation is the copy that its result needs, if any."""

    NAME = "solo"

    def __init__(self, **options: Any) -> None:
        super().__init__(0, 1, **options)
        self._memory = Allocator()

    def _execute(self, numbered: Sequence[Numbered]) -> None:
        operations = [operation for operation, _ in numbered]
        for operation in operations:
            if operation.rule.send_blocks and operation.rule.recv_blocks:
                copy(operation.recv, operation.send, operation.nbytes)
        for send, recv in self._own_pairs(operations):
            assert send is not None and recv is not None
            copy(recv.recv, send.send, send.nbytes)

    def _exchange(self, payload: bytes, record: dict[str, Any]) -> list[bytes]:
        return [payload]

    def symmetric_alloc(self, nbytes: int) -> int:
        """Allocate aligned host memory."""
        return self._memory.alloc(nbytes)

    def symmetric_free(self, ptr: int) -> None:
        """Free it."""
        self._memory.free(ptr)

    def _reconnect(self) -> None:
        """Nothing to make anew."""

    def _announce(self, cause: CommunicatorBrokenError) -> None:
        """Nobody to tell."""

    def _listen(self) -> None:
        """Nobody to hear from."""

    def _release(self) -> None:
        """Nothing to give back."""
