"""One CUDA device of this process: its primary context, streams, events, memory and kernels, by the driver API.

Streams, events and pointers are integers. Every function names the C function in its error.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
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
_NOT_ON_DEVICE, _DEVICE_MEMORY = (0, 1), 2
# What drivers say of a handle whose stream was destroyed.
_NO_STREAM = (201, 400, 709)
_IMPLICITLY_CAPTURED, _NOT_CAPTURED = 906, 0
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_MOST_PREPARED = 4096


def same_stream(one: int, other: int) -> bool:
    """Return whether two handles are of one stream."""
    return one == other or (one in LEGACY_STREAMS and other in LEGACY_STREAMS)


_handle, _address, _number = ctypes.c_void_p.from_param, ctypes.c_uint64.from_param, ctypes.c_uint.from_param
_INT = ctypes.sizeof(ctypes.c_int)


class _Prepared(dict[Any, Callable[[], int]]):
    """Calls of one driver function by what they are about, each made when it is first asked for.

    What is kept is how to ask, and never what was answered. They take nothing, and return the driver's status.
    """

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, subject: Any) -> Callable[[], int]:
        if len(self) >= _MOST_PREPARED:
            self.clear()
        made: Callable[[], int] = self._make(subject)
        self[subject] = made
        return made


class _Questions:
    """What every operation asks the driver, prepared; and where the answers are written."""

    def __init__(self) -> None:
        context, capture, memory = ctypes.c_uint64(), ctypes.c_int(), (ctypes.c_int * 2)()
        self.context, self.capture = memoryview(context).cast("B").cast("Q"), memoryview(capture).cast("B").cast("i")
        self.memory = memoryview(memory).cast("B").cast("i")
        """Of which type memory is, and of which device."""
        self.whose = memoryview(memory).cast("B").cast("Q")
        """The same two as one number."""
        to_context, to_capture = ctypes.byref(context), ctypes.byref(capture)
        self.get_current = prepared("cuCtxGetCurrent", to_context)
        self.captures = _Prepared(lambda stream: prepared("cuStreamIsCapturing", _handle(stream), to_capture))
        """By stream, as are :attr:`contexts`."""
        self.contexts = _Prepared(lambda stream: prepared("cuStreamGetCtx", _handle(stream), to_context))
        wanted = (ctypes.c_int * 2)(_MEMORY_TYPE, _DEVICE_ORDINAL)
        answers = (ctypes.c_void_p * 2)(ctypes.addressof(memory), ctypes.addressof(memory) + _INT)
        both = _number(2), ctypes.byref(wanted), ctypes.byref(answers)
        self.memories = _Prepared(lambda pointer: prepared("cuPointerGetAttributes", *both, _address(pointer)))
        """By pointer."""


class _Asked(threading.local):
    """The questions of each thread: answers of two must not meet."""

    def __init__(self) -> None:
        self.questions = _Questions()


class _Relaxed:
    """Forbids this thread nothing while other streams are captured, and afterwards what was forbidden before."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._mode = ctypes.c_int(_RELAXED)
        self._at = ctypes.addressof(self._mode)

    def __enter__(self) -> None:
        self._device.exchange_mode(self._at)

    def __exit__(self, *_: object) -> None:
        # The call before has left there what was so before.
        self._device.exchange_mode(self._at)


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
        own = memoryview((ctypes.c_int * 2)(_DEVICE_MEMORY, ordinal)).cast("B")
        self._own_memory = own.cast("Q")[0]
        self._asked, self._asked_on_lane = _Asked(), _Questions()
        pointer = ctypes.c_void_p
        self._records = _Prepared(lambda both: prepared("cuEventRecord", *map(_handle, both)))
        self._waits = _Prepared(lambda both: prepared("cuStreamWaitEvent", *map(_handle, both), _number(0)))
        self._query_stream = typed("cuStreamQuery", pointer)
        self._queries = _Prepared(lambda event: prepared("cuEventQuery", _handle(event)))
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
        self.check("cuCtxGetCurrent", asked.get_current())
        if not asked.context[0]:
            self.make_current()
        elif asked.context[0] != self._own_context:
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
        status = self._records[event, stream]()
        if status:
            self.check_recorded(status)

    def recorder(self, event: int, stream: int) -> Callable[[], int]:
        """Return what does :meth:`record` again and again, and gives the driver's status."""
        return self._records[event, stream]

    def check_recorded(self, status: int) -> None:
        """Raise ``CUDAError`` unless what :meth:`recorder` gave is success."""
        self.check("cuEventRecord", status)

    def wait(self, stream: int, event: int) -> None:
        """Let later work on `stream` wait for `event` (``cuStreamWaitEvent``)."""
        status = self._waits[stream, event]()
        if status:
            self.check("cuStreamWaitEvent", status)

    def order(self, earlier: int, later: int, event: int) -> None:
        """Let what comes later on one stream wait for what another one holds now; `event` can be used again."""
        status = self._records[event, earlier]()
        if status:
            self.check_recorded(status)
        status = self._waits[later, event]()
        if status:
            self.check("cuStreamWaitEvent", status)

    def ready(self, stream: int) -> bool:
        """Return whether a stream's work is done (``cuStreamQuery``)."""
        return self._done("cuStreamQuery", self._query_stream(stream))

    def event_ready(self, event: int) -> bool:
        """Return whether what an event stands for is done (``cuEventQuery``); work in a captured graph never is."""
        return self._done("cuEventQuery", self._queries[event]())

    def _done(self, name: str, status: int) -> bool:
        if status in (_NOT_READY, _CAPTURED_EVENT):
            return False
        self.check(name, status)
        return True

    def check(self, name: str, status: int) -> None:
        """Raise ``CUDAError`` unless a call by ctypes succeeded."""
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
        number = self.check_handle(stream)
        if self.is_captured(number):
            self._refuse_captured(number)
        return number

    def takes(self, stream: int, arrays: Iterable[Any] = ()) -> bool:
        """Return whether a stream is known and of this device's context, and so is the memory of all `arrays`.

        Where not, :meth:`check_handle` and :meth:`owner` tell more. Each operation on arrays asks this, so it is made
        for speed. Of which context a stream is, and of which device memory, is the same whichever context is current.
        Whether a stream is captured, :meth:`refuse_capture` asks when it is used, and which context is current.
        """
        asked = self._asked.questions
        for array in arrays:
            pointer = array.pointer
            if pointer and (asked.memories[pointer]() or asked.whose[0] != self._own_memory):
                return False
        if stream in LEGACY_STREAMS:
            return True
        known = asked.contexts.get(stream)
        return known is not None and not known() and asked.context[0] == self._own_context

    def check_handle(self, stream: Any) -> int:
        """Return a stream as :meth:`check_stream` does, captured or not: :meth:`refuse_capture` asks that later."""
        if stream.__class__ is not int and (isinstance(stream, bool) or not hasattr(stream, "__index__")):
            raise TypeError(f"stream must be an int, the handle of a CUDA stream; got {type(stream).__name__}")
        number, asked = int(stream), self._asked.questions
        if asked.get_current() or asked.context[0] != self._own_context:
            self.enter()
        if number == _PER_THREAD_STREAM:
            raise ValueError(
                "stream must be one that all threads share; the per-thread default stream is another one in each "
                "thread: make a stream of your own"
            )
        if number not in LEGACY_STREAMS:
            if not 0 < number < 2**64 or number % _HANDLE_ALIGNMENT:
                raise ValueError(f"stream must be the handle of a CUDA stream; {number} is none")
            if asked.contexts[number]() or asked.context[0] != self._own_context:
                self._refuse_foreign(number)
        return number

    def refuse_capture(self, stream: int, others: Iterable[int] = ()) -> None:
        """Raise ``ValueError`` where a stream, or another one, is captured into a graph; a capture stays as it is.

        Each operation asks this, so it is made for speed: the answers are written to one place, and only the thread
        that holds the lane may ask.
        """
        asked = self._asked_on_lane
        if asked.get_current() or asked.context[0] != self._own_context:
            self.enter()
        if asked.captures[stream]() or asked.capture[0] != _NOT_CAPTURED:
            self._refuse_captured(stream)
        for other in others:
            if asked.captures[other]() or asked.capture[0] != _NOT_CAPTURED:
                self._refuse_captured(other)

    def _refuse_captured(self, stream: int) -> None:
        if self.is_captured(stream):
            raise ValueError(
                f"stream must not be captured into a CUDA graph: {stream:#x} is. A graph that replays an operation "
                "takes no sequence number, and no other rank could compare it; end the capture first"
            )

    def _refuse_foreign(self, stream: int) -> None:
        asked = self._asked.questions
        try:
            self.check("cuStreamGetCtx", asked.contexts[stream]())
        except CUDAError as error:
            if error.code in _NO_STREAM:
                raise ValueError(f"stream must be the handle of a CUDA stream; {stream:#x} is none: {error}") from None
            raise
        if asked.context[0] != self._own_context:
            raise ValueError(f"stream must be of the primary context of cuda:{self.ordinal}; {stream:#x} is of another")

    def is_captured(self, stream: int) -> bool:
        """Return whether a stream is being captured, or cannot be told beside another capture, which stays valid."""
        asked = self._asked.questions
        status = asked.captures[stream]()
        if status == _IMPLICITLY_CAPTURED:
            return True
        self.check("cuStreamIsCapturing", status)
        return asked.capture[0] != _NOT_CAPTURED

    def beside_captures(self) -> AbstractContextManager[None]:
        """Let this thread query events in the body while some other stream is captured, which the query would spoil."""
        return _Relaxed(self)

    def exchange_mode(self, at: int) -> None:
        """Exchange this thread's mode for captures with the one there (``cuThreadExchangeStreamCaptureMode``)."""
        status = self._exchange_mode(at)
        if status:
            self.check("cuThreadExchangeStreamCaptureMode", status)

    def check_context(self, stream: int) -> None:
        """Raise if the context is broken, by a question about a stream that disturbs nothing, captures included.

        Raises
        ------
        CUDAError
            Work of this process broke it, perhaps long ago: from then on every call fails.
        """
        self.make_current()
        self.is_captured(stream)

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
        if asked.get_current() or asked.context[0] != self._own_context:
            self.enter()
        # Not by cuda-python: its 12.9.6 to 12.9.8 and 13.1.2 to 13.4.2 answer 0 for every device (their issue 2928).
        status = asked.memories[pointer]()
        if status == _INVALID_VALUE:
            return None
        self.check("cuPointerGetAttributes", status)
        kind, ordinal = asked.memory
        return None if kind in _NOT_ON_DEVICE else ordinal

    def load_kernel(self, code: bytes, name: str) -> int:
        """Return a kernel of machine code (``cuModuleLoadData``); it stays loaded."""
        self.make_current()
        module = self.call("cuModuleLoadData", code)
        return int(self.call("cuModuleGetFunction", module, name.encode()))

    def launch(self, kernel: int, blocks: int, threads: int, stream: int, arguments: Any) -> None:
        """Launch a kernel in stream order (``cuLaunchKernel``); `arguments` as cuda-python takes them."""
        self.make_current()
        self.call("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, 0)
