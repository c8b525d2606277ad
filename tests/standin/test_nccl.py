"""The stand-in for NCCL: ranks in processes of their own, the real driver bindings, the results and failures of the truth."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Mapping
from typing import Any

import pytest
from helpers.libnccl_files import real_library
from helpers.mpirun import run_job
from helpers.standin import Ended, Standin, build

HEAD = """
import ctypes, json, os, signal, sys, threading, time
import numpy as np
from helpers.standin_rank import *

rank, n = map(int, sys.argv[1:])
nccl = Nccl()
"""
INIT = """
gpu = Gpu(rank)
unique = first_id(nccl, rank)
status, comm = nccl.init(n, unique, rank)
assert status == 0, (status, nccl.error())
stream = gpu.stream()
"""
TRANSPORTS = ("P2P", "SHM", "NET/Socket", "NET/IB")


@pytest.fixture(scope="module")
def standin() -> Standin:
    """Return the build."""
    return build()


def start(
    standin: Standin,
    n: int,
    code: str,
    rank_env: Mapping[int, Mapping[str, str]] | None = None,
    init: str = INIT,
    timeout: float = 60.0,
    **env: str,
) -> list[Ended]:
    """Run a program on every rank; return how each ended."""
    text = HEAD + init + textwrap.dedent(code)
    return standin.run_ranks(n, text, env=env, rank_env=rank_env, timeout=timeout)


def values(*arguments: Any, **how: Any) -> list[Any]:
    """Run a program on every rank; return what each printed."""
    return [ended.value for ended in start(*arguments, **how)]


REFERENCE = """
import ml_dtypes
def numpy_type(name):
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)
def contribution(r, dtype, count, salt=0):
    return ((np.arange(count) * (r + 2) + salt) % 5 + 1).astype(dtype)
def reduced(op, dtype, count, n, salt=0):
    wide = np.stack([contribution(r, dtype, count, salt).astype(np.float64) for r in range(n)])
    with np.errstate(all="ignore"):
        out = {"sum": wide.sum(0), "prod": wide.prod(0), "max": wide.max(0), "min": wide.min(0), "avg": wide.mean(0)}[op]
    return np.trunc(out).astype(dtype) if dtype.kind in "iu" else out.astype(dtype)
def same(got, expected):
    if expected.dtype.kind in "iu": return bool((got == expected).all())
    return bool(np.allclose(got.astype(np.float64), expected.astype(np.float64), rtol=0.3 if expected.itemsize == 1 else 1e-2))
"""


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
    one("all_gather in place", lambda y: nccl.AllGather(y + 4 * count * rank, y, count, 7, comm, s), inplace, count * n, every)
    one("reduce_scatter", lambda y: nccl.ReduceScatter(big, y, count, 7, 0, comm, s), None, count, whole[part])
    again = gpu.put(own(rank, n))
    one("reduce_scatter in place", lambda y: nccl.ReduceScatter(again, y, count, 7, 0, comm, s), again + 4 * count * rank, count, whole[part])
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
    assert values(standin, n, REFERENCE + textwrap.dedent(code), COUNT=str(count)) == [[[], 0]] * n


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
    ok = all((gpu.get(g, np.zeros(size, np.float32)) == 10 * left + i).all() for i, (g, size) in enumerate(zip(got, sizes)))
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
    held = [int(driver.cuStreamQuery(s)[0]) for s in (stream, other)]
    release()
    check(driver.cuStreamSynchronize(stream)); check(driver.cuStreamSynchronize(other))
    print(json.dumps([given, held, float(gpu.get(x, np.zeros(100, np.float32))[99])]))
    """
    assert values(standin, 2, code) == [[[0, 0, 0], [600, 600], 16.0]] * 2


def test_group_joins_and_forks_streams(standin: Standin) -> None:
    """One group over two streams starts when both are ready, and both wait for its end."""
    code = """
    x, y = gpu.put(np.ones(4, np.float32)), gpu.put(np.ones(4, np.float32))
    other = gpu.stream()
    release = gpu.hold(other)
    nccl.GroupStart()
    nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)); nccl.AllReduce(y, y, 4, 7, 0, comm, int(other))
    assert nccl.GroupEnd() == 0
    held = int(driver.cuStreamQuery(stream)[0])
    release()
    check(driver.cuStreamSynchronize(other))
    print(json.dumps([held, gpu.get(x, np.zeros(4, np.float32)).tolist(), gpu.get(y, np.zeros(4, np.float32)).tolist()]))
    """
    assert values(standin, 2, code) == [[600, [2.0] * 4, [2.0] * 4]] * 2


def test_first_collective_waits_for_the_others(standin: Standin) -> None:
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
        fifo = str(standin.folder / f"gate-{os.getpid()}-{lazy}")
        os.mkfifo(fifo)
        try:
            assert values(standin, 2, code, FIFO=fifo, NCCL_RUNTIME_CONNECT=lazy)[0] == expected
        finally:
            os.unlink(fifo)


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
    print(json.dumps([asked, nccl.state(comm), nccl.CommFinalize(comm), nccl.CommFinalize(comm), nccl.CommDestroy(comm)]))
    """
    assert values(standin, 3, code) == [[[3, r, r], 0, 0, 4, 0] for r in range(3)]


# ---- non-blocking communicators, and starts that hang


def test_non_blocking_init(standin: Standin) -> None:
    """In progress, then ready; meanwhile nothing else may be called; operations are in progress for a while too."""
    code = """
    gpu = Gpu(rank); unique = first_id(nccl, rank); stream = gpu.stream()
    status, comm = nccl.init(n, unique, rank, CONFIG(blocking=0))
    x, size = gpu.put(np.ones(4, np.float32)), ctypes.c_int()
    early = [status, nccl.state(comm), nccl.CommCount(comm, ctypes.byref(size))]
    if rank == 0: early.append(nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)))
    ready = until(lambda: nccl.state(comm) != 7)
    after = [ready, nccl.state(comm), nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream))]
    after += [until(lambda: nccl.state(comm) == 0)]
    check(driver.cuStreamSynchronize(stream))
    print(json.dumps([early, after, float(gpu.get(x, np.zeros(4, np.float32))[0])]), flush=True)
    """
    first, second = values(standin, 2, code, init="", STANDIN_FAULTS="1@ncclCommInitRankConfig=sleep400")
    assert first == [[7, 7, 4, 4], [True, 0, 7, True], 2.0]
    assert second[1:] == [[True, 0, 7, True], 2.0]


@pytest.mark.parametrize("blocking", [0, 1])
def test_init_whose_peer_never_comes_is_aborted(standin: Standin, blocking: int) -> None:
    """Nothing is ever reported; an abort ends it at once, from another thread too, and a new start works."""
    code = f"""
    gpu = Gpu(rank); unique = first_id(nccl, rank)
    comm, answer = ctypes.c_void_p(), []
    def stuck():
        check(driver.cuCtxSetCurrent(gpu.context))
        config = CONFIG(blocking={blocking})
        answer.append(nccl.CommInitRankConfig(ctypes.byref(comm), 2, unique, 0, ctypes.byref(config)))
    thread = threading.Thread(target=stuck); thread.start()
    assert until(lambda: comm.value is not None)
    states = set()
    until(lambda: states.add(nccl.state(comm)), 0.2)
    handle, start = ctypes.c_void_p(comm.value), time.monotonic()
    aborted = nccl.CommAbort(handle); took = time.monotonic() - start
    thread.join()
    again, fresh = nccl.init(1, nccl.unique_id(), 0)
    print(json.dumps([sorted(states), aborted, took < 1, answer, again, nccl.CommDestroy(fresh)]))
    """
    expected = [[7], 0, True, [7], 0, 0] if blocking == 0 else [[0], 0, True, [3], 0, 0]
    assert values(standin, 1, code, init="") == [expected]


def test_init_that_hangs_by_injection(standin: Standin) -> None:
    """The rank itself is stuck, and so are the others; all can abort."""
    code = """
    gpu = Gpu(rank); unique = first_id(nccl, rank)
    status, comm = nccl.init(n, unique, rank, CONFIG(blocking=0))
    came = until(lambda: nccl.state(comm) != 7, 0.3)
    print(json.dumps([status, came, nccl.CommAbort(comm)]))
    """
    found = values(standin, 2, code, init="", STANDIN_FAULTS="1@ncclCommInitRankConfig=hang")
    assert found == [[7, False, 0]] * 2


def test_connecting_to_a_maker_that_is_gone(standin: Standin) -> None:
    """An ID whose process has ended gives a remote error after the time for connecting."""
    code = """
    gpu = Gpu(0)
    made = os.popen(f"{sys.executable} -c 'from helpers.standin_rank import *; print(bytes(Nccl().unique_id()).hex())'").read()
    status, comm = nccl.init(1, UniqueId.from_buffer_copy(bytes.fromhex(made)), 0)
    print(json.dumps([status, "Connection refused" in nccl.error(), comm.value is not None, nccl.CommAbort(comm)]))
    """
    code = code.replace("gpu = Gpu(0)", "gpu = Gpu(0); print(flush=True)")
    assert values(standin, 1, code, init="", STANDIN_CONNECT_MS="100") == [[6, True, True, 0]]


@pytest.mark.parametrize("what", ["size", "rank"])
def test_ranks_that_do_not_agree_wait_for_ever(standin: Standin, what: str) -> None:
    """Another size, or one rank twice: nobody gets an error."""
    wrong = "n + 1, unique, rank" if what == "size" else "n, unique, 0"
    code = f"""
    gpu = Gpu(rank); unique = first_id(nccl, rank)
    status, comm = nccl.init(*(({wrong}) if rank == 1 else (n, unique, rank)), CONFIG(blocking=0))
    print(json.dumps([until(lambda: nccl.state(comm) != 7, 0.3), nccl.CommAbort(comm)]))
    """
    assert values(standin, 2, code, init="") == [[False, 0]] * 2


DUPLICATE = """
gpu = Gpu(0 if rank < 2 else 1); unique = first_id(nccl, rank)
status, comm = nccl.init(n, unique, rank, CONFIG(blocking=0))
until(lambda: nccl.state(comm) != 7, 1.0)
state = nccl.state(comm)
print(json.dumps([state, "Duplicate GPU" in nccl.error(), nccl.CommAbort(comm)]))
"""


@pytest.mark.parametrize(
    ("version", "states"), [(21805, [5, 5, 7]), (22809, [5, 5, 7]), (23003, [5, 7, 7]), (23007, [5, 5, 5]), (23203, [5] * 3)]
)
def test_two_ranks_on_one_gpu_are_refused(standin: Standin, version: int, states: list[int]) -> None:
    """By UUID, with the status that each version gives to each rank."""
    found = values(standin, 3, DUPLICATE, init="", STANDIN_NCCL_VERSION=str(version))
    assert [row[0] for row in found] == states


@pytest.mark.parametrize(
    ("version", "env", "host_ids", "state"),
    [
        (23203, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, False, 0),
        (22809, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, False, 5),
        (22809, {}, True, 0),
    ],
)
def test_one_gpu_may_be_shared(
    standin: Standin, version: int, env: dict[str, str], host_ids: bool, state: int
) -> None:
    """With NCCL's own switch from 2.30 on, or where ranks say that they are on different hosts."""
    rank_env = {rank: {"NCCL_HOSTID": f"host{rank}"} for rank in range(2)} if host_ids else {}
    found = values(standin, 2, DUPLICATE, rank_env, init="", STANDIN_NCCL_VERSION=str(version), **env)
    assert [row[0] for row in found] == [state] * 2


def test_versions_that_differ_are_refused(standin: Standin) -> None:
    """Every rank gets the same status."""
    code = """
    gpu = Gpu(rank); status, comm = nccl.init(n, first_id(nccl, rank), rank)
    print(json.dumps([status, "Mismatched NCCL version" in nccl.error()]))
    """
    assert values(standin, 2, code, {1: {"STANDIN_NCCL_VERSION": "22809"}}, init="") == [[5, True]] * 2


# ---- failure


def test_abort_ends_a_collective_that_waits(standin: Standin) -> None:
    """A rank that never comes: the other's stream waits, an abort ends it with success, although the data is wrong."""
    code = """
    x = gpu.put(np.ones(4, np.float32))
    assert nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)) == 0
    check(driver.cuStreamSynchronize(stream))
    if rank == 0:
        assert nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)) == 0
        done = until(lambda: int(driver.cuStreamQuery(stream)[0]) == 0, 0.2)
        answer = [done, nccl.state(comm)]
        waiter = []
        def wait():
            check(driver.cuCtxSetCurrent(gpu.context)); waiter.append(int(driver.cuStreamSynchronize(stream)[0]))
        t = threading.Thread(target=wait); t.start()
        start = time.monotonic()
        answer += [nccl.CommAbort(comm), time.monotonic() - start < 1]
        t.join()
        print(json.dumps([*answer, waiter, gpu.get(x, np.zeros(4, np.float32)).tolist()]))
    else:
        print(json.dumps(nccl.CommAbort(comm)))
    """
    assert values(standin, 2, code) == [[False, 0, 0, True, [0], [2.0] * 4], 0]


@pytest.mark.parametrize(
    "other",
    [
        "nccl.AllReduce(x, x, 3, 7, 0, comm, s)",
        "nccl.AllReduce(x, x, 4, 2, 0, comm, s)",
        "nccl.AllReduce(x, x, 4, 7, 2, comm, s)",
        "nccl.AllGather(x, y, 4, 7, comm, s)",
        "nccl.Broadcast(x, x, 4, 7, 1, comm, s)",
    ],
)
def test_operations_that_differ_hang_and_never_say_so(standin: Standin, other: str) -> None:
    """Another count, type, operation or root: no error, no end, until all abort."""
    mine = "nccl.Broadcast(x, x, 4, 7, 0, comm, s)" if "Broadcast" in other else "nccl.AllReduce(x, x, 4, 7, 0, comm, s)"
    code = f"""
    x, y, s = gpu.put(np.ones(16, np.float32)), gpu.blank(256), int(stream)
    assert ({mine} if rank == 0 else {other}) == 0
    done = until(lambda: int(driver.cuStreamQuery(stream)[0]) == 0, 0.3)
    print(json.dumps([done, nccl.state(comm), nccl.CommAbort(comm), int(driver.cuStreamQuery(stream)[0])]))
    """
    assert values(standin, 2, code) == [[False, 0, 0, 0]] * 2


@pytest.mark.parametrize(("transport", "state"), [("P2P", 0), ("SHM", 0), ("NET/Socket", 6), ("NET/IB", 6)])
@pytest.mark.parametrize("end", ["kill", "exit"])
def test_peer_that_dies(standin: Standin, transport: str, state: int, end: str) -> None:
    """A network tells the survivors within a second; memory shared between processes of a host never does."""
    code = """
    x = gpu.put(np.ones(4, np.float32))
    given = [nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)) for _ in range(3)]
    until(lambda: nccl.state(comm) != 0, 1.0)
    busy = int(driver.cuStreamQuery(stream)[0])
    print(json.dumps([given, nccl.state(comm), busy, nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)), nccl.CommAbort(comm)]))
    """
    faults = f"1@collective#2={end}"
    survivor, dead = start(standin, 2, code, STANDIN_TRANSPORT=transport, STANDIN_FAULTS=faults)
    assert dead.rc == (-9 if end == "kill" else 17)
    assert survivor.value == [[0, 0, 0], state, 600, state, 0]


def test_peer_that_dies_is_never_told_by_the_oldest(standin: Standin) -> None:
    """NCCL 2.18 does not report network errors."""
    code = """
    x = gpu.put(np.ones(4, np.float32))
    for _ in range(3): nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream))
    print(json.dumps([until(lambda: nccl.state(comm) != 0, 0.5), nccl.CommAbort(comm)]))
    """
    env = {"STANDIN_NCCL_VERSION": "21805", "STANDIN_FAULTS": "1@collective#2=kill", "STANDIN_TRANSPORT": "NET/Socket"}
    assert start(standin, 2, code, **env)[0].value == [False, 0]


@pytest.mark.parametrize(
    ("faults", "given", "state", "right"),
    [
        ("", [0, 0, 0], 0, True),
        ("ncclAllReduce#2=5", [0, 5, 0], 0, True),
        ("ncclAllReduce#2=remote", [0, 6, 6], 6, None),
        ("collective#2=remote", [0, 0, 0], 6, None),
        ("collective#3=wrong", [0, 0, 0], 0, False),
        ("0@collective#1=sleep100", [0, 0, 0], 0, True),
        ("ncclGetUniqueId#2=2,ncclCommCount=3", [0, 0, 0], 0, True),
    ],
)
def test_injected_faults(standin: Standin, faults: str, given: list[int], state: int, right: bool | None) -> None:
    """A status of a call, an asynchronous error, a wrong result and a delay come where they were asked for."""
    code = """
    x = gpu.put(np.ones(4, np.float32))
    given = [nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)) for _ in range(3)]
    done = until(lambda: int(driver.cuStreamQuery(stream)[0]) == 0 or nccl.state(comm) != 0)
    state, right = nccl.state(comm), None
    if state == 0:
        right = gpu.get(x, np.zeros(4, np.float32)).tolist() == [2.0 ** given.count(0)] * 4
    print(json.dumps([given, state, right, nccl.CommAbort(comm)]))
    """
    assert values(standin, 2, code, STANDIN_FAULTS=faults) == [[given, state, right, 0]] * 2


def test_wrong_rank_and_slow_abort_by_injection(standin: Standin) -> None:
    """NCCL's own answer can be made wrong; an abort can be made slow."""
    code = """
    start = time.monotonic()
    print(json.dumps([nccl.ask("CommUserRank", comm), nccl.CommAbort(comm), time.monotonic() - start > 0.25]))
    """
    assert values(standin, 2, code, STANDIN_FAULTS="0@ncclCommUserRank=wrong,ncclCommAbort=sleep300") == [
        [1, 0, True],
        [1, 0, True],
    ]


def test_buffer_that_is_no_device_memory_breaks_the_device(standin: Standin) -> None:
    """As an illegal access in a kernel: told by the stream, and everywhere after."""
    code = """
    host = np.ones(4, np.float32)
    given = nccl.AllReduce(host.ctypes.data, host.ctypes.data, 4, 7, 0, comm, int(stream))
    print(json.dumps([given, int(driver.cuStreamSynchronize(stream)[0]), nccl.AllReduce(8, 8, 4, 7, 0, comm, int(stream)),
                      "illegal memory access" in nccl.error()]))
    """
    assert values(standin, 2, code) == [[0, 700, 1, True]] * 2


# ---- families, groups, arguments


def test_split(standin: Standin) -> None:
    """Colours part the ranks, keys order them, no colour gives no child; the children work beside their parent."""
    code = """
    child = ctypes.c_void_p(1)
    color, key = (-1, 0) if rank == 3 else (rank % 2, -rank)
    status = nccl.CommSplit(comm, color, key, ctypes.byref(child), None)
    x = gpu.put(np.full(4, rank + 1, np.float32))
    answer = [status, child.value is None]
    if child:
        answer += [nccl.ask("CommCount", child), nccl.ask("CommUserRank", child)]
        assert nccl.AllReduce(x, x, 4, 7, 0, child, int(stream)) == 0
    assert nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)) == 0
    check(driver.cuStreamSynchronize(stream))
    print(json.dumps([*answer, float(gpu.get(x, np.zeros(4, np.float32))[0])]))
    """
    total = (1 + 3) * 2 + 2 + 4
    assert values(standin, 4, code) == [
        [0, False, 2, 1, total],
        [0, False, 1, 0, total],
        [0, False, 2, 0, total],
        [0, True, total],
    ]


def test_blocking_child_of_a_non_blocking_parent(standin: Standin) -> None:
    """The parent is polled, the child then answers at once; the parent may go."""
    code = """
    gpu = Gpu(rank); unique = first_id(nccl, rank); stream = gpu.stream()
    status, parent = nccl.init(n, unique, rank, CONFIG(blocking=0))
    assert until(lambda: nccl.state(parent) == 0)
    child, config = ctypes.c_void_p(), CONFIG(blocking=1)
    split = nccl.CommSplit(parent, 0, rank, ctypes.byref(child), ctypes.byref(config))
    assert until(lambda: nccl.state(parent) == 0)
    gone = nccl.CommAbort(parent)
    x = gpu.put(np.ones(4, np.float32))
    given = nccl.AllReduce(x, x, 4, 7, 0, child, int(stream))
    check(driver.cuStreamSynchronize(stream))
    print(json.dumps([split, gone, given, float(gpu.get(x, np.zeros(4, np.float32))[0]), nccl.CommDestroy(child)]))
    """
    assert values(standin, 2, code, init="") == [[7, 0, 0, 2.0, 0]] * 2


@pytest.mark.parametrize("way", ["shrink", "revoke", "reconnect"])
def test_survivors_go_on(standin: Standin, way: str) -> None:
    """Of three ranks one is killed with an operation under way: the two others make a communicator and compute."""
    code = """
    x = gpu.put(np.ones(4, np.float32))
    given = nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream))
    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    assert nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)) == 0
    child, lost, way = ctypes.c_void_p(), (ctypes.c_int * 1)(1), os.environ["WAY"]
    if way == "revoke": assert nccl.CommRevoke(comm, 0) == 0
    if way != "reconnect":
        assert nccl.CommShrink(comm, lost, 1, ctypes.byref(child), None, 0 if way == "revoke" else 1) == 0, nccl.error()
        refused = nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream))
        answer = [refused, nccl.ask("CommCount", child), nccl.ask("CommUserRank", child)]
    else:
        assert nccl.CommAbort(comm) == 0
        path = os.environ["MEETING"]
        if rank == 0:
            fresh = nccl.unique_id()
            with open(path, "wb") as file: file.write(bytes(fresh))
        else:
            with open(path, "rb") as file: fresh = UniqueId.from_buffer_copy(file.read())
        status, child = nccl.init(2, fresh, rank // 2)
        answer = [5, nccl.ask("CommCount", child), nccl.ask("CommUserRank", child)]
    y = gpu.put(np.full(4, rank + 1, np.float32))
    assert nccl.AllReduce(y, y, 4, 7, 0, child, int(stream)) == 0
    check(driver.cuStreamSynchronize(stream))
    print(json.dumps([*answer, float(gpu.get(y, np.zeros(4, np.float32))[0]), nccl.CommDestroy(child)]))
    """
    fifo = str(standin.folder / f"meeting-{os.getpid()}-{way}")
    os.mkfifo(fifo)
    try:
        ends = start(standin, 3, code, WAY=way, MEETING=fifo)
    finally:
        os.unlink(fifo)
    assert [ends[0].value, ends[2].value] == [[5, 2, 0, 4.0, 0], [5, 2, 1, 4.0, 0]]


def test_arguments_are_checked(standin: Standin) -> None:
    """Wrong types, operations, roots, lists and colours are invalid arguments, each with a text, and spoil nothing."""
    code = """
    x, s, out = gpu.put(np.ones(4, np.float32)), int(stream), ctypes.c_void_p()
    lists = [(ctypes.c_int * 1)(v) for v in (rank, 9)]
    found = [nccl.AllReduce(x, x, 4, 12, 0, comm, s), nccl.AllReduce(x, x, 4, 7, 5, comm, s),
             nccl.AllReduce(x, x, 4, -1, 0, comm, s), nccl.Broadcast(x, x, 4, 7, 2, comm, s),
             nccl.Send(x, 4, 7, -1, comm, s), nccl.CommSplit(comm, -2, 0, ctypes.byref(out), None),
             *[nccl.CommShrink(comm, l, 1, ctypes.byref(out), None, 0) for l in lists],
             nccl.CommRevoke(comm, 1), nccl.RedOpDestroy(0, comm)]
    print(json.dumps([found, nccl.state(comm), nccl.CommDestroy(comm)]))
    """
    assert values(standin, 2, code) == [[[4] * 10, 0, 0]] * 2


def test_wrong_argument_spoils_a_non_blocking_communicator(standin: Standin) -> None:
    """The call had no effect, and yet every later one fails; float8 needs NCCL 2.24."""
    code = """
    gpu = Gpu(rank); unique = first_id(nccl, rank)
    status, comm = nccl.init(n, unique, rank, CONFIG(blocking=0))
    assert until(lambda: nccl.state(comm) == 0)
    x = gpu.put(np.ones(4, np.float32))
    wrong = nccl.AllReduce(x, x, 4, 10, 0, comm, 0)
    print(json.dumps([wrong, nccl.state(comm), nccl.AllReduce(x, x, 4, 7, 0, comm, 0)]))
    """
    assert values(standin, 1, code, init="", STANDIN_NCCL_VERSION="22304") == [[4, 4, 4]]


def test_error_in_a_group_drops_it(standin: Standin) -> None:
    """It is told by the call and by the end, nothing of the group runs, and the thread is out of the group."""
    code = """
    x = gpu.put(np.ones(4, np.float32))
    nccl.GroupStart(); nccl.GroupStart()
    found = [nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)), nccl.AllReduce(x, x, 4, 99, 0, comm, int(stream))]
    found += [nccl.GroupEnd(), nccl.GroupEnd(), nccl.GroupEnd()]
    found.append(nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)))
    check(driver.cuStreamSynchronize(stream))
    print(json.dumps([found, float(gpu.get(x, np.zeros(4, np.float32))[0])]))
    """
    assert values(standin, 2, code) == [[[0, 4, 0, 4, 5, 0], 2.0]] * 2


def test_configuration_is_checked(standin: Standin) -> None:
    """Magic, size, version and fields, as the library reads them."""
    code = """
    gpu = Gpu(rank); unique = first_id(nccl, rank)
    def attempt(**fields):
        status, comm = nccl.init(1, nccl.unique_id(), 0, CONFIG(**fields))
        return status
    print(json.dumps([attempt(), attempt(magic=1), attempt(blocking=-1), attempt(blocking=2), attempt(min_ctas=1),
                      attempt(min_ctas=1, max_ctas=2), attempt(max_ctas=0), attempt(split_share=-1),
                      attempt(split_share=1), attempt(blocking=-1, version=21300), attempt(net_name=b"socket"),
                      attempt(net_name=b"IB"), attempt(blocking=0)]))
    """
    assert values(standin, 1, code, init="") == [[0, 4, 4, 4, 4, 0, 4, 4, 0, 0, 0, 5, 7]]


def test_newer_fields_are_read_by_size_and_version(standin: Standin) -> None:
    """A field in padding counts for a library that knows it, and not where the version says that the caller does not."""
    code = """
    gpu = Gpu(rank); unique = first_id(nccl, rank)
    class Long(ctypes.Structure):
        _fields_ = (("first", Config), ("comm_name", ctypes.c_char_p), ("rest", ctypes.c_int * 16))
    def attempt(version, **first):
        long = Long(CONFIG(size=ctypes.sizeof(Long), version=version, **first), None, (ctypes.c_int * 16)(*[-2**31] * 16))
        long.rest[0] = 7                                # collnetEnable, which takes 0 and 1
        comm = ctypes.c_void_p()
        return nccl.CommInitRankConfig(ctypes.byref(comm), 1, nccl.unique_id(), 0, ctypes.byref(long))
    print(json.dumps([attempt(22700), attempt(22600)]))
    """
    assert values(standin, 1, code, init="", STANDIN_NCCL_VERSION="23203") == [[4, 0]]
    assert values(standin, 1, code, init="", STANDIN_NCCL_VERSION="22603") == [[0, 0]]


PROBE = """
import ctypes as C, json, os
lib = C.CDLL(os.environ["NCCL_LIBRARY"])
lib.ncclGetErrorString.restype = lib.ncclGetLastError.restype = C.c_char_p
class Uid(C.Structure): _fields_ = [("b", C.c_ubyte * 128)]
def last(): return lib.ncclGetLastError(None).decode()
v, u, comm, handle = C.c_int(), Uid(), C.c_void_p(0x1234), C.c_void_p()
found = {"fresh": last(), "version": [lib.ncclGetVersion(C.byref(v)), v.value, lib.ncclGetVersion(None)]}
found["texts"] = [lib.ncclGetErrorString(i).decode() for i in (*range(9), -1, 99)]
found["id"] = [lib.ncclGetUniqueId(C.byref(u)), list(bytes(u)[8:10]), sum(bytes(u)[64:]), lib.ncclGetUniqueId(None), last()]
found["group"] = [lib.ncclGroupStart(), lib.ncclGroupEnd(), lib.ncclGroupEnd(), last()]
found["nulls"] = [getattr(lib, "ncclComm" + f)(*a) for f, a in (("Destroy", [None]), ("Abort", [None]), ("Finalize", [None]), ("Revoke", [None, 0]))]
found["async"] = [lib.ncclCommGetAsyncError(None, C.byref(v)), last()]
found["count"] = [lib.ncclCommCount(None, C.byref(v)), last()]
found["reduce"] = [lib.ncclAllReduce(None, None, C.c_size_t(1), 7, 0, None, None), last(), lib.ncclGroupEnd()]
found["register"] = [lib.ncclCommRegister(None, None, C.c_size_t(0), C.byref(handle)), last()]
found["builtin"] = [lib.ncclRedOpDestroy(0, None), last()]
found["simulate"] = [lib.ncclGroupSimulateEnd(None), last()]
found["alloc"] = [lib.ncclMemAlloc(C.byref(handle), C.c_size_t(64)), handle.value, last()]
found["init"] = [lib.ncclCommInitRank(C.byref(comm), 1, u, 0), lib.ncclGroupEnd()]
comm = C.c_void_p()
found["leak"] = [lib.ncclCommInitRankConfig(C.byref(comm), 1, u, 0, None), comm.value, lib.ncclGroupEnd(), lib.ncclGroupEnd()]
print(json.dumps(found))
"""


def test_without_a_driver_it_answers_as_the_real_library(standin: Standin, tmp_path: Any) -> None:
    """Every call that needs no GPU: the same statuses, texts and leaked group as the real NCCL of that version."""
    real = real_library()
    absent = {"LD_LIBRARY_PATH": str(tmp_path), "NCCL_LIBRARY": str(real)}
    truth = standin.run(PROBE, env=absent)
    own = {**absent, "NCCL_LIBRARY": str(standin.nccl), "STANDIN_NCCL_VERSION": str(truth["version"][1])}
    assert standin.run(PROBE, env=own) == truth


def test_older_versions_know_fewer_results(standin: Standin) -> None:
    """``ncclTimeout`` came with 2.30."""
    code = "print(json.dumps([nccl.GetErrorString(i).decode() for i in (7, 8)]))"
    code = f"print(flush=True)\n{code}"
    assert values(standin, 1, code, init="", STANDIN_NCCL_VERSION="22809")[0] == ["NCCL operation in progress", "unknown result code"]


# ---- registration, the log, and what is left


def test_memory_and_registration(standin: Standin) -> None:
    """The allocator's memory works in operations; handles are of one communicator; windows want its memory."""
    code = """
    x, handle, window = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    found = [nccl.MemAlloc(ctypes.byref(x), 8192)]
    found += [nccl.CommRegister(comm, x, 8192, ctypes.byref(handle)), handle.value is not None]
    found += [nccl.CommWindowRegister(comm, x, 4096, ctypes.byref(window), 1), window.value is not None]
    found += [nccl.CommWindowDeregister(comm, window), nccl.CommDeregister(comm, handle), nccl.CommDeregister(comm, handle)]
    plain = gpu.blank(8192)
    found += [nccl.CommWindowRegister(comm, plain, 4096, ctypes.byref(window), 1), window.value is None]
    found += [nccl.CommRegister(comm, 4096, 16, ctypes.byref(handle))]
    check(driver.cuMemsetD32(x.value, 0x3f800000, 4))
    assert nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)) == 0
    check(driver.cuStreamSynchronize(stream))
    found += [gpu.get(x.value, np.zeros(4, np.float32)).tolist() == [2.0] * 4]
    nccl.MemFree.argtypes = [ctypes.c_void_p]
    found += [nccl.MemFree(x), nccl.MemFree(x), nccl.MemFree(plain)]
    print(json.dumps(found))
    """
    expected = [0, 0, True, 0, True, 0, 0, 5, 0, True, 4, True, 0, 4, 4]
    assert values(standin, 2, code) == [expected] * 2


PREFIX = re.compile(
    r"^(?:(?P<ts>\[[^\]]*\]) ?)?(?P<host>[^\s:]+):(?P<pid>\d+):(?P<tid>-?\d+) (?:\[(?P<dev>-?\d+)\] )?"
    r"(?:(?P<src>\S+:\d+) )?(?:\((?P<func>[^)]*)\) )?NCCL (?P<level>INFO|WARN|ATTN|TRACE|CALL) (?P<msg>.*)$"
)
P2P = re.compile(r"^Channel (\d+)/(\d+) : (\d+)\[(\d+)\] -> (\d+)\[(\d+)\] via P2P/CUMEM$")
SHM = re.compile(r"^Channel (\d+) : (\d+)\[(\d+)\] -> (\d+)\[(\d+)\] via SHM/direct(/direct)?$")
NET = re.compile(r"^Channel (\d+)/(\d+) : (\d+)\[(\d+)\] -> (\d+)\[(\d+)\] \[(send|receive)\] via NET/(Socket|IB)/0$")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_log_names_the_transport(standin: Standin, transport: str, tmp_path: Any) -> None:
    """Lines of NCCL's form, in the file of each process, when the first operation connects."""
    code = """
    def lines():
        with open(f"{os.environ['FOLDER']}/{os.uname().nodename.split('.')[0]}.{os.getpid()}") as file: return file.read().splitlines()
    early = lines()
    x = gpu.put(np.ones(4, np.float32))
    assert nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)) == 0
    check(driver.cuStreamSynchronize(stream)); nccl.CommDestroy(comm)
    print(json.dumps([early, lines()]))
    """
    env = {"NCCL_DEBUG": "info", "NCCL_DEBUG_FILE": f"{tmp_path}/%h.%p", "FOLDER": str(tmp_path)}
    for rank, (early, late) in enumerate(values(standin, 2, code, STANDIN_TRANSPORT=transport, **env)):
        matches = [match for line in late if (match := PREFIX.match(line))]
        assert len(matches) == len(late) and {match["dev"] for match in matches} == {str(rank)}
        texts = [match["msg"] for match in matches]
        network = "IB" if transport == "NET/IB" else "Socket"
        assert f"Using network {network}" in texts
        assert not [line for line in early if "Channel" in line]
        channels = [text for text in texts if text.startswith("Channel")]
        form = P2P if transport == "P2P" else SHM if transport == "SHM" else NET
        assert channels and all(form.match(text) for text in channels), channels
        if form is NET:
            assert {form.match(text)[8] for text in channels} == {network}  # type: ignore[index]
            assert {form.match(text)[7] for text in channels} == {"send", "receive"}  # type: ignore[index]
        assert any(re.search(rf"rank {rank} nranks 2 .* - Init COMPLETE$", text) for text in texts)


def test_hosts_are_connected_by_the_network(standin: Standin) -> None:
    """Two ranks on each of two hosts: memory within, the network between; only rank 0 says the version at level VERSION."""
    code = """
    x = gpu.put(np.ones(4, np.float32))
    assert nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)) == 0
    check(driver.cuStreamSynchronize(stream))
    print(json.dumps(0))
    """
    rank_env = {rank: {"NCCL_HOSTID": f"host{rank // 2}"} for rank in range(4)}
    ends = start(standin, 4, code, rank_env, NCCL_DEBUG="INFO")
    ways = [sorted(set(re.findall(r"Channel \S+ : (\d\[\d\] -> \d\[\d\]) .*via (\S+)", end.out))) for end in ends]
    assert ways[0] == [("0[0] -> 1[1]", "P2P/CUMEM"), ("3[3] -> 0[0]", "NET/Socket/0")]
    assert ways[1] == [("1[1] -> 2[2]", "NET/Socket/0")]
    quiet = start(standin, 2, code, NCCL_DEBUG="VERSION")
    assert ["NCCL version 2.32.3" in end.out for end in quiet] == [True, False]


@pytest.mark.parametrize(
    ("env", "status"),
    [({}, 0), ({"NCCL_NET": "socket"}, 0), ({"NCCL_NET": "IB"}, 5), ({"NCCL_NET": "IB", "STANDIN_NETWORK": "IB"}, 0)],
)
def test_network_that_is_not_there_is_refused(standin: Standin, env: dict[str, str], status: int) -> None:
    """A network by name must exist; none by name falls back without a word."""
    code = "gpu = Gpu(0); first_id(nccl, 0)\nprint(json.dumps(nccl.init(1, nccl.unique_id(), 0)[0]))"
    assert values(standin, 1, code, init="", **env) == [status]


def test_nothing_is_left(standin: Standin) -> None:
    """Neither in /dev/shm nor in /tmp, also when ranks are killed in the middle of a start."""
    before = {folder: set(os.listdir(folder)) for folder in ("/dev/shm", "/tmp")}
    code = """
    gpu = Gpu(rank); unique = first_id(nccl, rank)
    status, comm = nccl.init(n + 1, unique, rank, CONFIG(blocking=0))
    os.kill(os.getpid(), signal.SIGKILL)
    """
    assert [end.rc for end in start(standin, 2, code, init="")] == [-9, -9]
    for folder, names in before.items():
        assert not [name for name in set(os.listdir(folder)) - names if "standin" in name or "nccl" in name]


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
