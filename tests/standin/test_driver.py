"""The stand-in for the CUDA driver, under the real cuda-python: streams, events, capture, cuda.core."""

from __future__ import annotations

from helpers.standin import Standin
from helpers.standin_ranks import DRIVER, driver_value


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
    assert driver_value(standin, code) == [[600, 600, 600], [0, 0, 0], [6.0]]


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
    assert driver_value(standin, code) == [600, 0]


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
    assert driver_value(standin, code) == [[600, 0], [600, 600], 0]


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
    assert driver_value(standin, code) == [[0], 600, 0]


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
    assert until(lambda: status(driver.cuStreamQuery(s)) == 0)    # older bindings synchronize with the interpreter held
    print(json.dumps([before, order]))
    """
    assert driver_value(standin, code) == [[], [42]]


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
    before, during, joined, after, spoiled, unsafe, refused = driver_value(standin, code)
    assert (before, during, joined) == ([0, 0], [1, 1], [1, 1])
    assert after == [[0, 0], [0, 0], [0.0] * 4]
    assert (spoiled, unsafe, refused) == ([900, 2, 901, 0], [900, 2, 901], [0, 1, 0])


def test_asking_the_legacy_stream_spoils_no_capture(standin: Standin) -> None:
    """Beside a blocking stream's capture the legacy stream gives no answer, and the capture stays valid."""
    code = """
    g = Gpu()
    a = g.stream(0)
    check(driver.cuStreamBeginCapture(a, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    print(json.dumps([status(driver.cuStreamIsCapturing(0)), status(driver.cuStreamEndCapture(a))]))
    """
    assert driver_value(standin, code) == [906, 0]


def test_capture_ends_with_its_stream(standin: Standin) -> None:
    """A stream that is destroyed while it captures takes the capture with it; what joined is free again."""
    code = """
    g = Gpu()
    a, b, event = g.stream(), g.stream(), g.event()
    check(driver.cuStreamBeginCapture(a, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    check(driver.cuEventRecord(event, a)); check(driver.cuStreamWaitEvent(b, event, 0))
    joined = int(check(driver.cuStreamIsCapturing(b)))
    check(driver.cuStreamDestroy(a))
    others = [g.stream(0) for _ in range(3)]
    print(json.dumps([joined, int(check(driver.cuStreamIsCapturing(b))), status(driver.cuMemAlloc(4)),
                      status(driver.cuStreamQuery(b)), status(driver.cuStreamQuery(0))]))
    """
    assert driver_value(standin, code) == [1, 0, 0, 0, 0]


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
    assert driver_value(standin, code) == [[400, 400], [4.0, 4.0], 400]


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
    assert driver_value(standin, code) == ["Stand-in GPU 1", True, 1, True, True]


def test_process_ends_while_streams_are_held(standin: Standin) -> None:
    """Threads of streams keep no interpreter from ending."""
    with standin.start(DRIVER + "g = Gpu(); g.hold(g.stream())") as process:
        process.communicate(timeout=30)
    assert process.returncode == 0
