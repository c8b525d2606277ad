"""How a NCCL communicator is given up while another thread is inside a call on it."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from butter_mpi import nccl
from butter_mpi.control import Watch
from butter_mpi.detached import Detached
from butter_mpi.planes.entering import Inside
from butter_mpi.planes.joining import Bound, abort


def test_an_abort_waits_for_the_call_that_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's abort frees what a call on the communicator uses: it comes after that call, however that ends."""
    order: list[Any] = []
    monkeypatch.setattr(nccl, "abort", lambda _library, handle: order.append(handle))
    device: Any = SimpleNamespace(make_current=lambda: order.append("context"))
    library: Any = None
    stuck = threading.Event()

    inside, entered = Inside(), threading.Event()

    def call() -> None:
        with inside:
            entered.set()
            stuck.wait()
            order.append("call")
            raise OSError

    Detached(call)
    assert entered.wait(10)
    aborting = abort(library, device, 64, inside)
    assert not aborting.done
    stuck.set()
    aborting.result(Watch(10), "aborting")
    assert order == ["call", "context", 64]
    abort(library, device, 72, inside).result(Watch(10), "aborting")
    assert order[-1] == 72


def test_a_step_has_one_name() -> None:
    """It is told as the step that this rank is in, and has its time once it has ended; one that fails has none."""
    told: list[str] = []
    bound = Bound(Watch(10), lambda: None, told.append)
    with bound.step("one") as step:
        assert told == [step] == ["one"]
    with contextlib.suppress(OSError), bound.step("other"):
        raise OSError
    assert told == ["one", "other"] and list(bound.watch.phases) == ["one"]
