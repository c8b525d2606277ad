"""What each rank of a cell runs: come into the phase, be struck or wait, and say when what was learned.

Run by path: ``scene.py FAULT PHASE PLANE RECOVERY VERDICT_FILE``. Every rank learns of the victim's state by the lines
that ranks write, never over MPI.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, cast

from helpers.memory import DeviceMemory, HostMemory
from helpers.standin_rank import Gpu
from mpi4py import MPI

import butter_mpi
from butter_mpi import DType, ReduceOp, bootstrap, nccl
from butter_mpi.kernels import bf16_add_inplace
from butter_mpi.planes import joining
from butter_mpi.sentinel.client import Sentinel
from matrix.back import Recovery
from matrix.lines import folder, have_said, say, until
from matrix.table import (
    COLLECTIVE_DEADLINE,
    ENDING,
    FAULTS,
    FULL,
    HOST,
    NOTHING,
    ON_GPU,
    START,
    START_DEADLINE,
    STRICT,
    STRUCK,
    VICTIM,
    struck,
)

FAULT, PHASE, PLANE, RECOVERY, FILE = sys.argv[1:]
RANK, RANKS = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
VICTIMS = struck(FAULT)
OTHERS = tuple(rank for rank in range(RANKS) if rank not in VICTIMS)
LEFT = tuple(rank for rank in range(RANKS) if rank not in FAULTS[FAULT].gone)
"""Those that learn of it, and go on."""
IS_VICTIM = RANK in VICTIMS
KIND = FAULTS[FAULT].kind
SETTLED = 0.2
"""Seconds after which a rank that has said that it is about to wait is inside that wait."""
LATE_SECONDS = COLLECTIVE_DEADLINE + 4
ALL_TOLD_SECONDS = 6.0
_NO_MEMORY = 8
JOINED: list[Any] = []
_BROADCASTS = PHASE == "wait" and PLANE != HOST
"""Whether the wait of ours is a broadcast, the one operation that waits on the device."""


class OwnBugError(Exception):
    """The victim's."""


# -- the fault ---------------------------------------------------------------------------------------------------------


def strike() -> None:
    """Let it happen, here and now, where it is one that ends or stops a process."""
    watcher = JOINED[0]._watcher if JOINED else 0
    say("fault", watcher=watcher)
    if FAULT.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif FAULT in ("stop", "freeze"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif FAULT == "exit3":
        os._exit(3)
    elif FAULT == "exit0":
        os._exit(0)
    elif FAULT == "leave0":
        sys.exit(0)
    elif FAULT == "raise":
        raise OwnBugError("the victim's own bug")
    elif FAULT == "watcher-kill":
        os.kill(watcher, signal.SIGKILL)
    elif FAULT == "watcher-stop":
        os.kill(watcher, signal.SIGSTOP)


def strike_once_others(said: str) -> None:
    """Strike when the others are where they shall be."""
    until(lambda: have_said(said, OTHERS), 20)
    time.sleep(SETTLED)
    strike()


# -- phases of the start -----------------------------------------------------------------------------------------------


class Joined(Sentinel):
    """The real one, which says that it was joined."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        JOINED.append(self)
        if PHASE == "join":
            say("ready")
            if IS_VICTIM:
                strike()


def interpose(owner: Any, name: str, *, after: bool) -> None:
    """Strike the victim before or after a step of the start, once its watcher stands and the others are there."""
    real = getattr(owner, name)

    def step(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, real)
        for one in JOINED:
            one._ready.wait(START_DEADLINE / 2)
        if after:
            result = real(*args, **kwargs)
            say("ready")
            if IS_VICTIM:
                strike()
            return result
        say("ready")
        if IS_VICTIM:
            strike_once_others("ready")
        return real(*args, **kwargs)

    setattr(owner, name, step)


def prepare_start() -> None:
    """Put the fault into the start."""
    vars(bootstrap)["Sentinel"] = Joined
    if PHASE == "exchange":
        interpose(bootstrap, "compare", after=False)
    elif PHASE == "unique-id":
        interpose(joining, "share_unique_id", after=True)
    elif PHASE == "nccl-init":
        interpose(nccl, "init_rank_config", after=True)


# -- phases of a running communicator ----------------------------------------------------------------------------------


class Work:
    """The operations of a rank, on raw pointers of its plane."""

    def __init__(self, comm: butter_mpi.Communicator) -> None:
        self.comm = comm
        self.plane = cast(Any, comm.backend)
        if PLANE == HOST:
            self._memory: Any = HostMemory()
        else:
            self._memory = DeviceMemory(self.plane.device, self.plane.stream)
        self.p, self.q = self._memory.blank(64), self._memory.blank(64)

    @property
    def broken(self) -> bool:
        """Whether the communicator was poisoned."""
        return self.plane.health.cause is not None

    def reduce(self) -> None:
        """Submit what every rank submits in most phases."""
        self.plane.all_reduce(self.p, 16, dtype=DType.FLOAT32)

    def broadcast(self) -> None:
        """Submit what waits on the device."""
        self.plane.broadcast(self.p, 4, VICTIM)

    def group(self, *submit: Callable[[], object]) -> None:
        """Submit a group."""
        with self.comm.group():
            for one in submit:
                one()

    def usual(self) -> None:
        """Submit what every rank submits in this phase."""
        if PHASE == "mpi":
            self.comm.all_gather_json(RANK)
        elif PHASE == "group":
            self.group(self.reduce, self.broadcast)
        elif _BROADCASTS or FAULT == "other-root":
            self.broadcast()
        else:
            self.reduce()

    def different(self) -> None:
        """Submit, as the victim, something else in its place."""
        other = self._other()
        if PHASE != "group":
            other()
        elif FAULT == "other-root":
            self.group(self.reduce, other)
        else:
            self.group(other, self.broadcast)

    def _other(self) -> Callable[[], object]:
        plane, p, q = self.plane, self.p, self.q
        others: dict[str, Callable[[], object]] = {
            "other-kind": lambda: plane.all_gather(p, q, 16),
            "other-count": lambda: plane.all_reduce(p, 8, dtype=DType.FLOAT32),
            "other-dtype": lambda: plane.all_reduce(p, 16, dtype=DType.INT32),
            "other-op": lambda: plane.all_reduce(p, 16, dtype=DType.FLOAT32, op=ReduceOp.MAX),
            "other-root": lambda: plane.broadcast(p, 4, 0),
            "skip": plane.barrier,
        }
        if _BROADCASTS:
            others |= {"other-kind": self.reduce, "other-count": lambda: plane.broadcast(p, 8, VICTIM)}
        return plane.barrier if PHASE == "mpi" else others[FAULT]

    # -- waiting -------------------------------------------------------------------------------------------------------

    def ask(self) -> NoReturn:
        """Ask for errors as a program does between its steps, until one comes."""
        end = time.monotonic() + 3 * COLLECTIVE_DEADLINE
        while time.monotonic() < end:
            self.comm.check_async_error()
            time.sleep(0.005)
        raise SystemExit("nothing came")

    def fill(self) -> NoReturn:
        """Submit more than the stream takes, until an error comes; the driver then holds this thread."""
        threading.Thread(target=self._say_when_full, daemon=True).start()
        while True:
            self.usual()

    def _say_when_full(self) -> None:
        before = -1
        while before != self.plane.sequence:
            before = self.plane.sequence
            time.sleep(0.3)
        say("ready")

    def wait(self) -> None:
        """Be in the phase, as a survivor."""
        if PHASE == FULL:
            self.fill()
        if PHASE in ("python", "foreign"):
            self.usual()
        say("ready")
        if PHASE == "python":
            until(lambda: self.broken, 3 * COLLECTIVE_DEADLINE)
        elif PHASE == "foreign":
            from cuda.bindings import driver

            driver.cuStreamSynchronize(self.plane.stream)
            say("returned")
        elif PHASE not in ("idle", *START):
            self.usual()
        self.ask()

    def suffer(self) -> None:
        """Be in the phase, as the victim."""
        if PHASE in START:
            # It has happened, and the start came to its end all the same.
            self.ask()
        until(lambda: have_said("ready", OTHERS), 20)
        time.sleep(SETTLED)
        if KIND == "mismatch":
            say("fault")
            self.different()
        elif KIND == "late":
            say("fault")
            time.sleep(LATE_SECONDS)
            self.usual()
        elif FAULT == "sticky":
            say("fault")
            self._break_context()
        elif KIND == "told":
            say("fault")
            self.usual()
        elif FAULTS[FAULT].outside:
            say("asks")
            until((folder() / STRUCK).exists, 20)
            if PLANE == HOST:
                self.wait()
            # The stand-in of NCCL uses no network: what the cut keeps from the others is not submitted.
        elif PHASE == "group" and not FAULTS[FAULT].lives:
            self.group(self.reduce, strike)
        else:
            strike()
        self.ask()

    def _break_context(self) -> None:
        """Let a kernel write where there is no memory."""
        from cuda.bindings import driver

        device = self.plane.device
        stream = device.make_stream()
        if PLANE in ON_GPU:
            types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
            device.launch(bf16_add_inplace(device), 1, 256, stream, ((_NO_MEMORY, _NO_MEMORY, 100), types))
        else:
            Gpu(device.ordinal).launch("fill_f32", stream, _NO_MEMORY, 1.0, 100)
        until(lambda: int(driver.cuStreamQuery(stream)[0]) not in (0, 600), 5)

    def leave(self) -> None:
        """Close, or come to the interpreter's exit; the victim when the others have."""
        if not IS_VICTIM:
            say("ready")
            if PHASE == "close":
                self.comm.close()
                say("closed")
            return
        if PHASE == "close":
            self.plane._release = lambda: strike_once_others("closed")
            self.comm.close()
        else:
            atexit.register(strike_once_others, "ready")


# -- what is learned ---------------------------------------------------------------------------------------------------


def watch_health(health: Any) -> None:
    """Say when the communicator was poisoned."""
    while health.cause is None:
        time.sleep(0.001)
    say("poisoned", error=type(health.cause).__name__)


class Warned(logging.Handler):
    """Says that a warning came."""

    def emit(self, record: logging.LogRecord) -> None:
        """Say it."""
        say("warned", text=record.getMessage())


def start() -> butter_mpi.Communicator:
    """Start, with what goes wrong in it."""
    prepare_start()
    policy = butter_mpi.FaultPolicy(start_deadline=START_DEADLINE, collective_deadline=COLLECTIVE_DEADLINE)
    plane, check = ("host", "light") if PLANE == HOST else ("nccl", "strict" if PLANE == STRICT else "light")
    return butter_mpi.init(plane=plane, check=check, verdict_file=FILE, fault=policy)


def main() -> None:
    """Run the scene."""
    faulthandler.enable()
    logging.getLogger("butter_mpi").addHandler(Warned())
    comm = None
    try:
        comm = start()
        work = Work(comm)
        threading.Thread(target=watch_health, args=(work.plane.health,), daemon=True).start()
        for _ in range(2):
            work.reduce()
        if PHASE in ENDING:
            work.leave()
        else:
            work.suffer() if IS_VICTIM else work.wait()
    except Exception as error:
        if isinstance(error, OwnBugError):
            raise
        lost, records = getattr(error, "lost_ranks", ()), getattr(error, "records", {})
        say("raised", error=type(error).__name__, lost=list(lost), text=str(error), records=len(records))
        if comm is None or RECOVERY == NOTHING:
            # Whoever ends first ends the others: all shall have the time to say what they learned.
            with contextlib.suppress(OSError):
                until(lambda: have_said("raised", LEFT), ALL_TOLD_SECONDS)
            raise
    if comm is not None and RECOVERY != NOTHING:
        Recovery(FAULTS[FAULT], PLANE, RECOVERY, strike).run(comm)


if __name__ == "__main__":
    main()
