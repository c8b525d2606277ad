"""One CUDA device of this process: its primary context, streams, events, memory and kernels, by the driver API.

Streams, events and pointers are integers. Every function names the C function in its error.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from butter_mpi.cuda import call, check, load_driver, prepared, typed
from butter_mpi.errors import CUDAError

__all__ = ["LEGACY_STREAMS", "Device", "same_stream"]

LEGACY_STREAMS = (0, 1)
"""The two names of the legacy default stream."""

_OTHER_CONTEXT = (
    "the CUDA context that is current in this thread is not the primary context of cuda:{0}, the device of this rank: "
    "another package has set another device. A process uses one device; set that one (torch.cuda.set_device, "
    "cupy.cuda.Device.use) before init, and leave it, or make only it visible"
)
_PER_THREAD_STREAM = 2
_HANDLE_ALIGNMENT = 8
_NON_BLOCKING = 1
_DISABLE_TIMING = 2
_NOT_READY = 600
_CAPTURED_EVENT = 907
_INVALID_VALUE = 1
_MEMORY_TYPE, _DEVICE_ORDINAL = 2, 9
# The driver says 0 of memory that it does not know.
_NOT_ON_DEVICE = (0, 1)
_DESTROYED_CONTEXT, _INVALID_HANDLE = 709, 400
_IMPLICITLY_CAPTURED, _NOT_CAPTURED = 906, 0
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_MOST_STREAMS = 256


def same_stream(one: int, other: int) -> bool:
    """Return whether two handles are of one stream."""
    return one == other or (one in LEGACY_STREAMS and other in LEGACY_STREAMS)


class _Questions:
    """What every operation asks the driver, prepared: called without arguments; and where the answers are written."""

    def __init__(self) -> None:
        self.context, self.capture = ctypes.c_void_p(), ctypes.c_int()
        self.get_current = prepared("cuCtxGetCurrent", ctypes.byref(self.context))
        self.captures: dict[int, Callable[[], int]] = {}
        self.memory_type, self.ordinal = ctypes.c_int(), ctypes.c_int()
        self._attributes = (ctypes.c_int * 2)(_MEMORY_TYPE, _DEVICE_ORDINAL)
        self._answers = (ctypes.c_void_p * 2)(*map(ctypes.addressof, (self.memory_type, self.ordinal)))
        arguments = ctypes.c_uint(2), ctypes.byref(self._attributes), ctypes.byref(self._answers)
        self._get_attributes = prepared("cuPointerGetAttributes", *arguments)
        self.contexts: dict[int, Callable[[], int]] = {}

    def capturing(self, stream: int) -> Callable[[], int]:
        """Return what asks whether a stream is in capture, and gives the driver's status; it is kept for later."""
        return self._prepare(self.captures, "cuStreamIsCapturing", stream, self.capture)

    def context_of(self, stream: int) -> Callable[[], int]:
        """Return what asks of which context a stream is, as :meth:`capturing` does."""
        return self._prepare(self.contexts, "cuStreamGetCtx", stream, self.context)

    def _prepare(self, known: dict[int, Callable[[], int]], name: str, stream: int, answer: Any) -> Callable[[], int]:
        if len(known) >= _MOST_STREAMS:
            known.clear()
        question: Callable[[], int] = prepared(name, ctypes.c_void_p.from_param(stream), ctypes.byref(answer))
        known[stream] = question
        return question

    def get_memory(self, pointer: int) -> int:
        """Ask of which type memory is, and of which device; returns the driver's status."""
        status: int = self._get_attributes(ctypes.c_uint64(pointer))
        return status


class _Asked(threading.local):
    """The questions of each thread: answers of two must not meet."""

    def __init__(self) -> None:
        self.questions = _Questions()


class Device:
    """A device, with its primary context retained for the life of the process: what others made in it stays.

    Parameters
    ----------
    ordinal : int
        Among the visible devices.

    Raises
    ------
    CUDAError
        The driver fails, or this thread's current context is another one: a process uses one device here.
    """

    _made: ClassVar[dict[int, Device]] = {}

    @classmethod
    def of(cls, ordinal: int) -> Device:
        """Return the device of this process, the same object each time.

        Raises
        ------
        CUDAError
            As the constructor, or the process uses another device already.
        """
        for other in cls._made:
            if other != ordinal:
                raise CUDAError(
                    f"this process uses cuda:{other} already, and cuda:{ordinal} would be a second device; start one "
                    "process for each",
                    call="cuDeviceGet",
                    code=0,
                )
        if ordinal not in cls._made:
            cls._made[ordinal] = cls(ordinal)
        cls._made[ordinal].make_current()
        return cls._made[ordinal]

    def __init__(self, ordinal: int) -> None:
        self._driver = load_driver()
        self.ordinal = ordinal
        call(self._driver, "cuInit", 0)
        self._device = call(self._driver, "cuDeviceGet", ordinal)
        self._context = call(self._driver, "cuDevicePrimaryCtxRetain", self._device)
        current = int(call(self._driver, "cuCtxGetCurrent"))
        if current not in (0, int(self._context)):
            call(self._driver, "cuDevicePrimaryCtxRelease", self._device)
            raise CUDAError(_OTHER_CONTEXT.format(ordinal), call="cuCtxGetCurrent", code=0)
        self._own_context = int(self._context)
        self._asked, self._asked_on_lane = _Asked(), _Questions()
        pointer = ctypes.c_void_p
        self._record_event = typed("cuEventRecord", pointer, pointer)
        self._wait_event = typed("cuStreamWaitEvent", pointer, pointer, ctypes.c_uint)
        self._query_stream, self._query_event = typed("cuStreamQuery", pointer), typed("cuEventQuery", pointer)
        self._exchange_mode = typed("cuThreadExchangeStreamCaptureMode", pointer)
        self.make_current()

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a driver function and return what it gives.

        Raises
        ------
        CUDAError
            It failed.
        """
        return call(self._driver, name, *arguments)

    def make_current(self) -> None:
        """Make the primary context current in this thread (``cuCtxSetCurrent``)."""
        self.call("cuCtxSetCurrent", self._context)

    def enter(self) -> None:
        """Make the primary context current in this thread if it has none; what another package has set stays.

        Raises
        ------
        ValueError
            Another context is current.
        """
        asked = self._asked.questions
        self._check("cuCtxGetCurrent", asked.get_current())
        if not asked.context.value:
            self.make_current()
        elif asked.context.value != self._own_context:
            raise ValueError(_OTHER_CONTEXT.format(self.ordinal))

    @functools.cached_property
    def capability(self) -> tuple[int, int]:
        """Return the compute capability (``cuDeviceGetAttribute``)."""
        names = self._driver.CUdevice_attribute
        major = self.call("cuDeviceGetAttribute", names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, self._device)
        minor = self.call("cuDeviceGetAttribute", names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, self._device)
        return int(major), int(minor)

    # -- streams and events ------------------------------------------------------------------------------------------

    def make_stream(self) -> int:
        """Return a new stream that does not wait for the legacy default stream (``cuStreamCreate``)."""
        self.make_current()
        return int(self.call("cuStreamCreate", _NON_BLOCKING))

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream of :meth:`make_stream` once its work is done (``cuStreamDestroy``)."""
        self.call("cuStreamDestroy", stream)

    def make_event(self) -> int:
        """Return a new event without timing (``cuEventCreate``)."""
        self.make_current()
        return int(self.call("cuEventCreate", _DISABLE_TIMING))

    def destroy_event(self, event: int) -> None:
        """Destroy an event (``cuEventDestroy``); 0 is none, and nothing happens."""
        if event:
            self.call("cuEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        """Let `event` stand for what `stream` holds now (``cuEventRecord``)."""
        status = self._record_event(event, stream)
        if status:
            self._check("cuEventRecord", status)

    def wait(self, stream: int, event: int) -> None:
        """Let later work on `stream` wait for `event` (``cuStreamWaitEvent``)."""
        self._check("cuStreamWaitEvent", self._wait_event(stream, event, 0))

    def ready(self, stream: int) -> bool:
        """Return whether a stream's work is done (``cuStreamQuery``)."""
        return self._done("cuStreamQuery", self._query_stream(stream))

    def event_ready(self, event: int) -> bool:
        """Return whether what an event stands for is done (``cuEventQuery``); work in a captured graph never is."""
        return self._done("cuEventQuery", self._query_event(event))

    def _done(self, name: str, status: int) -> bool:
        if status in (_NOT_READY, _CAPTURED_EVENT):
            return False
        self._check(name, status)
        return True

    def check(self, name: str, status: int) -> None:
        """Raise ``CUDAError`` unless a call by ctypes succeeded."""
        self._check(name, status)

    def _check(self, name: str, status: int) -> None:
        if status:
            check(name, self._driver.CUresult(status))

    def check_stream(self, stream: Any) -> int:
        """Return a stream that work of this device can be put on.

        Raises
        ------
        TypeError
            Not an integer.
        ValueError
            No stream handle, of another context, of the calling thread only, or being captured into a graph; or another
            context is current. The stream, and a capture, stay as they are.
        """
        if stream.__class__ is not int and (isinstance(stream, bool) or not hasattr(stream, "__index__")):
            raise TypeError(f"stream must be an int, the handle of a CUDA stream; got {type(stream).__name__}")
        number, asked = int(stream), self._asked.questions
        if asked.get_current() or asked.context.value != self._own_context:
            self.enter()
        if number == _PER_THREAD_STREAM:
            raise ValueError(
                "stream must be one that all threads share; the per-thread default stream is another one in each "
                "thread: make a stream of your own"
            )
        if number not in LEGACY_STREAMS:
            if not 0 < number < 2**64 or number % _HANDLE_ALIGNMENT:
                raise ValueError(f"stream must be the handle of a CUDA stream; {number} is none")
            question = asked.contexts.get(number) or asked.context_of(number)
            if question() or asked.context.value != self._own_context:
                self._refuse_foreign(number)
        if (asked.captures.get(number) or asked.capturing(number))() or asked.capture.value != _NOT_CAPTURED:
            self._refuse_captured(number)
        return number

    def refuse_capture(self, stream: int) -> None:
        """Raise ``ValueError`` where a stream is being captured into a graph; a capture stays as it is.

        Each operation asks this, so it is made for speed: the answers are written to one place, and only the thread
        that holds the lane may ask.
        """
        asked = self._asked_on_lane
        if asked.get_current() or asked.context.value != self._own_context:
            self.enter()
        if (asked.captures.get(stream) or asked.capturing(stream))() or asked.capture.value != _NOT_CAPTURED:
            self._refuse_captured(stream)

    def _refuse_captured(self, stream: int) -> None:
        if self._captured(stream):
            raise ValueError(
                f"stream must not be captured into a CUDA graph: {stream:#x} is. A graph that replays an operation "
                "takes no sequence number, and no other rank could compare it; end the capture first"
            )

    def _refuse_foreign(self, stream: int) -> None:
        asked = self._asked.questions
        try:
            self._check("cuStreamGetCtx", asked.context_of(stream)())
        except CUDAError as error:
            if error.code in (_DESTROYED_CONTEXT, _INVALID_HANDLE):
                raise ValueError(f"stream must be the handle of a CUDA stream; {stream:#x} is none: {error}") from None
            raise
        if asked.context.value != self._own_context:
            raise ValueError(f"stream must be of the primary context of cuda:{self.ordinal}; {stream:#x} is of another")

    def is_captured(self, stream: int) -> bool:
        """Return whether a stream is being captured, or cannot be told beside another capture, which stays valid."""
        return self._captured(stream)

    def _captured(self, stream: int) -> bool:
        asked = self._asked.questions
        status = (asked.captures.get(stream) or asked.capturing(stream))()
        if status == _IMPLICITLY_CAPTURED:
            return True
        self._check("cuStreamIsCapturing", status)
        return asked.capture.value != _NOT_CAPTURED

    @contextmanager
    def beside_captures(self) -> Iterator[None]:
        """Let this thread query events in the body while some other stream is captured, which the query would spoil."""
        mode = ctypes.c_int(_RELAXED)
        at = ctypes.addressof(mode)
        self._check("cuThreadExchangeStreamCaptureMode", self._exchange_mode(at))
        try:
            yield
        finally:
            # The call before has left there what was so before.
            self._check("cuThreadExchangeStreamCaptureMode", self._exchange_mode(at))

    def check_context(self, stream: int) -> None:
        """Raise if the context is broken, by a question about a stream that disturbs nothing, captures included.

        Raises
        ------
        CUDAError
            Work of this process broke it, perhaps long ago: from then on every call fails.
        """
        self.make_current()
        self._captured(stream)

    # -- memory ------------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int) -> int:
        """Return device memory (``cuMemAlloc``)."""
        self.make_current()
        return int(self.call("cuMemAlloc", nbytes))

    def memory_free(self) -> int:
        """Return the bytes that nobody has, of any process (``cuMemGetInfo``)."""
        self.make_current()
        return int(self.call("cuMemGetInfo"))

    def free(self, pointer: int) -> None:
        """Free memory of :meth:`alloc` once all work is done (``cuMemFree``)."""
        self.make_current()
        self.call("cuMemFree", pointer)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy bytes in stream order, between device and host memory as the addresses say (``cuMemcpyAsync``)."""
        if nbytes and target != source:
            self.make_current()
            self.call("cuMemcpyAsync", target, source, nbytes, stream)

    def fill(self, pointer: int, byte: int, nbytes: int, stream: int) -> None:
        """Set bytes in stream order (``cuMemsetD8Async``)."""
        if nbytes:
            self.make_current()
            self.call("cuMemsetD8Async", pointer, byte, nbytes, stream)

    def owner(self, pointer: int) -> int | None:
        """Return the ordinal of the device whose memory is at `pointer`, ``None`` for host memory.

        Raises
        ------
        ValueError
            Another context is current.
        """
        asked = self._asked.questions
        if asked.get_current() or asked.context.value != self._own_context:
            self.enter()
        # Not by cuda-python: its 12.9.6 to 12.9.8 and 13.1.2 to 13.4.2 answer 0 for every device (their issue 2928).
        status = asked.get_memory(pointer)
        if status == _INVALID_VALUE:
            return None
        self._check("cuPointerGetAttributes", status)
        return None if asked.memory_type.value in _NOT_ON_DEVICE else asked.ordinal.value

    def load_kernel(self, code: bytes, name: str) -> int:
        """Return a kernel of machine code (``cuModuleLoadData``); it stays loaded."""
        self.make_current()
        module = self.call("cuModuleLoadData", code)
        return int(self.call("cuModuleGetFunction", module, name.encode()))

    def launch(self, kernel: int, blocks: int, threads: int, stream: int, arguments: Any) -> None:
        """Launch a kernel in stream order (``cuLaunchKernel``); `arguments` as cuda-python takes them."""
        self.make_current()
        self.call("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, 0)
