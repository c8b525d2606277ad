"""What the sweep measures: operations in place on one buffer, what they make of it, and the ways to each.

The size of an operation is that of the whole buffer: what all_reduce reduces, all_gather fills, reduce_scatter takes.
The block of this rank lies in it, where all_gather reads and reduce_scatter writes.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from butter_mpi import nccl
from butter_mpi.benchmarking import Array
from butter_mpi.communicator import Communicator
from butter_mpi.enums import DType, ReduceOp
from butter_mpi.plans import Plan

__all__ = ["OPERATIONS", "PATTERNS", "Operation", "Place", "Span", "Torch", "Variant", "pattern"]

_BF16_SHIFT = 16
# A whole number of each type as its bits: how the driver fills memory with it, and how NumPy reads them.
PATTERNS = {DType.FLOAT32: ("cuMemsetD32Async", np.uint32), DType.BFLOAT16: ("cuMemsetD16Async", np.uint16)}


def pattern(value: int, dtype: DType) -> int:
    """Return the bits of a small whole number, which both types hold exactly."""
    bits = int(np.float32(value).view(np.uint32))
    return bits >> _BF16_SHIFT if dtype is DType.BFLOAT16 else bits


class Part(NamedTuple):
    """Where a part of a buffer begins, and its bytes."""

    pointer: int
    nbytes: int


class Place(NamedTuple):
    """A buffer of as many blocks as there are ranks, and which of them is this rank's."""

    pointer: int
    block: int
    rank: int
    ranks: int
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Return the bytes of the buffer."""
        return self.block * self.ranks

    @property
    def whole(self) -> Part:
        """Return all of it."""
        return Part(self.pointer, self.nbytes)

    @property
    def own(self) -> Part:
        """Return this rank's block."""
        return Part(self.pointer + self.rank * self.block, self.block)


class Span(NamedTuple):
    """Bytes of a buffer that hold one number everywhere."""

    begin: int
    nbytes: int
    value: int


@dataclass(frozen=True)
class Operation:
    """An operation in place.

    Parameters
    ----------
    name : str
        Of the method, and of the C function in its letters.
    send, recv : {"whole", "own"}
        What it reads and writes: the whole buffer, or this rank's block.
    torch : str
        The function of torch.distributed.
    """

    name: str
    send: Literal["whole", "own"]
    recv: Literal["whole", "own"]
    torch: str

    @property
    def function(self) -> str:
        """Return the C function."""
        return "nccl" + self.name.title().replace("_", "")

    @property
    def reduces(self) -> bool:
        """Whether it makes one of what ranks have: each has all of it before."""
        return self.send == "whole"

    @property
    def gathers(self) -> bool:
        """Whether every rank has the whole result."""
        return self.recv == "whole"

    def ends(self, place: Place) -> tuple[Part, Part]:
        """Return what it reads and what it writes."""
        return getattr(place, self.send), getattr(place, self.recv)

    def parts(self, place: Place) -> list[Part]:
        """Return the same, once where both are one."""
        return list(dict.fromkeys(self.ends(place)))

    def _moved(self, place: Place) -> int:
        """Return the bytes that calls count: those of the smaller part."""
        return min(part.nbytes for part in self.ends(place))

    def bus(self, ranks: int) -> float:
        """Return how often each byte of the buffer crosses a rank's link."""
        return (self.reduces + self.gathers) * (ranks - 1) / ranks

    def given(self, place: Place) -> list[Span]:
        """Return what the buffer holds before: ones to be reduced, or the rank's number in its own block."""
        whole = Span(0, place.nbytes, int(self.reduces))
        own = Span(place.rank * place.block, place.block, place.rank + 1)
        return [whole] if self.reduces else [whole, own]

    def expected(self, place: Place) -> list[Span]:
        """Return what it holds after."""
        if not self.reduces:
            return [Span(rank * place.block, place.block, rank + 1) for rank in range(place.ranks)]
        own = Span(place.rank * place.block, place.block, place.ranks)
        return [Span(0, place.nbytes, place.ranks)] if self.gathers else [own]

    def bare(self, library: Any, place: Place, handle: int, stream: int) -> Callable[[], object]:
        """Return the C call by ctypes with its arguments converted before."""
        pointers = [part.pointer for part in self.ends(place)]
        count, op = self._moved(place) // place.dtype.itemsize, (ReduceOp.SUM.nccl,) if self.reduces else ()
        return nccl.prepared(library, self.function, *pointers, count, place.dtype.nccl, *op, handle, stream)

    def by_plane(self, plane: Any, place: Place) -> Callable[[], object]:
        """Return the call of the plane by raw pointers."""
        call, nbytes = getattr(plane, self.name), self._moved(place)
        pointers = [part.pointer for part in self.parts(place)]
        dtype = {"dtype": place.dtype} if self.reduces else {}
        return lambda: call(*pointers, nbytes, **dtype)

    def plan(self, comm: Communicator, device: Any, stream: int, place: Place, *, graph: bool = False) -> Plan:
        """Return a plan over arrays of the buffer."""
        size = place.dtype.itemsize
        arrays = [Array(device, part.nbytes // size, stream, part.pointer) for part in self.parts(place)]
        make: Callable[..., Plan] = getattr(comm, f"plan_{self.name}")
        return make(*arrays, stream=stream, graph=graph)


OPERATIONS = {
    one.name: one
    for one in (
        Operation("all_reduce", "whole", "whole", "all_reduce"),
        Operation("all_gather", "own", "whole", "all_gather_into_tensor"),
        Operation("reduce_scatter", "whole", "own", "reduce_scatter_tensor"),
    )
}


@dataclass
class Variant:
    """One way to the result: ``call`` issues it on the plane's stream, ``ready`` makes the ranks ready for calls."""

    name: str
    place: Place
    call: Callable[[], object]
    ready: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


class Torch:
    """torch.distributed with NCCL over the same ranks, on the plane's stream.

    Parameters
    ----------
    comm : Communicator
        Over which its store is found. Every rank makes one.
    """

    def __init__(self, comm: Communicator) -> None:
        self._torch: Any = importlib.import_module("torch")
        plane: Any = comm.backend
        self._device = self._torch.device("cuda", plane.device.ordinal)
        self._torch.cuda.set_device(self._device)
        self._stream = self._torch.cuda.ExternalStream(plane.stream, device=self._device)
        self._distributed: Any = importlib.import_module("torch.distributed")
        self._store = self._meet(comm)
        self._distributed.init_process_group(
            "nccl", store=self._store, rank=comm.rank, world_size=comm.world_size, device_id=self._device
        )

    def _meet(self, comm: Communicator) -> Any:
        """Return a store that rank 0 keeps."""
        make = self._distributed.TCPStore
        store = None if comm.rank else make("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        places = comm.all_gather_json([socket.gethostname(), store and store.port])
        host = "127.0.0.1" if len({name for name, _ in places}) == 1 else places[0][0]
        return store or make(host, places[0][1], is_master=False, wait_for_workers=False)

    def version(self) -> dict[str, str]:
        """Return the versions of PyTorch and of the NCCL that it uses."""
        return {"torch": self._torch.__version__, "nccl": ".".join(map(str, self._torch.cuda.nccl.version()))}

    def call(self, operation: Operation, place: Place) -> Callable[[], object]:
        """Return the call on tensors of the buffer."""
        # It takes the result first.
        tensors = [self._tensor(part, place.dtype) for part in reversed(operation.parts(place))]
        call = getattr(self._distributed, operation.torch)
        return lambda: call(*tensors)

    def _tensor(self, part: Part, of: DType) -> Any:
        dtype = self._torch.bfloat16 if of is DType.BFLOAT16 else self._torch.float32
        return self._torch.as_tensor(_Bytes(*part), device=self._device).view(dtype)

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Make the plane's stream PyTorch's current one."""
        with self._torch.cuda.stream(self._stream):
            yield

    def close(self) -> None:
        """End it."""
        self._distributed.destroy_process_group()


class _Bytes:
    """Device memory as an array of bytes, which every type can be viewed in."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        shape = {"shape": (nbytes,), "typestr": "|u1", "version": 3, "strides": None}
        self.__cuda_array_interface__ = {**shape, "data": (pointer, False)}
