"""How a NCCL communicator is given up while another thread is inside a call on it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from butter_mpi import nccl
from butter_mpi.control import Pause, Watch
from butter_mpi.detached import Detached
from butter_mpi.errors import NCCLError
from butter_mpi.planes.entering import Inside
from butter_mpi.planes.joining import Bound, abort


class Library:
    """NCCL, of which the calls that end something are noted, and free a call that is stuck."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, revokes: bool) -> None:
        self.order: list[Any] = []
        self.inside, self.left = Inside(), Inside()
        self.device: Any = SimpleNamespace(make_current=lambda: self.order.append("context"))
        self._stuck, self._revokes = threading.Event(), revokes
        for name in ("abort", "revoke"):
            monkeypatch.setattr(nccl, name, lambda _library, handle, name=name: self._end(name, handle))

    def has(self, _name: str) -> bool:
        """Return whether it can revoke."""
        return self._revokes

    def call(self, mark: Inside) -> None:
        """Be inside a call that is stuck, in another thread."""
        entered = threading.Event()

        def run() -> None:
            with mark:
                entered.set()
                self._stuck.wait()
                # Before it is out: who waits for that comes after it.
                self.order.append("call")

        Detached(run)
        assert entered.wait(10)

    def come_back(self) -> None:
        """Let the call come back by itself."""
        self._stuck.set()

    def abort(self) -> Detached:
        """Begin an abort."""
        return abort(cast(Any, self), self.device, 64, self.inside, self.left)

    def _end(self, name: str, handle: int) -> None:
        self.order.append((name, handle))
        self._stuck.set()
        poll_until(lambda: self.inside.none and self.left.none, 2.0)
        if name == "revoke":
            raise NCCLError("it was revoked before", call="ncclCommRevoke", result=4)


def poll_until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until something is so, for a while at most."""
    watch, pause = Watch(seconds), Pause()
    while not condition() and not watch.tick():
        pause()


def test_an_abort_waits_for_a_call_that_was_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's abort frees what a call on the communicator uses: it comes after that call, however that ends."""
    library = Library(monkeypatch, revokes=True)
    library.call(library.left)
    aborting = library.abort()
    poll_until(lambda: aborting.done, 0.3)
    assert not aborting.done
    library.come_back()
    aborting.result(Watch(10), "aborting")
    assert library.order == ["context", "call", ("abort", 64)]
    library.abort().result(Watch(10), "aborting")
    assert library.order[3:] == ["context", ("abort", 64)]


def test_a_call_that_the_program_waits_in_is_ended_before_the_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be held by the driver on a full stream, which nothing but NCCL's end of what is there moves.

    The abort comes when it is out; a communicator that was revoked already is no obstacle.
    """
    library = Library(monkeypatch, revokes=True)
    library.call(library.inside)
    library.abort().result(Watch(10), "aborting")
    assert library.order == ["context", ("revoke", 64), "call", ("abort", 64)]


def test_an_older_library_ends_such_a_call_by_the_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else ends what is on the stream there."""
    library = Library(monkeypatch, revokes=False)
    library.call(library.inside)
    library.abort().result(Watch(10), "aborting")
    assert library.order == ["context", ("abort", 64), "call"]


def test_a_call_that_is_soon_over_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is revoked where a call is on its way out anyway."""
    library = Library(monkeypatch, revokes=True)
    library.call(library.inside)
    aborting = library.abort()
    library.come_back()
    aborting.result(Watch(10), "aborting")
    assert library.order[-2:] == ["call", ("abort", 64)] and ("revoke", 64) not in library.order


def test_a_step_has_one_name() -> None:
    """It is told as the step that this rank is in, and has its time once it has ended; one that fails has none."""
    told: list[str] = []
    bound = Bound(Watch(10), lambda: None, told.append)
    with bound.step("one") as step:
        assert told == [step] == ["one"]
    with contextlib.suppress(OSError), bound.step("other"):
        raise OSError
    assert told == ["one", "other"] and list(bound.watch.phases) == ["one"]
