"""Messages of ranks and watcher: what is no message is refused, what is one arrives."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from butter_mpi.sentinel.messages import FIELDS, LIMIT, Garbled, pack, receive, send, unpack

Pair = tuple[socket.socket, socket.socket]

NOTICE = {"error": "PeerLostError", "lost": [1], "text": "gone", "n": 4, "operation": "barrier", "records": {"1": "a"}}
MESSAGES: list[dict[str, Any]] = [
    {"kind": "hello", "rank": 3, "secret": "ab", "older": [["key", "init"]]},
    {"kind": "judge"},
    {"kind": "closed"},
    {"kind": "leaving"},
    {"kind": "bye"},
    {"kind": "broken", "notice": NOTICE, "epoch": 1},
    {"kind": "resume", "sequence": 7, "pairs": 2, "epoch": 1},
    {"kind": "come", "what": "shrink", "sequence": 7, "pairs": 2, "limit": 20.0},
    {"kind": "elsewhere", "what": ""},
    {"kind": "post", "to": [1, 2], "letter": "op", "body": {"n": 1}, "generation": 1},
    {"kind": "ready", "pid": 12},
    {"kind": "notice", "notice": NOTICE, "epoch": 0},
    {"kind": "gone", "rank": 2, "text": "rank 2 was killed"},
    {"kind": "stopped", "rank": 2, "text": "rank 2 has been stopped"},
    {"kind": "running", "rank": 2},
    {"kind": "warning", "text": "late"},
    {"kind": "gathered", "what": "shrink", "spans": [[0, 0], [2, 5]], "sequence": 7, "pairs": 2, "generation": 1},
    {"kind": "left_out", "text": "ranks 0, 2 went on"},
    {"kind": "refused", "error": "CollectiveTimeoutError", "text": "no answer", "lost": [1], "alone": False},
    {"kind": "letter", "by": 0, "letter": "op", "body": {"n": 1}, "generation": 1},
]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two connected ends."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        yield one, other


def test_every_kind_is_tried_here() -> None:
    """The list above has each kind once."""
    assert [one["kind"] for one in MESSAGES] == list(FIELDS)


@pytest.mark.parametrize("message", MESSAGES, ids=list(FIELDS))
def test_what_is_packed_is_unpacked(message: dict[str, Any]) -> None:
    """Each kind comes through as it was."""
    assert unpack(pack(**message)) == message


@given(st.binary())
@example(b"")
@example(b"\xff\xfe")
@example(b"\xef\xbb\xbf{}")
@example(b"[" * LIMIT)
@example(b'{"kind":' * 20000)
@example(b"1" * LIMIT)
@example(b'{"kind":"bye"}\0')
@example(b'{"kind":"ready","pid":true}')
@example(b'{"kind":"ready","pid":1.0}')
@example(b'{"kind":"ready","pid":NaN}')
@example(b'{"kind":["bye"]}')
@example(b'{"kind":null}')
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    """Whatever comes ends in one error class and no other."""
    with pytest.raises(Garbled):
        unpack(data)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_NAMES = st.sampled_from(["kind", *(name for fields in FIELDS.values() for name in fields), "more"])
_OBJECTS = st.dictionaries(_NAMES, _VALUES | st.sampled_from(list(FIELDS)), max_size=4)


@given(_VALUES | _OBJECTS)
def test_json_is_a_message_or_garbled(value: Any) -> None:
    """JSON is taken only with exactly the fields of its kind, of their types."""
    try:
        message = unpack(json.dumps(value).encode())
    except Garbled:
        return
    fields = FIELDS[message["kind"]]
    assert message.keys() == fields.keys() | {"kind"}
    assert all(type(message[name]) is kind for name, kind in fields.items())


@pytest.mark.parametrize("message", MESSAGES, ids=list(FIELDS))
def test_a_field_less_or_more_or_of_another_type_is_refused(message: dict[str, Any]) -> None:
    """Each message is refused with a field missing, added, or of another type."""
    wrong = [{**message, "more": 1}, *({k: v for k, v in message.items() if k != name} for name in message)]
    wrong += [{**message, name: None} for name in message] + [
        {**message, name: 1 if type(value) is bool else True} for name, value in message.items()
    ]
    for one in wrong:
        with pytest.raises(Garbled):
            unpack(json.dumps(one).encode())


@pytest.mark.parametrize("kind", ["broken", "notice"])
@pytest.mark.parametrize("letter", ["a", "\n", "\x01", "\xe9", "\u6f22", "\U0001f9c8", "\udcff", '"'])
def test_long_text_is_cut_and_delivered(pair: Pair, kind: str, letter: str) -> None:
    """A text of any length and script arrives, cut."""
    assert send(pair[0], kind, notice={**NOTICE, "text": letter * 100_000}, epoch=0)
    message = receive(pair[1])
    assert message is not None
    assert set(message["notice"]["text"]) == {letter} and len(message["notice"]["text"]) > 1000


def test_facts_arrive_whole_with_a_text_that_is_cut(pair: Pair) -> None:
    """Who is lost, and at which operation, are not cut with the text."""
    assert send(pair[0], "notice", notice={**NOTICE, "text": "a" * 100_000}, epoch=0)
    message = receive(pair[1])
    assert message is not None
    assert {**message["notice"], "text": "", "records": {}} == {**NOTICE, "text": "", "records": {}}


@pytest.mark.parametrize("letter", ["a", "\U0001f9c8"])
def test_long_warning_is_cut_and_delivered(pair: Pair, letter: str) -> None:
    """So is a warning."""
    assert send(pair[0], "warning", text=letter * 100_000)
    message = receive(pair[1])
    assert message is not None and set(message["text"]) == {letter}


def test_many_records_are_delivered(pair: Pair) -> None:
    """A mismatch of thousands of ranks arrives: its text, where all records are too many."""
    records = {str(rank): f"all_reduce #41 (float32 x {rank}, sum) at app/train.py:33" for rank in range(10_000)}
    assert send(pair[0], "notice", notice={**NOTICE, "text": "differ", "records": records}, epoch=0)
    message = receive(pair[1])
    assert message is not None and message["notice"]["text"] == "differ" and message["notice"]["n"] == 4


def test_an_end_that_does_not_read_costs_no_time(pair: Pair) -> None:
    """Sending to an end that never reads says so instead of waiting; what was sent before is there."""
    count = 0
    while send(pair[0], "resume", sequence=count, pairs=0, epoch=1):
        count += 1
        assert count < 100_000
    assert [receive(pair[1]) for _ in range(2)] == [
        {"kind": "resume", "sequence": n, "pairs": 0, "epoch": 1} for n in range(2)
    ]


def test_an_end_that_is_gone(pair: Pair) -> None:
    """Both directions say that the other end is gone."""
    pair[1].close()
    assert not send(pair[0], "bye")
    assert receive(pair[0]) is None


def test_garbage_and_nothing_yet(pair: Pair) -> None:
    """Garbage is as good as the end; nothing yet is neither."""
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        receive(pair[1])
    pair[0].send(b"{")
    assert receive(pair[1]) is None
