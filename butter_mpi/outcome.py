"""How the program ends where this process has to give the exit status itself.

Python tells nobody, at its exit, the status of the ``SystemExit`` that it ends by. It is known of ``sys.exit``, which
is replaced here by one that remembers: when this package is imported, as ``sys.exit(main())`` takes it before the call
of ``main``. Of any other exception it is known that it left the outermost frame of the main thread.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["FAILED", "OUTCOME", "Outcome"]

FAILED = 1
"""The status of an end that is not known to be good."""


class Outcome:
    """What is known of the program's end, once :meth:`observe` was called while it ran."""

    def __init__(self) -> None:
        self._outermost: FrameType | None = None
        self._exit, sys.exit = sys.exit, self._remember
        self.came = False
        """Whether this process came to a start."""
        self._pid = os.getpid()
        atexit.register(self._leave)
        # What the last sys.exit was given, and where each frame stood that it had to leave.
        self._said: object = None
        self._left: list[tuple[FrameType, int]] = []

    def observe(self) -> None:
        """Look at the end of the main thread from now on; from any thread."""
        if self._outermost is None:
            *_, self._outermost = _stack(sys._current_frames()[_main()])

    def _remember(self, status: str | int | None = None, /) -> NoReturn:
        """Raise what ``sys.exit`` raises."""
        # Kept only where it is asked for: with frames stays what they hold.
        if self._outermost is not None and sys._current_frames()[_main()] is sys._getframe():
            self._said, self._left = status, [(frame, frame.f_lasti) for frame in _stack(sys._getframe(1))]
        self._exit(status)

    def _leave(self) -> None:
        """End a job in whose start ranks may wait for this one, which has come to none and ends by an exception."""
        if self.came or self._pid != os.getpid() or getattr(sys, "last_value", None) is None:
            return
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized():
            if mpi.Is_finalized():
                return
        elif "PMI_FD" in os.environ:
            mpi = None
        else:
            return
        try:
            _arrivals().end_before_any_start(mpi)
        except Exception:
            # What is broken here may be what this needs too.
            if mpi is not None:
                mpi.COMM_WORLD.Abort(FAILED)

    def status(self) -> int | None:
        """Return the status of the end; ``None``: it is that of a ``SystemExit`` that is not known."""
        frame = self._outermost
        if frame is None or _returned(frame):
            return 0
        if frame in _stack(sys._current_frames()[_main()]):
            return _status_while_running()
        return _status_of(self._said) if self._left and all(_stayed(*one) for one in self._left) else None


def _arrivals() -> Any:
    """Return that module, also where the import of the package failed, which would fail again."""
    if "butter_mpi" not in sys.modules:
        package = ModuleType("butter_mpi")
        package.__path__ = [os.path.dirname(__file__)]
        sys.modules["butter_mpi"] = package
    return importlib.import_module("butter_mpi.arrivals")


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _main() -> int:
    # Not above: this module is loaded with the package, in programs that never ask for it.
    import threading

    ident = threading.main_thread().ident
    assert ident is not None
    return ident


def _stopped_at(frame: FrameType) -> str:
    from opcode import opname

    return opname[frame.f_code.co_code[frame.f_lasti]]


def _returned(frame: FrameType) -> bool:
    return _stopped_at(frame).startswith("RETURN")


def _stayed(frame: FrameType, at: int) -> bool:
    """Whether a frame has gone on to nothing but the end of a finally or a with: it has caught nothing."""
    return frame.f_lasti == at or _stopped_at(frame) == "RERAISE"


def _status_while_running() -> int:
    """Return the status of a program that ends itself, as by MPI.Finalize: good, unless it does so in an exception."""
    error = sys.exc_info()[1]
    if error is None or isinstance(error, SystemExit):
        return _status_of(None if error is None else error.code)
    return FAILED


def _status_of(said: object) -> int:
    if said is None:
        return 0
    return said & 0xFF if isinstance(said, int) else FAILED


OUTCOME = Outcome()
"""Of this program."""
