"""The contract suite of the twenty backend methods; every plane passes it unchanged."""

from __future__ import annotations

import inspect
import threading
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers.memory import Memory
from mpi4py import MPI

from butter_mpi import Communicator, DType, ReduceOp
from butter_mpi.errors import CollectiveMismatchError, CommunicatorBrokenError, CommunicatorClosedError
from butter_mpi.planes import CommBackend

pytestmark = pytest.mark.mpi

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
SIZES = (0, 1, 3, 2**20 + 1)
BF16 = np.dtype(ml_dtypes.bfloat16)
TYPES = {dtype: np.dtype(getattr(ml_dtypes, dtype.label, dtype.label)) for dtype in DType if dtype.native}


def numbers(rank: int, count: int, dtype: np.dtype) -> np.ndarray:
    """Return small whole numbers of `rank`, exact in every type also after a sum over ranks."""
    return (np.random.default_rng([rank, count]).integers(0, 2, count) + (rank == 0)).astype(dtype)


def expected(count: int, dtype: np.dtype, op: ReduceOp) -> np.ndarray:
    """Return the reduction over all ranks, computed here from every rank's numbers."""
    every = np.stack([numbers(r, count, dtype).astype(np.float64) for r in range(SIZE)])
    result = {
        ReduceOp.SUM: lambda: every.sum(0),
        ReduceOp.PROD: lambda: every.prod(0),
        ReduceOp.MIN: lambda: every.min(0),
        ReduceOp.MAX: lambda: every.max(0),
        ReduceOp.AVG: lambda: np.floor(every.sum(0) / SIZE) if dtype.kind in "iu" else every.sum(0) / SIZE,
    }[op]()
    return result.astype(np.float32).astype(dtype) if dtype.itemsize < 4 else result.astype(dtype)


def test_twenty_methods(backend: CommBackend) -> None:
    """A backend has the twenty methods of the protocol, with its parameter names."""
    names = [name for name in vars(CommBackend) if not name.startswith("_")]
    assert len(names) == 20
    for name in names:
        ours = inspect.signature(getattr(backend, name))
        wanted = inspect.signature(getattr(CommBackend, name))
        assert list(ours.parameters) == list(wanted.parameters)[1:], name


def test_identity(backend: CommBackend) -> None:
    """A backend knows who it is."""
    assert (backend.rank(), backend.world_size()) == (RANK, SIZE)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("dtype", list(TYPES))
def test_all_reduce_types_and_sizes(backend: CommBackend, memory: Memory, dtype: DType, count: int) -> None:
    """all_reduce sums in place, for every element type and odd sizes, and writes nothing beside the buffer."""
    own = numbers(RANK, count, TYPES[dtype])
    pointer = memory.put(own) if count else 0
    backend.all_reduce(pointer, own.nbytes, dtype=dtype)
    if count:
        np.testing.assert_array_equal(memory.get(pointer, own), expected(count, TYPES[dtype], ReduceOp.SUM))


@pytest.mark.parametrize("op", list(ReduceOp))
@pytest.mark.parametrize("dtype", list(TYPES))
def test_all_reduce_operators(backend: CommBackend, memory: Memory, dtype: DType, op: ReduceOp) -> None:
    """all_reduce knows every operator, for every element type."""
    own = numbers(RANK, 1000, TYPES[dtype])
    pointer = memory.put(own)
    backend.all_reduce(pointer, own.nbytes, dtype=dtype, op=op)
    np.testing.assert_array_equal(memory.get(pointer, own), expected(1000, TYPES[dtype], op))


def test_all_reduce_is_bf16_unless_told(backend: CommBackend, memory: Memory) -> None:
    """all_reduce takes the bytes for bfloat16 unless told otherwise; a bfloat16 sum shows it."""
    own = numbers(RANK, 5, BF16)
    pointer = memory.put(own)
    backend.all_reduce(pointer, own.nbytes)
    np.testing.assert_array_equal(memory.get(pointer, own), expected(5, BF16, ReduceOp.SUM))


def test_signed_average_rounds_towards_zero(backend: CommBackend, memory: Memory) -> None:
    """The average of signed integers is divided towards zero."""
    own = np.array([-7, 7, -1], np.int32) if RANK == 0 else np.zeros(3, np.int32)
    pointer = memory.put(own)
    backend.all_reduce(pointer, own.nbytes, dtype=DType.INT32, op=ReduceOp.AVG)
    np.testing.assert_array_equal(memory.get(pointer, own), np.trunc(np.array([-7, 7, -1]) / SIZE).astype(np.int32))


def test_f32_all_reduce_async(backend: CommBackend, memory: Memory) -> None:
    """The headline case: an F32 sum on the producer's own stream, after what it holds and before what comes later."""
    own = numbers(RANK, 4097, np.dtype(np.float32))
    pointer = memory.put(own)
    backend.all_reduce_async(pointer, own.nbytes, memory.stream, dtype=DType.FLOAT32)
    np.testing.assert_array_equal(memory.get(pointer, own), expected(4097, np.dtype(np.float32), ReduceOp.SUM))


@pytest.mark.parametrize("count", SIZES)
def test_all_gather(backend: CommBackend, memory: Memory, count: int) -> None:
    """all_gather puts every rank's bytes in rank order, out of place and in place."""
    blocks = np.stack([numbers(r, count, np.dtype(np.uint8)) for r in range(SIZE)])
    send, recv = memory.put(blocks[RANK]), memory.blank(blocks.nbytes)
    backend.all_gather(send, recv, count)
    np.testing.assert_array_equal(memory.get(recv, blocks), blocks)
    only_own = np.where(np.arange(SIZE)[:, None] == RANK, blocks, 0).astype(np.uint8)
    recv = memory.put(only_own)
    backend.all_gather(recv + RANK * count, recv, count)
    np.testing.assert_array_equal(memory.get(recv, blocks), blocks)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("dtype", [DType.UINT8, DType.FLOAT32, DType.BFLOAT16])
def test_reduce_scatter(backend: CommBackend, memory: Memory, dtype: DType, count: int) -> None:
    """reduce_scatter gives each rank its share of the sum, out of place and in place; u8 unless told otherwise."""
    own = numbers(RANK, SIZE * count, TYPES[dtype])
    share = expected(SIZE * count, TYPES[dtype], ReduceOp.SUM)[RANK * count : (RANK + 1) * count]
    kwargs: dict[str, Any] = {} if dtype is DType.UINT8 else {"dtype": dtype}
    send, recv = memory.put(own), memory.blank(share.nbytes)
    backend.reduce_scatter(send, recv, share.nbytes, **kwargs)
    np.testing.assert_array_equal(memory.get(recv, share), share)
    backend.reduce_scatter(send, send + RANK * share.nbytes, share.nbytes, **kwargs)
    np.testing.assert_array_equal(memory.get(send, own)[RANK * count : (RANK + 1) * count], share)


@pytest.mark.parametrize("root", range(SIZE))
@pytest.mark.parametrize("count", SIZES)
def test_broadcast(backend: CommBackend, memory: Memory, root: int, count: int) -> None:
    """Broadcast copies root's bytes to every rank, from each root, and has them there when it returns."""
    wanted = numbers(root, count, np.dtype(np.uint8))
    pointer = memory.put(wanted) if root == RANK else memory.blank(count)
    backend.broadcast(pointer, count, root)
    np.testing.assert_array_equal(memory.get(pointer, wanted), wanted)


def test_recv_command(backend: CommBackend, memory: Memory) -> None:
    """recv_command_u32 meets root's 4-byte broadcast, and refuses to wait for itself."""
    with pytest.raises(ValueError, match="this rank"):
        backend.recv_command_u32(memory.blank(4), RANK)
    command = np.array([0xDEADBEEF], np.uint32)
    if RANK == 0:
        backend.broadcast(memory.put(command), 4, 0)
    else:
        pointer = memory.blank(4)
        backend.recv_command_u32(pointer, 0)
        np.testing.assert_array_equal(memory.get(pointer, command), command)


def test_barrier_waits_for_the_last(backend: CommBackend, memory: Memory) -> None:
    """Nobody's work after a barrier begins before the last rank has come to it."""
    WORLD.Barrier()
    before = time.monotonic()
    if RANK == SIZE - 1:
        threading.Event().wait(0.3)
    came = time.monotonic()
    backend.barrier()
    memory.wait()
    if RANK == SIZE - 1:
        assert time.monotonic() >= came
    else:
        assert time.monotonic() - before >= 0.29


@pytest.mark.parametrize("count", SIZES)
def test_ring_in_a_group(backend: CommBackend, memory: Memory, count: int) -> None:
    """In a group every rank may send before it receives: a ring turns, whatever the size."""
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    wanted = numbers(left, count, np.dtype(np.uint8))
    send, recv = memory.put(numbers(RANK, count, np.dtype(np.uint8))), memory.blank(count)
    backend.group_start()
    backend.send_to(send, count, right, memory.stream)
    backend.recv_from(recv, count, left, memory.stream)
    backend.group_end()
    np.testing.assert_array_equal(memory.get(recv, wanted), wanted)


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
def test_send_and_receive_in_order(backend: CommBackend, memory: Memory) -> None:
    """Without a group, sends and receives of a pair meet in order."""
    for turn in range(5):
        wanted = np.arange(turn + 1, dtype=np.uint8) + turn
        if RANK == 0:
            backend.send_to(memory.put(wanted), wanted.nbytes, 1, memory.stream)
        elif RANK == 1:
            pointer = memory.blank(wanted.nbytes)
            backend.recv_from(pointer, wanted.nbytes, 0, memory.stream)
            np.testing.assert_array_equal(memory.get(pointer, wanted), wanted)


def test_group_of_many(backend: CommBackend, memory: Memory) -> None:
    """A group holds collectives and pairs, nests, and leaves every result right."""
    own = np.full(1000, RANK + 1, np.float32)
    pointers = [memory.put(own) for _ in range(3)]
    sends = {p: memory.put(np.full(10, RANK, np.uint8)) for p in range(SIZE)}
    recvs = {p: memory.blank(10) for p in range(SIZE)}
    backend.group_start()
    for pointer in pointers[:2]:
        backend.all_reduce(pointer, own.nbytes, dtype=DType.FLOAT32)
    backend.group_start()
    for peer in range(SIZE):
        backend.recv_from(recvs[peer], 10, peer, memory.stream)
        backend.send_to(sends[peer], 10, peer, memory.stream)
    backend.group_end()
    backend.all_reduce(pointers[2], own.nbytes, dtype=DType.FLOAT32, op=ReduceOp.MAX)
    backend.group_end()
    for pointer, value in zip(pointers, (SIZE * (SIZE + 1) // 2,) * 2 + (SIZE,), strict=True):
        assert (memory.get(pointer, own) == value).all()
    for peer, pointer in recvs.items():
        assert (memory.get(pointer, np.empty(10, np.uint8)) == peer).all()


def test_group_ends_once(backend: CommBackend) -> None:
    """group_end without group_start is refused, and so is one from another thread; the group is not harmed."""
    with pytest.raises(ValueError, match="without a group_start"):
        backend.group_end()
    backend.group_start()
    caught: list[BaseException] = []

    def end() -> None:
        try:
            backend.group_end()
        except ValueError as error:
            caught.append(error)

    thread = threading.Thread(target=end)
    thread.start()
    thread.join(10)
    backend.group_end()
    assert len(caught) == 1 and backend.is_healthy()


def test_handles_belong_to_one_communicator(backend: CommBackend, memory: Memory) -> None:
    """A handle is given back once, and to its own communicator only."""
    handle = backend.register_buffer(memory.blank(4096), 4096)
    backend.deregister_buffer(handle)
    with pytest.raises(ValueError, match="not of this communicator"):
        backend.deregister_buffer(handle)
    with pytest.raises(ValueError, match="from 1"):
        backend.register_buffer(0, 4096)


def test_handle_is_void_after_close(comm: Communicator, memory: Memory) -> None:
    """Closing gives every handle back: it is not taken for a registered one afterwards."""
    handle = comm.backend.register_buffer(memory.blank(4096), 4096)
    comm.close()
    with pytest.raises((ValueError, CommunicatorClosedError), match=r"void|was closed"):
        comm.backend.deregister_buffer(handle)


def test_symmetric_memory(backend: CommBackend) -> None:
    """symmetric_alloc gives aligned memory that operations take, and that is freed once."""
    pointer = backend.symmetric_alloc(4096)
    assert pointer and pointer % 4096 == 0
    backend.all_reduce(pointer, 4096)
    backend.symmetric_free(pointer)
    with pytest.raises(ValueError, match="freed already"):
        backend.symmetric_free(pointer)
    with pytest.raises(ValueError, match="1 or more"):
        backend.symmetric_alloc(0)


def test_add_kernel_can_be_taken_back(backend: CommBackend) -> None:
    """A kernel handle is kept or taken back; what is no handle is refused."""
    backend.set_add_kernel(0)
    with pytest.raises(TypeError, match="must be an int"):
        backend.set_add_kernel("kernel")  # type: ignore[arg-type]


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
def test_add_kernel_is_agreed_on(backend: CommBackend) -> None:
    """A kernel that some ranks set and others do not is told to all of them, before any sum is moved in two ways."""
    with pytest.raises(CollectiveMismatchError, match="with a kernel of set_add_kernel or without"):
        backend.set_add_kernel(0 if RANK else 8)
    assert not backend.is_healthy()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b, p, s: b.all_reduce(p, -2), "nbytes must be from 0"),
        (lambda b, p, s: b.all_reduce(p, 2**70), "nbytes must be from 0"),
        (lambda b, p, s: b.all_reduce(p, 3), "no whole number of bfloat16"),
        (lambda b, p, s: b.all_reduce(0, 4), "pointer must be from 1"),
        (lambda b, p, s: b.all_reduce(p, 4, dtype="bit"), "dtype must be one of"),
        (lambda b, p, s: b.all_reduce(p, 4, op="xor"), "op must be one of"),
        (lambda b, p, s: b.all_reduce(p, 4, dtype="bool", op="avg"), "^rank .*all_reduce: op avg is none of bool"),
        (lambda b, p, s: b.broadcast(p, 4, SIZE), f"root must be from 0 to {SIZE - 1}"),
        (lambda b, p, s: b.broadcast(p, 4, -1), "root must be from 0"),
        (lambda b, p, s: b.send_to(p, 4, SIZE, s), "peer must be from 0"),
        (lambda b, p, s: b.send_to(p, 4, RANK, s), "needs its recv"),
        (lambda b, p, s: b.recv_from(p, 4, RANK, s), "needs its recv"),
        (lambda b, p, s: b.all_reduce_async(p, 4, s + 12345), "stream must be"),
        (lambda b, p, s: b.send_to(p, 4, 0, s + 12345), "stream must be"),
        (lambda b, p, s: b.recv_from(p, 4, 0, s + 12345), "stream must be"),
    ],
)
def test_refusals_poison_nothing(backend: CommBackend, memory: Memory, call, message: str) -> None:
    """A wrong argument is refused before anything is sent; the next operation is right."""
    with pytest.raises(ValueError, match=message):
        call(backend, memory.blank(16), memory.stream)
    with pytest.raises(TypeError, match="must be an int"):
        backend.all_reduce(memory.blank(4), 4.0)  # type: ignore[arg-type]
    own = np.full(3, RANK, np.int32)
    pointer = memory.put(own)
    backend.all_reduce(pointer, own.nbytes, dtype=DType.INT32)
    assert (memory.get(pointer, own) == SIZE * (SIZE - 1) // 2).all()


def test_sequence_counts_collectives(comm: Communicator, memory: Memory) -> None:
    """Every collective takes one number, empty ones too; pairs and refusals take none; world size one counts alike."""
    backend = comm.backend
    before = comm.sequence
    backend.all_reduce(0, 0)
    backend.barrier()
    backend.broadcast(memory.blank(1), 1, 0)
    with pytest.raises(ValueError, match="nbytes"):
        backend.all_reduce(0, -1)
    backend.group_start()
    backend.send_to(memory.blank(1), 1, RANK, memory.stream)
    backend.recv_from(memory.blank(1), 1, RANK, memory.stream)
    backend.group_end()
    assert comm.sequence == before + 3


def test_healthy_until_closed(comm: Communicator, memory: Memory) -> None:
    """A backend is healthy until it is closed; then every operation says that it was."""
    backend = comm.backend
    assert backend.is_healthy()
    comm.close()
    assert not backend.is_healthy()
    calls = (
        backend.barrier,
        lambda: backend.all_reduce(memory.blank(2), 2),
        backend.group_start,
        lambda: backend.register_buffer(memory.blank(2), 2),
    )
    for call in calls:
        with pytest.raises(CommunicatorClosedError, match="was closed"):
            call()


@pytest.mark.skipif(SIZE < 2, reason="needs 2 ranks")
def test_reconnect_after_a_mismatch(comm: Communicator, memory: Memory) -> None:
    """A poisoned backend repeats its first cause until all ranks reconnect; then it works, and old handles are void."""
    backend = comm.backend
    handle = backend.register_buffer(memory.blank(16), 16)
    backend.barrier()
    before = comm.sequence

    def differ() -> None:
        backend.all_reduce(memory.blank(4), 4) if RANK else backend.barrier()
        # With check="light" the watcher tells, maybe after NCCL has moved something.
        comm.wait_for_async_error(5)

    with pytest.raises(CommunicatorBrokenError) as first:
        differ()
    assert not backend.is_healthy()
    with pytest.raises(CommunicatorBrokenError) as again:
        backend.barrier()
    assert str(again.value) == str(first.value)
    backend.attempt_reconnect()
    assert backend.is_healthy() and comm.sequence == before + 1
    with pytest.raises(ValueError, match="void"):
        backend.deregister_buffer(handle)
    own = np.ones(3, np.int32)
    pointer = memory.put(own)
    backend.all_reduce(pointer, own.nbytes, dtype=DType.INT32)
    assert (memory.get(pointer, own) == SIZE).all()
