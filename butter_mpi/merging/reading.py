"""Recorder files, read line by line and checked: they are data, and anybody may have written them."""

from __future__ import annotations

import json
import math
import os
import stat
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from butter_mpi.recorder import COLLECTIVES, PAIRS
from butter_mpi.recording import RECORDING_VERSION, STATES
from butter_mpi.selftest.console import one_line
from butter_mpi.settings import shown

__all__ = ["Exchange", "File", "Gathered", "Recording", "Shape", "Track", "UnusableError", "parse", "read"]

_LONGEST_LINE = 1 << 24
_MOST_RECORDINGS = 1 << 14
_MOST_RANKS = 1 << 20
_LARGEST = 2**63 - 1
_LATEST = 1e11
_MOST_DAMAGED = 3


class UnusableError(Exception):
    """A file cannot be used; the message is one line that names it and says why."""


class Shape(NamedTuple):
    """What is the same each time that one operation is submitted."""

    operation: str
    dtype: str
    elements: int
    op: str | None
    root: int | None
    peer: int | None
    site: str
    stream: int

    @property
    def signature(self) -> tuple[str, str, int, str | None, int | None]:
        """What ranks compare."""
        return self[:5]

    def text(self, number: int) -> str:
        """Return it as messages name it."""
        facts = self.dtype if self.operation.endswith("_v") else f"{self.dtype} x {self.elements}"
        facts += f", {self.op}" if self.op is not None else ""
        facts += f", root {self.root}" if self.root is not None else ""
        facts += f", peer {self.peer}" if self.peer is not None else ""
        return f"{self.operation} #{number} ({facts}) at {self.site}"


class Track:
    """The submissions of one kind that a recording has, oldest first, in little memory.

    Parameters
    ----------
    floor, submitted, lost : int
        The number that ranks agreed to go on after, the number of the newest, and how many were overwritten.
    """

    def __init__(self, floor: int, submitted: int, lost: int) -> None:
        self.floor, self.submitted, self.lost = floor, submitted, lost
        self.numbers, self.times, self.hashes = array("q"), array("d"), array("Q")
        self.shapes: list[Shape] = []

    def __len__(self) -> int:
        return len(self.shapes)

    @property
    def oldest(self) -> int | None:
        """The number of the oldest that is kept."""
        return self.numbers[0] if self.numbers else None

    def find(self, number: int) -> int | None:
        """Return the place of a number, if it is there; of collectives only, whose numbers ascend."""
        place = bisect_left(self.numbers, number)
        return place if place < len(self.numbers) and self.numbers[place] == number else None


@dataclass(frozen=True, slots=True)
class Exchange:
    """The newest exchange over the control plane: the how many-th it is, and after which collective it came."""

    number: int
    operation: str
    after: int
    site: str
    time: float

    def text(self) -> str:
        """Return it as messages name it."""
        return f"{self.operation} after collective #{self.after} at {self.site}"


@dataclass(frozen=True, slots=True)
class Recording:
    """What one rank's recorder held."""

    key: str
    name: str
    rank: int
    world_size: int
    host: str
    pid: int
    state: str
    how: str
    cause: str
    time: float
    epoch: int
    collectives: Track
    pairs: Track
    exchanges: int
    exchange: Exchange | None
    source: str

    @property
    def length(self) -> tuple[int, ...]:
        """By which the longer of two recordings of one rank is known."""
        submitted = self.collectives.submitted + self.pairs.submitted + self.exchanges
        return self.epoch, submitted, len(self.collectives) + len(self.pairs), STATES.index(self.state)


@dataclass(slots=True)
class File:
    """What came of one file: how many recordings, and what of it could not be used."""

    path: str
    recordings: int = 0
    notes: list[str] = field(default_factory=list)


# -- the form ----------------------------------------------------------------------------------------------------------

_Rule = Callable[[Any], str]
_Rules = dict[str, _Rule]


def _whole(low: int, high: int) -> _Rule:
    text = f"must be a whole number from {low} to {high}"
    return lambda value: "" if type(value) is int and low <= value <= high else text


def _text(longest: int, least: int = 0) -> _Rule:
    text = f"must be a text of {least} to {longest} characters"
    return lambda value: "" if type(value) is str and least <= len(value) <= longest else text


def _number(value: Any) -> str:
    fine = type(value) in (int, float) and 0 <= value <= _LATEST and math.isfinite(value)
    return "" if fine else f"must be a number of seconds from 0 to {_LATEST:g}"


def _either(*allowed: Any) -> _Rule:
    text = f"must be one of {', '.join(map(str, allowed))}"
    return lambda value: "" if type(value) in map(type, allowed) and value in allowed else text


def _or_none(rule: _Rule) -> _Rule:
    return lambda value: "" if value is None else rule(value) + " or null" * bool(rule(value))


def _hash(value: Any) -> str:
    fine = type(value) is str and len(value) == 16 and not set(value) - set("0123456789abcdef")
    return "" if fine else "must be 16 hexadecimal digits"


def _object(value: Any) -> str:
    return "" if type(value) is dict else "must be an object"


def _list(longest: int) -> _Rule:
    text = f"must be a list of at most {longest}"
    return lambda value: "" if type(value) is list and len(value) <= longest else text


_INDEX, _COUNT, _WORD, _SITE = _whole(0, _LARGEST), _whole(0, 2**64 - 1), _text(64, 1), _text(300)
_RANK = _whole(0, _MOST_RANKS - 1)
_RECORDING: _Rules = {
    "recording": _either(RECORDING_VERSION),
    "communicator": _object,
    "world_size": _whole(1, _MOST_RANKS),
    "host": _text(300),
    "rank": _RANK,
    "pid": _whole(1, _LARGEST),
    "state": _either(*STATES),
    "how": _text(1000),
    "cause": _text(10_000),
    "time": _number,
    "epoch": _whole(0, 2**32 - 1),
    "collectives": _object,
    "pairs": _object,
    "exchanges": _object,
}
_COMMUNICATOR: _Rules = {"key": _text(300, 1), "name": _text(10_000)}
_TRACK: _Rules = {"floor": _INDEX, "submitted": _INDEX, "lost": _INDEX}
_OPERATION: _Rules = {
    "number": _INDEX,
    "operation": _WORD,
    "dtype": _WORD,
    "count": _COUNT,
    "bytes": _whole(0, 2**70),
    "stream": _COUNT,
    "site": _SITE,
    "time": _number,
}
_COLLECTIVE: _Rules = {**_OPERATION, "op": _or_none(_WORD), "root": _or_none(_whole(0, 2**32 - 1)), "hash": _hash}
_PAIR: _Rules = {**_OPERATION, "peer": _whole(0, 2**24 - 1), "position": _INDEX}
_EXCHANGE: _Rules = {"number": _INDEX, "operation": _WORD, "after": _INDEX, "site": _SITE, "time": _number}


def _check(value: Any, rules: _Rules, where: str) -> None:
    """Raise ``ValueError`` where an object has not exactly these fields, each as its rule says."""
    if type(value) is not dict:
        raise ValueError(f"{where or 'the whole'} must be an object; got {shown(value)}")
    prefix = f"{where}." if where else ""
    for name, rule in rules.items():
        if name not in value:
            raise ValueError(f"{prefix}{name} is missing")
        if wrong := rule(value[name]):
            raise ValueError(f"{prefix}{name} {wrong}; got {shown(value[name])}")
    if len(value) > len(rules):
        raise ValueError(f"{prefix}{shown(next(name for name in value if name not in rules))} is not known")


def _track(value: Mapping[str, Any], rules: _Rules, most: int, where: str) -> Track:
    _check(value, {**_TRACK, "records": _list(most)}, where)
    track, shapes, last = Track(value["floor"], value["submitted"], value["lost"]), dict[Shape, Shape](), -1
    ascending = "hash" if "hash" in rules else "position"
    for place, record in enumerate(value["records"]):
        here = f"{where}.records[{place}]"
        _check(record, rules, here)
        number = record["number" if ascending == "hash" else "position"]
        if not max(last, track.floor if ascending == "hash" else 0) < number <= track.submitted:
            raise ValueError(f"{here} has the number {number}, after {last}, of {track.submitted} in all")
        last = number
        facts = (record.get(name) for name in ("operation", "dtype", "count", "op", "root", "peer", "site", "stream"))
        shape = Shape(*facts)
        track.shapes.append(shapes.setdefault(shape, shape))
        track.numbers.append(record["number"])
        track.times.append(record["time"])
        if "hash" in record:
            track.hashes.append(int(record["hash"], 16))
    return track


def parse(value: Any, source: str) -> Recording:
    """Return the recording that `value`, as it came from JSON, is.

    Parameters
    ----------
    value : object
        Of any form.
    source : str
        Where it comes from, for messages.

    Returns
    -------
    Recording
        It.

    Raises
    ------
    ValueError
        It is none; the message names the first wrong field.
    """
    version = value.get("recording") if type(value) is dict else None
    if type(version) is int and version != RECORDING_VERSION:
        raise ValueError(f"it is a recording of version {version}; this butter_mpi reads version {RECORDING_VERSION}")
    _check(value, _RECORDING, "")
    _check(value["communicator"], _COMMUNICATOR, "communicator")
    if value["rank"] >= value["world_size"]:
        raise ValueError(f"rank is {value['rank']}, of {value['world_size']} ranks")
    exchanges = value["exchanges"]
    _check(exchanges, {"submitted": _INDEX, "records": _list(1)}, "exchanges")
    for record in exchanges["records"]:
        _check(record, _EXCHANGE, "exchanges.records[0]")
    own = ("rank", "world_size", "host", "pid", "state", "how", "cause", "time", "epoch")
    return Recording(
        **value["communicator"],
        **{name: value[name] for name in own},
        collectives=_track(value["collectives"], _COLLECTIVE, COLLECTIVES, "collectives"),
        pairs=_track(value["pairs"], _PAIR, PAIRS, "pairs"),
        exchanges=exchanges["submitted"],
        exchange=Exchange(**exchanges["records"][0]) if exchanges["records"] else None,
        source=source,
    )


# -- files -------------------------------------------------------------------------------------------------------------


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


class Gathered:
    """Recordings of many files: of each rank of each communicator the longest, as few as can be kept.

    Parameters
    ----------
    paths : iterable of str
        The files.

    Attributes
    ----------
    files : list of File
        What came of each.
    problems : list of str
        Why files cannot be used, a line each; empty: all can.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self.files: list[File] = []
        self.problems: list[str] = []
        self._kept: dict[str, dict[int, Recording]] = {}
        self._count = 0
        for path in paths:
            file = File(path)
            self.files.append(file)
            try:
                for recording in read(file):
                    self._keep(recording)
            except UnusableError as error:
                self.problems.append(str(error))

    def _keep(self, recording: Recording) -> None:
        ranks = self._kept.setdefault(recording.key, {})
        for other in list(ranks.values())[:1]:
            if (recording.world_size, recording.name) != (other.world_size, other.name):
                raise UnusableError(
                    f"{recording.source}: communicator {one_line(recording.key)} has {recording.world_size} ranks and "
                    f"the name {one_line(recording.name)} here, {other.world_size} and {one_line(other.name)} in "
                    f"{other.source}"
                )
        before = ranks.get(recording.rank)
        self._count += before is None
        if self._count > _MOST_RECORDINGS:
            raise UnusableError(f"{recording.source}: more than {_MOST_RECORDINGS} ranks in all: merge fewer at a time")
        if before is None or recording.length > before.length:
            ranks[recording.rank] = recording

    def communicators(self) -> list[list[Recording]]:
        """Return the recordings of each communicator, in the order in which they came, by rank."""
        return [[ranks[rank] for rank in sorted(ranks)] for ranks in self._kept.values()]


def read(file: File) -> Iterator[Recording]:
    """Yield the recordings of a file; what is cut off or damaged is noted there.

    Parameters
    ----------
    file : File
        Its path; takes what came of it.

    Yields
    ------
    Recording
        One a line.

    Raises
    ------
    UnusableError
        It cannot be read, has no recording, or something else.
    """
    name = one_line(file.path)
    damaged: list[str] = []
    try:
        for number, line in _lines(file.path):
            try:
                value = json.loads(line, parse_constant=_no_number)
            except (ValueError, RecursionError) as error:
                damaged.append(f"line {number} ({len(line)} bytes) is not JSON: {one_line(str(error))}")
                continue
            try:
                recording = parse(value, f"{name}, line {number}")
            except ValueError as error:
                raise UnusableError(f"{name}: line {number} is not a recording: {one_line(str(error))}") from None
            file.recordings += 1
            yield recording
    except OSError as error:
        raise UnusableError(f"{name} cannot be read: {error.strerror}") from None
    except _TooLongError as error:
        raise UnusableError(f"{name}: {error}") from None
    if not file.recordings:
        raise UnusableError(f"{name}: no recording in it can be used: {'; '.join(damaged[:1]) or 'it is empty'}")
    more = f"; and {len(damaged) - _MOST_DAMAGED} more" if len(damaged) > _MOST_DAMAGED else ""
    if damaged:
        said = "; ".join(damaged[:_MOST_DAMAGED])
        file.notes.append(f"{said}{more}; cut off or damaged. The other {file.recordings} recordings were used")


class _TooLongError(Exception):
    """A line is longer than any recording."""


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    try:
        mode = os.stat(path).st_mode
    except ValueError:
        raise OSError(None, "its name has a zero character") from None
    if not stat.S_ISREG(mode):
        raise OSError(None, "it is a folder" if stat.S_ISDIR(mode) else "it is no regular file")
    with open(path, "rb") as opened:
        number = 0
        while line := opened.readline(_LONGEST_LINE + 1):
            number += 1
            if len(line) > _LONGEST_LINE:
                raise _TooLongError(f"line {number} has more than {_LONGEST_LINE >> 20} MiB, and so is no recording")
            if line.strip():
                yield number, line
