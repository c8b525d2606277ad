"""Arrays and streams of CuPy, PyTorch, cuda.core, JAX and Numba on a GPU: ``mpirun -np 2 ... pytest --with-mpi``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import butter_mpi
from butter_mpi.kernels import bf16_add_inplace

# JAX else takes three quarters of the GPU, which other ranks may share.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

pytestmark = pytest.mark.mpi

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
TOTAL = SIZE * (SIZE + 1) // 2
SLOW = 200_000_000
"""Cycles for which a stream is kept busy: a tenth of a second, so that a missing wait would show."""


@pytest.fixture(scope="module")
def comm() -> Iterator[butter_mpi.Communicator]:
    """A communicator on the nccl plane; ranks share a GPU where the run says so."""
    share = bool(os.environ.get("BUTTER_MPI_TEST_SHARE_GPU"))
    with butter_mpi.init(MPI.COMM_WORLD, plane="nccl", share_gpu=share) as made:
        yield made


def _ordinal(comm: butter_mpi.Communicator) -> int:
    """Return the number of this rank's GPU."""
    plane: Any = comm.backend
    return int(plane.device.ordinal)


@pytest.fixture
def torch() -> Any:
    """PyTorch with a GPU."""
    module = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not module.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    return module


@pytest.fixture
def cupy() -> Any:
    """CuPy with a GPU."""
    return pytest.importorskip("cupy", reason="CuPy is not installed")


@pytest.mark.parametrize("given", [True, False])
def test_torch_tensor_on_its_stream(comm: butter_mpi.Communicator, torch: Any, given: bool) -> None:
    """An operation comes after the kernel that makes its input and before the one that uses its output."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.zeros(1 << 20, device="cuda")
        torch.cuda._sleep(SLOW * (1 + RANK))
        x += RANK + 1
        comm.all_reduce(x, stream=stream if given else None)
        y = x * 2
    stream.synchronize()
    assert bool((y == 2 * TOTAL).all())


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"])
def test_torch_types(comm: butter_mpi.Communicator, torch: Any, name: str) -> None:
    """Every element type that both sides have."""
    x = torch.full((1001,), RANK + 1, dtype=getattr(torch, name), device="cuda")
    out = torch.empty(SIZE * 1001, dtype=x.dtype, device="cuda")
    comm.all_gather(x, out)
    comm.all_reduce(x)
    torch.cuda.synchronize()
    assert bool((x == TOTAL).all())
    assert [int(out[1001 * rank]) for rank in range(SIZE)] == list(range(1, SIZE + 1))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_torch_refusals(comm: butter_mpi.Communicator, torch: Any) -> None:
    """Host memory, strides and types without operations are refused by name; the communicator stays healthy."""
    for wrong, error, text in (
        (torch.zeros(4), TypeError, "on cpu"),
        (torch.zeros(8, device="cuda")[::2], ValueError, r"not contiguous .*strides \(2,\) elements"),
        (torch.zeros(2, 3, device="cuda").T, ValueError, r"not contiguous .*strides \(1, 3\) elements"),
        (torch.zeros(4, dtype=torch.complex32, device="cuda"), ValueError, "dtype must be one of"),
        (np.zeros(4), TypeError, "device memory"),
    ):
        with pytest.raises(error, match=text):
            comm.all_reduce(wrong)
    assert comm.is_healthy()


def test_torch_graph_capture_is_refused(comm: butter_mpi.Communicator, torch: Any) -> None:
    """A captured stream is refused with the reason; the capture goes on and its graph is right."""
    x = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        x += 1
        with pytest.raises(ValueError, match="captured into a CUDA graph"):
            comm.all_reduce(x)
        x += 1
    graph.replay()
    torch.cuda.synchronize()
    assert bool((x == 2).all()) and comm.is_healthy()
    comm.all_reduce(x)
    torch.cuda.synchronize()
    assert bool((x == 2 * SIZE).all())


def test_cupy_array_on_its_stream(comm: butter_mpi.Communicator, cupy: Any) -> None:
    """CuPy's current stream is the ordered one; a stream that is given wins."""
    with cupy.cuda.Stream(non_blocking=True) as stream:
        x = cupy.zeros(1 << 20, cupy.float32)
        x += RANK + 1
        comm.all_reduce(x)
        y = x * 2
        stream.synchronize()
    assert bool((y == 2 * TOTAL).all())
    x = cupy.full(7, RANK + 1, cupy.int64)
    cupy.cuda.Device().synchronize()
    comm.broadcast(x, SIZE - 1, stream=stream)
    stream.synchronize()
    assert bool((x == SIZE).all())


def test_cuda_core_stream(comm: butter_mpi.Communicator, torch: Any) -> None:
    """A stream of cuda.core is taken as it is."""
    core = pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    device = core.Device(torch.cuda.current_device())
    device.set_current()
    stream = device.create_stream()
    x = torch.full((5,), RANK + 1.0, device="cuda")
    torch.cuda.synchronize()
    comm.all_reduce(x, stream=stream)
    stream.sync()
    assert bool((x == TOTAL).all())


COUNTS = [(3 * rank + 2) % 5 for rank in range(SIZE)]
"""One count a rank, of which the second is zero."""


def test_every_operation_on_tensors(comm: butter_mpi.Communicator, torch: Any) -> None:
    """Operations with a root, between all pairs and with counts, on the current stream, beside what torch computes."""
    blocks = [torch.arange(4, device="cuda") + 10 * rank for rank in range(SIZE)]
    own, whole = blocks[RANK].clone(), torch.cat(blocks)
    total = own.clone()
    comm.reduce(total, root=SIZE - 1)
    every, share, came = torch.zeros_like(whole), torch.zeros_like(own), torch.zeros_like(whole)
    comm.gather(own, every if RANK == 0 else None)
    comm.scatter(whole if RANK == 0 else None, share)
    comm.all_to_all(whole + RANK, came)
    assert RANK < SIZE - 1 or torch.equal(total, sum(blocks))
    assert RANK or torch.equal(every, whole)
    assert torch.equal(share, own)
    assert torch.equal(came, torch.cat([blocks[RANK] + rank for rank in range(SIZE)]))
    uneven = torch.cat([torch.full((count,), rank, device="cuda") for rank, count in enumerate(COUNTS)])
    mine = torch.full((COUNTS[RANK],), RANK, device="cuda")
    every, share = torch.full_like(uneven, -1), torch.full_like(mine, -1)
    comm.all_gather_v(mine, every, COUNTS)
    assert torch.equal(every, uneven)
    comm.gather_v(mine, every, COUNTS, SIZE - 1)
    comm.scatter_v(uneven, share, COUNTS, SIZE - 1)
    assert torch.equal(every, uneven) and torch.equal(share, mine)
    comm.reduce_scatter_v(uneven, share, COUNTS)
    assert torch.equal(share, SIZE * mine)
    sends = [(RANK + 2 * peer) % 3 for peer in range(SIZE)]
    receives = [(peer + 2 * RANK) % 3 for peer in range(SIZE)]
    came = torch.empty(sum(receives), device="cuda")
    comm.all_to_all_v(torch.full((sum(sends),), float(RANK), device="cuda"), came, sends, receives)
    wanted = [float(peer) for peer, count in enumerate(receives) for _ in range(count)]
    assert came.tolist() == wanted
    share = torch.zeros_like(own)
    comm.sendrecv(own, (RANK + 1) % SIZE, share, (RANK - 1) % SIZE)
    assert torch.equal(share, blocks[(RANK - 1) % SIZE])


def test_carried_types_of_torch(comm: butter_mpi.Communicator, torch: Any) -> None:
    """Bool is "or" and "and", complex goes as pairs, 16-bit integers move; a factor multiplies first."""
    flags = torch.tensor([True, RANK == 0, False], device="cuda")
    either, both = flags.clone(), flags.clone()
    comm.all_reduce(either)
    comm.all_reduce(both, op="prod")
    assert either.tolist() == [True, True, False] and both.tolist() == [True, SIZE == 1, False]
    numbers = torch.full((3,), RANK + 1 - 2j, device="cuda")
    comm.all_reduce(numbers)
    assert numbers.tolist() == [TOTAL - 2j * SIZE] * 3
    shorts = torch.full((3,), RANK, dtype=torch.int16, device="cuda")
    comm.broadcast(shorts, SIZE - 1)
    assert shorts.tolist() == [SIZE - 1] * 3
    for name in ("float16", "bfloat16", "float32", "int32"):
        held = torch.full((5,), 2, dtype=getattr(torch, name), device="cuda")
        comm.all_reduce(held, op=butter_mpi.PreMulSum(RANK + 1))
        assert held.tolist() == [2 * TOTAL] * 5, name
    with pytest.raises(ValueError, match="conjugate, or a part of one, that PyTorch has not computed"):
        comm.all_reduce(torch.conj(numbers))


def test_tensor_that_is_dropped_at_once(comm: butter_mpi.Communicator, torch: Any) -> None:
    """Memory of a tensor that nobody has any more is not given to others before its stream has passed the operation."""
    side, out = torch.cuda.Stream(), torch.empty(1 << 20, device="cuda")
    x = torch.full((1 << 20,), float(RANK + 1), device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLOW)
    comm.all_reduce(x, out, stream=side)
    del x
    # It would be in the memory that is free now, on a stream that does not wait.
    torch.full((1 << 20,), -1.0, device="cuda")
    torch.cuda.synchronize()
    assert bool((out == TOTAL).all())
    assert comm.is_healthy()


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_symmetric_array_as_a_torch_tensor(comm: butter_mpi.Communicator, torch: Any, name: str) -> None:
    """PyTorch sees the array's own memory by DLPack, and the array alone is an operand too."""
    with comm.symmetric((3, 5), name) as x:
        seen = torch.from_dlpack(x)
        seen.fill_(RANK + 1)
        comm.all_reduce(seen)
        comm.all_reduce(x, stream=torch.cuda.current_stream())
        assert seen.dtype is getattr(torch, name) and seen.tolist() == [[TOTAL * SIZE] * 5] * 3
        del seen
    with pytest.raises(ValueError, match="was closed, and its memory is freed"):
        torch.from_dlpack(x)


def test_symmetric_array_as_a_cupy_array(comm: butter_mpi.Communicator, cupy: Any) -> None:
    """CuPy sees the array's own memory, by either protocol; what is registered is reduced alike."""
    with comm.symmetric(1001, np.int32) as x:
        seen = cupy.asarray(x)
        seen[...] = RANK + 1
        comm.all_reduce(seen)
        assert bool((cupy.from_dlpack(x) == TOTAL).all())
    y = cupy.full(1001, RANK + 1, np.int32)
    with comm.registered(y):
        comm.all_reduce(y)
    assert bool((y == TOTAL).all())


def test_jax_arrays_are_sent_and_not_written(comm: butter_mpi.Communicator, torch: Any) -> None:
    """JAX's arrays come by DLPack, ordered after JAX's own work, bfloat16 too; receiving into one is refused."""
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    # JAX begins with every GPU that it sees: it leaves the last one current, and works on the first.
    ordinal = _ordinal(comm)
    torch.cuda.set_device(ordinal)
    own = jax.local_devices()[ordinal]
    stream = torch.cuda.Stream()
    for dtype in (jax.numpy.float32, jax.numpy.bfloat16):
        ones = jax.device_put(jax.numpy.ones((2048, 2048), dtype), own)
        x = jax.jit(lambda one: (one @ one.T)[0] * 0 + RANK + 1)(ones)
        out = torch.empty(2048, dtype=torch.float32 if dtype == jax.numpy.float32 else torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
        comm.all_reduce(x, out, stream=stream)
        stream.synchronize()
        assert bool((out == TOTAL).all())
        with pytest.raises(ValueError, match="read-only"):
            comm.all_reduce(x, stream=stream)
        with pytest.raises(ValueError, match="stream must be given"):
            comm.all_reduce(x, out)


def test_numba_arrays_name_their_stream(comm: butter_mpi.Communicator) -> None:
    """Numba's arrays name the stream that they were made with, which is the ordered one."""
    cuda = pytest.importorskip("numba.cuda", reason="Numba is not installed")
    if not cuda.is_available():
        pytest.skip("Numba sees no GPU")
    # Numba works on the first GPU unless it is told.
    cuda.select_device(_ordinal(comm))
    stream = cuda.stream()
    x = cuda.to_device(np.full(1001, RANK + 1, np.float32), stream=stream)
    comm.all_reduce(x)
    assert (x.copy_to_host(stream=stream) == TOTAL).all()
    y = cuda.to_device(np.full(7, RANK + 1, np.int64))
    with pytest.raises(ValueError, match="stream must be given"):
        comm.all_reduce(y)
    comm.all_reduce(y, stream=stream)
    stream.synchronize()
    assert (y.copy_to_host() == TOTAL).all()


def test_cuda_core_buffer(comm: butter_mpi.Communicator, torch: Any) -> None:
    """A buffer of cuda.core is its bytes; a closed one is refused."""
    core = pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    device = core.Device(torch.cuda.current_device())
    device.set_current()
    stream, x = device.create_stream(), torch.full((8,), RANK + 1, dtype=torch.int8, device="cuda")
    torch.cuda.synchronize()
    buffer = core.Buffer.from_handle(x.data_ptr(), 8, owner=x)
    comm.all_reduce(buffer, stream=stream)
    stream.sync()
    assert bool((x == TOTAL).all())
    buffer.close()
    with pytest.raises(TypeError, match="does not give its memory"):
        comm.all_reduce(buffer, stream=stream)


@pytest.mark.skipif(SIZE != 2, reason="the add path is for 2 ranks")
@pytest.mark.parametrize("count", [1, 3, 2**20 + 1])
def test_add_path_gives_what_nccl_gives(comm: butter_mpi.Communicator, torch: Any, count: int) -> None:
    """Send, receive and add, by the kernel compiled here: the sum rounded once, bit for bit that of NCCL."""
    plane: Any = comm.backend
    made = [torch.randn(count, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(SIZE)]
    expected = (made[0].float() + made[1].float()).bfloat16().cuda()
    plane.set_add_kernel(bf16_add_inplace(plane.device))
    try:
        x = made[RANK].cuda()
        comm.all_reduce(x)
    finally:
        plane.set_add_kernel(0)
    y = made[RANK].cuda()
    comm.all_reduce(y)
    torch.cuda.synchronize()
    assert torch.equal(x, expected) and torch.equal(y, expected)


def test_all_reduce_async_beside_compute(comm: butter_mpi.Communicator, torch: Any) -> None:
    """all_reduce_async comes after what the compute stream holds; later work there waits for it; the host does not."""
    backend = comm.backend
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.zeros(1 << 16, device="cuda")
        torch.cuda._sleep(SLOW)
        x += RANK + 1
        backend.all_reduce_async(x.data_ptr(), x.numel() * 4, stream.cuda_stream, dtype=butter_mpi.DType.FLOAT32)
        assert not stream.query(), "the host waited"
        y = x + 1
    stream.synchronize()
    assert bool((y == TOTAL + 1).all())
