"""Settings: keyword arguments, else ``BUTTER_MPI_*`` variables, else defaults; each checked by name."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["ACTIONS", "CHECKS", "PLANES", "TRANSPORTS", "WATCHES", "FaultPolicy", "Settings", "own_variable", "shown"]

PLANES = ("auto", "nccl", "host")
CHECKS = ("light", "strict")
ACTIONS = ("raise", "abort", "shrink")
WATCHES = ("on", "debugger", "node", "off")
TRANSPORTS = ("P2P", "SHM", "NET/IB", "NET/Socket")
_LONGEST_SHOWN = 120
_PREFIX, _OF_TESTS = "BUTTER_MPI_", "BUTTER_MPI_TEST_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def shown(value: Any) -> str:
    """Return a value for a message: cut, and never an error of its own.

    Parameters
    ----------
    value : object
        What was given.

    Returns
    -------
    str
        Its ``repr``, or its type where it has none.
    """
    try:
        text = repr(value)
    except Exception:
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}... ({len(text)} characters)"


def own_variable(name: str) -> bool:
    """Return whether a variable is taken for a setting of butter_mpi.

    Parameters
    ----------
    name : str
        Its name.

    Returns
    -------
    bool
        Whether a start reads it, or refuses it.
    """
    return name.startswith(_PREFIX) and not name.startswith(_OF_TESTS)


def _unknown(name: str, known: Sequence[str]) -> str:
    """Return the message on a variable that there is not."""
    # Not above: every start would pay for it.
    import difflib

    told, meant = shown(name).strip("'"), difflib.get_close_matches(name, known, 1, 0.85)
    close = f" (did you mean {meant[0]}?)" if meant else ""
    return f"{told} is not a variable of butter_mpi{close}; known are {', '.join(known)}"


def _number(name: str, value: Any, low: float, high: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not low <= number <= high:
        raise ValueError(f"{name} must be a number of seconds from {low:g} to {high:g}; got {shown(value)}")
    return number


def _choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {shown(value)}")
    return str(value)


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE + _FALSE:
        return value.lower() in _TRUE
    raise ValueError(f"{name} must be one of {', '.join(_TRUE + _FALSE)}; got {shown(value)}")


def _path(name: str, value: Any) -> str | None:
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or "\0" in path:
        raise ValueError(f"{name} must be a path; got {shown(value)}")
    return path or None


def _interfaces(name: str, value: Any) -> str | None:
    if not isinstance(value, str) or not all(re.fullmatch(r"[^\s,|/]{1,15}", one) for one in re.split("[,|]", value)):
        raise ValueError(
            f"{name} must name network interfaces, with commas, or bars between names of one network on different "
            f"hosts (eth0,ib0|hsn0); got {shown(value)}"
        )
    return value


def _transport(name: str, value: Any) -> str | None:
    return None if value is None else _choice(name, value, TRANSPORTS)


@dataclass(frozen=True, slots=True)
class FaultPolicy:
    """How long to wait, and what a fault does.

    Parameters
    ----------
    start_deadline : float, default 60
        Seconds for the whole start, 1 to 3600; every MPI wait in it is bounded by what is left.
    collective_deadline : float, default 120
        Seconds that an operation waits for the other ranks, 10 to 300. A wait is reported from 5 s on.
    action : {"raise", "abort", "shrink"}, default "raise"
        What a poisoned communicator does: raise in the caller, or end the job with ``MPI_Abort``. ``shrink``: raise as
        well, where a start has made sure that survivors can go on by ``Communicator.shrink``; it is refused otherwise.

    Raises
    ------
    ValueError
        A value out of its range; the message names the field and the range.
    """

    start_deadline: float = 60.0
    collective_deadline: float = 120.0
    action: str = "raise"

    def __post_init__(self) -> None:
        object.__setattr__(self, "start_deadline", _number("start_deadline", self.start_deadline, 1, 3600))
        object.__setattr__(
            self, "collective_deadline", _number("collective_deadline", self.collective_deadline, 10, 300)
        )
        _choice("action", self.action, ACTIONS)


@dataclass(frozen=True, slots=True)
class Settings:
    """What one ``init`` was asked for, complete and checked.

    Every field can be given as an argument of ``init`` or as the variable ``BUTTER_MPI_`` + its name in capitals.
    """

    plane: str = "auto"
    share_gpu: bool = False
    per_host_interfaces: bool = False
    require_transport: str | None = None
    check: str = "light"
    start_deadline: float = 60.0
    collective_deadline: float = 120.0
    action: str = "raise"
    watch: str = "on"
    watch_interface: str | None = None
    verdict_file: str | None = None
    recorder_file: str | None = None

    @classmethod
    def resolve(cls, env: Mapping[str, str], fault: FaultPolicy | None = None, **arguments: Any) -> Settings:
        """Return checked settings from arguments (``None`` means not given), variables and defaults.

        Parameters
        ----------
        env : mapping of str to str
            The environment to read ``BUTTER_MPI_*`` from.
        fault : FaultPolicy, optional
            Deadlines and action; wins over variables.
        **arguments
            Values of ``init`` by field name.

        Returns
        -------
        Settings
            The settings.

        Raises
        ------
        TypeError
            `fault` is no :class:`FaultPolicy`.
        ValueError
            An unknown ``BUTTER_MPI_*`` variable, or a value out of its range, also of a variable over which an
            argument wins; the message names both.
        """
        if fault is not None and not isinstance(fault, FaultPolicy):
            raise TypeError(f"fault must be a FaultPolicy; got {shown(fault)}")
        checks: dict[str, Callable[[str, Any], Any]] = {
            "plane": lambda n, v: _choice(n, v, PLANES),
            "share_gpu": _flag,
            "per_host_interfaces": _flag,
            "require_transport": _transport,
            "check": lambda n, v: _choice(n, v, CHECKS),
            "start_deadline": lambda n, v: _number(n, v, 1, 3600),
            "collective_deadline": lambda n, v: _number(n, v, 10, 300),
            "action": lambda n, v: _choice(n, v, ACTIONS),
            "watch": lambda n, v: _choice(n, v, WATCHES),
            "watch_interface": _interfaces,
            "verdict_file": _path,
            "recorder_file": _path,
        }
        known = {_PREFIX + f.name.upper() for f in fields(cls)}
        for name in sorted(env):
            if own_variable(name) and name not in known:
                raise ValueError(_unknown(name, sorted(known)))
        given = {k: v for k, v in arguments.items() if v is not None}
        if fault is not None:
            given |= {f.name: getattr(fault, f.name) for f in fields(fault)}
        values = {}
        for name, check in checks.items():
            variable = _PREFIX + name.upper()
            if env.get(variable):
                values[name] = check(variable, env[variable])
            if name in given:
                values[name] = check(name, given[name])
        for name in ("verdict_file", "recorder_file"):
            if values.get(name) and values.get("watch") == "off":
                raise ValueError(f"{name} needs the watcher, which writes it; got watch 'off'")
        return cls(**values)
