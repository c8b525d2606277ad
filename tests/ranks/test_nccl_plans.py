"""Plans on device memory: captures, contexts and kernels that come after a plan was made; calls only enqueue."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers.held import Held
from helpers.memory import PLANE, DeviceArray, DeviceMemory
from mpi4py import MPI

from butter_mpi import Communicator
from butter_mpi.errors import CUDAError

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(PLANE != "nccl", reason="this is about the nccl plane")]

SIZE = MPI.COMM_WORLD.size

Make = Callable[..., DeviceArray]


@pytest.fixture
def make(memory: DeviceMemory) -> Make:
    """What makes arrays on the stream that ``memory`` reads in the order of."""
    return lambda content, dtype=np.float32: DeviceArray(memory, np.array(content, dtype), stream=memory.stream)


def test_a_capture_that_begins_later_is_seen(comm: Communicator, make: Make, device: Any, memory: Any) -> None:
    """A call on a stream that is captured by then is refused, and the capture stays valid; afterwards it goes on."""
    memory.stream = stream = device.make_stream()
    data = make([1] * 4)
    plan = comm.plan_all_reduce(data)
    plan()
    mode = device._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    device.call("cuStreamBeginCapture", stream, mode)
    with pytest.raises(ValueError, match="captured into a CUDA graph"):
        plan()
    assert int(device.call("cuStreamEndCapture", stream)) and comm.sequence == 1
    plan()
    assert (data.get() == SIZE**2).all()


def test_a_dropped_plan_touches_no_stream(comm: Communicator, make: Make, device: Any, memory: DeviceMemory) -> None:
    """After a plan is gone its stream may be captured, and destroyed; its arrays go when the stream has passed."""
    own, memory.stream = memory.stream, device.make_stream()
    data = make([1] * 4)
    plan, gone = comm.plan_all_reduce(data), weakref.ref(data)
    plan()
    memory.wait()
    del plan, data
    mode = device._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    device.call("cuStreamBeginCapture", memory.stream, mode)
    assert comm.is_healthy() and gone() is None
    assert int(device.call("cuStreamEndCapture", memory.stream))
    device.destroy_stream(memory.stream)
    memory.stream = own
    other = make([1] * 4)
    comm.all_reduce(other)
    assert (other.get() == SIZE).all() and comm.is_healthy()


def test_another_context_is_seen(comm: Communicator, make: Make, device: Any) -> None:
    """A call while another package has another context current is refused, and harms nothing."""
    data = make([1] * 4)
    plan = comm.plan_all_reduce(data)
    plan()
    context = device.call("cuCtxCreate", None, 0, device._device)
    try:
        with pytest.raises(ValueError, match="another package has set another device"):
            plan()
    finally:
        device.call("cuCtxDestroy", context)
        device.make_current()
    plan()
    assert comm.sequence == 2 and (data.get() == SIZE**2).all()


def test_a_kernel_that_is_set_later_is_used(comm: Communicator, make: Make, device: Any, plane: Any) -> None:
    """A plan follows ``set_add_kernel``, which every rank calls: the next call takes the new way."""
    try:
        module = device.call("cuModuleLoadData", b"STANDIN\0")
    except CUDAError:
        pytest.skip("needs the kernels of the stand-in")
    data = make([1] * 4, ml_dtypes.bfloat16)
    plan = comm.plan_all_reduce(data)
    plan()
    assert not plane._connected
    plane.set_add_kernel(int(device.call("cuModuleGetFunction", module, b"bf16_add_inplace")))
    plan()
    assert bool(plane._connected) == (SIZE == 2)
    plane.set_add_kernel(0)
    plan()
    assert (data.get().astype(np.float32) == SIZE**3).all()


def test_calls_return_before_the_stream_comes_to_them(comm: Communicator, make: Make, device: Any, plane: Any) -> None:
    """Calls are put on the stream, and none is waited for."""
    data = make([1] * 4)
    plan = comm.plan_all_reduce(data, op="max")
    with Held(device, plane.stream):
        for _ in range(50):
            plan()
        assert comm.sequence == 50 and not device.ready(plane.stream)
    assert (data.get() == 1).all()
