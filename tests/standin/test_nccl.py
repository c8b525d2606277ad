"""The stand-in for NCCL: operations on ranks in processes of their own, against NumPy; ranks under mpirun."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest
from helpers.mpirun import run_job
from helpers.standin import Standin
from helpers.standin_ranks import REFERENCE, values


@pytest.mark.parametrize("n", [2, 4])
def test_every_reduction_in_every_dtype(standin: Standin, n: int) -> None:
    """All-reduce against NumPy, five operations in twelve types."""
    code = """
    wrong = []
    for number, name in enumerate(DTYPES):
        dtype = numpy_type(name)
        for op, word in enumerate(OPS):
            x = gpu.put(contribution(rank, dtype, 1000))
            assert nccl.AllReduce(x, x, 1000, number, op, comm, int(stream)) == 0
            check(driver.cuStreamSynchronize(stream))
            expected = reduced(word, dtype, 1000, n)
            if not same(gpu.get(x, expected), expected): wrong.append([name, word])
    print(json.dumps(wrong))
    """
    assert values(standin, n, REFERENCE + textwrap.dedent(code)) == [[]] * n


def test_sums_are_rounded_as_the_type_is(standin: Standin) -> None:
    """Random bits of every small float type: the sum of two is the rounded sum, to the bit."""
    code = """
    wrong = []
    for name in ("float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"):
        dtype = numpy_type(name)
        kind = np.uint16 if dtype.itemsize == 2 else np.uint8
        both = np.random.default_rng(3).integers(0, 1 << 8 * dtype.itemsize, (2, 30000)).astype(kind)
        x = gpu.put(both[rank])
        assert nccl.AllReduce(x, x, 30000, DTYPES.index(name), 0, comm, int(stream)) == 0
        check(driver.cuStreamSynchronize(stream))
        with np.errstate(all="ignore"):
            exact = np.add(*(row.view(dtype).astype(np.float32) for row in both))
            expected = exact.astype(dtype)
        got = gpu.get(x, both[0]).view(dtype)
        sure = np.isfinite(expected.astype(np.float32)) & np.isfinite(got.astype(np.float32))
        if dtype.itemsize == 2: sure = np.isfinite(exact)
        if not (got[sure].view(kind) == expected[sure].view(kind)).all() or sure.sum() < 20000: wrong.append(name)
    print(json.dumps(wrong))
    """
    assert values(standin, 2, REFERENCE + textwrap.dedent(code)) == [[], []]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("count", [1, 100_001])
def test_every_collective(standin: Standin, n: int, count: int) -> None:
    """Every other collective, every root, in and out of place, small and in many pieces, against NumPy."""
    code = """
    count, f = int(os.environ["COUNT"]), np.dtype(np.float32)
    own = lambda r, k=1: contribution(r, f, count * k, 7)
    every = np.concatenate([own(r) for r in range(n)])
    wrong = []
    def one(name, call, recv, size, expected, takes=True):
        y = gpu.put(np.full(size, -1, f)) if recv is None else recv
        assert call(y) == 0, nccl.error()
        check(driver.cuStreamSynchronize(stream))
        got = gpu.get(y, np.zeros(size, f))
        if not (got == (expected if takes else np.full(size, -1, f))).all(): wrong.append(name)
    s, x, big = int(stream), gpu.put(own(rank)), gpu.put(own(rank, n))
    total, whole = reduced("sum", f, count, n, 7), reduced("sum", f, count * n, n, 7)
    part = slice(rank * count, (rank + 1) * count)
    one("all_gather", lambda y: nccl.AllGather(x, y, count, 7, comm, s), None, count * n, every)
    inplace = gpu.put(np.concatenate([own(rank) if r == rank else np.zeros(count, f) for r in range(n)]))
    here = 4 * count * rank
    one("all_gather in place", lambda y: nccl.AllGather(y + here, y, count, 7, comm, s), inplace, count * n, every)
    one("reduce_scatter", lambda y: nccl.ReduceScatter(big, y, count, 7, 0, comm, s), None, count, whole[part])
    again = gpu.put(own(rank, n))
    scatter = lambda y: nccl.ReduceScatter(again, y, count, 7, 0, comm, s)
    one("reduce_scatter in place", scatter, again + here, count, whole[part])
    swapped = np.concatenate([own(r, n)[part] for r in range(n)])
    one("all_to_all", lambda y: nccl.AlltoAll(big, y, count, 7, comm, s), None, count * n, swapped)
    for root in range(n):
        is_root = rank == root
        one("broadcast", lambda y: nccl.Broadcast(x, y, count, 7, root, comm, s), None, count, own(root))
        one("bcast", lambda y: nccl.Bcast(y, count, 7, root, comm, s), gpu.put(own(rank)), count, own(root))
        one("reduce", lambda y: nccl.Reduce(x, y, count, 7, 0, root, comm, s), None, count, total, is_root)
        one("gather", lambda y: nccl.Gather(x, y, count, 7, root, comm, s), None, count * n, every, is_root)
        one("scatter", lambda y: nccl.Scatter(big, y, count, 7, root, comm, s), None, count, own(root, n)[part])
    print(json.dumps([wrong, nccl.CommDestroy(comm)]))
    """
    assert values(standin, n, REFERENCE + textwrap.dedent(code), env={"COUNT": str(count)}) == [[[], 0]] * n


def test_point_to_point(standin: Standin) -> None:
    """A ring in one group, several messages to one peer in order, one to oneself, and large ones."""
    code = """
    s, left, right = int(stream), (rank - 1) % n, (rank + 1) % n
    sizes = [3, 70_000, 1]
    sent = [gpu.put(np.full(size, 10 * rank + i, np.float32)) for i, size in enumerate(sizes)]
    got = [gpu.blank(4 * size) for size in sizes]
    own, mine = gpu.put(np.full(5, rank, np.float32)), gpu.blank(20)
    assert nccl.GroupStart() == 0
    for i, size in enumerate(sizes):
        assert nccl.Send(sent[i], size, 7, right, comm, s) == 0
    for i, size in enumerate(sizes):
        assert nccl.Recv(got[i], size, 7, left, comm, s) == 0
    assert nccl.Send(own, 5, 7, rank, comm, s) == nccl.Recv(mine, 5, 7, rank, comm, s) == 0
    assert nccl.GroupEnd() == 0
    check(driver.cuStreamSynchronize(stream))
    ok = all((gpu.get(got[i], np.zeros(size, np.float32)) == 10 * left + i).all() for i, size in enumerate(sizes))
    print(json.dumps([bool(ok), gpu.get(mine, np.zeros(5, np.float32)).tolist()]))
    """
    assert values(standin, 3, code) == [[True, [float(r)] * 5] for r in range(3)]


def test_premultiplied_sum(standin: Standin) -> None:
    """Each rank's own scalar, given at once or read from the device when the operation runs."""
    code = """
    s, answers = int(stream), []
    for residence in (1, 0):
        scalar = np.array([rank + 2], np.float32)
        place = scalar.ctypes.data if residence else gpu.put(scalar)
        op = ctypes.c_int()
        assert nccl.RedOpCreatePreMulSum(ctypes.byref(op), place, 7, residence, comm) == 0
        x = gpu.put(np.ones(10, np.float32))
        assert nccl.AllReduce(x, x, 10, 7, op, comm, s) == 0
        check(driver.cuStreamSynchronize(stream))
        answers.append(gpu.get(x, np.zeros(10, np.float32)).tolist() == [5.0] * 10)
        answers.append(nccl.AllReduce(x, x, 10, 6, op, comm, s))
        answers += [nccl.RedOpDestroy(op, comm), nccl.RedOpDestroy(op, comm), nccl.AllReduce(x, x, 10, 7, op, comm, s)]
    print(json.dumps(answers))
    """
    assert values(standin, 2, code) == [[True, 4, 0, 4, 4] * 2] * 2


def test_calls_return_before_the_work_is_done(standin: Standin) -> None:
    """Collectives queue up behind a held stream; operations on other streams follow in the order of the calls."""
    code = """
    x = gpu.put(np.ones(100, np.float32))
    assert nccl.AllReduce(x, x, 100, 7, 0, comm, int(stream)) == 0        # connects
    check(driver.cuStreamSynchronize(stream))
    other = gpu.stream()
    release = gpu.hold(stream)
    given = [nccl.AllReduce(x, x, 100, 7, 0, comm, int(s)) for s in (stream, other, stream)]
    held = [until(lambda: int(driver.cuStreamQuery(s)[0]) == 0, 0.2) for s in (other, stream)]
    release()
    check(driver.cuStreamSynchronize(stream)); check(driver.cuStreamSynchronize(other))
    print(json.dumps([given, held, float(gpu.get(x, np.zeros(100, np.float32))[99])]))
    """
    assert values(standin, 2, code) == [[[0, 0, 0], [False, False], 16.0]] * 2


def test_captured_operation_is_not_run(standin: Standin) -> None:
    """It succeeds, leaves the capture valid, and moves nothing."""
    code = """
    x, relaxed = gpu.put(np.ones(4, np.float32)), driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    given = [nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream))]
    check(driver.cuStreamBeginCapture(stream, relaxed))
    given.append(nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)))
    ended, graph = driver.cuStreamEndCapture(stream)
    check(driver.cuGraphDestroy(graph))
    check(driver.cuStreamSynchronize(stream))
    print(json.dumps([given, int(ended), float(gpu.get(x, np.zeros(4, np.float32))[0]), nccl.CommDestroy(comm)]))
    """
    assert values(standin, 2, code) == [[[0, 0], 0, 2.0, 0]] * 2


GRAPH = """
mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
x = gpu.put(np.ones(4, np.float32))
assert nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)) == 0
def instance():
    check(driver.cuStreamBeginCapture(stream, mode))
    assert nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)) == 0
    graph = check(driver.cuStreamEndCapture(stream))
    nodes = check(driver.cuGraphGetNodes(graph, int(driver.cuGraphGetNodes(graph)[2])))[0]
    kinds = [int(check(driver.cuGraphNodeGetType(node))) for node in nodes]
    made = check(driver.cuGraphInstantiate(graph, 0))
    check(driver.cuGraphUpload(made, stream))
    check(driver.cuGraphDestroy(graph))
    return made, kinds
made, kinds = instance()
"""


def test_graph_is_launched_again_and_again(standin: Standin) -> None:
    """Each launch is the operation, on the launching stream and in order with calls; its nodes have their kinds."""
    code = """
    other = gpu.stream()
    release = gpu.hold(other)
    check(driver.cuGraphLaunch(made, other))
    assert nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)) == 0
    check(driver.cuGraphLaunch(made, stream))
    held = until(lambda: int(driver.cuStreamQuery(stream)[0]) == 0, 0.2)
    release()
    check(driver.cuStreamSynchronize(stream))
    sum = float(gpu.get(x, np.zeros(4, np.float32))[0])
    check(driver.cuGraphExecDestroy(made))
    print(json.dumps([kinds, held, sum, int(driver.cuGraphLaunch(made, stream)[0]), nccl.CommDestroy(comm)]))
    """
    code = GRAPH + textwrap.dedent(code)
    assert values(standin, 2, code) == [[[6, 0, 7], False, 16.0, 400, 0]] * 2
    by_network = values(standin, 2, code, env={"STANDIN_TRANSPORT": "NET/Socket"})
    assert by_network == [[[6, 3, 0, 7], False, 16.0, 400, 0]] * 2


@pytest.mark.parametrize("end", ["CommDestroy", "CommAbort"])
def test_end_waits_for_graphs(standin: Standin, end: str) -> None:
    """Whatever ends the communicator waits until its graphs are destroyed; one in flight may be."""
    code = """
    release = gpu.hold(stream)
    check(driver.cuGraphLaunch(made, stream))
    ended = []
    t = threading.Thread(target=lambda: (check(driver.cuCtxSetCurrent(gpu.context)), ended.append(nccl.END(comm))))
    if "END" == "CommDestroy":
        release()
    t.start()
    t.join(0.3)
    before = list(ended)
    check(driver.cuGraphExecDestroy(made))
    release()
    t.join(10)
    print(json.dumps([before, ended]))
    """
    assert values(standin, 2, GRAPH + textwrap.dedent(code.replace("END", end))) == [[[], [0]]] * 2


def test_host_waits_where_many_launches_are_pending(standin: Standin) -> None:
    """As in truth, some 26 launches; a call that is no launch does not wait, and an abort frees the host."""
    code = """
    release = gpu.hold(stream)
    count = []
    def loop():
        check(driver.cuCtxSetCurrent(gpu.context))
        for _ in range(30):
            check(driver.cuGraphLaunch(made, stream)); count.append(1)
    t = threading.Thread(target=loop); t.start(); t.join(0.3)
    before = len(count)
    release()
    t.join(10)
    check(driver.cuGraphExecDestroy(made))
    print(json.dumps([before, len(count), nccl.CommDestroy(comm)]))
    """
    assert values(standin, 2, GRAPH + textwrap.dedent(code)) == [[26, 30, 0]] * 2


def test_graph_on_some_ranks_hangs(standin: Standin) -> None:
    """A launch on one rank and a call on the other are not one operation."""
    code = """
    check(driver.cuStreamSynchronize(stream))
    if rank:
        assert nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)) == 0
    else:
        check(driver.cuGraphLaunch(made, stream))
    done = until(lambda: int(driver.cuStreamQuery(stream)[0]) == 0, 0.3)
    check(driver.cuGraphExecDestroy(made))
    print(json.dumps([done, nccl.CommAbort(comm)]))
    """
    assert values(standin, 2, GRAPH + textwrap.dedent(code)) == [[False, 0]] * 2


def test_group_joins_and_forks_streams(standin: Standin) -> None:
    """One group over two streams starts when both are ready, and both wait for its end."""
    code = """
    x, y = gpu.put(np.ones(4, np.float32)), gpu.put(np.ones(4, np.float32))
    other = gpu.stream()
    release = gpu.hold(other)
    nccl.GroupStart()
    nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)); nccl.AllReduce(y, y, 4, 7, 0, comm, int(other))
    assert nccl.GroupEnd() == 0
    held = until(lambda: int(driver.cuStreamQuery(stream)[0]) == 0, 0.2)
    release()
    check(driver.cuStreamSynchronize(other))
    print(json.dumps([held, *[gpu.get(p, np.zeros(4, np.float32)).tolist() for p in (x, y)]]))
    """
    assert values(standin, 2, code) == [[False, [2.0] * 4, [2.0] * 4]] * 2


def test_first_collective_waits_for_the_others(standin: Standin, tmp_path: Path) -> None:
    """It connects inside the call, so it returns when the last rank calls too; connected at init, it does not wait."""
    code = """
    x = gpu.put(np.ones(1, np.float32))
    fifo = os.environ["FIFO"]
    if rank == 1:
        with open(fifo) as gate: gate.read()
    start = time.monotonic()
    done = threading.Event()
    if rank == 0:
        def open_gate():
            late = done.wait(0.3)
            with open(fifo, "w"): pass
            print(json.dumps("at once" if late else "waited"))
        opener = threading.Thread(target=open_gate); opener.start()
    assert nccl.AllReduce(x, x, 1, 7, 0, comm, int(stream)) == 0
    done.set()
    check(driver.cuStreamSynchronize(stream))
    if rank == 0: opener.join()
    else: print("0")
    """
    for lazy, expected in (("1", "waited"), ("0", "at once")):
        fifo = str(tmp_path / lazy)
        os.mkfifo(fifo)
        assert values(standin, 2, code, env={"FIFO": fifo, "NCCL_RUNTIME_CONNECT": lazy})[0] == expected


def test_zero_count_waits_for_nobody(standin: Standin) -> None:
    """A collective of nothing returns at once, on one rank alone."""
    code = """
    print(json.dumps([nccl.AllReduce(0, 0, 0, 7, 0, comm, int(stream)) if rank == 0 else 0,
                      int(driver.cuStreamQuery(stream)[0])]))
    """
    assert values(standin, 2, code) == [[0, 0], [0, 0]]


def test_answers_about_a_communicator(standin: Standin) -> None:
    """Count, rank, device and no error; destroyed and finalized as the truth does it."""
    code = """
    asked = [nccl.ask(q, comm) for q in ("CommCount", "CommUserRank", "CommCuDevice")]
    state, ended = nccl.state(comm), [nccl.CommFinalize(comm), nccl.CommFinalize(comm), nccl.CommDestroy(comm)]
    print(json.dumps([asked, state, *ended]))
    """
    assert values(standin, 3, code) == [[[3, r, r], 0, 0, 4, 0] for r in range(3)]


MPI = """
import os, sys
import numpy as np
from mpi4py import MPI
from helpers.standin_rank import *
world = MPI.COMM_WORLD
rank, n = world.rank, world.size
nccl, gpu = Nccl(), Gpu(rank)
unique = UniqueId.from_buffer_copy(world.bcast(bytes(nccl.unique_id()) if rank == 0 else None))
status, comm = nccl.init(n, unique, rank)
assert status == 0, nccl.error()
stream, x = gpu.stream(), gpu.put(np.full(1000, rank + 1, np.float32))
for _ in range(3):
    assert nccl.AllReduce(x, x, 1000, 7, 4, comm, int(stream)) == 0
check(driver.cuStreamSynchronize(stream))
print(gpu.get(x, np.zeros(1000, np.float32))[999], nccl.CommDestroy(comm))
"""


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
@pytest.mark.parametrize("n", [2, 4])
def test_ranks_of_an_mpi_job(standin: Standin, mpi: str, n: int) -> None:
    """Under mpirun, with the ID carried by MPI."""
    result = run_job(n, MPI, mpi=mpi, env=standin.env(), timeout=90)
    assert result.rc == 0, result.text
    assert [out.strip() for out in result.rank_out] == [f"{(n + 1) / 2} 0"] * n
