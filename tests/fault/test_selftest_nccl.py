"""The selftest on the nccl plane, over the stand-ins: passes, refusals, starts that fail, and checks that must fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.mpirun import JobResult
from helpers.selftest import outcomes, run_selftest, statuses, told
from helpers.standin import Standin, build

from butter_mpi.selftest import receipts
from butter_mpi.selftest.catalogue import CHECKS

# The kernel of the stand-in in place of one that NVRTC would compile.
WITH_KERNEL = """
import sys, types

def bf16_add_inplace(device):
    module = device.call("cuModuleLoadData", b"STANDIN")
    return int(device.call("cuModuleGetFunction", module, b"bf16_add_inplace"))

sys.modules["butter_mpi.kernels"] = types.SimpleNamespace(bf16_add_inplace=bf16_add_inplace, premul=None)
"""

FEW = "runner.CHECKS = runner.CHECKS[:2]"


@pytest.fixture(scope="module")
def standin() -> Standin:
    """The stand-ins."""
    return build()


def selftest(standin: Standin, n: int, *words: str, extra: str = "", mpi: str = "mpich", **setup: Any) -> JobResult:
    """Run the selftest on the nccl plane; `setup` is that of the stand-ins."""
    cwd = setup.pop("cwd", None)
    return run_selftest(
        n, "--plane", "nccl", *words, extra=extra, env=standin.env(**setup), mpi=mpi, cwd=cwd, timeout=60
    )


def line(result: JobResult, name: str) -> str:
    """Return the line of the head that begins with `name`."""
    return next(row.split(maxsplit=1)[1] for row in result.rank_out[0].splitlines() if row.split()[:1] == [name])


def refused(result: JobResult) -> str:
    """Return the one line of a refused start, after seeing that every rank ended with status 3, without a traceback."""
    assert statuses(result) == ["3"] * len(result.rank_err), result.text
    assert "Traceback" not in result.text
    first, *others = told(result)
    assert others == [""] * len(others), result.text
    return first


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_every_check_passes(standin: Standin, mpi: str, tmp_path: Path) -> None:
    """All checks pass on device memory, those that break the communicator too; the receipt says on what."""
    words = ("--faults", "--receipt", "r.json")
    result = selftest(standin, 2, *words, extra=WITH_KERNEL, mpi=mpi, cwd=tmp_path)
    assert result.rc == 0, result.text
    assert outcomes(result.rank_out[0]) == {check.id: "ok" for check in CHECKS}, result.text
    # Faults that are planned, and told to every rank, are none of the user's business.
    assert result.rank_err == ["status 0\n"] * 2, result.text
    assert line(result, "plane") == "nccl: nccl was asked for"
    assert line(result, "transport") == "P2P on ranks 0-1"
    assert line(result, "check").startswith("strict: ")
    gpus = line(result, "GPU")
    assert "Stand-in GPU 0 GPU-" in gpus and "cuda:1 on rank 1" in gpus and gpus.endswith("; no GPU is shared")
    made = receipts.load(tmp_path / "r.json")
    assert made.status == "passed"
    assert made.plane["ran"] == "nccl"
    assert made.transport == {"required": None, "found": {"P2P": [0, 1]}}
    assert [record["device"]["ordinal"] for record in made.ranks] == [0, 1]
    assert made.library is not None and made.library["path"] == str(standin.nccl)


def test_four_ranks_share_a_gpu(standin: Standin) -> None:
    """With ``--share-gpu`` four ranks pass on one GPU, and the head says that they share it."""
    result = selftest(standin, 4, "--share-gpu", devices=1)
    assert result.rc == 0, result.text
    not_run = [name for name, outcome in outcomes(result.rank_out[0]).items() if outcome != "ok"]
    assert not_run == ["add_path"], result.text
    assert "it is for two ranks, here are 4" in result.rank_out[0]
    assert line(result, "GPU").endswith("cuda:0 on ranks 0-3; ranks SHARE a GPU (share_gpu)")


@pytest.mark.parametrize("words", [[], ["--require-transport", "P2P"]])
def test_sharing_unasked_is_refused(standin: Standin, words: list[str]) -> None:
    """Without ``--share-gpu`` both ranks, the GPU's UUID and the remedy are named, once, with status 3 on both."""
    text = refused(selftest(standin, 2, *words, devices=1))
    assert "ranks 0-1 share GPU-" in text
    assert "rank 0 on " in text and "rank 1 on " in text
    assert "share_gpu=True (BUTTER_MPI_SHARE_GPU=1, --share-gpu)" in text


@pytest.mark.parametrize("transport", ["P2P", "SHM", "NET/Socket", "NET/IB"])
def test_required_transport_that_is_in_use(standin: Standin, transport: str) -> None:
    """A required transport that NCCL's log names passes, and the receipt has it with its ranks."""
    words = ("--share-gpu", "--json", "--require-transport", transport)
    result = selftest(standin, 2, *words, extra=FEW, devices=1, transport=transport)
    assert result.rc == 0, result.text
    made = receipts.check(json.loads(result.rank_out[0]), "stdout")
    assert made.transport == {"required": transport, "found": {transport: [0, 1]}}


@pytest.mark.parametrize(("required", "used"), [("NET/IB", "NET/Socket"), ("P2P", "SHM"), ("NET/IB", "P2P")])
def test_required_transport_that_is_not_in_use(standin: Standin, required: str, used: str) -> None:
    """Another transport than the required one is one line, with status 3 on every rank."""
    text = refused(selftest(standin, 4, "--require-transport", required, transport=used))
    assert f"transport {required} is required" in text and "NCCL's log names" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            "1@ncclCommInitRankConfig=5",
            "rank 1/2 on {host}: start: ncclCommInitRankConfig failed with ncclInvalidUsage",
        ),
        ("0@ncclGetUniqueId=3", "rank 0/2: start: no unique ID: ncclGetUniqueId failed with ncclInternalError"),
        ("1@ncclAllReduce#1=1", "rank 1/2 on {host}: start: ncclAllReduce failed with ncclUnhandledCudaError"),
    ],
)
def test_start_that_fails_on_one_rank_is_one_line(standin: Standin, fault: str, said: str) -> None:
    """What fails on one rank is told once, by the words of that rank, with status 3 on every rank."""
    text = refused(selftest(standin, 2, faults=fault))
    host = text.split(" on ")[1].split(":")[0] if " on " in text.split(":")[1] else ""
    assert text.startswith(f"butter_mpi.selftest: {said.format(host=host)}"), text
    assert text.count("\n") == 1


def test_failure_of_the_device_stops_the_run(standin: Standin) -> None:
    """An error of the device under a check is told by every rank, without a traceback, and the job ends."""
    result = selftest(standin, 2, faults="1@cuMemcpyAsync#30=700!")
    assert result.rc != 0 and "Traceback" not in result.text, result.text
    assert "rank 1/2: selftest stopped in check all_reduce: " in result.rank_err[1]
    assert "the device failed, after all_reduce #" in result.rank_err[0]


def test_stream_that_stands_still_stops_the_run(standin: Standin) -> None:
    """Work that is never done ends at the collective deadline, and says what the last operation was."""
    env = {"BUTTER_MPI_COLLECTIVE_DEADLINE": "10"}
    extra = "runner.CHECKS = tuple(check for check in runner.CHECKS if check.id == 'broadcast')"
    result = selftest(standin, 2, extra=extra, faults="1@ncclBroadcast#5=hang", **env)
    assert result.rc != 0 and 10 < result.seconds < 30, result.text
    assert "the work on the stream is not done after 10." in result.text
    assert "; the last was broadcast #" in result.text


def test_types_that_an_old_library_has_not(standin: Standin) -> None:
    """Where NCCL has no 8-bit floats the head says so, and the other types are checked."""
    result = selftest(standin, 2, extra=FEW, version=22304)
    assert result.rc == 0, result.text
    assert line(result, "types") == "8-bit floats: NCCL has them from 2.24 on, this is 2.23.4"


def test_kernel_that_cannot_be_had(standin: Standin) -> None:
    """Where one rank cannot compile the kernel its check is not run on any, and says why."""
    missing = (
        WITH_KERNEL
        + """
from butter_mpi.errors import NotSupportedError
def lacking(device, has=bf16_add_inplace):
    if device.ordinal:
        raise NotSupportedError("NVRTC is not installed", needs="NVRTC")
    return has(device)
sys.modules["butter_mpi.kernels"].bf16_add_inplace = lacking
runner.CHECKS = tuple(check for check in runner.CHECKS if check.id == "add_path")
"""
    )
    result = selftest(standin, 2, extra=missing)
    assert statuses(result) == ["0", "0"], result.text
    assert "no kernel: NVRTC is not installed" in result.rank_out[0]


# What the plane could do wrong, each with the check that must see it and the ranks that must tell it.
SABOTAGE = {
    "all_reduce, one bit": ("all_reduce", "spoiled('all_reduce', flip)", {1}),
    "all_reduce, not written": ("all_reduce", "spoiled('all_reduce', untouched)", {1}),
    "all_reduce, one byte too far": ("all_reduce", "spoiled('all_reduce', stray)", {1}),
    "all_reduce, send buffer": ("all_reduce", "spoiled('all_reduce', scribble)", {0, 1}),
    "broadcast, one bit": ("broadcast", "spoiled('broadcast', flip)", {1}),
    "all_gather, one byte too far": ("all_gather", "spoiled('all_gather', stray)", {1}),
    "reduce_scatter, one bit": ("reduce_scatter", "spoiled('reduce_scatter', flip)", {1}),
    "gather, one bit": ("rooted", "spoiled('gather', flip)", {1}),
    "all_to_all_v, one byte too far": ("uneven", "spoiled('all_to_all_v', stray)", {1}),
    "carried types, one bit": ("carried", "spoiled('all_reduce', flip)", {1}),
    "send, one bit": ("send_recv", "spoiled('send', flip)", {0, 1}),
    "group, one bit": ("group", "spoiled('send', flip)", {0, 1}),
    "barrier that waits for nobody": ("barrier", "patched('barrier', lambda self, **how: None)", {0, 1}),
    "order, one bit": ("order", "spoiled('all_reduce', nudge)", {0, 1}),
    "two numbers a collective": ("sequence", "patched('all_reduce', twice)", {0, 1}),
    "strided arrays taken": ("refusals", "patched('broadcast', straight)", {0, 1}),
    "another stream": ("producer_stream", "patched('_ordered', elsewhere, Arguments)", {0, 1}),
    "own stream that does not wait": ("producer_stream", "patched('_order', no_order, NcclPlane)", {0, 1}),
    "host that waits": ("producer_stream", "patched('all_reduce', waiting)", {0, 1}),
    "kernel that is not launched": (
        "add_path",
        "patched('_exchange_and_add', lambda self, comm, operation: None, Issuer)",
        {0, 1},
    ),
    "kernel that one rank cannot make": ("add_path", "broken_kernel()", {1}),
    "unaligned memory": ("registered", "patched('symmetric_alloc', unaligned, NcclPlane)", {0, 1}),
    "handle taken twice": ("registered", "patched('deregister_buffer', lambda self, handle: None, NcclPlane)", {0, 1}),
    "captured stream taken": ("capture", "taken()", {0, 1}),
    "capture that is spoiled": ("capture", "patched('is_captured', spoiling, Device)", {0, 1}),
    "operators not compared": ("mismatch", "not_compared('op')", {0, 1}),
}

SABOTEUR = """
import contextlib, time
from dataclasses import replace
import numpy as np
from butter_mpi.arguments import Arguments
from butter_mpi.communicator import Communicator
from butter_mpi.device import Device
from butter_mpi.errors import CUDAError
from butter_mpi.planes import meeting
from butter_mpi.planes.issuing import Issuer
from butter_mpi.planes.keeping import Keeping
from butter_mpi.planes.nccl import NcclPlane
from butter_mpi.selftest.catalogue import CHECKS
from butter_mpi.selftest.places import DeviceArray

@contextlib.contextmanager
def patched(name, value, owner=Communicator):
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)

@contextlib.contextmanager
def taken():
    # An event that is captured could not be queried any more.
    with patched("is_captured", lambda self, stream: False, Device):
        with patched("_add", lambda self, stream, owners: None, Keeping):
            yield

def until_done(device, stream):
    while not device.ready(stream):
        time.sleep(0.001)

def read(device, pointer, nbytes, stream):
    host = np.empty(nbytes, np.uint8)
    device.copy(host.ctypes.data, pointer, nbytes, stream)
    until_done(device, stream)
    return host

def write(device, pointer, host, stream):
    device.copy(pointer, host.ctypes.data, host.nbytes, stream)
    until_done(device, stream)

def spoiled(name, harm):
    original = getattr(Communicator, name)
    def call(self, *arrays, **how):
        two = len(arrays) > 1 and isinstance(arrays[1], DeviceArray)
        result = arrays[1] if two else arrays[0]
        device, early = self.backend.device, name == "send"
        harmed = self.rank == 1 and result.count
        before = read(device, result.pointer, result.nbytes, result.stream) if harmed else None
        if harmed and early:
            harm(device, result, before, None)
        original(self, *arrays, **how)
        if harmed and not early:
            harm(device, result, before, arrays[0] if two else None)
    return patched(name, call)

def changed(device, array, place, bits):
    pointer = array.pointer + place % array.nbytes
    write(device, pointer, read(device, pointer, 1, array.stream) ^ np.uint8(bits), array.stream)

def flip(device, result, before, send):
    changed(device, result, -1, 0x40)

def nudge(device, result, before, send):
    changed(device, result, 0, 1)

def untouched(device, result, before, send):
    write(device, result.pointer, before, result.stream)

def stray(device, result, before, send):
    write(device, result.pointer + result.nbytes, np.zeros(1, np.uint8), result.stream)

def scribble(device, result, before, send):
    if send is not None:
        flip(device, send, None, None)

def twice(self, *arrays, original=Communicator.all_reduce, **how):
    original(self, *arrays, **how)
    self.barrier()

def straight(self, buffer, root=0, original=Communicator.broadcast, **how):
    if buffer.step < 0:
        buffer = replace(buffer, step=1, pointer=buffer.pointer - (buffer.count - 1) * buffer.dtype.itemsize)
    original(self, buffer, root, **how)

def elsewhere(self, kind, what, stream, buffers):
    return self._plane.stream, ()

def no_order(self, earlier, later):
    pass

def waiting(self, array, *more, original=Communicator.all_reduce, **how):
    original(self, array, *more, **how)
    until_done(self.backend.device, array.stream)
    time.sleep(0.05)

def unaligned(self, nbytes, original=NcclPlane.symmetric_alloc):
    pointer = original(self, nbytes + 64) + 64
    self._memory._blocks[pointer] = self._memory._blocks.pop(pointer - 64)
    return pointer

def spoiling(self, stream, original=Device.is_captured):
    with contextlib.suppress(CUDAError):
        self.call("cuStreamSynchronize", stream)
    return original(self, stream)

def broken_kernel():
    def some(device, original=bf16_add_inplace):
        if device.ordinal:
            raise CUDAError("it does not compile", call="nvrtcCompileProgram", code=6)
        return original(device)
    return patched("bf16_add_inplace", some, sys.modules["butter_mpi.kernels"])

def not_compared(name, original=meeting._key):
    return patched("_key", lambda record: original({**record, name: None}), meeting)

def sabotaged(base, how):
    def run(context):
        with eval(how):
            yield from base.run(context)
    return run

bases = {check.id: check for check in CHECKS}
rows = json.loads(os.environ["BUTTER_MPI_TEST_SABOTAGE"])
runner.CHECKS = tuple(
    checks.Check(number, "row", title, sabotaged(bases[base], how)) for number, (title, base, how) in enumerate(rows, 1)
)
"""


def test_every_check_can_fail(standin: Standin) -> None:
    """Whatever the plane does wrong is seen by the check that is there for it, where it shows; status 1."""
    rows = [(title, base, how) for title, (base, how, _) in SABOTAGE.items()]
    env = {"BUTTER_MPI_TEST_SABOTAGE": json.dumps(rows)}
    result = selftest(standin, 2, "--json", "--faults", extra=WITH_KERNEL + SABOTEUR, **env)
    assert statuses(result) == ["1", "1"], result.text
    made = receipts.check(json.loads(result.rank_out[0]), "stdout")
    assert made.status == "failed"
    found = {check["title"]: {row["rank"] for row in check["failures"]} for check in made.checks}
    assert found == {title: ranks for title, (_, _, ranks) in SABOTAGE.items()}
