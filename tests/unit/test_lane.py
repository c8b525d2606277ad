"""The lane, the health of a communicator, and the stop-watch; no MPI."""

from __future__ import annotations

import threading
import time

import pytest

from butter_mpi.control import Watch
from butter_mpi.errors import ButterError, CommunicatorBrokenError, CommunicatorClosedError, PeerLostError
from butter_mpi.lane import Health, Lane


def test_second_thread_is_told_who_holds_the_lane() -> None:
    """A thread that waits in vain is told which thread holds the lane, in what, and that nothing was sent."""
    lane, caught = Lane(), []

    def wait() -> None:
        try:
            lane.take("rank 0/2", "barrier", 0.05)
        except ButterError as error:
            caught.append(str(error))

    with lane.held("rank 0/2", "group", 1):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(10)
    assert "held for 0.05 s by thread MainThread in group; nothing was sent" in caught[0]


def test_lane_is_free_after_an_exception() -> None:
    """An exception in the body gives the lane back."""
    lane = Lane()
    with pytest.raises(ZeroDivisionError), lane.held("r", "x", 1):
        raise ZeroDivisionError
    with lane.tried() as held:
        assert held


def test_first_cause_stays() -> None:
    """A poisoned communicator gives its first cause again, each time as an instance of its own."""
    health = Health()
    health.check("r", "x")
    assert health.poison(PeerLostError("first", lost_ranks=(3,)))
    assert not health.poison(CommunicatorBrokenError("second"))
    caught = []
    for _ in range(2):
        with pytest.raises(PeerLostError, match="first") as info:
            health.check("r", "x")
        caught.append(info.value)
    assert caught[0] is not caught[1] and caught[0].lost_ranks == (3,)
    health.closed = "closed"
    with pytest.raises(CommunicatorClosedError, match="was closed"):
        health.check("r", "x")


def test_watch_leaves_out_time_in_which_nobody_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time between two looks counts up to half a second: a process that was stopped does not blame its peers."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch = Watch(2.0)
    now[0] += 30
    assert not watch.tick() and watch.elapsed == 0.5
    for _ in range(12):
        now[0] += 0.125
        over = watch.tick()
    assert over and watch.elapsed == 2.0
    assert not Watch(None).tick()


def test_time_is_told_by_phase() -> None:
    """Each wait has the time since the one before; waits of one name are added up, in the order of the first."""
    watch = Watch(None)
    for phase in ("one", "other", "one"):
        time.sleep(0.01)
        watch.passed(phase)
    assert list(watch.phases) == ["one", "other"]
    assert watch.phases["one"] >= 0.02 and watch.phases["other"] >= 0.01
    assert sum(watch.phases.values()) == pytest.approx(watch.elapsed)
