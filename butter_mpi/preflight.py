"""Preflight: what a rank says of itself, and what all ranks' records mean together; no MPI inside.

Ranks exchange a digest of fixed size each; full records only where the digests show something to tell. Either way
every rank judges the same values by the same pure functions, so the report is the same on every rank.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from butter_mpi import library
from butter_mpi.checks import GENERAL_CHECKS, Record, World, resolve_plane
from butter_mpi.environment import Nature, c_environment, nature
from butter_mpi.findings import Finding, PreflightReport
from butter_mpi.gpu_checks import GPU_CHECKS, known_digests
from butter_mpi.record import RECORD_VERSION, collect_record, words

__all__ = [
    "CHECKS",
    "DIGEST_BYTES",
    "RECORD_VERSION",
    "Finding",
    "PreflightReport",
    "collect_record",
    "complete",
    "digest",
    "judge",
    "needs_full",
    "report_from_digests",
]

CHECKS = (*GENERAL_CHECKS, *GPU_CHECKS)
"""Every check, in the order of the report."""

_DIGEST = struct.Struct("<IIII32s32s16s8s16s16s16s32s")
DIGEST_BYTES = 256
"""The size of every rank's digest, in every version: it begins with the record's version, and zeros fill it up."""

_TELL, _PER_HOST, _DEVICE, _LIBRARY = 1, 2, 4, 8
_FIELDS = "record rank size flags alike warn interfaces host device pci file sha".split()


def _hash(value: Any, size: int) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()[:size]


def _by_nature(record: Record, *natures: Nature) -> dict[str, str]:
    share = record["settings"]["share_gpu"]
    return {n: v for n, (v, _) in record["environment"].items() if nature(n, share) in natures}


def _alike(record: Record) -> list[Any]:
    """Return what must be equal, the file's digest apart (only one rank a node has it)."""
    loaded = record["library"] and [record["library"]["version"], record["library"]["size"]]
    plain = [record[k] for k in ("record", "package", "world_size", "settings", "plan", "sequence")]
    return [*plain, _by_nature(record, Nature.ALIKE), loaded]


def _flags(record: Record) -> int:
    """Whether this record alone has something to tell, and what it has."""
    size = record["world_size"]
    world = World({record["rank"]: record}, size, resolve_plane([record], size))
    trusting = bool(record["library"]) and record["library"]["sha256"] is None
    rows = [c for c in CHECKS if world.plane in c.planes and not (trusting and c.name == "library file")]
    tell = any(f.severity != "info" for c in rows for f in c.find(world))
    flags = _TELL if tell else 0
    flags |= _PER_HOST if record["settings"]["per_host_interfaces"] else 0
    flags |= _DEVICE if record["device"] else 0
    return flags | (_LIBRARY if record["library"] else 0)


def digest(record: Record) -> bytes:
    """Return the digest of a record: the same size on every rank.

    Parameters
    ----------
    record : dict
        What :func:`collect_record` returned.

    Returns
    -------
    bytes
        ``DIGEST_BYTES`` of them.
    """
    device, loaded = record["device"], record["library"]
    return _DIGEST.pack(
        record["record"],
        record["rank"],
        record["world_size"],
        _flags(record),
        _hash(_alike(record), 32),
        _hash([_by_nature(record, Nature.WARN), record["mpi_library"], record["thread_level"]], 32),
        _hash(_by_nature(record, Nature.INTERFACE), 16),
        _hash(record["host"], 8),
        _hash(device["uuid"], 16) if device else b"",
        _hash([record["host"], device["pci"]], 16) if device else b"",
        _hash([record["machine"], loaded["file"]], 16) if loaded else b"",
        bytes.fromhex(loaded["sha256"] or "") if loaded else b"",
    ).ljust(DIGEST_BYTES, b"\0")


def _rows(digests: Sequence[bytes]) -> list[dict[str, Any]]:
    return [dict(zip(_FIELDS, _DIGEST.unpack_from(d), strict=True)) for d in digests]


def _of_one_version(digests: Sequence[bytes]) -> bool:
    return len({d[:4] for d in digests}) == 1


def _file_digests(rows: Sequence[Mapping[str, Any]]) -> dict[bytes, bytes]:
    """Each file (of each machine) that some rank hashed, with its digest."""
    return {row["file"]: row["sha"] for row in rows if any(row["sha"])}


def needs_full(digests: Sequence[bytes]) -> bool:
    """Return whether the digests show anything that the full records must tell.

    Parameters
    ----------
    digests : sequence of bytes
        Every rank's digest, in rank order.

    Returns
    -------
    bool
        The same on every rank, since it is a function of the same values.
    """
    if not _of_one_version(digests):
        return True
    rows = _rows(digests)
    same = ("size", "flags", "alike", "warn")
    if any(len({row[name] for row in rows}) > 1 for name in same) or rows[0]["flags"] & _TELL:
        return True
    if [row["rank"] for row in rows] != list(range(len(rows))) or rows[0]["size"] != len(rows):
        return True
    places = {(row["host"] if row["flags"] & _PER_HOST else b"", row["interfaces"]) for row in rows}
    hosts = {row["host"] if row["flags"] & _PER_HOST else b"" for row in rows}
    return len(places) != len(hosts) or _devices_meet(rows) or _files_differ(rows)


def _devices_meet(rows: Sequence[Mapping[str, Any]]) -> bool:
    having = [row for row in rows if row["flags"] & _DEVICE]
    return any(len({row[name] for row in having}) < len(having) for name in ("device", "pci"))


def _files_differ(rows: Sequence[Mapping[str, Any]]) -> bool:
    known = _file_digests(rows)
    found = {known.get(row["file"]) for row in rows if row["flags"] & _LIBRARY}
    return None in found or len(found) > 1


def complete(record: Record, digests: Sequence[bytes]) -> dict[str, Any]:
    """Return the record with the library's digest, if no rank of this machine has hashed this rank's file.

    To be called between the digests and the full records.

    Parameters
    ----------
    record : dict
        This rank's record.
    digests : sequence of bytes
        Every rank's digest.

    Returns
    -------
    dict
        The record to send.
    """
    loaded = record["library"]
    if not loaded or loaded["sha256"]:
        return dict(record)
    file = _hash([record["machine"], loaded["file"]], 16)
    if _of_one_version(digests) and file in _file_digests(_rows(digests)):
        return dict(record)
    try:
        return {**record, "library": library.describe(c_environment())}
    except Exception as error:
        return {**record, "library": None, "library_error": words(error)}


def judge(records: Sequence[Record]) -> PreflightReport:
    """Return every finding about a start: a pure function of all records.

    Parameters
    ----------
    records : sequence of dict
        Every rank's full record, in rank order.

    Returns
    -------
    PreflightReport
        The same on every rank.
    """
    size = len(records)
    if len({r["record"] for r in records}) > 1:
        world = World(dict(enumerate(records)), size, "solo" if size == 1 else "host")
        return PreflightReport(size, world.plane, tuple(CHECKS[0].find(world)))
    world = World(dict(enumerate(records)), size, resolve_plane(records, size))
    loaded = [r for r in records if r["library"]]
    first = _with_digest((loaded or records)[0], next(iter(known_digests(records).values()), None))
    findings: list[Finding] = []
    for check in CHECKS:
        if world.plane not in check.planes:
            findings.append(_not_here(check.name, world.plane))
        else:
            findings += list(check.find(world)) or [_agreed(check.name, check.says(first))]
    return PreflightReport(size, world.plane, tuple(findings))


def report_from_digests(digests: Sequence[bytes], own_record: Record) -> PreflightReport:
    """Return the report of a start whose digests show nothing to tell.

    Parameters
    ----------
    digests : sequence of bytes
        Every rank's digest, for which :func:`needs_full` is false.
    own_record : dict
        This rank's record; only what is equal on all ranks is used of it.

    Returns
    -------
    PreflightReport
        The same on every rank.
    """
    size = len(digests)
    plane = resolve_plane([own_record], size)
    sha = next(iter(_file_digests(_rows(digests)).values()), b"").hex()
    record = _with_digest(own_record, sha)
    findings = [_agreed(c.name, c.says(record)) if plane in c.planes else _not_here(c.name, plane) for c in CHECKS]
    return PreflightReport(size, plane, tuple(findings))


def _with_digest(record: Record, sha: str | None) -> Record:
    return {**record, "library": {**record["library"], "sha256": sha}} if record["library"] else record


def _agreed(check: str, message: str) -> Finding:
    return Finding(check, "agree", "info", message)


def _not_here(check: str, plane: str) -> Finding:
    return Finding(check, "does not apply", "info", f"not compared on plane {plane}")
