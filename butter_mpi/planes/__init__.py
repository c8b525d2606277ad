"""Data planes: the twenty methods of a backend, on raw pointers and byte counts."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from butter_mpi.enums import DType, ReduceOp

__all__ = ["CommBackend"]


@runtime_checkable
class CommBackend(Protocol):
    """What every data plane has, made with its ordered stream and one communicator.

    Pointers are integers of memory that the plane works on (device memory on ``nccl``, host memory on ``host`` and
    ``solo``); sizes are bytes. Operations are ordered after what the stream holds and before what is put on it later;
    on the host planes the stream is the caller itself, so an operation has completed when its method returns. A method
    marked *collective* is called by every rank, in the same order. Wrong arguments are ``TypeError`` or ``ValueError``,
    before anything is sent, and poison nothing; a failure is a ``CommunicatorBrokenError`` and poisons.
    """

    def rank(self) -> int:
        """Return this rank, 0 to ``world_size() - 1``."""

    def world_size(self) -> int:
        """Return the number of ranks."""

    def all_reduce(self, ptr: int, nbytes: int, *, dtype: DType = DType.BFLOAT16, op: ReduceOp = ReduceOp.SUM) -> None:
        """Reduce `nbytes` at `ptr` over all ranks, in place on every rank (collective)."""

    def all_reduce_async(
        self,
        ptr: int,
        nbytes: int,
        compute_stream: int,
        *,
        dtype: DType = DType.BFLOAT16,
        op: ReduceOp = ReduceOp.SUM,
    ) -> None:
        """Reduce in place on the communicator's own stream, after and before `compute_stream` (collective)."""

    def all_gather(self, send: int, recv: int, nbytes: int) -> None:
        """Gather `nbytes` from each rank into `recv`, in rank order (collective)."""

    def reduce_scatter(
        self, send: int, recv: int, nbytes: int, *, dtype: DType = DType.UINT8, op: ReduceOp = ReduceOp.SUM
    ) -> None:
        """Reduce ``world_size() * nbytes`` at `send`; this rank's `nbytes` of it go to `recv` (collective)."""

    def broadcast(self, ptr: int, nbytes: int, root: int) -> None:
        """Copy root's `nbytes` to every rank, in place, and wait for it, bounded by the deadline (collective)."""

    def recv_command_u32(self, ptr: int, root: int) -> None:
        """Wait on a non-root rank, without a deadline, for root's 4-byte ``broadcast`` (collective with it)."""

    def barrier(self) -> None:
        """Order every rank's later work after every rank's earlier work (collective)."""

    def send_to(self, ptr: int, nbytes: int, dest: int, stream: int) -> None:
        """Send `nbytes` to rank `dest`; it calls ``recv_from`` with the same size."""

    def recv_from(self, ptr: int, nbytes: int, src: int, stream: int) -> None:
        """Receive `nbytes` from rank `src`; it calls ``send_to`` with the same size."""

    def group_start(self) -> None:
        """Begin a group: what follows is submitted together; the lane is held until ``group_end``."""

    def group_end(self) -> None:
        """Submit the group, from the thread that began it; groups nest, the outermost one submits."""

    def register_buffer(self, ptr: int, nbytes: int) -> int:
        """Register memory for faster operations; the handle belongs to this communicator."""

    def deregister_buffer(self, handle: int) -> None:
        """Give a handle back."""

    def symmetric_alloc(self, nbytes: int) -> int:
        """Allocate memory from the plane's allocator, 4096-byte aligned; returns its pointer."""

    def symmetric_free(self, ptr: int) -> None:
        """Free memory of ``symmetric_alloc``."""

    def set_add_kernel(self, handle: int) -> None:
        """Hand over a ``bf16_add_inplace`` kernel (collective); 0, and a reconnect, take it back.

        Ranks meet here over the control plane, as the kernel decides how each later sum is moved: one rank alone would
        wait for what the other never sends. Only the nccl plane uses it; all compare that every rank sets one, or none.
        """

    def is_healthy(self) -> bool:
        """Return whether the next operation would be taken."""

    def attempt_reconnect(self) -> None:
        """Repeat the bootstrap over the reserve communicator after a failure (collective, bounded)."""
