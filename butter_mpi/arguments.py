"""From the arguments of a call to the operations that a plane submits: every check that needs no other rank.

What comes out is complete and does not change: it can be submitted once, or kept and submitted again as long as the
buffers are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from butter_mpi.buffers import (
    READERS,
    ArrayView,
    check_apart,
    check_counts,
    check_pair,
    current_stream,
    reader_of,
    starts,
    stream_handle,
    view,
)
from butter_mpi.collectives import RULES, Operation, Owners, call_site, check_op
from butter_mpi.device import Device, same_stream
from butter_mpi.enums import DType, PreMulSum, ReduceOp, parse_op
from butter_mpi.lane import LANE
from butter_mpi.planes.base import NAMED, Plane
from butter_mpi.planes.on_device import OnDevice

__all__ = ["Arguments", "Checked"]

Checked = tuple[tuple[Operation, ...], Owners]
"""What one call submits, one operation or several together, and the arrays that they use."""

_LARGEST = 2**63
# Frames from ``call_site`` to whoever called a method of the communicator: as many as there always are.
_CALLER, _CALLER_OF_MANY = 4, 3


class _What:
    """Who does what, and perhaps on which argument, for messages: nothing is written before one is."""

    def __init__(self, plane: Plane, kind: str, argument: str = "", *, numbered: bool = True) -> None:
        self._plane, self._kind, self._argument, self._numbered = plane, kind, argument, numbered
        self.arguments: dict[str, _What] = {}

    def of(self, argument: str) -> _What:
        """Return the same on an argument."""
        made = _What(self._plane, self._kind, f": {argument}", numbered=self._numbered)
        return self.arguments.setdefault(argument, made)

    def __str__(self) -> str:
        number = f" #{self._plane.sequence + 1}" if self._numbered else ""
        return f"{self._plane.who}: {self._kind}{number}{self._argument}"


@dataclass(slots=True)
class _Common:
    """What all operations of one call share; the first of them carries the streams that its arrays name."""

    plane: Plane
    dtype: DType
    site: str
    stream: int
    named: tuple[int, ...]

    def make(
        self,
        kind: str,
        count: int,
        send: int = 0,
        recv: int = 0,
        *,
        op: ReduceOp | PreMulSum | None = None,
        root: int | None = None,
        peer: int | None = None,
        named: tuple[int, ...] = (),
    ) -> Operation:
        """Return an operation."""
        facts = kind, count, self.dtype, send, recv, op, root, peer, self.site, self.stream, False, False, False
        return self.plane.operation((*facts, named))


class Arguments:
    """Checks arguments for one plane, and makes operations of them.

    Parameters
    ----------
    plane : Plane
        Whose memory and streams they must be of.
    """

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._device: Device | None = plane.device if isinstance(plane, OnDevice) else None
        self._whats: dict[str, _What] = {}

    # -- operations --------------------------------------------------------------------------------------------------

    def collective(
        self,
        kind: str,
        sendbuf: Any,
        recvbuf: Any,
        stream: Any,
        *,
        op: ReduceOp | PreMulSum | str | None = None,
        root: int | None = None,
    ) -> Checked:
        """Return a collective whose blocks are of one size; a reduction without `recvbuf` is in place."""
        what, rule = self._what(kind), RULES[kind]
        own_op = op if op is None or op.__class__ is ReduceOp else self._op(what, op)
        sends = receives = True
        if root is not None:
            root = self._rank(what, "root", root)
            here = self._plane.rank() == root
            sends, receives = here or not rule.from_root, here or not rule.to_root
        if recvbuf is None and rule.reduces and rule.send_blocks == rule.recv_blocks:
            own = self._view(what, "sendbuf", sendbuf, writable=receives)
            at = own.pointer
            return self._operation(
                kind, what, (own,), own.count, at, at if receives else 0, stream, op=own_op, root=root
            )
        send = self._view(what, "sendbuf", sendbuf, writable=False) if sends else None
        recv = self._view(what, "recvbuf", recvbuf, writable=True) if receives else None
        if send is None or recv is None:
            return self._one_sided(kind, what, send, recv, stream, op=own_op, root=root)
        ranks = self._plane.world_size()
        blocks = ranks if rule.send_blocks < 0 else 1, ranks if rule.recv_blocks < 0 else 1
        count = check_pair(send, recv, blocks, self._plane.rank(), what, in_place=rule.in_place)
        source, target = send.pointer, recv.pointer
        return self._operation(kind, what, (send, recv), count, source, target, stream, op=own_op, root=root)

    def _one_sided(
        self, kind: str, what: _What, send: ArrayView | None, recv: ArrayView | None, stream: Any, **more: Any
    ) -> Checked:
        """Return one rank's part, which is one block, of an operation that has others only on root."""
        one, source, target = (send, send.pointer, 0) if send is not None else (recv, 0, recv.pointer if recv else 0)
        assert one is not None, "every rank sends or receives"
        return self._operation(kind, what, (one,), one.count, source, target, stream, **more)

    def broadcast(self, buf: Any, root: int, stream: Any) -> Checked:
        """Return a broadcast, in place."""
        what = self._what("broadcast")
        root = self._rank(what, "root", root)
        whole = self._view(what, "buf", buf, writable=root != self._plane.rank())
        at = whole.pointer
        return self._operation("broadcast", what, (whole,), whole.count, at, at, stream, root=root)

    def barrier(self, stream: Any) -> Checked:
        """Return a barrier."""
        return self._operation("barrier", self._what("barrier"), (), 0, 0, 0, stream)

    def pair(self, kind: str, buf: Any, peer: int, stream: Any) -> Checked:
        """Return a send or a receive."""
        what = self._what(kind)
        peer = self._rank(what, "peer", peer)
        whole = self._view(what, "buf", buf, writable=kind == "recv")
        source, target = (whole.pointer, 0) if kind == "send" else (0, whole.pointer)
        return self._operation(kind, what, (whole,), whole.count, source, target, stream, peer=peer)

    def sendrecv(self, sendbuf: Any, dest: int, recvbuf: Any, src: int, stream: Any) -> Checked:
        """Return a send and a receive that go together; each may have its own type and count."""
        what = self._what("sendrecv")
        dest, src = self._rank(what, "dest", dest), self._rank(what, "src", src)
        send = self._view(what, "sendbuf", sendbuf, writable=False)
        recv = self._view(what, "recvbuf", recvbuf, writable=True)
        check_apart(send, recv, what)
        there = self._common("sendrecv", what, stream, (send, recv), send.dtype)
        back = replace(there, dtype=recv.dtype)
        operations = (
            there.make("send", send.count, send.pointer, peer=dest, named=there.named),
            back.make("recv", recv.count, recv=recv.pointer, peer=src),
        )
        return operations, (send.owner, recv.owner)

    def all_gather_v(self, sendbuf: Any, recvbuf: Any, counts: Any, stream: Any) -> Checked:
        """Return an all_gather of blocks of any sizes: a broadcast from each rank."""
        what = self._what("all_gather_v")
        cuts = self._counts(what, "counts", counts)
        send = self._view(what, "sendbuf", sendbuf, writable=False)
        recv = self._view(what, "recvbuf", recvbuf, writable=True)
        check_counts(send, recv, (None, cuts), self._plane.rank(), what)
        common = self._common("all_gather_v", what, stream, (send, recv), send.dtype)
        blocks = self._blocks(recv, cuts)
        sources = [send.pointer if rank == self._plane.rank() else at for rank, at in enumerate(blocks)]
        operations = tuple(
            common.make("broadcast", count, source, at, root=root, named=() if root else common.named)
            for root, (count, source, at) in enumerate(zip(cuts, sources, blocks, strict=True))
        )
        return operations, (send.owner, recv.owner)

    def reduce_scatter_v(
        self, sendbuf: Any, recvbuf: Any, counts: Any, op: ReduceOp | PreMulSum | str, stream: Any
    ) -> Checked:
        """Return a reduce_scatter of shares of any sizes: a reduce to each rank."""
        what = self._what("reduce_scatter_v")
        cuts, own_op = self._counts(what, "counts", counts), self._op(what, op)
        send = self._view(what, "sendbuf", sendbuf, writable=False)
        recv = self._view(what, "recvbuf", recvbuf, writable=True)
        check_counts(send, recv, (cuts, None), self._plane.rank(), what)
        self._check_op(what, own_op, send.dtype)
        common = self._common("reduce_scatter_v", what, stream, (send, recv), send.dtype)
        targets = [recv.pointer if rank == self._plane.rank() else 0 for rank in range(len(cuts))]
        operations = tuple(
            common.make("reduce", count, at, target, op=own_op, root=root, named=() if root else common.named)
            for root, (count, at, target) in enumerate(zip(cuts, self._blocks(send, cuts), targets, strict=True))
        )
        return operations, (send.owner, recv.owner)

    def gather_v(self, sendbuf: Any, recvbuf: Any, counts: Any, root: int, stream: Any) -> Checked:
        """Return a gather of blocks of any sizes, which only root must know."""
        what = self._what("gather_v")
        root = self._rank(what, "root", root)
        send = self._view(what, "sendbuf", sendbuf, writable=False)
        if self._plane.rank() != root:
            return self._uneven("gather_v", what, stream, (send,), {root: (send.pointer, send.count)}, {}, root=root)
        cuts = self._counts(what, "counts", counts)
        recv = self._view(what, "recvbuf", recvbuf, writable=True)
        check_counts(send, recv, (None, cuts), root, what)
        own = {root: (send.pointer, send.count)}
        return self._uneven("gather_v", what, stream, (send, recv), own, self._cut(recv, cuts), root=root)

    def scatter_v(self, sendbuf: Any, recvbuf: Any, counts: Any, root: int, stream: Any) -> Checked:
        """Return a scatter of blocks of any sizes, which only root must know."""
        what = self._what("scatter_v")
        root = self._rank(what, "root", root)
        recv = self._view(what, "recvbuf", recvbuf, writable=True)
        own = {root: (recv.pointer, recv.count)}
        if self._plane.rank() != root:
            return self._uneven("scatter_v", what, stream, (recv,), {}, own, root=root)
        cuts = self._counts(what, "counts", counts)
        send = self._view(what, "sendbuf", sendbuf, writable=False)
        check_counts(send, recv, (cuts, None), root, what)
        return self._uneven("scatter_v", what, stream, (send, recv), self._cut(send, cuts), own, root=root)

    def all_to_all_v(self, sendbuf: Any, recvbuf: Any, send_counts: Any, recv_counts: Any, stream: Any) -> Checked:
        """Return an all_to_all of blocks of any sizes, of which each rank must know those it sends and receives."""
        what = self._what("all_to_all_v")
        sends, receives = (
            self._counts(what, "send_counts", send_counts),
            self._counts(what, "recv_counts", recv_counts),
        )
        send = self._view(what, "sendbuf", sendbuf, writable=False)
        recv = self._view(what, "recvbuf", recvbuf, writable=True)
        check_counts(send, recv, (sends, receives), self._plane.rank(), what)
        cuts = self._cut(send, sends), self._cut(recv, receives)
        return self._uneven("all_to_all_v", what, stream, (send, recv), *cuts)

    def memory(self, what: str, array: Any) -> ArrayView:
        """Return the memory that an array has, for what is no operation."""
        self._plane.check_open(what)
        seen = self._view(_What(self._plane, what, numbered=False), "array", array, writable=False)
        self._plane.check_pointer(seen.pointer, seen.name)
        return seen

    # -- making ------------------------------------------------------------------------------------------------------

    def _operation(
        self,
        kind: str,
        what: _What,
        buffers: Sequence[ArrayView],
        count: int,
        source: int,
        target: int,
        stream: Any,
        *,
        op: ReduceOp | PreMulSum | None = None,
        root: int | None = None,
        peer: int | None = None,
    ) -> Checked:
        dtype = buffers[0].dtype if buffers else DType.UINT8
        if op is not None and not (dtype.native and op.__class__ is ReduceOp):
            self._check_op(what, op, dtype)
        ordered, named = self._ordered(kind, what, stream, buffers)
        site = call_site(_CALLER)
        facts = kind, count, dtype, source, target, op, root, peer, site, ordered, False, False, False, named
        owners = (buffers[0].owner,) if len(buffers) == 1 else tuple([buffer.owner for buffer in buffers])
        return (self._plane.operation(facts),), owners

    def _uneven(
        self,
        kind: str,
        what: _What,
        stream: Any,
        buffers: Sequence[ArrayView],
        sends: dict[int, tuple[int, int]],
        receives: dict[int, tuple[int, int]],
        root: int | None = None,
    ) -> Checked:
        """Return an operation that all ranks compare, and the pairs that move its data; address and count by peer."""
        rank, common = self._plane.rank(), self._common(kind, what, stream, buffers, buffers[0].dtype)
        if sends.get(rank) == receives.get(rank):
            # In place: this rank's own block is where it belongs.
            sends, receives = ({p: block for p, block in side.items() if p != rank} for side in (sends, receives))
        name = common.make(kind, 0, root=root, named=common.named)
        there = [common.make("send", count, at, peer=peer) for peer, (at, count) in sends.items()]
        back = [common.make("recv", count, recv=at, peer=peer) for peer, (at, count) in receives.items()]
        return (name, *there, *back), tuple(buffer.owner for buffer in buffers)

    def _blocks(self, whole: ArrayView, counts: Sequence[int]) -> list[int]:
        return [whole.pointer + at * whole.dtype.itemsize for at in starts(counts)]

    def _cut(self, whole: ArrayView, counts: Sequence[int]) -> dict[int, tuple[int, int]]:
        return dict(enumerate(zip(self._blocks(whole, counts), counts, strict=True)))

    def _common(self, kind: str, what: _What, stream: Any, buffers: Sequence[ArrayView], dtype: DType) -> _Common:
        ordered, named = self._ordered(kind, what, stream, buffers)
        return _Common(self._plane, dtype, call_site(_CALLER_OF_MANY), ordered, named)

    def _ordered(
        self, kind: str, what: _What, stream: Any, buffers: Sequence[ArrayView]
    ) -> tuple[int, tuple[int, ...]]:
        """Return the ordered stream, once it follows what arrays have under way, and the other ones that arrays name.

        It is the one given, else the current one of the library that the first array is of. Memory and streams are the
        last that is checked, as the driver is asked for them.
        """
        device = self._device
        if device is None or (stream is None and not buffers):
            return self._only(what, stream), ()
        if stream is None:
            stream = self._current(what, buffers)
        ordered: int = stream if stream.__class__ is int else self._handle(what, stream)
        if not device.takes(ordered, buffers):
            self._check(ordered, buffers)
        for buffer in buffers:
            if (buffer.stream is not None and buffer.stream != ordered) or buffer.follow is not None:
                return ordered, self._beside(kind, ordered, buffers)
        return ordered, ()

    def _only(self, what: _What, stream: Any) -> int:
        """Return the plane's own stream, which is the only one of host memory."""
        if stream is not None:
            raise ValueError(f"{what}: the {self._plane.NAME} plane has no streams; stream must be None")
        return self._plane.stream

    def _current(self, what: _What, buffers: Sequence[ArrayView]) -> int:
        """Return the current stream of the first array's library; each array names that of its own one."""
        for buffer in buffers:
            buffer.stream = current_stream(buffer)
        if buffers[0].stream is None:
            source = type(buffers[0].owner).__module__
            raise ValueError(
                f"{what}: stream must be given (a handle, or a stream of CuPy, PyTorch or cuda.core): "
                f"{source} does not tell which one is current"
            )
        return buffers[0].stream

    def _handle(self, what: _What, stream: Any) -> int:
        try:
            return stream_handle(stream)
        except TypeError as error:
            raise TypeError(f"{what}: {error}") from None

    def _check(self, stream: int, buffers: Sequence[ArrayView]) -> None:
        """Raise what is wrong with a stream, or with memory, if anything is: it may only be met for the first time."""
        for buffer in buffers:
            self._plane.check_pointer(buffer.pointer, buffer.name)
        self._plane.check_handle(stream)

    def _beside(self, kind: str, ordered: int, buffers: Sequence[ArrayView]) -> tuple[int, ...]:
        """Return the other streams that arrays name, checked as the ordered one is, and let that follow their work."""
        named: tuple[int, ...] = ()
        for buffer in buffers:
            stream = buffer.stream
            if stream is None or stream in named or same_stream(stream, ordered):
                continue
            named += (stream,)
            if self._device is None or not self._device.takes(stream):
                self._check_named(kind, stream)
        for buffer in buffers:
            if buffer.follow is not None:
                # What its library puts on a stream that is captured, no later question takes back.
                buffer.follow(self._plane.check_stream(ordered))
        return named

    def _check_named(self, kind: str, stream: int) -> None:
        try:
            self._plane.check_handle(stream)
        except ValueError as error:
            raise ValueError(f"{error}. {NAMED.format(kind)}") from None

    # -- checks ------------------------------------------------------------------------------------------------------

    def _what(self, kind: str) -> _What:
        """Return who does what; a communicator that takes no operation asks the driver nothing."""
        health = self._plane.health
        if health.cause is not None or health.closed or LANE.forked:
            self._plane.check_open(kind)
        return self._whats.get(kind) or self._whats.setdefault(kind, _What(self._plane, kind))

    def _op(self, what: _What, op: ReduceOp | PreMulSum | str) -> ReduceOp | PreMulSum:
        try:
            return parse_op(op)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None

    def _check_op(self, what: _What, op: ReduceOp | PreMulSum, dtype: DType) -> None:
        try:
            check_op(op, dtype)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None

    def _view(self, what: _What, argument: str, array: Any, *, writable: bool) -> ArrayView:
        name = what.arguments.get(argument) or what.of(argument)
        if self._device is None:
            return view(array, name, writable=writable)
        seen = (READERS.get(array.__class__) or reader_of(array))(array, name, writable)
        seen.name = name
        return seen

    def _rank(self, what: _What, name: str, value: int) -> int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{what}: {name} must be an int; got {type(value).__name__}")
        last = self._plane.world_size() - 1
        if not 0 <= value <= last:
            raise ValueError(f"{what}: {name} must be from 0 to {last}; got {value}")
        return int(value)

    def _counts(self, what: _What, name: str, counts: Any) -> tuple[int, ...]:
        """Return one count a rank."""
        ranks = self._plane.world_size()
        if isinstance(counts, str | bytes) or not hasattr(counts, "__iter__"):
            raise TypeError(f"{what}: {name} must be a sequence of {ranks} ints; got {type(counts).__name__}")
        every = list(counts)
        for count in every:
            if isinstance(count, bool) or not hasattr(count, "__index__"):
                raise TypeError(f"{what}: {name} must be a sequence of ints; got {type(count).__name__} in it")
            if not 0 <= count < _LARGEST:
                raise ValueError(f"{what}: {name} must be numbers of elements, 0 or more; got {count} in it")
        if len(every) != ranks:
            raise ValueError(f"{what}: {name} must have one count for each of {ranks} ranks; got {len(every)}")
        return tuple(int(count) for count in every)
