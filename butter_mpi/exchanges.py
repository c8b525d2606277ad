"""Operations with a root, between all pairs of ranks, and with a count for each rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from butter_mpi.arguments import Arguments, Checked
from butter_mpi.enums import PreMulSum, ReduceOp

__all__ = ["Exchanges"]


class Exchanges:
    """Base of ``Communicator``: what it has besides the operations in which all ranks do the same."""

    _arguments: Arguments

    def _submit(self, checked: Checked) -> None:
        raise NotImplementedError

    def reduce(
        self,
        sendbuf: Any,
        recvbuf: Any = None,
        root: int = 0,
        *,
        op: ReduceOp | PreMulSum | str = ReduceOp.SUM,
        stream: Any = None,
    ) -> None:
        """Reduce `n` elements over all ranks; root gets the `n` results.

        Parameters
        ----------
        sendbuf : array, n elements
            This rank's contribution.
        recvbuf : array, n elements of the same dtype, optional
            Where the result goes on root; without it, `sendbuf` (in place). Not looked at on the others.
        root : int, default 0
            The rank that gets the result.
        op : ReduceOp, PreMulSum or str, default sum
            The reduction operator.
        stream : CUDA stream, optional
            As for ``all_reduce``.

        Raises
        ------
        TypeError, ValueError
            A wrong buffer, count, `root`, `op` or `stream`; nothing was sent.
        CommunicatorBrokenError, CommunicatorClosedError
            As for ``all_reduce``.

        Notes
        -----
        **Collective**: every rank, same order, same `n`, dtype, `op` and `root`. **Stream**, **Blocking**: as for
        ``all_reduce``. **In place**: on root, without `recvbuf` or when both are the same array.

        See Also
        --------
        all_reduce : Every rank gets the result. The C function is ``ncclReduce`` (``MPI_Ireduce``).
        """
        self._submit(self._arguments.collective("reduce", sendbuf, recvbuf, stream, op=op, root=root))

    def gather(self, sendbuf: Any, recvbuf: Any = None, root: int = 0, *, stream: Any = None) -> None:
        """Gather `n` elements from each rank; root gets ``world_size * n`` in rank order.

        Parameters
        ----------
        sendbuf : array, n elements
            This rank's block.
        recvbuf : array, world_size * n elements of the same dtype, optional
            All blocks, on root; exactly that many. Not looked at on the others.
        root : int, default 0
            The rank that gets them.
        stream : CUDA stream, optional
            As for ``all_reduce``.

        Raises
        ------
        TypeError, ValueError
            A wrong buffer, count, `root` or `stream`; nothing was sent.
        CommunicatorBrokenError, CommunicatorClosedError
            As for ``all_reduce``.

        Notes
        -----
        **Collective**: every rank, same order, same `n`, dtype and `root`. **Stream**, **Blocking**: as for
        ``all_reduce``. **In place**: on root, when `sendbuf` is its own block of `recvbuf`.

        See Also
        --------
        gather_v : The same with a count for each rank. The C function is ``ncclGather``, in a NCCL before 2.28
            ``ncclSend`` and ``ncclRecv`` (``MPI_Igather``).
        """
        self._submit(self._arguments.collective("gather", sendbuf, recvbuf, stream, root=root))

    def scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None) -> None:
        """Give each rank its `n` of root's ``world_size * n`` elements.

        Parameters
        ----------
        sendbuf : array, world_size * n elements
            All blocks in rank order, on root; exactly that many. Not looked at on the others, which may pass ``None``.
        recvbuf : array, n elements of the same dtype
            This rank's block.
        root : int, default 0
            The rank whose elements are given out.
        stream : CUDA stream, optional
            As for ``all_reduce``.

        Raises
        ------
        TypeError, ValueError
            A wrong buffer, count, `root` or `stream`; nothing was sent.
        CommunicatorBrokenError, CommunicatorClosedError
            As for ``all_reduce``.

        Notes
        -----
        **Collective**: every rank, same order, same `n`, dtype and `root`. **Stream**, **Blocking**: as for
        ``all_reduce``. **In place**: on root, when `recvbuf` is its own block of `sendbuf`.

        See Also
        --------
        scatter_v : The same with a count for each rank. The C function is ``ncclScatter``, in a NCCL before 2.28
            ``ncclSend`` and ``ncclRecv`` (``MPI_Iscatter``).
        """
        self._submit(self._arguments.collective("scatter", sendbuf, recvbuf, stream, root=root))

    def all_to_all(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None) -> None:
        """Send the `r`-th `n` elements to rank `r`, and receive `n` from each rank in rank order.

        Parameters
        ----------
        sendbuf : array, world_size * n elements
            A block for each rank.
        recvbuf : array, world_size * n elements of the same dtype
            A block from each rank.
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
        **In place**: no; the buffers must not overlap.

        See Also
        --------
        all_to_all_v : The same with a count for each pair. The C function is ``ncclAlltoAll``, in a NCCL before 2.28
            ``ncclSend`` and ``ncclRecv`` (``MPI_Ialltoall``).
        """
        self._submit(self._arguments.collective("all_to_all", sendbuf, recvbuf, stream))

    def all_gather_v(self, sendbuf: Any, recvbuf: Any, counts: Iterable[int], *, stream: Any = None) -> None:
        """Gather ``counts[r]`` elements from each rank `r`; every rank gets all of them in rank order.

        Parameters
        ----------
        sendbuf : array, counts[rank] elements
            This rank's block.
        recvbuf : array, sum(counts) elements of the same dtype
            All blocks, one behind another.
        counts : sequence of int
            One for each rank, 0 or more; the same on every rank.
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
        **Collective**: every rank, same order, same `counts` and dtype. It is submitted as a group of broadcasts, one
        from each rank, and takes as many sequence numbers. **Stream**, **Blocking**: as for ``all_reduce``.
        **In place**: when `sendbuf` is this rank's block of `recvbuf`.

        See Also
        --------
        all_gather : One count for all. The C function is ``ncclBroadcast`` (``MPI_Ibcast``).
        """
        self._submit(self._arguments.all_gather_v(sendbuf, recvbuf, counts, stream))

    def reduce_scatter_v(
        self,
        sendbuf: Any,
        recvbuf: Any,
        counts: Iterable[int],
        *,
        op: ReduceOp | PreMulSum | str = ReduceOp.SUM,
        stream: Any = None,
    ) -> None:
        """Reduce ``sum(counts)`` elements over all ranks; rank `r` gets the ``counts[r]`` results that are its share.

        Parameters
        ----------
        sendbuf : array, sum(counts) elements
            This rank's contribution: the shares of all ranks, one behind another.
        recvbuf : array, counts[rank] elements of the same dtype
            This rank's share of the result.
        counts : sequence of int
            One for each rank, 0 or more; the same on every rank.
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
        **Collective**: every rank, same order, same `counts`, dtype and `op`. It is submitted as a group of reductions,
        one to each rank, and takes as many sequence numbers. **Stream**, **Blocking**: as for ``all_reduce``.
        **In place**: when `recvbuf` is this rank's share of `sendbuf`.

        See Also
        --------
        reduce_scatter : One count for all. The C function is ``ncclReduce`` (``MPI_Ireduce``).
        """
        self._submit(self._arguments.reduce_scatter_v(sendbuf, recvbuf, counts, op, stream))

    def gather_v(
        self,
        sendbuf: Any,
        recvbuf: Any = None,
        counts: Iterable[int] | None = None,
        root: int = 0,
        *,
        stream: Any = None,
    ) -> None:
        """Gather as many elements from each rank as it sends; root, which knows the counts, gets them in rank order.

        Parameters
        ----------
        sendbuf : array, any number of elements
            This rank's block.
        recvbuf : array, sum(counts) elements of the same dtype, optional
            All blocks, one behind another, on root. Not looked at on the others.
        counts : sequence of int, optional
            One for each rank, 0 or more, on root. Not looked at on the others.
        root : int, default 0
            The rank that gets the blocks.
        stream : CUDA stream, optional
            As for ``all_reduce``.

        Raises
        ------
        TypeError, ValueError
            A wrong buffer, count, `root` or `stream`; nothing was sent.
        CommunicatorBrokenError, CommunicatorClosedError
            As for ``all_reduce``; a rank that sends another count than root expects is a mismatch.

        Notes
        -----
        **Collective**: every rank, same order, same dtype and `root`. Besides its number it takes those of the sends
        and receives that move its data. **Stream**, **Blocking**: as for ``all_reduce``. **In place**: on root, when
        `sendbuf` is its own block of `recvbuf`.

        See Also
        --------
        gather : One count for all. The C functions are ``ncclSend`` and ``ncclRecv`` (``MPI_Isend``, ``MPI_Irecv``).
        """
        self._submit(self._arguments.gather_v(sendbuf, recvbuf, counts, root, stream))

    def scatter_v(
        self, sendbuf: Any, recvbuf: Any, counts: Iterable[int] | None = None, root: int = 0, *, stream: Any = None
    ) -> None:
        """Give each rank its part of root's elements, as many as it receives; root knows the counts.

        Parameters
        ----------
        sendbuf : array, sum(counts) elements
            All blocks, one behind another, on root. Not looked at on the others, which may pass ``None``.
        recvbuf : array, any number of elements of the same dtype
            This rank's block.
        counts : sequence of int, optional
            One for each rank, 0 or more, on root. Not looked at on the others.
        root : int, default 0
            The rank whose elements are given out.
        stream : CUDA stream, optional
            As for ``all_reduce``.

        Raises
        ------
        TypeError, ValueError
            A wrong buffer, count, `root` or `stream`; nothing was sent.
        CommunicatorBrokenError, CommunicatorClosedError
            As for ``all_reduce``; a rank that receives another count than root sends is a mismatch.

        Notes
        -----
        **Collective**: every rank, same order, same dtype and `root`. Besides its number it takes those of the sends
        and receives that move its data. **Stream**, **Blocking**: as for ``all_reduce``. **In place**: on root, when
        `recvbuf` is its own block of `sendbuf`.

        See Also
        --------
        scatter : One count for all. The C functions are ``ncclSend`` and ``ncclRecv`` (``MPI_Isend``, ``MPI_Irecv``).
        """
        self._submit(self._arguments.scatter_v(sendbuf, recvbuf, counts, root, stream))

    def all_to_all_v(
        self,
        sendbuf: Any,
        recvbuf: Any,
        send_counts: Iterable[int],
        recv_counts: Iterable[int],
        *,
        stream: Any = None,
    ) -> None:
        """Send ``send_counts[r]`` elements to each rank `r`, and receive ``recv_counts[r]`` from each.

        Parameters
        ----------
        sendbuf : array, sum(send_counts) elements
            A block for each rank, one behind another.
        recvbuf : array, sum(recv_counts) elements of the same dtype
            A block from each rank, one behind another.
        send_counts, recv_counts : sequence of int
            One for each rank, 0 or more. What one rank sends to another is what that one receives from it.
        stream : CUDA stream, optional
            As for ``all_reduce``.

        Raises
        ------
        TypeError, ValueError
            A wrong buffer, count or `stream`; nothing was sent.
        CommunicatorBrokenError, CommunicatorClosedError
            As for ``all_reduce``; counts of two ranks that do not fit are a mismatch.

        Notes
        -----
        **Collective**: every rank, same order, same dtype. Besides its number it takes those of the sends and receives
        that move its data. **Stream**, **Blocking**: as for ``all_reduce``. **In place**: no; the buffers must not
        overlap.

        See Also
        --------
        all_to_all : One count for all. The C functions are ``ncclSend`` and ``ncclRecv`` (``MPI_Isend``,
            ``MPI_Irecv``).
        """
        self._submit(self._arguments.all_to_all_v(sendbuf, recvbuf, send_counts, recv_counts, stream))

    def sendrecv(self, sendbuf: Any, dest: int, recvbuf: Any, src: int, *, stream: Any = None) -> None:
        """Send to one rank and receive from one, together: a ``group`` of a ``send`` and a ``recv``.

        Parameters
        ----------
        sendbuf : array
            What is sent.
        dest : int
            The receiving rank; this rank itself only if `src` is it too.
        recvbuf : array
            Where what comes goes; its count and dtype are those of what `src` sends.
        src : int
            The sending rank.
        stream : CUDA stream, optional
            As for ``all_reduce``.

        Raises
        ------
        TypeError, ValueError
            A wrong buffer, `dest`, `src` or `stream`; nothing was sent.
        CommunicatorBrokenError, CommunicatorClosedError
            As for ``all_reduce``.

        Notes
        -----
        **Collective**: no; each pair of ranks pairs its calls in order, also with plain ``send`` and ``recv``.
        **Stream**, **Blocking**: as for ``send``. **In place**: no; the buffers must not overlap.

        See Also
        --------
        send, recv : One way. The C functions are ``ncclSend`` and ``ncclRecv`` (``MPI_Isend``, ``MPI_Irecv``).
        """
        self._submit(self._arguments.sendrecv(sendbuf, dest, recvbuf, src, stream))
