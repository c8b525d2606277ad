"""Preflight records of ranks that never were: what each rank said, for tests of the pure comparison."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from butter_mpi._version import __version__
from butter_mpi.launch import LaunchInfo
from butter_mpi.policy import POLICY
from butter_mpi.record import RECORD_VERSION
from butter_mpi.settings import Settings

__all__ = ["SHA", "device", "library", "make_record", "make_world"]

SHA = "ab" * 32


def device(index: int = 0, **changes: Any) -> dict[str, Any]:
    """What a rank says of its GPU."""
    found = {
        "uuid": f"GPU-00000000-0000-0000-0000-{index:012d}",
        "name": "NVIDIA H200",
        "pci": f"0000:{index:02x}:00.0",
        "ordinal": index,
        "local_rank": index,
        "visible": 8,
        "cuda_visible_devices": None,
    }
    return found | changes


def library(local_rank: int = 0, **changes: Any) -> dict[str, Any]:
    """What a rank says of its NCCL; only local rank 0 has hashed the file."""
    found = {
        "path": "/site/nvidia/nccl/lib/libnccl.so.2",
        "found_via": "wheel nvidia-nccl-cu13",
        "version": 23203,
        "version_text": "2.32.3",
        "size": 343864936,
        "file": "1-2-343864936-4-5",
        "sha256": None if local_rank else SHA,
    }
    return found | changes


def make_record(
    rank: int = 0, world_size: int = 1, /, *, plane: str = "host", env: dict[str, str] | None = None, **changes: Any
) -> dict[str, Any]:
    """A record of a rank with which nothing is wrong; ``changes`` replace fields."""
    nccl = plane == "nccl" and world_size > 1
    variables = {**(POLICY if nccl else {}), **(env or {})}
    record: dict[str, Any] = {
        "record": RECORD_VERSION,
        "package": __version__,
        "rank": rank,
        "world_size": world_size,
        "host": "n01",
        "machine": "n01/boot",
        "pid": 1000 + rank,
        "launch": asdict(LaunchInfo("mpich", world_size, rank, rank, "PMI_SIZE")) | {"malformed": []},
        "settings": asdict(Settings(plane=plane)),
        "plan": None,
        "environment": {name: [value, "environment"] for name, value in variables.items()},
        "policy": {},
        "failures": [],
        "comm_world_size": world_size,
        "comm_world_rank": rank,
        "mpi_library": "MPICH Version:      5.0.2",
        "thread_level": 3,
        "sequence": 0,
        "local_rank": rank,
        "device": device(rank) if nccl else None,
        "device_absent": None,
        "device_error": None,
        "library": library(rank) if nccl else None,
        "library_error": None,
    }
    settings = changes.pop("settings", {})
    return {**record, **changes, "settings": {**record["settings"], **settings}}


def make_world(size: int, *, ranks: dict[int, dict[str, Any]] | None = None, **common: Any) -> list[dict[str, Any]]:
    """Records of ``size`` ranks; ``ranks`` holds what single ones say otherwise."""
    return [make_record(rank, size, **{**common, **(ranks or {}).get(rank, {})}) for rank in range(size)]
