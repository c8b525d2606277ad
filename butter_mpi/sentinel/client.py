"""A rank's end of the watcher: start it, join it, hear what it says, tell it what broke, leave.

The listening thread calls no MPI but the question whether that is over, which any thread may ask at any time. It hands
what it hears to the plane, or keeps it until there is one.
"""

from __future__ import annotations

import array
import contextlib
import errno
import itertools
import json
import logging
import os
import secrets
import select
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from butter_mpi.control import Pause, Watch
from butter_mpi.descent import Descent
from butter_mpi.descriptors import beyond_standard, local_socket, memory_file, other_end
from butter_mpi.errors import StartError
from butter_mpi.findings import by_value, ranks_text
from butter_mpi.recorder import Reader, Recorder
from butter_mpi.recording import file_of_host, take
from butter_mpi.recovery import left_alone, started_by
from butter_mpi.sentinel import messages
from butter_mpi.sentinel.door import ALONE, leaders
from butter_mpi.sentinel.judging import Verdict
from butter_mpi.sentinel.needs import STARTED_BY, command, needs, why
from butter_mpi.sentinel.process import Process
from butter_mpi.sentinel.reunion import Reunion

__all__ = ["WATCHED", "Offer", "Sentinel", "deaths", "finalized", "finalizing", "node_key"]

_LOG = logging.getLogger("butter_mpi")
WATCHED = "watched start"
"""Phase of a start that the watcher's verdict ended."""
_FAILED = "StartError"
_STALE = 4.0
_STARVED = 30.0
_LISTEN_SECONDS = 0.5
_BEHIND_SECONDS = 2 * _LISTEN_SECONDS
_SPAWN_SECONDS = 10.0
_SECRET_BYTES = 16
_MADE = itertools.count()
_OFF = "set watch='off' (BUTTER_MPI_WATCH=off) to run without one: lost ranks are then found at deadlines only"
_APPENDABLE = "name a file that this user may write to, in a folder that exists"


def node_key() -> str:
    """Return what ranks that one watcher can see have in common: kernel, PID namespace, network namespace, user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    spaces = [str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("pid", "net")]
    return " ".join([socket.gethostname(), boot, *spaces, str(os.getuid())])


_OPEN: weakref.WeakSet[Sentinel] = weakref.WeakSet()


_LAST: list[Sentinel] = []
"""The one that stays after its close, as MPI_Finalize waits for every rank: of those of the most ranks the newest.

Ranks start communicators in one order, so that all of them stay with the same watcher.
"""


def _forget_all() -> None:
    _LAST.clear()
    for one in list(_OPEN):
        one.forget()


def deaths() -> list[str]:
    """Return what the watcher has said of ranks that have died, also since this one has closed."""
    return [text for one in _LAST for text in list(one.gone.values())]


def deaths_seen() -> bool:
    """Return whether a watcher has ever told this process that another rank has died."""
    return Sentinel.deaths_seen


def left_out() -> bool:
    """Return whether others went on without this rank, so that it must not end the job."""
    return Sentinel.left_out_seen or any(one.left_out for one in {*_OPEN, *_LAST})


def survivors_left_alone() -> bool:
    """Return whether the launcher leaves survivors alone, by what some rank has seen of it."""
    return Sentinel.left_alone_seen


def finalizing(over: Callable[[], bool]) -> None:
    """Tell the watcher that this rank comes to MPI_Finalize now, where it cannot hear of a rank that is lost.

    Parameters
    ----------
    over : callable
        Whether that has come to its end, in a process that lives on.
    """
    for one in _LAST:
        one.finalizing(over)


def finalized() -> None:
    """Say goodbye: this process needs no other rank any more."""
    for one in _LAST[:]:
        one.leave()


os.register_at_fork(after_in_child=_forget_all)


class Offer:
    """What a rank brings before ranks agree on whose watcher serves the node: its recorder, and a listening socket.

    Whoever connects early waits in the socket. It is abstract: it has no file, and is gone with its last holder. What
    fails here is told to every rank, in :meth:`payload`.

    Parameters
    ----------
    watch : str
        The setting, which every rank must know: if one is without a watcher, all are.
    deadline : float
        Seconds that a collective may take.
    file, recorder_file : str
        Where verdicts and recordings shall be appended; empty: nowhere.
    """

    def __init__(self, watch: str, deadline: float, file: str = "", recorder_file: str = "") -> None:
        self.watch, self._node = watch, ""
        self.secret = secrets.token_hex(_SECRET_BYTES)
        self._ends = contextlib.ExitStack()
        self.said = -1
        lacking = {} if watch == "off" else needs()
        # One rank of a node starts the watcher: one that can.
        self._unable = lacking.pop(STARTED_BY, "")
        self.failure = "; ".join(f"{what}: {reason}" for what, reason in lacking.items() if reason)
        self.recorder_file = _recorder_file(recorder_file)
        files = {"verdict_file": file, "recorder_file": self.recorder_file}
        self.unwritable = {name: "" if watch == "off" else _unwritable(one) for name, one in files.items()}
        if watch == "off" or self.failure:
            return
        try:
            self.recorder = Recorder(deadline)
            self._ends.callback(self.recorder.close)
            self.socket = local_socket()
            self._ends.callback(self.socket.close)
            self.socket.bind(_address(self.secret))
            self.socket.listen(4096)
            self.said = memory_file("butter_mpi-watcher-stderr")
            self._ends.callback(os.close, self.said)
            self._node = node_key()
        except OSError as error:
            self.failure, self._node = why(error), ""

    def payload(self) -> bytes:
        """Return what every rank must know."""
        facts = {"node": self._node, "secret": self.secret, "pid": os.getpid(), "said": self.said}
        more = {"watch": self.watch, "failure": self.failure, "unable": self._unable, "unwritable": self.unwritable}
        return json.dumps({**facts, **more, "left_alone": left_alone(started_by())}).encode()

    def taken(self) -> Recorder:
        """Hand the recorder over, and :attr:`said`; listen no more."""
        self._ends.pop_all()
        self.socket.close()
        return self.recorder

    def close(self) -> None:
        """Give everything back."""
        self._ends.close()


def _said_by(leader: Mapping[str, Any]) -> int | None:
    """Open what the watcher writes its standard error to, which the rank has that starts it; ``None``: it is gone."""
    with contextlib.suppress(OSError), beyond_standard():
        return os.open(f"/proc/{leader['pid']}/fd/{leader['said']}", os.O_RDONLY | os.O_CLOEXEC)
    return None


def _unwritable(file: str) -> str:
    """Return why a file cannot be appended to, empty where it can."""
    try:
        if file:
            _check_appendable(file)
    except OSError as error:
        return why(error)
    return ""


def _check_appendable(file: str) -> None:
    """Raise ``OSError`` where a file cannot be appended to; it is not made here: where nothing breaks there is none."""
    path = Path(file).absolute()
    if path.exists():
        if not path.is_file():
            raise OSError(errno.EINVAL, "no regular file", str(path))
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC))
    elif not path.parent.is_dir():
        raise OSError(errno.ENOENT, "no such folder", str(path.parent))
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, "not a folder to write to", str(path.parent))


def _refusal(offers: Sequence[Mapping[str, Any]], leaders: Mapping[str, int]) -> str:
    """Return why there can be no watcher on some node, with the remedy; empty: there can be."""

    def reasons(said: Iterable[tuple[int, str]]) -> str:
        found = by_value((number, reason) for number, reason in said if reason)
        return "; ".join(f"{ranks_text(ranks)}: {reason}" for reason, ranks in found.items())

    if lacking := reasons((number, one["failure"]) for number, one in enumerate(offers)) or reasons(
        (number, offers[number]["unable"]) for number in leaders.values()
    ):
        return f"no watcher can be set up ({lacking}); {_OFF}"
    for name in offers[0]["unwritable"]:
        if unwritable := reasons((number, one["unwritable"][name]) for number, one in enumerate(offers)):
            return f"{name} (BUTTER_MPI_{name.upper()}) cannot be appended to ({unwritable}); {_APPENDABLE}"
    return ""


def _recorder_file(file: str) -> str:
    """Return the file that this host's watcher writes; a folder, which cannot be written, as it is."""
    return file if os.path.isdir(file) else file_of_host(file, socket.gethostname())


def _address(secret: str) -> str:
    return f"\0butter_mpi-{secret[:_SECRET_BYTES]}"


class Sentinel:
    """This rank's end of its node's watcher.

    Parameters
    ----------
    offer : Offer
        This rank's own.
    offers : sequence of mapping
        Every rank's, in rank order, as ``Offer.payload`` packs it.
    rank : int
        This rank.
    descent : Descent
        The communicator's name and ranks, for messages.
    start_deadline : float
        Seconds that the start may take.
    frozen : bool
        Whether stopped ranks are judged; not while a debugger stops them.
    file : str
        Where verdicts are appended; empty: nowhere.
    links : mapping
        What the watcher is told of those of other nodes; default: there is none.

    Raises
    ------
    StartError
        The watcher could not be started on this rank, or joined.
    """

    left_out_seen = False
    """Whether one of this process that has said goodbye was left out by others, or may have been."""
    left_alone_seen = False
    """Whether the ranks of one of this process have seen a launcher that leaves survivors alone."""
    deaths_seen = False
    """Whether one of this process has heard of the death of a rank, also of one that others went on without."""

    def __init__(
        self,
        offer: Offer,
        offers: Sequence[Mapping[str, Any]],
        rank: int,
        *,
        descent: Descent,
        start_deadline: float,
        frozen: bool,
        file: str,
        links: Mapping[str, Any] = ALONE,
    ) -> None:
        self._descent, self._rank = descent, rank
        self._who = who = descent.who(rank, socket.gethostname())
        # Equal on every rank, and of no other communicator.
        self.key = _address(offers[0]["secret"]).strip("\0")
        self._made = next(_MADE)
        # By epoch, which each reconnect ends: what is still under way of the old one must not break the new one.
        self._notices: dict[int, dict[str, Any]] = {}
        self._epoch = 0
        self._on_notice: Callable[[Mapping[str, Any]], None] | None = None
        self._broken_here: Callable[[], Mapping[str, Any] | None] = _nothing
        self._ready = threading.Event()
        self._lock = threading.RLock()
        # What all ranks agreed to go on after: collectives, and sends and receives.
        self._floors = 0, 0
        self._closed = self._left = False
        self._over: Callable[[], bool] = lambda: False
        self._watcher = 0
        self._starter: subprocess.Popen[bytes] | None = None
        # The others that have died, and those that are stopped now: each with what the watcher says of it.
        self.gone: dict[int, str] = {}
        self.stopped: dict[int, str] = {}
        self._looked = time.monotonic()
        # Those that were stopped when the others agreed to go on without them, by their numbers before.
        self.left_stopped: dict[int, str] = {}
        self.lost = False
        self.reunion = Reunion(self._send, lambda: self.lost, self._go_on_with)
        leading = leaders(offers)
        if refusal := _refusal(offers, leading):
            offer.close()
            raise StartError(f"{who}: start: {refusal}", phase="watcher")
        self.several = len(links["nodes"]) > 1
        """Whether its watcher has links to those of other nodes."""
        self.sees_all = self.several or len({one["node"] for one in offers}) == 1
        """Whether its watcher, with those that it is linked to, sees all ranks."""
        self.left_alone = next((one["left_alone"] for one in offers if one["left_alone"] is not None), None)
        """Whether the launcher leaves survivors alone, by what some rank sees of it; ``None``: no rank sees it."""
        Sentinel.left_alone_seen |= bool(self.left_alone)
        self.nodes: list[str] = [one["node"] for one in offers]
        """The node of each rank, by the newest agreement."""
        here = {number: one["pid"] for number, one in enumerate(offers) if one["node"] == offers[rank]["node"]}
        leader = leading[offers[rank]["node"]]
        try:
            if leader == rank:
                self._start(offer, here, start_deadline, frozen, file, links)
            self._join(offers[leader]["secret"], offer.recorder)
        except OSError as error:
            offer.close()
            raise StartError(
                f"{who}: start: the watcher of this node cannot be {'started' if leader == rank else 'reached'}: "
                f"{why(error)}; {_OFF}",
                phase="watcher",
            ) from None
        self.recorder = offer.taken()
        self._said: int | None = offer.said
        if leader != rank:
            os.close(offer.said)
            self._said = _said_by(offers[leader])
        _OPEN.add(self)
        self._size = len(offers)
        self._stay_last()
        self._thread = threading.Thread(target=self._listen, name="butter_mpi sentinel", daemon=True)
        self._thread.start()

    def _stay_last(self) -> None:
        """Take over, if it is this one that shall stay after its close."""
        before = _LAST[0] if _LAST else None
        if before is None or self._size >= before._size:
            _LAST[:] = [self]
            if before is not None and before._closed:
                before.leave()

    # -- start -------------------------------------------------------------------------------------------------------

    def _start(
        self,
        offer: Offer,
        ranks: Mapping[int, int],
        start: float,
        frozen: bool,
        file: str,
        links: Mapping[str, Any],
    ) -> None:
        """Start the watcher; it takes over the listening sockets, and detaches itself."""
        listener = offer.socket.fileno()
        config = {
            "listener": listener,
            "secret": offer.secret,
            "ranks": dict(ranks),
            "who": {number: self._descent.who(number, socket.gethostname()) for number in ranks},
            "name": self._descent.name,
            "descent": asdict(self._descent),
            "host": socket.gethostname(),
            "start": start,
            "frozen": frozen,
            "file": os.path.abspath(file) if file else "",
            "links": links,
            "recordings": {"file": offer.recorder_file, "about": self._about()},
        }
        self._starter = subprocess.Popen(
            command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=offer.said,
            start_new_session=True,
            pass_fds=[listener, *(fd for network in links["networks"] for fd in network["listeners"])],
        )
        assert self._starter.stdin is not None
        # Where there are thousands of nodes, this waits until the watcher reads. One that has ended already is found by
        # its socket.
        with contextlib.suppress(BrokenPipeError), self._starter.stdin as pipe:
            pipe.write(json.dumps(config).encode())

    def _about(self) -> dict[str, Any]:
        """Return what the recordings of all ranks of this node have in common."""
        communicator = {"key": self._descent.key(self.key), "name": self._descent.name}
        return {"communicator": communicator, "world_size": len(self._descent.ranks), "host": socket.gethostname()}

    def _join(self, secret: str, recorder: Recorder) -> None:
        self._socket = local_socket()
        self._socket.connect(_address(secret))
        # Where the one that listened is gone, its name, which everybody can read, is anybody's: it gets no secret.
        user = other_end(self._socket)[1]
        if user != os.geteuid():
            self._socket.close()
            raise OSError(errno.EACCES, f"user {user} listens under its name, which the one that had it has given up")
        with contextlib.ExitStack() as ends:
            older = {one: fd for one in list(_OPEN) if (fd := one._show(ends)) is not None}
            shown = sorted(older, key=lambda one: one._made)[-messages.MOST_OLDER :]
            named = [[one.key, one._descent.name] for one in shown]
            hello = messages.pack("hello", rank=self._rank, secret=secret, older=named)
            fds = array.array("i", [recorder.fd, *(older[one] for one in shown)])
            self._socket.sendmsg([hello], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])

    def _show(self, ends: contextlib.ExitStack) -> int | None:
        """Return a descriptor, closed by `ends`, of what this rank submits here; ``None`` once it is closed."""
        with self._lock:
            if self._closed or self._left:
                return None
            with beyond_standard():
                fd = os.dup(self.recorder.fd)
        ends.callback(os.close, fd)
        return fd

    def wait_until_ready(self, watch: Watch) -> None:
        """Wait until the watcher has met every rank of this node.

        Raises
        ------
        StartError
            It ended, or has not come by then.
        """
        pause = Pause()
        while not self._ready.is_set():
            self.look_at_start()
            if watch.tick():
                slow = "set a longer start_deadline (BUTTER_MPI_START_DEADLINE) where hosts are slow to start a process"
                text = f"the watcher of this node did not come within {watch.elapsed:.1f} s (the start deadline)"
                raise StartError(f"{self._who}: start: {text}; {slow}, or {_OFF}", phase="watcher")
            pause()
        self._reap()
        watch.passed("the watcher of this node")

    def _reap(self) -> None:
        """Take leave of the process that started the watcher; it ends as soon as the watcher stands by itself."""
        if self._starter is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._starter.wait(_SPAWN_SECONDS)

    def look_at_start(self) -> None:
        """Raise what the watcher has said, while there is no plane yet that could.

        Raises
        ------
        StartError
            A rank is lost, or has failed.
        """
        notice = self._notices.get(self._epoch)
        # What a rank that failed says of itself comes over MPI too, and it waits there with the others.
        told = notice is not None and notice["error"] != _FAILED
        texts = [*([notice["text"]] if notice and told else []), *self.gone.values(), *self.stopped.values()]
        if texts:
            remedy = f"; {_OFF}" if self.lost else ""
            raise StartError(f"{self._who}: start: {texts[0]}{remedy}", phase=WATCHED)

    def wait_for_word(self, seconds: float) -> None:
        """Look at what the watcher says for up to `seconds`.

        Raises
        ------
        StartError
            A rank is lost, or has failed.
        """
        watch, pause = Watch(seconds), Pause()
        while not watch.tick():
            self.look_at_start()
            pause()

    def deliver_to(
        self,
        on_notice: Callable[[Mapping[str, Any]], None],
        broken_here: Callable[[], Mapping[str, Any] | None],
        judged: bool,
    ) -> None:
        """Hand verdicts to `on_notice` from now on, in the listening thread; one that has come, at once.

        `broken_here` is asked there now and then, and returns a notice once something broke that no thread of this rank
        sees, as all may be in waits of other libraries. `judged`: the watcher compares what this rank submits, as ranks
        do not compare it themselves.
        """
        if judged:
            messages.send(self._socket, "judge")
        with self._lock:
            self._on_notice, self._broken_here = on_notice, broken_here
            self.repeat()

    def repeat(self) -> None:
        """Hand over again what came of this epoch while the communicator was still being made anew."""
        with self._lock:
            notice = self._notices.get(self._epoch)
            if notice is not None and self._on_notice is not None:
                self._on_notice(notice)

    @property
    def behind(self) -> bool:
        """Whether its words may wait to be heard: this process did not run, or its thread did not come to it."""
        return time.monotonic() - self._looked > _BEHIND_SECONDS

    # -- listening ---------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            self._hear_all()
        finally:
            _OPEN.discard(self)
            self._on_notice, self._broken_here = None, _nothing

    def _hear_all(self) -> None:
        poll, stale, beat = select.poll(), Watch(_STALE), 0
        poll.register(self._socket, select.POLLIN)
        while not self._left:
            said = poll.poll(0)
            if not said:
                self._looked = time.monotonic()
                said = poll.poll(_LISTEN_SECONDS * 1000)
            if said:
                message = messages.receive(self._socket)
                if message is None:
                    if not self._left:
                        self._lose_watcher(f"has ended ({self._last_words()})")
                    return
                self._hear(message)
            broken = self._broken_here()
            if broken is not None:
                self.tell(broken)
                self._take({**broken, "here": True}, self._epoch)
            if self._over():
                self.leave()
                return
            if self.recorder.beat() != beat:
                beat, stale = self.recorder.beat(), Watch(_STALE)
            elif stale.tick() and self._watcher and (self._watcher_stopped() or stale.elapsed >= _STARVED):
                self._lose_watcher(f"has not looked for {stale.elapsed:.1f} s (stopped?)")
                return

    def _last_words(self) -> str:
        """Return the last line on the watcher's standard error."""
        fd, said = self._said, b""
        if fd is not None:
            # Another thread may be leaving.
            with contextlib.suppress(OSError):
                said = os.pread(fd, messages.LIMIT, 0)
        return (said.decode(errors="replace").splitlines() or ["killed?"])[-1]

    def _lose_watcher(self, how: str) -> None:
        self.lost = True
        self._take(_lost_watcher(how), self._epoch)

    def _hear(self, message: dict[str, Any]) -> None:
        if message["kind"] == "ready":
            self._watcher = message["pid"]
            self._ready.set()
        elif message["kind"] == "notice":
            self._take(message["notice"], message["epoch"])
        elif message["kind"] == "gone":
            Sentinel.deaths_seen = True
            self.gone[message["rank"]] = message["text"]
        elif message["kind"] == "stopped":
            self.stopped[message["rank"]] = message["text"]
        elif message["kind"] == "running":
            self.stopped.pop(message["rank"], None)
        elif message["kind"] == "warning":
            _LOG.warning("%s: %s", self._who, message["text"])
        else:
            self.reunion.hear(message)

    def _watcher_stopped(self) -> bool:
        try:
            watcher = Process(self._watcher)
        except OSError:
            return True
        try:
            return watcher.state() == "stopped"
        finally:
            watcher.close()

    def _take(self, notice: dict[str, Any], epoch: int) -> None:
        # With the lock: a reconnect that begins the next epoch meanwhile must not be broken by what is of this one.
        with self._lock:
            if self._notices.setdefault(epoch, notice) is not notice:
                return
            self.mark_broken()
        # First: whoever raises the one finds the other broken too.
        self.break_other(notice, epoch)
        with self._lock:
            # The thread that listens may be at its end.
            on_notice = self._on_notice
            if epoch == self._epoch and on_notice is not None:
                on_notice(notice)

    def break_other(self, notice: Mapping[str, Any], epoch: int | None = None) -> None:
        """Break the communicator that a verdict on this one, of its epoch, names too, if it stands in this process."""
        epoch = self._epoch if epoch is None else epoch
        for one in list(_OPEN):
            if one.key == notice.get("other"):
                one._break_with(notice, self.key, epoch)

    def _break_with(self, notice: Mapping[str, Any], other: str, epoch: int) -> None:
        """Take what broke another communicator together with this one, whose ranks and numbers are others.

        It names that one, so that whoever is told of this one first, by whomever, breaks both. Whoever has reconnected
        it since the epoch in which that was seen knows. A rank that told of that one has another number here.
        """
        own = {**notice, "records": {}, "n": None, "operation": "", "here": True, "other": other, "other_epoch": epoch}
        self._take(own, notice["other_epoch"])
        self._tell(own, notice["other_epoch"])

    def mark_broken(self) -> None:
        """Tell the watchers of newer communicators that this one broke or was closed, unless its recorder is gone."""
        with self._lock:
            if not self._left:
                self.recorder.mark_broken()

    def recording(self) -> dict[str, Any] | None:
        """Return what this rank's recorder holds; ``None`` once it is gone."""
        with self._lock, beyond_standard():
            if self._left:
                return None
            reader = Reader(self.recorder.fd)
        reader.floor, reader.pairs_floor = self._floors
        own = {"rank": self._rank, "pid": os.getpid(), "state": "alive", "how": "", "cause": ""}
        return take(reader, {**self._about(), **own})

    # -- telling -----------------------------------------------------------------------------------------------------

    def tell(self, notice: Mapping[str, Any]) -> None:
        """Tell every other rank what broke here."""
        self._tell(notice, self._epoch)

    def _tell(self, notice: Mapping[str, Any], epoch: int) -> None:
        if not self._left:
            self.mark_broken()
            messages.send(self._socket, "broken", notice=dict(notice), epoch=epoch)

    def tell_of(self, text: str, *, lost: bool = True) -> None:
        """Tell every other rank that this one failed in the start, where no communicator says so.

        Without `lost`: for the verdict file only, as it has told them itself, and ends the start with them.
        """
        self.tell(Verdict("PeerLostError" if lost else _FAILED, (self._rank,), text, phase="start").notice())

    def all_came(self) -> None:
        """Forget who was stopped before a reconnect; who is from now on is told as what breaks the next epoch."""
        self.stopped.clear()

    def resume(self, sequence: int, pairs: int) -> None:
        """Go on after a failure that all ranks survived, from the numbers that they agreed on."""
        with self._lock:
            self._epoch += 1
        self.recorder.begin_at(sequence)
        self._floors = sequence, pairs
        messages.send(self._socket, "resume", sequence=sequence, pairs=pairs, epoch=self._epoch)

    # -- going on without others -------------------------------------------------------------------------------------

    @property
    def descent(self) -> Descent:
        """The communicator's name and ranks, by the newest agreement."""
        return self._descent

    @property
    def rank(self) -> int:
        """This rank, by the newest agreement."""
        return self._rank

    @property
    def left_out(self) -> bool:
        """Whether others went on without this rank, or may have, as it heard nothing of them."""
        return bool(self.reunion.left_out or (self.reunion.alone and self.several))

    @property
    def left(self) -> bool:
        """Whether it has said goodbye: nothing of other ranks is heard any more."""
        return self._left

    def _send(self, kind: str, **fields: Any) -> bool:
        return messages.send(self._socket, kind, **fields)

    def _go_on_with(self, ranks: Sequence[int]) -> None:
        """Take the new numbers of those that go on; the listening thread hears of them in order with all else."""
        with self._lock:
            self._descent, self._rank = self._descent.shrunk(ranks), ranks.index(self._rank)
            self.nodes = [self.nodes[rank] for rank in ranks]
            self._who = self._descent.who(self._rank, socket.gethostname())
            self.gone.clear()
            self.left_stopped = self.left_stopped or dict(self.stopped)
            self.stopped.clear()

    def lost_another(self, seconds: float) -> bool:
        """Whether one of those that went on is lost now, by what the watcher says within a moment."""
        watch, pause = Watch(seconds), Pause()
        while not (self.gone or self.stopped or self.lost or watch.tick()):
            pause()
        return bool(self.gone or self.stopped) and not self.lost

    def stay_last(self) -> None:
        """Take over as the one that stays after its close: ranks of this one's watcher went on without others."""
        for before in _LAST[:]:
            if before is not self and before._closed:
                before.leave()
        _LAST[:] = [self]

    def close(self) -> None:
        """Say that nothing more is submitted; where another watcher sees to the end of this process, that is all."""
        if not self._closed:
            self._closed = True
            self.mark_broken()
            self._reap()
            messages.send(self._socket, "closed")
            if self not in _LAST:
                self.leave()

    def finalizing(self, over: Callable[[], bool]) -> None:
        """Say that this process comes to MPI_Finalize, and goodbye as soon as that is `over` and the process lives."""
        messages.send(self._socket, "leaving")
        self._over = over

    def leave(self) -> None:
        """Say goodbye: the end of this process is no fault any more."""
        if not self._left:
            self._left = True
            Sentinel.left_out_seen |= self.left_out
            if self in _LAST:
                _LAST.remove(self)
            messages.send(self._socket, "bye")
            # Wakes the listening thread.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            if threading.current_thread() is not self._thread:
                self._thread.join(_LISTEN_SECONDS)
            self._socket.close()
            said, self._said = self._said, None
            if said is not None:
                os.close(said)
            with self._lock:
                self.recorder.close()

    def forget(self) -> None:
        """Let go, in a forked child: it is no rank."""
        self._left = True
        self._socket.close()


def _nothing() -> None:
    """Nothing broke."""


def _lost_watcher(how: str) -> dict[str, Any]:
    text = f"the watcher of this node {how}: other ranks are no longer seen, so nothing more is taken"
    return Verdict("PeerLostError", (), text, phase="watcher").notice()
