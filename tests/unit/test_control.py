"""Requests and their buffers, and messages that always fit; no MPI."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from unittest.mock import Mock

import numpy as np
import pytest

from butter_mpi import control
from butter_mpi.control import Control, Ticket


class Request:
    """A request that is done after some looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def Test(self) -> bool:  # noqa: N802
        self.looks -= 1
        return self.looks < 0


def test_interrupted_start_keeps_its_buffers() -> None:
    """An interrupt right after a request was started may not free what MPI writes into; MPI_Finalize would wait."""
    buffer = np.zeros(8)
    alive = weakref.ref(buffer)

    def start(*_: object) -> Request:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Ticket(buffer).start(start, buffer)
    del buffer
    gc.collect()
    assert alive() is not None and control.unfinished()
    control._OPEN.clear()


def test_refused_start_and_finished_request_keep_nothing() -> None:
    """A call that fails starts nothing, and a request that is done holds nothing any longer."""

    def refuse() -> Request:
        raise ValueError

    with pytest.raises(ValueError):
        Ticket(1).start(refuse)
    ticket = Ticket(2).start(Request, 1)
    assert not ticket.done() and control.unfinished() is False
    assert ticket.done() and ticket not in control._OPEN


@pytest.mark.parametrize("text", ["x" * 100_000, "\x01" * 5000, "\N{SNOWMAN}" * 5000, "\ud800" * 3000])
def test_every_notice_fits(text: str) -> None:
    """A long text, a long list of ranks and many records are cut to what a message holds, never refused."""
    body = {"error": "PeerLostError", "text": text, "lost": list(range(5000)), "n": 1, "records": {"1": text}}
    _, payload = control.fitting("broken", body)
    assert len(payload) <= control._MESSAGE_BYTES
    message = json.loads(payload[control._LENGTH_BYTES :])
    assert message["kind"] == "broken" and message["body"]["error"] == "PeerLostError" and message["body"]["text"]
    assert message["body"]["lost"][:3] == [0, 1, 2]


def test_no_operation_follows_the_last_word() -> None:
    """What a peer would find behind it could meet a later communicator, which takes over this one's number in MPI."""
    comm = Mock(rank=0, size=3)
    comm.Isend.return_value.Test.return_value = True
    mailbox = Control(comm, Mock())
    for peer, kind in ((1, "op"), (1, "left"), (2, "op"), (2, "left"), (1, "op"), (1, "pong")):
        mailbox.send([peer], kind, {})
    assert [call.kwargs["dest"] for call in comm.Isend.call_args_list] == [1, 1, 2, 1]
    mailbox.retire()


def test_a_receive_that_another_thread_ended_is_no_message() -> None:
    """Whoever takes messages while another thread stops listening finds none: what is cancelled is done too."""
    box: list[Control] = []

    class Ended(Request):
        """Done because it was given up meanwhile."""

        def Test(self) -> bool:  # noqa: N802
            box.pop().retire() if box else None
            return True

        def Cancel(self) -> None:  # noqa: N802
            """Nothing else."""

    comm = Mock(rank=0, size=2, Irecv=Mock(side_effect=lambda *_, **__: Ended(0)))
    one = Control(comm, Mock(Exception=OSError))
    box.append(one)
    assert not one.pump() and not box and not one.pump()
    assert one.broken is None


def test_one_thread_at_a_time_takes_messages() -> None:
    """A look from within a look, by a signal handler or another thread, takes nothing a second time."""
    seen: list[bool] = []

    class Looking(Request):
        """Another thread looks just now."""

        def Test(self) -> bool:  # noqa: N802
            other = threading.Thread(target=lambda: seen.append(one.pump()))
            other.start()
            other.join()
            return False

    one = Control(Mock(rank=0, size=2, Irecv=Mock(side_effect=lambda *_, **__: Looking(0))), Mock(Exception=OSError))
    assert not one.pump() and seen == [False]
    one.abandon()
    assert not one.pump()


def test_who_knows_more_of_a_loss_has_the_first_word() -> None:
    """MPI's words of a rank that it lost count once the watcher has had its time, and at once where there is none."""

    class Lost(Request):
        """MPI has lost the rank that would have sent."""

        def Test(self) -> bool:  # noqa: N802
            raise OSError("MPI_ERR_PROC_FAILED")

    def made() -> Control:
        comm = Mock(rank=0, size=2, Irecv=Mock(side_effect=lambda *_, **__: Lost(0)))
        return Control(comm, Mock(Exception=OSError))

    def words(one: Control) -> str | None:
        return None if one.broken is None else str(one.broken[1]["text"])

    at_once, later = made(), made()
    later.patience = 60.0
    for one in (at_once, later):
        one.pump()
    assert words(at_once) == "MPI lost rank 1: MPI_ERR_PROC_FAILED" and words(later) is None
    later._deliver(1, "broken", {"error": "PeerLostError", "text": "it says so itself", "lost": [1]})
    assert words(later) == "it says so itself"
    for one in (at_once, later):
        one.abandon()
