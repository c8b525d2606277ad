"""How the watchers of several nodes find one another: where the first two listen, and the secret that all share.

Ranks exchange this over MPI; a watcher gets it on its standard input, so it stands neither in an argument nor in the
environment. A node listens only on addresses of the networks that the job uses, and only if it is one that others call.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from butter_mpi.control import Overdue, Watch
from butter_mpi.descriptors import beyond_standard
from butter_mpi.detached import Detached
from butter_mpi.interfaces import interfaces
from butter_mpi.sentinel.links import HUBS, REMEDY

__all__ = ["ALONE", "Door", "leaders", "networks"]

_NOWHERE: dict[str, Any] = {"network": "", "hubs": [], "listeners": [], "secret": ""}
ALONE: dict[str, Any] = {"me": 0, "nodes": [["", []]], "patience": 0.0, "networks": [_NOWHERE]}
"""What the watcher of the only node is told of others."""
_SECRET_BYTES = 32
# Where the queue is full of strangers, who comes last must not wait for long.
_BACKLOG = 512
_RESOLVE_SECONDS = 2.0
_NAME_OTHERS = (
    "Name interfaces that these hosts have by watch_interface (BUTTER_MPI_WATCH_INTERFACE): a comma between networks "
    "that are all watched, a bar between names of one network on different hosts (eth0,ib0|hsn0)"
)
_INSIDE = ("lo", "docker", "virbr")


def leaders(said: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the rank of each node that starts its watcher: the first, or the first that is able to."""
    found: dict[str, int] = {}
    for number in sorted(range(len(said)), key=lambda one: bool(said[one]["unable"])):
        found.setdefault(said[number]["node"], number)
    return found


def networks(names: str | None, data: str | None = None) -> list[tuple[str, list[str]]]:
    """Return the networks over which watchers are to be linked, and the addresses of this host in each.

    Parameters
    ----------
    names : str or None
        Of each network, with commas, the name of the interface, or several with bars of which the first that this host
        has is meant. ``None``: the network of the host's name; where that means a local address only, of every
        interface but the machine's inner ones.
    data : str, optional
        The interface of the data plane, which is one more network where no names are given.

    Returns
    -------
    list of (str, list of str)
        Each network's name, which is empty where none is given, and the addresses at which other hosts may reach this
        one, in the order in which they are to be tried; empty: there is none.
    """
    rows = {row["name"]: row["addresses"] for row in interfaces() if row["up"]}
    if names is not None:
        # Two names may mean one interface here.
        return list(dict(_first(one, rows) for one in names.split(",")).items())
    named = _usable(one for one in _named() if not _local(one) and _own(one))
    main, beside = named or _any(rows), [one for one in _usable(rows.get(data or "", ())) if not _local(one)]
    # Another network than that of the host's name, or than others of this host.
    rest = [one for one in main if one not in beside]
    if not (beside and rest):
        return [("", main)]
    # Where the name does not tell, that of the data may be the only one that leads to other hosts.
    return [("", rest if named else [*rest, *beside]), (str(data), beside)]


def _first(names: str, rows: Mapping[str, Sequence[str]]) -> tuple[str, list[str]]:
    """Return the first of some interfaces that has an address."""
    found = [(name, usable) for name in names.split("|") if (usable := _usable(rows.get(name, ())))]
    return found[0] if found else (names, [])


def _any(rows: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the addresses that this host has; those of the machine's inner interfaces where there are no others."""
    outer = [one for name, every in rows.items() if not name.startswith(_INSIDE) for one in every]
    return _usable(outer) or _usable(one for every in rows.values() for one in every)


def _usable(found: Iterable[str]) -> list[str]:
    return [one for one in dict.fromkeys(found) if not _link_local(one)]


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
        The interfaces to use, as :func:`networks` has them.
    data : callable
        Returns the interface of the data plane, likewise; asked only where this rank listens.
    start_deadline : float
        Seconds that the start may take.
    """

    def __init__(
        self,
        offers: Sequence[Mapping[str, Any]],
        rank: int,
        names: str | None,
        data: Callable[[], str | None],
        start_deadline: float,
    ) -> None:
        self._rank, self._names, self._patience = rank, names, start_deadline / 2
        self._nodes: dict[str, list[int]] = {}
        for number, offer in enumerate(offers):
            self._nodes.setdefault(offer["node"], []).append(number)
        self._me = list(self._nodes).index(offers[rank]["node"])
        self._leaders = leaders(offers)
        self._sockets: dict[str, list[socket.socket]] = {}
        self._failure = ""
        if self._leads and self._me < HUBS and self.needed:
            try:
                for name, addresses in networks(names, data()):
                    self._listen(name, addresses)
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

    def _listen(self, name: str, addresses: Sequence[str]) -> None:
        """Listen in one network."""
        own, failures = self._sockets.setdefault(name, []), []
        for address in addresses:
            with beyond_standard():
                sock = _socket(address)
            own.append(sock)
            try:
                sock.bind((address, 0))
                sock.listen(_BACKLOG + len(self._nodes))
            except OSError as error:
                own.pop().close()
                failures.append(f"{address}: {error.strerror}")
        if not own and failures:
            raise OSError(f"{'; '.join(failures)}. {REMEDY}")
        if not own:
            there = [
                f"{row['name']} ({', '.join([*row['addresses'], *['down'] * (not row['up'])])})"
                for row in interfaces()
                if row["addresses"]
            ]
            wanted = f"{name} of watch_interface={self._names} has no address" if name else "no address to listen on"
            raise OSError(f"{wanted}; there are {', '.join(there) or 'none'}. {_NAME_OTHERS}")

    def payload(self) -> bytes:
        """Return what every rank must know: of a leader its host, of a hub's where it listens, of rank 0 the secret."""
        facts: dict[str, Any] = {"failure": self._failure}
        if self._leads:
            facts["host"], facts["names"] = socket.gethostname(), self._names
            facts["at"] = [[name, [one.getsockname()[:2] for one in own]] for name, own in self._sockets.items()]
        if self._rank == 0:
            facts["secret"] = os.urandom(_SECRET_BYTES).hex()
        return json.dumps(facts).encode()

    def _hubs(self, said: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
        """Return what the leaders of the hubs brought, by rank."""
        return {number: said[number] for number in [self._leaders[node] for node in self._nodes][:HUBS]}

    def refusal(self, said: Sequence[Mapping[str, Any]]) -> str:
        """Return why watchers cannot be linked, with the remedy; empty: they can be.

        Names are those of each host: that they stand in one order cannot be seen here.
        """
        if failures := [f"rank {number}: {one['failure']}" for number, one in enumerate(said) if one["failure"]]:
            return f"no watcher can listen for those of other nodes: {'; '.join(failures)}"
        hubs = self._hubs(said)
        fewest = min(len(one["at"]) for one in hubs.values())
        if any(one["names"] is not None and len(one["at"]) > fewest for one in hubs.values()):
            named = ", ".join(f"{one['names'] or 'none'} on rank {number}" for number, one in hubs.items())
            text = f"watch_interface names more networks on one host than on another: {named}"
            return f"{text}. Name as many on every host, in one order (BUTTER_MPI_WATCH_INTERFACE)"
        return ""

    def config(self, said: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what the watcher of this node is told, from what every rank brought."""
        first = [said[self._leaders[node]] for node in self._nodes]
        # That of the data plane is one only where it is one on both.
        every = zip(*(one["at"] for one in self._hubs(said).values()), strict=False)
        return {
            "me": self._me,
            "nodes": [[one["host"], ranks] for one, ranks in zip(first, self._nodes.values(), strict=True)],
            "patience": self._patience,
            "networks": [self._network(place, hubs, said[0]["secret"]) for place, hubs in enumerate(every)],
        }

    def _network(self, place: int, hubs: Sequence[tuple[str, list[Any]]], secret: str) -> dict[str, Any]:
        own = list(self._sockets.values())[place : place + 1]
        return {
            "network": "/".join(dict.fromkeys(name for name, _ in hubs)),
            "hubs": [at for _, at in hubs],
            "listeners": [one.fileno() for sockets in own for one in sockets],
            "secret": _own_secret(secret, place),
        }

    def close(self) -> None:
        """Give the sockets back, once the watcher has them."""
        while self._sockets:
            for sock in self._sockets.popitem()[1]:
                sock.close()


def _own_secret(secret: str, place: int) -> str:
    """Return the secret of one network: what is said in one of them proves nothing in another."""
    return hmac.digest(bytes.fromhex(secret), b"network %d" % place, "sha256").hex()
