"""Operations on arrays in device memory: whose arrays, on which stream, and what is refused by name."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuda.core import Buffer
from cuda.core import Device as CoreDevice
from helpers.capsule import Exporter
from helpers.held import Held
from helpers.memory import PLANE, DeviceArray, DeviceMemory
from helpers.standin_rank import driver
from mpi4py import MPI

from butter_mpi import Communicator
from butter_mpi.device import Device
from butter_mpi.errors import NotSupportedError

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(PLANE != "nccl", reason="this is about the nccl plane"),
    pytest.mark.skipif(MPI.COMM_WORLD.size < 2, reason="needs 2 ranks"),
]

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
TOTAL = SIZE * (SIZE + 1) // 2


@pytest.fixture
def array(memory: DeviceMemory, device: Device) -> Callable[..., DeviceArray]:
    """What makes arrays of a library whose current stream is the one that ``memory`` reads in the order of."""
    memory.stream = device.make_stream()

    def make(content: Any, dtype: Any = np.float32, **more: Any) -> DeviceArray:
        return DeviceArray(memory, np.asarray(content, dtype), **{"stream": memory.stream, **more})

    return make


def test_every_operation_on_arrays(comm: Communicator, array: Callable[..., DeviceArray]) -> None:
    """Results, out of place and in place, by the dtype of the array and on the stream that the array tells of."""
    own, out = array(np.full((2, 3), RANK + 1)), array(np.zeros((2, 3)))
    comm.all_reduce(own, out)
    assert (out.get() == TOTAL).all() and (own.get() == RANK + 1).all()
    comm.all_reduce(out, op="max")
    assert (out.get() == TOTAL).all()
    every, share = array(np.zeros((SIZE, 6))), array(np.zeros(6))
    comm.all_gather(own, every)
    assert (every.get() == np.arange(1, SIZE + 1)[:, None]).all()
    comm.reduce_scatter(every, share)
    assert (share.get() == SIZE * (RANK + 1)).all()
    whole = array([RANK] * 5, np.int64)
    comm.broadcast(whole, SIZE - 1)
    assert (whole.get() == SIZE - 1).all()
    got = array([-1.0])
    with comm.group():
        comm.send(array([RANK]), (RANK + 1) % SIZE)
        comm.recv(got, (RANK - 1) % SIZE)
    assert got.get() == (RANK - 1) % SIZE
    half = array([RANK + 1] * 7, ml_dtypes.bfloat16)
    comm.all_reduce(half)
    comm.barrier()
    assert (half.get().astype(float) == TOTAL).all() and comm.sequence == 7


class _Tensor:
    """As much of a PyTorch tensor as an operation looks at."""

    is_cuda, device = True, "cuda:0"

    def __init__(self, under: DeviceArray) -> None:
        self._under, self.dtype = under, "torch.bfloat16"

    def numel(self) -> int:
        return self._under._content.size

    def is_contiguous(self) -> bool:
        return True

    def is_conj(self) -> bool:
        return False

    is_neg = is_conj

    def data_ptr(self) -> int:
        return self._under.pointer


class _CupyArray(DeviceArray):
    """An array of CuPy, whose interface tells of no stream unless it is told to."""


_Tensor.__module__, _CupyArray.__module__ = "torch", "cupy"


def test_current_streams_of_cupy_and_torch(
    comm: Communicator, memory: DeviceMemory, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a stream the operation is on the current one of the library that the array is of."""
    stream = memory.stream = device.make_stream()
    current = types.SimpleNamespace(ptr=stream, cuda_stream=stream)
    for name, function in (("cupy", "get_current_stream"), ("torch", "current_stream")):
        cuda = types.SimpleNamespace(**{function: lambda *_: current})
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(cuda=cuda))
    half = np.full(9, RANK + 1, ml_dtypes.bfloat16)
    for made in (_CupyArray(memory, half), _Tensor(DeviceArray(memory, half))):
        with Held(device, stream):
            comm.all_reduce(made)
            assert not device.ready(stream)
        under = made if isinstance(made, DeviceArray) else made._under
        assert (under.get().astype(float) == TOTAL).all()


def test_stream_objects(comm: Communicator, memory: DeviceMemory, device: Device) -> None:
    """A stream of cuda.core, one with ``ptr`` or ``cuda_stream``, and a handle are all streams."""
    core = CoreDevice(device.ordinal)
    core.set_current()
    real = core.create_stream()
    handle = int(real.handle)
    memory.stream = handle
    for stream in (real, types.SimpleNamespace(ptr=handle), types.SimpleNamespace(cuda_stream=handle), handle):
        made = DeviceArray(memory, np.full(4, RANK + 1, np.int32))
        with Held(device, handle):
            comm.all_reduce(made, stream=stream)
            assert not device.ready(handle)
        assert (made.get() == TOTAL).all()


def test_arrays_by_dlpack(comm: Communicator, memory: DeviceMemory, device: Device) -> None:
    """An array that only speaks DLPack needs a stream, which its library is asked to order after its own work."""
    half = np.full(9, RANK + 1, ml_dtypes.bfloat16)
    own = DeviceArray(memory, half)
    made = Exporter(own.pointer, (3, 3), (4, 16), device=(2, device.ordinal), readonly=False)
    with pytest.raises(ValueError, match="stream must be given"):
        comm.all_reduce(made)
    comm.all_reduce(made, stream=memory.stream)
    assert made.streams[-1] == memory.stream and (own.get().astype(float) == TOTAL).all()


def test_buffers_of_cuda_core(comm: Communicator, memory: DeviceMemory, device: Device) -> None:
    """A buffer of cuda.core is its bytes; one that was closed is refused by name."""
    CoreDevice(device.ordinal).set_current()
    own = DeviceArray(memory, np.full(8, RANK + 1, np.int8))
    buffer = Buffer.from_handle(own.pointer, 8, owner=own)
    comm.all_reduce(buffer, stream=memory.stream)
    assert (own.get() == TOTAL).all()
    buffer.close()
    with pytest.raises(TypeError, match=r"sendbuf \(cuda\.core.*Buffer\) does not give its memory .*closed"):
        comm.all_reduce(buffer, stream=memory.stream)
    assert comm.sequence == 1 and comm.is_healthy()


def test_buffer_of_page_locked_memory(comm: Communicator, memory: DeviceMemory, device: Device) -> None:
    """A buffer of cuda.core that the host has too is no device memory, whichever buffers were taken before."""
    CoreDevice(device.ordinal).set_current()
    own = DeviceArray(memory, np.full(8, RANK + 1, np.int8))
    comm.all_reduce(Buffer.from_handle(own.pointer, 8, owner=own), stream=memory.stream)
    host = int(device.call("cuMemHostAlloc", 64, 0))
    with pytest.raises(TypeError, match=r"sendbuf \(cuda\.core.*Buffer\) is not in device memory"):
        comm.all_reduce(Buffer.from_handle(host, 64), stream=memory.stream)
    device.call("cuMemFreeHost", host)
    assert comm.sequence == 1 and (own.get() == TOTAL).all()


def test_array_that_changes_between_calls(comm: Communicator, memory: DeviceMemory) -> None:
    """Each call looks at the array as it is then: elsewhere, longer, of another type; or strided, and refused."""
    array = DeviceArray(memory, np.full(4, RANK + 1, np.float32), stream=memory.stream)
    comm.all_reduce(array)
    for content in (np.full(4, RANK + 1, np.float32), np.full((2, 5), RANK + 1, np.float32), np.full(3, RANK + 1)):
        other = DeviceArray(memory, content, stream=memory.stream)
        array.__cuda_array_interface__, array.dtype = other.__cuda_array_interface__, other.dtype
        comm.all_reduce(array)
        assert (other.get() == TOTAL).all()
    assert (array._memory.get(array.pointer, array._content) == TOTAL).all()
    array.__cuda_array_interface__ = {**other.__cuda_array_interface__, "strides": (-8,)}
    with pytest.raises(ValueError, match=r"strides \(-8,\)"):
        comm.all_reduce(array)
    assert comm.sequence == 4


def test_stream_that_changes_between_calls(
    comm: Communicator, memory: DeviceMemory, device: Device, array: Callable[..., DeviceArray]
) -> None:
    """A stream that was taken before is refused while it is captured, and once it is gone."""
    stream, own = device.make_stream(), array([RANK + 1])
    comm.all_reduce(own, stream=stream)
    device.call("cuStreamBeginCapture", stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    with pytest.raises(ValueError, match=f"captured into a CUDA graph: {stream:#x} is"):
        comm.all_reduce(own, stream=stream)
    device.call("cuGraphDestroy", device.call("cuStreamEndCapture", stream))
    comm.all_reduce(own, stream=stream)
    assert own.get() == TOTAL * SIZE
    device.destroy_stream(stream)
    with pytest.raises(ValueError, match=f"must be the handle of a CUDA stream; {stream:#x} is none"):
        comm.all_reduce(own, stream=stream)
    assert comm.sequence == 2 and comm.is_healthy()


def test_context_that_changes_between_calls(
    comm: Communicator, device: Device, array: Callable[..., DeviceArray]
) -> None:
    """Where another context is current by then a call is refused, and that context stays; none is no hindrance."""
    own = array([RANK + 1])
    comm.all_reduce(own)
    other = device.call("cuCtxCreate", None, 0, device._device)
    with pytest.raises(ValueError, match="is not the primary context of cuda"):
        comm.all_reduce(own)
    assert int(device.call("cuCtxGetCurrent")) == int(other)
    device.call("cuCtxSetCurrent", 0)
    comm.all_reduce(own)
    device.make_current()
    device.call("cuCtxDestroy", other)
    device.make_current()
    assert own.get() == TOTAL * SIZE and comm.sequence == 2


def test_library_orders_nothing_on_a_captured_stream(comm: Communicator, memory: DeviceMemory, device: Device) -> None:
    """An array whose library orders its own work is refused on a captured stream before that is asked to."""
    own = DeviceArray(memory, np.full(9, RANK + 1, np.int8))
    made = Exporter(own.pointer, (9,), (0, 8), device=(2, device.ordinal), readonly=False)
    stream = device.make_stream()
    device.call("cuStreamBeginCapture", stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    with pytest.raises(ValueError, match="captured into a CUDA graph"):
        comm.all_reduce(made, stream=stream)
    assert stream not in made.streams
    device.call("cuGraphDestroy", device.call("cuStreamEndCapture", stream))
    comm.all_reduce(made, stream=stream)
    assert made.streams[-1] == stream and comm.sequence == 1


def test_a_stream_must_be_given_where_none_is_known(comm: Communicator, memory: DeviceMemory) -> None:
    """An array that tells of no stream needs one: none is guessed."""
    made = DeviceArray(memory, np.full(4, RANK + 1, np.int32))
    with pytest.raises(ValueError, match="stream must be given"):
        comm.all_reduce(made)
    comm.all_reduce(made, stream=memory.stream)
    assert (made.get() == TOTAL).all()


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "NumPy": (lambda make: np.zeros(4, np.float32), TypeError, r"sendbuf must be an array in device memory .*ndarray"),
    "list": (lambda make: [1.0], TypeError, "sendbuf must be an array in device memory"),
    "host memory": (lambda make: make([1.0], data=(np.zeros(1).ctypes.data, False)), ValueError, "sendbuf is host mem"),
    "a column": (lambda make: make(np.zeros((4, 4)), shape=(4,), strides=(16,)), ValueError, r"strides \(16,\)"),
    "reversed": (lambda make: make(np.zeros(4), strides=(-4,)), ValueError, r"strides \(-4,\)"),
    "read-only": (lambda make: make([1.0], data=(make([1.0]).pointer, True)), ValueError, "sendbuf is read-only"),
    "8-bit float of another kind": (
        lambda make: make([1], ml_dtypes.float8_e4m3fnuz),
        ValueError,
        "got 'float8_e4m3fnuz'",
    ),
    "int16": (lambda make: make([1], np.int16), NotSupportedError, "NCCL reduces integers of 8, 32 and 64 bits"),
    "freed": (lambda make: make([1.0], data=(0, False)), ValueError, "1 elements and no memory; it was freed"),
    "foreign endian": (lambda make: make([1], ">f4" if sys.byteorder == "little" else "<f4"), ValueError, "foreign"),
    "masked": (lambda make: make([1.0], mask=make([1.0])), TypeError, "masked"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_buffers(comm: Communicator, array: Callable[..., DeviceArray], what: str) -> None:
    """What is no plain array of this device is refused by name before anything is sent; the next operation is right."""
    make, error, text = REFUSED[what]
    with pytest.raises(error, match=text) as caught:
        comm.all_reduce(make(array))
    assert str(caught.value).startswith(f"rank {RANK}/{SIZE}") and comm.sequence == 0
    good = array([RANK + 1])
    comm.all_reduce(good)
    assert good.get() == TOTAL


def test_memory_of_another_device(comm: Communicator, array: Callable[..., DeviceArray], device: Device) -> None:
    """Memory of another device of this process is refused; the communicator is not harmed."""
    if int(device.call("cuDeviceGetCount")) < 2:
        pytest.skip("needs 2 devices")
    other = (device.ordinal + 1) % int(device.call("cuDeviceGetCount"))
    handle = device.call("cuDeviceGet", other)
    device.call("cuCtxSetCurrent", device.call("cuDevicePrimaryCtxRetain", handle))
    pointer = int(device.call("cuMemAlloc", 64))
    device.make_current()
    with pytest.raises(ValueError, match=f"sendbuf is memory of cuda:{other}; .* cuda:{device.ordinal}"):
        comm.all_reduce(array(np.zeros(4), data=(pointer, False)))
    device.call("cuMemFree", pointer)
    device.call("cuDevicePrimaryCtxRelease", handle)
    good = array([RANK + 1])
    comm.all_reduce(good)
    assert good.get() == TOTAL and comm.sequence == 1


def test_freed_memory(comm: Communicator, array: Callable[..., DeviceArray], device: Device) -> None:
    """Memory that went back to the driver is refused, whatever the array still says, and though it was taken before."""
    pointer = device.alloc(64)
    freed = array(np.zeros(4), data=(pointer, False))
    comm.all_reduce(freed)
    WORLD.Barrier()
    while not (comm.is_healthy() and device.ready(freed._memory.stream)):
        pass
    device.free(pointer)
    with pytest.raises(ValueError, match=r"sendbuf is host memory, or was freed; .* works on memory of cuda"):
        comm.all_reduce(freed)
    assert comm.sequence == 1 and comm.is_healthy()


def test_sums_of_8_bit_floats_need_the_hardware(
    comm: Communicator, array: Callable[..., DeviceArray], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below compute capability 9.0 NCCL's sums of 8-bit floats would fail; moving them is no problem."""
    monkeypatch.setitem(vars(device), "capability", (8, 9))
    tiny = array([RANK + 1], ml_dtypes.float8_e4m3fn)
    with pytest.raises(NotSupportedError, match=r"capability 8\.9"):
        comm.all_reduce(tiny)
    comm.broadcast(tiny, 0)
    assert tiny.get().astype(float) == 1 and comm.sequence == 1
