"""The stand-in for NCCL: starts, and starts that hang or are refused."""

from __future__ import annotations

import pytest
from helpers.standin import Standin
from helpers.standin_ranks import values


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
    first, second = values(standin, 2, code, init="", env={"STANDIN_FAULTS": "1@ncclCommInitRankConfig=sleep400"})
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


def test_scalable_init(standin: Standin) -> None:
    """Several IDs make one communicator; none, or more than ranks, are refused."""
    code = """
    gpu = Gpu(rank); first = first_id(nccl, rank)
    comm, ids = ctypes.c_void_p(), (UniqueId * 2)(first, first)
    def attempt(count):
        return nccl.CommInitRankScalable(ctypes.byref(comm), n, rank, count, ctypes.addressof(ids), None)
    print(json.dumps([attempt(0), attempt(3), attempt(2), nccl.ask("CommUserRank", comm)]))
    """
    assert values(standin, 2, code, init="") == [[4, 4, 0, 0], [4, 4, 0, 1]]


def test_init_that_hangs_by_injection(standin: Standin) -> None:
    """The rank itself is stuck, and so are the others; all can abort."""
    code = """
    gpu = Gpu(rank); unique = first_id(nccl, rank)
    status, comm = nccl.init(n, unique, rank, CONFIG(blocking=0))
    came = until(lambda: nccl.state(comm) != 7, 0.3)
    print(json.dumps([status, came, nccl.CommAbort(comm)]))
    """
    found = values(standin, 2, code, init="", env={"STANDIN_FAULTS": "1@ncclCommInitRankConfig=hang"})
    assert found == [[7, False, 0]] * 2


def test_connecting_to_a_maker_that_is_gone(standin: Standin) -> None:
    """An ID whose process has ended gives a remote error after the time for connecting."""
    code = """
    gpu = Gpu(0)
    maker = "from helpers.standin_rank import *; print(bytes(Nccl().unique_id()).hex())"
    made = os.popen(f"{sys.executable} -c '{maker}'").read()
    status, comm = nccl.init(1, UniqueId.from_buffer_copy(bytes.fromhex(made)), 0)
    print(json.dumps([status, "Connection refused" in nccl.error(), comm.value is not None, nccl.CommAbort(comm)]))
    """
    code = code.replace("gpu = Gpu(0)", "gpu = Gpu(0); print(flush=True)")
    assert values(standin, 1, code, init="", env={"STANDIN_CONNECT_MS": "100"}) == [[6, True, True, 0]]


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
    ("version", "states"),
    [(21805, [5, 5, 7]), (22809, [5, 5, 7]), (23003, [5, 7, 7]), (23007, [5, 5, 5]), (23203, [5] * 3)],
)
def test_two_ranks_on_one_gpu_are_refused(standin: Standin, version: int, states: list[int]) -> None:
    """By UUID, with the status that each version gives to each rank."""
    found = values(standin, 3, DUPLICATE, init="", env={"STANDIN_NCCL_VERSION": str(version)})
    assert [row[0] for row in found] == states


@pytest.mark.parametrize(
    ("version", "env", "host_ids", "state"),
    [
        (23203, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, False, 0),
        (22809, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, False, 5),
        (22809, {}, True, 0),
    ],
)
def test_one_gpu_may_be_shared(standin: Standin, version: int, env: dict[str, str], host_ids: bool, state: int) -> None:
    """With NCCL's own switch from 2.30 on, or where ranks say that they are on different hosts."""
    rank_env = {rank: {"NCCL_HOSTID": f"host{rank}"} for rank in range(2)} if host_ids else {}
    found = values(standin, 2, DUPLICATE, rank_env=rank_env, init="", env={"STANDIN_NCCL_VERSION": str(version), **env})
    assert [row[0] for row in found] == [state] * 2


def test_versions_that_differ_are_refused(standin: Standin) -> None:
    """Every rank gets the same status."""
    code = """
    gpu = Gpu(rank); status, comm = nccl.init(n, first_id(nccl, rank), rank)
    print(json.dumps([status, "Mismatched NCCL version" in nccl.error()]))
    """
    assert values(standin, 2, code, rank_env={1: {"STANDIN_NCCL_VERSION": "22809"}}, init="") == [[5, True]] * 2
