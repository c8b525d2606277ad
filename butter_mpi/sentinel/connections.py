"""The TCP connections of one watcher to others: called, taken in, proved, ended. What they carry is for ``links``.

Whoever calls is a stranger until it has proved itself: strangers have two seconds, and of too many the oldest goes, so
that a flood keeps out nobody who proves itself at once. How many are taken in between two ticks is bounded too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from butter_mpi.descriptors import beyond_standard

if TYPE_CHECKING:
    from butter_mpi.sentinel.wire import Channel

__all__ = ["Connection", "Connections"]

_SECONDS_TO_PROVE = 2.0
_MOST_STRANGERS = 1024
_MOST_BETWEEN_TICKS = 512
_MOST_UNSENT = 1 << 22
_CHUNK = 1 << 16


class Connection:
    """One TCP connection, proved or not.

    Parameters
    ----------
    sock : socket
        Connected, or about to be; it never waits.
    channel : Channel
        What is said on it.
    called : tuple of str and int, optional
        The address and port that were called; none: the other end calls.
    """

    def __init__(self, sock: socket.socket, channel: Channel, called: tuple[str, int] | None = None) -> None:
        self.sock, self.channel, self.called = sock, channel, called
        self.proved = False
        self.age = 0.0
        self._connecting = called is not None
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def node(self) -> int:
        """The other end's node, once that is known."""
        assert self.channel.peer is not None
        return self.channel.peer

    @property
    def source(self) -> str:
        """The address of this end."""
        return str(self.sock.getsockname()[0])

    @property
    def wants_room(self) -> bool:
        """Whether something is to be sent as soon as it can be."""
        return self._connecting or bool(self.channel.out)

    def receive(self) -> bytes:
        """Return what has come.

        Raises
        ------
        OSError
            The call has failed, or the connection has ended.
        """
        if self._connecting:
            failed = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                raise OSError(failed, os.strerror(failed))
            self._connecting = False
        try:
            data = self.sock.recv(_CHUNK)
        except BlockingIOError:
            return b""
        if not data:
            raise OSError(errno.ECONNRESET, "closed by the other end")
        return data

    def flush(self) -> None:
        """Send what there is room for.

        Raises
        ------
        OSError
            The connection has ended, or the other end has not read for long.
        """
        out = self.channel.out
        with contextlib.suppress(BlockingIOError):
            while out and not self._connecting:
                del out[: self.sock.send(out)]
        if len(out) > _MOST_UNSENT:
            raise OSError(errno.ENOBUFS, "the other end does not read")

    def shut(self) -> None:
        """Say that nothing more comes, once all is sent."""
        if self.proved and not self.channel.out:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)


class Connections:
    """All of them, behind one descriptor.

    Parameters
    ----------
    make : callable
        Returns the channel of a new connection to a node, or, for ``None``, of one that calls.
    listeners : iterable of int
        Descriptors of listening sockets.
    expected : int
        How many may call at one moment with good reason.
    on_proved, on_message, on_end : callable
        Are handed a connection that has proved itself; one with a message; one that has ended, and why.
    """

    def __init__(
        self,
        make: Callable[[int | None], Channel],
        listeners: Iterable[int],
        expected: int,
        *,
        on_proved: Callable[[Connection], None],
        on_message: Callable[[Connection, dict[str, Any]], None],
        on_end: Callable[[Connection, str], None],
    ) -> None:
        self._make = make
        self._on_proved, self._on_message, self._on_end = on_proved, on_message, on_end
        self._poll = select.epoll()
        self._all: dict[int, Connection] = {}
        self._strangers: dict[int, Connection] = {}
        self._listeners = {fd: socket.socket(fileno=fd) for fd in listeners}
        for fd, listener in self._listeners.items():
            listener.setblocking(False)
            self._poll.register(fd, select.EPOLLIN)
        self._most_strangers = _MOST_STRANGERS + expected
        self._most_between = self._allowed = _MOST_BETWEEN_TICKS + expected

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is something for :meth:`serve`."""
        return self._poll.fileno()

    def __bool__(self) -> bool:
        return bool(self._all)

    def _calls_to(self, node: int) -> list[Connection]:
        """Return the calls to a node that are under way."""
        return [one for one in self._all.values() if one.called and one.node == node and not one.proved]

    def serve(self) -> None:
        """Take what has come."""
        for fd, _ in self._poll.poll(0):
            if fd in self._all:
                self._move(self._all[fd])
            elif fd in self._listeners:
                self._accept(self._listeners[fd])

    def tick(self, passed: float) -> None:
        """End what did not prove itself in time; let callers in again."""
        for connection in list(self._all.values()):
            connection.age += passed
            if not connection.proved and connection.age >= _SECONDS_TO_PROVE:
                self.drop(connection, "no answer")
        if self._allowed <= 0:
            for fd in self._listeners:
                self._poll.modify(fd, select.EPOLLIN)
        self._allowed = self._most_between

    def call(self, node: int, address: str, port: int, source: str = "") -> str:
        """Call a node, also beside calls that nobody has answered; returns why that cannot be, or nothing.

        Parameters
        ----------
        node : int
            The node.
        address, port : str, int
            Where it listens.
        source : str
            The address to call from; empty: the kernel chooses.
        """
        if any(one.channel.answered for one in self._calls_to(node)):
            return ""
        try:
            with beyond_standard():
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        except OSError as error:
            return error.strerror or str(error)
        try:
            if source:
                sock.bind((source, 0))
            failed = sock.connect_ex((address, port))
        except OSError as error:
            failed = error.errno or errno.EINVAL
        if failed not in (0, errno.EINPROGRESS):
            sock.close()
            return os.strerror(failed)
        self._add(Connection(sock, self._make(node), (address, port)))
        return ""

    def send(self, connection: Connection, kind: str, **fields: Any) -> None:
        """Send a message, now or as soon as there is room."""
        connection.channel.send(kind, **fields)
        try:
            connection.flush()
        except OSError as error:
            self.drop(connection, error.strerror or str(error))
        else:
            self._listen(connection)

    def shut(self) -> None:
        """Send no more, and let each other end close: unread bytes at the end would take back what was sent."""
        for connection in self._all.values():
            connection.shut()

    def drop(self, connection: Connection, why: str = "") -> None:
        """End a connection."""
        fd = connection.sock.fileno()
        if self._all.pop(fd, None) is not None:
            self._strangers.pop(fd, None)
            self._poll.unregister(fd)
            connection.sock.close()
            self._on_end(connection, why)

    def _add(self, connection: Connection) -> None:
        self._all[connection.sock.fileno()] = connection
        self._poll.register(connection.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _listen(self, connection: Connection) -> None:
        """Wait for room too, where something is to be sent."""
        room = select.EPOLLOUT if connection.wants_room else 0
        self._poll.modify(connection.sock.fileno(), select.EPOLLIN | room)

    def _accept(self, listener: socket.socket) -> None:
        if self._allowed <= 0:
            # A flood: who else comes is heard at the next tick.
            self._poll.modify(listener.fileno(), 0)
            return
        self._allowed -= 1
        if len(self._strangers) >= self._most_strangers:
            self.drop(next(iter(self._strangers.values())))
        with contextlib.suppress(OSError), beyond_standard():
            sock, _ = listener.accept()
            sock.setblocking(False)
            stranger = self._strangers[sock.fileno()] = Connection(sock, self._make(None))
            self._add(stranger)

    def _move(self, connection: Connection) -> None:
        from butter_mpi.sentinel.wire import Refused

        try:
            messages = connection.channel.feed(connection.receive())
            connection.flush()
        except Refused as error:
            self.drop(connection, str(error))
            return
        except OSError as error:
            self.drop(connection, error.strerror or str(error))
            return
        self._listen(connection)
        if connection.called and connection.channel.answered and not connection.proved:
            # The other end takes the last that proves itself: no second one may.
            for other in self._calls_to(connection.node):
                if other is not connection:
                    self.drop(other, "answered later than another address")
        if connection.channel.open and not connection.proved:
            connection.proved = True
            self._strangers.pop(connection.sock.fileno(), None)
            self._on_proved(connection)
        for message in messages:
            self._on_message(connection, message)
