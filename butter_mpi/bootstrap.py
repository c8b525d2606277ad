"""From an MPI communicator to a ``Communicator``: bounded, compared, the same outcome on every rank."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from butter_mpi import cuda, preflight
from butter_mpi.arrivals import duplicate_once_all_came
from butter_mpi.buffers import stream_handle
from butter_mpi.collectives import check_plan
from butter_mpi.communicator import Communicator
from butter_mpi.control import Control, Overdue, Pause, Watch, duplicate
from butter_mpi.descent import Descent, applicable
from butter_mpi.device import Device
from butter_mpi.ending import ENDING, say
from butter_mpi.environment import c_environment, effective_nccl
from butter_mpi.errors import (
    ButterError,
    CUDAError,
    NotSupportedError,
    PreflightError,
    StartError,
    StartTimeoutError,
    text_of,
)
from butter_mpi.interfaces import interfaces, named_interface
from butter_mpi.lane import LANE
from butter_mpi.launch import read_launch
from butter_mpi.library import open_library
from butter_mpi.mpi_start import load_mpi
from butter_mpi.nccl_setup import prepare
from butter_mpi.planes.base import Plane
from butter_mpi.planes.host import HostPlane
from butter_mpi.planes.nccl import NcclPlane
from butter_mpi.planes.peers import PeerPlane
from butter_mpi.planes.solo import DeviceSoloPlane, SoloPlane
from butter_mpi.recovery import left_alone, started_by
from butter_mpi.refusal import show_once
from butter_mpi.sentinel.client import WATCHED, Offer, Sentinel
from butter_mpi.sentinel.door import ALONE, Door
from butter_mpi.sentinel.gathering import SHRINK
from butter_mpi.sentinel.relayed import RelayedControl
from butter_mpi.settings import FaultPolicy, Settings
from butter_mpi.survivors import Numbers, Survivors, no_recovery

__all__ = ["abort_job", "init", "start_deadline"]

_LOG = logging.getLogger("butter_mpi")
_WORD_SECONDS = 0.5
_STARTS = itertools.count(1)

Gather = Callable[[bytes, str], list[bytes]]
"""Gives a payload of this rank to every rank of a start, in the step that is named, and returns theirs."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What one rank was asked for, and what it finds wrong with that itself."""

    settings: Settings
    plan: dict[str, Any] | None
    stream: int | None
    failures: list[str]


def init(
    comm: Any = None,
    *,
    plane: str | None = None,
    share_gpu: bool | None = None,
    require_transport: str | None = None,
    per_host_interfaces: bool | None = None,
    plan: Mapping[str, Any] | None = None,
    check: str | None = None,
    stream: Any = None,
    watch: str | None = None,
    watch_interface: str | None = None,
    verdict_file: str | os.PathLike[str] | None = None,
    recorder_file: str | os.PathLike[str] | None = None,
    fault: FaultPolicy | None = None,
) -> Communicator:
    """Start: compare every rank's facts over MPI, then make the communicator; or refuse, the same on every rank.

    All traffic is on duplicates of `comm`, but for the question who is missing, which ranks ask once the start deadline
    is over; every wait is bounded by that. What one rank finds wrong by itself, its arguments and variables included,
    travels in its record, so that no rank waits for another's exception.

    Parameters
    ----------
    comm : mpi4py intracommunicator, optional
        The ranks that take part; default ``MPI.COMM_WORLD``. MPI thread level SERIALIZED or higher.
    plane : {"auto", "nccl", "host"}, optional
        The data plane. ``auto``: nccl if every rank has a CUDA device, host if none has.
    share_gpu : bool, optional
        Allow two ranks on one GPU.
    require_transport : {"P2P", "SHM", "NET/IB", "NET/Socket"}, optional
        The transport that must be verified to be in use.
    per_host_interfaces : bool, optional
        Allow interface names (``NCCL_SOCKET_IFNAME``, ``NCCL_IB_HCA``) to differ between hosts.
    plan : mapping, optional
        The first collective: ``operation``, ``count``, ``dtype``, ``op``, ``root``. It is compared, and held to.
    check : {"light", "strict"}, optional
        ``strict``: ranks compare every operation before it is submitted, at the price of a round of MPI messages each.
        The host plane always does.
    stream : CUDA stream, optional
        The ordered stream of ``Communicator.backend`` on the nccl plane; without it, a non-blocking one of its own.
    watch : {"on", "debugger", "node", "off"}, optional
        Whether a process on each node, outside the ranks, watches them and tells every one within moments which died,
        is stopped or differs, and which node is cut off. ``debugger``: ranks that are stopped are not judged. ``node``:
        these processes know nothing of other nodes, and need no connection between them. ``off``: such faults are
        found at the collective deadline, or by the launcher.
    watch_interface : str, optional
        Names of network interfaces, with commas: over each of these networks the processes of several nodes hear one
        another, and a node that one of them loses is named. A bar stands between names of one network on different
        hosts (``eth0,ib0|hsn0``). Default: the network of the host's name and, on the nccl plane, that which
        ``NCCL_SOCKET_IFNAME`` names.
    verdict_file : str or path, optional
        A file to which each node's watcher appends what broke, and what each rank submitted last, as a line of JSON.
    recorder_file : str or path, optional
        A file to which the watcher appends all that the recorders of its node hold when a communicator breaks, for
        ``python -m butter_mpi.recorder``; each host puts its name before the ending.
    fault : FaultPolicy, optional
        Deadlines, and what a fault does.

    Returns
    -------
    Communicator
        Healthy, with the report of the comparison as ``preflight``.

    Raises
    ------
    TypeError
        `comm` is not an mpi4py intracommunicator.
    PreflightError
        Ranks differ or one cannot run; every finding, the same text on every rank.
    StartTimeoutError
        Not every rank came within the start deadline.
    StartError
        A step of the start failed on one rank.
    NotSupportedError
        The library or the device lacks what was asked for.

    Notes
    -----
    **Collective**: every rank of `comm`. **Blocking**: until the communicator is made, at most the start deadline
    (default 60 s). Arguments that are not given are read from ``BUTTER_MPI_*`` variables.
    """
    MPI = _mpi(start_deadline(fault))  # noqa: N806
    comm = MPI.COMM_WORLD if comm is None else comm
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise TypeError(f"comm must be an mpi4py intracommunicator; got {comm!r}")
    arguments = {
        "plane": plane,
        "share_gpu": share_gpu,
        "require_transport": require_transport,
        "per_host_interfaces": per_host_interfaces,
        "check": check,
        "watch": watch,
        "watch_interface": watch_interface,
        "verdict_file": verdict_file,
        "recorder_file": recorder_file,
    }
    asked = _asked(arguments, plan, stream, fault, MPI, comm.size)
    ENDING.register(MPI)
    # Below MPI's highest thread level its calls must not overlap with those of operations in other threads.
    lane = contextlib.nullcontext() if MPI.Query_thread() >= MPI.THREAD_MULTIPLE else _lane(asked.settings)
    with ENDING.starting(), lane:
        number = next(_STARTS)
        descent = Descent.of_init("init" if number == 1 else f"init {number}", comm.size)
        return _Start(comm, MPI, asked, descent).run()


def start_deadline(fault: Any = None) -> float:
    """Return the start deadline; where it is malformed the start itself will say so.

    Parameters
    ----------
    fault : FaultPolicy, optional
        What ``init`` was given; without it the variable counts, then the default.

    Returns
    -------
    float
        Seconds.
    """
    name = "BUTTER_MPI_START_DEADLINE"
    given = {key: value for key, value in c_environment().items() if key == name}
    try:
        return Settings.resolve(given, fault).start_deadline
    except (TypeError, ValueError, AttributeError):
        return Settings().start_deadline


def _mpi(seconds: float) -> Any:
    """Return MPI, started, and seen to be usable in this process."""
    try:
        mpi = load_mpi(seconds)
        _check_mpi(mpi)
    except StartError as error:
        rank = _claimed_rank()
        show_once(error, f"rank {rank}", None if ENDING.forked else rank)
        raise
    return mpi


def _claimed_rank() -> int | None:
    """Return this rank by the launcher's variables: MPI may be none, or have made N worlds of one rank of N ranks."""
    return read_launch(c_environment()).claimed_rank


def _lane(settings: Settings) -> contextlib.AbstractContextManager[None]:
    return LANE.held("init", "init", settings.start_deadline)


def _check_mpi(mpi: Any) -> None:
    """Refuse a process in which MPI cannot be used."""
    if ENDING.forked:
        raise StartError(
            f"init: this process {os.getpid()} is a fork of one that runs MPI, and MPI knows only that one; start "
            "ranks with the launcher, or processes of your own with the spawn method",
            phase="MPI",
        )
    if not mpi.Is_initialized():
        raise StartError(
            "init: MPI is not started, as mpi4py.rc.initialize is off: call MPI.Init_thread() before init", phase="MPI"
        )
    if mpi.Is_finalized():
        raise StartError("init: MPI.Finalize was called, and MPI starts once a process: init before it", phase="MPI")


def _asked(
    arguments: Mapping[str, Any], plan: Any, stream: Any, fault: FaultPolicy | None, mpi: Any, size: int
) -> _Asked:
    failures: list[str] = []

    def attempt(make: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return make()
        except (TypeError, ValueError, AttributeError) as error:
            failures.append(f"init: {error}")
            return otherwise

    settings = attempt(lambda: Settings.resolve(c_environment(), fault, **arguments), Settings())
    checked = attempt(lambda: check_plan(plan, size), None)
    handle = attempt(lambda: None if stream is None else stream_handle(stream), None)
    if handle is not None and settings.plane == "host":
        failures.append("init: the host plane has no streams; stream must be None")
    level = mpi.Query_thread()
    if level < mpi.THREAD_SERIALIZED:
        names = {mpi.THREAD_SINGLE: "SINGLE", mpi.THREAD_FUNNELED: "FUNNELED"}
        failures.append(
            f"MPI runs at thread level {names.get(level, level)}; butter_mpi calls it from one thread at a time, but "
            "from any thread: needs SERIALIZED or higher (mpi4py's default, or mpi4py.rc.thread_level = 'serialized')"
        )
    # Another rank may see the launcher; whether one does is judged later.
    alone = left_alone(started_by()) is not False
    if settings.action == SHRINK and size > 1 and (why := no_recovery(mpi, alone, over_mpi=settings.plane == "host")):
        failures.append(f"init: action 'shrink': {why}")
    return _Asked(settings, checked, handle, failures)


class _Start(Survivors):
    """The steps of one start, under one deadline."""

    def __init__(
        self,
        comm: Any,
        mpi: Any,
        asked: _Asked,
        descent: Descent,
        look: Callable[[], None] = lambda: None,
        gather: Gather | None = None,
    ) -> None:
        self._comm, self._mpi, self._asked, self._gather = comm, mpi, asked, gather
        self._settings = asked.settings
        self._watch, self._look = Watch(asked.settings.start_deadline), look
        self._descent, self._lonely = descent, False
        self._who = descent.who(comm.rank, socket.gethostname())

    def run(self) -> Communicator:
        """Take every step; where it fails and others cannot know of it, or are lost, the job is ended at exit."""
        try:
            return self.run_after_loss()
        except (PreflightError, StartError) as error:
            if self._lonely:
                ENDING.alone()
            several = self._comm.size > 1
            rank = self._comm.rank if several else _claimed_rank() if self._mpi.COMM_WORLD.size == 1 else None
            show_once(error, self._who if several else f"rank {rank}", rank)
            raise

    def run_after_loss(self) -> Communicator:
        """Take every step; a step that is overdue is named."""
        record = self._collect()
        self._watch.passed("collecting this rank's record")
        try:
            return self._connect(record) if self._comm.size > 1 else self._alone(record)
        except Overdue as error:
            self._lonely = True
            raise StartTimeoutError(
                f"{self._who}: start: {self._overdue(error)}", phase=error.phase, elapsed=error.elapsed
            ) from None
        except StartError as error:
            # A rank is lost, and MPI_Finalize would wait for it.
            self._lonely = error.phase == WATCHED
            raise
        except self._mpi.Exception as error:
            self._lonely = True
            raise StartError(
                f"{self._who}: start: MPI failed: {error}. Look at what the launcher and MPI say above",
                phase="MPI",
                elapsed=self._watch.elapsed,
            ) from error

    def _overdue(self, error: Overdue) -> str:
        """Return what is said of a step that is overdue; once ranks could ask one another, where each of them is."""
        bound = f"within {error.elapsed:.1f} s (start deadline {self._settings.start_deadline:g} s)"
        longer = "or set a longer start_deadline"
        if error.where:
            # All ranks may be in the same step, and none of them missing.
            look = "Look at NCCL's log there (NCCL_DEBUG=INFO)"
            return f"'{error.phase}' has not come to its end {bound}{error.where}. {look}, {longer}"
        who = f": {error.missing}. Look there" if error.missing else ". Look at the ranks that are missing here"
        return f"not every rank came to '{error.phase}' {bound}{who}, {longer}"

    def _collect(self) -> dict[str, Any]:
        world = self._mpi.COMM_WORLD
        return preflight.collect_record(
            self._settings,
            read_launch(c_environment()),
            self._comm.rank,
            self._comm.size,
            plan=self._asked.plan,
            failures=self._asked.failures,
            extra={
                "comm_world_size": world.size,
                "comm_world_rank": world.rank,
                "mpi_library": " ".join(self._mpi.Get_library_version().strip("\0").split()),
                "thread_level": self._mpi.Query_thread(),
            },
        )

    def _alone(self, record: dict[str, Any]) -> Communicator:
        report = _passed(preflight.judge([record]))
        device = self._own_device(record)
        if device is None:
            return self._made(SoloPlane(**self._options()), report, record)
        try:
            plane = DeviceSoloPlane(device, self._asked.stream, **self._options())
        except (CUDAError, ValueError, TypeError) as error:
            raise StartError(f"{self._who}: start: {error}", phase="device") from error
        return self._made(plane, report, record)

    def _own_device(self, record: dict[str, Any]) -> Device | None:
        """Return the device on which one rank alone works as the nccl plane would; ``None``: host memory, no device."""
        if self._settings.plane == "host":
            return None
        try:
            visible = cuda.devices(c_environment())
            return Device.of(cuda.pick_device(record["local_rank"] or 0, visible)["ordinal"])
        except CUDAError as error:
            if self._settings.plane == "auto" and cuda.device_absent(error):
                return None
            raise StartError(f"{self._who}: start: {error.message}", phase="device") from None

    def _connect(self, record: dict[str, Any]) -> Communicator:
        if self._gather is not None:
            return self._connect_relayed(record, self._gather)
        twin = duplicate_once_all_came(self._comm, self._mpi, self._watch, self._look, who=self._who)
        control = Control(twin, self._mpi)

        def gather(payload: bytes, phase: str) -> list[bytes]:
            return control.all_gather_any(payload, self._watch, phase, self._look)

        sentinel = self._sentinel(gather)
        try:
            return self._connect_watched(record, control, sentinel)
        except BaseException as error:
            if sentinel is not None:
                self._leave(sentinel, error)
            raise

    def _connect_relayed(self, record: dict[str, Any], gather: Gather) -> Communicator:
        """Start without MPI: what ranks tell one another goes through watchers of their own."""
        sentinel = self._sentinel(gather)
        assert sentinel is not None
        control = RelayedControl(sentinel)
        try:
            sentinel.wait_until_ready(self._watch)
            report = self._compared(control, record, sentinel.look_at_start)
            return self._relayed(sentinel, control, report, record)
        except BaseException as error:
            self._leave(sentinel, error)
            control.retire()
            raise

    def _relayed(
        self, sentinel: Sentinel, control: RelayedControl, report: preflight.PreflightReport, record: dict[str, Any]
    ) -> Communicator:
        """Make the communicator of ranks that talk through their watchers, once these stand.

        By the control plane that has compared ranks: it may have taken what others have sent since.
        """
        plane = self._started((control, None, None), record, self._peer_options(sentinel))
        plane.listen_to_watcher()
        return self._made(plane, report, record)

    def _leave(self, sentinel: Sentinel, error: BaseException) -> None:
        """Close to the watcher of a start that failed; what other ranks cannot know is told, so that they do not wait.

        Our own errors are the same on every rank, or were told over MPI, or come of a deadline that each rank has.
        """
        try:
            if isinstance(error, self._mpi.Exception):
                # MPI says that something failed; the watcher may say in a moment which rank it was.
                sentinel.wait_for_word(_WORD_SECONDS)
            elif not isinstance(error, (ButterError, Overdue)):
                sentinel.tell_of(f"{self._who}: start: ended by {text_of(error)}")
            elif isinstance(error.__cause__, Exception) and not isinstance(error.__cause__, ButterError):
                # Not ours: nobody expects it, and it may be caught nowhere.
                say(text_of(error))
        finally:
            sentinel.close()

    def _connect_watched(self, record: dict[str, Any], control: Control, sentinel: Sentinel | None) -> Communicator:
        def look() -> None:
            self._look()
            if sentinel is not None:
                sentinel.look_at_start()

        try:
            report = self._compared(control, record, look)
            self._refuse_without_recovery(report.plane, sentinel)
            if sentinel is not None and self._without_mpi(report.plane, sentinel):
                control.free()
                sentinel.wait_until_ready(self._watch)
                return self._relayed(sentinel, RelayedControl(sentinel), report, record)
            data = duplicate(self._comm, self._mpi, self._watch, look)
            reserve = duplicate(self._comm, self._mpi, self._watch, look)
        except (PreflightError, NotSupportedError):
            # Every rank is here with the same error, and nothing is under way: the duplicate can go.
            control.free()
            raise
        options = self._peer_options(sentinel)
        plane: PeerPlane
        if report.plane == "host":
            plane = HostPlane((control, data, reserve), self._mpi, **options)
        else:
            plane = self._started((control, data, reserve), record, options)
        if sentinel is not None:
            sentinel.wait_until_ready(self._watch)
        plane.listen_to_watcher()
        return self._made(plane, report, record)

    def _compared(
        self, control: Control, record: dict[str, Any], look: Callable[[], None]
    ) -> preflight.PreflightReport:
        return _passed(compare(control, record, self._watch, look))

    def _started(self, comms: tuple[Control, Any, Any], record: dict[str, Any], options: dict[str, Any]) -> NcclPlane:
        plane = self._nccl(comms, record, options)
        try:
            plane.start(self._watch)
        except BaseException:
            plane.close("not started")
            raise
        return plane

    def _sentinel(self, gather: Gather) -> Sentinel | None:
        """Join the watcher of this node, which one of its ranks starts; every rank of the job calls this."""
        settings = self._settings
        offer = Offer(
            settings.watch, settings.collective_deadline, settings.verdict_file or "", settings.recorder_file or ""
        )
        every = [json.loads(one) for one in gather(offer.payload(), "agreeing on the watchers")]
        if any(one["watch"] == "off" for one in every):
            # Where they differ, preflight says so.
            offer.close()
            return None
        names, deadline = settings.watch_interface, settings.start_deadline
        door = Door(every, self._comm.rank, names, self._data_interface, deadline)
        try:
            linked = door.needed and all(one["watch"] != "node" for one in every)
            # Where parts of a communicator meet together, others may have links.
            links = self._links(door, gather) if linked or self._gather is not None else ALONE
            return Sentinel(
                offer,
                every,
                self._comm.rank,
                descent=self._descent,
                start_deadline=settings.start_deadline,
                frozen=settings.watch != "debugger",
                file=settings.verdict_file or "",
                links=links if linked else ALONE,
            )
        except BaseException:
            offer.close()
            raise
        finally:
            door.close()

    def _data_interface(self) -> str | None:
        """Return the interface that the user has told NCCL to use, where it is used."""
        # What is wrong with NCCL's settings on one rank, all are told by preflight.
        with contextlib.suppress(OSError, ValueError):
            if self._settings.plane != "host":
                told = effective_nccl(c_environment()).get("NCCL_SOCKET_IFNAME", (None,))[0]
                return named_interface(interfaces(), told)
        return None

    def _links(self, door: Door, gather: Gather) -> dict[str, Any]:
        """Return what the watcher of this node is told of those of the others; every rank of the job calls this."""
        every = [json.loads(one) for one in gather(door.payload(), "agreeing on the links of the watchers")]
        if refusal := door.refusal(every):
            raise StartError(f"{self._who}: start: {refusal}", phase="watcher")
        return door.config(every)

    def _nccl(self, comms: tuple[Control, Any, Any], record: dict[str, Any], options: dict[str, Any]) -> NcclPlane:
        """Return the plane; preflight has opened the library and found the device on every rank."""
        settings = self._settings
        version, required = record["library"]["version"], settings.require_transport
        prepare(version, self._comm.rank, share_gpu=settings.share_gpu, required=required)
        return NcclPlane(
            comms,
            self._mpi,
            library=open_library(c_environment())[0],
            ordinal=record["device"]["ordinal"],
            node=record["machine"],
            stream=self._asked.stream,
            strict=settings.check == "strict",
            required=required,
            **options,
        )

    def _peer_options(self, sentinel: Sentinel | None) -> dict[str, Any]:
        watched = {"sentinel": sentinel, "on_verdict": self._verdict}
        return {"start_deadline": self._settings.start_deadline, **watched, **self._options()}

    def _options(self) -> dict[str, Any]:
        return {"who": self._who, "deadline": self._settings.collective_deadline, "on_poison": self._poisoned}

    def _poisoned(self, plane: Plane) -> None:
        self._follow_policy(plane, "the job", lambda: abort_job(plane.exit_status))

    def _verdict(self, plane: Plane) -> None:
        """Do what the policy says, in the thread that listens to the watcher, which must not call MPI."""
        self._follow_policy(plane, "this process, and with it the job", lambda: ENDING.end_process(1))

    def _follow_policy(self, plane: Plane, what: str, end: Callable[[], NoReturn]) -> None:
        ENDING.broken(plane)
        cause = plane.health.cause
        if self._settings.action == "abort" and cause is not None:
            say(cause.message)
            say(f"{self._who}: ending {what} (action abort)")
            end()

    def _made(self, plane: Plane, report: preflight.PreflightReport, record: dict[str, Any]) -> Communicator:
        ENDING.watch(plane)
        plane.health.remark = self._remark
        if self._comm.size == self._mpi.COMM_WORLD.size:
            ENDING.everybody_started()
        if report.warnings and plane.rank() == 0:
            _LOG.warning("%s", report.text())
        return Communicator(
            plane,
            preflight=report,
            settings=self._settings,
            record=record,
            plan=self._asked.plan,
            start_seconds=self._watch.phases,
            orphan=ENDING.orphan,
            part=lambda *part: self._part(plane, *part),
            survive=lambda: self._survive(plane),
        )

    def _part(
        self, plane: Plane, what: str, name: str, color: int | None, ranks: Sequence[int], nodes: Sequence[str]
    ) -> Communicator | None:
        """Make the communicator of a part of the ranks of `plane`, by the steps of every start."""
        key = ranks.index(plane.rank()) if color is not None else 0
        gather: Gather | None = None
        if isinstance(plane, PeerPlane) and plane.relayed:
            gather = _through(plane, what, ranks)
            if len(ranks) < 2:
                _let_others_meet(gather)
            comm = Numbers(key, len(ranks))
        else:
            comm = plane.divide(what, color, key) if isinstance(plane, PeerPlane) else self._mpi.COMM_SELF
        if color is None:
            return None
        settings = replace(
            self._settings,
            plane="nccl" if plane.on_device else "host",
            require_transport=applicable(self._settings.require_transport, nodes),
        )
        asked, descent = replace(self._asked, settings=settings, plan=None), self._descent.child(name, ranks)
        try:
            with ENDING.starting():
                look = lambda: plane.health.check(plane.who, what)  # noqa: E731
                made = _Start(comm, self._mpi, asked, descent, look, gather).run()
        except PreflightError:
            self._free(comm)
            raise
        except StartError as error:
            if error.phase == WATCHED:
                _wait_for_word(plane, what)
            raise
        # It has duplicates of its own.
        self._free(comm)
        return made

    def _free(self, comm: Any) -> None:
        if not isinstance(comm, Numbers) and comm != self._mpi.COMM_SELF:
            comm.Free()


def _through(plane: Plane, what: str, ranks: Sequence[int]) -> Gather:
    """Return the exchange of a part of the ranks of a plane, in which all of its parts meet together."""

    def gather(payload: bytes, _phase: str) -> list[bytes]:
        every = plane._exchanged(what, payload)
        return [every[rank] for rank in ranks]

    return gather


def _let_others_meet(gather: Gather) -> None:
    """Take part in what the ranks of other parts exchange in their starts."""
    for _ in range(2):
        gather(b"", "")


def _wait_for_word(plane: Plane, what: str) -> None:
    """Raise what the watcher of a communicator says in a moment, where that of one of its parts has said it already."""
    watch, pause = Watch(_WORD_SECONDS), Pause()
    while not watch.tick():
        plane.health.check(plane.who, what)
        pause()


def compare(
    control: Control, record: dict[str, Any], watch: Watch, look: Callable[[], None] = lambda: None
) -> preflight.PreflightReport:
    """Exchange fixed-size digests, full records only where those differ; the same report on every rank."""
    digests = control.all_gather(preflight.digest(record), watch, "comparing preflight digests", look)
    if not preflight.needs_full(digests):
        return preflight.report_from_digests(digests, record)
    payload = json.dumps(preflight.complete(record, digests)).encode()
    records = control.all_gather_any(payload, watch, "comparing preflight records", look)
    return preflight.judge([json.loads(x) for x in records])


def _passed(report: preflight.PreflightReport) -> preflight.PreflightReport:
    if not report.ok:
        raise PreflightError(report.text(), report=report)
    return report


def abort_job(status: int) -> NoReturn:
    """End every rank of the job with MPI_Abort, bounded by an alarm.

    Parameters
    ----------
    status : int
        The exit status to ask the launcher for.
    """
    ENDING.abort_job(status)
