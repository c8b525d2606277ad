"""Plans that launch a CUDA graph: the same results, compared on every rank, and nothing left of them at the end."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers.held import Held
from helpers.memory import PLANE, DeviceArray, DeviceMemory
from mpi4py import MPI

from butter_mpi import Communicator, PreMulSum, nccl
from butter_mpi.control import Watch
from butter_mpi.device import Device
from butter_mpi.errors import CollectiveMismatchError, CommunicatorBrokenError, CUDAError, NCCLError, PeerLostError
from butter_mpi.planes import graphs
from butter_mpi.planes.keeping import Keeping

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(PLANE != "nccl", reason="this is about the nccl plane"),
    pytest.mark.skipif(MPI.COMM_WORLD.size < 2, reason="needs 2 ranks"),
]

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
TOTAL = SIZE * (SIZE + 1) // 2

Make = Callable[..., DeviceArray]


class _Stream:
    """A stream object that keeps its handle valid."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


class ExternalStream(_Stream):
    """One that does not."""


@pytest.fixture
def make(memory: DeviceMemory) -> Make:
    """What makes arrays on the stream that ``memory`` reads in the order of."""
    return lambda content, dtype=np.float32: DeviceArray(memory, np.array(content, dtype), stream=memory.stream)


def _told(text: str, plan: Callable[[], Any], comm: Communicator) -> str:
    """Return what a call, or a moment after it the watcher, says of ranks that differ."""

    def differ() -> None:
        plan()
        comm.wait_for_async_error(20)

    with pytest.raises(CollectiveMismatchError, match=text) as caught:
        differ()
    return str(caught.value)


def test_each_operation(comm: Communicator, make: Make) -> None:
    """Every operation gives by its graph what its call gives, again and again, mixed with calls and communicators."""
    own, out, every, share = make([RANK + 1] * 6), make([0] * 6), make(np.zeros((SIZE, 6))), make([0] * 6)
    whole, one, kept = make([RANK] * 5), make([RANK + 1] * 3), make([0] * 3)
    plans = [
        comm.plan_all_reduce(own, out, graph=True),
        comm.plan_all_gather(own, every, graph=True),
        comm.plan_reduce_scatter(every, share, op="max", graph=True),
        comm.plan_broadcast(whole, SIZE - 1, graph=True),
        comm.plan_reduce(one, kept, SIZE - 1, op="prod", graph=True),
    ]
    assert all(plan.graph for plan in plans) and comm.sequence == 0
    with comm.dup() as other:
        beside, also = other.plan_all_reduce(own, out, op="max", graph=True), make([1] * 2)
        for _ in range(3):
            for plan in plans:
                plan()
            comm.all_reduce(also)
            beside()
            assert (out.get() == SIZE).all()
            plans[0]()
            assert (out.get() == TOTAL).all()
        assert other.sequence == 3 and comm.sequence == 3 * 7
    assert (also.get() == SIZE**3).all()
    assert (every.get() == np.arange(1, SIZE + 1)[:, None]).all() and (share.get() == RANK + 1).all()
    assert (whole.get() == SIZE - 1).all()
    assert (kept.get() == (np.prod(range(1, SIZE + 1)) if RANK == SIZE - 1 else 0)).all()


def test_the_place_of_a_call_is_recorded(comm: Communicator, make: Make, plane: Any) -> None:
    """Each call names its own place, and the graph."""
    plan = comm.plan_all_reduce(make([1] * 4), graph=True)
    plan()
    first = plane.last
    plan()
    line = test_the_place_of_a_call_is_recorded.__code__.co_firstlineno + 3
    assert first == f"all_reduce #1 (float32 x 4, sum, by a CUDA graph) at ranks/test_nccl_graphs.py:{line}"
    assert plane.last.endswith(f":{line + 2}")


def test_streams_that_arrays_name_wait(comm: Communicator, make: Make, device: Device, memory: DeviceMemory) -> None:
    """Where a plan's array names another stream, later work there comes after each call, made by a graph or not."""
    named, ordered = memory.stream, device.make_stream()
    plain, launched = make([1] * 4), make([1] * 4)
    plans = [
        comm.plan_all_reduce(data, stream=_Stream(ordered), graph=graph)
        for data, graph in ((plain, False), (launched, True))
    ]
    for plan in plans:
        with Held(device, ordered):
            plan()
            assert not device.ready(named)
    assert (plain.get() == SIZE).all() and (launched.get() == SIZE).all()


def test_a_stream_of_its_own(comm: Communicator, make: Make, device: Device, memory: DeviceMemory) -> None:
    """The graph is launched on the plan's stream, and what the array names comes before and after."""
    named, ordered = memory.stream, device.make_stream()
    data = make([1] * 4)
    plan = comm.plan_all_reduce(data, stream=ordered, graph=True)
    with Held(device, named):
        plan()
        assert not device.ready(ordered)
    assert (data.get() == SIZE).all()


def test_what_has_no_graph(comm: Communicator, make: Make) -> None:
    """What is not one call of NCCL is refused by name, and what moves nothing is an ordinary plan."""
    with pytest.raises(ValueError, match=r"plan_all_reduce: graph=True is for what is one call .*, and premul_sum"):
        comm.plan_all_reduce(make([1] * 4), op=PreMulSum(2.0), graph=True)
    with pytest.raises(ValueError, match="one call of NCCL, and bool is not"):
        comm.plan_broadcast(make([1] * 4, bool), graph=True)
    with pytest.raises(ValueError, match="plan_graph inside a group; end it first"), comm.group():
        comm.plan_all_reduce(make([1] * 4), graph=True)
    empty = comm.plan_all_reduce(make([]), graph=True)
    empty()
    assert not empty.graph and comm.is_healthy() and comm.sequence == 1


def test_not_inside_a_group(comm: Communicator, make: Make) -> None:
    """Inside a group it is refused before anything is sent, and outside it goes on."""
    data = make([1] * 4)
    plan = comm.plan_all_reduce(data, graph=True)
    with pytest.raises(ValueError, match="all_reduce #1: a plan with graph=True inside a group"), comm.group():
        plan()
    assert comm.sequence == 0 and comm.is_healthy()
    plan()
    assert (data.get() == SIZE).all()


@pytest.mark.parametrize("other", ["kind", "count", "op"])
def test_another_plan_is_named(comm: Communicator, make: Make, other: str) -> None:
    """A rank that makes it of another operation is named on every rank, with both places."""

    def differ() -> None:
        if RANK == SIZE - 1 and other == "kind":
            comm.plan_broadcast(make([1] * 8), graph=True)
        elif RANK == SIZE - 1:
            comm.plan_all_reduce(make([1] * (9 if other == "count" else 8)), op="max", graph=True)
        else:
            comm.plan_all_reduce(make([1] * 8), graph=True)

    with pytest.raises(CollectiveMismatchError) as caught:
        differ()
    text = str(caught.value)
    assert "plan_graph #0 (float32 x 8, sum, by all_reduce)" in text, text
    wrong = {"kind": "x 8, root 0, by broadcast)", "count": "x 9, max, by", "op": "x 8, max, by all_reduce)"}[other]
    assert wrong in text and "test_nccl_graphs.py:" in text, text


def test_a_plan_without_a_graph_is_named(comm: Communicator, make: Make) -> None:
    """A rank that goes on without is named: where it has come to something else, or when it leaves."""
    data = make([1] * 8)

    def differ() -> None:
        if RANK == SIZE - 1:
            comm.plan_all_reduce(data)
            comm.all_gather_json("something else")
        else:
            comm.plan_all_reduce(data, graph=True)

    with pytest.raises(CollectiveMismatchError) as caught:
        differ()
    assert "all_gather_json #0" in str(caught.value) and "plan_graph #0" in str(caught.value)


def test_a_rank_that_goes_on_is_named(comm: Communicator, make: Make) -> None:
    """So is one that calls its plan, which waits on the device for nobody to come."""
    data = make([1] * 8)

    def differ() -> None:
        if RANK == SIZE - 1:
            comm.plan_all_reduce(data)()
            comm.wait_for_async_error(20)
        else:
            comm.plan_all_reduce(data, graph=True)

    began = time.monotonic()
    with pytest.raises(CollectiveMismatchError) as caught:
        differ()
    assert "all_reduce #1 (float32 x 8, sum)" in str(caught.value) and "plan_graph #0" in str(caught.value)
    assert time.monotonic() - began < 5


def test_a_rank_that_leaves_is_named(comm: Communicator, make: Make) -> None:
    """Whoever waits for a rank that closed instead is told so."""
    if RANK == SIZE - 1:
        comm.close()
        return
    with pytest.raises(PeerLostError, match=f"plan_graph #0 .*rank {SIZE - 1} closed its communicator"):
        comm.plan_all_reduce(make([1] * 8), graph=True)


def test_a_launch_is_no_call(comm: Communicator, make: Make) -> None:
    """A rank that calls the operation where others launch its graph is named, at once or by the watcher."""
    data = make([1] * 8)
    plan = comm.plan_all_reduce(data, graph=True)
    plan()
    text = _told("by a CUDA graph", (lambda: comm.all_reduce(data)) if RANK == 0 else plan, comm)
    assert "all_reduce #2 (float32 x 8, sum) at" in text and "all_reduce #2 (float32 x 8, sum, by a CUDA" in text, text


@pytest.mark.parametrize("what", ["nothing can be captured", "a node of the host", "no events"])
def test_all_go_on_without(comm: Communicator, make: Make, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Where one rank has no graph that could be used none uses one: the plan is an ordinary one on all."""
    if RANK == SIZE - 1 and what == "nothing can be captured":
        monkeypatch.setattr("butter_mpi.planes.launching.lacking", lambda: "the driver has no cuGraphLaunch")
    elif RANK == SIZE - 1:
        monkeypatch.setattr(graphs, "_kinds", lambda _graph: {0, 3, 7} if "host" in what else {0})
    data = make([1] * 4)
    plan = comm.plan_all_reduce(data, graph=True)
    plan()
    assert not plan.graph and not comm.backend._graphs.living  # type: ignore[attr-defined]
    with comm.group():
        plan()
    assert (data.get() == SIZE**2).all()


def test_a_capture_that_fails_in_the_driver(comm: Communicator, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one driver makes no instance all go on without, and nothing keeps the communicator from its end."""
    call = Device.call

    def refuse(self: Device, name: str, *arguments: Any) -> Any:
        if name == "cuGraphInstantiate":
            raise CUDAError("no", call=name, code=801)
        return call(self, name, *arguments)

    if RANK == 0:
        monkeypatch.setattr(Device, "call", refuse)
    data = make([1] * 4)
    plan = comm.plan_all_reduce(data, graph=True)
    plan()
    assert not plan.graph and (data.get() == SIZE).all()


def test_a_capture_that_fails_in_nccl(
    comm: Communicator, make: Make, plane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of NCCL breaks the communicator as that of a call does; all are told, and none waits."""

    def fail(*_: Any) -> None:
        raise NCCLError("ncclAllReduce failed", call="ncclAllReduce", result=3)

    if RANK == 0:
        monkeypatch.setattr(plane._issuer, "issue", fail)
    began = time.monotonic()
    with pytest.raises(CommunicatorBrokenError, match="ncclAllReduce failed"):
        comm.plan_all_reduce(make([1] * 4), graph=True)
    assert time.monotonic() - began < 5


def test_a_dropped_plan(comm: Communicator, make: Make, plane: Any, device: Device) -> None:
    """Its graph is destroyed at the next submission, also in flight; its arrays go when the stream has passed."""
    data, other = make([1] * 4), make([1] * 4)
    plan, gone = comm.plan_all_reduce(data, graph=True), weakref.ref(data)
    with Held(device, plane.stream):
        plan()
        del plan, data
        gc.collect()
        assert len(plane._graphs.living) == 1
        comm.all_reduce(other)
        gc.collect()
        assert not plane._graphs.living and gone() is not None
    assert (other.get() == SIZE).all()
    comm.check_async_error()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("where", ["own", "object", "external", "handle"])
def test_calls_record_no_events(
    comm: Communicator, make: Make, device: Device, memory: DeviceMemory, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Where the stream lasts as long as the plan a call is the operation alone; a bare handle may not last."""
    if where != "own":
        memory.stream = device.make_stream()
    given = {"own": None, "object": _Stream, "external": ExternalStream, "handle": int}[where]
    data, records = make([1] * 4), list[int]()
    plan = comm.plan_all_reduce(data, stream=given and given(memory.stream))
    mark = Keeping.mark

    def noted(self: Keeping) -> None:
        records.append(len(self._unmarked))
        mark(self)

    monkeypatch.setattr(Keeping, "mark", noted)
    for _ in range(5):
        plan()
    assert records == ([] if where in ("own", "object") else [1] * 5)
    assert (data.get() == SIZE**5).all()


@pytest.mark.parametrize("own", [True, False], ids=["own", "object"])
def test_memory_that_plans_still_use(
    comm: Communicator, plane: Any, device: Device, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """A symmetric array is freed when the stream has passed the calls of plans on it, of which no event tells."""
    stream, ready = (plane.stream if own else device.make_stream()), list[bool]()
    free, quiet = nccl.mem_free, type(plane)._quiet
    held = Held(device, stream)
    looks: list[None] = []

    def look(self: Any, *streams: int) -> bool:
        looks.append(None)
        if len(looks) == 3:
            held.go()
        return bool(quiet(self, *streams))

    def freed(*arguments: Any) -> None:
        ready.append(device.ready(stream))
        free(*arguments)

    monkeypatch.setattr(nccl, "mem_free", freed)
    with comm.symmetric(4) as x:
        plan = comm.plan_all_reduce(x, stream=plane.stream if own else _Stream(stream))
        plan()
        monkeypatch.setattr(type(plane), "_quiet", look)
    assert ready == [True]


def test_buffers_that_plans_still_use(
    comm: Communicator, make: Make, plane: Any, device: Device, memory: DeviceMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A close gives registered buffers back when the stream has passed the calls of plans on them."""
    memory.stream = stream = device.make_stream()
    data, ready, give_back = make([1] * 4), list[bool](), nccl.deregister
    plane.register_buffer(data.pointer, 16)

    def noted(*arguments: Any) -> None:
        ready.append(device.ready(stream))
        give_back(*arguments)

    monkeypatch.setattr(nccl, "deregister", noted)
    plan = comm.plan_all_reduce(data, stream=_Stream(stream))
    with Held(device, stream) as held:
        plan()
        timer = threading.Timer(0.3, held.go)
        timer.start()
        comm.close()
        plane._closing.wait()
        timer.join()
    assert ready == [True]


def test_a_plan_that_is_dropped_inside_a_group(comm: Communicator, make: Make, plane: Any, device: Device) -> None:
    """What a group submits at its end uses the arrays of a plan that is gone by then."""
    data = make([1] * 4)
    gone = weakref.ref(data)
    with Held(device, plane.stream if RANK else device.make_stream()):
        with comm.group():
            comm.plan_all_reduce(data)()
            del data
            gc.collect()
        comm.check_async_error()
        gc.collect()
        assert gone() is not None
        # Nobody lets go before all have looked.
        comm.all_gather_json(None)


def test_a_captured_stream_of_a_dropped_plan(
    comm: Communicator, make: Make, device: Device, memory: DeviceMemory
) -> None:
    """While its stream is captured nothing is put there, and the capture holds; the arrays go afterwards."""
    other, own = make([1] * 4), memory.stream
    memory.stream = stream = device.make_stream()
    data = make([1] * 4)
    plan, gone = comm.plan_all_reduce(data, stream=_Stream(stream)), weakref.ref(data)
    plan()
    assert (data.get() == SIZE).all()
    memory.stream = own
    device.call("cuStreamBeginCapture", stream, device._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    del plan, data
    gc.collect()
    comm.all_reduce(other)
    assert comm.is_healthy() and gone() is not None
    device.call("cuGraphDestroy", device.call("cuStreamEndCapture", stream))
    comm.all_reduce(other)
    assert (other.get() == SIZE**2).all() and comm.is_healthy()
    gc.collect()
    assert gone() is None


def test_a_kernel_that_is_set_later(comm: Communicator, make: Make, device: Device, plane: Any) -> None:
    """Where a kernel adds the plan takes that way, and its graph again when none is set."""
    try:
        module = device.call("cuModuleLoadData", b"STANDIN\0")
    except CUDAError:
        pytest.skip("needs the kernels of the stand-in")
    data = make([1] * 4, ml_dtypes.bfloat16)
    plan = comm.plan_all_reduce(data, graph=True)
    plan()
    plane.set_add_kernel(int(device.call("cuModuleGetFunction", module, b"bf16_add_inplace")))
    adds = SIZE == 2
    assert plan.graph != adds and not plane._connected
    plan()
    assert bool(plane._connected) == adds
    plane.set_add_kernel(0)
    assert plan.graph
    plan()
    assert (data.get().astype(np.float32) == SIZE**3).all()


def test_after_a_reconnect(comm: Communicator, make: Make, plane: Any) -> None:
    """What breaks ends the graph; after the reconnect the plan is an ordinary one on every rank."""
    data, other = make([1] * 4), make([1] * 4)
    plan = comm.plan_all_reduce(data, graph=True)
    plan()
    assert (data.get() == SIZE).all()
    _told("all_reduce #2", lambda: comm.all_reduce(other, op="max" if RANK else "min"), comm)
    with pytest.raises(CommunicatorBrokenError):
        plan()
    began = time.monotonic()
    comm.attempt_reconnect()
    assert time.monotonic() - began < 5
    assert all(stopping.done for stopping in plane._stopping), "an abort waits for a graph"
    plan()
    with comm.group():
        plan()
    assert not plan.graph and (data.get() == SIZE**3).all()
    again = comm.plan_all_reduce(data, graph=True)
    again()
    assert again.graph and (data.get() == SIZE**4).all()


@pytest.mark.parametrize("dropped", [False, True], ids=["living", "dropped"])
def test_close(comm: Communicator, make: Make, plane: Any, dropped: bool) -> None:
    """A close comes to its end beside graphs, and arrays of plans that are dropped go with it."""
    data = make([1] * 4)
    plan: Any = comm.plan_all_reduce(data, graph=True)
    plan()
    assert (data.get() == SIZE).all()
    gone = weakref.ref(data)
    if dropped:
        plan = None
    del data
    WORLD.Barrier()
    comm.close()
    assert plane._closing.done
    del plan
    gc.collect()
    assert gone() is None


def test_abort(comm: Communicator, make: Make, plane: Any, device: Device) -> None:
    """An abort ends launches that wait on the stream, more than the driver takes at a time, in its usual time."""
    plan = comm.plan_all_reduce(make([1] * 4), graph=True)
    WORLD.Barrier()
    if RANK == 0:
        plan()
        comm.abort("enough")
        plane._stopping[0].wait()
        return

    def loop() -> None:
        while True:
            plan()

    began = time.monotonic()
    with pytest.raises(PeerLostError, match="enough"):
        loop()
    assert time.monotonic() - began < 5
    for stopping in plane._stopping:
        stopping.wait()


def test_close_after_a_failure_and_a_plan(comm: Communicator, make: Make, plane: Any) -> None:
    """What failed on its way has no event, and calls of plans record none: a close waits for neither."""
    data, other = make([1] * 4), make([1] * 4)
    plan = comm.plan_all_reduce(data)

    def differ() -> None:
        comm.broadcast(other, int(RANK > 0))
        comm.wait_for_async_error(20)

    with pytest.raises(CommunicatorBrokenError):
        differ()
    comm.attempt_reconnect()
    plan()
    assert (data.get() == SIZE).all()
    WORLD.Barrier()
    comm.close()
    plane._closing.result(Watch(5), "closing")
