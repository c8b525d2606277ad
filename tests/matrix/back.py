"""What each rank of a cell does after the error, where the cell says so: go back to work, and come to a good end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

from helpers.recovery import die_in_recovery, total
from mpi4py import MPI

import butter_mpi
from matrix.lines import folder, have_said, say, until, verdict_is_out
from matrix.table import COLLECTIVE_DEADLINE, MENDED, SECOND, SHRINK, VICTIM, Fault

RANK, RANKS = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
_AGAIN_SECONDS = 15.0
"""How long a reconnect is tried again: a network that was cut comes back step by step."""
_ALL_BACK_SECONDS = 6.0


class Recovery:
    """What ranks do after a fault; ``strike`` ends this rank, where it is the second that is lost."""

    def __init__(self, fault: Fault, plane: str, how: str, strike: Callable[[], None]) -> None:
        self._fault, self._plane, self._how, self._strike = fault, plane, how, strike
        self._left = tuple(rank for rank in range(RANKS) if rank not in fault.gone)

    def run(self, comm: butter_mpi.Communicator) -> None:
        """Go back to work, as often as ranks are lost; says what keeps this rank from it."""
        try:
            self._run(comm)
        except Exception as error:
            say("failed", text=f"{type(error).__name__}: {error}")
            raise

    def _run(self, comm: butter_mpi.Communicator) -> None:
        if self._fault.name == "kill-during" and RANK == SECOND:
            die_in_recovery(self._plane, self._strike)
        comm = self._go_on(comm)
        if self._fault.name == "kill-twice":
            if RANK == SECOND:
                until(lambda: have_said("back", self._left), _ALL_BACK_SECONDS)
                self._strike()
            with contextlib.suppress(butter_mpi.PeerLostError):
                comm.wait_for_async_error(COLLECTIVE_DEADLINE)
            comm = self._go_on(comm)
        comm.all_gather_json(RANK)
        if self._how == SHRINK:
            # A job that ends within milliseconds may end before its watcher has had a core to say what was lost.
            until(verdict_is_out, _ALL_BACK_SECONDS)
        comm.close()

    def _go_on(self, comm: butter_mpi.Communicator) -> butter_mpi.Communicator:
        """Go on as the cell says; the sum tells whether the data is right."""
        if self._how == SHRINK:
            comm = comm.shrink()
        else:
            self._reconnect(comm)
        say("back", sum=total(comm), ranks=comm.world_size)
        return comm

    def _reconnect(self, comm: butter_mpi.Communicator) -> None:
        """Repeat the bootstrap with every rank, once all know why."""
        if self._fault.name == "freeze" and RANK == 0:
            others = [rank for rank in self._left if rank != VICTIM]
            until(lambda: have_said("raised", others), _AGAIN_SECONDS)
            os.kill(int((folder() / f"rank{VICTIM}.pid").read_text()), signal.SIGCONT)
        until(lambda: have_said("raised", self._left), _AGAIN_SECONDS)
        if self._fault.kind == "cut":
            until((folder() / MENDED).exists, _AGAIN_SECONDS)
        say("again")
        end = time.monotonic() + _AGAIN_SECONDS
        while True:
            try:
                comm.attempt_reconnect()
                return
            except butter_mpi.PeerLostError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)
