"""ThreadSanitizer on the stand-ins: silent where streams are ordered, loud where a wait is missing by luck only."""

from __future__ import annotations

import textwrap

import pytest
from helpers.mpirun import run_job
from helpers.standin import Ended, Standin, build

REPORT = "WARNING: ThreadSanitizer: data race"

HEAD = """
import ctypes, json, os, sys
import numpy as np
from helpers.standin_rank import *

N = 5000
nccl, seen = Nccl(), np.zeros(1, np.float32)

def done_unseen(stream, pointer, value):
    '''Wait until a stream has written a value, in a way that orders nothing: by luck.'''
    check(driver.cuMemcpyDtoHAsync(seen.ctypes.data, pointer, 4, stream))
    assert until(lambda: seen[0] == value)

def pipeline(gpu, comm, rank, n):
    x, y = gpu.blank(4 * N), gpu.put(np.zeros(N, np.float32))
    produce, reduce, consume = gpu.stream(), gpu.stream(), gpu.stream()
    total = n * (n + 1) / 2
    gpu.launch("fill_f32", produce, x, rank + 1, N)
    if MISSING == "before": done_unseen(produce, x, rank + 1)
    else: gpu.order(produce, reduce)
    assert nccl.AllReduce(x, x, N, 7, 0, comm, int(reduce)) == 0
    if MISSING == "after": done_unseen(reduce, x, total)
    else: gpu.order(reduce, consume)
    gpu.launch("axpy_f32", consume, 2.0, x, y, N)
    check(driver.cuStreamSynchronize(consume))
    assert (gpu.get(y, np.zeros(N, np.float32)) == 2 * total).all()
    return x, produce, reduce, consume
"""

RANK = """
MISSING = os.environ["MISSING"]
rank, n = map(int, sys.argv[1:])
gpu = Gpu(rank)
status, comm = nccl.init(n, first_id(nccl, rank), rank)
assert status == 0, nccl.error()
"""


@pytest.fixture(scope="module")
def standin() -> Standin:
    """Return the build."""
    return build("tsan")


def start(standin: Standin, n: int, code: str, missing: str = "") -> list[Ended]:
    """Run a program on every rank."""
    return standin.run_ranks(n, HEAD + RANK + textwrap.dedent(code), env={"MISSING": missing}, timeout=120)


def test_ordered_streams_are_silent(standin: Standin) -> None:
    """Producer, event, wait, collective, event, consumer; then on other streams, and clean-up."""
    code = """
    for _ in range(3):
        x, a, b, c = pipeline(gpu, comm, rank, n)
        gpu.order(c, a)
        gpu.launch("fill_f32", a, x, 1.0, N)
        check(driver.cuStreamSynchronize(a))
        assert nccl.AllReduce(x, x, N, 7, 0, comm, int(c)) == 0
        assert nccl.AllReduce(x, x, N, 7, 0, comm, int(b)) == 0     # NCCL orders its own operations
        check(driver.cuMemFreeAsync(x, b))
        for s in (a, b, c): check(driver.cuStreamDestroy(s))
    check(driver.cuCtxSynchronize())
    print(json.dumps(nccl.CommDestroy(comm)))
    """
    for ended in start(standin, 2, code):
        assert ended.value == 0 and REPORT not in ended.err, ended.text


@pytest.mark.parametrize(
    ("missing", "first", "second"), [("before", "fill_f32", "buffer_copy"), ("after", "buffer_copy", "axpy_f32")]
)
def test_missing_wait_is_reported(standin: Standin, missing: str, first: str, second: str) -> None:
    """The result is right in every run, for the work was done in time; the report names both sides."""
    for ended in start(standin, 2, "pipeline(gpu, comm, rank, n)\nprint('right')", missing):
        assert ended.rc == 66 and ended.out.endswith("right\n"), ended.text
        assert REPORT in ended.err and first in ended.err and second in ended.err, ended.text


def test_host_wait_orders(standin: Standin) -> None:
    """What the host saw done, by a query or a wait, comes before what it enqueues next; an event's query too."""
    code = """
    x, event = gpu.blank(4 * N), gpu.event()
    streams = [gpu.stream() for _ in range(4)]
    for i, s in enumerate(streams):
        gpu.launch("fill_f32", s, x, float(i), N)
        check(driver.cuEventRecord(event, s))
        if i == 0: check(driver.cuStreamSynchronize(s))
        if i == 1: assert until(lambda: int(driver.cuStreamQuery(s)[0]) == 0)
        if i == 2: assert until(lambda: int(driver.cuEventQuery(event)[0]) == 0)
    check(driver.cuCtxSynchronize())
    check(driver.cuMemFree(x))
    print(json.dumps(0))
    """
    for ended in start(standin, 1, code):
        assert ended.value == 0 and REPORT not in ended.err, ended.text


@pytest.mark.parametrize(
    "use",
    [
        "check(driver.cuMemcpyDtoDAsync(y, x, 4 * N, b))",
        "check(driver.cuMemsetD8Async(x, 0, 4, b))",
        "check(driver.cuMemFreeAsync(x, b))",
        "g.launch('axpy_f32', b, 1.0, y, x, N)",
    ],
)
def test_every_kind_of_work_is_watched(standin: Standin, use: str) -> None:
    """Copies, fills, stream-ordered frees and kernels on a second stream without a wait."""
    code = f"""
    g, y = gpu, gpu.put(np.zeros(N, np.float32))
    x = int(check(driver.cuMemAllocAsync(4 * N, 0))); check(driver.cuStreamSynchronize(0))
    a, b = gpu.stream(), gpu.stream()
    gpu.launch("fill_f32", a, x, 3.0, N)
    done_unseen(a, x, 3.0)
    {use}
    check(driver.cuStreamSynchronize(b))
    """
    (ended,) = start(standin, 1, code)
    assert ended.rc == 66 and REPORT in ended.err, ended.text


MIXTURE = """
import random

child, rng = ctypes.c_void_p(), random.Random(5)
assert nccl.CommSplit(comm, 0, -rank, ctypes.byref(child), None) == 0
streams = [gpu.stream(i % 2) for i in range(4)]
x, y = gpu.put(np.ones(N, np.int64)), gpu.put(np.ones(N, np.int64))
p, q = gpu.put(np.full(N, rank, np.int64)), gpu.blank(8 * N)

def pair(s):
    nccl.GroupStart()
    nccl.Send(p, N, 4, (rank + 1) % n, comm, s)
    nccl.Recv(q, N, 4, (rank - 1) % n, comm, s)
    return nccl.GroupEnd()

def two_communicators(s):
    nccl.GroupStart()
    nccl.AllReduce(x, x, N, 4, 3, comm, s)
    nccl.AllReduce(y, y, N, 4, 2, child, s)
    return nccl.GroupEnd()

def memory(s):
    check(driver.cuMemsetD8Async(q, 1, 8 * N, s))
    check(driver.cuMemFreeAsync(int(check(driver.cuMemAllocAsync(64, s))), s))
    return 0

kinds = [
    pair,
    two_communicators,
    memory,
    lambda s: nccl.AllReduce(x, x, N, 4, 2, comm, s),
    lambda s: nccl.Broadcast(y, y, N, 4, 0, child, s),
    lambda s: int(driver.cuStreamSynchronize(s)[0]),
]
last = streams[0]
for _ in range(400):
    stream = rng.choice(streams)
    if int(stream) != int(last): gpu.order(last, stream)
    assert rng.choice(kinds)(int(stream)) == 0
    last = stream
check(driver.cuCtxSynchronize())
right = all((gpu.get(a, np.zeros(N, np.int64)) == 1).all() for a in (x, y))
print(json.dumps([bool(right), nccl.CommDestroy(child), nccl.CommDestroy(comm)]))
"""


def test_long_mixture_is_right_and_silent(standin: Standin) -> None:
    """Four hundred steps over four streams, two communicators and three ranks, the same on every rank."""
    for ended in start(standin, 3, MIXTURE):
        assert ended.value == [True, 0, 0] and REPORT not in ended.err, ended.text


MPI = """
from mpi4py import MPI
world = MPI.COMM_WORLD
MISSING = os.environ["MISSING"]
gpu = Gpu(world.rank)
unique = world.bcast(bytes(nccl.unique_id()) if world.rank == 0 else None)
status, comm = nccl.init(world.size, UniqueId.from_buffer_copy(unique), world.rank)
assert status == 0, nccl.error()
pipeline(gpu, comm, world.rank, world.size)
nccl.CommDestroy(comm)
world.Barrier()
print("right")
"""


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_detector_under_mpirun(standin: Standin, mpi: str) -> None:
    """In ranks of an MPI job, which is silent itself; a missing wait of one rank is found in that rank."""
    own = {rank: {**standin.env(), "MISSING": "before" if rank else ""} for rank in range(2)}
    result = run_job(2, HEAD + MPI, mpi=mpi, env={"PMIX_MCA_gds": "hash"}, rank_env=own, timeout=120)
    assert [out.strip() for out in result.rank_out] == ["right"] * 2, result.text
    assert [REPORT in err for err in result.rank_err] == [False, True], result.text
