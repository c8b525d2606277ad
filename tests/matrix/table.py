"""What the matrix is made of: faults, phases, planes and launchers; which go together, and what must come of a cell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

RANKS = 3
VICTIM = 1
COLLECTIVE_DEADLINE = 10.0
START_DEADLINE = 8.0

# -- phases ------------------------------------------------------------------------------------------------------------

HOST, NCCL, STRICT = "host", "nccl", "nccl-strict"
PLANES = (HOST, NCCL, STRICT)


@dataclass(frozen=True)
class Gpus:
    """A real nccl plane: its ranks on so many GPUs, and what makes NCCL take the transport."""

    name: str
    transport: str
    ranks: int
    gpus: int
    text: str
    env: tuple[tuple[str, str], ...] = ()
    own_hosts: bool = False

    @property
    def shared(self) -> bool:
        """Whether ranks share a GPU."""
        return self.ranks > self.gpus


ON_GPU = {
    gpus.name: gpus
    for gpus in (
        Gpus("gpu-p2p", "P2P", RANKS, 1, "three ranks on one GPU, over P2P"),
        Gpus("gpu-socket", "NET/Socket", RANKS, 1, "three ranks on one GPU, over NET/Socket", own_hosts=True),
        Gpus("gpus-p2p", "P2P", 2, 2, "two ranks, one GPU each, over P2P"),
        Gpus("gpus-shm", "SHM", 2, 2, "two ranks, one GPU each, over SHM", (("NCCL_P2P_DISABLE", "1"),)),
        Gpus(
            "gpus-socket",
            "NET/Socket",
            2,
            2,
            "two ranks, one GPU each, over NET/Socket",
            (("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1")),
        ),
    )
}

PHASES = {
    "join": "start: the watcher has just been joined",
    "exchange": "start: the ranks compare their records over MPI",
    "unique-id": "start: between the unique ID and NCCL's init",
    "nccl-init": "start: inside NCCL's init",
    "idle": "no operation under way; the program polls check_async_error",
    "python": "collective in flight, main thread in Python",
    "wait": "collective in flight, main thread in a wait of ours",
    "foreign": "collective in flight, main thread in cuStreamSynchronize",
    "mpi": "main thread in all_gather_json (MPI)",
    "group": "inside a group",
    "close": "close(): the others have closed",
    "exit": "the interpreter's exit: the others are at it too",
}
START = ("join", "exchange", "unique-id", "nccl-init")
ENDING = ("close", "exit")
_ON = {
    HOST: ("join", "exchange", "idle", "wait", "mpi", "group", "close", "exit"),
    NCCL: tuple(PHASES),
    STRICT: ("idle", "wait", "mpi", "group"),
} | dict.fromkeys(ON_GPU, tuple(phase for phase in PHASES if phase not in ("join", "exchange")))
IN_FLIGHT = ("python", "wait", "foreign", "group")

# -- faults ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What happens to the victim.

    ``kind`` decides the bound and the error; ``phases`` are those in which it makes sense; ``lives``: the victim
    learns of it like the others.
    """

    name: str
    kind: str
    phases: tuple[str, ...]
    text: str
    lives: bool = False
    planes: tuple[str, ...] = PLANES


_ALL = tuple(PHASES)
_MIDDLE = tuple(phase for phase in PHASES if phase not in ENDING)
_GPU = (NCCL, STRICT)
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill", "death", _ALL, "SIGKILL"),
        Fault("stop", "frozen", _ALL, "SIGSTOP, for good"),
        Fault("exit3", "death", _ALL, "os._exit(3)"),
        Fault("exit0", "death", _ALL, "os._exit(0)"),
        Fault("leave0", "left", tuple(p for p in _MIDDLE if p != "idle"), "sys.exit(0) in the middle"),
        Fault("raise", "death", tuple(p for p in _ALL if p != "exit"), "an uncaught exception"),
        Fault("other-kind", "mismatch", (*IN_FLIGHT, "mpi"), "another operation at the same number", True),
        Fault("other-count", "mismatch", IN_FLIGHT, "another count", True),
        Fault("other-dtype", "mismatch", IN_FLIGHT, "another dtype", True),
        Fault("other-op", "mismatch", IN_FLIGHT, "another reduction", True),
        Fault("other-root", "mismatch", ("wait", "group"), "another root", True),
        Fault("skip", "mismatch", IN_FLIGHT, "one collective left out, then the next", True),
        Fault("late", "late", (*IN_FLIGHT, "mpi"), "comes after the deadline of 10 s", True),
        Fault("background", "told", IN_FLIGHT, "ncclRemoteError in the background of one rank", True, _GPU),
        Fault("sticky", "told", ("idle", *IN_FLIGHT), "a kernel breaks the CUDA context of one rank", True, _GPU),
        Fault("call", "told", ("unique-id", "nccl-init", *IN_FLIGHT), "a NCCL call fails on one rank", True, _GPU),
        Fault("watcher-kill", "watcher", ("exchange", "idle", *IN_FLIGHT, "mpi"), "the watcher is killed", True),
        Fault("watcher-stop", "watcher-frozen", ("exchange", "idle", *IN_FLIGHT, "mpi"), "it is stopped", True),
    )
}
# The stand-in alone can be told to do this.
_BY_STANDIN = ("background", "call")
# A broadcast is what waits on the device: it moves bytes and reduces nothing.
_NOT_IN_A_BROADCAST = ("other-dtype", "other-op")

# -- launchers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launcher:
    """How the ranks are started; ``seconds``: what a job costs under it; ``gpu``: of cells on real GPUs only."""

    name: str
    mpi: str
    options: tuple[str, ...] = ()
    slurm: bool = False
    seconds: float = 2.0
    gpu: bool = False


LAUNCHERS = {
    launcher.name: launcher
    for launcher in (
        Launcher("mpich", "mpich"),
        Launcher("openmpi", "openmpi", seconds=2.5),
        Launcher("openmpi-ulfm", "openmpi", ("--with-ft", "ulfm"), seconds=2.5),
        Launcher("openmpi-recovery", "openmpi", ("--enable-recovery",), seconds=2.5),
        Launcher("debian-openmpi", "debian-openmpi", seconds=2.5),
        Launcher("debian-openmpi-recovery", "debian-openmpi", ("--enable-recovery",), seconds=8.0, gpu=True),
        Launcher("srun-mpich", "mpich", ("--kill-on-bad-exit=0",), slurm=True, seconds=2.5),
        Launcher("srun-mpich-K", "mpich", ("--kill-on-bad-exit=1",), slurm=True, seconds=2.5),
        Launcher("srun-openmpi", "openmpi", ("--kill-on-bad-exit=0",), slurm=True, seconds=3.0),
    )
}

# -- cells -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One fault in one phase on one plane under one launcher."""

    fault: str
    phase: str
    plane: str
    launcher: str

    @property
    def name(self) -> str:
        """How people ask for it."""
        return f"{self.fault}.{self.phase}.{self.plane}.{self.launcher}"

    @property
    def kind(self) -> str:
        """The kind of its fault."""
        return FAULTS[self.fault].kind

    @property
    def ranks(self) -> int:
        """How many there are."""
        return ON_GPU[self.plane].ranks if self.plane in ON_GPU else RANKS

    @property
    def slow(self) -> bool:
        """Whether it lasts seconds by design, so that another one beside it does not decide the outcome."""
        return self.kind in ("frozen", "late", "watcher-frozen") or self.phase == "join"

    @property
    def seconds(self) -> float:
        """What it costs, about."""
        more = {"frozen": 5.0, "watcher-frozen": 5.5, "late": 15.0, "left": 1.0}.get(self.kind, 0.0)
        return LAUNCHERS[self.launcher].seconds + max(more, START_DEADLINE if self.phase == "join" else 0.0)

    @property
    def judged(self) -> tuple[int, ...]:
        """The ranks that must learn of it."""
        return tuple(rank for rank in range(self.ranks) if rank != VICTIM or FAULTS[self.fault].lives)

    @property
    def blames(self) -> bool:
        """Whether the victim must be named as lost."""
        return self.kind in ("death", "left", "frozen", "late")


def fits(fault: Fault, phase: str, plane: str) -> bool:
    """Say whether a fault makes sense in a phase on a plane."""
    if phase not in fault.phases or phase not in _ON[plane]:
        return False
    if fault.name in _BY_STANDIN if plane in ON_GPU else plane not in fault.planes:
        return False
    return not (fault.name in _NOT_IN_A_BROADCAST and phase == "wait" and plane != HOST)


def every_cell(planes: Iterable[str] = PLANES, *, gpu: bool = False) -> Iterator[Cell]:
    """Yield all that make sense, in the order of the tables."""
    launchers = [launcher.name for launcher in LAUNCHERS.values() if launcher.gpu == gpu]
    for fault in FAULTS.values():
        for phase in PHASES:
            for plane in planes:
                if fits(fault, phase, plane):
                    for launcher in launchers:
                        yield Cell(fault.name, phase, plane, launcher)


# -- what must come ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """Milliseconds from the fault: to poisoned (median), to the exception, to the return of a foreign wait."""

    poisoned: float
    raised: float
    foreign: float

    def of(self, phase: str) -> float:
        """Return the bound of the exception in a phase: after a foreign wait it comes when that returns."""
        return self.foreign if phase == "foreign" else self.raised


BOUNDS = {
    "death": Bound(250, 300, 1500),
    "watcher": Bound(250, 300, 1500),
    "mismatch": Bound(2000, 2000, 2000),
    "frozen": Bound(5000, 5000, 5000),
    "watcher-frozen": Bound(5000, 5000, 5000),
    "left": Bound(5000, 5000, 5000),
    "told": Bound(5000, 5000, 5000),
    # From the begin of the wait.
    "late": Bound(11000, 11000, 11000),
}
WARNED_AT = (5000, 6000)
LATE_AT = (10000, 11000)
ENDED_WITHIN = 5000.0
"""Of close and exit: milliseconds until the processes of the others are gone."""


def bound(cell: Cell) -> Bound:
    """Return the bounds of a cell."""
    if cell.phase == "join":
        return Bound(*[START_DEADLINE * 1000] * 3)
    if cell.phase in START:
        return Bound(*[min(START_DEADLINE, 5.0) * 1000] * 3)
    return BOUNDS[cell.kind]


ERRORS = {
    "death": "PeerLostError",
    "left": "PeerLostError",
    "frozen": "PeerLostError",
    "watcher": "PeerLostError",
    "watcher-frozen": "PeerLostError",
    "mismatch": "CollectiveMismatchError",
    "late": "CollectiveTimeoutError",
    "told": "CommunicatorBrokenError",
}


def errors(cell: Cell) -> tuple[str, ...]:
    """Return the classes that a rank may raise."""
    if cell.phase == "join":
        return ("StartError", "StartTimeoutError")
    if cell.phase in START:
        # Without a watcher a start may still come to its end, and breaks then.
        return ("StartError", ERRORS[cell.kind]) if "watcher" in cell.kind else ("StartError",)
    return (ERRORS[cell.kind],)


# -- false alarms ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calm:
    """A scene that must end well: ``ci`` and ``full`` are its seconds, ``deadline`` that of its collectives."""

    name: str
    text: str
    ci: float
    full: float
    planes: tuple[str, ...] = (HOST, NCCL)
    deadlines: tuple[float, float] = (30.0, 120.0)
    alone: bool = False


CALM = {
    calm.name: calm
    for calm in (
        Calm("short-stop", "a rank is stopped for 3 s", 3, 3),
        Calm("late-in-time", "a rank comes late, within the deadline", 12, 60),
        Calm("lock-held", "C code of a rank holds the interpreter lock", 8, 20),
        Calm("long-kernel", "a kernel runs before a collective", 8, 20, (NCCL,)),
        Calm("suspended", "all ranks are stopped and continued", 6, 30),
        Calm("debugger", "a debugger stops a rank, with the switch for it on", 8, 60),
        Calm("child", "a child has every descriptor and outlives its parent's close", 3, 3),
        Calm("saturated", "both cores are saturated", 12, 600, alone=True),
    )
}
