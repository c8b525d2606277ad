"""The record of what a rank submits: bounded rings in a memory file that outlives the rank.

The file has no name (``memfd_create``), so nothing can collide and nothing is left behind; the watcher of the node
holds its descriptor too. The rank writes, the watcher reads, and writes one word, its heartbeat. Nothing is locked: a
record's number is cleared first and stored last, so a reader that finds the same number before and after has read a
whole record, and nobody is accused on one reading.

Collectives are in one ring, number ``n`` in slot ``n % COLLECTIVES``; sends and receives in another, by position; what
ranks exchange over the control plane in a third, the newest two, by count. Each collective carries a hash of all
signatures up to it: two ranks agree up to ``n`` if their hashes at ``n`` agree, however much the rings have lost
meanwhile. It has 45 bits: two that differ somewhere agree by chance once in 3e13 times.

The watcher imports this without the rest of the package: the standard library only, and little of it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from math import isfinite
from time import monotonic, monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from butter_mpi.descriptors import beyond_standard, memory_file

if TYPE_CHECKING:
    from butter_mpi.collectives import Operation

__all__ = [
    "COLLECTIVES",
    "DTYPES",
    "EXCHANGES",
    "KINDS",
    "OPS",
    "PAIRS",
    "SIZE",
    "Entry",
    "Glance",
    "Reader",
    "Recorder",
]

COLLECTIVES, PAIRS, SITES = 4096, 1024, 256
_RECORD, _TEXT, _WORDS = 64, 256, 64
_PAIRS_AT = COLLECTIVES * _RECORD
_PLACES = tuple(range(0, _PAIRS_AT, _RECORD))
_SITES_AT = _PAIRS_AT + PAIRS * _RECORD
_EXCHANGES_AT = _SITES_AT + SITES * _TEXT
# One that is being written leaves the one before it to be read.
_EXCHANGES_KEPT = 2
_EXCHANGES_OF_AN_EPOCH = 1 << 32
_BEAT = _EXCHANGES_AT + _EXCHANGES_KEPT * _RECORD
_POSITION = _BEAT + 8
_BROKE = _POSITION + 8
SIZE = _BEAT + _WORDS

# By number, as NCCL counts them; a test holds these against the enums.
KINDS = (
    *("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier", "send", "recv"),
    *("reduce", "gather", "scatter", "all_to_all", "gather_v", "scatter_v", "all_to_all_v"),
)
DTYPES = "int8 uint8 int32 uint32 int64 uint64 float16 float32 float64 bfloat16 float8_e4m3fn float8_e5m2".split()
DTYPES += "int16 uint16 bool complex64 complex128".split()
OPS = ("sum", "prod", "max", "min", "avg", "premul_sum")
# What ranks do together over the control plane: it moves no data and takes no number.
EXCHANGES = ("all_gather_json", "set_add_kernel", "attempt_reconnect", "symmetric", "split", "dup", "plan_graph")

_Codes = dict[tuple[Any, ...], tuple[Any, float, bytes]]

_JSON = "json"
_NONE = 0xFF
_NO_ROOT = 0xFFFFFFFF
# In a signature: an operation of a graph is none with a call of another rank.
_BY_GRAPH = 1 << 24
_MASK = 2**64 - 1
_ODD = 0x9E3779B97F4A7C15
# The hash of a history is a number in steps of 2**-45, below 64; the one that follows is three times it, and something
# below 1. That is below 256, so a float, of 53 bits, has it exactly; floats are what Python computes with fastest.
_HASH_BITS = 45
_FACTOR, _LIMIT = 3.0, 64.0
_MOST_SHAPES = 4096
_WORD = struct.Struct("=Q")
# signature, count, site, bound ms, stream: what is the same each time that one operation is submitted
_CODE = struct.Struct("=5Q").pack
# time s, chain, the code, number; native, as that is what packs a word at once
_WHOLE = struct.Struct("dd40sq").pack_into
# time s, peer and number, the code, position
_PAIR = struct.Struct("dQ40sQ").pack_into
# time s, number of the collective before it, signature, 0, site, 0, 0, count
_EXCHANGE = struct.Struct("=d7Q").pack_into
_SITE = struct.Struct(f"=H{_TEXT - 10}sQ")
# For a signal handler may close inside of a write. So nothing is called between reading where to write, and writing.
_NOWHERE = bytearray(SIZE)


class Glance(NamedTuple):
    """What changes with every submission: the newest collective, send or receive, and exchange."""

    head: int
    pairs: int
    exchanges: int


class Entry(NamedTuple):
    """One submission as the watcher reads it."""

    number: int
    time: float
    chain: int
    signature: int
    elements: int
    site: str
    bound: float
    stream: int

    @property
    def kind(self) -> str:
        """The operation."""
        return _name(KINDS + EXCHANGES, self.signature & 0xFF)

    @property
    def dtype(self) -> str:
        """The element type."""
        return _name([*DTYPES, _JSON], self.signature >> 8 & 0xFF)

    @property
    def paired(self) -> bool:
        """Whether it is a send or a receive."""
        return self.kind in ("send", "recv")

    @property
    def phase(self) -> str:
        """Where an error of it happened."""
        return "send/recv" if self.paired else "collective"

    @property
    def op(self) -> str | None:
        """The reduction operator, if it has one."""
        op = self.signature >> 16 & 0xFF
        return _name(OPS, op) if op != _NONE else None

    @property
    def root(self) -> int | None:
        """The root, if it has one."""
        root = self.signature >> 32
        return root if root != _NO_ROOT else None

    @property
    def by_graph(self) -> bool:
        """Whether it was launched as a CUDA graph."""
        return bool(self.signature & _BY_GRAPH)

    def text(self) -> str:
        """Return it as people read it, as ``collectives.describe`` writes it."""
        # What every rank has its own counts of is told without one.
        facts = self.dtype if self.kind.endswith("_v") else f"{self.dtype} x {self.elements}"
        facts += f", {self.op}" if self.op is not None else ""
        facts += f", root {self.root}" if self.root is not None else ""
        facts += ", by a CUDA graph" if self.by_graph else ""
        return f"{self.kind} #{self.number} ({facts}) at {self.site}"


def _name(names: Any, index: int) -> str:
    return str(names[index]) if index < len(names) else "?"


class Recorder:
    """The writing end, of one communicator of one rank.

    Parameters
    ----------
    deadline : float
        The collective deadline in seconds, which the watcher holds late ranks against.
    """

    def __init__(self, deadline: float) -> None:
        self.fd = memory_file("butter_mpi-recorder")
        os.ftruncate(self.fd, SIZE)
        # A file that shrank under the reader's feet would kill the reader with SIGBUS.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        with beyond_standard():
            self._map: Any = mmap.mmap(self.fd, SIZE)
        self._bound = max(1, int(deadline * 1000))
        self._chain = 0.0
        self._position = self._exchanged = 0
        self._void_codes()
        self._sites: dict[str, int] = {}
        self._next_site = 0

    def beat(self) -> int:
        """Return the watcher's heartbeat in nanoseconds of the monotonic clock; 0: none yet."""
        return int(_WORD.unpack_from(self._map, _BEAT)[0])

    def write(self, operation: Operation, number: int) -> None:
        """Write one submission.

        Parameters
        ----------
        operation : Operation
            What is submitted.
        number : int
            Its sequence number; of a send or receive, its number between the two ranks.
        """
        table, mixed, words = operation.code
        if table is not self._codes:
            self._write_other(operation, number)
            return
        # By an odd number, so that what follows a difference cannot undo it; and shapes are spread over all bits.
        chain = self._chain * _FACTOR + mixed
        if chain >= _LIMIT:
            chain %= 1.0
        self._chain = chain
        now = monotonic()
        # One call, which clears all words and then stores them in this order.
        _WHOLE(self._map, _PLACES[number % COLLECTIVES], now, chain, words, number)

    def _write_other(self, operation: Operation, number: int) -> None:
        """Write a send or receive, or a collective that has no code which is good here."""
        code = operation.code
        if code[0] is not self._pair_codes:
            operation.code = code = self._code(operation)
        if operation.peer is None:
            self.write(operation, number)
            return
        self._position = stamp = self._position + 1
        _WORD.pack_into(self._map, _POSITION, stamp)
        at, now = stamp % PAIRS * _RECORD + _PAIRS_AT, monotonic()
        _PAIR(self._map, at, now, operation.peer << 40 | number, code[2], stamp)

    def _code(self, operation: Operation) -> tuple[Any, float, bytes]:
        """Return what is the same each time: in which table it is good, its hash, and its words.

        Call sites have numbers, which are given anew when there are too many: then all codes are void.
        """
        what = operation.kind, operation.dtype, operation.op, operation.root, operation.count, operation.graph is None
        key = what, operation.site, operation.stream, operation.waits_for_ever
        code = self._table(operation).get(key)
        if code is None:
            place = self._sites.get(operation.site) or self._new_site(operation.site)
            if len(self._table(operation)) >= _MOST_SHAPES:
                self._void_codes()
            signature, bound = _signature(operation), 0 if operation.waits_for_ever else self._bound
            words, table = _CODE(signature, operation.count, place, bound, operation.stream), self._table(operation)
            code = table[key] = table, _mixed(signature, operation.count), words
        return code

    def _table(self, operation: Operation) -> _Codes:
        return self._codes if operation.peer is None else self._pair_codes

    def _void_codes(self) -> None:
        self._codes: _Codes = {}
        self._pair_codes: _Codes = {}

    def exchange(self, kind: str, number: int, site: str) -> None:
        """Write that this rank comes to an exchange over the control plane, which ends when every rank has.

        Parameters
        ----------
        kind : str
            One of :data:`EXCHANGES`.
        number : int
            The collective that it comes after.
        site : str
            Its call site.
        """
        self._exchanged = count = self._exchanged + 1
        signature = (len(KINDS) + EXCHANGES.index(kind)) | len(DTYPES) << 8 | _NONE << 16 | _NO_ROOT << 32
        place = self._sites.get(site) or self._new_site(site)
        at, now = _EXCHANGES_AT + count % _EXCHANGES_KEPT * _RECORD, monotonic()
        _EXCHANGE(self._map, at, now, number, signature, 0, place, 0, 0, count)

    def begin_at(self, sequence: int) -> None:
        """Go on after `sequence`, which all ranks have agreed on: what came before is not compared any more."""
        self._chain = _mixed(0, sequence)
        # What failed may have been an exchange that some had come to: all go on from a count that nobody has reached.
        self._exchanged |= _EXCHANGES_OF_AN_EPOCH - 1
        self.exchange("attempt_reconnect", sequence, "?")

    def mark_broken(self) -> None:
        """Say that this communicator broke or was closed: in which order others are used beside it means nothing."""
        _WORD.pack_into(self._map, _BROKE, 1)

    def _new_site(self, text: str) -> int:
        self._next_site += 1
        if len(self._sites) >= SITES:
            self._sites.clear()
            self._void_codes()
        self._sites[text] = self._next_site
        raw = text.encode(errors="replace")[-(_TEXT - 10) :]
        at = _SITES_AT + self._next_site % SITES * _TEXT
        _WORD.pack_into(self._map, at + _TEXT - 8, 0)
        _SITE.pack_into(self._map, at, len(raw), raw, self._next_site)
        return self._next_site

    def close(self) -> None:
        """Give the memory back; it stays as long as the watcher holds its own. What is written later goes nowhere."""
        mapped, self._map = self._map, _NOWHERE
        mapped.close()
        os.close(self.fd)


def _signature(operation: Operation) -> int:
    op = _NONE if operation.op is None else operation.op.nccl
    root = _NO_ROOT if operation.root is None else operation.root
    way = 0 if operation.graph is None else _BY_GRAPH
    return KINDS.index(operation.kind) | operation.dtype.nccl << 8 | op << 16 | way | root << 32


def _mixed(signature: int, count: int) -> float:
    """Return a hash in which what differs little differs everywhere: a number from 0 to 1, in steps of 2**-45."""
    mixed = (signature * _ODD ^ count) & _MASK
    for _ in range(3):
        mixed = (mixed ^ mixed >> 32) * _ODD & _MASK
    return (mixed >> 64 - _HASH_BITS) / (1 << _HASH_BITS)


def _round(slots: memoryview[Any], first: int, last: int) -> list[Any]:
    """Return what the slots of a ring hold for these collectives."""
    begin, end = first % COLLECTIVES, last % COLLECTIVES + 1
    if begin < end or first > last:
        return slots[begin:end].tolist()
    return slots[begin:].tolist() + slots[:end].tolist()


class Reader:
    """The watcher's end.

    Parameters
    ----------
    fd : int
        Descriptor of the memory file; not kept.

    Attributes
    ----------
    floor, pairs_floor : int
        The numbers of collectives, and of sends and receives, that all ranks agreed to go on after; what came before
        counts no more.

    Raises
    ------
    ValueError
        It is no recorder of this layout.
    """

    def __init__(self, fd: int) -> None:
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        if os.fstat(fd).st_size != SIZE or not seals & fcntl.F_SEAL_SHRINK:
            raise ValueError("not a recorder of this layout, or one that could shrink")
        self._map = mmap.mmap(fd, SIZE)
        self._words, self._floats = memoryview(self._map).cast("Q"), memoryview(self._map).cast("d")
        self._last = 0
        self.floor = self.pairs_floor = 0

    def beat(self) -> None:
        """Tell the rank that its watcher runs."""
        self._words[_BEAT // 8] = monotonic_ns()

    def head(self) -> int:
        """Return the number of the newest collective; 0: none yet."""
        if self._last < self.floor:
            self._last = self.floor
        # All slots are looked through only if the one after the last known has changed.
        if self._words[(_PLACES[(self._last + 1) % COLLECTIVES] >> 3) + 7] > self._last:
            slots = self._words[7 : _PAIRS_AT // 8 : _RECORD // 8]
            self._last = max(self._last, max(slots.tolist()))
        return self._last

    @property
    def broke(self) -> bool:
        """Whether the communicator ever broke, or was closed."""
        return bool(self._words[_BROKE // 8])

    def times(self, first: int, last: int) -> list[float]:
        """Return when each of these collectives was submitted, in seconds; 0 for one that is not there."""
        # In this order: whoever writes a record clears the time first, and stores the number last.
        found: list[float] = _round(self._floats[: _PAIRS_AT // 8 : _RECORD // 8], first, last)
        there: list[int] = _round(self._words[7 : _PAIRS_AT // 8 : _RECORD // 8], first, last)
        wanted = range(first, last + 1)
        if there == list(wanted):
            return found
        return [when if is_ == number else 0.0 for number, is_, when in zip(wanted, there, found, strict=False)]

    def collective(self, number: int) -> Entry | None:
        """Return a collective, or ``None`` if it is not there: not yet, being written, or overwritten."""
        return self._entry(_PLACES[number % COLLECTIVES], number) if number > self.floor else None

    def chain(self, number: int) -> int | None:
        """Return the hash of all collectives up to this one, or ``None`` if it is not there."""
        if number <= self.floor:
            return None
        first = _PLACES[number % COLLECTIVES] >> 3
        time, chain = self._words[first], self._words[first + 1]
        return chain if self._stood(first, time, number) else None

    def pair(self, position: int) -> tuple[int, Entry] | None:
        """Return the peer and a send or receive by its position, or ``None`` if it is not there."""
        entry = self._entry(_PAIRS_AT + position % PAIRS * _RECORD, position) if position > 0 else None
        if entry is None:
            return None
        return entry.chain >> 40, entry._replace(number=entry.chain & 0xFFFFFFFFFF)

    def glance(self) -> Glance:
        """Return what shows whether the rank has submitted anything since."""
        return Glance(self.head(), self.pairs(), self.exchanges())

    def pairs(self) -> int:
        """Return the position of the newest send or receive; 0: none yet."""
        return int(self._words[_POSITION // 8])

    def exchanges(self) -> int:
        """Return how many exchanges over the control plane the rank has come to."""
        return max(self._words[_EXCHANGES_AT // 8 + 7 : _BEAT // 8 : _RECORD // 8].tolist())

    def exchange(self) -> tuple[int, Entry | None]:
        """Return how many exchanges over the control plane the rank has come to, and the newest of them."""
        count = self.exchanges()
        entry = self._entry(_EXCHANGES_AT + count % _EXCHANGES_KEPT * _RECORD, count) if count else None
        return count, entry and entry._replace(number=entry.chain)

    def oldest(self) -> int:
        """Return the number of the oldest collective that is not in danger of being overwritten while it is read."""
        return max(1, self.head() - COLLECTIVES * 7 // 8)

    def newest(self, most: int) -> list[Entry]:
        """Return up to `most` of the newest submissions of both rings, oldest first."""
        head, position = self.head(), self.pairs()
        found = [self.collective(number) for number in range(max(1, head - most + 1), head + 1)]
        found += [pair and pair[1] for pair in map(self.pair, range(max(1, position - most + 1), position + 1))]
        return sorted(filter(None, found), key=lambda entry: entry.time)[-most:]

    def _entry(self, at: int, number: int) -> Entry | None:
        first = at // 8
        time, when = self._words[first], self._floats[first]
        chain, signature, count, site, bound, stream = self._words[first + 1 : first + 7].tolist()
        if not self._stood(first, time, number):
            return None
        # A rank may write over its own memory: what is no time cannot be told as JSON.
        when = when if isfinite(when) else 0.0
        return Entry(number, when, chain, signature, count, self._site(site), bound / 1e3, stream)

    def _stood(self, first: int, time: int, number: int) -> bool:
        """Return whether a record was there, of this number and time, while the words between the two were read.

        Who clears it may be stopped anywhere in that: the one end is cleared then, and the other one not yet.
        """
        return self._words[first + 7] == number and self._words[first] == time != 0

    def _site(self, number: int) -> str:
        at = _SITES_AT + number % SITES * _TEXT
        before = self._words[(at + _TEXT) // 8 - 1]
        length, raw, _ = _SITE.unpack_from(self._map, at)
        after = self._words[(at + _TEXT) // 8 - 1]
        return raw[:length].decode(errors="replace") if before == after == number else "?"


if __name__ == "__main__":
    # The command stands at the top of the house, and what is below does not import it.
    import runpy

    runpy.run_module("butter_mpi.merging", run_name="__main__")
