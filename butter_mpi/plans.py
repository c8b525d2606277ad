"""Plans: operations that are checked once and submitted many times, for loops that do the same again and again.

What cannot change is looked at when the plan is made: arrays, counts, element types, operator, root or peer, streams.
What can change is looked at on each call, on the path that every operation takes: health, fork, the turn on the lane, a
group, capture, number, record and call site.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from sys import _getframe
from types import CodeType
from typing import Any

from butter_mpi.arguments import Checked
from butter_mpi.collectives import Operation, call_site
from butter_mpi.enums import PreMulSum, ReduceOp

__all__ = ["Plan", "Plans"]

_MOST_SITES = 64


class Plan:
    """An operation of one communicator, ready to be submitted by calling it; made by ``Communicator.plan_...``.

    It keeps its arrays, and the stream that was given, alive; once it is dropped they stay until their stream has
    passed the last call, as those of any operation do: it is looked for when the communicator is next used, or asked
    for its health, and with its end all are let go. A call then records no event for that, where the stream is the
    communicator's own, the legacy default stream, or was given as an object (which must keep its handle valid; not of a
    class for handles of others, such as ``ExternalStream``). Of a bare handle nobody knows later whether it is one, so
    there each call records one. Their memory must stay where it was when the plan was made (no
    ``resize_`` of a tensor), and an array that speaks only DLPack is ordered after its library's work then, not again.
    It ends with its communicator: once that is closed or poisoned a call raises what every operation raises; after a
    successful ``attempt_reconnect()`` the plan goes on, without its graph if it had one.

    Parameters
    ----------
    comm : Communicator
        Whose operation it is.
    checked : tuple
        What a call submits, one operation or several together, and the arrays that they use.
    stream : object
        The stream that was given.
    """

    __slots__ = (
        *("_comm", "_each", "_here", "_known", "_lease", "_operations", "_owners", "_stream", "_submit"),
        "__weakref__",
    )

    def __init__(self, comm: Any, checked: Checked, stream: Any) -> None:
        self._comm, self._submit = comm, comm._plane.submit
        self._operations, self._owners = checked
        self._lease = comm._plane.lend(self._operations[0], stream)
        # What each call hands over: where somebody else keeps them, nothing.
        self._each = () if self._lease is not None and self._lease.stream is not None else self._owners
        self._stream = stream
        # By each place that it is called at: the record of a submission names its place.
        self._known: dict[str, tuple[Operation, ...]] = {}
        # Where it was called last, and what is submitted there: one value, as two threads may call it.
        self._here: tuple[CodeType | None, int, tuple[Operation, ...]] = None, 0, self._operations

    def __call__(self) -> None:
        """Submit it once.

        Raises
        ------
        ValueError
            A stream is captured into a CUDA graph, it is the first collective and not the declared one, or it uses a
            graph and is called inside a group; nothing was sent.
        CommunicatorBrokenError, CommunicatorClosedError
            As for the operation itself.
        """
        frame = _getframe(1)
        code, at, operations = self._here
        if frame.f_code is not code or frame.f_lasti != at:
            operations = self._at(call_site(2))
            self._here = frame.f_code, frame.f_lasti, operations
        if self._comm._plane._group is not None:
            # Perhaps submitted when this plan is gone.
            self._comm._submit((operations, self._owners))
        elif len(operations) == 1 and self._comm._plan is None:
            self._submit(operations[0], self._each)
        else:
            self._comm._submit((operations, self._each))

    @property
    def graph(self) -> bool:
        """Whether a call launches a CUDA graph, on every rank: asked for, possible everywhere, and not ended since."""
        return bool(self._comm._plane.uses_graph(self._operations[0]))

    def __del__(self) -> None:
        # In any thread, at any moment: it is only handed over.
        if self._lease is not None:
            called = self._here[0] is not None
            self._lease.give_back(self._owners if called else ())

    def _at(self, site: str) -> tuple[Operation, ...]:
        """Return the operations that name a place."""
        known = self._known.get(site)
        if known is None:
            if len(self._known) >= _MOST_SITES:
                self._known.clear()
            known = self._known[site] = tuple([replace(one, site=site) for one in self._operations])
        return known

    def __repr__(self) -> str:
        one = self._operations[0]
        facts = f"{one.dtype.label} x {one.count}"
        facts += f", {one.op.label}" if one.op else ""
        facts += f", root {one.root}" if one.root is not None else ""
        facts += f", peer {one.peer}" if one.peer is not None else ""
        return f"<Plan {one.kind} ({facts}) of {self._comm!r}>"


def _with_graph(comm: Any, operation: Operation) -> tuple[Operation, ...]:
    """Return an operation with the graph that every rank has made of it, or without one."""
    plane = comm._plane
    multiplies = isinstance(operation.op, PreMulSum)
    if multiplies or not operation.dtype.native:
        what = PreMulSum.label if multiplies else operation.dtype.label
        raise ValueError(
            f"{plane.who}: plan_{operation.kind}: graph=True is for what is one call of NCCL, and {what} is not; "
            "make the plan without it"
        )
    graph = plane.make_graph(operation)
    return (operation if graph is None else replace(operation, graph=graph),)


def _planned(
    comm: Any, name: str, arguments: Sequence[Any], *, stream: Any, graph: bool = False, **options: Any
) -> Plan:
    """Return the plan of a call: the operation's own method checks it, and submits it to here."""
    twin: Any = object.__new__(type(comm))
    made: list[Checked] = []
    try:
        twin.__dict__.update(comm.__dict__, _submit=made.append)
        getattr(type(comm), name)(twin, *arguments, stream=stream, **options)
    finally:
        # Nothing is left that could be closed.
        twin.__dict__.clear()
    operations, owners = made[0]
    if graph:
        operations = _with_graph(comm, operations[0])
    return Plan(comm, (operations, owners), stream)


class Plans:
    """What ``Communicator`` has for hot loops: the plan of each operation, with that operation's arguments."""

    def plan_all_reduce(
        self,
        sendbuf: Any,
        recvbuf: Any = None,
        *,
        op: ReduceOp | PreMulSum | str = ReduceOp.SUM,
        stream: Any = None,
        graph: bool = False,
    ) -> Plan:
        """Return the plan of an ``all_reduce``, checked as that is; nothing is sent before it is called.

        Parameters
        ----------
        sendbuf, recvbuf, op, stream
            Of ``all_reduce``. A stream that is taken from an array, or that one names, is the one of now.
        graph : bool, default False
            Capture the call into a CUDA graph, with every other rank, and launch that: it costs the host less. Where
            some rank cannot use one (data goes over a network, an old driver, a kernel of ``set_add_kernel``), on the
            host planes and for one rank alone, it is an ordinary plan everywhere, and its ``graph`` is False.

        Returns
        -------
        Plan
            To be called; other ranks may call a plan or the operation itself. One that uses a graph is called by every
            rank or by none, and not inside a group.

        Raises
        ------
        TypeError, ValueError
            As ``all_reduce``; or a graph of what is not one call of NCCL (``PreMulSum``, an element type that goes as
            another one), or inside a group.
        CommunicatorBrokenError, CommunicatorClosedError
            With `graph`, as for ``all_reduce``: other ranks did not make the same plan here, or were lost.

        Notes
        -----
        **Collective**: with `graph`, every rank at the same place, with the same arguments; it takes no number.
        **Blocking**: with `graph`, until every rank has come and has captured it.
        """
        return _planned(self, "all_reduce", (sendbuf, recvbuf), op=op, stream=stream, graph=graph)

    def plan_broadcast(self, buf: Any, root: int = 0, *, stream: Any = None, graph: bool = False) -> Plan:
        """Return the plan of a ``broadcast``, as ``plan_all_reduce`` does."""
        return _planned(self, "broadcast", (buf, root), stream=stream, graph=graph)

    def plan_all_gather(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, graph: bool = False) -> Plan:
        """Return the plan of an ``all_gather``, as ``plan_all_reduce`` does."""
        return _planned(self, "all_gather", (sendbuf, recvbuf), stream=stream, graph=graph)

    def plan_reduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        *,
        op: ReduceOp | PreMulSum | str = ReduceOp.SUM,
        stream: Any = None,
        graph: bool = False,
    ) -> Plan:
        """Return the plan of a ``reduce_scatter``, as ``plan_all_reduce`` does."""
        return _planned(self, "reduce_scatter", (sendbuf, recvbuf), op=op, stream=stream, graph=graph)

    def plan_barrier(self, *, stream: Any = None) -> Plan:
        """Return the plan of a ``barrier``, as ``plan_all_reduce`` does."""
        return _planned(self, "barrier", (), stream=stream)

    def plan_send(self, buf: Any, peer: int, *, stream: Any = None) -> Plan:
        """Return the plan of a ``send``, as ``plan_all_reduce`` does."""
        return _planned(self, "send", (buf, peer), stream=stream)

    def plan_recv(self, buf: Any, peer: int, *, stream: Any = None) -> Plan:
        """Return the plan of a ``recv``, as ``plan_all_reduce`` does."""
        return _planned(self, "recv", (buf, peer), stream=stream)

    def plan_reduce(
        self,
        sendbuf: Any,
        recvbuf: Any = None,
        root: int = 0,
        *,
        op: ReduceOp | PreMulSum | str = ReduceOp.SUM,
        stream: Any = None,
        graph: bool = False,
    ) -> Plan:
        """Return the plan of a ``reduce``, as ``plan_all_reduce`` does."""
        return _planned(self, "reduce", (sendbuf, recvbuf, root), op=op, stream=stream, graph=graph)

    def plan_gather(self, sendbuf: Any, recvbuf: Any = None, root: int = 0, *, stream: Any = None) -> Plan:
        """Return the plan of a ``gather``, as ``plan_all_reduce`` does."""
        return _planned(
            self,
            "gather",
            (
                sendbuf,
                recvbuf,
                root,
            ),
            stream=stream,
        )

    def plan_scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None) -> Plan:
        """Return the plan of a ``scatter``, as ``plan_all_reduce`` does."""
        return _planned(
            self,
            "scatter",
            (
                sendbuf,
                recvbuf,
                root,
            ),
            stream=stream,
        )

    def plan_all_to_all(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None) -> Plan:
        """Return the plan of an ``all_to_all``, as ``plan_all_reduce`` does."""
        return _planned(
            self,
            "all_to_all",
            (
                sendbuf,
                recvbuf,
            ),
            stream=stream,
        )

    def plan_all_gather_v(self, sendbuf: Any, recvbuf: Any, counts: Iterable[int], *, stream: Any = None) -> Plan:
        """Return the plan of an ``all_gather_v``, as ``plan_all_reduce`` does."""
        return _planned(
            self,
            "all_gather_v",
            (
                sendbuf,
                recvbuf,
                counts,
            ),
            stream=stream,
        )

    def plan_reduce_scatter_v(
        self,
        sendbuf: Any,
        recvbuf: Any,
        counts: Iterable[int],
        *,
        op: ReduceOp | PreMulSum | str = ReduceOp.SUM,
        stream: Any = None,
    ) -> Plan:
        """Return the plan of a ``reduce_scatter_v``, as ``plan_all_reduce`` does."""
        return _planned(
            self,
            "reduce_scatter_v",
            (
                sendbuf,
                recvbuf,
                counts,
            ),
            op=op,
            stream=stream,
        )

    def plan_gather_v(
        self,
        sendbuf: Any,
        recvbuf: Any = None,
        counts: Iterable[int] | None = None,
        root: int = 0,
        *,
        stream: Any = None,
    ) -> Plan:
        """Return the plan of a ``gather_v``, as ``plan_all_reduce`` does."""
        return _planned(
            self,
            "gather_v",
            (
                sendbuf,
                recvbuf,
                counts,
                root,
            ),
            stream=stream,
        )

    def plan_scatter_v(
        self, sendbuf: Any, recvbuf: Any, counts: Iterable[int] | None = None, root: int = 0, *, stream: Any = None
    ) -> Plan:
        """Return the plan of a ``scatter_v``, as ``plan_all_reduce`` does."""
        return _planned(
            self,
            "scatter_v",
            (
                sendbuf,
                recvbuf,
                counts,
                root,
            ),
            stream=stream,
        )

    def plan_all_to_all_v(
        self, sendbuf: Any, recvbuf: Any, send_counts: Iterable[int], recv_counts: Iterable[int], *, stream: Any = None
    ) -> Plan:
        """Return the plan of an ``all_to_all_v``, as ``plan_all_reduce`` does."""
        return _planned(
            self,
            "all_to_all_v",
            (
                sendbuf,
                recvbuf,
                send_counts,
                recv_counts,
            ),
            stream=stream,
        )

    def plan_sendrecv(self, sendbuf: Any, dest: int, recvbuf: Any, src: int, *, stream: Any = None) -> Plan:
        """Return the plan of a ``sendrecv``, as ``plan_all_reduce`` does."""
        return _planned(
            self,
            "sendrecv",
            (
                sendbuf,
                dest,
                recvbuf,
                src,
            ),
            stream=stream,
        )
