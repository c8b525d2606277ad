"""The network interfaces of this process's name space, asked of the kernel."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from pathlib import Path
from typing import Any

__all__ = ["interfaces"]

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_IFF_UP, _IFF_RUNNING = 0x1, 0x40


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
