"""The numbered checks, and what a check is given and gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from butter_mpi.communicator import Communicator
from butter_mpi.enums import DType, ReduceOp
from butter_mpi.selftest.data import Buffer, Case
from butter_mpi.selftest.places import DevicePlace, HostPlace

__all__ = ["Check", "Context", "Types"]


_TYPES = tuple(dtype for dtype in DType if dtype.native)
_FLOAT8 = (DType.FLOAT8_E4M3, DType.FLOAT8_E5M2)
_MOVES_FLOAT8, _REDUCES_FLOAT8 = 22400, (9, 0)


@dataclass(frozen=True, slots=True)
class Types:
    """The element types that the plane moves and reduces on every rank, and what is missing, as a person reads it."""

    moved: tuple[DType, ...] = _TYPES
    reduced: tuple[DType, ...] = _TYPES
    missing: str = ""

    @classmethod
    def of(cls, comm: Communicator) -> Types:
        """Return those of a communicator, whose records are gathered; every rank calls it."""
        if comm.plane != "nccl":
            return cls()
        plane: Any = comm.backend
        others = tuple(dtype for dtype in _TYPES if dtype not in _FLOAT8)
        capability = min(map(tuple, comm.all_gather_json(plane.device.capability)))
        library = comm.records[0]["library"]
        if library["version"] < _MOVES_FLOAT8:
            return cls(others, others, f"8-bit floats: NCCL has them from 2.24 on, this is {library['version_text']}")
        if capability < _REDUCES_FLOAT8:
            found = ".".join(map(str, capability))
            return cls(
                reduced=others, missing=f"reducing 8-bit floats: takes compute capability 9.0, a device has {found}"
            )
        return cls()


@dataclass(frozen=True, slots=True)
class Context:
    """What a check works with.

    Parameters
    ----------
    comm : Communicator
        Of all ranks.
    place : HostPlace or DevicePlace
        Where its buffers are.
    types : Types
        What the plane takes.
    seed, number : int
        The agreed seed, and the number of the check.
    alone : callable
        Makes a communicator of this rank alone.
    """

    comm: Communicator
    place: HostPlace | DevicePlace
    types: Types
    seed: int
    number: int
    alone: Callable[[], Communicator]

    def buffer(self, dtype: DType, count: int) -> Buffer:
        """Return a buffer in the memory of the plane; what it holds is not said."""
        return Buffer(self.place, dtype, count)

    def zeros(self, dtype: DType, count: int) -> Buffer:
        """Return a buffer of zeros."""
        buffer = self.buffer(dtype, count)
        buffer.fill(0)
        return buffer

    def case(self, dtype: DType, count: int, op: ReduceOp | None = None) -> Case:
        """Return a case whose random numbers no other check has."""
        return Case(self.seed, self.number, dtype, count, op)

    def draw(self, below: int) -> int:
        """Return a random number that is the same on every rank."""
        return int(self.case(DType.UINT8, 0).random(below).integers(below))


def _always(_context: Context) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Parameters
    ----------
    number, id, title
        Stable over versions; a number is never given to another check.
    run : callable
        Called on every rank at the same time; yields the facts that are wrong on this rank.
    hindrance : callable
        Why it does not apply here, the same on every rank; empty: it does.
    faults : bool
        Whether it breaks the communicator on purpose, and so runs on request only.
    """

    number: int
    id: str
    title: str
    run: Callable[[Context], Iterable[str]]
    hindrance: Callable[[Context], str] = _always
    faults: bool = False
