"""Buffers are kept exactly until their stream has passed the operation that uses them."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from butter_mpi.errors import CUDAError
from butter_mpi.planes import keeping
from butter_mpi.planes.keeping import Keeping


class _Array:
    """What a user hands over."""


class _Device:
    """Events by number; a stream has passed those that a test says it has."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.looks = 0
        self.recorded: list[tuple[int, int]] = []
        self.passed: set[int] = set()
        self.living: set[int] = set()
        self.captured: set[int] = set()
        self.idle: set[int] = set()

    def is_captured(self, stream: int) -> bool:
        return stream in self.captured

    def ready(self, stream: int) -> bool:
        assert stream not in self.captured
        return stream in self.idle

    def make_event(self) -> int:
        event = next(self._numbers)
        self.living.add(event)
        return event

    def destroy_event(self, event: int) -> None:
        self.living.remove(event)

    def recorder(self, event: int, stream: int) -> Callable[[], int]:
        return lambda: self.record(event, stream)

    def record(self, event: int, stream: int) -> int:
        self.recorded.append((event, stream))
        self.passed.discard(event)
        return 0

    def check_recorded(self, status: int) -> None:
        raise CUDAError("no stream", call="cuEventRecord", code=status)

    def beside_captures(self) -> contextlib.AbstractContextManager[None]:
        self.looks += 1
        return contextlib.nullcontext()

    def event_ready(self, event: int) -> bool:
        return event in self.passed


@pytest.fixture
def device() -> Any:
    """A device that makes events and nothing else."""
    return _Device()


def submit(kept: Keeping, stream: int, *owners: Any) -> None:
    """Do what a plane does around an operation."""
    kept.keep([(stream, owners)] if owners else [])
    kept.release()
    kept.mark()


def dead(reference: weakref.ref) -> bool:
    """Return whether nobody has it any more."""
    gc.collect()
    return reference() is None


def test_in_the_order_of_each_stream(device: Any) -> None:
    """What one stream has passed goes, whatever another one holds; a later operation of a stream waits its turn."""
    kept, arrays = Keeping(device), [_Array() for _ in range(3)]
    references = [weakref.ref(array) for array in arrays]
    for stream in (7, 8, 7):
        submit(kept, stream, arrays.pop(0))
    assert device.recorded == [(1, 7), (2, 8), (3, 7)]
    device.passed = {2, 3}
    kept.release()
    assert [dead(one) for one in references] == [False, True, False]
    device.passed.add(1)
    kept.release()
    assert [dead(one) for one in references] == [True, True, True]
    submit(kept, 9, _Array())
    assert len(device.living) == 3, "an event was not used again"


def test_a_loop_over_the_same_buffers_moves_one_event(device: Any) -> None:
    """The same buffers on the same stream are kept once, until the last operation on them is passed."""
    kept, one, other = Keeping(device), _Array(), _Array()
    for _ in range(5):
        submit(kept, 7, one, other)
    assert device.recorded == [(1, 7)] * 5 and not device.looks, "nothing had to be asked"
    submit(kept, 7, other, one)
    assert device.recorded[-1] == (2, 7)


def test_a_group_on_the_same_buffers_has_one_event(device: Any) -> None:
    """What several operations of a group use is marked once, behind all of them, also after it was marked before."""
    kept, array, other = Keeping(device), _Array(), _Array()
    for _ in range(2):
        kept.keep([(7, (array,)), (7, (array,)), (8, (array,)), (7, (array,))])
        kept.mark()
    assert device.recorded == [(1, 7), (2, 8)] * 2
    kept.keep([(7, (array,)), (7, (other,)), (7, (other,))])
    kept.mark()
    assert device.recorded[4:] == [(1, 7), (3, 7)]


def test_what_failed_on_its_way_is_kept(device: Any) -> None:
    """What has no event behind it yet may be in use; the next operation's mark is behind it too."""
    kept, reference = Keeping(device), None
    array = _Array()
    reference = weakref.ref(array)
    kept.keep([(7, (array,))])
    del array
    device.passed = {1}
    kept.release()
    assert not dead(reference) and device.recorded == []
    submit(kept, 8)
    assert device.recorded == [(1, 7)]
    device.passed = {1}
    kept.release()
    assert dead(reference)


def test_one_that_leaves_early(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator that ends with work under way keeps its buffers; the next one that ends lets go of them."""
    monkeypatch.setattr(keeping, "_LEFT", [])
    kept, array = Keeping(device), _Array()
    reference = weakref.ref(array)
    submit(kept, 7, array)
    del array
    kept.leave()
    assert not dead(reference) and device.living == {1}
    device.passed = {1}
    Keeping(device).leave()
    assert dead(reference) and device.living == set() and keeping._LEFT == []


def test_what_cannot_be_marked_is_not_tried_again(device: _Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that is gone fails its own operation and no later one; its buffer stays, as nothing tells of it."""
    kept, array = Keeping(device), _Array()  # type: ignore[arg-type]
    gone = weakref.ref(array)

    def record(event: int, stream: int) -> int:
        return 400 if stream == 7 else 0

    monkeypatch.setattr(device, "record", record)
    with pytest.raises(CUDAError):
        submit(kept, 7, array)
    submit(kept, 8, _Array())
    del array
    kept.release()
    assert not dead(gone)
    kept.clear()
    assert dead(gone)


def test_arrays_of_a_dropped_plan(device: Any) -> None:
    """They are kept from the finalizer on, and go when the stream has passed what it held at the next submission."""
    kept, array = Keeping(device), _Array()
    gone, lease = weakref.ref(array), kept.lend(7, None, None)
    submit(kept, 8)
    lease.give_back((array,))
    del array
    assert not dead(gone) and device.recorded == []
    kept.take_back()
    assert device.recorded == [(1, 7)] and not kept.empty and not kept.dropped and kept.lent == set()
    kept.release()
    assert not dead(gone)
    device.passed = {1}
    kept.release()
    assert dead(gone) and kept.empty


def test_a_stream_that_is_idle_needs_no_event(device: Any) -> None:
    """What nothing uses any more goes at once; so does what no call has used."""
    kept, array = Keeping(device), _Array()
    gone = weakref.ref(array)
    device.idle = {7}
    kept.lend(7, None, None).give_back((array,))
    kept.lend(8, None, None).give_back(())
    del array
    kept.take_back()
    assert dead(gone) and kept.empty and device.recorded == [] and kept.lent == set()


def test_a_captured_stream_is_left_alone(device: Any) -> None:
    """While a plan's stream is captured nothing is recorded there and nothing asked; later it is."""
    kept, array = Keeping(device), _Array()
    gone = weakref.ref(array)
    device.captured = {7}
    kept.lend(7, None, None).give_back((array,))
    del array
    kept.take_back()
    kept.mark_plans()
    assert not dead(gone) and device.recorded == [] and kept.dropped
    device.captured = set()
    kept.take_back()
    assert device.recorded == [(1, 7)] and not kept.dropped


def test_plans_that_live(device: Any) -> None:
    """Whoever waits for streams has an event put behind the calls of plans, which recorded none; of handles, none."""
    kept = Keeping(device)
    leases = [kept.lend(7, None, None), kept.lend(7, None, None), kept.lend(None, None, object())]
    found = [kept.empty]
    kept.mark_plans()
    found.append(kept.empty)
    device.passed = {1}
    kept.release()
    assert [*found, kept.empty] == [True, False, True] and device.recorded == [(1, 7)] and kept.lent == {7}
    kept.clear()
    assert kept.lent == set() and device.living == set()
    # Nobody takes it back any more.
    array = _Array()
    gone = weakref.ref(array)
    leases[0].give_back((array,))
    leases.clear()
    del array
    assert dead(gone) and not kept.dropped


def test_the_end_lets_all_go(device: Any) -> None:
    """With the communicator all arrays of dropped plans go, whether or not somebody came by before."""
    kept, array = Keeping(device), _Array()
    gone = weakref.ref(array)
    kept.lend(7, None, None).give_back((array,))
    del array
    assert not dead(gone)
    kept.clear()
    assert dead(gone)


def test_what_failed_can_be_forgotten(device: Any) -> None:
    """Once nothing can run any more what has no event is let go of; what has one stays until that is passed."""
    kept, failed, other = Keeping(device), _Array(), _Array()
    gone, there = weakref.ref(failed), weakref.ref(other)
    submit(kept, 7, other)
    kept.keep([(7, (failed,)), (8, (failed,))])
    del failed, other
    kept.forget_unmarked()
    assert dead(gone) and not dead(there) and not kept.empty
    submit(kept, 8)
    assert device.recorded == [(1, 7)]
    device.passed = {1}
    kept.release()
    assert dead(there) and kept.empty


def test_a_dropped_plan_beside_an_operation_on_its_way(device: Any) -> None:
    """What is behind a plan is no mark of the operation that is about to be executed, which stays the newest."""
    kept, array, other = Keeping(device), _Array(), _Array()
    lease, gone = kept.lend(7, None, None), weakref.ref(array)
    kept.keep([(7, (other,))])
    lease.give_back((array,))
    del array
    kept.take_back()
    kept.mark()
    assert device.recorded == [(2, 7), (1, 7)] and kept.newest(7) == 1
    device.passed = {2}
    kept.release()
    assert dead(gone) and not kept.empty
    device.passed = {1, 2}
    submit(kept, 7, other)
    kept.release()
    assert device.recorded[2:] == [(1, 7)] and kept.newest(7) == 1
