"""A rank that writes over its own recorder, or says what it likes: whoever reads that comes to an end, and goes on."""

from __future__ import annotations

import json
import mmap
import random
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from butter_mpi.collectives import Operation
from butter_mpi.enums import DType
from butter_mpi.recorder import SIZE, Reader, Recorder
from butter_mpi.recording import append, take
from butter_mpi.sentinel import messages
from butter_mpi.sentinel.across import Across, Standing
from butter_mpi.sentinel.judging import Late, Pairs, Verdict, first_difference, left_out_exchange, mismatch
from butter_mpi.sentinel.ordering import Orders
from butter_mpi.sentinel.wire import FIELDS

_SEEDS = 40
_DOUBLES = [float("nan"), float("inf"), float("-inf"), 1e308, -1.0, 5.0]
_WORDS = [0, 1, 2, 30, 4096, 2**32, 30 << 40 | 3, 2**63, 2**64 - 1, *struct.unpack("6Q", struct.pack("6d", *_DOUBLES))]
ABOUT: dict[str, Any] = {"communicator": {"key": "k", "name": "init"}, "rank": 0, "world_size": 2, "host": "n01"}


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """End a test that loops."""

    def over(*_: object) -> None:
        raise AssertionError("it does not come to an end")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, 60)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def recorder() -> Recorder:
    """One that a rank has written to as it should."""
    made = Recorder(10)
    for number in range(1, 31):
        made.write(Operation("all_reduce", number, DType.FLOAT32, site=f"app/train.py:{number}"), number)
        made.write(Operation("send", 3, DType.FLOAT32, peer=1, site="app/train.py:1"), number)
    made.exchange("all_gather_json", 30, "app/train.py:31")
    return made


def garble(chance: random.Random, fd: int) -> None:
    """Write over some words, or over whole stretches, of a recorder."""
    with mmap.mmap(fd, SIZE) as memory:
        for _ in range(chance.choice([1, 8, 400])):
            # Most of them where something stands, many of these in a time.
            at = chance.choice([chance.randrange(SIZE // 8), chance.randrange(31 * 8), chance.randrange(31) * 8]) * 8
            struct.pack_into("Q", memory, at, chance.choice([*_WORDS, chance.getrandbits(64)]))
        if chance.random() < 0.3:
            at = chance.randrange(SIZE - 4096)
            memory[at : at + 4096] = chance.randbytes(4096)


def read_all(readers: dict[int, Reader], older: dict[int, Reader], file: Path) -> None:
    """Do all that a watcher does with recorders, until nothing new comes of it."""
    late, pairs, orders = Late(), Pairs(readers), Orders("dup 1")
    sent: list[tuple[str, dict[str, Any]]] = []
    across = Across(0, range(2), lambda kind, _hubs, **fields: sent.append((kind, fields)))
    for _ in range(4):
        for found in (first_difference(readers), left_out_exchange(readers), pairs.read(readers)):
            if found:
                messages.pack("notice", notice=mismatch(found).notice(), epoch=0)
        late.look(readers, 6.0)
        pairs.look(6.0)
        orders.look(readers, {"k": older}, {"k": "init"})
        across.hear(1, "show", {"epoch": 0, "first": 1, "last": readers[0].head()})
        across.look(readers, 0, lambda ranks: Standing(0, tuple(ranks), "", False), True)
        across.wait(readers, 6.0)
    for kind, fields in sent:
        messages.unpack(messages.pack(kind, **fields), FIELDS)
    for reader in readers.values():
        append(file, take(reader, ABOUT))
        [entry.text() for entry in reader.newest(8)]


@pytest.mark.parametrize("seed", range(_SEEDS))
def test_garbled_recorder(seed: int, tmp_path: Path) -> None:
    """Whatever stands in the recorder of one rank, the watcher reads it, tells it, and writes it as JSON."""
    chance = random.Random(seed)
    made = [recorder() for _ in range(3)]
    try:
        garble(chance, made[0].fd)
        readers = {rank: Reader(one.fd) for rank, one in enumerate(made[:2])}
        read_all(readers, {0: Reader(made[2].fd), 1: Reader(made[1].fd)}, tmp_path / "recordings.jsonl")
    finally:
        for one in made:
            one.close()
    lines = (tmp_path / "recordings.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["rank"] for line in lines] == [0, 0]


def test_garbled_call_sites_are_sent_cut() -> None:
    """Records whose call sites are no text are longer than a message: fewer of them are sent, the newest."""
    made = recorder()
    try:
        entry = Reader(made.fd).collective(30)
        assert entry is not None
        entries = [list(entry._replace(site="\ufffd" * 240, number=number)) for number in range(64, 0, -1)]
    finally:
        made.close()
    data = messages.pack("shown", epoch=0, first=1, last=64, rank=0, entries=entries)
    shown = messages.unpack(data, FIELDS)["entries"]
    assert len(data) <= messages.LIMIT and shown == entries[: len(shown)] and len(shown) >= 16


@pytest.mark.parametrize("name", ["error", "operation", "phase", "other"])
def test_notice_with_one_long_word_is_sent_cut(name: str) -> None:
    """What a rank says of its failure comes to the others, whichever of its words is too long."""
    notice = {**Verdict("PeerLostError", (1,), "gone", n=4).notice(), name: "x" * 70_000}
    data = messages.pack("notice", notice=notice, epoch=0)
    sent = messages.unpack(data)["notice"]
    assert len(data) <= messages.LIMIT and sent.keys() == notice.keys() and sent["lost"] == [1] and sent["n"] == 4


def test_what_cannot_be_cut_is_refused() -> None:
    """Numbers alone are too long for a message only by intent."""
    with pytest.raises(messages.Garbled, match="letter: "):
        messages.pack("letter", by=0, letter="op", body={str(number): number for number in range(9000)}, generation=1)
