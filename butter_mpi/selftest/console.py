"""What a command line is told wrongly, and where it writes: streams that may be full or closed; no traceback."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn, TextIO

__all__ = ["BROKEN_PIPE", "Parser", "UsageError", "ask_for", "one_line", "printable", "say", "sound_streams"]

BROKEN_PIPE = 128 + 13
"""The status that a shell gives to a command that SIGPIPE ended."""

_LONGEST_TEXT = 300
_LONGEST_MESSAGE = 500
_CLOSED = "it is closed"


class UsageError(Exception):
    """A wrong argument; the message is one line."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are exceptions, so that one process can tell them for all."""

    def error(self, message: str) -> NoReturn:
        """Raise a :class:`UsageError`."""
        raise UsageError(one_line(message, _LONGEST_MESSAGE))


class _Tolerant:
    """A stderr whose failures are nobody's: there is no other place to tell them."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write what can be written."""
        try:
            self._stream.write(text)
        except (OSError, ValueError):
            _give_up(self._stream)
        return len(text)

    def flush(self) -> None:
        """Flush what can be flushed."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            _give_up(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _give_up(stream: TextIO) -> None:
    """Let what is left in the stream's buffer go nowhere, or the interpreter would fail with it at its end."""
    with contextlib.suppress(OSError, ValueError):
        number = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


def _plug() -> None:
    """Take the place of closed standard streams, before a file or a socket of MPI gets their number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


@contextlib.contextmanager
def sound_streams() -> Iterator[None]:
    """Make ``sys.stderr`` one that never fails, for as long as a command runs."""
    _plug()
    kept = sys.stderr
    # mypy knows no stream that is closed, but a process that is started without one has None there.
    stream: TextIO | None = kept
    with contextlib.ExitStack() as stack:
        if stream is None:
            stream = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        sys.stderr = _Tolerant(stream)
        try:
            yield
        finally:
            sys.stderr.flush()
            sys.stderr = kept


def say(stream: TextIO | None, text: str) -> OSError | None:
    """Write and flush; characters that the stream has not are written as escapes.

    Returns
    -------
    OSError or None
        Why it could not be written; nothing more will be written to that stream then.
    """
    if stream is None or stream.closed:
        return OSError(errno.EBADF, _CLOSED)
    try:
        encoding = stream.encoding or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError as error:
        _give_up(stream)
        return error
    return None


def ask_for(text: str, name: str, status: int) -> int:
    """Write to stdout what the command was asked for.

    Parameters
    ----------
    text : str
        The whole.
    name : str
        Of the command, for its message.
    status : int
        The exit status where it cannot be written.

    Returns
    -------
    int
        0; `status`, and a line on stderr; or, where nobody reads any more, silently what a shell gives for that.
    """
    error = say(sys.stdout, text)
    if error is None:
        return 0
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    sys.stderr.write(f"{name}: stdout cannot be written: {error.strerror}\n")
    return status


def printable(text: str) -> str:
    """Return a text from outside with escapes for what is not printable, so that it stays on one line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str, longest: int = _LONGEST_TEXT) -> str:
    """Return a text from outside as it may stand in a message: on one line, printable, and not long."""
    plain = printable(text)
    return plain if len(plain) <= longest else f"{plain[:longest]}... ({len(text)} characters)"
