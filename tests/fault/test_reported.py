"""What users of NCCL and MPI reported of other programs, each as a job of its own on the stand-ins."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from helpers.job import JobResult
from helpers.mpirun import run_job
from helpers.standin import build

POLICY = {"NCCL_IB_TIMEOUT": "10", "NCCL_IB_RETRY_CNT": "1"}

HEAD = """
import os, time
import numpy as np
import butter_mpi
from butter_mpi import DType
from helpers.memory import DeviceMemory
from helpers.standin_rank import until
from mpi4py import MPI
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
def say(text):
    print(text, flush=True)
def start(**more):
    fault = butter_mpi.FaultPolicy(start_deadline=20, collective_deadline=10)
    return butter_mpi.init(plane="nccl", fault=fault, **more)
"""

STARTS = """
try:
    with start() as comm: comm.barrier()
    say("started")
except butter_mpi.PreflightError as error:
    say(error)
"""


def run(n: int, program: str, **how: object) -> JobResult:
    """Run a program that ends well on every rank."""
    given = {**build().env(), **POLICY, **how.pop("env", {})}  # type: ignore[dict-item]
    result = run_job(n, HEAD + program, env=given, **how)
    assert result.rc == 0, result.text
    return result


def refused(n: int, program: str = STARTS, **how: object) -> str:
    """Run a start that every rank refuses in the same words; return them."""
    result = run(n, program, **how)
    assert len(set(result.rank_out)) == 1 and result.rank_out[0].startswith("preflight refuses"), result.text
    return result.rank_out[0]


def copy_of_nccl(folder: Path, old: bytes = b"", new: bytes = b"") -> Path:
    """Return a copy of the stand-in for NCCL with one text in it replaced, or one byte more at its end."""
    target = folder / "libnccl.so.2"
    folder.mkdir()
    shutil.copyfile(build().nccl, target)
    content = target.read_bytes()
    assert len(old) == len(new) and (not old or content.count(old) >= 1)
    target.write_bytes(content.replace(old, new) if old else content + b"\0")
    return target


# -- the library -----------------------------------------------------------------------------------------------------


def test_other_file_of_one_version(tmp_path: Path) -> None:
    """A libnccl that differs in one byte is refused with both paths and digests, before a unique ID is made."""
    paths = [build().nccl, copy_of_nccl(tmp_path / "other")]
    fatal = {"STANDIN_FAULTS": "ncclGetUniqueId=kill,ncclCommInitRankConfig=kill"}
    text = refused(2, env=fatal, rank_env={1: {"NCCL_LIBRARY": str(paths[1])}})
    for rank, path in enumerate(paths):
        assert f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()} ({path}) on rank {rank}" in text, text


def test_library_that_the_loader_refuses(tmp_path: Path) -> None:
    """What only the loader finds wrong with one rank's library is on every rank, in the loader's words."""
    path = copy_of_nccl(tmp_path / "broken", b"\0libc.so.6\0", b"\0libc.so.X\0")
    text = refused(2, rank_env={1: {"NCCL_LIBRARY": str(path)}})
    assert f"rank 1: {path} cannot be loaded: libc.so.X: cannot open shared object file" in text, text


def test_library_that_lacks_a_function(tmp_path: Path) -> None:
    """A function that an older libnccl has not is told when it is needed, by name and path, and nothing is harmed."""
    path = copy_of_nccl(tmp_path / "older", b"\0ncclCommRegister\0", b"\0ncclCommRegisteX\0")
    program = """
comm = start()
pointer = comm.backend.symmetric_alloc(64)
try:
    comm.backend.register_buffer(pointer, 64)
except butter_mpi.NotSupportedError as error:
    say(error)
comm.barrier()
assert comm.is_healthy()
comm.close()
"""
    for out in run(2, program, env={"NCCL_LIBRARY": str(path)}).rank_out:
        assert "ncclCommRegister" in out and str(path) in out, out


@pytest.mark.parametrize("code", [8, 9, 99])
@pytest.mark.parametrize("where", ["ncclAllReduce", "collective"])
def test_result_that_nobody_knows(code: int, where: str) -> None:
    """A result of a later release, of a call or in the background, is an error with its number on every rank."""
    program = """
comm = start()
comm.barrier()
try:
    until(lambda: comm.barrier() or comm.check_async_error(), 5)
except butter_mpi.CommunicatorBrokenError as error:
    say(error)
assert not comm.is_healthy()
comm.close()
"""
    result = run(2, program, env={"STANDIN_FAULTS": f"1@{where}#3={code}"})
    assert all(f"result {code}" in out or f"({code})" in out for out in result.rank_out), result.text
    assert all("rank 1/2 on" in out for out in result.rank_out), result.text


def test_error_in_the_background_is_found_by_the_next_operations() -> None:
    """On its own rank an error in the background ends also a loop that never asks; the cause stays, and is told."""
    program = """
comm = start()
texts = []
def submit():
    try:
        comm.barrier() if RANK == 1 else comm.wait_for_async_error(10)
    except butter_mpi.CommunicatorBrokenError as error:
        texts.append(str(error))
    return len(texts) == 3
if RANK == 0: comm.barrier(); comm.barrier()
assert until(submit, 5) and len(set(texts)) == 1
say(texts[0])
comm.close()
"""
    result = run(2, program, env={"STANDIN_FAULTS": "1@collective#3=6"})
    assert all("rank 1/2 on" in out and "ncclRemoteError" in out for out in result.rank_out), result.text


# -- devices ---------------------------------------------------------------------------------------------------------


def test_sharing_that_only_nccl_was_told_of() -> None:
    """NCCL's own switch for ranks on one GPU is no option of butter_mpi: it must be asked for, on every rank alike."""
    switch = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    one, asked = {"STANDIN_DEVICES": "1"}, {"BUTTER_MPI_SHARE_GPU": "1"}
    text = refused(2, env={**one, **switch, "CUDA_VISIBLE_DEVICES": "0"})
    assert "ranks 0-1 share GPU-" in text and "share_gpu=True" in text, text
    for rank in range(2):
        assert f"rank {rank} on " in text and f'(local rank {rank}, CUDA_VISIBLE_DEVICES "0", 1 visible)' in text, text
    text = refused(2, env={**one, **asked}, rank_env={0: switch})
    assert 'NCCL_MULTI_RANK_GPU_ENABLE: "1" on rank 0, unset on rank 1' in text, text
    assert run(2, STARTS, env={**one, **asked, **switch}).rank_out == ["started\n"] * 2


def test_more_ranks_than_devices() -> None:
    """A rank beyond the visible devices is told by all, with both numbers and what binds one GPU to a rank."""
    text = refused(3, env={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert "rank 2: local rank 2 has no device: 2 visible (ordinals 0 to 1)" in text, text
    assert "--gpus-per-task=1" in text and "SLURM_STEP_GPUS" in text, text


# -- waiting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_mpi_goes_on_while_an_operation_waits(mpi: str) -> None:
    """A message of the program itself, which needs both ranks' MPI, arrives while one of them waits for NCCL."""
    program = """
comm = start()
plane = comm.backend
p = DeviceMemory(plane.device, plane.stream).blank(4)
waits = [
    (lambda: plane.broadcast(p, 4, 1), lambda: plane.broadcast(p, 4, 1)),
    (lambda: plane.recv_command_u32(p, 1), lambda: plane.broadcast(p, 4, 1)),
    (lambda: plane.send_to(p, 4, 1, plane.stream), lambda: plane.recv_from(p, 4, 0, plane.stream)),
]
for wait, meet in waits:
    data = np.full(9, RANK, np.uint8)
    if RANK == 0:
        request = MPI.COMM_WORLD.Irecv(data, 1)
        wait()
        request.Wait()
        assert (data == 1).all()
    else:
        MPI.COMM_WORLD.Ssend(data, 0)  # Returns when rank 0's MPI has taken it.
        meet()
comm.close()
"""
    assert run(2, program, mpi=mpi).seconds < 9


# -- endings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plane", ["host", "nccl"])
def test_what_broke_and_was_closed_is_forgotten(plane: str) -> None:
    """A program that survives many aborts keeps none of their communicators; the job still ends as one with a loss."""
    program = f"""
import gc, weakref
for turn in range(3):
    comm = butter_mpi.init(plane={plane!r})
    last = weakref.ref(comm.backend)
    comm.barrier()
    MPI.COMM_WORLD.Barrier()
    comm.abort("enough")
    del comm
    with butter_mpi.init(plane={plane!r}) as comm:
        gc.collect()
        assert last() is None
say("forgotten")
MPI.COMM_WORLD.Barrier()
"""
    result = run_job(2, HEAD + program, env={**build().env(), **POLICY})
    assert result.rank_out == ["forgotten\n"] * 2 and result.rc != 0, result.text


def test_one_rank_alone_without_nvrtc() -> None:
    """What multiplies there is compiled by NVRTC: without it the sum is refused, and takes no number."""
    program = """
from butter_mpi import kernels, PreMulSum
def lacking(*_):
    raise butter_mpi.NotSupportedError("NVRTC, which compiles kernels, cannot be loaded: none", needs="NVRTC")
kernels._compiled = lacking
comm = butter_mpi.init(plane="nccl")
memory = DeviceMemory(comm.backend.device, comm.backend.stream)
x = np.full(4, 3, np.float32)
pointer = memory.put(x)
try:
    comm.backend.all_reduce(pointer, 16, dtype=DType.FLOAT32, op=PreMulSum(2))
except butter_mpi.NotSupportedError as error:
    say(error)
assert comm.sequence == 0 and comm.is_healthy()
kernels._compiled = lambda *_: b"STANDIN"
comm.backend.all_reduce(pointer, 16, dtype=DType.FLOAT32, op=PreMulSum(2))
assert (memory.get(pointer, x) == 6).all() and comm.sequence == 1
comm.close()
"""
    out = run(1, program).rank_out[0]
    text = "all_reduce: one rank alone on a device multiplies by a kernel of its own, without NCCL: NVRTC, which"
    assert out.startswith("rank 0/1") and text in out and "multiply the array by the factor yourself" in out, out


# -- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
def test_more_elements_than_32_bits_count(n: int) -> None:
    """An operation of 2^31 + 1 elements on a device reaches each of them, alone as with others."""
    program = """
comm = butter_mpi.init(plane="nccl")
plane, count = comm.backend, 2**31 + 1
memory = DeviceMemory(plane.device, plane.stream)
marks = (0, 2**31 - 1, 2**31, count - 1)
class Array:
    def __init__(self):
        self.pointer = plane.symmetric_alloc(count)
        self.__cuda_array_interface__ = dict(
            shape=(count,), typestr="|i1", data=(self.pointer, False), version=3, stream=plane.stream)
def copied(pointers):
    for target, source in pointers:
        plane.device.copy(target, source, 1, plane.stream)
    memory.wait()
source, seen = Array(), np.zeros(4, np.int8)
out = source if SIZE > 1 else Array()
own = np.full(1, RANK + 1, np.int8)
copied([(source.pointer + mark, own.ctypes.data) for mark in marks])
comm.all_reduce(source, None if out is source else out, op="max")
copied([(seen.ctypes.data + place, out.pointer + mark) for place, mark in enumerate(marks)])
assert (seen == SIZE).all(), seen
assert "int8 x 2147483649" in plane.last
comm.close()
"""
    run(n, program, timeout=120)
