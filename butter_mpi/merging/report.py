"""What merged recordings tell, for people and as JSON; texts from files are shown on one line, printable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from butter_mpi.findings import ranks_text
from butter_mpi.merging.findings import Behind, Divergence, Group, Merged, Row
from butter_mpi.merging.reading import File, Recording, Shape, Track
from butter_mpi.selftest.console import one_line

__all__ = ["SCHEMA_FILE", "SCHEMA_VERSION", "as_json", "as_text"]

SCHEMA_VERSION = 1
"""Changes with the meaning of any field."""

SCHEMA_FILE = "schema/merged.schema.json"
"""Where the package has the JSON Schema of what ``--json`` prints, which is part of the public face."""

_LONGEST_CAUSE = 1000


# -- JSON --------------------------------------------------------------------------------------------------------------


def as_json(merged: Sequence[Merged], files: Iterable[File]) -> dict[str, Any]:
    """Return the whole as JSON has it.

    Parameters
    ----------
    merged : sequence of Merged
        One a communicator.
    files : iterable of File
        What was read.

    Returns
    -------
    dict
        Plain values, by the published schema.
    """
    return {
        "merged": SCHEMA_VERSION,
        "agreed": all(one.settled for one in merged),
        "files": [{"path": file.path, "recordings": file.recordings, "notes": file.notes} for file in files],
        "communicators": [_communicator(one) for one in merged],
    }


def _communicator(merged: Merged) -> dict[str, Any]:
    first = merged.ranks[0]
    return {
        "key": first.key,
        "name": first.name,
        "world_size": first.world_size,
        "epoch": first.epoch,
        "cause": _cause(merged),
        "common": merged.common,
        "divergence": merged.divergence and _divergence(merged.divergence),
        "behind": merged.behind and _behind(merged.behind),
        "differing_pairs": [_divergence(one) for one in merged.differing_pairs],
        "open_pairs": [_behind(one) for one in merged.open_pairs],
        "missing": [list(run) for run in merged.missing],
        "outdated": list(merged.outdated),
        "ranks": [_rank(one) for one in merged.ranks],
        "rows": [_row(row) for row in merged.rows],
    }


def _cause(merged: Merged) -> str:
    """Return why the first one that knew wrote what it had."""
    told = sorted((one.time, one.cause) for one in merged.ranks if one.cause)
    return told[0][1] if told else ""


def _rank(one: Recording) -> dict[str, Any]:
    last = _last(one.collectives)
    return {
        "rank": one.rank,
        "host": one.host,
        "pid": one.pid,
        "state": one.state,
        "how": one.how,
        "time": one.time,
        "source": one.source,
        "collectives": _track(one.collectives),
        "pairs": _track(one.pairs),
        "exchanges": one.exchanges,
        "last": last and _group(last, ranks=(one.rank,)),
    }


def _track(track: Track) -> dict[str, Any]:
    facts = {"submitted": track.submitted, "kept": len(track), "lost": track.lost}
    return {**facts, "hash": f"{track.hashes[-1]:016x}" if track.hashes else None}


def _last(track: Track) -> Group | None:
    if not len(track):
        return None
    return Group((), track.shapes[-1].text(track.numbers[-1]), track.times[-1], track.shapes[-1])


def _group(group: Group, ranks: Sequence[int] = ()) -> dict[str, Any]:
    submission = group.shape and _submission(group.shape)
    return {"ranks": list(ranks or group.ranks), "text": group.text, "time": group.time, "submission": submission}


def _submission(shape: Shape) -> dict[str, Any]:
    """Return an operation as recordings have it; ``null`` for what it has not."""
    facts = shape._asdict()
    return {"operation": facts.pop("operation"), "dtype": facts.pop("dtype"), "count": facts.pop("elements"), **facts}


def _divergence(one: Divergence) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "number": one.number,
        "exact": one.exact,
        "groups": [_group(group) for group in one.groups],
        "absent": list(one.absent),
        "unknown": list(one.unknown),
        "hint": one.hint,
    }


def _behind(one: Behind) -> dict[str, Any]:
    ahead = [_group(group) for group in one.ahead]
    return {"kind": one.kind, "after": one.after, "ranks": list(one.ranks), "ahead": ahead}


def _row(row: Row) -> dict[str, Any]:
    groups = [_group(group) for group in row.groups]
    return {"number": row.number, "groups": groups, "absent": list(row.absent), "unknown": list(row.unknown)}


# -- text --------------------------------------------------------------------------------------------------------------


def as_text(merged: Sequence[Merged], files: Iterable[File]) -> str:
    """Return the whole for people.

    Parameters
    ----------
    merged : sequence of Merged
        One a communicator.
    files : iterable of File
        What was read.

    Returns
    -------
    str
        Of each communicator who is there, what is wrong, and a table of the numbers around it.
    """
    notes = [f"{one_line(file.path)}: {note}" for file in files for note in file.notes]
    parts = ["\n".join(_lines(one)) for one in merged]
    return "\n\n".join(["\n".join(notes)] * bool(notes) + parts) + "\n"


def _lines(merged: Merged) -> Iterator[str]:
    first = merged.ranks[0]
    size = _some(first.world_size, "rank")
    again = f", after {_some(first.epoch, 'reconnect')}" if first.epoch else ""
    yield f"communicator {one_line(first.name)} ({one_line(first.key)}), {size}{again}"
    if cause := _cause(merged):
        yield f"  broke: {one_line(cause.splitlines()[0], _LONGEST_CAUSE)}"
    yield from (f"  {_who(one)}" for one in merged.ranks)
    if merged.missing:
        runs = ", ".join(f"{one}" if one == two else f"{one}-{two}" for one, two in merged.missing)
        yield f"  not in these files: ranks {runs}"
    if merged.outdated:
        yield f"  only with what came before the others reconnected: {ranks_text(merged.outdated)}"
    yield ""
    yield from _judgement(merged)
    yield ""
    yield from _table(merged)


def _who(one: Recording) -> str:
    state = f"{one.state}{f' ({one_line(one.how)})' if one.how else ''}"
    counts = [_some(track.submitted, what) for track, what in _kinds(one)]
    lost = [f"{_some(track.lost, what)} overwritten" for track, what in _kinds(one) if track.lost]
    last = _last(one.collectives)
    ended = f"; last {one_line(last.text)} at {_time(last.time)}" if last else ""
    host = f"on {one_line(one.host)} (process {one.pid})"
    return f"rank {one.rank} {host}, {state}: {', '.join([*counts, *lost])}{ended}"


def _kinds(one: Recording) -> list[tuple[Track, str]]:
    return [(one.collectives, "collective"), (one.pairs, "send or receive")]


def _some(number: int, what: str) -> str:
    """Return how many there are of something, in words."""
    many = {"send or receive": "sends and receives"}.get(what, f"{what}s")
    return f"{number} {what if number == 1 else many}"


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC"


def _judgement(merged: Merged) -> Iterator[str]:
    """Yield the first divergence, or who is behind, or that there is neither."""
    if merged.divergence:
        yield from _diverged(merged.divergence, "first divergence: ")
    elif merged.behind:
        yield from _stopped(merged.behind)
    yield from (line for one in merged.differing_pairs if one is not merged.divergence for line in _diverged(one, ""))
    yield from (line for one in merged.open_pairs for line in _stopped(one))
    if merged.agreed:
        here = "" if merged.settled else " among the ranks that are here, and of the others nothing is known"
        yield f"no divergence{here}: {_agreed(merged)}"
    elif merged.common is None:
        yield "no number is in the records of all ranks: some have overwritten what others have not come to yet"


def _agreed(merged: Merged) -> str:
    if merged.common is None:
        return "none of the numbers that are left is on all ranks"
    if not merged.common:
        return "no collective was submitted"
    return f"every rank that is here submitted the same {_some(merged.common, 'collective')}"


def _diverged(one: Divergence, begin: str) -> Iterator[str]:
    where = {
        "collective": f"collective number {one.number}",
        "exchange": f"an exchange over the control plane that some left out, after collective number {one.number}",
        "send/recv": f"send and receive number {one.number} of two ranks",
    }[one.kind]
    seen = "" if one.exact else ", or before it: records of that are overwritten"
    yield f"{begin}{where}{seen}"
    yield from _grouped(one.groups)
    if one.absent:
        yield f"  {ranks_text(one.absent)}: not there yet"
    if one.unknown:
        yield f"  {ranks_text(one.unknown)}: overwritten"
    if one.hint:
        yield f"  {one_line(one.hint, _LONGEST_CAUSE)}"


def _stopped(one: Behind) -> Iterator[str]:
    if one.kind == "send/recv":
        yield f"{ranks_text(one.ranks)} has not answered"
    else:
        yield f"behind: {ranks_text(one.ranks)} stopped after collective number {one.after}; others went on"
    yield from _grouped(one.ahead)


def _grouped(groups: Iterable[Group]) -> Iterator[str]:
    for group in groups:
        yield f"  {ranks_text(group.ranks)}: {one_line(group.text)}"


def _table(merged: Merged) -> Iterator[str]:
    """Yield a line for each number and what ranks submitted there; ``>`` before those on which they differ."""
    rows = [("", "number", "ranks", "submitted")]
    for row in merged.rows:
        mark = ">" if len({group.shape and group.shape.signature for group in row.groups}) > 1 else ""
        told = [(group.ranks, group.text) for group in row.groups]
        told += [(row.absent, "-")] * bool(row.absent) + [(row.unknown, "(overwritten)")] * bool(row.unknown)
        rows += [(mark, str(row.number), ranks_text(ranks), one_line(text)) for ranks, text in told]
    if len(rows) == 1:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for mark, number, ranks, text in rows:
        yield f"{mark:1} {number:>{widths[1]}}  {ranks:{widths[2]}}  {text}".rstrip()
