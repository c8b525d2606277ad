"""The communicator: collectives on arrays, identity and lifecycle."""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from numbers import Real
from types import TracebackType
from typing import Any

from butter_mpi.arguments import Arguments, Checked
from butter_mpi.collectives import Operation
from butter_mpi.enums import PreMulSum, ReduceOp
from butter_mpi.errors import NotSupportedError, PeerLostError, text_of
from butter_mpi.exchanges import Exchanges
from butter_mpi.memory import Memory
from butter_mpi.planes import CommBackend
from butter_mpi.planes.base import Plane
from butter_mpi.plans import Plans
from butter_mpi.recording import append
from butter_mpi.splitting import Part, Splits

__all__ = ["Communicator"]

_POLL_SECONDS = 0.005


class _Group:
    """A class and not a generator: an interrupt between its lines would leave the group open."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    def __enter__(self) -> None:
        self._plane.group_start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._plane.group_end()
        else:
            self._plane.group_discard()


class Communicator(Exchanges, Memory, Plans, Splits):
    """The ranks of a job, and the operations between them.

    Made by ``butter_mpi.init``, or by ``split`` and ``dup`` of another one. An operation is submitted on the one lane
    of this process, in program order, after every check of its arguments; a wrong argument is a ``TypeError`` or
    ``ValueError``, sends nothing and poisons nothing. On the ``host`` plane arrays are in host memory (NumPy,
    ml_dtypes' types too, PyTorch, anything with ``__dlpack__``), ``stream`` is ``None``, and an operation has completed
    when it returns. On the ``nccl`` plane they are in device memory (CuPy, PyTorch, anything with
    ``__cuda_array_interface__`` or ``__dlpack__``), an operation is put on `stream` (the one given, else the current
    stream of the library that the array is of), and what was handed over is kept until its stream has passed the
    operation. The ``solo`` plane of one rank is like the one that more ranks would have.

    As a context manager: a normal exit closes, an exception aborts.
    """

    def __init__(
        self,
        plane: Plane,
        *,
        preflight: Any,
        settings: Any,
        record: Mapping[str, Any],
        plan: Mapping[str, Any] | None,
        start_seconds: Mapping[str, float],
        orphan: Callable[[Plane], None],
        part: Part,
        survive: Callable[[], Communicator],
    ) -> None:
        self._plane, self._arguments = plane, Arguments(plane)
        self._orphan, self._part, self._survive = orphan, part, survive
        self._plan = plan
        self._record = dict(record)
        self.start_seconds = dict(start_seconds)
        self.preflight = preflight
        self.settings = settings
        self.records: list[dict[str, Any]] = []

    # -- identity ----------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank, 0 to ``world_size - 1``."""
        return self._plane.rank()

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._plane.world_size()

    @property
    def plane(self) -> str:
        """The data plane that runs: ``"host"``, ``"solo"`` or ``"nccl"``."""
        return self._plane.NAME

    @property
    def sequence(self) -> int:
        """The number of collectives submitted; the next one takes the number after it."""
        return self._plane.sequence

    @property
    def backend(self) -> CommBackend:
        """The data plane itself: operations on raw pointers and byte counts."""
        # Whoever holds only this still has the communicator.
        self._plane.owner = self
        return self._plane

    def __repr__(self) -> str:
        return f"<Communicator {self._plane.who}, plane {self.plane}, #{self.sequence}, {self._plane.state()}>"

    # -- collectives -------------------------------------------------------------------------------------------------

    def all_reduce(
        self, sendbuf: Any, recvbuf: Any = None, *, op: ReduceOp | PreMulSum | str = ReduceOp.SUM, stream: Any = None
    ) -> None:
        """Reduce `n` elements over all ranks; every rank gets the `n` results.

        float16, bfloat16 and float8 are reduced in single precision and rounded once on the host plane; integers wrap.

        Parameters
        ----------
        sendbuf : array, n elements
            This rank's contribution.
        recvbuf : array, n elements of the same dtype, optional
            Where the result goes; without it, `sendbuf` (in place).
        op : ReduceOp, PreMulSum or str, default sum
            The reduction operator.
        stream : CUDA stream, optional
            The ordered stream: a handle, or an object of cuda.core, CuPy or PyTorch; without it, the current stream of
            the library that the (first) array is of. Another stream that an array names in
            ``__cuda_array_interface__`` (CuPy: its current one) is ordered with it, as that protocol asks: the
            operation comes after what that stream holds now, before what comes there later. PyTorch's tensors name
            none: what you give is the only stream, and others are yours to order. On the host planes ``None``: they
            have only the caller.

        Raises
        ------
        TypeError
            A buffer that is no array of this plane's memory.
        ValueError
            Counts, dtypes, strides, overlap, `op` or `stream` are wrong. Nothing was sent.
        CommunicatorBrokenError
            Ranks differ, one is lost, or one did not come by the collective deadline. The communicator is poisoned and
            the output is undefined.
        CommunicatorClosedError
            It was closed or aborted, or this process is a fork.

        Notes
        -----
        **Collective**: every rank calls it, in the same order, with the same `n`, dtype and `op`.
        **Stream**: ordered after what the stream holds, before what comes later.
        **Blocking**: on the host planes, until the result is there; else until it is enqueued.
        **In place**: without `recvbuf`, or when both are the same array.

        See Also
        --------
        reduce_scatter : Each rank keeps one share. The C function is ``ncclAllReduce`` (``MPI_Iallreduce``).
        """
        self._submit(self._arguments.collective("all_reduce", sendbuf, recvbuf, stream, op=op))

    def broadcast(self, buf: Any, root: int = 0, *, stream: Any = None) -> None:
        """Copy root's `n` elements to every rank.

        Parameters
        ----------
        buf : array, n elements
            Read on `root`, written on the others.
        root : int, default 0
            The rank whose elements are copied.
        stream : CUDA stream, optional
            As for ``all_reduce``.

        Raises
        ------
        TypeError, ValueError
            A wrong buffer, `root` or `stream`; nothing was sent.
        CommunicatorBrokenError, CommunicatorClosedError
            As for ``all_reduce``.

        Notes
        -----
        **Collective**: every rank, same order, same `n`, dtype and `root`. **Stream**, **Blocking**: as for
        ``all_reduce``. **In place**: always.

        See Also
        --------
        all_gather : The C function is ``ncclBroadcast`` (``MPI_Ibcast``).
        """
        self._submit(self._arguments.broadcast(buf, root, stream))

    def all_gather(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None) -> None:
        """Gather `n` elements from each rank; every rank gets ``world_size * n`` in rank order.

        Parameters
        ----------
        sendbuf : array, n elements
            This rank's block.
        recvbuf : array, world_size * n elements of the same dtype
            All blocks; exactly that many.
        stream : CUDA stream, optional
            As for ``all_reduce``.

        Raises
        ------
        TypeError, ValueError
            A wrong buffer, count or `stream`; nothing was sent.
        CommunicatorBrokenError, CommunicatorClosedError
            As for ``all_reduce``.

        Notes
        -----
        **Collective**: every rank, same order, same `n` and dtype. **Stream**, **Blocking**: as for ``all_reduce``.
        **In place**: when `sendbuf` is this rank's block of `recvbuf`; no other overlap is taken.

        See Also
        --------
        broadcast : The C function is ``ncclAllGather`` (``MPI_Iallgather``).
        """
        self._submit(self._arguments.collective("all_gather", sendbuf, recvbuf, stream))

    def reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, *, op: ReduceOp | PreMulSum | str = ReduceOp.SUM, stream: Any = None
    ) -> None:
        """Reduce ``world_size * n`` elements over all ranks; rank `r` gets the `r`-th `n` of the results.

        Parameters
        ----------
        sendbuf : array, world_size * n elements
            This rank's contribution; exactly that many, no remainder.
        recvbuf : array, n elements of the same dtype
            This rank's share of the result.
        op : ReduceOp, PreMulSum or str, default sum
            The reduction operator.
        stream : CUDA stream, optional
            As for ``all_reduce``.

        Raises
        ------
        TypeError, ValueError
            A wrong buffer, count, `op` or `stream`; nothing was sent.
        CommunicatorBrokenError, CommunicatorClosedError
            As for ``all_reduce``.

        Notes
        -----
        **Collective**: every rank, same order, same `n`, dtype and `op`. **Stream**, **Blocking**: as for
        ``all_reduce``. **In place**: when `recvbuf` is this rank's share of `sendbuf`; no other overlap is taken.

        See Also
        --------
        all_reduce : The C function is ``ncclReduceScatter`` (``MPI_Ireduce_scatter_block``).
        """
        self._submit(self._arguments.collective("reduce_scatter", sendbuf, recvbuf, stream, op=op))

    def barrier(self, *, stream: Any = None) -> None:
        """Order every rank's later work after every rank's earlier work.

        Parameters
        ----------
        stream : CUDA stream, optional
            As for ``all_reduce``.

        Raises
        ------
        ValueError
            A wrong `stream`; nothing was sent.
        CommunicatorBrokenError, CommunicatorClosedError
            As for ``all_reduce``.

        Notes
        -----
        **Collective**: every rank. **Stream**: on it. **Blocking**: on the host planes, until every rank has come.
        **In place**: no buffers.

        See Also
        --------
        all_reduce : NCCL has no barrier; its plane reduces one element of its own.
        """
        self._submit(self._arguments.barrier(stream))

    def send(self, buf: Any, peer: int, *, stream: Any = None) -> None:
        """Send `n` elements to one rank, which calls ``recv`` with the same `n` and dtype.

        Parameters
        ----------
        buf : array, n elements
            What is sent.
        peer : int
            The receiving rank; this rank itself only inside a group that also has the ``recv``.
        stream : CUDA stream, optional
            As for ``all_reduce``.

        Raises
        ------
        TypeError, ValueError
            A wrong buffer, `peer` or `stream`; nothing was sent.
        CommunicatorBrokenError, CommunicatorClosedError
            As for ``all_reduce``.

        Notes
        -----
        **Collective**: no; the two ranks pair their calls in order. **Stream**: as for ``all_reduce``. **Blocking**: on
        the host planes, until the peer receives: exchanges both ways belong in one ``group``. **In place**: no.

        See Also
        --------
        recv, group : The C function is ``ncclSend`` (``MPI_Isend``).
        """
        self._submit(self._arguments.pair("send", buf, peer, stream))

    def recv(self, buf: Any, peer: int, *, stream: Any = None) -> None:
        """Receive `n` elements from one rank, which calls ``send`` with the same `n` and dtype.

        Parameters
        ----------
        buf : array, n elements
            Where they go.
        peer : int
            The sending rank.
        stream : CUDA stream, optional
            As for ``all_reduce``.

        Raises
        ------
        TypeError, ValueError
            A wrong buffer, `peer` or `stream`; nothing was sent.
        CommunicatorBrokenError, CommunicatorClosedError
            As for ``all_reduce``.

        Notes
        -----
        **Collective**: no; the two ranks pair their calls in order. **Stream**, **Blocking**: as for ``send``.
        **In place**: no.

        See Also
        --------
        send, group : The C function is ``ncclRecv`` (``MPI_Irecv``).
        """
        self._submit(self._arguments.pair("recv", buf, peer, stream))

    def group(self) -> AbstractContextManager[None]:
        """Submit the operations of the body together, at its end.

        Collectives run in program order, pairs beside them, so sends and receives in any order cannot wait for one
        another. The lane is held for the whole body, by this thread. If the body raises, nothing of it is sent and no
        number is taken.

        Returns
        -------
        context manager
            Results are there after its body.

        Raises
        ------
        ValueError
            A send to this rank itself without its recv.
        CommunicatorBrokenError, CommunicatorClosedError
            As for ``all_reduce``.

        Notes
        -----
        **Collective**: as its operations are. **Stream**, **Blocking**: as for ``all_reduce``, at the end of the body.
        **In place**: as its operations are.

        See Also
        --------
        send, recv : The C functions are ``ncclGroupStart`` and ``ncclGroupEnd``.
        """
        return _Group(self._plane)

    def all_gather_json(self, value: Any) -> list[Any]:
        """Return every rank's small value, over the control plane.

        Parameters
        ----------
        value : JSON value
            Of this rank: ``None``, bool, number, string, list or dict.

        Returns
        -------
        list
            The values in rank order, equal on every rank.

        Raises
        ------
        TypeError
            Not a JSON value; nothing was sent.
        CommunicatorBrokenError, CommunicatorClosedError
            As for ``all_reduce``.

        Notes
        -----
        **Collective**: every rank, in order with the collectives; it takes no sequence number. **Stream**: none.
        **Blocking**: until every rank has come. **In place**: no.

        See Also
        --------
        all_gather : The same for arrays, over the data plane.
        """
        try:
            payload = json.dumps(value).encode()
        except (RecursionError, TypeError, ValueError) as error:
            raise TypeError(f"{self._plane.who}: all_gather_json: not a JSON value: {error}") from None
        return [json.loads(x) for x in self._plane.all_gather_json(payload)]

    # -- health and lifecycle ----------------------------------------------------------------------------------------

    def is_healthy(self) -> bool:
        """Return whether the next operation would be taken, by what is known now.

        Returns
        -------
        bool
            False once it is closed, or poisoned until a reconnect succeeds.
        """
        return self._plane.is_healthy()

    def check_async_error(self) -> None:
        """Raise the first cause if this communicator is poisoned, or a peer has said that it is.

        Raises
        ------
        CommunicatorBrokenError
            The first cause, on every call.
        CommunicatorClosedError
            It was closed or aborted.
        """
        self._plane.check()

    def wait_for_async_error(self, timeout: float) -> None:
        """Look for a failure for up to `timeout` seconds; return when none came.

        Parameters
        ----------
        timeout : float
            Seconds, 0 or more.

        Raises
        ------
        TypeError, ValueError
            `timeout` is no such number.
        CommunicatorBrokenError
            The first cause, as soon as it is known.
        CommunicatorClosedError
            It was closed or aborted.
        """
        given: Any = timeout
        if not isinstance(given, Real):
            raise TypeError(f"{self._plane.who}: timeout must be a number of seconds, 0 or more; got {timeout!r}")
        if not timeout >= 0:
            raise ValueError(f"{self._plane.who}: timeout must be a number of seconds, 0 or more; got {timeout!r}")
        end = time.monotonic() + timeout
        self.check_async_error()
        while (left := end - time.monotonic()) > 0:
            threading.Event().wait(min(_POLL_SECONDS, left))
            self.check_async_error()

    def attempt_reconnect(self) -> None:
        """Make this communicator anew with every rank, after a failure that all of them survived.

        The old one is given up, the bootstrap is repeated over the reserve communicator. The sequence goes on after the
        largest number of any rank; registered handles are void, and plans go on without their graphs.

        Raises
        ------
        CollectiveTimeoutError
            Not every rank came within the start deadline; no second attempt is possible.
        PeerLostError
            A rank has died or left, or is stopped. Where a stopped one runs again, another attempt of all succeeds.
        CommunicatorClosedError
            It was closed or aborted.
        ValueError
            Inside a group.

        Notes
        -----
        **Collective**: every rank calls it together, the failed and the told ones alike. **Blocking**: bounded by the
        start deadline.
        """
        self._plane.attempt_reconnect()

    def dump_recorder(self, path: str | os.PathLike[str]) -> None:
        """Append what this rank has submitted here to a file, for ``python -m butter_mpi.recorder``.

        It is a line of JSON with all that the rank's recorder holds: the newest 4096 collectives and 1024 sends and
        receives. Other ranks may append to the same file. A communicator that is broken has its recorder still.

        Parameters
        ----------
        path : str or path
            The file; it is made if it is not there.

        Raises
        ------
        TypeError
            `path` is none.
        OSError
            It cannot be written.
        NotSupportedError
            There is no recorder: this rank is alone, or runs with ``watch="off"``.
        CommunicatorClosedError
            It was closed or aborted, or this process is a fork.
        """
        recording = self._plane.recording()
        if self._plane.health.closed:
            self._plane.health.check(self._plane.who, "dump_recorder")
        if recording is None:
            raise NotSupportedError(
                f"{self._plane.who}: dump_recorder: one rank alone has no recorder, and none has with watch 'off'",
                needs="watch='on'",
            )
        try:
            append(os.fspath(path), recording)
        except OSError as error:
            # Of the same kind, by its number; the file stands behind the text.
            text = f"{self._plane.who}: dump_recorder: {error.strerror}; name a file in a folder that exists"
            raise OSError(error.errno, text, os.fspath(path)) from None

    def close(self) -> None:
        """End the communicator: peers that still count on this rank are told that it left.

        A second time, after ``abort`` or after ``MPI.Finalize`` it does nothing. It waits for nobody, but on the nccl
        plane up to 2 s for work under way, and for the peers to close where the library's ``ncclCommDestroy`` does
        (from 2.31.2 on); what is not done then goes on by itself. If a peer gave up, it ends by ``ncclCommAbort``.
        """
        self._plane.close()

    def abort(self, reason: str = "") -> None:
        """Give the communicator up: every peer is told and raises `reason` when it next comes here.

        Parameters
        ----------
        reason : str, optional
            What went wrong.
        """
        rank = self.rank
        cause = PeerLostError(
            f"{self._plane.who}: aborted after {self._plane.last or 'no operation'}: {reason or 'no reason given'}",
            lost_ranks=(rank,),
            sequence=self.sequence,
            phase="abort",
        )
        self._plane.close("aborted", cause)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.close()
            return
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            self._plane.exit_status = error.code
        elif self.settings.action == "abort":
            # The job ends in here, before Python could show where it was raised.
            traceback.print_exception(kind, error, trace)
        self.abort(text_of(error))

    def __del__(self, _warn: Callable[..., None] = warnings.warn) -> None:
        plane = self.__dict__.get("_plane")
        if plane is not None and not plane.health.closed:
            # First: where warnings are errors, the next line ends this.
            self._orphan(plane)
            _warn(f"{self!r} was dropped without close(); use it as a context manager", ResourceWarning, stacklevel=2)

    # -- submitting ---------------------------------------------------------------------------------------------------

    def gather_records(self) -> list[dict[str, Any]]:
        """Return every rank's full preflight record, over the control plane; every rank calls it.

        Returns
        -------
        list of dict
            In rank order; also kept as ``records``.

        Raises
        ------
        CommunicatorBrokenError, CommunicatorClosedError
            As for ``all_reduce``.
        """
        self.records = self.all_gather_json(self._record)
        return self.records

    def _submit(self, checked: Checked) -> None:
        """Submit what one call is, held to the plan."""
        operations, owners = checked
        first = operations[0]
        if self._plan is not None and not first.rule.paired:
            self._hold_to_plan(self._plan, first)
        if len(operations) == 1:
            self._plane.submit(first, owners)
            return
        with _Group(self._plane):
            for operation in operations:
                self._plane.submit(operation, owners)

    def _hold_to_plan(self, plan: Mapping[str, Any], operation: Operation) -> None:
        """Refuse a first collective that is not the planned one."""
        found = {
            "operation": operation.kind,
            "count": operation.count,
            "dtype": operation.dtype.label,
            "op": operation.op.label if operation.op else None,
            "root": operation.root,
        }
        differing = [f"{k} {v!r}, planned {plan[k]!r}" for k, v in found.items() if v != plan[k]]
        if differing:
            raise ValueError(
                f"{self._plane.who}: {operation.kind} #{self.sequence + 1}: not the collective that init(plan=...) "
                f"declared: {', '.join(differing)}"
            )
        self._plan = None
