"""The watcher as a process of its own, with ranks that are no MPI processes, and with strangers."""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import processes
from helpers.net import Far, listener
from helpers.recordings import validator

from butter_mpi.collectives import Operation
from butter_mpi.enums import DType
from butter_mpi.recorder import SIZE, Recorder
from butter_mpi.sentinel import messages
from butter_mpi.sentinel.client import Offer
from butter_mpi.sentinel.door import ALONE
from butter_mpi.sentinel.judging import Verdict
from butter_mpi.sentinel.watched import Rank

_ROOT = Path(__file__).resolve().parents[2]
_WATCHER = _ROOT / "butter_mpi" / "sentinel" / "__main__.py"
_LONG = 10.0
ABOUT = {"communicator": {"key": "k1", "name": "dup 1"}, "world_size": 8, "host": "n01"}

# Waits for a secret, joins like a rank, submits one barrier, then prints what it hears; every further line on its
# standard input is code to run.
FAKE_RANK = """
import array, json, os, signal, socket, sys, threading
from butter_mpi.collectives import Operation
from butter_mpi.enums import DType
from butter_mpi.recorder import Recorder
from butter_mpi.sentinel import messages
rank, secret = int(sys.argv[1]), sys.stdin.readline().strip()
recorder = Recorder(10)
recorder.write(Operation("barrier", 0, DType.UINT8, site=f"app/rank{rank}.py:5"), 1)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect("\\0butter_mpi-" + secret[:16])
# What never comes ends the test, and does not hold it.
sock.settimeout(20)
fds = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [recorder.fd]))]
sock.sendmsg([messages.pack("hello", rank=rank, secret=secret, older=[])], fds)
def obey():
    for line in sys.stdin:
        exec(line)
threading.Thread(target=obey, daemon=True).start()
while (message := messages.receive(sock)) is not None:
    if message["kind"] != "gone":
        print(json.dumps(message), flush=True)
print("null", flush=True)
"""


class Node:
    """A watcher, started as a rank does it, with fake ranks that join it when they are asked for.

    Ranks in `own` are this process.
    """

    def __init__(
        self,
        *ranks: int,
        start: float = 30,
        own: Sequence[int] = (),
        file: str = "",
        recorder_file: str = "",
        size: int = 8,
        links: dict[str, Any] = ALONE,
    ) -> None:
        self.mark = uuid.uuid4().hex
        offer = Offer("on", 10)
        self.fakes = {rank: self._fake(rank) for rank in ranks if rank not in own}
        pids = {rank: self.fakes[rank].pid if rank in self.fakes else os.getpid() for rank in ranks}
        self.secret = offer.secret
        config = {
            "listener": offer.socket.fileno(),
            "secret": offer.secret,
            "ranks": pids,
            "who": {rank: f"rank {rank}/8 on n01" for rank in ranks},
            "name": "dup 1",
            "descent": {"name": "dup 1", "origin": "init", "size": 8, "ranks": list(range(size))},
            "host": "n01",
            "start": start,
            "frozen": True,
            "file": file,
            "links": links,
            "recordings": {"file": recorder_file, "about": ABOUT},
        }
        subprocess.run(
            [sys.executable, "-S", "-E", "-s", "-B", str(_WATCHER)],
            input=json.dumps(config).encode(),
            env={processes.MARK: self.mark},
            start_new_session=True,
            pass_fds=[offer.socket.fileno()],
            timeout=_LONG,
            check=True,
        )
        offer.close()
        self.pids = processes.marked(self.mark)
        assert len(self.pids) == 1

    def _fake(self, rank: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-S", "-c", FAKE_RANK, str(rank)],
            env={"PYTHONPATH": str(_ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def fake(self, rank: int) -> subprocess.Popen[str]:
        """A process that joins as this rank now."""
        told(self.fakes[rank], self.secret)
        return self.fakes[rank]

    def connected(self) -> socket.socket:
        """A connection of this process."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(_LONG)
        sock.connect(f"\0butter_mpi-{self.secret[:16]}")
        return sock

    def ended(self, within: float) -> bool:
        """Whether the watcher has ended, in time."""
        return not processes.await_all_gone(self.mark, within)

    def close(self) -> None:
        for one in self.fakes.values():
            one.kill()
            one.communicate()
        processes.kill_all(lambda: processes.marked(self.mark))


@pytest.fixture
def node() -> Iterator[Callable[..., Node]]:
    """Make watchers, and see that none is left."""
    made: list[Node] = []

    def make(*ranks: int, **how: Any) -> Node:
        made.append(Node(*ranks, **how))
        return made[-1]

    yield make
    for one in made:
        one.close()


def heard(fake: subprocess.Popen[str]) -> dict[str, Any]:
    """The next message that a fake rank hears; empty: the watcher is gone."""
    assert fake.stdout is not None
    line = fake.stdout.readline()
    assert line, fake.communicate()
    return json.loads(line) or {}


def told(fake: subprocess.Popen[str], code: str) -> None:
    """Have a fake rank run a line of code."""
    assert fake.stdin is not None
    fake.stdin.write(f"{code}\n")
    fake.stdin.flush()


def hello(sock: socket.socket, rank: int, secret: str, *fds: int, older: Sequence[Any] = ()) -> None:
    """Introduce this process as a rank."""
    data = messages.pack("hello", rank=rank, secret=secret, older=list(older))
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])


def pair_works(one: Node, staying: subprocess.Popen[str], dying: subprocess.Popen[str], rank: int) -> None:
    """See that the death of one is told to the other, and the end of all is the watcher's."""
    dying.kill()
    notice = heard(staying)
    assert notice["kind"] == "notice" and notice["notice"]["lost"] == [rank], notice
    told(staying, "messages.send(sock, 'bye')")
    assert one.ended(_LONG)


@contextlib.contextmanager
def recorders(count: int) -> Iterator[list[int]]:
    """Descriptors of recorders."""
    made = [Recorder(10) for _ in range(count)]
    try:
        yield [one.fd for one in made]
    finally:
        for one in made:
            one.close()


def test_death_is_told_with_its_cause_and_last_operation(node: Callable[..., Node], tmp_path: Path) -> None:
    """Each living rank hears who died, how, and where it was; people read it on stderr and in the file."""
    file = tmp_path / "verdict.jsonl"
    one = node(3, 4, 6, file=str(file))
    fakes = {rank: one.fake(rank) for rank in (3, 4, 6)}
    for fake in fakes.values():
        assert heard(fake) == {"kind": "ready", "pid": one.pids[0]}
    text = f"rank 4/8 on n01 (process {fakes[4].pid}) was killed by SIGKILL; last submitted barrier #1 (uint8 x 0) at "
    text += "app/rank4.py:5"
    fakes[4].kill()
    for rank in (3, 6):
        notice = heard(fakes[rank])["notice"]
        assert (notice["error"], notice["lost"], notice["text"]) == ("PeerLostError", [4], text)
        assert (notice["n"], notice["operation"]) == (1, "barrier")
    for rank in (3, 6):
        told(fakes[rank], "messages.send(sock, 'bye')")
    assert one.ended(_LONG)
    errors = [fakes[rank].communicate()[1] for rank in (3, 6)]
    assert sorted(errors) == ["", f"butter_mpi: the watcher: {text}\n"]
    (line,) = file.read_text().splitlines()
    verdict = json.loads(line)
    assert verdict["verdict"]["lost"] == [4] and verdict["host"] == "n01"
    assert verdict["submitted"]["6"] == ["barrier #1 (uint8 x 0) at app/rank6.py:5"]


def test_recordings_of_the_dead_and_the_living_are_written(node: Callable[..., Node], tmp_path: Path) -> None:
    """What each rank of the node has submitted is in the file, once, with what became of it; nobody waits for that."""
    file = tmp_path / "recorder.jsonl"
    one = node(3, 4, 6, recorder_file=str(file))
    fakes = {rank: one.fake(rank) for rank in (3, 4, 6)}
    for fake in fakes.values():
        heard(fake)
    told(fakes[6], "messages.send(sock, 'closed'); print('{}', flush=True)")
    assert heard(fakes[6]) == {} and not file.exists()
    fakes[4].kill()
    cause = heard(fakes[3])["notice"]["text"]
    fakes[3].kill()
    heard(fakes[6])
    told(fakes[6], "messages.send(sock, 'bye')")
    assert one.ended(_LONG)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line, (rank, state, how) in zip(
        lines, [(3, "alive", ""), (4, "ended", "was killed by SIGKILL"), (6, "closed", "")], strict=True
    ):
        validator("recording").validate(line)
        assert (line["rank"], line["state"], line["how"], line["cause"]) == (rank, state, how, cause)
        assert (line["pid"], line["communicator"]) == (fakes[rank].pid, ABOUT["communicator"])
        (record,) = line["collectives"]["records"]
        assert record["operation"] == "barrier" and record["site"] == f"app/rank{rank}.py:5"
        assert abs(record["time"] - time.time()) < 60


def test_recordings_that_cannot_be_written_end_nothing(node: Callable[..., Node], tmp_path: Path) -> None:
    """Where the folder is gone by then, the watcher says so, and goes on to watch till the last has said goodbye."""
    files = [str(tmp_path / "none" / name) for name in ("recorder.jsonl", "verdicts.jsonl")]
    one = node(0, 1, 2, recorder_file=files[0], file=files[1])
    fakes = [one.fake(rank) for rank in range(3)]
    for fake in fakes:
        heard(fake)
    fakes[1].kill()
    for rank in (0, 2):
        assert heard(fakes[rank])["notice"]["lost"] == [1]
    told(fakes[0], "messages.send(sock, 'bye')")
    assert not one.ended(0.5)
    told(fakes[2], "messages.send(sock, 'bye')")
    assert one.ended(_LONG)
    said = "".join(fakes[rank].communicate()[1] for rank in (0, 2)).splitlines()
    why = "cannot be written: No such file or directory; this is not in it"
    assert {f"butter_mpi: the watcher: {file} {why}" for file in files} <= set(said)


@pytest.mark.parametrize(("code", "how"), [("os._exit(0)", "exit status 0"), ("os._exit(3)", "exit status 3")])
def test_exit_is_told_with_its_status(node: Callable[..., Node], code: str, how: str) -> None:
    """A rank that ends without a goodbye is lost, whatever its status."""
    one = node(0, 1)
    fakes = [one.fake(rank) for rank in range(2)]
    for fake in fakes:
        heard(fake)
    told(fakes[1], code)
    assert how in heard(fakes[0])["notice"]["text"]


def test_strangers_change_nothing(node: Callable[..., Node]) -> None:
    """Whoever connects and is no rank of this node is sent away, or left waiting, and nobody hears of it."""
    one = node(0, 1, 2, own=[2])
    first = one.fake(0)
    with contextlib.ExitStack() as open_, recorders(2) as fds:
        silent = open_.enter_context(one.connected())
        foreign = os.memfd_create("foreign")
        open_.callback(os.close, foreign)
        os.ftruncate(foreign, SIZE)
        attempts: list[Callable[[socket.socket], Any]] = [
            lambda sock: hello(sock, 2, "0" * 32, fds[0]),  # not the secret
            lambda sock: hello(sock, 2, one.secret[:16], fds[0]),  # what can be read in /proc/net/unix
            lambda sock: hello(sock, 2, one.secret),  # no descriptor
            lambda sock: hello(sock, 2, one.secret, *fds),  # two
            lambda sock: hello(sock, 2, one.secret, *fds * 80),  # more than there is room for
            lambda sock: hello(sock, 2, one.secret, fds[0], older=[["key", "init"]]),  # one too few
            lambda sock: hello(sock, 2, one.secret, *fds, older=[7]),  # an older one without a name
            lambda sock: hello(sock, 2, one.secret, foreign),  # no recorder
            lambda sock: hello(sock, 2, one.secret, silent.fileno()),  # no file
            lambda sock: hello(sock, 1, one.secret, fds[0]),  # another process is that rank
            lambda sock: hello(sock, 3, one.secret, fds[0]),  # no rank of this node
            lambda sock: hello(sock, -1, one.secret, fds[0]),
            lambda sock: sock.send(b"\0garbage"),
            lambda sock: sock.send(b"x" * 150_000),
            lambda sock: sock.send(messages.pack("bye")),
            lambda sock: sock.send(messages.pack("notice", notice={}, epoch=0)),
        ]
        for attempt in attempts:
            sock = open_.enter_context(one.connected())
            attempt(sock)
            # It may be told why; then it is sent away.
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(messages.LIMIT):
                    pass
        open_.enter_context(one.connected()).close()
        second = one.fake(1)
        third = open_.enter_context(one.connected())
        hello(third, 2, one.secret, fds[0])
        assert heard(first)["kind"] == heard(second)["kind"] == "ready"
        again = open_.enter_context(one.connected())
        hello(again, 2, one.secret, fds[1])
        assert again.recv(messages.LIMIT) == b""
        third.send(messages.pack("bye"))
        pair_works(one, first, second, 1)


@pytest.mark.parametrize(
    "notice",
    [
        {},
        {"error": "PeerLostError"},
        {"lost": "x"},
        {"lost": [None]},
        {"lost": [float("inf")]},
        {"records": []},
        {"records": {"x": 1}},
        {"elapsed": 10**400},
        {"elapsed": {}},
        {"text": "\ud800" * 20_000},
    ],
    ids=lambda notice: str(notice)[:40],
)
def test_odd_notice_of_a_rank_does_not_end_the_watcher(node: Callable[..., Node], notice: dict[str, Any]) -> None:
    """Whatever a rank says of its failure, the watcher goes on to watch."""
    good = {"error": "PeerLostError", "lost": [1], "text": "t", "n": 1, "operation": "", "phase": "", "elapsed": 0.0}
    said = {**good, "records": {}, **notice} if notice else notice
    one = node(0, 1)
    fakes = [one.fake(rank) for rank in range(2)]
    for fake in fakes:
        heard(fake)
    sent = f"messages.send(sock, 'broken', notice=json.loads({json.dumps(said)!r}), epoch=0)"
    told(fakes[1], f"{sent}; print('{{}}', flush=True)")
    heard(fakes[1])
    fakes[1].kill()
    # What was odd, or the death: in any case there is a watcher to tell it.
    assert heard(fakes[0]).get("kind") == "notice"
    told(fakes[0], "messages.send(sock, 'bye')")
    assert one.ended(_LONG)


def test_rank_that_never_reads_holds_up_nobody(node: Callable[..., Node]) -> None:
    """A stopped rank whose messages pile up does not keep the watcher from the others."""
    one = node(0, 1, 2)
    fakes = [one.fake(rank) for rank in range(3)]
    for fake in fakes:
        heard(fake)
    fakes[1].send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    fakes[2].kill()
    assert heard(fakes[0])["notice"]["lost"] == [2] and time.monotonic() - begin < 2
    fakes[1].send_signal(signal.SIGCONT)
    assert heard(fakes[1])["notice"]["lost"] == [2]


def test_two_watchers_do_not_meet(node: Callable[..., Node]) -> None:
    """Two jobs on one machine hear nothing of one another, also with the same rank numbers."""
    nodes = [node(0, 1), node(0, 1)]
    fakes = [[one.fake(rank) for rank in range(2)] for one in nodes]
    for both in fakes:
        assert heard(both[0])["kind"] == heard(both[1])["kind"] == "ready"
    pair_works(nodes[0], fakes[0][0], fakes[0][1], 1)
    pair_works(nodes[1], fakes[1][0], fakes[1][1], 1)


# -- its end ---------------------------------------------------------------------------------------------------------


def test_ends_with_the_goodbye_of_the_last(node: Callable[..., Node]) -> None:
    """It stays while one rank is there, and goes with the last; a death after the goodbye is no fault."""
    one = node(0, 1)
    fakes = [one.fake(rank) for rank in range(2)]
    for fake in fakes:
        heard(fake)
    told(fakes[0], "messages.send(sock, 'bye'); os.kill(os.getpid(), 9)")
    fakes[0].wait(_LONG)
    assert not one.ended(0.5)
    told(fakes[1], "messages.send(sock, 'bye')")
    assert one.ended(_LONG) and heard(fakes[1]) == {}


def test_ends_with_the_death_of_all(node: Callable[..., Node]) -> None:
    """It goes when every rank is dead."""
    one = node(0, 1)
    fakes = [one.fake(rank) for rank in range(2)]
    for fake in fakes:
        heard(fake)
    for fake in fakes:
        fake.kill()
    assert one.ended(_LONG)


def test_ends_at_the_start_deadline_where_nobody_comes(node: Callable[..., Node]) -> None:
    """It does not wait for ranks that never come."""
    one = node(0, 1, start=1)
    begin = time.monotonic()
    assert one.ended(_LONG) and time.monotonic() - begin > 0.5


def test_ends_with_ranks_that_die_before_they_come(node: Callable[..., Node]) -> None:
    """Where every rank is gone before it came, nobody will come."""
    one = node(0, 1, start=600)
    assert not one.ended(0.3)
    for fake in one.fakes.values():
        fake.kill()
    assert one.ended(_LONG)


def test_death_before_it_came_is_told(node: Callable[..., Node]) -> None:
    """A rank that ends before it joins is named to those that have joined, and to those that join later."""
    one = node(0, 1, 2)
    first = one.fake(0)
    one.fakes[1].kill()
    for fake in (first, one.fake(2)):
        notice = heard(fake)["notice"]
        assert notice["lost"] == [1] and "was killed by SIGKILL; it was in the start" in notice["text"]


def test_death_after_another_failure_is_told(node: Callable[..., Node]) -> None:
    """A second fault of an epoch is no first cause; a death is told all the same, again in the next epoch."""
    one = node(0, 1, 2)
    fakes = [one.fake(rank) for rank in range(3)]
    for fake in fakes:
        heard(fake)
    said = Verdict("CommunicatorBrokenError", (), "it broke").notice()
    told(fakes[1], f"messages.send(sock, 'broken', notice={said!r}, epoch=0)")
    assert heard(fakes[0])["notice"]["text"] == "it broke"
    fakes[2].kill()
    fakes[2].wait()
    told(fakes[0], "messages.send(sock, 'resume', sequence=1, pairs=0, epoch=1)")
    again = heard(fakes[0])
    assert again["epoch"] == 1 and again["notice"]["lost"] == [2], again


def test_stop_after_another_failure_is_told_and_taken_back(node: Callable[..., Node]) -> None:
    """A stop of 4 s is told to the others though another cause came first, also to one that comes later; then its end.

    What is told next about the rank that was stopped, and to it, is its death: nothing more of the stop.
    """
    one = node(0, 1, 2)
    fakes = [one.fake(rank) for rank in range(2)]
    said = Verdict("CommunicatorBrokenError", (), "it broke").notice()
    told(fakes[1], f"messages.send(sock, 'broken', notice={said!r}, epoch=0)")
    assert heard(fakes[0])["notice"]["text"] == "it broke"
    fakes[1].send_signal(signal.SIGSTOP)
    stopped = heard(fakes[0])
    assert stopped["kind"] == "stopped" and stopped["rank"] == 1, stopped
    text = f"rank 1/8 on n01 (process {fakes[1].pid}) has been stopped (SIGSTOP or SIGTSTP) for 4."
    assert stopped["text"].startswith(text) and "app/rank1.py:5" in stopped["text"], stopped
    late = one.fake(2)
    assert {heard(late)["kind"] for _ in range(3)} == {"ready", "notice", "stopped"}
    fakes[1].send_signal(signal.SIGCONT)
    assert heard(fakes[0])["kind"] == "ready"
    for fake in (fakes[0], late):
        assert heard(fake) == {"kind": "running", "rank": 1}
    assert heard(fakes[1])["kind"] == "ready"
    told(fakes[0], "messages.send(sock, 'resume', sequence=1, pairs=0, epoch=1)")
    late.kill()
    notices = [heard(fake) for fake in fakes[:2]]
    assert [(each["kind"], each["notice"]["lost"]) for each in notices] == [("notice", [2])] * 2, notices


# -- after the close ---------------------------------------------------------------------------------------------------


def ranks(one: Node) -> dict[int, subprocess.Popen[str]]:
    """The fake ranks of a node, which have all joined."""
    fakes = {rank: one.fake(rank) for rank in one.fakes}
    for fake in fakes.values():
        assert heard(fake)["kind"] == "ready"
    return fakes


def said(fake: subprocess.Popen[str], *kinds: str, then: str = "") -> None:
    """Have a fake rank say these, then do something; returns when it has, or has ended by it."""
    sent = [f"messages.send(sock, {kind!r})" for kind in kinds]
    told(fake, "; ".join([*sent, then or "print(json.dumps(True), flush=True)"]))
    if then:
        fake.wait(_LONG)
    else:
        assert fake.stdout is not None and fake.stdout.readline() == "true\n"


ENDS_WELL = {
    "in the middle of MPI_Finalize, with a status of its own": (("closed", "leaving"), "os._exit(3)"),
    "with status 0, while nobody waits for it": (("closed",), "os._exit(0)"),
}
ENDS_BADLY = {
    "closed, then killed": (("closed",), "os.kill(os.getpid(), 9)", "was killed by SIGKILL after closing its"),
    "closed, then ended": (("closed",), "os._exit(3)", "exit status 3 after closing its communicator, without MPI_F"),
    "killed in MPI_Finalize": (("closed", "leaving"), "os.kill(os.getpid(), 11)", "by SIGSEGV in MPI_Finalize or"),
}


@pytest.mark.parametrize("how", list(ENDS_WELL))
def test_good_end_after_the_close_is_told_to_nobody(node: Callable[..., Node], how: str) -> None:
    """A rank that ends well after its close is no lost rank; what comes next is told as if it had never been."""
    words, end = ENDS_WELL[how]
    one = node(0, 1, 2)
    fakes = ranks(one)
    said(fakes[1], *words, then=end)
    fakes[2].kill()
    assert heard(fakes[0])["notice"]["lost"] == [2]


def test_victims_of_a_launcher_after_a_bad_status_are_told_to_nobody(node: Callable[..., Node]) -> None:
    """Launchers end the ranks that are past MPI_Finalize too, where one ended with a status of its own: no news."""
    one = node(0, 1, 2, 3)
    fakes = ranks(one)
    said(fakes[1], "closed", "leaving", then="os._exit(5)")
    said(fakes[2], "closed", "leaving", then="os.kill(os.getpid(), 9)")
    fakes[3].kill()
    assert heard(fakes[0])["notice"]["lost"] == [3]


@pytest.mark.parametrize("how", list(ENDS_BADLY))
def test_bad_end_after_the_close_is_told(node: Callable[..., Node], how: str) -> None:
    """A rank that closed and did not come through MPI_Finalize is a lost rank, told at once, also to who closed."""
    words, end, text = ENDS_BADLY[how]
    one = node(0, 1)
    fakes = ranks(one)
    said(fakes[0], "closed")
    begin = time.monotonic()
    said(fakes[1], *words, then=end)
    notice = heard(fakes[0])["notice"]
    assert time.monotonic() - begin < 1 and notice["lost"] == [1] and text in notice["text"], notice
    # It has closed, and computes on: nobody ends it.
    with pytest.raises(subprocess.TimeoutExpired):
        fakes[0].wait(1.5)


def test_last_words_count_whenever_they_are_read(node: Callable[..., Node]) -> None:
    """What a rank said before its end is read before that is judged, however late the watcher comes to it."""
    one = node(0, 1, 2)
    fakes = ranks(one)
    os.kill(one.pids[0], signal.SIGSTOP)
    said(fakes[1], "closed", "leaving", then="os._exit(1)")
    os.kill(one.pids[0], signal.SIGCONT)
    fakes[2].kill()
    assert heard(fakes[0])["notice"]["lost"] == [2]


LOST = {
    "killed": ((), "os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
    "stopped": ((), "os.kill(os.getpid(), signal.SIGSTOP)", "has been stopped"),
    "left by os._exit(0)": (("closed",), "os._exit(0)", "exit status 0 after closing its communicator, without MPI_F"),
}


@pytest.mark.parametrize("how", list(LOST))
def test_ranks_in_finalize_are_ended_with_the_verdict(node: Callable[..., Node], tmp_path: Path, how: str) -> None:
    """Who waits in MPI_Finalize for a lost rank ends within 5 s, after the verdict, by SIGALRM, or else by SIGKILL."""
    words, end, text = LOST[how]
    file = tmp_path / "verdict.jsonl"
    one = node(0, 1, 2, file=str(file))
    fakes = ranks(one)
    said(fakes[0], "closed", "leaving")
    told(fakes[2], f"import ctypes; ctypes.CDLL(None).signal({int(signal.SIGALRM)}, ctypes.c_void_p(1))")
    said(fakes[2], "closed", "leaving")
    begin = time.monotonic()
    told(fakes[1], "; ".join([*(f"messages.send(sock, {word!r})" for word in words), end]))
    status = {rank: fakes[rank].wait(_LONG) for rank in (0, 2)}
    took = time.monotonic() - begin
    assert took < 5 and status == {0: -signal.SIGALRM, 2: -signal.SIGKILL}, (took, status)
    (line,) = file.read_text().splitlines()
    assert json.loads(line)["verdict"]["lost"] == [1] and text in json.loads(line)["verdict"]["text"]
    fakes[1].kill()
    err = "".join(fake.communicate()[1] for fake in fakes.values())
    verdict, ended = err.splitlines()
    assert "rank 1/8 on n01" in verdict and text in verdict, err
    assert "ranks 0, 2 cannot come out of MPI_Finalize any more, as rank 1 will not" in ended, err


def test_rank_in_finalize_that_others_went_on_without_is_ended(node: Callable[..., Node]) -> None:
    """Also where they did so before it had waited for long; the others are told nothing of its end."""
    one = node(0, 1, 2, size=3)
    fakes = ranks(one)
    said(fakes[0], "closed", "leaving")
    fakes[1].kill()
    assert heard(fakes[2])["kind"] == "notice"
    come = {"what": "shrink", "sequence": 1, "pairs": 0, "limit": 9.0}
    told(fakes[2], f"messages.send(sock, 'come', **{come})")
    assert heard(fakes[2])["spans"] == [[2, 2]]
    assert fakes[0].wait(_LONG) == -signal.SIGALRM
    told(fakes[2], "messages.send(sock, 'bye')")
    assert heard(fakes[2]) == {} and one.ended(_LONG)
    err = fakes[2].communicate()[1]
    assert f"process {fakes[0].pid}, which others went on without, cannot come out of MPI_Finalize" in err, err


def test_stopped_after_its_close_while_nobody_waits(node: Callable[..., Node]) -> None:
    """A rank that closed may be stopped for long; it is lost as soon as another one waits for it in MPI_Finalize."""
    one = node(0, 1)
    fakes = ranks(one)
    for fake in fakes.values():
        said(fake, "closed")
    fakes[1].send_signal(signal.SIGSTOP)
    assert fakes[0].stdout is not None and not select.select([fakes[0].stdout], [], [], 5)[0]
    told(fakes[0], "messages.send(sock, 'leaving')")
    assert fakes[0].wait(_LONG) == -signal.SIGALRM and "has been stopped" in fakes[0].communicate()[1]


TOGETHER = {
    "one by its own end": ("os.kill(os.getpid(), 9)", "os._exit(3)", [2], "exit status 3"),
    "both by a launcher's signal": ("os.kill(os.getpid(), 15)", "os.kill(os.getpid(), 9)", [1], "SIGTERM"),
    "both by their own end": ("os._exit(3)", "os.kill(os.getpid(), 11)", [1, 2], "exit status 3"),
}


@pytest.mark.parametrize("how", list(TOGETHER))
def test_several_deaths_in_one_look(node: Callable[..., Node], how: str) -> None:
    """Of several that died before the watcher looked those are blamed that no launcher ended, else the first."""
    first, second, lost, text = TOGETHER[how]
    one = node(0, 1, 2)
    fakes = ranks(one)
    os.kill(one.pids[0], signal.SIGSTOP)
    said(fakes[1], then=first)
    said(fakes[2], then=second)
    os.kill(one.pids[0], signal.SIGCONT)
    notice = heard(fakes[0])["notice"]
    assert notice["lost"] == lost and text in notice["text"].split("; ")[0], notice
    others = sorted({1, 2} - set(lost))
    assert all(f"rank {rank} ended at the same moment" in notice["text"] for rank in others), notice


def test_signals_that_are_sent_to_whole_jobs_do_not_end_it(node: Callable[..., Node]) -> None:
    """Schedulers and terminals signal the whole job: the watcher sees what becomes of the ranks."""
    one = node(0, 1)
    fakes = [one.fake(rank) for rank in range(2)]
    for fake in fakes:
        heard(fake)
    for number in ("INT", "TERM", "HUP", "TSTP", "USR1", "USR2"):
        os.kill(one.pids[0], getattr(signal, f"SIG{number}"))
    pair_works(one, fakes[0], fakes[1], 1)


# -- after a calm ----------------------------------------------------------------------------------------------------

LATER: dict[str, tuple[list[tuple[str, int | None]], list[tuple[str, int | None]], str]] = {
    "differs": ([("barrier", None)], [("all_gather", None)], "CollectiveMismatchError"),
    "waits": ([("barrier", None)], [], "CollectiveTimeoutError"),
    "sends": ([("send", 1)], [], "CollectiveTimeoutError"),
    "sends another count": ([("send", 1)], [("recv", 0)], "CollectiveMismatchError"),
}


@pytest.mark.parametrize("what", list(LATER))
def test_what_comes_after_looks_that_saw_nothing_new(node: Callable[..., Node], what: str) -> None:
    """What differs, or waits, is told also where ranks had submitted the same, and nothing more, for some looks."""
    first, second, error = LATER[what]
    one = node(0, 1, own=(0, 1))
    with contextlib.ExitStack() as open_:
        recorders = [Recorder(1.0), Recorder(1.0)]
        for rank, recorder in enumerate(recorders):
            open_.callback(recorder.close)
            recorder.write(Operation("barrier", 0, DType.UINT8, site="app/a.py:1"), 1)
            sock = open_.enter_context(one.connected())
            hello(sock, rank, one.secret, recorder.fd)
            sock.send(messages.pack("judge"))
        assert messages.receive(sock) == {"kind": "ready", "pid": one.pids[0]}
        looks: set[int] = set()
        while len(looks) < 5:
            looks.add(recorders[0].beat())
        for count, (recorder, said) in enumerate(zip(recorders, (first, second), strict=True)):
            for kind, peer in said:
                number = 2 if peer is None else 1
                recorder.write(Operation(kind, count, DType.UINT8, peer=peer, site="app/a.py:2"), number)
        message = messages.receive(sock)
        assert message is not None and message["notice"]["error"] == error, message


def test_other_nodes_hear_it_also_where_no_rank_is_left_there(node: Callable[..., Node]) -> None:
    """Ranks that others went on without may live there: links to them are made again, and tell them."""
    sock = listener()
    nodes = [["n00", [0]], ["n01", [1, 2]]]
    network = {"network": "", "hubs": [[list(sock.getsockname())], []], "secret": "00" * 32}

    def links(me: int, *listeners: int) -> dict[str, Any]:
        return {"me": me, "nodes": nodes, "patience": 10, "networks": [{**network, "listeners": [*listeners]}]}

    with contextlib.closing(Far(links(0, sock.detach()))) as hub:
        hub.networks.up()
        one = node(1, 2, size=3, links=links(1))
        fakes = {rank: one.fake(rank) for rank in one.fakes}
        hub.serve_until(lambda: bool(hub.told("begun")))
        hub.links.publish("gone", rank=0, text="it was killed")
        come = {"what": "shrink", "sequence": 1, "pairs": 0, "limit": 9.0}
        for fake in fakes.values():
            assert heard(fake)["kind"] == "ready"
            told(fake, f"messages.send(sock, 'come', **{come})")
        for fake in fakes.values():
            assert heard(fake)["spans"] == [[1, 2]]
        hub.serve_until(lambda: bool(hub.told("gathering")))
        for _ in range(3):
            hub.links._peers[1].silence = _LONG
            hub.serve_until(lambda: hub.links.hears(1))


# -- what it costs ---------------------------------------------------------------------------------------------------


def _running(pid: int) -> float:
    """Seconds for which a process has had a core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


@pytest.mark.parametrize("submitted", [False, True])
def test_what_it_costs(node: Callable[..., Node], submitted: bool) -> None:
    """With four ranks that are judged it holds at most 25 MB, and takes at most 0.2 % of a core while they idle."""
    one = node(*range(4), own=range(4))
    with contextlib.ExitStack() as open_:
        for rank in range(4):
            recorder = Recorder(10)
            open_.callback(recorder.close)
            if submitted:
                recorder.write(Operation("barrier", 0, DType.UINT8, site="app/a.py:1"), 1)
            sock = open_.enter_context(one.connected())
            hello(sock, rank, one.secret, recorder.fd)
            sock.send(messages.pack("judge"))
        assert messages.receive(sock) == {"kind": "ready", "pid": one.pids[0]}
        # One of three must do: what other processes of this machine cost it (cold caches) is not its own.
        for _ in range(3):
            if (share := _share(one.pids[0], 1.5)) <= 0.002:
                break
    resident = int(Path(f"/proc/{one.pids[0]}/status").read_text().split("VmRSS:")[1].split()[0]) / 1024
    assert resident <= 25, f"{resident:.1f} MB"
    assert share <= 0.002, f"{share:.2%} of a core, {resident:.1f} MB"


def _share(pid: int, seconds: float) -> float:
    """The share of a core that a process takes; what is measured is that nothing happens meanwhile."""
    begin, before = time.monotonic(), _running(pid)
    time.sleep(seconds)
    return (_running(pid) - before) / (time.monotonic() - begin)


_RATE, _BUSY_SECONDS = 50_000, 1.0


@pytest.mark.parametrize("communicators", [1, 2])
def test_what_it_costs_while_ranks_submit(node: Callable[..., Node], communicators: int) -> None:
    """With four ranks that are judged and submit 50,000 collectives a second each, it takes at most 5 % of a core.

    So it does where every second one of these is of an older communicator, and orders are compared.
    """
    one = node(*range(4), own=range(4))
    with contextlib.ExitStack() as open_:
        made = []
        for rank in range(4):
            own = [Recorder(10) for _ in range(communicators)]
            made.append(own)
            for recorder in own:
                open_.callback(recorder.close)
            sock = open_.enter_context(one.connected())
            named = [["key", "init"]][: communicators - 1]
            hello(sock, rank, one.secret, *(recorder.fd for recorder in own), older=named)
            sock.send(messages.pack("judge"))
        assert messages.receive(sock) == {"kind": "ready", "pid": one.pids[0]}
        operations = [Operation("barrier", count, DType.UINT8, site=f"app/a.py:{count}") for count in range(8)]
        # One of three, as above.
        shares, number = [1.0], 0
        while len(shares) <= 3 and shares[-1] > 0.05:
            begin, before, first = time.monotonic(), _running(one.pids[0]), number
            while (passed := time.monotonic() - begin) < _BUSY_SECONDS:
                for _ in range(first + int(passed * _RATE) - number):
                    number += 1
                    for own in made:
                        own[number % communicators].write(operations[number % 8], number // communicators + 1)
                # Each millisecond some, as the ring holds what 80 of them bring.
                time.sleep(1e-3)
            shares.append((_running(one.pids[0]) - before) / passed)
            assert number - first > 0.9 * _BUSY_SECONDS * _RATE, "this process did not keep up"
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            messages.receive(sock)
    assert shares[-1] <= 0.05, [f"{share:.2%}" for share in shares[1:]]


def test_end_whose_status_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older kernels do not tell it: whoever had closed is no lost rank for that, who had not is one."""
    monkeypatch.setattr(Rank, "code", property(lambda _: None))
    rank = Rank(0, os.getpid(), {})
    assert rank.missing
    rank.closed = True
    assert not rank.missing
