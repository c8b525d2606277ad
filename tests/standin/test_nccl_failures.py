"""The stand-in for NCCL: what breaks, what is told of it, and who goes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.standin import Standin
from helpers.standin_ranks import start, values


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
    mine = (
        "nccl.Broadcast(x, x, 4, 7, 0, comm, s)" if "Broadcast" in other else "nccl.AllReduce(x, x, 4, 7, 0, comm, s)"
    )
    code = f"""
    x, y, s = gpu.put(np.ones(16, np.float32)), gpu.blank(256), int(stream)
    assert ({mine} if rank == 0 else {other}) == 0
    done = until(lambda: int(driver.cuStreamQuery(stream)[0]) == 0, 0.3)
    print(json.dumps([done, nccl.state(comm), nccl.CommAbort(comm), int(driver.cuStreamQuery(stream)[0])]))
    """
    assert values(standin, 2, code) == [[False, 0, 0, 0]] * 2


@pytest.mark.parametrize(
    ("version", "host", "end", "returned"),
    [
        ("23102", "n", "CommDestroy", [False, True]),
        ("23102", "n", "CommAbort", [False, False]),
        ("23102", "n{}", "CommAbort", [True, True]),
        ("23007", "n", "CommAbort", [True, True]),
    ],
)
def test_destroy_waits_for_that_of_others(
    standin: Standin, version: str, host: str, end: str, returned: list[bool]
) -> None:
    """From 2.31.2 on for every rank of the host, for ever where one aborts instead; before, for nobody."""
    code = f"""
    if rank == 0:
        took = []
        threading.Thread(target=lambda: took.append(nccl.CommDestroy(comm)), daemon=True).start()
        print(json.dumps([until(lambda: bool(took), 0.3), until(lambda: bool(took), 1.2)]), flush=True)
        os._exit(0)
    time.sleep(0.7)
    print(json.dumps(nccl.{end}(comm)))
    """
    env = {"STANDIN_NCCL_VERSION": version}
    rank_env = {rank: {"NCCL_HOSTID": host.format(rank)} for rank in range(2)}
    assert values(standin, 2, code, env=env, rank_env=rank_env) == [returned, 0]


@pytest.mark.parametrize(("transport", "state"), [("P2P", 0), ("SHM", 0), ("NET/Socket", 6), ("NET/IB", 6)])
@pytest.mark.parametrize("end", ["kill", "exit"])
def test_peer_that_dies(standin: Standin, transport: str, state: int, end: str) -> None:
    """A network tells the survivors within a second; memory shared between processes of a host never does."""
    code = """
    x = gpu.put(np.ones(4, np.float32))
    release = gpu.hold(stream)
    given = [nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)) for _ in range(3)]
    release()
    until(lambda: nccl.state(comm) != 0, 1.0)
    busy = int(driver.cuStreamQuery(stream)[0])
    later = nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream))
    print(json.dumps([given, nccl.state(comm), busy, later, nccl.CommAbort(comm)]))
    """
    faults = f"1@collective#2={end}"
    survivor, dead = start(standin, 2, code, env={"STANDIN_TRANSPORT": transport, "STANDIN_FAULTS": faults})
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
    assert start(standin, 2, code, env=env)[0].value == [False, 0]


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
    release = gpu.hold(stream)
    given = [nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)) for _ in range(3)]
    release()
    done = until(lambda: int(driver.cuStreamQuery(stream)[0]) == 0 or nccl.state(comm) != 0)
    state, right = nccl.state(comm), None
    if state == 0:
        right = gpu.get(x, np.zeros(4, np.float32)).tolist() == [2.0 ** given.count(0)] * 4
    print(json.dumps([given, state, right, nccl.CommAbort(comm)]))
    """
    assert values(standin, 2, code, env={"STANDIN_FAULTS": faults}) == [[given, state, right, 0]] * 2


def test_wrong_rank_and_slow_abort_by_injection(standin: Standin) -> None:
    """NCCL's own answer can be made wrong; an abort can be made slow."""
    code = """
    start = time.monotonic()
    print(json.dumps([nccl.ask("CommUserRank", comm), nccl.CommAbort(comm), time.monotonic() - start > 0.25]))
    """
    assert values(standin, 2, code, env={"STANDIN_FAULTS": "0@ncclCommUserRank=wrong,ncclCommAbort=sleep300"}) == [
        [1, 0, True],
        [1, 0, True],
    ]


def test_buffer_that_is_no_device_memory_breaks_the_device(standin: Standin) -> None:
    """As an illegal access in a kernel: told by the stream, and everywhere after."""
    code = """
    host = np.ones(4, np.float32)
    given = nccl.AllReduce(host.ctypes.data, host.ctypes.data, 4, 7, 0, comm, int(stream))
    told = int(driver.cuStreamSynchronize(stream)[0])
    print(json.dumps([given, told, nccl.AllReduce(8, 8, 4, 7, 0, comm, int(stream)),
                      "illegal memory access" in nccl.error()]))
    """
    assert values(standin, 2, code) == [[0, 700, 1, True]] * 2


@pytest.mark.parametrize("way", ["shrink", "revoke", "reconnect"])
def test_survivors_go_on(standin: Standin, way: str, tmp_path: Path) -> None:
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
    fifo = str(tmp_path / "meeting")
    os.mkfifo(fifo)
    ends = start(standin, 3, code, env={"WAY": way, "MEETING": fifo})
    assert [ends[0].value, ends[2].value] == [[5, 2, 0, 4.0, 0], [5, 2, 1, 4.0, 0]]
