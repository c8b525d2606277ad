"""Waiting for other ranks: warned of when long, ended by the deadline, by a rank that left, or by one that broke."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from butter_mpi import errors
from butter_mpi.collectives import describe
from butter_mpi.control import Control, Pause, Watch
from butter_mpi.findings import ranks_text

__all__ = ["Waiting", "notice_of"]

_LOG = logging.getLogger("butter_mpi")
_FIRST_WARNING = 5.0
_LONGEST_NOTICE = 800


def notice_of(error: errors.CommunicatorBrokenError) -> dict[str, Any]:
    """Return what peers are told of the first cause."""
    return {
        "error": type(error).__name__,
        "text": error.message[:_LONGEST_NOTICE],
        "lost": list(error.lost_ranks),
        "n": error.sequence,
        "operation": error.operation,
        "phase": error.phase,
    }


def error_from(who: str, peer: int, notice: Mapping[str, Any]) -> errors.CommunicatorBrokenError:
    """Return a peer's first cause as this rank raises it."""
    kind = getattr(errors, notice["error"], errors.PeerLostError)
    facts = {
        "lost_ranks": tuple(notice["lost"]),
        "sequence": notice.get("n"),
        "operation": notice.get("operation", ""),
        "phase": notice.get("phase", ""),
    }
    error: errors.CommunicatorBrokenError = kind(f"{who}: told by rank {peer}: {notice['text']}", **facts)
    return error


class Waiting:
    """One wait for other ranks, looked at again and again.

    Parameters
    ----------
    control : Control
        Where messages arrive.
    who : str
        This rank, for messages.
    record : mapping
        The signature of the operation that waits.
    limit : float or None
        The deadline in seconds; ``None`` for a wait that is never late.
    grace : float
        Seconds without progress after which a peer's failure ends this wait too.
    """

    def __init__(
        self, control: Control, who: str, record: Mapping[str, Any], limit: float | None, grace: float = 0.0
    ) -> None:
        self._control, self._who, self._record = control, who, record
        self._watch = Watch(limit)
        self._grace = grace
        self._broken: Watch | None = None
        self._pause = Pause()
        self._warn_at = _FIRST_WARNING

    @property
    def elapsed(self) -> float:
        """Seconds waited."""
        return self._watch.elapsed

    def facts(self, lost: Sequence[int]) -> dict[str, Any]:
        """Return the facts of an error of this wait."""
        paired = self._record["kind"] in ("send", "recv")
        return {
            "lost_ranks": tuple(lost),
            "sequence": self._record["n"],
            "operation": self._record["kind"],
            "phase": "send/recv" if paired else "collective",
        }

    def text(self) -> str:
        """Return who waits in what."""
        return f"{self._who}: {describe(self._record)}"

    def take(self) -> bool:
        """Take messages; returns whether any came."""
        return self._control.pump()

    def look(self, missing: Sequence[int], moved: bool) -> None:
        """Raise what the messages say, warn, and pause if nothing `moved`.

        What a peer sent before it broke counts: look after what came is dealt with.

        Raises
        ------
        CommunicatorBrokenError
            A peer broke, a missing peer left, or the deadline is over.
        """
        if self._control.broken is not None:
            self._broken = self._broken or Watch(self._grace)
            if self._broken.tick():
                raise error_from(self._who, *self._control.broken)
        gone = [p for p in missing if p in self._control.left and not self._control.inbox[p]]
        if gone:
            raise self.lost(gone)
        if self._watch.tick():
            raise self._overdue(missing)
        if self._watch.limit is not None and self.elapsed >= self._warn_at:
            self._warn_at *= 2
            _LOG.warning("%s: has waited %.0f s for %s", self.text(), self.elapsed, self._positions(missing))
        if moved:
            self._pause.reset()
        else:
            self._pause()

    def restart(self) -> None:
        """Begin the wait anew: data has moved, so whoever is waited for is alive and at it."""
        self._watch, self._broken = Watch(self._watch.limit), None
        self._warn_at = _FIRST_WARNING

    def lost(self, gone: Sequence[int]) -> errors.PeerLostError:
        """Return the error for ranks that left while this one counts on them."""
        reasons = "; ".join(f"rank {p} {self._control.left[p]['why']}" for p in gone)
        return errors.PeerLostError(
            f"{self.text()}: {ranks_text(gone)} left: {reasons}. Every rank must submit the same operations before "
            "one closes",
            **self.facts(gone),
        )

    def _overdue(self, missing: Sequence[int]) -> errors.CollectiveTimeoutError:
        return errors.CollectiveTimeoutError(
            f"{self.text()}: no answer within {self.elapsed:.1f} s (collective deadline {self._watch.limit:g} s) from "
            f"{self._positions(missing)}. Look at what that rank does, or set a longer collective_deadline",
            elapsed=self.elapsed,
            **self.facts(missing),
        )

    def _positions(self, missing: Sequence[int]) -> str:
        if not missing:
            return "the data of ranks that all came"
        return ", ".join(f"rank {p} ({self._last_seen(p)})" for p in missing)

    def _last_seen(self, peer: int) -> str:
        record = self._control.seen.get(peer)
        return f"last seen at {describe(record)}" if record else "not seen yet"
