"""A CUDA device of this process: its one context, what is no stream, and what the driver says; on the stand-in."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
from helpers.standin import Standin, build

HEAD = """
import json, threading
import numpy as np
from butter_mpi.device import Device
from butter_mpi.errors import CUDAError
from helpers.standin_rank import Gpu, check, driver, until

def refused(call, kind=ValueError):
    try:
        return f"not refused: {call()!r}"
    except kind as error:
        return str(error)
"""


@pytest.fixture(scope="module")
def standin() -> Standin:
    """The build."""
    return build()


def run(standin: Standin, code: str) -> Any:
    """Run a program; return the JSON value that it prints."""
    return standin.run(HEAD + textwrap.dedent(code))


def test_one_device_a_process(standin: Standin) -> None:
    """The device is one object, current where it is asked for; a second one is refused, and leaves the first."""
    code = """
    first = Device.of(1)
    text = refused(lambda: Device.of(0), CUDAError)
    current = int(check(driver.cuCtxGetCurrent()))
    print(json.dumps([text, Device.of(1) is first, current == int(first._context), first.capability]))
    """
    text, same, current, capability = run(standin, code)
    assert "uses cuda:1 already, and cuda:0 would be a second device" in text
    assert same and current and capability == [9, 0]


@pytest.mark.parametrize("what", ["another device", "a context of its own"])
def test_another_context_is_refused(standin: Standin, what: str) -> None:
    """Where another package has made another context current, nothing is guessed: it is refused, and left as it is."""
    code = f"""
    check(driver.cuInit(0))
    if {what == "another device"}:
        Gpu(1)
    else:
        check(driver.cuCtxCreate(None, 0, check(driver.cuDeviceGet(0))))
    before = int(check(driver.cuCtxGetCurrent()))
    text = refused(lambda: Device.of(0), CUDAError)
    active = int(check(driver.cuDevicePrimaryCtxGetState(check(driver.cuDeviceGet(0))))[1])
    print(json.dumps([text, before == int(check(driver.cuCtxGetCurrent())), active]))
    """
    text, same, active = run(standin, code)
    assert "is not the primary context of cuda:0" in text and "set_device" in text
    assert same and not active


def test_what_is_a_stream(standin: Standin) -> None:
    """Streams of this context and the legacy ones pass, in any thread; all else is refused with its reason."""
    code = """
    device = Device.of(0)
    own, blocking = device.make_stream(), int(check(driver.cuStreamCreate(0)))
    there = []
    thread = threading.Thread(target=lambda: there.append([device.check_stream(s) for s in (own, 0, np.int64(1))]))
    thread.start(); thread.join()
    check(driver.cuCtxCreate(None, 0, device._device))
    foreign = int(check(driver.cuStreamCreate(1)))
    elsewhere = [refused(call) for call in (lambda: device.check_stream(own), lambda: device.owner(8))]
    device.make_current()
    wrong = [refused(lambda: device.check_stream(s)) for s in (2, 12345, -8, foreign)]
    types = [refused(lambda: device.check_stream(s), TypeError) for s in (None, True, 1.0, "stream")]
    gone = device.make_stream(); device.destroy_stream(gone)
    wrong.append(refused(lambda: device.check_stream(gone)))
    print(json.dumps([there[0] == [own, 0, 1], device.check_stream(blocking) == blocking, wrong, types, elsewhere]))
    """
    there, blocking, wrong, types, elsewhere = run(standin, code)
    assert there and blocking
    wanted = ("per-thread default stream", "12345 is none", "-8 is none", "is of another", "is none")
    assert all(text in said for text, said in zip(wanted, wrong, strict=True)), wrong
    assert all("stream must be an int" in said for said in types), types
    assert all("is not the primary context of cuda:0" in said for said in elsewhere), elsewhere


@pytest.mark.parametrize("code", [201, 400, 709])
def test_what_drivers_say_of_a_stream_that_is_gone(standin: Standin, code: int) -> None:
    """It is no stream, which is no failure of the device; seen: 709 and, with driver 580, 201."""
    program = """
    device = Device.of(0)
    print(json.dumps(refused(lambda: device.check_stream(device.make_stream()))))
    """
    said = standin.run(HEAD + textwrap.dedent(program), env=standin.env(faults=f"cuStreamGetCtx={code}"))
    assert "is none: CUDA driver call cuStreamGetCtx failed with" in said


def test_captures_stay_valid(standin: Standin) -> None:
    """A stream in capture, and one that joined it, are refused; the capture goes on."""
    code = """
    device = Device.of(0)
    origin, joined, event = int(check(driver.cuStreamCreate(0))), device.make_stream(), device.make_event()
    p = device.alloc(64)
    check(driver.cuStreamBeginCapture(origin, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    device.record(event, origin); device.wait(joined, event)
    texts = [refused(lambda: device.check_stream(s)) for s in (origin, joined)]
    device.check_context(origin); device.owner(p)
    device.fill(p, 0, 64, joined)
    device.record(event, joined); device.wait(origin, event)
    graph = int(check(driver.cuStreamEndCapture(origin)))
    print(json.dumps([texts, bool(graph), device.check_stream(origin) == origin]))
    """
    texts, graph, free = run(standin, code)
    assert all("captured into a CUDA graph" in text for text in texts), texts
    assert graph and free


def test_legacy_stream_during_a_capture(standin: Standin) -> None:
    """The legacy stream cannot be used while a stream that waits for it is captured: it is refused likewise."""
    code = """
    device, origin = Device.of(0), int(check(driver.cuStreamCreate(0)))
    check(driver.cuStreamBeginCapture(origin, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    texts = [refused(lambda: device.check_stream(s)) for s in (0, 1)]
    driver.cuStreamEndCapture(origin)
    print(json.dumps([texts, device.check_stream(0)]))
    """
    texts, after = run(standin, code)
    assert all("captured into a CUDA graph" in text for text in texts) and after == 0, texts


def test_whose_memory(standin: Standin) -> None:
    """Memory is told by its address: this device's, another one's, the host's; from any thread."""
    code = """
    other = Gpu(1).blank(64)
    check(driver.cuCtxSetCurrent(0))
    device, host = Device.of(0), np.zeros(8)
    pinned = int(check(driver.cuMemHostAlloc(64, 0)))
    asked, owners = (device.alloc(64) + 8, other, host.ctypes.data, pinned, 8), []
    thread = threading.Thread(target=lambda: owners.extend(device.owner(p) for p in asked))
    thread.start(); thread.join()
    print(json.dumps(owners))
    """
    assert run(standin, code) == [0, 1, None, None, None]


def test_whose_memory_where_the_bindings_do_not_know(standin: Standin) -> None:
    """Bindings that answer 0 whatever the device are not asked: memory of a rank's second device is told all the same.

    So do cuda-bindings 12.9.6 to 12.9.8 and 13.1.2 to 13.4.2, and on two GPUs rank 1 was refused its own memory.
    """
    code = """
    real, ordinal = driver.cuPointerGetAttribute, driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    driver.cuPointerGetAttribute = lambda asked, p: (real(asked, p)[0], 0) if asked == ordinal else real(asked, p)
    device = Device.of(1)
    print(json.dumps(device.owner(device.alloc(64))))
    """
    assert run(standin, code) == 1


def test_streams_events_and_copies(standin: Standin) -> None:
    """Readiness is asked without waiting, an event carries the order, nothing is done for no bytes."""
    code = """
    device = Device.of(0)
    gpu = Gpu(0)
    a, b, event = device.make_stream(), device.make_stream(), device.make_event()
    source, target = np.arange(9, dtype=np.uint8), np.zeros(9, np.uint8)
    p = device.alloc(9)
    go = gpu.hold(a)
    device.copy(p, source.ctypes.data, 9, a)
    device.record(event, a)
    device.wait(b, event)
    device.copy(target.ctypes.data, p, 9, b)
    device.fill(p, 0, 0, a); device.copy(0, 8, 0, a); device.copy(p, p, 9, a); device.destroy_event(0)
    before = [device.ready(a), device.ready(b), device.event_ready(event)]
    go()
    assert until(lambda: device.ready(b))
    after = [device.ready(a), device.event_ready(event), target.tolist()]
    device.destroy_event(event); device.destroy_stream(a); device.free(p)
    gone = [refused(call, CUDAError) for call in (lambda: device.event_ready(event), lambda: device.free(p))]
    print(json.dumps([before, after, gone]))
    """
    before, after, gone = run(standin, code)
    assert before == [False, False, False] and after == [True, True, list(range(9))]
    assert "cuEventQuery" in gone[0] and "cuMemFree" in gone[1]


def test_a_broken_context_is_an_error_and_not_unready(standin: Standin) -> None:
    """After work that broke the context every question is an error with the driver's name for it."""
    code = """
    device = Device.of(0)
    gpu, stream = Gpu(0), device.make_stream()
    device.check_context(stream)
    gpu.launch("fill_f32", stream, 8, 1.0, 100)
    assert until(lambda: int(driver.cuStreamQuery(stream)[0]) not in (0, 600))
    questions = (device.check_context, device.ready, device.check_stream)
    print(json.dumps([refused(lambda: question(stream), CUDAError) for question in questions]))
    """
    for text in run(standin, code):
        assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in text
