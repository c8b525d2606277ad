"""What a rank makes of the watcher's messages."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from butter_mpi.control import Watch
from butter_mpi.descent import Descent
from butter_mpi.errors import StartError
from butter_mpi.sentinel.client import Offer, Sentinel
from butter_mpi.sentinel.judging import Verdict

TEXT = "rank 2 has been stopped"


@pytest.fixture
def sentinel() -> Iterator[Sentinel]:
    """The end of a rank that is alone with its watcher, in a start in which another one said that it failed."""
    offer = Offer("on", 10)
    said = [json.loads(offer.payload())]
    alone = Descent.of_init("init", 1)
    one = Sentinel(offer, said, 0, descent=alone, start_deadline=20, frozen=True, file="")
    try:
        one.wait_until_ready(Watch(20))
        one._hear({"kind": "notice", "notice": Verdict("StartError", (1,), "it failed").notice(), "epoch": 0})
        one.look_at_start()
        one._hear({"kind": "stopped", "rank": 2, "text": TEXT})
        yield one
    finally:
        one.close()
        one.leave()


def test_stop_after_another_failure_ends_the_start(sentinel: Sentinel) -> None:
    """A rank that waits with the others for one that is stopped is told, though another cause came first."""
    with pytest.raises(StartError, match=TEXT):
        sentinel.look_at_start()


def test_stop_that_is_over_ends_no_start(sentinel: Sentinel) -> None:
    """It is taken back when the rank runs again."""
    sentinel._hear({"kind": "running", "rank": 2})
    sentinel.look_at_start()


def test_stop_before_a_reconnect_ends_nothing_after_it(sentinel: Sentinel) -> None:
    """Every rank came to the reconnect, whether the watcher has seen that or not; what it says late is harmless."""
    sentinel.resume(1, 0)
    sentinel.look_at_start()
    sentinel._hear({"kind": "running", "rank": 2})
    sentinel.look_at_start()
