"""Recordings merged: who differs first, who is behind, what is missing; and files that are not what they should be."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from helpers.recordings import KEY, operation, pair, recording, validator, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from butter_mpi.collectives import RULES, Operation, describe, signature
from butter_mpi.enums import DType, ReduceOp
from butter_mpi.merging import reading, report
from butter_mpi.merging.cli import main
from butter_mpi.recorder import COLLECTIVES, DTYPES, PAIRS
from butter_mpi.recording import RECORDING_VERSION, WIDTHS, append
from butter_mpi.recording import SCHEMA_FILE as RECORDING_FILE

_ROOT = Path(__file__).resolve().parents[2]
_RECORDING, _MERGED = validator("recording"), validator("merged")


class Told:
    """What the command says of files: for people, as JSON by its schema, and by its status, which is the same twice."""

    def __init__(self, capsys: pytest.CaptureFixture[str], files: Iterable[str], *options: str) -> None:
        self.status = main([*options, *files])
        self.text, self.err = capsys.readouterr()
        assert main([*options, "--json", *files]) == self.status
        out, err = capsys.readouterr()
        assert err == self.err and "Traceback" not in err
        self.json: dict[str, Any] = {}
        if self.status != 2:
            self.json = json.loads(out)
            _MERGED.validate(self.json)
            assert self.json["agreed"] == (self.status == 0) and not err

    @property
    def one(self) -> dict[str, Any]:
        """The one communicator."""
        (found,) = self.json["communicators"]
        return dict(found)


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Told]:
    """Write recordings to one file, and merge it."""

    def tell(*recordings: dict[str, Any], options: Iterable[str] = ()) -> Told:
        for one in recordings:
            _RECORDING.validate(shorter(one))
        path = tmp_path / "r.jsonl"
        path.unlink(missing_ok=True)
        return Told(capsys, [write(path, *recordings)], *options)

    return tell


def shorter(one: dict[str, Any]) -> dict[str, Any]:
    """A recording with a few of its records: a schema takes its time."""
    tracks = {name: {**one[name], "records": one[name]["records"][-20:]} for name in ("collectives", "pairs")}
    return {**one, **tracks}


def steps(*counts: int) -> list[Operation]:
    """One all_reduce of each count."""
    return [operation(count) for count in counts]


def submitted(groups: Iterable[dict[str, Any]]) -> dict[tuple[int, ...], str]:
    """Who submitted what."""
    return {tuple(group["ranks"]): group["text"] for group in groups}


# -- collectives -------------------------------------------------------------------------------------------------------


def test_ranks_that_agree(told: Callable[..., Told]) -> None:
    """Nobody differs: the newest numbers are shown, call sites that differ are no difference."""
    other = [operation(count, site="app/other.py:9") for count in (1, 2, 3)]
    found = told(
        recording(0, steps(1, 2, 3)), recording(1, steps(1, 2, 3)), recording(2, other), options=["--last", "2"]
    )
    assert found.status == 0 and found.one["common"] == 3
    assert "no divergence: every rank that is here submitted the same 3 collectives" in found.text
    assert [row["number"] for row in found.one["rows"]] == [2, 3]
    assert [one["ranks"] for one in found.one["rows"][1]["groups"]] == [[0, 1], [2]]
    hashes = {one["collectives"]["hash"] for one in found.one["ranks"]}
    assert len(hashes) == 1 and None not in hashes


def test_divergence_in_the_middle(told: Callable[..., Told]) -> None:
    """The first number that differs is named with who submitted what, though more follows, also what is equal again."""
    wrong = [*steps(1, 2, 3, 4), operation(5, "broadcast", site="app/eval.py:30", root=2), *steps(6, 7, 8)]
    right = steps(1, 2, 3, 4, 5, 6, 7, 8)
    found = told(recording(0, right), recording(1, wrong), recording(2, right), options=["--last", "2"])
    first = found.one["divergence"]
    assert found.status == 1 and (first["kind"], first["number"], first["exact"]) == ("collective", 5, True)
    texts = {
        (0, 2): "all_reduce #5 (float32 x 5, sum) at app/train.py:7",
        (1,): "broadcast #5 (float32 x 5, root 2) at app/eval.py:30",
    }
    assert submitted(first["groups"]) == texts and found.one["common"] == 4 and found.one["behind"] is None
    lines = found.text.splitlines()
    at = lines.index("first divergence: collective number 5")
    assert lines[at + 1 : at + 3] == [f"  ranks 0, 2: {texts[0, 2]}", f"  rank 1: {texts[1,]}"]
    assert [row["number"] for row in found.one["rows"]] == [3, 4, 5, 6]
    assert [line[0] for line in lines[-5:]] == [" ", " ", ">", ">", " "]


def test_lowest_of_several_divergences(told: Callable[..., Told]) -> None:
    """Where ranks leave at several numbers, the lowest is the first, whoever is compared with whom."""
    orders = [(1, 2, 3, 4), (1, 9, 9, 9), (1, 2, 3, 8)]
    found = told(*(recording(rank, steps(*counts)) for rank, counts in enumerate(orders)))
    assert found.one["divergence"]["number"] == 2
    assert [group["ranks"] for group in found.one["divergence"]["groups"]] == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("counts", "hint"),
    [
        ((1, 2, 3, 4, 6, 7, 8), "rank 1 seems to have left out all_reduce #5 (float32 x 5, sum)"),
        ((1, 2, 3, 4, 7, 8), "rank 1 seems to have left out all_reduce #5 (float32 x 5, sum) at app/train.py:7 and 1"),
        ((1, 2, 3, 4, 9, 5, 6, 7, 8), "seems to have submitted what the others did not: all_reduce #5 (float32 x 9"),
        ((1, 2, 3, 4, 9, 6, 7, 8), ""),
        ((1, 2, 3, 4, 6), ""),
    ],
)
def test_what_a_divergence_looks_like(told: Callable[..., Told], counts: Iterable[int], hint: str) -> None:
    """A rank that left something out, or put something in, is said so where it goes on as the others do."""
    right = steps(1, 2, 3, 4, 5, 6, 7, 8)
    found = told(recording(0, right), recording(1, steps(*counts)), recording(2, right))
    assert found.one["divergence"]["number"] == 5
    assert hint in found.one["divergence"]["hint"] and bool(hint) == bool(found.one["divergence"]["hint"])
    assert hint in found.text


def test_rank_that_is_behind(told: Callable[..., Told]) -> None:
    """Where nobody differs, the last common number is named, who stopped there, and what the others wait in."""
    dead = recording(1, steps(1, 2, 3), state="ended", how="was killed by SIGKILL", cause="rank 1 died")
    found = told(recording(0, steps(1, 2, 3, 4, 5)), dead, recording(2, steps(1, 2, 3, 4)))
    behind = found.one["behind"]
    assert found.status == 1 and (behind["kind"], behind["after"], behind["ranks"]) == ("collective", 3, [1])
    assert submitted(behind["ahead"]) == {(0, 2): "all_reduce #4 (float32 x 4, sum) at app/train.py:7"}
    assert "behind: rank 1 stopped after collective number 3" in found.text
    assert "  broke: rank 1 died" in found.text and "ended (was killed by SIGKILL): 3 collectives" in found.text
    assert found.one["rows"][-1]["absent"] == [1, 2] and found.one["common"] == 3


def test_rank_that_submitted_nothing(told: Callable[..., Told]) -> None:
    """A rank with no record at all is behind from the first number on."""
    found = told(recording(0, steps(1, 2)), recording(1, []), recording(2, steps(1)))
    assert found.one["behind"]["after"] == 0 and found.one["behind"]["ranks"] == [1] and found.one["common"] == 0


def test_nothing_at_all(told: Callable[..., Told]) -> None:
    """Ranks that have done nothing agree."""
    found = told(*(recording(rank, []) for rank in range(3)))
    assert found.status == 0 and "no collective was submitted" in found.text and found.one["rows"] == []


# -- what is overwritten -----------------------------------------------------------------------------------------------


def test_hash_tells_what_is_overwritten(told: Callable[..., Told]) -> None:
    """Equal hashes prove the same history, also that which both rings have lost."""
    counts = [1 + number % 7 for number in range(COLLECTIVES + 500)]
    found = told(*(recording(rank, steps(*counts)) for rank in range(3)))
    assert found.status == 0 and found.one["common"] == len(counts)
    assert found.one["ranks"][0]["collectives"] == {
        **found.one["ranks"][1]["collectives"],
        "lost": 500,
        "kept": COLLECTIVES,
        "submitted": len(counts),
    }
    assert "500 collectives overwritten" in found.text


def test_divergence_that_is_overwritten(told: Callable[..., Told]) -> None:
    """Hashes that differ over equal records: the divergence was before them, and nobody claims to know where."""
    counts = [1 + number % 7 for number in range(COLLECTIVES + 500)]
    other = [*counts[:200], 99, *counts[201:]]
    found = told(recording(0, steps(*counts)), recording(1, steps(*other)), recording(2, steps(*counts)))
    first = found.one["divergence"]
    assert found.status == 1 and (first["number"], first["exact"]) == (501, False) and found.one["common"] is None
    assert "first divergence: collective number 501, or before it: records of that are overwritten" in found.text
    # Also where the records that are left differ, as what came before has moved them.
    moved = told(recording(0, steps(*counts)), recording(1, steps(*counts[:200], *counts[201:], 1)))
    assert (moved.one["divergence"]["number"], moved.one["divergence"]["exact"]) == (501, False)
    assert moved.one["divergence"]["hint"] == ""


def test_divergence_beside_a_rank_that_overwrote_it(told: Callable[..., Told]) -> None:
    """Two ranks that still have the number tell it; the one that has gone far beyond is said to know nothing of it."""
    counts = [1 + number % 7 for number in range(COLLECTIVES + 500)]
    one, other = steps(*counts[:300]), steps(*counts[:299], 99)
    found = told(recording(0, steps(*counts)), recording(1, one), recording(2, other))
    first = found.one["divergence"]
    assert (first["number"], first["exact"], first["unknown"]) == (300, True, [0])
    assert "  rank 0: overwritten" in found.text


def test_rank_too_far_behind_to_be_compared(told: Callable[..., Told]) -> None:
    """Where a rank has overwritten all that another has come to, that one is behind, and agreement is not claimed."""
    counts = [1 + number % 7 for number in range(COLLECTIVES + 500)]
    found = told(recording(0, steps(*counts)), recording(1, steps(*counts[:10])), recording(2, steps(*counts)))
    assert found.status == 1 and found.one["common"] is None and found.one["behind"]["ranks"] == [1]
    assert "no number is in the records of all ranks" in found.text


# -- who is there ------------------------------------------------------------------------------------------------------


def test_missing_ranks(told: Callable[..., Told]) -> None:
    """Ranks that are in none of the files are named."""
    found = told(*(recording(rank, steps(1), world_size=9) for rank in (1, 2, 6)))
    assert found.status == 1 and found.one["missing"] == [[0, 0], [3, 5], [7, 8]]
    assert "  not in these files: ranks 0, 3-5, 7-8" in found.text
    assert "no divergence among the ranks that are here, and of the others nothing is known" in found.text


@pytest.mark.parametrize("turned", [False, True])
def test_longer_of_two_recordings_of_a_rank_wins(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, turned: bool
) -> None:
    """Of several recordings of one rank, in one file or several, the one with the most counts, in any order."""
    short, long = recording(0, steps(1)), recording(0, steps(1, 2, 3))
    one = write(tmp_path / "a", short, recording(1, steps(1, 2, 3)))
    two = write(tmp_path / "b", long, recording(2, steps(1, 2, 3)))
    found = Told(capsys, [two, one] if turned else [one, two])
    assert found.status == 0 and found.one["ranks"][0]["collectives"]["submitted"] == 3
    assert [file["recordings"] for file in found.json["files"]] == [2, 2]


def test_what_was_before_a_reconnect(told: Callable[..., Told]) -> None:
    """Only what came after the last reconnect is compared; a rank of which there is no such record is named."""
    after = [*steps(5, 6), "all_gather_json"]
    ranks = [recording(rank, steps(*range(1, 4 + rank)), begin=9, after=after) for rank in range(2)]
    found = told(*ranks, recording(2, steps(7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7)))
    assert found.status == 1 and found.one["epoch"] == 1 and found.one["common"] == 11
    assert found.one["outdated"] == [2] and found.one["missing"] == []
    assert "after 1 reconnect" in found.text
    # What was before is in no recording, which is not to say that it was overwritten.
    assert [row["number"] for row in found.one["rows"]] == [10, 11] and "overwritten" not in found.text


def test_several_communicators(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Each is judged by itself; one can be chosen by its key or its name."""
    other: dict[str, Any] = {"communicator": {"key": "k2", "name": "init, split 1"}, "world_size": 2}
    good = [recording(rank, steps(1, 2)) for rank in range(3)]
    file = write(tmp_path / "a", *good, recording(0, steps(1), **other), recording(1, steps(2), **other))
    found = Told(capsys, [file])
    assert found.status == 1 and [one["key"] for one in found.json["communicators"]] == [KEY, "k2"]
    assert Told(capsys, [file], "--communicator", KEY).status == 0
    for name in ("k2", "init, split 1"):
        assert Told(capsys, [file], "--communicator", name).one["divergence"]["number"] == 1
    unknown = Told(capsys, [file], "--communicator", "k3")
    assert unknown.status == 2 and f"there are {KEY} (init), k2 (init, split 1)" in unknown.err


# -- exchanges over the control plane ----------------------------------------------------------------------------------


def test_exchange_that_a_rank_left_out(told: Callable[..., Told]) -> None:
    """A rank that went on where others are in an exchange is told with what it submitted instead."""
    waiting = [*steps(1, 2), "all_gather_json"]
    found = told(recording(0, waiting), recording(1, steps(1, 2, 3)), recording(2, waiting))
    first = found.one["divergence"]
    assert found.status == 1 and (first["kind"], first["number"]) == ("exchange", 2)
    assert submitted(first["groups"]) == {
        (1,): "all_reduce #3 (float32 x 3, sum) at app/train.py:7",
        (0, 2): "all_gather_json after collective #2 at app/all_gather_json.py:1",
    }


@pytest.mark.parametrize(("counts", "kind", "number"), [((1, 2, 9), "exchange", 2), ((1, 9, 3), "collective", 2)])
def test_exchange_and_collective_that_differ(
    told: Callable[..., Told], counts: Iterable[int], kind: str, number: int
) -> None:
    """An exchange comes after the collective of its number: what came first is named."""
    found = told(recording(0, [*steps(1, 2), "all_gather_json", *steps(3)]), recording(1, steps(*counts)))
    assert (found.one["divergence"]["kind"], found.one["divergence"]["number"]) == (kind, number)


def test_rank_that_has_not_come_to_an_exchange(told: Callable[..., Told]) -> None:
    """A rank with as many collectives and fewer exchanges is behind."""
    waiting = [*steps(1, 2), "all_gather_json"]
    found = told(recording(0, waiting), recording(1, steps(1, 2)), recording(2, waiting))
    assert found.status == 1 and found.one["divergence"] is None
    assert (found.one["behind"]["kind"], found.one["behind"]["ranks"]) == ("exchange", [1])


# -- sends and receives ------------------------------------------------------------------------------------------------


def test_pair_that_differs(told: Callable[..., Told]) -> None:
    """The k-th send to a rank is held against the k-th receive there, in each direction."""
    one = [pair("send", 1, 4), pair("send", 1, 5), pair("recv", 1, 6)]
    other = [pair("recv", 0, 4), pair("send", 0, 6), pair("recv", 0, 9)]
    found = told(recording(0, one), recording(1, other), recording(2, []))
    (differing,) = found.one["differing_pairs"]
    assert found.status == 1 and differing == found.one["divergence"] and differing["number"] == 2
    assert submitted(differing["groups"]) == {
        (0,): "send #2 (float32 x 5, peer 1) at app/send.py:3",
        (1,): "recv #2 (float32 x 9, peer 0) at app/recv.py:3",
    }


def test_pair_without_an_answer(told: Callable[..., Told]) -> None:
    """The first send or receive of a side that the other rank has not answered is told; that of a missing rank not."""
    one = [pair("send", 1), pair("send", 1), pair("send", 1), pair("send", 2)]
    found = told(recording(0, one), recording(1, [pair("recv", 0)]))
    (waiting,) = found.one["open_pairs"]
    assert found.status == 1 and (waiting["after"], waiting["ranks"]) == (1, [1])
    assert submitted(waiting["ahead"]) == {(0,): "send #2 (float32 x 8, peer 1) at app/send.py:3"}
    assert "rank 1 has not answered\n  rank 0: send #2" in found.text


def test_pair_whose_answer_may_be_overwritten(told: Callable[..., Told]) -> None:
    """A rank whose ring has lost records is not said to have answered nothing."""
    busy = [pair("recv", 0), *[pair("send", 2)] * PAIRS]
    found = told(recording(0, [pair("send", 1)]), recording(1, busy))
    assert found.status == 1 and found.one["ranks"][1]["pairs"]["lost"] == 1


def test_pairs_after_a_reconnect(told: Callable[..., Told]) -> None:
    """Sends of before a reconnect wait for nobody any more, those after it do, and nothing of that counts as lost."""
    before = [pair("send", 1), pair("send", 1)]
    found = told(
        recording(0, before, begin=5, after=[pair("send", 1)]),
        recording(1, [pair("recv", 0), pair("send", 0)], begin=5, after=[]),
    )
    (waiting,) = found.one["open_pairs"]
    assert submitted(waiting["ahead"]) == {(0,): "send #3 (float32 x 8, peer 1) at app/send.py:3"}
    assert [one["pairs"]["lost"] for one in found.one["ranks"]] == [0, 0]


def test_ring_that_has_sends_of_before_a_reconnect(told: Callable[..., Told]) -> None:
    """As long as the ring has one of before, nothing that came after it is overwritten."""
    for after, lost in ((100, False), (PAIRS + 1, True)):
        one = recording(0, [pair("send", 1)] * (PAIRS - 50), begin=5, after=[pair("send", 1)] * after)
        assert bool(told(one).one["ranks"][0]["pairs"]["lost"]) == lost


# -- the form ----------------------------------------------------------------------------------------------------------


def test_every_operation_is_recorded_as_others_describe_it() -> None:
    """Each kind, element type, operator and root comes through a recording with the text that errors have."""
    for kind, rule in RULES.items():
        for dtype in DType:
            peer, root = (1 if rule.paired else None), (2 if rule.rooted else None)
            one = Operation(kind, 9, dtype, op=ReduceOp.MAX if rule.reduces else None, root=root, peer=peer, site="a:1")
            found = reading.parse(recording(0, [one]), "it")
            (shape,) = found.pairs.shapes if rule.paired else found.collectives.shapes
            text = shape.text(1).replace(", peer 1", "") if rule.paired else shape.text(1)
            assert text == describe(signature(one, 1))
            records = recording(0, [one])["pairs" if rule.paired else "collectives"]["records"]
            assert records[0]["bytes"] == 9 * dtype.itemsize


def test_widths_are_those_of_the_enums() -> None:
    """The sizes of elements that the watcher knows are the package's own."""
    assert {dtype.label: dtype.itemsize for dtype in DType} == WIDTHS and list(WIDTHS) == DTYPES


def test_schemas_are_those_that_the_code_names() -> None:
    """Both are where the code says, with the versions that the code writes."""
    for name, version, file in (
        ("recording", RECORDING_VERSION, RECORDING_FILE),
        ("merged", report.SCHEMA_VERSION, report.SCHEMA_FILE),
    ):
        schema = validator(name).schema
        assert file == f"schema/{name}.schema.json" and schema["$id"] == f"urn:butter-mpi:{name}:{version}"
        assert schema["properties"][name]["const"] == version


def test_page_has_every_field() -> None:
    """The reference page has a row for each field of both forms, in their order."""
    page = (_ROOT / "docs" / "reference" / "recorder.md").read_text()
    for title, name in (("A recording", "recording"), ("What `--json` prints", "merged")):
        section = page.split(f"\n## {title}\n")[1].split("\n## ")[0]
        fields = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
        schema = validator(name).schema
        more = [] if name == "recording" else list(schema["properties"]["communicators"]["items"]["properties"])
        assert fields == [*schema["properties"], *more]


# -- files that are not what they should be ----------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 300, -2])
def test_file_that_is_cut_off(capsys: pytest.CaptureFixture[str], tmp_path: Path, cut: int) -> None:
    """What was written whole is used; what was cut off is said, with its line and length."""
    file = tmp_path / "r.jsonl"
    write(file, *(recording(rank, steps(1, 2)) for rank in range(3)))
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], lines[2][:cut]]))
    found = Told(capsys, [str(file)])
    length = len(lines[2][:cut])
    assert found.status == 1 and found.one["missing"] == [[2, 2]]
    assert f"r.jsonl: line 3 ({length} bytes) is not JSON" in found.text
    assert "The other 2 recordings were used" in found.json["files"][0]["notes"][0]


def test_line_that_another_one_was_written_into(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A damaged line in the middle is said, and the others are used."""
    file = tmp_path / "r.jsonl"
    write(file, recording(0, steps(1)))
    with file.open("ab") as opened:
        opened.write(file.read_bytes()[:200])
    write(file, recording(1, steps(1)), recording(2, steps(1)))
    found = Told(capsys, [str(file)])
    assert found.status == 1 and [one["rank"] for one in found.one["ranks"]] == [0, 2] and "line 2 (" in found.text


_SURROGATE = '{"recording": "\\ud800\\n\\u001b[31m"}'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no recording in it can be used: it is empty"),
        (b"\n\n", "it is empty"),
        (b"not JSON", "line 1 (8 bytes) is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"9" * 5000, "is not JSON"),
        (b"[" * 200_000, "is not JSON"),
        (b'{"a":' * 50_000, "is not JSON"),
        (b'{"time": NaN}', "is not JSON: NaN is no number"),
        (b"[]", "line 1 is not a recording: the whole must be an object; got []"),
        (b"null", "the whole must be an object"),
        (b"{}", "recording is missing"),
        (b'{"recording": 2}', "it is a recording of version 2; this butter_mpi reads version 1"),
        (_SURROGATE.encode(), "recording must be one of 1; got"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_file_of_something_else(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes, said: str) -> None:
    """Each is refused in one printable line that names the file and what is wrong; a good file does not help it."""
    file = tmp_path / "bad\n.jsonl"
    file.write_bytes(content)
    good = write(tmp_path / "good", recording(0, steps(1)))
    found = Told(capsys, [good, str(file)])
    assert found.status == 2 and said in found.err and "bad\\n.jsonl" in found.err
    assert found.err.count("\n") == 1 and found.err.rstrip("\n").isprintable() and len(found.err) < 1000


def test_every_unusable_file_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What is no file, cannot be read or never ends is refused, each in a line."""
    os.mkfifo(tmp_path / "pipe")
    files = {
        str(tmp_path / "none"): "No such file",
        str(tmp_path): "it is a folder",
        str(tmp_path / "pipe"): "it is no regular file",
        "/dev/zero": "it is no regular file",
        "a\0b": "its name has a zero character",
    }
    found = Told(capsys, list(files))
    lines = found.err.splitlines()
    assert found.status == 2 and len(lines) == len(files)
    for line, said in zip(lines, files.values(), strict=True):
        assert line.startswith("butter_mpi.recorder: ") and said in line


def test_limits(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line longer than any recording, and more ranks than are kept, are refused before they fill the memory."""
    file = write(tmp_path / "r", recording(0, steps(1)), recording(1, steps(1)))
    monkeypatch.setattr(reading, "_MOST_RECORDINGS", 1)
    assert "more than 1 ranks in all" in Told(capsys, [file]).err
    monkeypatch.setattr(reading, "_LONGEST_LINE", 100)
    assert "line 1 has more than" in Told(capsys, [file]).err


def test_two_that_claim_one_communicator(told: Callable[..., Told]) -> None:
    """Recordings of one key that are not of one communicator are refused, with both places."""
    found = told(recording(0, steps(1)), recording(1, steps(1), world_size=7))
    assert found.status == 2 and "line 2: communicator" in found.err and "has 7 ranks" in found.err


def test_rank_beyond_the_size(told: Callable[..., Told]) -> None:
    """A rank that its communicator has not is refused."""
    found = told(recording(3, steps(1)))
    assert found.status == 2 and "line 1 is not a recording: rank is 3, of 3 ranks" in found.err


_PATHS = [
    ("surprise",),
    ("pairs", "surprise"),
    ("collectives", "records", 2, "surprise"),
    ("rank",),
    ("world_size",),
    ("pid",),
    ("state",),
    ("host",),
    ("time",),
    ("epoch",),
    ("communicator",),
    ("communicator", "key"),
    ("exchanges",),
    ("exchanges", "submitted"),
    ("exchanges", "records", 0, "after"),
    *(("collectives", name) for name in ("floor", "submitted", "lost", "records")),
    *(("collectives", "records", 1, name) for name in ("number", "count", "op", "root", "hash", "site", "time")),
    *(("pairs", "records", 0, name) for name in ("number", "peer", "position", "stream", "bytes")),
]
_BASE = recording(1, [*steps(1, 2, 3), "all_gather_json", pair("send", 0), pair("recv", 0)])
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(
        [0, 1, -1, 2, 3, 10**5, 2**31, 2**63 - 1, 2**64, 10**400, 0.5, 1e12 + 0.5, "", "alive", "0" * 16, "x" * 20_000]
    ),
    st.integers(),
    st.text(max_size=20),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def changed(path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """A recording with one value replaced."""
    one = copy.deepcopy(_BASE)
    place: Any = one
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return one


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(_PATHS), value=_VALUES)
def test_what_the_schema_refuses_is_refused(path: tuple[str | int, ...], value: Any) -> None:
    """Whatever one field is made, what is read is valid by the schema; what is not read is told by the field's name."""
    one, said = changed(path, value), ""
    try:
        reading.parse(one, "it")
    except ValueError as error:
        said = str(error)
    # Beyond the schema: numbers that do not fit to one another.
    unfit = bool(re.search(r"rank is|has the number", said))
    assert unfit or _RECORDING.is_valid(one) == (not said), said
    assert unfit or not said or str(path[-1]) in said, said


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.sampled_from(_PATHS), _VALUES), min_size=1, max_size=4))
def test_hostile_files_give_no_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: list[tuple[tuple[str | int, ...], Any]]
) -> None:
    """Whatever files say, there is an answer by the schema or a line of refusal."""
    file = tmp_path / "r.jsonl"
    file.write_bytes(b"")
    for path, value in changes:
        append(file, changed(path, value))
    write(file, *(recording(rank, steps(1, 2, 3)) for rank in (0, 2)))
    found = Told(capsys, [str(file)])
    assert found.status in (0, 1, 2) and (found.status == 2) == bool(found.err)
    assert len(found.text) < 20_000 and "\x1b" not in found.text


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.one_of(st.binary(max_size=200), _JSON.map(lambda value: json.dumps(value).encode())))
def test_files_of_anything_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes) -> None:
    """No bytes and no JSON make more than a line of refusal."""
    file = tmp_path / "r.jsonl"
    file.write_bytes(content)
    found = Told(capsys, [str(file)])
    assert found.status == 2 and found.err.startswith(f"butter_mpi.recorder: {file}: ")


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name at least one FILE"),
        (["--last", "-1", "a"], "argument --last: "),
        (["--last", "4097", "a"], "must be a whole number from 0 to 4096"),
        (["--las", "1", "a"], "unrecognized arguments: --las"),
        (["--communicator"], "expected one argument"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    """A wrong argument is one line on stderr, and status 2."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out and said in err and err.count("\n") == 1


def test_the_command_people_type(tmp_path: Path) -> None:
    """``python -m butter_mpi.recorder`` is it, without MPI, NumPy or a warning."""
    file = write(tmp_path / "r.jsonl", recording(0, steps(1)), recording(1, steps(2)))
    code = (
        "import runpy, sys\n"
        "try:\n    runpy.run_module('butter_mpi.recorder', run_name='__main__')\n"
        "finally:\n    assert not {'numpy', 'mpi4py', 'jsonschema'} & set(sys.modules)"
    )
    for start in (["-m", "butter_mpi.recorder"], ["-c", code]):
        done = subprocess.run(
            [sys.executable, "-W", "error", *start, file], cwd=_ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 1 and not done.stderr, done
        assert "first divergence: collective number 1\n" in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "butter_mpi.recorder", "--help"], cwd=_ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout.startswith("usage: python -m butter_mpi.recorder")
