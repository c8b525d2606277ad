"""How the watchers of several nodes find one another: where the first two listen, and the secret that all share.

Ranks exchange this over MPI; a watcher gets it on its standard input, so it stands neither in an argument nor in the
environment. A node listens only on addresses of the networks that the job uses, and only if it is one that others call.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from butter_mpi.control import Overdue, Watch
from butter_mpi.descriptors import beyond_standard
from butter_mpi.detached import Detached
from butter_mpi.interfaces import interfaces
from butter_mpi.sentinel.links import HUBS, REMEDY

__all__ = ["ALONE", "Door", "addresses", "leaders"]

ALONE: dict[str, Any] = {"me": 0, "nodes": [["", []]], "hubs": [], "listeners": [], "secret": "", "patience": 0.0}
"""What the watcher of the only node is told of others."""
_SECRET_BYTES = 32
# Where the queue is full of strangers, who comes last must not wait for long.
_BACKLOG = 512
_RESOLVE_SECONDS = 2.0
_INSIDE = ("lo", "docker", "virbr")


def leaders(said: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the rank of each node that starts its watcher: the first, or the first that is able to."""
    found: dict[str, int] = {}
    for number in sorted(range(len(said)), key=lambda one: bool(said[one]["unable"])):
        found.setdefault(said[number]["node"], number)
    return found


def addresses(names: str | None) -> list[str]:
    """Return the addresses of this host at which other hosts may reach it, in the order in which they are to be tried.

    Parameters
    ----------
    names : str or None
        Names of interfaces, with commas; those that this host lacks are passed over. ``None``: the addresses of the
        host's name; where that is a local one only, those of every interface but the machine's inner ones.

    Returns
    -------
    list of str
        Empty: there is none.
    """
    rows = {row["name"]: row["addresses"] for row in interfaces() if row["up"]}
    if names is not None:
        return [one for name in names.split(",") for one in rows.get(name, ()) if not _link_local(one)]
    named = [one for one in _named() if not _local(one) and _own(one)]
    outer = [one for name, every in rows.items() if not name.startswith(_INSIDE) for one in every]
    inner = [one for every in rows.values() for one in every]
    for found in (named, outer, inner):
        if usable := [one for one in dict.fromkeys(found) if not _link_local(one)]:
            return usable
    return []


def _named() -> list[str]:
    """Return what the host's name means; nobody waits long for a name server."""
    name = socket.gethostname()
    call = Detached(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    with contextlib.suppress(OSError, Overdue):
        return [str(one[4][0]) for one in call.result(Watch(_RESOLVE_SECONDS), "the host's name")]
    return []


def _own(address: str) -> bool:
    """Whether it is this host's: behind an address translation its name means another one."""
    try:
        with beyond_standard(), _socket(address) as sock:
            sock.bind((address, 0))
    except OSError:
        return False
    return True


def _socket(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)


def _local(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _link_local(address: str) -> bool:
    return address.lower().startswith(("fe80:", "169.254."))


class Door:
    """What a rank brings so that the watchers of all nodes find one another; it listens where that is its job.

    Parameters
    ----------
    offers : sequence of mapping
        What every rank brings for the watcher of its node, in rank order.
    rank : int
        This rank.
    names : str or None
        The interfaces to use.
    start_deadline : float
        Seconds that the start may take.
    """

    def __init__(
        self, offers: Sequence[Mapping[str, Any]], rank: int, names: str | None, start_deadline: float
    ) -> None:
        self._rank, self._patience = rank, start_deadline / 2
        self._nodes: dict[str, list[int]] = {}
        for number, offer in enumerate(offers):
            self._nodes.setdefault(offer["node"], []).append(number)
        self._me = list(self._nodes).index(offers[rank]["node"])
        self._leaders = leaders(offers)
        self._sockets: list[socket.socket] = []
        self._failure = ""
        if self._leads and self._me < HUBS and self.needed:
            try:
                self._listen(names)
            except OSError as error:
                self.close()
                self._failure = str(error)

    @property
    def needed(self) -> bool:
        """Whether there is another node."""
        return len(self._nodes) > 1

    @property
    def _leads(self) -> bool:
        return self._rank in self._leaders.values()

    def _listen(self, names: str | None) -> None:
        failures = []
        for address in addresses(names):
            with beyond_standard():
                sock = _socket(address)
            self._sockets.append(sock)
            try:
                sock.bind((address, 0))
                sock.listen(_BACKLOG + len(self._nodes))
            except OSError as error:
                self._sockets.pop().close()
                failures.append(f"{address}: {error.strerror}")
        if not self._sockets:
            there = [f"{row['name']} ({', '.join(row['addresses'])})" for row in interfaces() if row["addresses"]]
            wanted = f"no interface of watch_interface={names} has an address" if names else "no address to listen on"
            raise OSError("; ".join(failures) or f"{wanted}; there are {', '.join(there) or 'none'}")

    def payload(self) -> bytes:
        """Return what every rank must know: of a leader its host, of a hub's where it listens, of rank 0 the secret."""
        facts: dict[str, Any] = {"failure": self._failure}
        if self._leads:
            facts["host"] = socket.gethostname()
            facts["at"] = [one.getsockname()[:2] for one in self._sockets]
        if self._rank == 0:
            facts["secret"] = os.urandom(_SECRET_BYTES).hex()
        return json.dumps(facts).encode()

    def refusal(self, said: Sequence[Mapping[str, Any]]) -> str:
        """Return why watchers cannot be linked, with the remedy; empty: they can be."""
        failures = [f"rank {number}: {one['failure']}" for number, one in enumerate(said) if one["failure"]]
        return f"no watcher can listen for those of other nodes ({'; '.join(failures)}). {REMEDY}" if failures else ""

    def config(self, said: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what the watcher of this node is told, from what every rank brought."""
        first = [said[self._leaders[node]] for node in self._nodes]
        return {
            "me": self._me,
            "nodes": [[one["host"], ranks] for one, ranks in zip(first, self._nodes.values(), strict=True)],
            "hubs": [one["at"] for one in first[:HUBS]],
            "listeners": [one.fileno() for one in self._sockets],
            "secret": said[0]["secret"],
            "patience": self._patience,
        }

    def close(self) -> None:
        """Give the sockets back, once the watcher has them."""
        while self._sockets:
            self._sockets.pop().close()
