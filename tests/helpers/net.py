"""Watchers' links between nodes that all live in this process, over real connections; time is what a test says."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from butter_mpi.sentinel.links import HUBS
from butter_mpi.sentinel.networks import Networks

__all__ = ["SECRET", "TICK", "Far", "Net", "Node", "listener"]

SECRET = bytes(range(32))
TICK = 0.2


def listener() -> socket.socket:
    """A listening socket of this machine."""
    sock = socket.create_server(("127.0.0.1", 0), backlog=4096)
    sock.setblocking(False)
    return sock


class Node:
    """One watcher's end, without the watcher: what it was told, and whom it accused."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self.accused: list[tuple[list[int], str, str]] = []
        self.networks = Networks(config, lambda kind, fields: self.heard.append((kind, fields)), self._accuse)
        self.links = self.networks.main
        self.awake, self.waits = True, False
        # A frozen one does nothing; what is sent to it waits.
        self.frozen = self.ended = False

    def _accuse(self, ranks: Sequence[int], text: str, phase: str) -> None:
        self.accused.append((list(ranks), text, phase))

    def hang_up(self) -> None:
        """Close all connections, as the end of the process does."""
        for links in self.networks._every:
            for one in list(links._connections._all.values()):
                one.sock.close()
            for sock in links._connections._listeners.values():
                sock.close()

    def close(self) -> None:
        """Close all that is open."""
        self.hang_up()
        for links in self.networks._every:
            links._connections._poll.close()
        self.networks._poll.close()

    def told(self, kind: str) -> list[dict[str, Any]]:
        """What it was told of this kind."""
        return [fields for one, fields in self.heard if one == kind]


class Far(Node):
    """One whose other end is in another process."""

    def serve_until(self, holds: Callable[[], bool], within: float = 10) -> None:
        """Take what comes until something holds; it does nothing by itself meanwhile."""
        poll, end = select.poll(), time.monotonic() + within
        poll.register(self.networks.fileno(), select.POLLIN)
        while not holds():
            assert poll.poll(max(0, 1e3 * (end - time.monotonic()))), "nothing comes"
            self.networks.serve()


class Net:
    """Some nodes of two ranks each, which all live in this process; each further network has a name."""

    def __init__(
        self, count: int, *further: str, secret: bytes = SECRET, patience: float = 10, start: bool = True
    ) -> None:
        self.strangers: list[socket.socket] = []
        sockets = [[listener() for _ in range(min(HUBS, count))] for _ in ("", *further)]
        self.addresses = [one.getsockname() for one in sockets[0]]
        nodes = [(f"n{number}", [2 * number, 2 * number + 1]) for number in range(count)]
        hubs = [[[list(one.getsockname())] for one in every] for every in sockets]
        self.nodes = [
            Node(
                {
                    "me": number,
                    "nodes": nodes,
                    "patience": patience,
                    "networks": [
                        {
                            "network": name,
                            "hubs": hubs[place],
                            "listeners": [sockets[place][number].detach()] if number < HUBS else [],
                            "secret": secret.hex(),
                        }
                        for place, name in enumerate(("", *further))
                    ],
                }
            )
            for number in range(count)
        ]
        if start:
            for node in self.nodes:
                node.networks.up()
            self.pass_time(TICK)
            assert all(node.told("begun") == [{}] for node in self.nodes)

    def settle(self) -> None:
        """Let all that is under way arrive, and what comes of it."""
        poll = select.poll()
        by_fd = {node.networks.fileno(): node for node in self.nodes if not (node.frozen or node.ended)}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        while ready := poll.poll(2):
            for fd, _ in ready:
                by_fd[fd].networks.serve()

    def pass_time(self, seconds: float) -> None:
        """Let time pass, in ticks."""
        for _ in range(round(seconds / TICK)):
            for node in self.nodes:
                if not (node.frozen or node.ended):
                    node.networks.tick(TICK, node.awake, node.waits)
            self.settle()

    def finish(self, number: int) -> bool:
        """Whether a node whose ranks are over ends, once all have heard that."""
        node = self.nodes[number]
        for _ in range(2):
            node.ended = node.ended or node.networks.finish()
            self.settle()
        return node.ended

    def kill(self, number: int) -> None:
        """End a watcher as SIGKILL does."""
        self.nodes[number].ended = True
        self.nodes[number].hang_up()

    def cut_off(self, number: int, network: int) -> None:
        """Take a node off a network."""
        for other in range(len(self.nodes)):
            if other != number and min(other, number) < HUBS:
                self.cut(min(other, number), max(other, number), network)

    def mend(self, network: int) -> None:
        """Let all nodes reach one another again over a network."""
        for node in self.nodes:
            vars(node.networks._every[network]).pop("_may_call", None)

    def cut(self, hub: int, other: int, network: int = 0) -> None:
        """Break the link of two nodes for good."""
        links = self.nodes[hub].networks._every[network]
        called = links._may_call
        links._may_call = lambda number: number != other and called(number)  # type: ignore[method-assign]
        link = links._peers[other].link
        assert link is not None
        links._connections.drop(link)

    def close(self) -> None:
        """Close all that is open."""
        for node in self.nodes:
            node.close()
        for sock in self.strangers:
            sock.close()

    def stranger(self, hub: int = 0) -> socket.socket:
        """A connection of a stranger."""
        self.strangers.append(socket.create_connection(self.addresses[hub], timeout=5))
        return self.strangers[-1]
