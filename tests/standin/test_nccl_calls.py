"""The stand-in for NCCL: what every call checks, and what it answers without a GPU."""

from __future__ import annotations

from pathlib import Path

from helpers.libnccl_files import real_library
from helpers.standin import Standin
from helpers.standin_ranks import values


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
    assert values(standin, 1, code, init="", env={"STANDIN_NCCL_VERSION": "22304"}) == [[4, 4, 4]]


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


def test_simulated_group_is_not_run(standin: Standin) -> None:
    """The structure has a magic of its own; what the group held is dropped."""
    code = """
    class Info(ctypes.Structure):
        _fields_ = (("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint),
                    ("time", ctypes.c_float))
    x, found = gpu.put(np.ones(4, np.float32)), []
    for magic in (0x74685283, 0xCAFEBEEF):
        info = Info(24, magic, 22200, -1.0)
        nccl.GroupStart()
        found.append(nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)))
        found += [nccl.GroupSimulateEnd(ctypes.byref(info)), info.time > 0]
    print(json.dumps([found, nccl.GroupEnd(), gpu.get(x, np.zeros(4, np.float32)).tolist()]))
    """
    assert values(standin, 2, code) == [[[0, 0, True, 0, 4, False], 5, [1.0] * 4]] * 2


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
    """A field counts for a library that knows it, and not where the version says that the caller does not."""
    code = """
    gpu = Gpu(rank); unique = first_id(nccl, rank)
    class Long(ctypes.Structure):
        _fields_ = (("first", Config), ("comm_name", ctypes.c_char_p), ("rest", ctypes.c_int * 16))
    def attempt(version, **first):
        begin = CONFIG(size=ctypes.sizeof(Long), version=version, **first)
        long = Long(begin, None, (ctypes.c_int * 16)(*[-2**31] * 16))
        long.rest[0] = 7                                # collnetEnable, which takes 0 and 1
        comm = ctypes.c_void_p()
        return nccl.CommInitRankConfig(ctypes.byref(comm), 1, nccl.unique_id(), 0, ctypes.byref(long))
    print(json.dumps([attempt(22700), attempt(22600)]))
    """
    assert values(standin, 1, code, init="", env={"STANDIN_NCCL_VERSION": "23203"}) == [[4, 0]]
    assert values(standin, 1, code, init="", env={"STANDIN_NCCL_VERSION": "22603"}) == [[0, 0]]


PROBE = """
import ctypes as C, json, os
lib = C.CDLL(os.environ["NCCL_LIBRARY"])
lib.ncclGetErrorString.restype = lib.ncclGetLastError.restype = C.c_char_p
class Uid(C.Structure): _fields_ = [("b", C.c_ubyte * 128)]
def last(): return lib.ncclGetLastError(None).decode()
v, u, comm, handle = C.c_int(), Uid(), C.c_void_p(0x1234), C.c_void_p()
found = {"fresh": last(), "version": [lib.ncclGetVersion(C.byref(v)), v.value, lib.ncclGetVersion(None)]}
found["texts"] = [lib.ncclGetErrorString(i).decode() for i in (*range(9), -1, 99)]
found["id"] = [lib.ncclGetUniqueId(C.byref(u)), list(bytes(u)[8:10]), sum(bytes(u)[64:])]
found["no id"] = [lib.ncclGetUniqueId(None), last()]
found["group"] = [lib.ncclGroupStart(), lib.ncclGroupEnd(), lib.ncclGroupEnd(), last()]
found["nulls"] = [getattr(lib, "ncclComm" + end)(None, 0) for end in ("Destroy", "Abort", "Finalize", "Revoke")]
found["async"] = [lib.ncclCommGetAsyncError(None, C.byref(v)), last()]
found["count"] = [lib.ncclCommCount(None, C.byref(v)), last()]
found["reduce"] = [lib.ncclAllReduce(None, None, C.c_size_t(1), 7, 0, None, None), last(), lib.ncclGroupEnd()]
found["register"] = [lib.ncclCommRegister(None, None, C.c_size_t(0), C.byref(handle)), last()]
found["builtin"] = [lib.ncclRedOpDestroy(0, None), last()]
found["simulate"] = [lib.ncclGroupSimulateEnd(None), last()]
found["alloc"] = [lib.ncclMemAlloc(C.byref(handle), C.c_size_t(64)), handle.value, last()]
found["init"] = [lib.ncclCommInitRank(C.byref(comm), 1, u, 0), lib.ncclGroupEnd()]
comm = C.c_void_p()
found["config"] = [lib.ncclCommInitRankConfig(C.byref(comm), 1, u, 0, None), comm.value]
found["leak"] = [lib.ncclGroupEnd(), lib.ncclGroupEnd()]
print(json.dumps(found))
"""


def test_without_a_driver_it_answers_as_the_real_library(standin: Standin, tmp_path: Path) -> None:
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
    assert values(standin, 1, code, init="", env={"STANDIN_NCCL_VERSION": "22809"})[0] == [
        "NCCL operation in progress",
        "unknown result code",
    ]
