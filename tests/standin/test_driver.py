"""The stand-in for the CUDA driver, under the real cuda-python: what a program may rely on and must survive."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import pytest
from helpers.standin import SOURCES, Standin, build

HEAD = """
import ctypes, json, sys, threading
import numpy as np
from helpers.standin_rank import *

def status(result):
    return int(result[0])
"""


@pytest.fixture(scope="module")
def standin() -> Standin:
    """Return the build."""
    return build()


def run(standin: Standin, code: str, **env: str) -> Any:
    """Run a program on the stand-in."""
    return standin.run(HEAD + textwrap.dedent(code), env=env)


def test_build_is_kept(standin: Standin) -> None:
    """A second build of the same sources is the first one, and holds the two libraries and nothing else."""
    assert build() == standin
    assert sorted(file.name for file in standin.folder.iterdir()) == ["libcuda.so.1", "libnccl.so.2"]


DEVICES = """
from butter_mpi.cuda import devices
from butter_mpi.errors import CUDAError
import os
try:
    print(json.dumps([[d["ordinal"], d["uuid"], d["name"], d["pci"]] for d in devices(os.environ)]))
except CUDAError as error:
    print(json.dumps(error.code))
"""


def test_devices_have_names_of_their_own(standin: Standin) -> None:
    """As many as asked for, each with a UUID, a name and an address; another machine has other UUIDs."""
    here = run(standin, DEVICES, STANDIN_DEVICES="3")
    assert [row[0] for row in here] == [0, 1, 2]
    assert all(len({row[column] for row in here}) == 3 for column in (1, 2, 3))
    there = run(standin, DEVICES, STANDIN_DEVICES="3", STANDIN_MACHINE="another")
    assert not {row[1] for row in here} & {row[1] for row in there}
    assert run(standin, DEVICES, STANDIN_DEVICES="3") == here


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("2,0", [2, 0]),
        ("0,9,1", [0]),
        ("1,1", 100),
        ("", 100),
        ("-1", 100),
        ("GPU-3", 100),
    ],
)
def test_visible_devices(standin: Standin, visible: str, expected: list[int] | int) -> None:
    """``CUDA_VISIBLE_DEVICES`` chooses, orders and hides as it does for the driver."""
    found = run(standin, DEVICES, CUDA_VISIBLE_DEVICES=visible)
    if isinstance(expected, int):
        assert found == expected
    else:
        assert [row[2] for row in found] == [f"Stand-in GPU {number}" for number in expected]
        assert [row[0] for row in found] == list(range(len(expected)))


def test_visible_device_by_uuid(standin: Standin) -> None:
    """A whole UUID names its device, and the beginning of one that several have names none."""
    uuid = run(standin, DEVICES)[2][1]
    assert [row[1:3] for row in run(standin, DEVICES, CUDA_VISIBLE_DEVICES=uuid)] == [[uuid, "Stand-in GPU 2"]]
    assert run(standin, DEVICES, CUDA_VISIBLE_DEVICES=uuid[:12]) == 100


def test_machine_without_device(standin: Standin) -> None:
    """No device: initialization says so."""
    assert run(standin, DEVICES, STANDIN_DEVICES="0") == 100


def test_work_is_asynchronous_and_ordered(standin: Standin) -> None:
    """Calls return while a stream is held; an event carries the order to another stream; all is done after a wait."""
    code = """
    g = Gpu(1)
    a, b, event = g.stream(), g.stream(), g.event()
    x, y = g.put(np.zeros(1000, np.float32)), g.put(np.zeros(1000, np.float32))
    release = g.hold(a)
    g.launch("fill_f32", a, x, 3.0, 1000)
    check(driver.cuEventRecord(event, a))
    check(driver.cuStreamWaitEvent(b, event, 0))
    g.launch("axpy_f32", b, 2.0, x, y, 1000)
    held = [status(driver.cuStreamQuery(a)), status(driver.cuStreamQuery(b)), status(driver.cuEventQuery(event))]
    release()
    check(driver.cuStreamSynchronize(b))
    free = [status(driver.cuStreamQuery(a)), status(driver.cuStreamQuery(b)), status(driver.cuEventQuery(event))]
    values = set(g.get(y, np.zeros(1000, np.float32)).tolist())
    print(json.dumps([held, free, sorted(values)]))
    """
    assert run(standin, code) == [[600, 600, 600], [0, 0, 0], [6.0]]


def test_streams_do_not_wait_unasked(standin: Standin) -> None:
    """Without an event another stream runs on, and a wait holds what the event meant when it was made."""
    code = """
    g = Gpu()
    a, b, event = g.stream(), g.stream(), g.event()
    check(driver.cuStreamWaitEvent(b, event, 0))      # never recorded: complete
    check(driver.cuEventRecord(event, a))
    check(driver.cuStreamWaitEvent(b, event, 0))
    release = g.hold(a)
    check(driver.cuEventRecord(event, a))             # later: not what b waits for
    check(driver.cuStreamSynchronize(b))
    other = status(driver.cuEventQuery(event))
    release()
    check(driver.cuEventSynchronize(event))
    print(json.dumps([other, status(driver.cuEventQuery(event))]))
    """
    assert run(standin, code) == [600, 0]


def test_legacy_stream_orders_blocking_streams(standin: Standin) -> None:
    """The null stream waits for blocking streams and they for it; a non-blocking stream does neither."""
    code = """
    g = Gpu()
    blocking, free = g.stream(0), g.stream(1)
    release = g.hold(blocking)
    check(driver.cuMemsetD8Async(g.blank(8), 1, 8, 0))
    held = [status(driver.cuStreamQuery(0)), status(driver.cuStreamQuery(free))]
    release()
    check(driver.cuStreamSynchronize(0))
    release = g.hold(0, 1)
    check(driver.cuMemsetD8Async(g.blank(8), 1, 8, blocking))
    check(driver.cuMemsetD8Async(g.blank(8), 1, 8, free))
    check(driver.cuStreamSynchronize(free))
    behind = [status(driver.cuStreamQuery(blocking)), status(driver.cuStreamQuery(1))]
    release()
    check(driver.cuCtxSynchronize())
    print(json.dumps([held, behind, status(driver.cuStreamQuery(blocking))]))
    """
    assert run(standin, code) == [[600, 0], [600, 600], 0]


def test_per_thread_stream(standin: Standin) -> None:
    """Each thread has a per-thread stream of its own, which is a blocking one."""
    code = """
    g = Gpu()
    release = g.hold(2)
    seen = []
    def other():
        check(driver.cuCtxSetCurrent(g.context))
        seen.append(status(driver.cuStreamQuery(2)))
    t = threading.Thread(target=other); t.start(); t.join()
    own = status(driver.cuStreamQuery(2))
    release()
    check(driver.cuStreamSynchronize(2))
    print(json.dumps([seen, own, int(check(driver.cuStreamGetFlags(2)))]))
    """
    assert run(standin, code) == [[0], 600, 0]


def test_host_function_runs_in_stream_order(standin: Standin) -> None:
    """A host function comes after what was enqueued before it, and later work after it."""
    code = """
    g = Gpu()
    s, order = g.stream(), []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda argument: order.append(argument))
    release = g.hold(s)
    check(driver.cuLaunchHostFunc(s, driver.CUhostFn(ctypes.cast(function, ctypes.c_void_p).value), 42))
    before = list(order)
    release()
    check(driver.cuStreamSynchronize(s))
    print(json.dumps([before, order]))
    """
    assert run(standin, code) == [[], [42]]


@pytest.mark.parametrize(
    "spoil",
    [
        "check(driver.cuMemcpyDtoHAsync(out.ctypes.data, x + 8, 64, s))",
        "g.launch('fill_f32', s, x, 1.0, 17)",
        "check(driver.cuMemFree(x)); g.launch('fill_f32', s, x, 1.0, 16)",
    ],
)
def test_access_out_of_bounds_breaks_the_device(standin: Standin, spoil: str) -> None:
    """It is told asynchronously, and every later call of the process gets it too."""
    code = f"""
    g = Gpu()
    s, x, out = g.stream(), g.blank(64), np.zeros(16, np.float32)
    {spoil}
    print(json.dumps([status(driver.cuStreamSynchronize(s)), status(driver.cuMemcpyHtoD(x, out.ctypes.data, 4)),
                      status(driver.cuStreamQuery(s)), status(driver.cuMemAlloc(4))]))
    """
    assert run(standin, code) == [700, 700, 700, 700]


def test_host_cannot_touch_device_memory(standin: Standin) -> None:
    """Reading through a device pointer ends the process, as on a GPU."""
    with standin.start(HEAD + "g = Gpu()\nctypes.string_at(g.blank(64), 4)") as process:
        process.communicate(timeout=60)
    assert process.returncode == -11


def test_pointers_are_described(standin: Standin) -> None:
    """Device memory, pinned memory and ordinary memory are told apart, with device, context and range."""
    code = """
    g = Gpu(2)
    a = driver.CUpointer_attribute
    names = [a.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, a.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
             a.CU_POINTER_ATTRIBUTE_RANGE_SIZE, a.CU_POINTER_ATTRIBUTE_IS_MANAGED]
    def describe(pointer):
        return [int(value) for value in check(driver.cuPointerGetAttributes(len(names), names, pointer))]
    x, host = g.blank(100), np.zeros(4)
    pinned = int(check(driver.cuMemHostAlloc(64, 0)))
    pooled = int(check(driver.cuMemAllocAsync(32, 0)))
    context = a.CU_POINTER_ATTRIBUTE_CONTEXT
    same = int(check(driver.cuPointerGetAttribute(context, x + 99))) == int(g.context)
    print(json.dumps([describe(x + 99), describe(pinned), describe(host.ctypes.data), describe(pooled), same,
                      int(check(driver.cuPointerGetAttribute(context, pooled)) or 0),
                      status(driver.cuPointerGetAttribute(context, host.ctypes.data)),
                      status(driver.cuPointerGetAttribute(context, x + 100))]))
    """
    device, pinned, ordinary, pooled, same, owner, *refused = run(standin, code)
    assert (device, pinned) == ([2, 2, 100, 0], [1, 2, 64, 0])
    assert (ordinary, pooled) == ([0, -2, 0, 0], [2, 2, 32, 0])
    assert same and owner == 0 and refused == [1, 1]


def test_memory_is_counted(standin: Standin) -> None:
    """There is as much as asked for; what is freed comes back; a pointer is freed once."""
    code = """
    g = Gpu()
    def free(): return int(check(driver.cuMemGetInfo())[0])
    start = free()
    x = g.blank(1 << 19)
    later = int(check(driver.cuMemAllocAsync(1 << 18, 0)))
    used = start - free()
    too_much = status(driver.cuMemAlloc(1 << 20))
    check(driver.cuMemFreeAsync(later, 0)); check(driver.cuMemFree(x))
    print(json.dumps([start, used, too_much, free(), status(driver.cuMemFree(x)), status(driver.cuMemFree(0))]))
    """
    found = run(standin, code, STANDIN_MEMORY_MIB="1")
    assert found == [1 << 20, (1 << 19) + (1 << 18), 2, 1 << 20, 1, 0]


def test_copies_and_fills(standin: Standin) -> None:
    """Every copy and fill that the plane uses, and what a wrong direction gives."""
    code = """
    g = Gpu()
    s, host, back = g.stream(), np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    x, y = g.blank(64), g.blank(64)
    fresh = set(g.get(x, back).tolist())
    check(driver.cuMemcpyHtoDAsync(x, host.ctypes.data, 64, s))
    check(driver.cuMemcpyDtoDAsync(y, x, 64, s))
    check(driver.cuMemcpyAsync(y + 32, x, 16, s))
    check(driver.cuMemsetD8Async(y, 7, 4, s))
    check(driver.cuMemsetD16Async(y + 4, 0x0102, 2, s))
    check(driver.cuMemsetD32Async(y + 8, 0x01020304, 1, s))
    check(driver.cuMemcpyDtoHAsync(back.ctypes.data, y, 64, s))
    check(driver.cuStreamSynchronize(s))
    expected = np.concatenate([[7] * 4, [2, 1] * 2, [4, 3, 2, 1], host[12:32], host[:16], host[48:]])
    print(json.dumps([sorted(fresh), bool((back == expected).all()),
                      status(driver.cuMemcpyDtoD(x, host.ctypes.data, 4)),
                      status(driver.cuMemcpyHtoD(host.ctypes.data, host.ctypes.data, 4)),
                      status(driver.cuMemsetD32Async(y + 1, 0, 1, s))]))
    """
    assert run(standin, code) == [[0xCB], True, 1, 1, 1]


def test_add_kernel_rounds_like_the_type(standin: Standin) -> None:
    """``bf16_add_inplace`` gives what ml_dtypes gives, infinities and subnormals included."""
    code = """
    from ml_dtypes import bfloat16
    g = Gpu()
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 16, (2, 50000), dtype=np.uint16)
    a, b = bits[0].view(bfloat16), bits[1].view(bfloat16)
    x, y, s = g.put(a), g.put(b), g.stream()
    g.launch("bf16_add_inplace", s, x, y, a.size)
    check(driver.cuStreamSynchronize(s))
    with np.errstate(all="ignore"):
        expected = (a.astype(np.float32) + b.astype(np.float32)).astype(bfloat16)
    got = g.get(x, a)
    nan = np.isnan(expected)
    print(json.dumps([bool((np.isnan(got) == nan).all()),
                      bool((got[~nan].view(np.uint16) == expected[~nan].view(np.uint16)).all())]))
    """
    assert run(standin, code) == [True, True]


def test_images_and_kernels(standin: Standin) -> None:
    """An image that is none and a kernel that no image has are refused; a library's kernel launches like a module's."""
    code = """
    g = Gpu()
    library = check(driver.cuLibraryLoadData(b".version 8.0", [], [], 0, [], [], 0))
    kernel = check(driver.cuLibraryGetKernel(library, b"delay_us"))
    s, given = g.stream(), ((10,), (ctypes.c_uint32,))
    check(driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, s, given, 0))
    check(driver.cuStreamSynchronize(s))
    print(json.dumps([status(driver.cuModuleLoadData(b"rubbish")), status(driver.cuLibraryGetKernel(library, b"none")),
                      status(driver.cuLaunchKernel(kernel, 1, 1, 1, 2048, 1, 1, 0, s, given, 0))]))
    """
    assert run(standin, code) == [200, 500, 1]


def test_capture_is_seen_and_can_be_spoiled(standin: Standin) -> None:
    """A capture is told by both questions, survives them, counts work without running it, and dies of a query."""
    code = """
    g = Gpu()
    a, b, event, x = g.stream(), g.stream(), g.event(), g.put(np.zeros(4, np.float32))
    mode = driver.CUstreamCaptureMode
    def capturing(s):
        return [int(check(driver.cuStreamIsCapturing(s))), int(check(driver.cuStreamGetCaptureInfo(s))[0])]
    before = capturing(a)
    check(driver.cuStreamBeginCapture(a, mode.CU_STREAM_CAPTURE_MODE_RELAXED))
    during = capturing(a)
    g.launch("fill_f32", a, x, 5.0, 4)
    check(driver.cuEventRecord(event, a)); check(driver.cuStreamWaitEvent(b, event, 0))
    joined = capturing(b)
    graph = check(driver.cuStreamEndCapture(a))
    after = [capturing(a), capturing(b), g.get(x, np.zeros(4, np.float32)).tolist()]
    check(driver.cuGraphDestroy(graph))
    check(driver.cuStreamBeginCapture(a, mode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    spoiled = [status(driver.cuStreamQuery(a)), capturing(a)[0], status(driver.cuStreamEndCapture(a)), capturing(a)[0]]
    check(driver.cuStreamBeginCapture(a, mode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    unsafe = [status(driver.cuMemAlloc(4)), capturing(a)[0], status(driver.cuStreamEndCapture(a))]
    check(driver.cuStreamBeginCapture(a, mode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    refused = []
    def other():
        check(driver.cuCtxSetCurrent(g.context)); refused.append(status(driver.cuMemAlloc(4)))
    t = threading.Thread(target=other); t.start(); t.join()
    refused += [capturing(a)[0], status(driver.cuStreamEndCapture(a))]
    print(json.dumps([before, during, joined, after, spoiled, unsafe, refused]))
    """
    before, during, joined, after, spoiled, unsafe, refused = run(standin, code)
    assert (before, during, joined) == ([0, 0], [1, 1], [1, 1])
    assert after == [[0, 0], [0, 0], [0.0] * 4]
    assert (spoiled, unsafe, refused) == ([900, 2, 901, 0], [900, 2, 901], [0, 1, 0])


def test_contexts_are_per_thread(standin: Standin) -> None:
    """A thread without a current context is told so; push, pop and a context beside the primary one work."""
    code = """
    g = Gpu(1)
    seen = []
    t = threading.Thread(target=lambda: seen.append(status(driver.cuMemAlloc(4)))); t.start(); t.join()
    first = check(driver.cuDevicePrimaryCtxRetain(0))
    check(driver.cuCtxPushCurrent(first))
    inner = int(check(driver.cuCtxGetDevice()))
    s = g.stream()
    check(driver.cuCtxPopCurrent())
    owner = [int(check(driver.cuStreamGetCtx(s))[0] if isinstance(check(driver.cuStreamGetCtx(s)), list)
                 else check(driver.cuStreamGetCtx(s))) == int(first), int(check(driver.cuCtxGetDevice()))]
    check(driver.cuDevicePrimaryCtxRelease(0))
    print(json.dumps([seen, inner, owner, [int(v) for v in check(driver.cuDevicePrimaryCtxGetState(0))],
                      status(driver.cuDevicePrimaryCtxRelease(0))]))
    """
    assert run(standin, code) == [[201], 0, [True, 1], [0, 0], 201]


def test_handles_that_are_gone_are_refused(standin: Standin) -> None:
    """A destroyed stream or event is an invalid handle; its queued work still ran."""
    code = """
    g = Gpu()
    s, event, x = g.stream(), g.event(), g.put(np.zeros(2, np.float32))
    release = g.hold(s)
    g.launch("fill_f32", s, x, 4.0, 2)
    check(driver.cuEventRecord(event, s))
    check(driver.cuStreamDestroy(s))
    gone = [status(driver.cuStreamQuery(s)), status(driver.cuStreamDestroy(s))]
    release()
    check(driver.cuEventSynchronize(event)); check(driver.cuEventDestroy(event))
    print(json.dumps([gone, g.get(x, np.zeros(2, np.float32)).tolist(), status(driver.cuEventRecord(event, 0))]))
    """
    assert run(standin, code) == [[400, 400], [4.0, 4.0], 400]


def test_before_init_nothing_works(standin: Standin) -> None:
    """Calls before cuInit are refused, names of statuses and the version are not."""
    code = """
    print(json.dumps([status(driver.cuDeviceGetCount()), int(check(driver.cuDriverGetVersion())),
                      check(driver.cuGetErrorName(driver.CUresult.CUDA_ERROR_NOT_READY)).decode(),
                      check(driver.cuGetErrorString(driver.CUresult.CUDA_ERROR_NOT_READY)).decode()]))
    """
    found = run(standin, code, STANDIN_DRIVER_VERSION="12080")
    assert found == [3, 12080, "CUDA_ERROR_NOT_READY", "device not ready"]


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ("", [0, 0, 0, 0, 0]),
        ("cuMemsetD8Async#2=2", [0, 2, 0, 0, 0]),
        ("cuMemsetD8Async#2+=46", [0, 46, 46, 0, 0]),
        ("cuMemsetD8Async#2=700!", [0, 700, 700, 700, 700]),
        ("0@cuMemsetD8Async=1", [0, 0, 0, 0, 0]),
        ("3@cuStreamSynchronize#1=719,cuCtxSynchronize=2", [0, 0, 0, 719, 2]),
    ],
)
def test_faults_come_where_they_are_asked_for(standin: Standin, faults: str, expected: list[int]) -> None:
    """The call of that number, of that function, in that rank; a sticky one everywhere after."""
    code = """
    g = Gpu()
    s, x = g.stream(), g.blank(8)
    print(json.dumps([*[status(driver.cuMemsetD8Async(x, 1, 8, s)) for _ in range(3)],
                      status(driver.cuStreamSynchronize(s)), status(driver.cuCtxSynchronize())]))
    """
    assert run(standin, code, STANDIN_FAULTS=faults, STANDIN_RANK="3") == expected


def test_fault_of_the_device_comes_asynchronously(standin: Standin) -> None:
    """The call succeeds, the wait fails, and nothing after the fault was run."""
    code = """
    g = Gpu()
    s, x = g.stream(), g.blank(8)
    given = [status(driver.cuMemsetD8Async(x, 1, 8, s)) for _ in range(2)]
    print(json.dumps([given, status(driver.cuStreamSynchronize(s)), status(driver.cuMemAlloc(4))]))
    """
    assert run(standin, code, STANDIN_FAULTS="work#2=719") == [[0, 0], 719, 719]


@pytest.mark.parametrize("rule", ["cuInit", "cuInit=perhaps", "cuInit#0=1", "#1=2", "cuInit=5x"])
def test_fault_that_cannot_be_read_is_refused(standin: Standin, rule: str) -> None:
    """A misspelt fault would mean a test that tests nothing."""
    with standin.start("import ctypes; ctypes.CDLL('libcuda.so.1')", env={"STANDIN_FAULTS": rule}) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == -6 and rule.split("=")[0] in err


def test_cuda_core_runs(standin: Standin) -> None:
    """Device, stream, event and buffer of cuda.core, and a stream that comes back by its handle."""
    code = """
    from cuda.core import Device, Stream
    d = Device(1); d.set_current()
    s, e = d.create_stream(), d.create_event()
    buffer = d.allocate(1024, stream=s)
    check(driver.cuMemsetD8Async(int(buffer.handle), 9, 1024, int(s.handle)))
    s.record(e); s.wait(e); s.sync()
    back = np.zeros(1024, np.uint8)
    check(driver.cuMemcpyDtoH(back.ctypes.data, int(buffer.handle), 1024))
    again = Stream.from_handle(int(s.handle))
    same = int(again.handle) == int(s.handle)
    print(json.dumps([d.name, e.is_done, buffer.device_id, set(back.tolist()) == {9}, same]))
    buffer.close(); s.close()
    """
    assert run(standin, code) == ["Stand-in GPU 1", True, 1, True, True]


def test_function_that_is_missing_is_named(standin: Standin) -> None:
    """What the stand-in lacks raises an error of cuda-python's with the name; nothing pretends to work."""
    code = """
    Gpu()
    try:
        driver.cuMulticastCreate(driver.CUmulticastObjectProp())
    except Exception as error:
        print(json.dumps(str(error)))
    """
    assert "cuMulticastCreate" in run(standin, code)


def test_process_ends_while_streams_are_held(standin: Standin) -> None:
    """Threads of streams keep no interpreter from ending."""
    with standin.start(HEAD + "g = Gpu(); g.hold(g.stream())") as process:
        process.communicate(timeout=30)
    assert process.returncode == 0


def test_readme_names_every_variable() -> None:
    """Each variable that the sources read is in the README, and the README names no other."""
    sources = "".join(file.read_text() for file in SOURCES.glob("*/*.c"))
    read = set(re.findall(r'"(STANDIN_[A-Z_]+)"', sources))
    named = set(re.findall(r"`(STANDIN_[A-Z_]+)", (SOURCES / "README.md").read_text()))
    assert read and read == named
