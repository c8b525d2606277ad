"""The record of submissions: what is written is what is read, or nothing; no MPI."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from butter_mpi.collectives import RULES, Operation, control_signature, describe, signature
from butter_mpi.enums import DType, PreMulSum, ReduceOp
from butter_mpi.recorder import COLLECTIVES, DTYPES, EXCHANGES, KINDS, OPS, PAIRS, SITES, SIZE, Reader, Recorder
from butter_mpi.recording import take

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """A recorder with a deadline of 10 s."""
    one = Recorder(10)
    yield one
    one.close()


def every_operation() -> list[Operation]:
    """One of each kind, element type, operator and of two roots."""
    return [
        Operation(kind, 1024, dtype, op=op, root=root, peer=3 if rule.paired else None, site=f"app/{kind}.py:7")
        for kind, rule in RULES.items()
        for dtype in DType
        for op in ([*ReduceOp, PreMulSum(2)] if rule.reduces else [None])
        for root in ((0, 5) if rule.rooted else [None])
    ]


def test_a_graph_is_another_operation(recorder: Recorder) -> None:
    """What is launched as a graph reads as that, in messages and in a recording, and its hash differs from a call's."""
    reader, chains = Reader(recorder.fd), []
    for number, graph in enumerate((None, object(), None), 1):
        operation = Operation("all_reduce", 4, DType.FLOAT32, op=ReduceOp.SUM, site="app/train.py:1", graph=graph)
        recorder._chain = 0.0
        recorder.write(operation, number)
        entry = reader.collective(number)
        assert entry is not None and entry.text() == describe(signature(operation, number))
        assert (entry.op, entry.root, entry.by_graph) == ("sum", None, graph is not None)
        chains.append(entry.chain)
    assert chains[0] == chains[2] != chains[1] and "by a CUDA graph" in reader_text(reader)


def reader_text(reader: Reader) -> str:
    """Return the operations of a recording."""
    about = dict.fromkeys(("communicator", "rank", "world_size", "host", "pid", "state", "how", "cause"))
    return str([one["operation"] for one in take(reader, about)["collectives"]["records"]])


def barrier(site: str = "app/train.py:1") -> Operation:
    """A barrier from this call site."""
    return Operation("barrier", 0, DType.UINT8, site=site)


def test_every_operation_reads_as_others_describe_it(recorder: Recorder) -> None:
    """Each kind, element type, operator and root is read back with the text of ``collectives.describe``."""
    reader, positions = Reader(recorder.fd), itertools.count(1)
    for number, operation in enumerate(every_operation(), 1):
        before = time.monotonic()
        recorder.write(operation, number)
        if operation.rule.paired:
            found = reader.pair(next(positions))
            assert found is not None and found[0] == 3
            entry = found[1]
        else:
            read = reader.collective(number)
            assert read is not None
            entry = read
        assert entry.text() == describe(signature(operation, number))
        assert (entry.kind, entry.number, entry.elements, entry.bound) == (operation.kind, number, 1024, 10.0)
        assert before - 1e-6 <= entry.time <= time.monotonic()


def test_exchange_reads_as_others_describe_it(recorder: Recorder) -> None:
    """The newest exchange over the control plane is read back with its count; it is no collective."""
    reader = Reader(recorder.fd)
    assert reader.exchange() == (0, None)
    for count, kind in enumerate(EXCHANGES * 2, 1):
        recorder.exchange(kind, 40 + count, f"app/{kind}.py:7")
        found, entry = reader.exchange()
        assert found == count and entry is not None
        assert entry.text() == describe(control_signature(kind, 40 + count, f"app/{kind}.py:7"))
    assert (reader.head(), reader.newest(5)) == (0, [])


def test_names_are_those_of_the_enums() -> None:
    """The tables that the watcher reads by are the package's own, by number."""
    assert tuple(RULES) == KINDS
    assert list(enumerate(DTYPES)) == sorted((one.nccl, one.label) for one in DType)
    assert list(enumerate(OPS)) == sorted((one.nccl, one.label) for one in (*ReduceOp, PreMulSum(1)))
    package = _ROOT / "butter_mpi"
    callers = "".join(path.read_text() for path in [*(package / "planes").glob("*.py"), package / "splitting.py"])
    assert {*re.findall(r'\b_(?:exchanged|divided)\("(\w+)"', callers), "attempt_reconnect"} == set(EXCHANGES)


def test_numbers_of_any_size(recorder: Recorder) -> None:
    """The largest count, stream, root and sequence that an operation can have are kept."""
    reader, number = Reader(recorder.fd), 2**40 - 1
    operation = Operation("broadcast", 2**63 - 1, DType.UINT8, root=2**31 - 1, stream=2**64 - 1, site="s")
    recorder.write(operation, number)
    entry = reader.collective(number)
    assert entry is not None and entry.text() == describe(signature(operation, number)) and entry.stream == 2**64 - 1


def test_operation_that_waits_for_ever_has_no_bound(recorder: Recorder) -> None:
    """What may wait for ever carries no deadline."""
    recorder.write(Operation("broadcast", 4, DType.UINT8, root=0, waits=True, waits_for_ever=True), 1)
    entry = Reader(recorder.fd).collective(1)
    assert entry is not None and entry.bound == 0


def test_overrun_ring_keeps_the_newest(recorder: Recorder) -> None:
    """A full ring holds the newest records and says of older ones that they are not there."""
    reader = Reader(recorder.fd)
    assert (reader.head(), reader.pairs(), reader.newest(5), reader.collective(0)) == (0, 0, [], None)
    for number in range(1, COLLECTIVES + 11):
        recorder.write(barrier(), number)
    for number in range(1, PAIRS + 11):
        recorder.write(Operation("send", number, DType.UINT8, peer=2, site="s"), number)
    assert reader.head() == COLLECTIVES + 10 and reader.pairs() == PAIRS + 10
    assert reader.collective(10) is None and reader.pair(10) is None
    assert reader.collective(COLLECTIVES + 11) is None and reader.pair(PAIRS + 11) is None
    kept = [reader.collective(number) for number in range(11, COLLECTIVES + 11)]
    assert [entry.number for entry in kept if entry] == list(range(11, COLLECTIVES + 11))
    pairs = [reader.pair(number) for number in range(11, PAIRS + 11)]
    assert [(pair[0], pair[1].elements) for pair in pairs if pair] == [(2, n) for n in range(11, PAIRS + 11)]
    assert 11 < reader.oldest() < COLLECTIVES


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 40, COLLECTIVES - 1, COLLECTIVES, COLLECTIVES + 1, 9000]), max_size=4))
def test_head_is_found_however_far_it_went_meanwhile(steps: list[int]) -> None:
    """The newest number is found after few and after many submissions between two looks."""
    recorder, number = Recorder(10), 0
    try:
        reader = Reader(recorder.fd)
        for step in steps:
            for one in range(number + max(1, step - COLLECTIVES), number + step + 1):
                recorder.write(barrier(), one)
            number += step
            assert reader.head() == number
    finally:
        recorder.close()


def test_newest_of_both_rings_by_time(recorder: Recorder) -> None:
    """The newest submissions are those of both rings, in the order in which they were made."""
    reader = Reader(recorder.fd)
    for number in range(1, 6):
        recorder.write(barrier(), number)
        recorder.write(Operation("recv", 8, DType.UINT8, peer=1, site="s"), number)
    assert [(entry.kind, entry.number) for entry in reader.newest(3)] == [("recv", 4), ("barrier", 5), ("recv", 5)]


def test_what_came_before_a_new_beginning_counts_no_more(recorder: Recorder) -> None:
    """After a reconnect older records are out of sight, and the hash depends on what came after it alone."""
    other = Recorder(10)
    try:
        for number in range(1, 4):
            recorder.write(barrier(), number)
        for one in (recorder, other):
            one.begin_at(7)
            one.write(barrier(), 8)
        readers = [Reader(one.fd) for one in (recorder, other)]
        for reader in readers:
            reader.floor = 7
            assert reader.head() == 8 and reader.collective(3) is None
        entries = [reader.collective(8) for reader in readers]
        assert entries[0] and entries[1] and entries[0].chain == entries[1].chain
    finally:
        other.close()


def test_head_goes_on_from_a_new_beginning(recorder: Recorder) -> None:
    """After a reconnect to a larger number a rank stands at that number, and goes on from there."""
    recorder.write(barrier(), 1)
    reader = Reader(recorder.fd)
    assert reader.head() == 1
    reader.floor = 9
    assert reader.head() == 9
    recorder.write(barrier(), 10)
    assert reader.head() == 10


# -- the hash --------------------------------------------------------------------------------------------------------

_COUNTS = sorted({0, 1, 2, 3, 1000, 1024, 1026, 1536, *(1 << bit for bit in range(40))})


def test_no_two_signatures_have_one_hash(recorder: Recorder) -> None:
    """Whatever differs (kind, count, element type, operator or root), the hash of the history differs."""
    reader, seen = Reader(recorder.fd), dict[int, str]()
    shapes = [one for one in every_operation() if not one.rule.paired]
    for shape, count in itertools.product(shapes, _COUNTS):
        recorder.begin_at(0)
        recorder.write(Operation(shape.kind, count, shape.dtype, op=shape.op, root=shape.root, site="s"), 1)
        entry = reader.collective(1)
        assert entry is not None
        assert seen.setdefault(entry.chain, entry.text()) == entry.text(), f"{entry.text()} is {seen[entry.chain]}"


_SHAPES = st.sampled_from([one for one in every_operation() if not one.rule.paired])
_HISTORY = st.lists(st.tuples(_SHAPES, st.sampled_from(_COUNTS)), max_size=12)


def _chains(history: list[tuple[Operation, int]], site: str) -> list[int]:
    recorder = Recorder(10)
    try:
        reader, found = Reader(recorder.fd), []
        for number, (shape, count) in enumerate(history, 1):
            one = Operation(shape.kind, count, shape.dtype, op=shape.op, root=shape.root, site=f"{site}:{number}")
            recorder.write(one, number)
            entry = reader.collective(number)
            assert entry is not None
            found.append(entry.chain)
        return found
    finally:
        recorder.close()


@settings(deadline=None)
@given(_HISTORY, _HISTORY, _HISTORY, _HISTORY)
def test_hashes_agree_exactly_as_long_as_histories_do(
    same: list[tuple[Operation, int]],
    one: list[tuple[Operation, int]],
    other: list[tuple[Operation, int]],
    tail: list[tuple[Operation, int]],
) -> None:
    """Call sites do not count; from the first difference on hashes differ, also where what follows is equal."""
    left, right = same + one + tail, same + other + tail
    chains = zip(_chains(left, "a"), _chains(right, "b"), strict=False)
    told = [here == there for here, there in chains]
    assert told == [left[: n + 1] == right[: n + 1] for n in range(len(told))]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(_SHAPES, st.sampled_from(_COUNTS)), min_size=40, max_size=60), st.integers(0, 2**40))
def test_hash_is_exact(history: list[tuple[Operation, int]], begin: int) -> None:
    """A hash loses no bit on its way, however long: it is what whole numbers of any size give."""
    recorder = Recorder(10)
    try:
        reader = Reader(recorder.fd)
        recorder.begin_at(begin)
        model = Fraction(recorder._chain)
        for number, (shape, count) in enumerate(history, begin + 1):
            one = Operation(shape.kind, count, shape.dtype, op=shape.op, root=shape.root, site="s")
            recorder.write(one, number)
            model = 3 * model + Fraction(one.code[1])
            model = model if model < 64 else model % 1
            entry = reader.collective(number)
            assert entry is not None and 2**45 % model.denominator == 0
            assert Fraction(struct.unpack("d", struct.pack("Q", entry.chain))[0]) == model
    finally:
        recorder.close()


# -- call sites ------------------------------------------------------------------------------------------------------


def test_more_call_sites_than_there_is_room_for(recorder: Recorder) -> None:
    """A record's call site is its own or unknown, never another one; the newest are known."""
    reader, count = Reader(recorder.fd), 3 * SITES + 7
    for number in range(1, count + 1):
        recorder.write(barrier(f"app/a.py:{number}"), number)
        recorder.write(barrier("app/b.py:1"), number + count)
    known = 0
    for number in range(1, count + 1):
        entry = reader.collective(number)
        assert entry is not None and entry.site in (f"app/a.py:{number}", "?")
        known += entry.site != "?"
    assert known >= SITES // 2
    newest = reader.collective(2 * count)
    assert newest is not None and newest.site == "app/b.py:1"


def test_one_operation_that_comes_again_and_again(recorder: Recorder) -> None:
    """What is kept of an operation is what a fresh one would give: hash, words, and its call site, also much later."""
    other, kept = Recorder(10), barrier("app/loop.py:5")
    try:
        number = 0
        for turn in range(3):
            for _ in range(2):
                number += 1
                recorder.write(kept, number)
                other.write(barrier("app/loop.py:5"), number)
            # After these there is no room left for call sites of before.
            for line in range(SITES + 10):
                number += 1
                for one in (recorder, other):
                    one.write(barrier(f"app/other{turn}.py:{line}"), number)
        number += 1
        recorder.write(kept, number)
        other.write(barrier("app/loop.py:5"), number)
        mine, theirs = (Reader(one.fd).collective(number) for one in (recorder, other))
        assert mine is not None and theirs is not None
        assert mine[2:] == theirs[2:] and mine.site == "app/loop.py:5"
    finally:
        other.close()


def test_order_of_two_operations_counts(recorder: Recorder) -> None:
    """The same operations in another order give another hash, and it stays another one whatever follows."""
    other = Recorder(10)
    try:
        shapes = [one for one in every_operation() if not one.rule.paired][:40]
        for first, second in itertools.combinations(shapes, 2):
            recorder.begin_at(0)
            other.begin_at(0)
            for number, (here, there) in enumerate(((first, second), (second, first), (first, first)), 1):
                recorder.write(here, number)
                other.write(there, number)
            entries = [Reader(one.fd).collective(3) for one in (recorder, other)]
            assert entries[0] and entries[1] and entries[0].chain != entries[1].chain, (first, second)
    finally:
        other.close()


@pytest.mark.parametrize("letter", ["a", "\xe9", "\u6f22", "\U0001f9c8", "\udcff"])
def test_call_site_keeps_its_end(recorder: Recorder, letter: str) -> None:
    """A call site of the longest form, in any script, still ends with file and line: they are what people look for."""
    site = f"{letter * 107}/train.py:4321"[-120:]
    recorder.write(barrier(site), 1)
    entry = Reader(recorder.fd).collective(1)
    assert entry is not None
    assert entry.site[-14:] == "/train.py:4321"


# -- the file --------------------------------------------------------------------------------------------------------


def test_file_keeps_its_size(recorder: Recorder) -> None:
    """The file can neither shrink under its reader nor be opened to that again."""
    for size in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(recorder.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(recorder.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def _memory(size: int, seals: int) -> int:
    fd = os.memfd_create("another", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize(
    ("size", "seals"), [(SIZE, 0), (SIZE, fcntl.F_SEAL_GROW), (SIZE - 8, fcntl.F_SEAL_SHRINK), (0, fcntl.F_SEAL_SHRINK)]
)
def test_foreign_memory_is_refused(size: int, seals: int) -> None:
    """A memory file of another size, or one that could shrink, is refused."""
    fd = _memory(size, seals)
    try:
        with pytest.raises(ValueError, match="not a recorder"):
            Reader(fd)
    finally:
        os.close(fd)


def test_foreign_file_is_refused(tmp_path: Path) -> None:
    """An ordinary file, or a pipe, is refused as what it is: no recorder."""
    path = tmp_path / "file"
    path.write_bytes(b"\0" * SIZE)
    pipe = os.pipe()
    fds = [os.open(path, os.O_RDWR), *pipe]
    try:
        for fd in fds:
            with pytest.raises(ValueError, match="not a recorder"):
                Reader(fd)
    finally:
        for fd in fds:
            os.close(fd)


def test_beat(recorder: Recorder) -> None:
    """The rank reads when its watcher looked last."""
    assert recorder.beat() == 0
    before = time.monotonic_ns()
    Reader(recorder.fd).beat()
    assert before <= recorder.beat() <= time.monotonic_ns()


@pytest.mark.parametrize("cleared", [slice(0, 32), slice(32, 64)], ids=["its begin", "its end"])
def test_half_a_record_is_none(recorder: Recorder, cleared: slice) -> None:
    """Who writes over a record clears it first, and may be stopped in the middle of that, from either end."""
    recorder.write(Operation("all_reduce", 5, DType.FLOAT32, op=ReduceOp.SUM), 1)
    recorder.write(Operation("send", 7, DType.UINT8, peer=1), 1)
    reader, at = Reader(recorder.fd), 64
    assert reader.collective(1) and reader.pair(1) and reader.chain(1) is not None
    for begin in (at, COLLECTIVES * 64 + at):
        part = slice(begin + cleared.start, begin + cleared.stop)
        recorder._map[part] = bytes(32)
    assert (reader.collective(1), reader.pair(1), reader.chain(1)) == (None, None, None)


# -- another process -------------------------------------------------------------------------------------------------

WRITER = """
import socket, sys
from butter_mpi.collectives import Operation
from butter_mpi.enums import DType
from butter_mpi.recorder import Recorder
recorder = Recorder(10)
with socket.socket(fileno=int(sys.argv[1])) as sock:
    socket.send_fds(sock, [b"x"], [recorder.fd])
number, sites = 0, int(sys.argv[2])
while True:
    number += 1
    name = number % sites
    recorder.write(
        Operation("barrier", number * 3, DType.UINT8, site=f"{name:03}" * (10 + name % 60), stream=number * 5), number
    )
    recorder.write(Operation("send", number * 7, DType.UINT8, peer=number % 1000, site="s", stream=number), number)
"""


@pytest.fixture
def writer(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[bytes], Reader]]:
    """A process that writes without a pause, and a reader of what it writes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            command = [sys.executable, "-S", "-c", WRITER, str(theirs.fileno()), str(request.param)]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env={"PYTHONPATH": str(_ROOT)})
        try:
            ours.settimeout(30)
            _, fds, _, _ = socket.recv_fds(ours, 1, 1)
            reader = Reader(fds[0])
            os.close(fds[0])
            yield process, reader
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("writer", [5, SITES, 999], indirect=True)
def test_torn_records_are_never_returned(writer: tuple[subprocess.Popen[bytes], Reader]) -> None:
    """Whatever is read while it is written, or overwritten, is whole, with its own call site or none."""
    process, reader = writer
    sites = int(process.args[-1])  # type: ignore[index,arg-type]
    end, read, wrong = time.monotonic() + 2.5, 0, list[str]()
    while time.monotonic() < end:
        head, position = reader.head(), reader.pairs()
        # The newest, the one that is overwritten next, and those that lose their call site about now.
        losing = range(head - SITES - 2, head - SITES + 12)
        for number in (head, head + 1, head - COLLECTIVES, head - COLLECTIVES + 1, *losing):
            entry = reader.collective(number)
            if entry is not None:
                read += 1
                name = number % sites
                whole = (entry.elements, entry.stream, entry.kind) == (number * 3, number * 5, "barrier")
                if not (whole and entry.time and entry.site in (f"{name:03}" * (10 + name % 60), "?")):
                    wrong.append(f"{number}: {entry}")
        for at in (position, position + 1, position - PAIRS, position - PAIRS + 1):
            pair = reader.pair(at)
            if pair is not None:
                peer, entry = pair
                read += 1
                if (peer, entry.number, entry.elements, entry.stream) != (at % 1000, at, at * 7, at):
                    wrong.append(f"pair {at}: {pair}")
    assert process.poll() is None and read > 1000
    assert not wrong, f"{len(wrong)} of {read}: {wrong[:3]}"


@pytest.mark.parametrize("writer", [5], indirect=True)
def test_record_outlives_its_writer(writer: tuple[subprocess.Popen[bytes], Reader]) -> None:
    """What a killed process submitted can still be read."""
    process, reader = writer
    while reader.head() < 100:
        assert process.poll() is None
    process.kill()
    process.wait()
    newest = [entry for entry in reader.newest(8) if entry.kind == "barrier"]
    assert newest and newest[-1].number >= 100 and newest[-1].elements == 3 * newest[-1].number


def test_watchers_modules_need_no_installed_package() -> None:
    """The watcher imports the standard library and its own few modules only."""
    code = (
        "import sys, json; import butter_mpi.sentinel.watcher\n"
        "print(json.dumps([n for n in sys.modules if n.startswith(('butter_mpi', 'numpy', 'mpi4py', 'cuda'))]))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-s", "-c", f"import sys; sys.path.insert(0, {str(_ROOT)!r}); {code}"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    names = set(json.loads(done.stdout))
    watcher = "watcher watched messages crying gathering judging ordering process recordings relay".split()
    between = "across connections elsewhere facing links mailing networks".split()
    own = {f"butter_mpi.sentinel.{name}" for name in [*watcher, *between]}
    rooms = "outcome _version descent descriptors findings recorder recording segments sentinel".split()
    shared = {f"butter_mpi.{name}" for name in rooms}
    assert names <= {"butter_mpi", *shared, *own}, names
