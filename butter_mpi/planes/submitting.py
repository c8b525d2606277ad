"""The one path on which operations are submitted: their turn, their health, their number; and how that path ends."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from butter_mpi.collectives import Operation, Owners, call_site, control_signature, describe, signature
from butter_mpi.errors import ButterError, CommunicatorBrokenError, PeerLostError, text_of
from butter_mpi.lane import LANE, Health

__all__ = ["Numbered", "Signed", "Submitting", "Used", "signed"]

Numbered = tuple[Operation, int]
"""An operation and its number."""
Signed = tuple[Operation, dict[str, Any]]
"""An operation and what other ranks are told of it."""
Used = tuple[int, Owners]
"""A stream, and arrays that work on it uses."""
_CLOSE_PATIENCE = 1.0

_LISTENING = "listening"


def _record(flight: Numbered | dict[str, Any]) -> dict[str, Any]:
    """Return the record of what is in flight."""
    return signature(*flight) if isinstance(flight, tuple) else flight


def signed(numbered: Sequence[Numbered]) -> list[Signed]:
    """Return operations with what other ranks are told of them."""
    return [(operation, signature(operation, number)) for operation, number in numbered]


class Submitting(ABC):
    """Base of ``Plane``: takes checked operations, whatever they are and wherever their data lies.

    Parameters
    ----------
    rank, world_size : int
        Identity.
    who : str
        This rank, as messages name it.
    deadline : float
        The collective deadline in seconds.
    on_poison : callable
        Called once with this plane when it is poisoned (the bootstrap ends the job there if asked to).
    """

    # An object with more than 30 attributes in its dictionary is slower at each of them, and at each method.
    __slots__ = (
        "_ended",
        "_flight",
        "_group",
        "_group_marks",
        "_group_thread",
        "_last",
        "_on_poison",
        "_pairs",
        "_pairs_from",
        "_rank",
        "_suspended",
        "_transport_errors",
        "_world_size",
        "_write",
        "deadline",
        "exit_status",
        "health",
        "owner",
        "sequence",
        "who",
    )

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        who: str,
        deadline: float,
        on_poison: Callable[[Any], None] = lambda _plane: None,
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self.who, self.deadline = who, deadline
        self.health = Health()
        self.sequence = 0
        self._last: Numbered | None = None
        # An operation with its number, or the record of what moves no data.
        self._flight: Numbered | dict[str, Any] | None = None
        # What a signal handler has interrupted, while it does something of its own.
        self._suspended: list[Numbered | dict[str, Any]] = []
        self._ended: Callable[[], bool] = bool
        """Tells whether what the plane stands on is gone."""
        self._write: Callable[[Operation, int], None] | None = None
        """What writes a submission where the watcher sees it; one rank alone has no watcher."""
        self._pairs: dict[tuple[int, str], int] = {}
        self._pairs_from = 0
        self._on_poison = on_poison
        self.exit_status = 1
        self.owner: object = None
        self._transport_errors: tuple[type[Exception], ...] = ()
        self._group: list[tuple[Operation, Owners]] | None = None
        self._group_marks: list[int] = []
        self._group_thread = 0

    # -- the one path ------------------------------------------------------------------------------------------------

    def submit(self, operation: Operation, owners: Owners = ()) -> None:
        """Submit one checked operation: its turn on the lane, health, number, execution; or keep it for its group.

        Its arrays, if given, are kept until its stream has passed it.
        """
        LANE.take(self.who, operation.kind, self.deadline)
        try:
            # As in _check. A fork has been looked for, and what MPI_Finalize finds open it closes.
            health = self.health
            if health.cause is not None or health.closed:
                self._refuse(operation.kind)
            if operation.graph is not None:
                operation = self._by_graph(operation)
            self._admit(operation)
            if self._group is None:
                self._run((operation,), ((operation.stream, owners),) if owners else (), follow=True)
            else:
                if operation.named:
                    with self._poisoning((operation, self._next_number(operation))):
                        self._follow(operation)
                self._group.append((replace(operation, waits=False) if operation.waits else operation, owners))
        finally:
            LANE.give()

    def _run(self, operations: Sequence[Operation], used: Sequence[Used], *, follow: bool = False) -> None:
        if len(operations) > 1:
            operations = self._ordered(operations)
        # Pairs come last.
        if operations[-1].peer is not None:
            self._check_own_pairs(operations)
        before, write, outer = self.health.cause, self._write, self._flight
        numbered: list[Numbered] = []
        named = False
        if outer is not None:
            self._suspended.append(outer)
        try:
            for operation in operations:
                peer = operation.peer
                number = self.sequence + 1 if peer is None else self._next_number(operation)
                one = operation, number
                if not numbered:
                    # Before the number is taken: a signal handler may close this communicator anywhere.
                    self._flight = one
                numbered.append(one)
                if peer is None:
                    self.sequence = number
                else:
                    self._pairs[peer, operation.kind] = number
                if write is not None:
                    write(operation, number)
                if operation.named:
                    named = True
                    if follow:
                        self._follow(operation)
            if used:
                self._keep(used)
            self._execute(numbered)
            if used:
                self._mark()
            if named:
                self._lead(operations)
            self._last = one
        except BaseException as error:
            self._break(numbered[0] if numbered else (operations[0], self.sequence), before, error)
            raise
        finally:
            self._flight = outer
            if outer is not None:
                self._suspended.pop()

    @contextmanager
    def _poisoning(self, flight: Numbered | dict[str, Any]) -> Iterator[None]:
        """Mark what is in flight, and poison this communicator with whatever ends the body."""
        outer, before = self._flight, self.health.cause
        if outer is not None:
            self._suspended.append(outer)
        self._flight = flight
        try:
            yield
        except BaseException as error:
            self._break(flight, before, error)
            raise
        finally:
            self._flight = outer
            if outer is not None:
                self._suspended.pop()

    def _break(
        self, flight: Numbered | dict[str, Any], before: CommunicatorBrokenError | None, error: BaseException
    ) -> None:
        """Poison this communicator with what ended an operation; raises where that is to be told by another error."""
        if isinstance(error, CommunicatorBrokenError):
            self.poison(error)
            self._raise_first(before, error)
        elif isinstance(error, self._transport_errors):
            cause = self._failed(_record(flight), error)
            self.poison(cause)
            self._raise_first(before, cause)
            raise cause from error
        else:
            self.poison(self._interrupted(_record(flight), error))

    def _raise_first(self, before: CommunicatorBrokenError | None, error: CommunicatorBrokenError) -> None:
        """Raise the first cause, where one that was told came before `error`: later operations raise that one too."""
        first = self.health.cause
        if before is None and first is not None and first.message != error.message:
            raise copy.copy(first) from error

    @property
    def last(self) -> str:
        """The last operation, as messages name it; empty: there was none."""
        return "" if self._last is None else describe(_record(self._last))

    @property
    def in_flight(self) -> str:
        """The operation that a thread is in now; empty: none."""
        record = self._in_flight()
        return "" if record is None or record["kind"] == _LISTENING else describe(record)

    def _in_flight(self) -> dict[str, Any] | None:
        """Return the record of what a thread is in now, to whichever thread asks."""
        flight = self._flight
        return None if flight is None else _record(flight)

    def all_gather_json(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload over the control plane; compared like an operation, it takes no number."""
        return self._exchanged("all_gather_json", payload)

    def _exchanged(self, what: str, payload: bytes, **compared: Any) -> list[bytes]:
        """Return every rank's payload of a call that all ranks make together, with the same `compared`."""
        record = {**control_signature(what, self.sequence, call_site()), **compared}
        with LANE.held(self.who, what, self.deadline):
            self._check(what)
            self.check_no_group(what)
            with self._poisoning(record):
                return self._exchange(payload, record)

    def _by_graph(self, operation: Operation) -> Operation:
        """Return an operation of a graph, or without it where that is not used any more."""
        return operation

    def _admit(self, operation: Operation) -> None:  # noqa: B027 - most planes take everything
        """Raise ``ValueError`` or ``NotSupportedError`` where this plane cannot take an operation."""

    def _follow(self, operation: Operation) -> None:  # noqa: B027 - host memory has one stream
        """Let an operation come after what the streams that its arrays name hold when it is called, in a group too."""

    def _lead(self, operations: Sequence[Operation]) -> None:  # noqa: B027 - host memory has one stream
        """Let what comes later on those streams come after operations that are on theirs."""

    def _keep(self, used: Sequence[Used]) -> None:  # noqa: B027 - host memory is done with on return
        """Keep arrays alive until their streams have passed the operations that are about to be executed."""

    def _mark(self) -> None:  # noqa: B027 - host memory is done with on return
        """Mark where streams have passed what was kept last."""

    @abstractmethod
    def _execute(self, numbered: Sequence[Numbered]) -> None:
        """Move the data of operations that are numbered and in the order that all ranks agree on."""

    @abstractmethod
    def _exchange(self, payload: bytes, record: dict[str, Any]) -> list[bytes]:
        """Return every rank's payload."""

    @abstractmethod
    def _reconnect(self) -> None:
        """Make the communicator anew, with every other rank."""

    @abstractmethod
    def _announce(self, cause: CommunicatorBrokenError) -> None:
        """Tell the peers the first cause."""

    def _announce_aside(self, cause: CommunicatorBrokenError) -> None:  # noqa: B027 - peers may have no other way
        """Tell it without the lane, by whatever needs none."""

    @abstractmethod
    def _listen(self) -> None:
        """Take news of the peers."""

    def _stop(self) -> None:  # noqa: B027 - host planes have nothing under way by themselves
        """Stop what is under way, after a failure; waits for nothing."""

    @abstractmethod
    def _release(self) -> None:
        """Say goodbye and give the plane's resources back; called once, on the lane where it can be had."""

    def _ordered(self, operations: Sequence[Operation]) -> list[Operation]:
        """Return collectives in program order, then pairs: the order in which peers compare them."""
        return sorted(operations, key=lambda operation: operation.rule.paired)

    def go_on_from(self, sequence: int, pairs: int) -> None:
        """Count on from numbers that all ranks have agreed on."""
        self.sequence, self._pairs_from = sequence, pairs
        self._pairs.clear()

    def _next_number(self, operation: Operation) -> int:
        if operation.peer is None:
            return self.sequence + 1
        return self._pairs.get((operation.peer, operation.kind), self._pairs_from) + 1

    def _check_own_pairs(self, operations: Sequence[Operation]) -> None:
        for send, recv in self._own_pairs(operations):
            if send is None or recv is None or (send.count, send.dtype) != (recv.count, recv.dtype):
                raise ValueError(
                    f"{self.who}: a send to this rank itself needs its recv, of the same count and dtype, in one group"
                )

    def _own_pairs(self, operations: Sequence[Operation]) -> list[tuple[Operation | None, Operation | None]]:
        own = [operation for operation in operations if operation.peer == self._rank]
        sends = [operation for operation in own if operation.kind == "send"]
        return list(itertools.zip_longest(sends, [operation for operation in own if operation.kind == "recv"]))

    def _failed(self, record: dict[str, Any], error: BaseException) -> CommunicatorBrokenError:
        return CommunicatorBrokenError(
            f"{self.who}: {describe(record)}: {error if isinstance(error, ButterError) else f'MPI failed: {error}'}",
            sequence=record["n"],
            operation=record["kind"],
            phase="collective",
        )

    def _gave_up(self, how: str) -> CommunicatorBrokenError:
        return PeerLostError(
            f"{self.who}: {how} while in {self.in_flight}",
            lost_ranks=(self._rank,),
            sequence=self.sequence,
            phase="abort",
        )

    def _interrupted(self, record: dict[str, Any], error: BaseException) -> CommunicatorBrokenError:
        return CommunicatorBrokenError(
            f"{self.who}: {describe(record)}: interrupted by {text_of(error)}. Others may have gone on",
            lost_ranks=(self._rank,),
            sequence=record["n"],
            operation=record["kind"],
            phase="collective",
        )

    # -- groups ------------------------------------------------------------------------------------------------------

    def group_start(self) -> None:
        """Begin a group; the lane stays held."""
        LANE.take(self.who, "group", self.deadline)
        try:
            self._check("group")
        except BaseException:
            LANE.give()
            raise
        if self._group is None:
            self._group, self._group_thread = [], threading.get_ident()
        self._group_marks.append(len(self._group))

    def group_end(self) -> None:
        """Submit the group if it is the outermost one."""
        members = self._leave_group("group_end", keep=True)
        try:
            if members:
                self._check("group")
                for operation, _ in members:
                    # What held when it was called may not hold any more.
                    self._admit(operation)
                used = [(operation.stream, owners) for operation, owners in members if owners]
                self._run([operation for operation, _ in members], used)
        finally:
            LANE.give()

    def check_no_group(self, what: str) -> None:
        """Raise ``ValueError`` inside a group of this thread, whose operations are submitted at its end only."""
        if self._group is not None and self._group_thread == threading.get_ident():
            raise ValueError(f"{self.who}: {what} inside a group; end it first")

    def group_discard(self) -> None:
        """Leave a group whose body failed: nothing of it is sent, no number is taken."""
        self._leave_group("group_discard", keep=False)
        LANE.give()

    def _leave_group(self, what: str, *, keep: bool) -> list[tuple[Operation, Owners]]:
        if self._group is None or self._group_thread != threading.get_ident():
            raise ValueError(f"{self.who}: {what} without a group_start of this thread")
        mark = self._group_marks.pop()
        if not keep:
            del self._group[mark:]
        if self._group_marks:
            return []
        members, self._group = self._group, None
        return members

    # -- health and lifecycle ----------------------------------------------------------------------------------------

    def poison(self, cause: CommunicatorBrokenError) -> None:
        """Refuse every later operation with this first cause, tell the peers, then the policy."""
        if self.health.poison(cause):
            if not self.health.closed and not self._ended():
                self._announce(cause)
                self._stop()
            self._on_poison(self)

    def _check(self, what: str) -> None:
        """Raise if no operation is taken."""
        health = self.health
        if health.cause is not None or health.closed or LANE.forked or self._ended():
            self._refuse(what)

    def _refuse(self, what: str) -> None:
        """Raise what keeps operations from being taken."""
        LANE.check_fork(self.who, what)
        if not self.health.closed and self._ended():
            self.health.closed = "ended by MPI.Finalize"
        self.health.check(self.who, what)

    def check(self) -> None:
        """Raise the first cause, also one that a peer has told meanwhile."""
        LANE.check_fork(self.who, "check_async_error")
        self.is_healthy()
        self._check("check_async_error")

    def close(
        self,
        how: str = "closed",
        cause: CommunicatorBrokenError | None = None,
        patience: float = _CLOSE_PATIENCE,
    ) -> None:
        """End this communicator; a second time, it does nothing. With a `cause`, peers are told that it broke.

        An operation that another thread (or the code that a signal handler interrupted) waits in ends by this.
        """
        if self.health.closed or LANE.forked:
            return
        if cause is None and self.in_flight:
            cause = self._gave_up(how)
        if cause is not None:
            self.health.poison(cause)
        self.health.closed = how
        try:
            LANE.take(self.who, "close", patience)
        except ButterError:
            # The thread that holds the lane may be gone for good: what it left half done can only be given up.
            if cause is not None:
                self._announce_aside(cause)
            self._on_poison(self)
            return
        try:
            if not self._ended():
                if cause is not None:
                    self._announce(cause)
                    self._stop()
                self._release_or_tell()
            if cause is not None:
                self._on_poison(self)
        finally:
            self._void()
            LANE.give()

    def _release_or_tell(self) -> None:
        try:
            self._release()
        except BaseException as error:
            # Others may wait for what was not done.
            cause = self._interrupted(control_signature("close", self.sequence, call_site()), error)
            self.health.poison(cause)
            self._announce(cause)
            self._on_poison(self)
            raise

    @abstractmethod
    def _void(self) -> None:
        """Forget what belonged to the communicator that has ended."""

    def is_healthy(self) -> bool:
        """Return whether the next operation would be taken, by what is known now."""
        with LANE.tried() as held:
            if held and self._usable() and self._flight is None:
                record = control_signature(_LISTENING, self.sequence, "is_healthy")
                with contextlib.suppress(CommunicatorBrokenError), self._poisoning(record):
                    self._listen()
        return self._usable()

    def state(self) -> str:
        """Return ``"healthy"``, ``"poisoned"``, or how it was closed."""
        if self._usable():
            return "healthy"
        return self.health.closed or ("poisoned" if self.health.cause is not None else "not usable in this process")

    def _usable(self) -> bool:
        return not (LANE.forked or self.health.closed or self.health.cause is not None or self._ended())
