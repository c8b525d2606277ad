"""What the matrix is made of: phases, planes, recoveries, faults, launchers, and scenes that must end well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RANKS = 3
VICTIM = 1
SECOND = 2
"""The rank that is lost after the victim, or with it, where two are."""
STRUCK = "struck"
"""The file by which the tool says that it has struck a host."""
MENDED = "mended"
"""The file by which it says that a host which was cut off is connected again."""
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
    "full": "collective in flight, main thread inside a later one: its stream is full",
    "mpi": "main thread in all_gather_json (MPI)",
    "group": "inside a group",
    "close": "close(): the others have closed",
    "exit": "the interpreter's exit: the others are at it too",
}
START = ("join", "exchange", "unique-id", "nccl-init")
ENDING = ("close", "exit")
ON = {
    HOST: ("join", "exchange", "idle", "wait", "mpi", "group", "close", "exit"),
    NCCL: tuple(PHASES),
    STRICT: ("idle", "wait", "mpi", "group"),
} | dict.fromkeys(ON_GPU, tuple(phase for phase in PHASES if phase not in ("join", "exchange")))
FULL = "full"
IN_FLIGHT = ("python", "wait", "foreign", FULL, "group")
RUNNING = ("idle", *IN_FLIGHT, "mpi")
BETWEEN = ("idle", "wait", "foreign", "mpi")
"""The phases of cells on several hosts."""

# -- recoveries --------------------------------------------------------------------------------------------------------

NOTHING, RECONNECT, SHRINK = "nothing", "reconnect", "shrink"
RECOVERIES = {
    NOTHING: "the error is raised, and the job ends",
    RECONNECT: "every rank calls attempt_reconnect(), once all have learned of it",
    SHRINK: "those that are left call shrink()",
}
_OR_SHRINK, _OR_RECONNECT = (NOTHING, SHRINK), (NOTHING, RECONNECT)

# -- faults ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What happens to the victim.

    ``kind`` decides the bound and the error; ``phases`` are those in which it makes sense; ``lives``: the victim
    learns of it like the others; ``second``: another rank is lost as well, of so many ``ranks``.
    """

    name: str
    kind: str
    phases: tuple[str, ...]
    text: str
    lives: bool = False
    planes: tuple[str, ...] = PLANES
    recoveries: tuple[str, ...] = (NOTHING,)
    second: bool = False
    ranks: int = RANKS

    @property
    def gone(self) -> tuple[int, ...]:
        """The ranks that the others go on without."""
        return () if self.lives else (VICTIM, SECOND) if self.second else (VICTIM,)

    @property
    def outside(self) -> bool:
        """Whether it strikes a whole host, from outside."""
        return self.kind in ("host", "cut", "unseen")


_ALL = tuple(PHASES)
_MIDDLE = tuple(phase for phase in PHASES if phase not in ENDING)
# Where a stream is full its rank has waited for a while, and the bound counts from the begin.
_WAITS_FROM_READY = tuple(phase for phase in (*IN_FLIGHT, "mpi") if phase != FULL)
_GPU = (NCCL, STRICT)
_ALIVE: dict[str, Any] = {"lives": True, "recoveries": _OR_RECONNECT}
_TWO: dict[str, Any] = {"second": True, "recoveries": (SHRINK,)}
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill", "death", _ALL, "SIGKILL", recoveries=_OR_SHRINK),
        Fault("stop", "frozen", _ALL, "SIGSTOP, for good", recoveries=_OR_SHRINK),
        Fault("exit3", "death", _ALL, "os._exit(3)", recoveries=_OR_SHRINK),
        Fault("exit0", "death", _ALL, "os._exit(0)", recoveries=_OR_SHRINK),
        Fault("leave0", "left", tuple(p for p in _MIDDLE if p != "idle"), "sys.exit(0) in the middle"),
        Fault("raise", "death", tuple(p for p in _ALL if p != "exit"), "an uncaught exception"),
        Fault("other-kind", "mismatch", (*IN_FLIGHT, "mpi"), "another operation at the same number", **_ALIVE),
        Fault("other-count", "mismatch", IN_FLIGHT, "another count", **_ALIVE),
        Fault("other-dtype", "mismatch", IN_FLIGHT, "another dtype", **_ALIVE),
        Fault("other-op", "mismatch", IN_FLIGHT, "another reduction", **_ALIVE),
        Fault("other-root", "mismatch", ("wait", "group"), "another root", **_ALIVE),
        Fault("skip", "mismatch", IN_FLIGHT, "one collective left out, then the next", **_ALIVE),
        Fault("late", "late", _WAITS_FROM_READY, "comes after the deadline of 10 s", **_ALIVE),
        Fault("background", "told", IN_FLIGHT, "ncclRemoteError in the background of one rank", planes=_GPU, **_ALIVE),
        Fault("sticky", "told", ("idle", *IN_FLIGHT), "a kernel breaks the CUDA context of one rank", True, _GPU),
        Fault("call", "told", ("unique-id", "nccl-init", *IN_FLIGHT), "a NCCL call fails on one rank", True, _GPU),
        Fault("watcher-kill", "watcher", ("exchange", *RUNNING), "the watcher is killed", True),
        Fault("watcher-stop", "watcher-frozen", ("exchange", *RUNNING), "it is stopped", True),
        Fault("freeze", "frozen", RUNNING, "SIGSTOP, and SIGCONT once the others know", True, recoveries=(RECONNECT,)),
        Fault("kill-others", "death", RUNNING, "SIGKILL of all ranks but one", **_TWO),
        Fault("kill-twice", "death", RUNNING, "SIGKILL, and of another rank after the recovery", ranks=4, **_TWO),
        Fault("kill-during", "death", RUNNING, "SIGKILL, and of another rank in the recovery", ranks=4, **_TWO),
        Fault("host-kill", "host", BETWEEN, "a host loses its networks, and all its processes"),
        Fault("host-freeze", "host", BETWEEN, "all processes of a host are stopped"),
        Fault("cut-both", "cut", BETWEEN, "a host is cut off from both networks", **_ALIVE),
        Fault("cut-control", "cut", BETWEEN, "a host is cut off from the launcher's network alone", **_ALIVE),
        Fault("cut-data", "cut", BETWEEN, "a host is cut off from the network of MPI, or NCCL, alone", **_ALIVE),
        Fault("cut-unseen", "unseen", ("wait", "mpi"), "the same, where no name tells the links of it", True, (HOST,)),
    )
}
# The stand-in alone can be told to do this.
BY_STANDIN = ("background", "call")
# What happens to ranks and watchers and is told between hosts too.
ALSO_BETWEEN = ("kill", "stop", "watcher-kill", "watcher-stop")
# A broadcast is what waits on the device: it moves bytes and reduces nothing.
NOT_IN_A_BROADCAST = ("other-dtype", "other-op")

# -- launchers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launcher:
    """How the ranks are started; ``seconds``: what a job costs under it; ``gpu``: of cells on real GPUs only.

    ``hosts``: each rank has a host of its own, which is a network name space.
    """

    name: str
    mpi: str
    options: tuple[str, ...] = ()
    slurm: bool = False
    seconds: float = 2.0
    gpu: bool = False
    hosts: bool = False

    @property
    def ulfm(self) -> bool:
        """Whether MPI goes on without a lost rank."""
        return "ulfm" in self.options

    @property
    def spares(self) -> bool:
        """Whether it leaves survivors alone."""
        return self.ulfm or "--enable-recovery" in self.options or self.name == "srun-mpich"


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
        Launcher("hosts-mpich", "mpich", seconds=4.0, hosts=True),
        Launcher("hosts-openmpi", "openmpi", ("--enable-recovery",), seconds=4.0, hosts=True),
        Launcher("hosts-openmpi-ulfm", "openmpi", ("--with-ft", "ulfm"), seconds=4.0, hosts=True),
    )
}

# -- false alarms ------------------------------------------------------------------------------------------------------


def struck(fault: str) -> tuple[int, ...]:
    """Return the ranks that are struck first, at one time."""
    return FAULTS[fault].gone if fault == "kill-others" else (VICTIM,)


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
    hosts: bool = False


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
        Calm("outage", "a host is off all networks for 3 s", 3, 3, (HOST,), hosts=True),
        Calm("saturated", "both cores are saturated", 12, 600, alone=True),
    )
}
