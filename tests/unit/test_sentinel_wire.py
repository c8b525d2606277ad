"""The wire between two watchers: what one sends the other gets; strangers get nothing, and change nothing."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from butter_mpi.sentinel.messages import LIMIT
from butter_mpi.sentinel.wire import FIELDS, SECRET_BYTES, Channel, Refused

SECRET = bytes(range(SECRET_BYTES))
FUZZ_SECONDS = float(os.environ.get("BUTTER_MPI_TEST_FUZZ_SECONDS") or 1)
NOTICE = {"error": "PeerLostError", "lost": [1], "text": "rank 1 was killed", "n": 4, "records": {"1": "a"}}
STANDING = {"low": 7, "ranks": [4], "said": "rank 4", "closed": False}
FACT = {"origin": 3, "serial": 7}
LETTER = {"origin": 4, "to": 1, "n": 7}
MESSAGES: list[dict[str, Any]] = [
    {"kind": "beat", "awake": True, "waits": False},
    {"kind": "up"},
    {"kind": "begun"},
    {"kind": "over"},
    {"kind": "deaf", "node": 2},
    {"kind": "hears", "node": 2},
    {"kind": "place", "epoch": 0, "at": 7, "chain": 2**60, **STANDING},
    {"kind": "lowest", "epoch": 0, "at": 7, **STANDING},
    {"kind": "show", "epoch": 0, "first": 7, "last": 9},
    {"kind": "shown", "epoch": 0, "first": 7, "last": 9, "rank": 4, "entries": [[7, 0.5, 2**60, 3, 4, "a", 10.0, 0]]},
    {"kind": "sides", "origin": 2, "to": 0, "epoch": 0, "rows": [[4, 1, 0, 7, True, "x", False, []]]},
    {"kind": "gathering", "generation": 0, "come": [[2, "x", 7, 0, 9.0, 1]], "elsewhere": [], "lost": [], "cut": []},
    {"kind": "mail", **LETTER, "generation": 2, "by": 4, "ranks": [0], "letter": "op", "body": {"n": 1}},
    {"kind": "got", **LETTER},
    {"kind": "notice", **FACT, "notice": NOTICE, "epoch": 0},
    {"kind": "gone", **FACT, "rank": 2, "text": "rank 2 was killed"},
    {"kind": "stopped", **FACT, "rank": 2, "text": "rank 2 has been stopped"},
    {"kind": "running", **FACT, "rank": 2},
    {"kind": "cut", **FACT, "node": 2, "text": "no word from host n02"},
    {"kind": "back", **FACT, "node": 2},
    {"kind": "agreed", **FACT, "generation": 2, "after": 0, "what": "x", "spans": [], "sequence": 7, "pairs": 0},
    {"kind": "declined", **FACT, "generation": 2, "error": "x", "spans": [], "text": "", "lost": [2], "alone": True},
]


def ends(caller: bytes = SECRET, called: bytes = SECRET) -> tuple[Channel, Channel]:
    """The two ends of a connection of node 4 with node 1, of which nothing has travelled yet."""
    return Channel(caller, 4, 1), Channel(called, 1, may_call=lambda node: node in (3, 4))


def carry(source: Channel, target: Channel) -> tuple[bytes, list[dict[str, Any]]]:
    """Move what one end has to send to the other; returns it, and the messages that it makes there."""
    data = bytes(source.out)
    source.out.clear()
    return data, target.feed(data)


def opened(**secrets: bytes) -> tuple[Channel, Channel]:
    """Two ends that have proved themselves to one another."""
    one, other = ends(**secrets)
    for source, target in ((one, other), (other, one), (one, other), (other, one)):
        carry(source, target)
    assert one.open and other.open and other.peer == 4
    return one, other


def sent(channel: Channel, *messages: dict[str, Any]) -> bytes:
    """The bytes of messages."""
    for message in messages:
        channel.send(**message)
    data = bytes(channel.out)
    channel.out.clear()
    return data


def test_every_kind_is_tried_here() -> None:
    """The list above has each kind once."""
    assert [one["kind"] for one in MESSAGES] == list(FIELDS)


@pytest.mark.parametrize("step", [1, 7, 100000])
def test_what_is_sent_arrives_in_whatever_pieces(step: int) -> None:
    """Both ways, in order, also one byte at a time."""
    for source, target in (opened(), opened()[::-1]):
        data, found = sent(source, *MESSAGES), []
        for first in range(0, len(data), step):
            found += target.feed(data[first : first + step])
        assert found == MESSAGES


def test_listener_reads_nothing() -> None:
    """What travels shows no word of a message, and equal messages look different each time."""
    one, _ = opened()
    first, second = sent(one, *MESSAGES), sent(one, *MESSAGES)
    assert len(first) == len(second) and first != second
    for word in (b"notice", b"kind", b"rank", b"killed", b"awake"):
        assert word not in first + second
    assert sent(one, MESSAGES[0])[4:20] != sent(one, MESSAGES[0])[4:20]


def test_caller_without_the_secret_is_shown_nothing() -> None:
    """It gets one random number, and is refused; nothing that was made with the secret."""
    one, other = ends(caller=bytes(SECRET_BYTES))
    carry(one, other)
    number, _ = carry(other, one)
    assert len(number) == 32
    with pytest.raises(Refused, match="does not know the secret"):
        carry(one, other)
    assert not other.out and not other.open


def test_called_without_the_secret_is_refused() -> None:
    """A stranger that sits at the address is not taken for a watcher."""
    one, other = ends(called=bytes(SECRET_BYTES))
    carry(one, other)
    carry(other, one)
    proof = bytes(one.out)
    with pytest.raises(Refused, match="does not know the secret"):
        one.feed(proof)  # Its own proof, sent back.
    assert not one.open
    with pytest.raises(Refused):
        carry(one, other)


@pytest.mark.parametrize("hello", ["another node", "a stranger's node", "no hello"])
def test_wrong_hello_is_not_answered(hello: str) -> None:
    """Who calls another node, or says it is one that does not call here, or speaks another language, hears nothing."""
    calls = {
        "another node": lambda: bytes(Channel(SECRET, 4, 2).out),
        "a stranger's node": lambda: bytes(Channel(SECRET, 9, 1).out),
        "no hello": lambda: b"GET / HTTP/1.1\r\nHost: n01\r\n\r\n".ljust(200),
    }
    _, other = ends()
    with pytest.raises(Refused, match="no watcher of this job calls"):
        other.feed(calls[hello]())
    assert not other.out


def test_recorded_opening_is_of_no_use_again() -> None:
    """Whoever plays back what a caller once said is refused: each opening has numbers of its own."""
    one, other = ends()
    hello, _ = carry(one, other)
    carry(other, one)
    proof, _ = carry(one, other)
    carry(other, one)
    _, again = ends()
    again.feed(hello)
    with pytest.raises(Refused):
        again.feed(proof + sent(one, *MESSAGES))
    assert not again.open


def _repeated(data: bytes, frame: bytes) -> bytes:
    return frame + frame


def _left_out(data: bytes, frame: bytes) -> bytes:
    return data[len(frame) :]


def _bit(data: bytes, frame: bytes) -> bytes:
    return data[:10] + bytes([data[10] ^ 1]) + data[11:]


@pytest.mark.parametrize("change", [_repeated, _left_out, _bit])
def test_changed_stream_is_refused(change: Callable[[bytes, bytes], bytes]) -> None:
    """A message that is repeated, left out or changed ends the connection."""
    one, other = opened()
    frame = sent(one, MESSAGES[1])
    data = frame + sent(one, *MESSAGES)
    with pytest.raises(Refused, match="changed, inserted, repeated or left out"):
        other.feed(change(data, frame))


@pytest.mark.parametrize("source", ["sent back", "another connection", "another job"])
def test_message_of_elsewhere_is_refused(source: str) -> None:
    """What this end sent itself, or is of another connection or job, is not taken."""
    _, other = opened()
    secret = os.urandom(SECRET_BYTES)
    frames = {
        "sent back": lambda: sent(other, MESSAGES[1]),
        "another connection": lambda: sent(opened()[0], MESSAGES[1]),
        "another job": lambda: sent(opened(caller=secret, called=secret)[0], MESSAGES[1]),
    }
    with pytest.raises(Refused):
        other.feed(frames[source]())


def test_length_is_bounded() -> None:
    """A frame that says it is longer than any message is refused before its content has come."""
    _, other = opened()
    with pytest.raises(Refused, match="too long"):
        other.feed((LIMIT + 1).to_bytes(4, "big"))


@pytest.mark.parametrize(
    "message", [{"kind": "hello"}, {"kind": "beat"}, {"kind": "beat", "awake": 1, "waits": False}, {"kind": "x"}]
)
def test_what_is_no_message_is_refused(message: dict[str, Any]) -> None:
    """Also one who knows the secret can only say what there is to say."""
    one, other = opened()
    with pytest.raises(Refused):
        other.feed(sent(one, message))


def test_long_text_is_cut() -> None:
    """A verdict is never lost for its length."""
    one, other = opened()
    long = {**NOTICE, "text": "x" * (2 * LIMIT), "records": {"1": "y" * LIMIT}}
    (message,) = other.feed(sent(one, {"kind": "notice", **FACT, "notice": long, "epoch": 0}))
    assert message["notice"]["lost"] == [1] and 1000 < len(message["notice"]["text"]) < LIMIT


def _disturbed(chance: random.Random, data: bytes) -> bytes:
    """Bytes with something done to them."""
    first, second = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    how = chance.randrange(5)
    if how == 0:
        return data[:first] + data[second:]
    if how == 1:
        return data[:first] + chance.randbytes(chance.randrange(1, 64)) + data[first:]
    if how == 2:
        return data[:second] + data[first:]
    if how == 3 and first < len(data):
        return data[:first] + bytes([data[first] ^ 1 << chance.randrange(8)]) + data[first + 1 :]
    return chance.randbytes(chance.randrange(2 * len(data) + 100))


def _play(chance: random.Random) -> int:
    """One connection, disturbed at some moments; returns how many messages arrived."""
    pair, over = ends(), [False, False]
    said: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    heard: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for _ in range(chance.randrange(4, 14)):
        for end in (0, 1):
            source, target = pair[end], pair[1 - end]
            if source.open and chance.random() < 0.7:
                message = chance.choice(MESSAGES)
                source.send(**message)
                said[end].append(message)
            data = bytes(source.out)
            source.out.clear()
            if chance.random() < 0.1:
                data = _disturbed(chance, data)
            try:
                heard[1 - end] += [] if over[end] else target.feed(data)
            except Refused:
                over[end] = True
            assert heard[1 - end] == said[end][: len(heard[1 - end])]
    return len(heard[0] + heard[1])


def test_whatever_comes_only_what_was_sent_is_taken() -> None:
    """Seeded: bytes that are cut, changed, repeated or inserted end the connection, and make no message of their own.

    For as long as BUTTER_MPI_TEST_FUZZ_SECONDS says.
    """
    end, seed, got = time.monotonic() + FUZZ_SECONDS, 0, 0
    while time.monotonic() < end or seed < 100:
        got += _play(random.Random(seed))
        seed += 1
    assert got > seed
