"""What a rank makes of the watcher's messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from helpers.require import need

from butter_mpi.control import Watch
from butter_mpi.descent import Descent
from butter_mpi.errors import StartError
from butter_mpi.sentinel.client import Offer, Sentinel
from butter_mpi.sentinel.judging import Verdict

TEXT = "rank 2 has been stopped"
USER = 54321
# Another user, without an account, that takes a name as soon as it is free, and shows what comes there.
SQUATTER = f"""
import os, socket, sys
os.setresuid({USER}, {USER}, {USER})
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.bind("\\0butter_mpi-" + sys.argv[1])
sock.listen()
print("listening", flush=True)
print(sock.accept()[0].recv(1 << 16), flush=True)
"""


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
    sentinel.all_came()
    sentinel.resume(1, 0)
    sentinel.look_at_start()
    sentinel._hear({"kind": "running", "rank": 2})
    sentinel.look_at_start()


def test_name_that_another_user_has_taken_gets_no_secret() -> None:
    """Where the rank that starts the watcher is gone its name is free; who takes it is told nothing."""
    need("root", os.geteuid() == 0, "another user cannot be had")
    gone, own = Offer("on", 10), Offer("on", 10)
    said = [json.loads(one.payload()) for one in (gone, own)]
    gone.close()
    squatter = subprocess.Popen([sys.executable, "-c", SQUATTER, gone.secret[:16]], stdout=subprocess.PIPE, text=True)
    with squatter:
        assert squatter.stdout is not None and squatter.stdout.readline() == "listening\n"
        with pytest.raises(StartError, match=f"cannot be reached: user {USER} listens under its name"):
            Sentinel(own, said, 1, descent=Descent.of_init("init", 2), start_deadline=20, frozen=True, file="")
        assert squatter.stdout.read() == "b''\n"
