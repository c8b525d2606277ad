"""The stand-in for NCCL: registration, the log that names the transport, and what is left."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from helpers.standin import Standin
from helpers.standin_ranks import start, values


def test_memory_and_registration(standin: Standin) -> None:
    """The allocator's memory works in operations; handles are of one communicator; windows want its memory."""
    code = """
    x, handle, window = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    found = [nccl.MemAlloc(ctypes.byref(x), 8192)]
    found += [nccl.CommRegister(comm, x, 8192, ctypes.byref(handle)), handle.value is not None]
    found += [nccl.CommWindowRegister(comm, x, 4096, ctypes.byref(window), 1), window.value is not None]
    found += [nccl.CommWindowDeregister(comm, window), *[nccl.CommDeregister(comm, handle) for _ in range(2)]]
    plain = gpu.blank(8192)
    found += [nccl.CommWindowRegister(comm, plain, 4096, ctypes.byref(window), 1), window.value is None]
    found += [nccl.CommRegister(comm, 4096, 16, ctypes.byref(handle))]
    check(driver.cuMemsetD32(x.value, 0x3f800000, 4)); check(driver.cuCtxSynchronize())
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


@pytest.mark.parametrize("transport", ["P2P", "SHM", "NET/Socket", "NET/IB"])
def test_log_names_the_transport(standin: Standin, transport: str, tmp_path: Path) -> None:
    """Lines of NCCL's form, in the file of each process, when the first operation connects."""
    code = """
    def lines():
        host = os.uname().nodename.split(".")[0]
        with open(f"{os.environ['FOLDER']}/{host}.{os.getpid()}") as file:
            return file.read().splitlines()
    early = lines()
    x = gpu.put(np.ones(4, np.float32))
    assert nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)) == 0
    check(driver.cuStreamSynchronize(stream)); nccl.CommDestroy(comm)
    print(json.dumps([early, lines()]))
    """
    env = {"NCCL_DEBUG": "info", "NCCL_DEBUG_FILE": f"{tmp_path}/%h.%p", "FOLDER": str(tmp_path)}
    for rank, (early, late) in enumerate(values(standin, 2, code, env={"STANDIN_TRANSPORT": transport, **env})):
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


@pytest.mark.parametrize(
    ("version", "shm", "rings", "stamped", "function"),
    [
        (21803, "SHM/direct/direct", "Connected all rings", False, None),
        (22703, "SHM/direct/direct", "Connected all rings, use ring PXN 0 GDR 1", True, None),
        (23203, "SHM/direct", "Connected all rings, use ring PXN 0 GDR 1", True, "standin"),
    ],
)
def test_log_has_the_form_of_its_version(
    standin: Standin, version: int, shm: str, rings: str, stamped: bool, function: str | None
) -> None:
    """The line of a shared-memory channel, of the rings, and of a warning; old versions connect at init."""
    code = """
    nccl.AllReduce(0, 0, 4, 99, 0, comm, int(stream))
    x = gpu.put(np.ones(4, np.float32))
    assert nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)) == 0
    check(driver.cuStreamSynchronize(stream))
    """
    env = {"STANDIN_NCCL_VERSION": str(version), "STANDIN_TRANSPORT": "SHM", "NCCL_DEBUG": "INFO"}
    for ended in start(standin, 2, code, env=env):
        found = [match for line in ended.out.splitlines() if (match := PREFIX.match(line))]
        (warning,) = [match for match in found if match["level"] == "WARN"]
        assert "invalid type 99" in warning["msg"]
        assert ((warning["ts"] is not None), warning["func"]) == (stamped, function)
        texts = [match["msg"] for match in found]
        assert rings in texts
        assert {text.rsplit(" ", 1)[1] for text in texts if text.startswith("Channel")} == {shm}
        assert (texts.index(rings) < texts.index(warning["msg"])) == (version < 22200)


def test_hosts_are_connected_by_the_network(standin: Standin) -> None:
    """Two ranks on each of two hosts: memory within, the network between; one rank says the version."""
    code = """
    x = gpu.put(np.ones(4, np.float32))
    assert nccl.AllReduce(x, x, 4, 7, 0, comm, int(stream)) == 0
    check(driver.cuStreamSynchronize(stream))
    print(json.dumps(0))
    """
    rank_env = {rank: {"NCCL_HOSTID": f"host{rank // 2}"} for rank in range(4)}
    ends = start(standin, 4, code, rank_env=rank_env, env={"NCCL_DEBUG": "INFO"})
    ways = [sorted(set(re.findall(r"Channel \S+ : (\d\[\d\] -> \d\[\d\]) .*via (\S+)", end.out))) for end in ends]
    assert ways[0] == [("0[0] -> 1[1]", "P2P/CUMEM"), ("3[3] -> 0[0]", "NET/Socket/0")]
    assert ways[1] == [("1[1] -> 2[2]", "NET/Socket/0")]
    quiet = start(standin, 2, code, env={"NCCL_DEBUG": "VERSION"})
    assert ["NCCL version 2.32.3" in end.out for end in quiet] == [True, False]


@pytest.mark.parametrize(
    ("env", "status"),
    [({}, 0), ({"NCCL_NET": "socket"}, 0), ({"NCCL_NET": "IB"}, 5), ({"NCCL_NET": "IB", "STANDIN_NETWORK": "IB"}, 0)],
)
def test_network_that_is_not_there_is_refused(standin: Standin, env: dict[str, str], status: int) -> None:
    """A network by name must exist; none by name falls back without a word."""
    code = "gpu = Gpu(0); first_id(nccl, 0)\nprint(json.dumps(nccl.init(1, nccl.unique_id(), 0)[0]))"
    assert values(standin, 1, code, init="", env=env) == [status]


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
