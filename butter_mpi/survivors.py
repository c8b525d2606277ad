"""Back to work after a loss: from a broken communicator to one of the ranks that are left.

Where the watchers of their nodes see all ranks, nothing here needs MPI, which most launchers leave unusable then: the
watcher says who is left, and what a start exchanges goes through it. Else a fault-tolerant MPI makes the communicator
that a start begins with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from butter_mpi.communicator import Communicator
from butter_mpi.control import Control, Overdue, Pause, Watch
from butter_mpi.descent import Descent, applicable
from butter_mpi.ending import ENDING
from butter_mpi.environment import c_environment
from butter_mpi.errors import ButterError, NotSupportedError, StartError, StartTimeoutError, text_of
from butter_mpi.findings import ranks_text
from butter_mpi.lane import LANE
from butter_mpi.launch import read_launch
from butter_mpi.planes.base import Plane
from butter_mpi.planes.nccl import NcclPlane
from butter_mpi.planes.peers import PeerPlane
from butter_mpi.preflight import PreflightReport
from butter_mpi.recovery import cannot_recover, fault_tolerant, left_alone, started_by
from butter_mpi.sentinel.client import WATCHED, Sentinel
from butter_mpi.sentinel.gathering import SHRINK
from butter_mpi.sentinel.relayed import RelayedControl

__all__ = ["GO_ON", "Numbers", "Survivors", "no_recovery"]

GO_ON = "Survivors go on with comm.shrink(), called by every rank that lives"
"""What whoever asked for it in the start is told where ranks are lost."""
_WORD_SECONDS = 0.5
_ONE_NODE = "the node of all"


def no_recovery(mpi: Any, alone: bool | None, *, over_mpi: bool) -> str:
    """Return why survivors of this job cannot go on; empty: they can.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    alone : bool or None
        Whether the launcher leaves survivors alone, by what some rank sees of it.
    over_mpi : bool
        Whether data goes over MPI.

    Returns
    -------
    str
        A cause and a remedy.
    """
    env = c_environment()
    return cannot_recover(read_launch(env), mpi.Get_library_version(), env, alone, over_mpi=over_mpi)


@dataclass(frozen=True, slots=True)
class Numbers:
    """A rank and a number of ranks, where there is no MPI communicator that says so."""

    rank: int
    size: int


def _over_mpi(on_host: bool, sentinel: Sentinel | None) -> bool:
    """Whether survivors agree and go on over MPI, and not through their watchers, which see all ranks."""
    return on_host or sentinel is None or not sentinel.sees_all


class Survivors:
    """Base of a start, which has the steps that are named here."""

    _comm: Any
    _mpi: Any
    _asked: Any
    _settings: Any
    _descent: Descent
    _watch: Watch
    _who: str
    _collect: Callable[[], dict[str, Any]]
    _alone: Callable[[dict[str, Any]], Communicator]
    _compared: Callable[[Control, dict[str, Any], Callable[[], None]], PreflightReport]
    _peer_options: Callable[[Sentinel | None], dict[str, Any]]
    _nccl: Callable[[tuple[Control, Any, Any], dict[str, Any], dict[str, Any]], NcclPlane]
    _made: Callable[[Plane, PreflightReport, dict[str, Any]], Communicator]
    run_after_loss: Callable[[], Communicator]

    # -- whether ranks can go on -------------------------------------------------------------------------------------

    def _refuse_without_recovery(self, plane: str, sentinel: Sentinel | None) -> None:
        """Refuse a start that asks for survivors to go on where they cannot, the same on every rank."""
        if self._settings.action == SHRINK and (why := self._cannot_shrink(plane == "host", sentinel)):
            raise NotSupportedError(f"{self._who}: start: action 'shrink': {why}", needs="recovery")

    def _without_mpi(self, plane: str, sentinel: Sentinel) -> bool:
        """Whether MPI is used in the start only, as survivors shall go on, and may not without.

        Open MPI ends a rank that is in any call of MPI while a TCP connection to a rank of another host breaks.
        """
        return self._settings.action == SHRINK and not _over_mpi(plane == "host", sentinel)

    def _cannot_shrink(self, on_host: bool, sentinel: Sentinel | None) -> str:
        """Return why survivors cannot go on, with the remedy; empty: they can."""
        if _over_mpi(on_host, sentinel) and not on_host and not fault_tolerant(c_environment()):
            if sentinel is None:
                return "ranks agree on who goes on through the watcher, and watch is 'off'; leave it on"
            return (
                "ranks are on several nodes, whose watchers are not linked, as watch is 'node'; set watch='on', or "
                "start the job with Open MPI 5 and its fault tolerance: mpirun --with-ft ulfm ..."
            )
        alone = left_alone(started_by()) if sentinel is None else sentinel.left_alone
        return no_recovery(self._mpi, alone, over_mpi=on_host)

    def _remark(self, lost: Sequence[int]) -> str:
        """Return what the loss of ranks means for other communicators, and for whoever wants to go on."""
        goes_on = lost and self._settings.action == SHRINK
        return "\n".join(filter(None, [self._descent.remark(lost), GO_ON if goes_on else ""]))

    # -- going on ----------------------------------------------------------------------------------------------------

    def _survive(self, plane: Plane) -> Communicator:
        """Return a communicator of the ranks that are left of a broken one, which it replaces."""
        with LANE.held(plane.who, SHRINK, plane.deadline), ENDING.starting():
            broken = self._broken(plane)
            sentinel, on_host = broken.sentinel, not broken.on_device
            if why := self._cannot_shrink(on_host, sentinel):
                raise NotSupportedError(f"{plane.who}: shrink: {why}", needs="recovery")
            broken.stop_for_good()
            if sentinel is None or _over_mpi(on_host, sentinel):
                made, descent = self._survive_over_mpi(broken, sentinel)
            else:
                made, descent = self._survive_watched(broken, sentinel)
            broken.replace(f"{descent.name}: {ranks_text(descent.ranks)} of {descent.origin}")
            ENDING.shrunk()
            return made

    def _broken(self, plane: Plane) -> PeerPlane:
        """Return a plane that others may be lost to; one that is healthy, closed or replaced is refused."""
        plane.check_no_group(SHRINK)
        if plane.is_healthy():
            raise ValueError(f"{plane.who}: shrink: nothing broke here; split makes parts of a healthy one")
        if plane.health.closed or plane.health.cause is None:
            plane.check_open(SHRINK)
        if not isinstance(plane, PeerPlane):
            raise ValueError(f"{plane.who}: shrink: one rank alone loses no other")
        return plane

    def _start_of(self, plane: Plane, descent: Descent, comm: Any, nodes: Sequence[str]) -> Self:
        """Return the start of those that go on: as the broken one was asked for, but for what it was planned to do."""
        settings = replace(
            self._settings,
            plane="nccl" if plane.on_device else "host",
            require_transport=applicable(self._settings.require_transport, nodes),
        )
        make: Any = type(self)
        made: Self = make(comm, self._mpi, replace(self._asked, settings=settings, plan=None), descent)
        return made

    def _survive_watched(self, plane: PeerPlane, sentinel: Sentinel) -> tuple[Communicator, Descent]:
        """Go on with those that the watchers say are left, anew where one is lost meanwhile."""
        sequence, pairs = plane.sequence, plane.largest_pair
        while True:
            answer = sentinel.reunion.gather(SHRINK, sequence, pairs, plane.start_deadline)
            if answer["kind"] == "refused":
                raise plane.refused(SHRINK, answer)
            sequence, pairs, descent = answer["sequence"], answer["pairs"], sentinel.descent
            sentinel.resume(sequence, pairs)
            numbers = Numbers(sentinel.rank, len(descent.ranks))
            start = self._start_of(plane, descent, numbers, sentinel.nodes)
            try:
                return start._go_on(sentinel, sequence, pairs), descent
            except (StartError, Overdue) as error:
                if not sentinel.lost_another(_WORD_SECONDS):
                    raise start._unfinished(error) from error
            except BaseException as error:
                if not isinstance(error, ButterError):
                    # The others cannot know of it, and wait.
                    sentinel.tell_of(f"{start._who}: shrink: ended by {text_of(error)}")
                raise

    def _go_on(self, sentinel: Sentinel, sequence: int, pairs: int) -> Communicator:
        """Start without MPI: what ranks tell one another goes through the watcher that they have."""
        record = self._collect()
        sentinel.stay_last()
        if self._comm.size == 1:
            made = self._alone(record)
            made._plane.go_on_from(sequence, pairs)
            sentinel.close()
            return made
        control = RelayedControl(sentinel)
        report = self._compared(control, record, sentinel.look_at_start)
        plane = self._nccl((control, None, None), record, self._peer_options(sentinel))
        try:
            plane.start(self._watch)
        except BaseException:
            # The watcher stays with those that are left then.
            plane.let_go_of_watcher()
            plane.close("not started")
            raise
        plane.go_on_from(sequence, pairs)
        plane.listen_to_watcher()
        return self._made(plane, report, record)

    def _unfinished(self, error: StartError | Overdue) -> StartError:
        """Return what a start without MPI that failed is raised as."""
        if isinstance(error, StartError):
            return error
        text = f"{self._who}: shrink: '{error.phase}' has not come to its end within {error.elapsed:.1f} s"
        text += error.where
        return StartTimeoutError(text, phase=error.phase, elapsed=error.elapsed)

    def _survive_over_mpi(self, plane: PeerPlane, sentinel: Sentinel | None) -> tuple[Communicator, Descent]:
        """Go on with those that a fault-tolerant MPI says are left, anew where one is lost meanwhile."""
        family, descent, stopped = None, self._descent, dict[int, str]()
        if sentinel is not None and sentinel.sees_all:
            # MPI waits for each that lives, and cannot be asked for whom: first the watchers see that all have come.
            answer = sentinel.reunion.gather(SHRINK, plane.sequence, plane.largest_pair, plane.start_deadline)
            if answer["kind"] == "refused":
                raise plane.refused(SHRINK, answer)
            # What was heard before that: the verdict comes first, and then that the rank is stopped still.
            stopped = sentinel.left_stopped
        while True:
            family, ranks = plane.survivors(family, stopped)
            descent = descent.shrunk(ranks)
            try:
                numbers = plane.numbers_of(family)
                made = self._start_of(plane, descent, family, [_ONE_NODE] * family.size).run_after_loss()
            except (StartError, Overdue, self._mpi.Exception) as error:
                watched = isinstance(error, StartError) and error.phase == WATCHED
                if not watched and not self._lost_another(family):
                    raise
            else:
                self._hand_over(plane, made._plane, family, *numbers)
                return made, descent

    def _lost_another(self, comm: Any) -> bool:
        """Whether one of those that MPI said were left is lost now, by what it or another survivor says in a moment."""
        watch, pause = Watch(_WORD_SECONDS), Pause()
        while not (lost := bool(comm.Get_failed().size) or comm.Is_revoked()) and not watch.tick():
            # MPI takes news in where it is asked for messages only.
            with contextlib.suppress(self._mpi.Exception):
                comm.Iprobe()
            pause()
        return lost

    def _hand_over(self, plane: PeerPlane, new: Plane, family: Any, sequence: int, pairs: int) -> None:
        """Let the new communicator count on, and its watcher see to the end of this process."""
        new.go_on_from(sequence, pairs)
        if isinstance(new, PeerPlane):
            # Who was told of a loss before it came here takes the survivors of the same one.
            new.family = family
            if new.sentinel is not None:
                new.sentinel.resume(sequence, pairs)
                new.sentinel.stay_last()
        if plane.sentinel is not None:
            plane.sentinel.close()
            # One that is left alone has no other.
            plane.sentinel.leave()
