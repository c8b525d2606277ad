"""What a rank's recorder holds at one moment, as plain values: a line of JSON in a file that the user named.

The watcher writes one for each rank of its node when a communicator breaks, and a living rank for itself when it is
asked to. ``butter_mpi.merging`` reads them. The watcher imports this: the standard library only, and little of it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from butter_mpi.recorder import COLLECTIVES, DTYPES, PAIRS, Entry, Reader

__all__ = ["RECORDING_VERSION", "SCHEMA_FILE", "STATES", "WIDTHS", "append", "file_of_host", "take"]

RECORDING_VERSION = 1
"""Changes with the meaning of any field."""

SCHEMA_FILE = "schema/recording.schema.json"
"""Where the package has the JSON Schema of a line, which is part of the public face."""

STATES = ("alive", "stopped", "closed", "left", "ended")
"""What a rank was when this was taken; ``left``: it has closed and needs no other rank any more."""

# A test holds these against the enums.
WIDTHS = dict(zip(DTYPES, (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1, 2, 2, 1, 8, 16), strict=True))
"""Bytes of an element of each type."""

_EPOCH_BITS = 32


def take(reader: Reader, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that a recorder holds.

    Parameters
    ----------
    reader : Reader
        Of the rank; what came before its floors counts no more, and is left out.
    about : mapping
        Whose it is: ``communicator`` (its ``key`` and ``name``), ``rank``, ``world_size``, ``host``, ``pid``, ``state``
        (one of :data:`STATES`), ``how`` it ended, and the ``cause`` for which this is taken; empty texts: none.

    Returns
    -------
    dict
        A recording, by the published schema.
    """
    # The heads first: what comes while this is read is left to the next one.
    head, position = reader.head(), reader.pairs()
    count, exchange = reader.exchange()
    # Entries have the time of a clock that starts with the machine.
    began = time.time() - time.monotonic()
    numbers = range(max(reader.floor, head - COLLECTIVES) + 1, head + 1)
    collectives = [_collective(entry, began) for number in numbers if (entry := reader.collective(number))]
    positions = range(max(0, position - PAIRS) + 1, position + 1)
    found = [(place, pair) for place in positions if (pair := reader.pair(place))]
    pairs = [_pair(place, *pair, began) for place, pair in found if pair[1].number > reader.pairs_floor]
    # As long as one is there of before the floor, nothing that came after it is overwritten.
    pairs_lost = positions.start - 1 if len(pairs) == len(found) else 0
    return {
        "recording": RECORDING_VERSION,
        **about,
        "time": time.time(),
        # How often ranks have reconnected; what they exchange is counted anew from each time.
        "epoch": count >> _EPOCH_BITS,
        "collectives": {
            "floor": reader.floor,
            "submitted": head,
            "lost": numbers.start - 1 - reader.floor,
            "records": collectives,
        },
        "pairs": {"floor": reader.pairs_floor, "submitted": position, "lost": pairs_lost, "records": pairs},
        "exchanges": {
            "submitted": count & (1 << _EPOCH_BITS) - 1,
            "records": [_exchange(exchange, count, began)] if exchange else [],
        },
    }


def _operation(entry: Entry, began: float) -> dict[str, Any]:
    return {
        "number": entry.number,
        "operation": f"{entry.kind} by a CUDA graph" if entry.by_graph else entry.kind,
        "dtype": entry.dtype,
        "count": entry.elements,
        "bytes": entry.elements * WIDTHS.get(entry.dtype, 0),
        "stream": entry.stream,
        "site": entry.site,
        "time": began + entry.time,
    }


def _collective(entry: Entry, began: float) -> dict[str, Any]:
    return {**_operation(entry, began), "op": entry.op, "root": entry.root, "hash": f"{entry.chain:016x}"}


def _pair(position: int, peer: int, entry: Entry, began: float) -> dict[str, Any]:
    return {**_operation(entry, began), "peer": peer, "position": position}


def _exchange(entry: Entry, count: int, began: float) -> dict[str, Any]:
    number = count & (1 << _EPOCH_BITS) - 1
    facts = {"operation": entry.kind, "after": entry.number, "site": entry.site, "time": began + entry.time}
    return {"number": number, **facts}


def file_of_host(file: str, host: str) -> str:
    """Return the file that one host writes: with its name before the ending, as hosts can share the folder.

    Parameters
    ----------
    file : str
        What the user named; empty: nothing.
    host : str
        The name of this host.

    Returns
    -------
    str
        An absolute path; empty where none was named.
    """
    if not file:
        return ""
    stem, ending = os.path.splitext(os.path.abspath(file))
    return f"{stem}.{host.replace('/', '_')}{ending}"


def append(file: str | os.PathLike[str], recording: Mapping[str, Any]) -> None:
    """Append a line to a file, in one piece: others may append to it at the same time.

    Parameters
    ----------
    file : str or path
        The file; it is made if it is not there.
    recording : mapping
        What :func:`take` returned.

    Raises
    ------
    OSError
        It cannot be written.
    """
    data = memoryview(f"{json.dumps(recording, allow_nan=False, separators=(',', ':'))}\n".encode())
    with open(file, "ab", buffering=0) as opened:
        while data:
            data = data[opened.write(data) :]
