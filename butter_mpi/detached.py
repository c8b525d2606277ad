"""C calls that may never return, each in a thread of its own: waited for with a bound, then left to themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from butter_mpi.control import Overdue, Pause, Watch

__all__ = ["Detached", "wait_for_all"]

_RUNNING: set[Detached] = set()


class Detached:
    """A call that runs in a daemon thread: the interpreter's exit does not wait for it.

    Parameters
    ----------
    call : callable
        Takes nothing; must not need this thread.
    unfinished : str
        What it means that it never returned, where that is a failure of the job; empty: it is none.
    patience : float
        Seconds after which such a call is taken never to return.
    """

    def __init__(self, call: Callable[[], Any], unfinished: str = "", patience: float = 0.0) -> None:
        self._call, self.unfinished, self._patience = call, unfinished, Watch(patience)
        self._done = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        _RUNNING.add(self)
        threading.Thread(target=self._run, name="butter_mpi detached", daemon=True).start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()
            _RUNNING.discard(self)

    @property
    def done(self) -> bool:
        """Whether the call has returned."""
        return self._done.is_set()

    def hoped_for(self) -> bool:
        """Whether the job has to wait for it still."""
        return bool(self.unfinished) and not self._patience.tick()

    def give_up(self, unfinished: str) -> None:
        """Take it never to return, with what that means."""
        self.unfinished, self._patience = unfinished, Watch(0.0)

    def wait(self) -> None:
        """Wait without a bound until the call has returned or raised."""
        self._done.wait()

    def result(self, watch: Watch, phase: str, look: Callable[[], None] = lambda: None) -> Any:
        """Return what the call returned, or raise what it raised.

        Parameters
        ----------
        watch : Watch
            The bound.
        phase : str
            What is waited for.
        look : callable
            Called again and again; may raise what else ends the wait.

        Raises
        ------
        Overdue
            It has not returned; it goes on by itself.
        """
        pause = Pause()
        while not self._done.is_set():
            if watch.tick():
                raise Overdue(phase, watch.elapsed)
            look()
            pause()
        if self._error is not None:
            raise self._error
        watch.passed(phase)
        return self._value


def wait_for_all(seconds: float, look: Callable[[], None] = lambda: None) -> list[str]:
    """Wait up to `seconds` for every detached call, longer for those that must return; say what it means if not.

    `look` is called again and again: it may bring what such a call waits for.
    """
    watch, pause = Watch(seconds), Pause()
    while _RUNNING and (not watch.tick() or any(call.hoped_for() for call in list(_RUNNING))):
        look()
        pause()
    return [call.unfinished for call in list(_RUNNING) if call.unfinished]
