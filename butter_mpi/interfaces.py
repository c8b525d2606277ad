"""The network interfaces of this process's name space, asked of the kernel, and which of them NCCL would take."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["interfaces", "named_interface", "nccl_interfaces"]

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_LOOPBACK_6 = "::1"
_AUTOMATIC = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")


def _answer(request: int, name: str) -> bytes | None:
    """Return what the kernel says of an interface of this name space; /sys may be that of another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        return bytes(fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15])))
    return None


def _flags(name: str) -> int:
    reply = _answer(_SIOCGIFFLAGS, name)
    return 0 if reply is None else int(struct.unpack_from("H", reply, 16)[0])


def _ipv4(name: str) -> list[str]:
    reply = _answer(_SIOCGIFADDR, name)
    return [] if reply is None else [socket.inet_ntoa(reply[20:24])]


def _ipv6(name: str) -> list[str]:
    with contextlib.suppress(OSError):
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        return [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])) for row in rows if row[5] == name]
    return []


def interfaces() -> list[dict[str, Any]]:
    """Return the network interfaces of this name space.

    Returns
    -------
    list of dict
        ``name``, ``up``, ``running`` (it has a carrier) and ``addresses`` of each, in the kernel's order.
    """
    found = []
    for _, name in socket.if_nameindex():
        flags = _flags(name)
        state = {"up": bool(flags & _IFF_UP), "running": bool(flags & _IFF_RUNNING)}
        found.append({"name": name, **state, "addresses": _ipv4(name) + _ipv6(name)})
    return found


def _matches(name: str, pattern: str) -> bool:
    """Whether NCCL takes an interface by this list of prefixes; ``^`` refuses them, ``=`` takes whole names."""
    refused, pattern = pattern.startswith("^"), pattern.removeprefix("^")
    exact, pattern = pattern.startswith("="), pattern.removeprefix("=")
    words = [word.split(":")[0] for word in pattern.split(",") if word]
    return any(name == word if exact else name.startswith(word) for word in words) != refused


def nccl_interfaces(found: Sequence[Mapping[str, Any]], names: str | None) -> tuple[list[str], str]:
    """Return the interfaces that NCCL would consider for its sockets, the one it takes first, and the rule.

    Parameters
    ----------
    found : sequence of mapping
        What :func:`interfaces` returned.
    names : str or None
        The value of ``NCCL_SOCKET_IFNAME``.

    Returns
    -------
    names, rule : list of str, str
        The interfaces that are up, have a carrier and an address that others can reach, and why these.
    """
    # The kernel tells all IPv4 addresses before the first of IPv6, and NCCL goes by that order.
    rows = sorted(found, key=lambda row: not any("." in address for address in row["addresses"]))
    usable = [row["name"] for row in rows if row["up"] and row["running"] and set(row["addresses"]) - {_LOOPBACK_6}]
    if names:
        return [name for name in usable if _matches(name, names)], f"NCCL_SOCKET_IFNAME={names}"
    for pattern in _AUTOMATIC:
        chosen = [name for name in usable if _matches(name, pattern)]
        if chosen:
            return chosen, f"NCCL_SOCKET_IFNAME is unset: automatic choice ({pattern})"
    return [], "NCCL_SOCKET_IFNAME is unset: no interface is up and has a carrier and an address"


def named_interface(found: Sequence[Mapping[str, Any]], names: str | None) -> str | None:
    """Return the interface that the user has told NCCL to use, which of several it takes first; ``None``: none.

    Parameters
    ----------
    found : sequence of mapping
        What :func:`interfaces` returned.
    names : str or None
        The value of ``NCCL_SOCKET_IFNAME``.
    """
    return next(iter(nccl_interfaces(found, names)[0]), None) if names else None
