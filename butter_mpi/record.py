"""A rank's preflight record: everything that it can say of itself, collected without ever raising."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from butter_mpi import cuda, library
from butter_mpi._version import __version__
from butter_mpi.checks import Record
from butter_mpi.environment import c_environment, effective_nccl, is_own, kept_value
from butter_mpi.errors import ButterError, CUDAError
from butter_mpi.launch import LaunchInfo
from butter_mpi.policy import check_policy
from butter_mpi.settings import Settings

__all__ = ["RECORD_VERSION", "collect_record", "words"]

RECORD_VERSION = 1
"""Changes with the meaning of any field; ranks with different ones do not compare anything else."""

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def collect_record(
    settings: Settings,
    launch: LaunchInfo,
    rank: int,
    world_size: int,
    *,
    plan: Mapping[str, Any] | None = None,
    failures: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return everything that this rank can say of itself, as plain values.

    It never raises: what cannot be collected is an error text in the record. Device and library are looked at only
    where the plane may need them.

    Parameters
    ----------
    settings : Settings
        What this start was asked for.
    launch : LaunchInfo
        What the launcher's variables claim.
    rank, world_size : int
        This process in its communicator.
    plan : mapping, optional
        The planned first collective.
    failures : sequence of str
        What this rank found wrong itself.
    extra : mapping, optional
        Of ``comm_world_size``, ``comm_world_rank``, ``mpi_library``, ``thread_level``, ``sequence``, ``local_rank``
        what is known.

    Returns
    -------
    dict
        The record; JSON can carry it.
    """
    known = {
        "comm_world_size": world_size,
        "comm_world_rank": rank,
        "mpi_library": "",
        "thread_level": None,
        "sequence": 0,
        "local_rank": launch.local_rank,
        **(extra or {}),
    }
    found_wrong = list(failures)
    env = _attempt(c_environment, dict(os.environ), found_wrong)
    record = {
        "record": RECORD_VERSION,
        "package": __version__,
        "rank": rank,
        "world_size": world_size,
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": os.getpid(),
        "launch": asdict(launch),
        "settings": asdict(settings),
        "plan": None if plan is None else dict(plan),
        "environment": _attempt(lambda: _environment(env), {}, found_wrong),
        "policy": _attempt(lambda: check_policy(env), {}, found_wrong),
        "failures": found_wrong,
        **known,
        **_device(settings, env, known["local_rank"], world_size),
    }
    # Through JSON, so that this record is the same value here as on the ranks that receive it.
    return dict(json.loads(json.dumps(record | _library(settings, env, record), default=str)))


def _attempt(make: Any, otherwise: Any, failures: list[str]) -> Any:
    """No rank may be left waiting by another's exception, whatever it is."""
    try:
        return make()
    except Exception as error:
        failures.append(words(error))
        return otherwise


def words(error: Exception) -> str:
    """Return an error's text on one line."""
    text = error.message if isinstance(error, ButterError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def _machine() -> str:
    """Return what tells this machine (and name space of host names) from every other."""
    try:
        boot = Path(_BOOT_ID).read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"


def _environment(env: Mapping[str, str]) -> dict[str, list[str]]:
    found = sorted(effective_nccl(env).items())
    return {name: [kept_value(name, value), source] for name, (value, source) in found if not is_own(name, value)}


def _device(settings: Settings, env: Mapping[str, str], local_rank: int | None, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"device": None, "device_absent": None, "device_error": None}
    if world_size == 1 or settings.plane == "host":
        return found
    try:
        visible = cuda.devices(env)
        device = cuda.pick_device(local_rank, visible)
    except CUDAError as error:
        return found | {"device_absent" if cuda.device_absent(error) else "device_error": words(error)}
    except Exception as error:
        return found | {"device_error": words(error)}
    place = {"local_rank": local_rank, "visible": len(visible), "cuda_visible_devices": env.get("CUDA_VISIBLE_DEVICES")}
    return found | {"device": device | place}


def _library(settings: Settings, env: Mapping[str, str], record: Record) -> dict[str, Any]:
    """One rank a node hashes the file; where the local rank is unknown, each one does."""
    found: dict[str, Any] = {"library": None, "library_error": None}
    needed = settings.plane == "nccl" or (settings.plane == "auto" and not record["device_absent"])
    if record["world_size"] == 1 or settings.plane == "host" or not needed:
        return found
    try:
        return found | {"library": library.describe(env, hashed=not record["local_rank"])}
    except Exception as error:
        return found | {"library_error": words(error)}
