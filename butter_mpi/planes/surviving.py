"""What a plane does where others are lost: it meets those that are left, and makes way for the communicator of them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from butter_mpi import errors
from butter_mpi.control import Control, Overdue, Ticket, Watch, wait
from butter_mpi.detached import Detached
from butter_mpi.errors import CollectiveTimeoutError, CommunicatorBrokenError
from butter_mpi.planes.base import Plane
from butter_mpi.planes.waiting import farewells
from butter_mpi.sentinel.client import Sentinel
from butter_mpi.sentinel.gathering import RECONNECT, SHRINK
from butter_mpi.sentinel.relayed import RelayedControl

__all__ = ["Surviving"]

# Open MPI's detector has seen a rank that is stopped by then, where there is one.
_HUNG = 3.0
_DETECTOR = "MPI takes a rank that is stopped for lost only with mpirun --mca mpi_ft_detector true ..."
_TOGETHER = "every rank that lives must call shrink() together"
_CAME = "every rank that lives has called it, so MPI itself hangs; only a new job helps"


class Surviving(Plane):
    """Base of ``PeerPlane``, which makes what stands here."""

    start_deadline: float
    _control: Control
    _data: Any
    _reserve: Any
    _mpi: Any
    _sentinel: Sentinel | None
    family: Any
    """The MPI communicator that survivors are taken of, which is given to nobody else."""

    @property
    def sentinel(self) -> Sentinel | None:
        """This rank's end of the watcher."""
        return self._sentinel

    @property
    def largest_pair(self) -> int:
        """The largest number of a send or receive."""
        return max(self._pairs.values(), default=self._pairs_from)

    def stop_for_good(self) -> None:
        """Stop what broke, and wait a moment for that; host memory has nothing under way by itself."""

    def survivors(self, family: Any, stopped: Mapping[int, str]) -> tuple[Any, list[int]]:
        """Return an MPI communicator of the ranks that a fault-tolerant MPI says are left, and their numbers before.

        Parameters
        ----------
        family : mpi4py communicator or None
            Of which: one that an earlier call returned; ``None``: that of this communicator's ranks.
        stopped : mapping of int to str
            Ranks that were stopped when this began, for which MPI may wait, each with what the watcher says of it.

        Raises
        ------
        CollectiveTimeoutError
            MPI_Comm_shrink does not come back: a rank is stopped, or does not call this.
        """
        family = self.family if family is None else family
        # What is still under way on them ends by that; over the other one ranks still hear who is lost.
        for comm in filter(None, (family, self._data, self._reserve)):
            with contextlib.suppress(self._mpi.Exception):
                comm.Revoke()
        call = Detached(family.Shrink, f"{self.who}: shrink: MPI_Comm_shrink has not come back")
        hung = Watch(_HUNG)

        def look() -> None:
            if (found := self._stopped(stopped)) and hung.tick():
                raise self._hangs(hung.elapsed, found)

        try:
            comm = call.result(Watch(self.start_deadline), SHRINK, look)
        except Overdue as error:
            raise self._hangs(error.elapsed, self._stopped(stopped)) from error
        comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        return comm, list(self._mpi.Group.Translate_ranks(comm.group, list(range(comm.size)), family.group))

    def numbers_of(self, comm: Any) -> tuple[int, int]:
        """Return the largest numbers of collectives and of pairs of any survivor.

        Raises
        ------
        Overdue
            A rank did not come.
        """
        own, every = np.array([self.sequence, self.largest_pair]), np.empty(2, np.int64)
        ticket = Ticket(own, every).start(comm.Iallreduce, own, every, op=self._mpi.MAX)
        wait(ticket, Watch(self.start_deadline), "agreeing on the sequence")
        return int(every[0]), int(every[1])

    def _stopped(self, before: Mapping[int, str]) -> dict[int, str]:
        """Return the ranks that are stopped; those that the watchers left out are none to them any more."""
        return {**before} or ({} if self._sentinel is None else dict(self._sentinel.stopped))

    def _awaited(self, closed: Sequence[int]) -> str:
        if closed:
            return f"{farewells(self._control, closed)}; MPI waits for each rank that lives"
        return _CAME if self._sentinel is not None and self._sentinel.sees_all else _TOGETHER

    def _hangs(self, seconds: float, stopped: Mapping[int, str]) -> CollectiveTimeoutError:
        closed = () if stopped else sorted(self._control.left)
        why = f"{'; '.join(stopped.values())}. {_DETECTOR}" if stopped else self._awaited(closed)
        return CollectiveTimeoutError(
            f"{self.who}: shrink: MPI_Comm_shrink has not come back within {seconds:.1f} s: {why}",
            lost_ranks=tuple(stopped or closed),
            operation=SHRINK,
            phase="reconnect",
            elapsed=seconds,
        )

    def let_go_of_watcher(self) -> None:
        """Leave the watcher to another communicator."""
        self._sentinel = self._write = None

    def replace(self, by: str) -> None:
        """End this broken communicator, as survivors go on in another one; nothing is told to anybody."""
        self.let_go_of_watcher()
        self._control.abandon()
        self.health.replace(by)
        self._void()

    def _reconnect_relayed(self) -> None:
        """Meet every rank through the watcher."""
        assert self._sentinel is not None
        answer = self._sentinel.reunion.gather(RECONNECT, self.sequence, self.largest_pair, self.start_deadline)
        if answer["kind"] == "refused":
            raise self.refused(RECONNECT, answer)
        self._control.abandon()
        self._control = RelayedControl(self._sentinel)
        self.go_on_from(answer["sequence"], answer["pairs"])
        self._sentinel.all_came()
        self._sentinel.resume(self.sequence, self._pairs_from)

    def refused(self, what: str, answer: Mapping[str, Any]) -> CommunicatorBrokenError:
        """Return what the watcher's decision is raised as."""
        kind: type[CommunicatorBrokenError] = getattr(errors, answer["error"])
        facts = {"lost_ranks": tuple(answer["lost"]), "operation": what, "phase": "reconnect"}
        return kind(f"{self.who}: {what}: {answer['text']}", **facts)
