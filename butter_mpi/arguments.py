"""From the arguments of a call to the operations that a plane submits: every check that needs no other rank.

What comes out is complete and does not change: it can be submitted once, or kept and submitted again as long as the
buffers are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from butter_mpi.buffers import (
    ArrayView,
    check_apart,
    check_counts,
    check_pair,
    current_stream,
    device_view,
    starts,
    stream_handle,
    view,
)
from butter_mpi.collectives import RULES, Operation, call_site, check_op
from butter_mpi.device import same_stream
from butter_mpi.enums import DType, PreMulSum, ReduceOp, parse_op
from butter_mpi.planes.base import Plane

__all__ = ["Arguments", "Operations"]

Operations = tuple[Operation, ...]
"""What one call submits: one operation, or several together."""

_LARGEST = 2**63


@dataclass(frozen=True, slots=True)
class _Common:
    """What all operations of one call share; the first of them carries what concerns its arrays."""

    dtype: DType
    site: str
    stream: int
    named: tuple[int, ...]
    keep: tuple[Any, ...]

    def make(self, kind: str, count: int, send: int = 0, recv: int = 0, **more: Any) -> Operation:
        """Return an operation."""
        return Operation(
            kind, count, self.dtype, send, recv, site=self.site, stream=self.stream, keep=self.keep, **more
        )


class Arguments:
    """Checks arguments for one plane, and makes operations of them.

    Parameters
    ----------
    plane : Plane
        Whose memory and streams they must be of.
    """

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

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
    ) -> Operations:
        """Return a collective whose blocks are of one size; a reduction without `recvbuf` is in place."""
        rule, what, ranks = RULES[kind], self._what(kind), self._plane.world_size()
        rank, own_op = self._plane.rank(), None if op is None else self._op(what, op)
        if root is not None:
            root = self._rank(what, "root", root)
        sends, receives = not rule.from_root or rank == root, not rule.to_root or rank == root
        in_place = recvbuf is None and rule.reduces and rule.send_blocks == rule.recv_blocks
        send = self._view(what, "sendbuf", sendbuf, writable=in_place and receives) if sends else None
        recv = None
        if receives:
            recv = send if in_place else self._view(what, "recvbuf", recvbuf, writable=True)
        if send is not None and recv is not None:
            blocks = tuple(ranks if n < 0 else n for n in (rule.send_blocks, rule.recv_blocks))
            count = check_pair(send, recv, (blocks[0], blocks[1]), rank, what, in_place=rule.in_place)
        else:
            # One rank's block, of an operation that has others only on root.
            count = sum(buffer.count for buffer in (send, recv) if buffer is not None)
        return (self._operation(kind, what, count, send, recv, stream, op=own_op, root=root),)

    def broadcast(self, buf: Any, root: int, stream: Any) -> Operations:
        """Return a broadcast, in place."""
        what = self._what("broadcast")
        root = self._rank(what, "root", root)
        whole = self._view(what, "buf", buf, writable=root != self._plane.rank())
        return (self._operation("broadcast", what, whole.count, whole, whole, stream, root=root),)

    def barrier(self, stream: Any) -> Operations:
        """Return a barrier."""
        return (self._operation("barrier", self._what("barrier"), 0, None, None, stream),)

    def pair(self, kind: str, buf: Any, peer: int, stream: Any) -> Operations:
        """Return a send or a receive."""
        what = self._what(kind)
        peer = self._rank(what, "peer", peer)
        whole = self._view(what, "buf", buf, writable=kind == "recv")
        send, recv = (whole, None) if kind == "send" else (None, whole)
        return (self._operation(kind, what, whole.count, send, recv, stream, peer=peer),)

    def sendrecv(self, sendbuf: Any, dest: int, recvbuf: Any, src: int, stream: Any) -> Operations:
        """Return a send and a receive that go together; each may have its own type and count."""
        what = self._what("sendrecv")
        dest, src = self._rank(what, "dest", dest), self._rank(what, "src", src)
        send = self._view(what, "sendbuf", sendbuf, writable=False)
        recv = self._view(what, "recvbuf", recvbuf, writable=True)
        check_apart(send, recv, what)
        there = self._common("sendrecv", what, stream, (send, recv), send.dtype)
        back = replace(there, dtype=recv.dtype)
        return (
            there.make("send", send.count, send.pointer, peer=dest, named=there.named),
            back.make("recv", recv.count, recv=recv.pointer, peer=src),
        )

    def all_gather_v(self, sendbuf: Any, recvbuf: Any, counts: Any, stream: Any) -> Operations:
        """Return an all_gather of blocks of any sizes: a broadcast from each rank."""
        what = self._what("all_gather_v")
        cuts = self._counts(what, "counts", counts)
        send = self._view(what, "sendbuf", sendbuf, writable=False)
        recv = self._view(what, "recvbuf", recvbuf, writable=True)
        check_counts(send, recv, (None, cuts), self._plane.rank(), what)
        common = self._common("all_gather_v", what, stream, (send, recv), send.dtype)
        blocks = self._blocks(recv, cuts)
        sources = [send.pointer if rank == self._plane.rank() else at for rank, at in enumerate(blocks)]
        return tuple(
            common.make("broadcast", count, source, at, root=root, named=() if root else common.named)
            for root, (count, source, at) in enumerate(zip(cuts, sources, blocks, strict=True))
        )

    def reduce_scatter_v(
        self, sendbuf: Any, recvbuf: Any, counts: Any, op: ReduceOp | PreMulSum | str, stream: Any
    ) -> Operations:
        """Return a reduce_scatter of shares of any sizes: a reduce to each rank."""
        what = self._what("reduce_scatter_v")
        cuts, own_op = self._counts(what, "counts", counts), self._op(what, op)
        send = self._view(what, "sendbuf", sendbuf, writable=False)
        recv = self._view(what, "recvbuf", recvbuf, writable=True)
        check_counts(send, recv, (cuts, None), self._plane.rank(), what)
        self._check_op(what, own_op, send.dtype)
        common = self._common("reduce_scatter_v", what, stream, (send, recv), send.dtype)
        targets = [recv.pointer if rank == self._plane.rank() else 0 for rank in range(len(cuts))]
        return tuple(
            common.make("reduce", count, at, target, op=own_op, root=root, named=() if root else common.named)
            for root, (count, at, target) in enumerate(zip(cuts, self._blocks(send, cuts), targets, strict=True))
        )

    def gather_v(self, sendbuf: Any, recvbuf: Any, counts: Any, root: int, stream: Any) -> Operations:
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

    def scatter_v(self, sendbuf: Any, recvbuf: Any, counts: Any, root: int, stream: Any) -> Operations:
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

    def all_to_all_v(self, sendbuf: Any, recvbuf: Any, send_counts: Any, recv_counts: Any, stream: Any) -> Operations:
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
        return self._view(f"{self._plane.who}: {what}", "array", array, writable=False)

    # -- making ------------------------------------------------------------------------------------------------------

    def _operation(
        self,
        kind: str,
        what: str,
        count: int,
        send: ArrayView | None,
        recv: ArrayView | None,
        stream: Any,
        *,
        op: ReduceOp | PreMulSum | None = None,
        root: int | None = None,
        peer: int | None = None,
    ) -> Operation:
        buffers = [b for b in (send, None if recv is send else recv) if b is not None]
        dtype = buffers[0].dtype if buffers else DType.UINT8
        if op is not None:
            self._check_op(what, op, dtype)
        common = self._common(kind, what, stream, buffers, dtype)
        return common.make(
            kind,
            count,
            send.pointer if send else 0,
            recv.pointer if recv else 0,
            op=op,
            root=root,
            peer=peer,
            named=common.named,
        )

    def _uneven(
        self,
        kind: str,
        what: str,
        stream: Any,
        buffers: Sequence[ArrayView],
        sends: dict[int, tuple[int, int]],
        receives: dict[int, tuple[int, int]],
        root: int | None = None,
    ) -> Operations:
        """Return an operation that all ranks compare, and the pairs that move its data; address and count by peer."""
        rank, common = self._plane.rank(), self._common(kind, what, stream, buffers, buffers[0].dtype)
        if sends.get(rank) == receives.get(rank):
            # In place: this rank's own block is where it belongs.
            sends, receives = ({p: block for p, block in side.items() if p != rank} for side in (sends, receives))
        name = common.make(kind, 0, root=root, named=common.named)
        there = [common.make("send", count, at, peer=peer) for peer, (at, count) in sends.items()]
        back = [common.make("recv", count, recv=at, peer=peer) for peer, (at, count) in receives.items()]
        return (name, *there, *back)

    def _blocks(self, whole: ArrayView, counts: Sequence[int]) -> list[int]:
        return [whole.pointer + at * whole.dtype.itemsize for at in starts(counts)]

    def _cut(self, whole: ArrayView, counts: Sequence[int]) -> dict[int, tuple[int, int]]:
        return dict(enumerate(zip(self._blocks(whole, counts), counts, strict=True)))

    def _common(self, kind: str, what: str, stream: Any, buffers: Sequence[ArrayView], dtype: DType) -> _Common:
        ordered, named = self._streams(kind, what, stream, buffers)
        for buffer in buffers:
            if buffer.follow is not None:
                buffer.follow(ordered)
        return _Common(dtype, call_site(), ordered, named, tuple(b.owner for b in buffers))

    # -- checks ------------------------------------------------------------------------------------------------------

    def _what(self, kind: str) -> str:
        return f"{self._plane.who}: {kind} #{self._plane.sequence + 1}"

    def _op(self, what: str, op: ReduceOp | PreMulSum | str) -> ReduceOp | PreMulSum:
        try:
            return parse_op(op)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None

    def _check_op(self, what: str, op: ReduceOp | PreMulSum, dtype: DType) -> None:
        try:
            check_op(op, dtype)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None

    def _view(self, what: str, name: str, array: Any, *, writable: bool) -> ArrayView:
        name = f"{what}: {name}"
        if not self._plane.on_device:
            return view(array, name, writable=writable)
        seen = device_view(array, name, writable=writable)
        self._plane.check_pointer(seen.pointer, name)
        return seen

    def _streams(self, kind: str, what: str, stream: Any, buffers: Sequence[ArrayView]) -> tuple[int, tuple[int, ...]]:
        """Return the ordered stream, and the other ones that arrays name.

        It is the one given, else the current one of the library that the first array is of.
        """
        if not self._plane.on_device:
            if stream is not None:
                raise ValueError(f"{what}: the {self._plane.NAME} plane has no streams; stream must be None")
            return self._plane.stream, ()
        known = [current_stream(buffer) if stream is None else buffer.stream for buffer in buffers]
        if stream is None and buffers:
            stream = known[0]
            if stream is None:
                source = type(buffers[0].owner).__module__
                raise ValueError(
                    f"{what}: stream must be given (a handle, or a stream of CuPy, PyTorch or cuda.core): "
                    f"{source} does not tell which one is current"
                )
        try:
            ordered = self._plane.stream if stream is None else self._plane.check_stream(stream_handle(stream))
        except TypeError as error:
            raise TypeError(f"{what}: {error}") from None
        return ordered, self._others(kind, ordered, known)

    def _others(self, kind: str, ordered: int, known: Sequence[int | None]) -> tuple[int, ...]:
        """Return the streams that are not the ordered one, checked as that one is."""
        others = {stream for stream in known if stream is not None and not same_stream(stream, ordered)}
        try:
            return tuple(self._plane.check_stream(stream) for stream in others)
        except ValueError as error:
            raise ValueError(f"{error}. A buffer names this one, and {kind} is ordered with it too") from None

    def _rank(self, what: str, name: str, value: int) -> int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{what}: {name} must be an int; got {type(value).__name__}")
        last = self._plane.world_size() - 1
        if not 0 <= value <= last:
            raise ValueError(f"{what}: {name} must be from 0 to {last}; got {value}")
        return int(value)

    def _counts(self, what: str, name: str, counts: Any) -> tuple[int, ...]:
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
