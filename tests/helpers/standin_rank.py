"""What a program on the stand-ins uses: cuda-python's driver API, checked, and NCCL by ctypes, unchecked."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver

__all__ = ["CONFIG", "DTYPES", "OPS", "Config", "Gpu", "Nccl", "UniqueId", "check", "driver", "first_id", "until"]

DTYPES = "int8 uint8 int32 uint32 int64 uint64 float16 float32 float64 bfloat16 float8_e4m3fn float8_e5m2".split()
OPS = ["sum", "prod", "max", "min", "avg"]

_KERNELS = {
    "bf16_add_inplace": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    "fill_f32": (ctypes.c_void_p, ctypes.c_float, ctypes.c_size_t),
    "axpy_f32": (ctypes.c_float, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    "delay_us": (ctypes.c_uint32,),
    "wait_flag": (ctypes.c_void_p,),
}


def check(result: Any) -> Any:
    """Return the value of a driver call; raise ``RuntimeError`` with the name of its status if it failed."""
    status, *values = result
    if int(status):
        raise RuntimeError(status.name)
    return values[0] if len(values) == 1 else values or None


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Poll a status that nothing announces; return whether it came."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.0005)
    return True


class Gpu:
    """A device with its primary context current in this thread."""

    def __init__(self, ordinal: int = 0) -> None:
        check(driver.cuInit(0))
        self.device = check(driver.cuDeviceGet(ordinal))
        self.context = check(driver.cuDevicePrimaryCtxRetain(self.device))
        check(driver.cuCtxSetCurrent(self.context))
        self._module = check(driver.cuModuleLoadData(b"STANDIN\0"))
        self._flags = np.zeros(8, np.uint32)

    def stream(self, flags: int = 1) -> Any:
        """Make a stream, non-blocking unless told otherwise."""
        return check(driver.cuStreamCreate(flags))

    def event(self) -> Any:
        """Make an event without timing."""
        return check(driver.cuEventCreate(2))

    def order(self, before: Any, after: Any) -> None:
        """Let later work of one stream wait for what another holds now."""
        event = self.event()
        check(driver.cuEventRecord(event, before))
        check(driver.cuStreamWaitEvent(after, event, 0))
        check(driver.cuEventDestroy(event))

    def blank(self, nbytes: int) -> int:
        """Allocate."""
        return int(check(driver.cuMemAlloc(nbytes)))

    def put(self, array: npt.NDArray[Any]) -> int:
        """Copy an array to the device, and wait."""
        pointer = self.blank(array.nbytes)
        check(driver.cuMemcpyHtoD(pointer, array.ctypes.data, array.nbytes))
        return pointer

    def get(self, pointer: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Copy what lies at a pointer back, and wait."""
        out = np.empty_like(like)
        check(driver.cuMemcpyDtoH(out.ctypes.data, pointer, out.nbytes))
        return out

    def launch(self, name: str, stream: Any, *values: Any) -> None:
        """Launch a built-in kernel."""
        kernel = check(driver.cuModuleGetFunction(self._module, name.encode()))
        check(driver.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, (values, _KERNELS[name]), 0))

    def hold(self, stream: Any, index: int = 0) -> Callable[[], None]:
        """Stop a stream; return the function that lets it go on."""
        self.launch("wait_flag", stream, self._flags.ctypes.data + 4 * index)

        def release() -> None:
            self._flags[index] = 1

        return release


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``."""

    _fields_ = (("internal", ctypes.c_ubyte * 128),)


class Config(ctypes.Structure):
    """``ncclConfig_t`` as of 2.18."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        *((name, ctypes.c_int) for name in ("blocking", "cga", "min_ctas", "max_ctas")),
        ("net_name", ctypes.c_char_p),
        *((name, ctypes.c_int) for name in ("split_share", "traffic_class")),
    )


def CONFIG(**fields: Any) -> Config:  # noqa: N802 (it stands for NCCL_CONFIG_INITIALIZER)
    """Return a configuration with all else unset."""
    unset = dict.fromkeys(("blocking", "cga", "min_ctas", "max_ctas", "split_share", "traffic_class"), -(2**31))
    return Config(**{"size": 48, "magic": 0xCAFEBEEF, "version": 21800, **unset, **fields})


_P, _S, _I = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_ARGUMENTS: dict[str, Sequence[Any]] = {
    "AllReduce": [_P, _P, _S, _I, _I, _P, _P],
    "Reduce": [_P, _P, _S, _I, _I, _I, _P, _P],
    "ReduceScatter": [_P, _P, _S, _I, _I, _P, _P],
    "Broadcast": [_P, _P, _S, _I, _I, _P, _P],
    "Bcast": [_P, _S, _I, _I, _P, _P],
    "AllGather": [_P, _P, _S, _I, _P, _P],
    "Gather": [_P, _P, _S, _I, _I, _P, _P],
    "Scatter": [_P, _P, _S, _I, _I, _P, _P],
    "AlltoAll": [_P, _P, _S, _I, _P, _P],
    "Send": [_P, _S, _I, _I, _P, _P],
    "Recv": [_P, _S, _I, _I, _P, _P],
    "CommInitRank": [_P, _I, UniqueId, _I],
    "CommInitRankConfig": [_P, _I, UniqueId, _I, _P],
    "CommInitRankScalable": [_P, _I, _I, _I, _P, _P],
    "CommSplit": [_P, _I, _I, _P, _P],
    "CommShrink": [_P, _P, _I, _P, _P, _I],
    "CommRevoke": [_P, _I],
    "CommRegister": [_P, _P, _S, _P],
    "CommWindowRegister": [_P, _P, _S, _P, _I],
    "RedOpCreatePreMulSum": [_P, _P, _I, _I, _P],
    "RedOpDestroy": [_I, _P],
    "MemAlloc": [_P, _S],
    "GetErrorString": [_I],
}
_POINTERS = "CommDeregister CommWindowDeregister CommGetAsyncError CommCount CommCuDevice CommUserRank".split()


class Nccl:
    """The library that ``NCCL_LIBRARY`` names; ``nccl.AllReduce(...)`` returns the status."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["NCCL_LIBRARY"])
        for name in ("GetErrorString", "GetLastError"):
            getattr(self._library, f"nccl{name}").restype = ctypes.c_char_p

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, f"nccl{name}")
        if name in _ARGUMENTS:
            function.argtypes = _ARGUMENTS[name]
        elif name in _POINTERS:
            function.argtypes = [_P, _P]
        return function

    def error(self) -> str:
        """Return the text of the last warning."""
        text: bytes = self.GetLastError(None)
        return text.decode()

    def unique_id(self) -> UniqueId:
        """Make an ID."""
        made = UniqueId()
        assert self.GetUniqueId(ctypes.byref(made)) == 0, self.error()
        return made

    def init(
        self, size: int, identity: UniqueId, rank: int, config: Config | None = None
    ) -> tuple[int, ctypes.c_void_p]:
        """Make a communicator; return the status and the handle."""
        comm = ctypes.c_void_p()
        given = ctypes.byref(config) if config else None
        return self.CommInitRankConfig(ctypes.byref(comm), size, identity, rank, given), comm

    def state(self, comm: ctypes.c_void_p) -> int:
        """Return what ``ncclCommGetAsyncError`` says."""
        value = ctypes.c_int(-1)
        assert self.CommGetAsyncError(comm, ctypes.byref(value)) == 0
        return value.value

    def ask(self, question: str, comm: ctypes.c_void_p) -> int:
        """Return the answer of ``ncclCommCount`` and its like."""
        value = ctypes.c_int(-1)
        status = getattr(self, question)(comm, ctypes.byref(value))
        assert status == 0, status
        return value.value


def first_id(nccl: Nccl, rank: int) -> UniqueId:
    """Return the ID that rank 0 makes: it prints it as its first line, and the test gives it to the others' stdin."""
    if rank == 0:
        made = nccl.unique_id()
        print(bytes(made).hex(), flush=True)
        return made
    return UniqueId.from_buffer_copy(bytes.fromhex(sys.stdin.readline()))
