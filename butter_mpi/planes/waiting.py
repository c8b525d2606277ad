"""Waiting for other ranks: warned of when long, ended by the deadline, by a rank that left, or by one that broke."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from butter_mpi import errors
from butter_mpi.collectives import describe
from butter_mpi.control import Control, Pause, Watch, listen_everywhere
from butter_mpi.sentinel.judging import STAY, told_by

__all__ = ["Waiting", "error_from", "farewells", "notice_of"]

_LOG = logging.getLogger("butter_mpi")
_FIRST_WARNING = 5.0
_GRACE = 0.5
_PING_AT = 4.0
_LISTEN_EVERY = 0.5


def notice_of(error: errors.CommunicatorBrokenError) -> dict[str, Any]:
    """Return what peers are told of the first cause."""
    other, epoch = getattr(error, "_other", ("", 0))
    return {
        "error": type(error).__name__,
        "text": error.message,
        "lost": list(error.lost_ranks),
        "n": error.sequence,
        "operation": error.operation,
        "phase": error.phase,
        "elapsed": getattr(error, "elapsed", 0.0),
        "records": {str(rank): text for rank, text in getattr(error, "records", {}).items()},
        "other": other,
        "other_epoch": epoch,
    }


def error_from(who: str, peer: int, notice: Mapping[str, Any]) -> errors.CommunicatorBrokenError:
    """Return a peer's first cause as this rank raises it."""
    kind = getattr(errors, notice["error"], errors.PeerLostError)
    facts = {
        "lost_ranks": tuple(notice["lost"]),
        "sequence": notice.get("n"),
        "operation": notice.get("operation", ""),
        "phase": notice.get("phase", ""),
        "elapsed": notice.get("elapsed", 0.0),
        "records": {int(rank): text for rank, text in notice.get("records", {}).items()},
    }
    known = {name: facts[name] for name in facts if name in kind.FACTS}
    text = notice["text"] if notice.get("here") else told_by(peer, notice["text"])
    # What the watcher says of this very rank begins with its name.
    error: errors.CommunicatorBrokenError = kind(text if text.startswith(who) else f"{who}: {text}", **known)
    if isinstance(error, errors.CollectiveMismatchError):
        error._other = notice.get("other", ""), notice.get("other_epoch", 0)
    return error


def farewells(control: Control, gone: Sequence[int]) -> str:
    """Return who has left, and after which operation."""
    return "; ".join(f"rank {peer} {control.left[peer]['why']}" for peer in gone)


class Waiting:
    """One wait for other ranks, looked at again and again.

    Parameters
    ----------
    control : Control
        Where messages arrive.
    who : str
        This rank, for messages.
    limit : float or None
        The deadline in seconds; ``None`` for a wait that is never late.
    check : callable
        Raises if the communicator was closed or poisoned meanwhile, by another thread or a signal handler.
    unknown : str
        Who is waited for where nobody is missing by name.
    remedy : str
        What to do at the deadline.
    grace : float
        Seconds that data under way gets to arrive after a peer broke, where nobody is missing.
    """

    def __init__(
        self,
        control: Control,
        who: str,
        limit: float | None,
        check: Callable[[], None],
        *,
        unknown: str = "the data of ranks that all came, and are alive",
        remedy: str = "Look at what is missing there, or set a longer collective_deadline",
        grace: float = _GRACE,
    ) -> None:
        self._control, self._who, self._check = control, who, check
        self._unknown, self._remedy, self._grace = unknown, remedy, grace
        self._limit = limit
        self._pause = Pause()
        self.restart()

    @property
    def elapsed(self) -> float:
        """Seconds waited."""
        return self._watch.elapsed

    def facts(self, record: Mapping[str, Any], lost: Sequence[int]) -> dict[str, Any]:
        """Return the facts of an error of this wait."""
        paired = record["kind"] in ("send", "recv")
        return {
            "lost_ranks": tuple(lost),
            "sequence": record["n"],
            "operation": record["kind"],
            "phase": "send/recv" if paired else "collective",
        }

    def text(self, record: Mapping[str, Any]) -> str:
        """Return who waits in what."""
        return f"{self._who}: {describe(record)}"

    def take(self) -> bool:
        """Take messages; returns whether any came."""
        return self._control.pump()

    def restart(self) -> None:
        """Begin the wait anew: data has moved, so whoever is waited for is alive and at it."""
        self._watch = Watch(self._limit)
        self._broken: Watch | None = None
        self._warn_at, self._ask_at, self._listen_at = _FIRST_WARNING, _PING_AT, _LISTEN_EVERY
        self._pinged = False
        self._control.whereabouts.clear()

    def look(self, record: Mapping[str, Any], missing: Mapping[int, Mapping[str, Any]], moved: bool) -> None:
        """Raise what the messages say, warn, and pause if nothing `moved`.

        What a peer sent before it broke counts: look after what came is dealt with. Where nobody is missing, data is
        under way between ranks that have all come, and gets a moment more.

        Parameters
        ----------
        record : mapping
            The signature of the operation that waits, if nobody is missing.
        missing : mapping of int to mapping
            The ranks that have not come, each with the signature that waits for it.
        moved : bool
            Whether anything happened since the last look.

        Raises
        ------
        CommunicatorBrokenError
            A peer broke, a missing peer left, or the deadline is over.
        """
        self._check()
        record = next(iter(missing.values()), record)
        if self._control.broken is not None:
            self._broken = self._broken or Watch(0.0 if missing else self._grace)
            if self._broken.tick():
                raise error_from(self._who, *self._control.broken)
        gone = [p for p in missing if p in self._control.left and not self._control.inbox[p]]
        # Whoever broke has left as well, and says more by the former.
        if gone and self._control.broken is None:
            raise self._lost(missing[gone[0]], gone)
        # Where all have come and data stands still, those that do not answer are the ones.
        absent = list(missing) or self._control.silent()
        if self._watch.tick():
            raise self._overdue(record, absent)
        if self._limit is not None and not missing and not self._pinged and self.elapsed >= _PING_AT:
            self._pinged = True
            self._control.ping()
        if self.elapsed >= self._listen_at:
            self._listen_at += _LISTEN_EVERY
            listen_everywhere()
        if missing and self.elapsed >= self._ask_at:
            self._ask_at += _FIRST_WARNING
            self._control.ask_where(missing)
        if self._limit is not None and self.elapsed >= self._warn_at:
            self._warn_at *= 2
            _LOG.warning("%s: has waited %.0f s for %s", self.text(record), self.elapsed, self._positions(absent))
        if moved:
            self._pause.reset()
        else:
            self._pause()

    def _lost(self, record: Mapping[str, Any], gone: Sequence[int]) -> errors.PeerLostError:
        return errors.PeerLostError(
            f"{self.text(record)}: {farewells(self._control, gone)}. {STAY}",
            **self.facts(record, gone),
        )

    def _overdue(self, record: Mapping[str, Any], missing: Sequence[int]) -> errors.CollectiveTimeoutError:
        return errors.CollectiveTimeoutError(
            f"{self.text(record)}: no answer within {self.elapsed:.1f} s (collective deadline {self._limit:g} s) "
            f"from {self._positions(missing)}. {self._remedy}",
            elapsed=self.elapsed,
            **self.facts(record, missing),
        )

    def _positions(self, missing: Sequence[int]) -> str:
        if not missing:
            return self._unknown
        return ", ".join(f"rank {p} ({self._last_seen(p)})" for p in missing)

    def _last_seen(self, peer: int) -> str:
        record = self._control.seen.get(peer)
        seen = f"last seen at {describe(record)}" if record else "not seen yet"
        # It has not come here because it waits there, perhaps for this rank.
        where = self._control.whereabouts.get(peer)
        return f"{seen}; lately in {where}" if where else seen
