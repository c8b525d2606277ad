"""What a person reads: the head, a line a check, the end; all from rank 0."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

from butter_mpi._version import versions
from butter_mpi.communicator import Communicator
from butter_mpi.findings import grouped, ranks_text
from butter_mpi.policy import POLICY

__all__ = ["all_versions", "check_lines", "ending", "head", "plane_facts", "policy_facts", "transports"]

_MOST_RANKS = 8


def all_versions(mpi: Any) -> dict[str, str | None]:
    """Return every version that a receipt has."""
    library = " ".join(mpi.Get_library_version().strip("\0\n ").split("\n")[0].split(",")[0].split())
    standard = ".".join(map(str, mpi.Get_version()))
    return {**versions(), "mpi_library": library, "mpi_standard": standard, "machine": platform.machine()}


def plane_facts(communicator: Communicator) -> dict[str, str]:
    """Return which data plane was asked for, which one runs, and why."""
    asked = communicator.settings.plane
    if communicator.plane == "solo":
        why = "there is one rank, so nothing is sent"
    elif asked != "auto":
        why = f"{asked} was asked for"
    elif communicator.plane == "host":
        reason = (communicator.records[0]["device_absent"] or "").split(";")[0]
        why = "auto, and no rank has a CUDA device" + (f" ({reason})" if reason else "")
    else:
        why = "auto, and every rank has a CUDA device"
    return {"asked": asked, "ran": communicator.plane, "why": why}


def transports(communicator: Communicator) -> dict[str, list[int]]:
    """Return the transports that NCCL was seen to use, each with its ranks; none on a plane without NCCL."""
    plane: Any = communicator.backend
    return dict(plane.transport) if communicator.plane == "nccl" else {}


def policy_facts(said: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, from each rank's values and what the selftest set there, who set each variable of the policy."""
    rows: list[dict[str, Any]] = []
    for name in POLICY:
        groups: dict[tuple[Any, str], list[int]] = {}
        for rank, one in enumerate(said):
            value = one["values"][name]
            by = "selftest" if name in one["set"] else "nobody" if value is None else "environment"
            groups.setdefault((value, by), []).append(rank)
        rows += [{"name": name, "value": v, "set_by": by, "ranks": ranks} for (v, by), ranks in groups.items()]
    return rows


def _policy_text(rows: Sequence[Mapping[str, Any]], size: int) -> str:
    parts = []
    for row in rows:
        by = {"selftest": "set here, it was unset", "environment": "from the environment"}.get(row["set_by"], "unset")
        where = "" if len(row["ranks"]) == size else f" on {ranks_text(row['ranks'])}"
        parts.append(f"{row['name']}={row['value']} ({by}){where}")
    return ", ".join(parts)


def head(facts: Mapping[str, Any], communicator: Communicator, missing: str) -> str:
    """Return the lines before the checks; `missing` says which element types the plane has not."""
    size, versions_ = communicator.world_size, facts["versions"]
    plane, records = facts["plane"], communicator.records
    hosts: dict[str, list[int]] = {}
    for rank, record in enumerate(records):
        hosts.setdefault(record["host"], []).append(rank)
    shown = [f"{host} ({ranks_text(ranks)})" for host, ranks in list(hosts.items())[:_MOST_RANKS]]
    rest = f" and {len(hosts) - _MOST_RANKS} more" if len(hosts) > _MOST_RANKS else ""
    rows = [
        ("plane", f"{plane['ran']}: {plane['why']}"),
        ("world", f"{size} rank{'s' if size > 1 else ''} on {', '.join(shown)}{rest}"),
        ("launcher", records[0]["launch"]["launcher"]),
        ("MPI", f"{versions_['mpi_library']}, MPI {versions_['mpi_standard']}, mpi4py {versions_['mpi4py']}"),
        ("Python", f"{versions_['python']}, numpy {versions_['numpy']}"),
        ("library", _library_text(records[0])),
        *(_device_rows(facts, communicator, missing) if communicator.plane == "nccl" else []),
        ("policy", _policy_text(facts["policy"], size)),
        ("seed", str(facts["seed"])),
    ]
    lines = [f"butter_mpi {versions_['butter_mpi']} selftest", *(f"  {name:9} {text}" for name, text in rows)]
    if communicator.preflight.warnings:
        lines.append(communicator.preflight.text())
    return "\n".join(lines)


def _device_rows(facts: Mapping[str, Any], communicator: Communicator, missing: str) -> list[tuple[str, str]]:
    rows = [("GPU", _gpu_text(communicator.records))]
    found = ", ".join(f"{kind} on {ranks_text(ranks)}" for kind, ranks in facts["found"].items())
    required = communicator.settings.require_transport
    text = f"{found or 'not known: the log of NCCL names no channel'}{f' ({required} is required)' if required else ''}"
    rows.append(("transport", text))
    if communicator.settings.check == "strict":
        rows.append(("check", "strict: ranks compare each operation before it is submitted (--faults needs that)"))
    return rows + ([("types", missing)] if missing else [])


def _gpu_text(records: Sequence[Mapping[str, Any]]) -> str:
    devices = [record["device"] for record in records]
    said = grouped([(rank, f"{d['name']} {d['uuid']} cuda:{d['ordinal']}") for rank, d in enumerate(devices)])
    shared = len(devices) - len({device["uuid"] for device in devices})
    return f"{said}; {'ranks SHARE a GPU (share_gpu)' if shared else 'no GPU is shared'}"


def _library_text(record: Mapping[str, Any]) -> str:
    library = record["library"]
    if library is None:
        return f"none{': ' + record['library_error'] if record['library_error'] else ' (this plane needs no libnccl)'}"
    return f"NCCL {library['version_text']} from {library['path']} ({library['found_via']})"


def check_lines(check: Mapping[str, Any]) -> str:
    """Return the line of a check and, where it failed, a line for each fact of each failing rank."""
    word = {"passed": "ok", "failed": "FAILED", "not run": "not run"}[check["outcome"]]
    text = check["reason"] or check["title"]
    lines = [f"{check['number']:3} {check['id']:15} {word:8} {check['seconds']:7.2f} s  {text}"]
    lines += [f"      rank {row['rank']}: {fact}" for row in check["failures"] for fact in row["facts"]]
    return "\n".join(lines)


def ending(status: str, checks: Sequence[Mapping[str, Any]], plane: str, size: int, seconds: float) -> str:
    """Return the last line."""
    done = [c for c in checks if c["outcome"] != "not run"]
    where = f"plane {plane}, {size} rank{'s' if size > 1 else ''}, {seconds:.1f} s"
    if status == "passed":
        first = f"passed: {len(done)} checks, {where}"
    else:
        failed = [c["id"] for c in checks if c["outcome"] == "failed"]
        first = f"FAILED: {len(failed)} of {len(done)} checks ({', '.join(failed)}), {where}"
        first += "; stopped there, the communicator broke" if status == "broken" else ""
    if size > 1:
        return first
    return f"{first}\nworld size 1: no communication was tested; start two ranks or more with mpirun -np 2 or srun -n 2"
