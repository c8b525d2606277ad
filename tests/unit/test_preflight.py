"""Digests of fixed size, and full records only where the digests have something to tell."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.records import SHA, device, library, make_record, make_world
from hypothesis import given
from hypothesis import strategies as st

from butter_mpi import library as library_room
from butter_mpi import preflight
from butter_mpi.errors import LibraryNotFoundError
from butter_mpi.preflight import DIGEST_BYTES, complete, digest, judge, needs_full, report_from_digests

OTHER = "cd" * 32


def digests(records: list[dict[str, Any]]) -> list[bytes]:
    """Every rank's digest."""
    return [digest(r) for r in records]


def telling(records: list[dict[str, Any]]) -> bool:
    """Whether the full records have anything that a person must see."""
    return any(f.severity != "info" for f in judge(records).findings)


@pytest.mark.parametrize("plane", ["host", "nccl"])
@pytest.mark.parametrize("size", [2, 3, 9])
def test_agreeing_ranks_need_no_records(plane: str, size: int) -> None:
    """The digests suffice, and the report made of them is the one that the records would give, on every rank."""
    records = make_world(size, plane=plane)
    found = digests(records)
    assert {len(d) for d in found} == {DIGEST_BYTES} and DIGEST_BYTES <= 256
    assert not needs_full(found)
    assert {report_from_digests(found, r).text() for r in records} == {judge(records).text()}
    assert {report_from_digests(found, r) for r in records} == {judge(records)}


def test_digest_of_a_huge_record_is_as_small() -> None:
    """The size does not grow with the environment."""
    assert len(digest(make_record(0, 2, env={f"NCCL_X{i}": "y" * 1000 for i in range(100)}))) == DIGEST_BYTES


@pytest.mark.parametrize(
    "ranks",
    [
        {1: {"env": {"NCCL_PROTO": "LL"}}},
        {1: {"env": {"NCCL_DEBUG": "INFO"}}},
        {1: {"env": {"NCCL_SOCKET_IFNAME": "eth0"}}},
        {1: {"settings": {"action": "abort"}}},
        {1: {"plan": {"operation": "barrier"}}},
        {1: {"sequence": 3}},
        {1: {"failures": ["init: bad"]}},
        {1: {"mpi_library": "other"}},
        {1: {"thread_level": 2}},
        {1: {"package": "9.9"}},
        {1: {"record": 2}},
        {1: {"rank": 0}},
        {1: {"rank": 2}, 2: {"rank": 1}},
        {r: {"world_size": 4} for r in range(3)},
        {r: {"failures": ["init: bad"]} for r in range(3)},
        {r: {"settings": {"require_transport": "NET/IB"}} for r in range(3)},
    ],
)
def test_whatever_is_to_tell_needs_the_records(ranks: dict[int, dict[str, Any]]) -> None:
    """Each difference, each own fault and each wrong assignment is seen in the digests alone."""
    records = make_world(3, ranks=ranks)
    assert telling(records)
    assert needs_full(digests(records))


@pytest.mark.parametrize(
    "ranks",
    [
        {1: {"policy": {"NCCL_IB_TIMEOUT": "unset"}}},
        {1: {"device": None, "device_absent": "none"}},
        {1: {"device": None, "device_error": "broken"}},
        {1: {"device": device(0)}},
        {1: {"device": device(1, pci="0000:00:00.0")}},
        {1: {"library": None, "library_error": "none"}},
        {1: {"library": library(0, version=1, version_text="0.0.1", file="f")}},
        {1: {"library": library(0, sha256=OTHER, file="f")}},
        {1: {"machine": "n02/boot"}},
        {1: {"env": {"BUTTER_NCCL_LIBRARY_SHA256": SHA}}},
        {r: {"env": {"BUTTER_NCCL_LIBRARY_SHA256": OTHER}} for r in range(3)},
        {r: {"env": {"NCCL_COMM_ID": "x"}} for r in range(3)},
    ],
)
def test_whatever_the_nccl_plane_has_to_tell_needs_the_records(ranks: dict[int, dict[str, Any]]) -> None:
    """Policy, device, library and refused variables are seen in the digests alone."""
    records = make_world(3, plane="nccl", ranks=ranks)
    assert telling(records)
    assert needs_full(digests(records))


@pytest.mark.parametrize(
    "ranks",
    [
        {1: {"env": {"NCCL_DEBUG_FILE": "/tmp/log.1"}}},
        {1: {"host": "n02", "machine": "n02/boot", "pid": 7}},
        {1: {"launch": make_record(1, 3)["launch"] | {"local_rank": 0}}},
    ],
)
def test_what_differs_by_nature_needs_no_records(ranks: dict[int, dict[str, Any]]) -> None:
    """Hosts, processes and log files differ in every job."""
    records = make_world(3, ranks=ranks)
    assert not needs_full(digests(records)) and not telling(records)


def test_interface_names_of_hosts_need_no_records_when_allowed() -> None:
    """With the opt-in, one name a host is fine; two names on one host are not."""
    names = {0: ("a", "eno1"), 1: ("a", "eno1"), 2: ("b", "eth0")}
    ranks = {r: {"host": h, "env": {"NCCL_SOCKET_IFNAME": n}} for r, (h, n) in names.items()}
    records = make_world(3, ranks=ranks, settings={"per_host_interfaces": True})
    assert not needs_full(digests(records))
    ranks[1]["env"] = {"NCCL_SOCKET_IFNAME": "eth0"}
    assert needs_full(digests(make_world(3, ranks=ranks, settings={"per_host_interfaces": True})))


def test_record_version_of_another_build_is_readable_for_ever() -> None:
    """A digest of a layout to come is told by its first bytes alone."""
    one, two = digests(make_world(2))
    assert not needs_full([one, two])
    assert needs_full([one, (2).to_bytes(4, "little") + two[4:]])


VARIABLES = st.dictionaries(
    st.sampled_from(["NCCL_PROTO", "NCCL_DEBUG", "NCCL_IB_HCA", "NCCL_DEBUG_FILE", "NCCL_HOSTID", "NCCL_COMM_ID"]),
    st.sampled_from(["", "a", "b"]),
    max_size=2,
)
RANKS = st.fixed_dictionaries(
    {},
    optional={
        "env": VARIABLES,
        "host": st.sampled_from(["n01", "n02"]),
        "machine": st.sampled_from(["n01/boot", "n02/boot"]),
        "device": st.sampled_from([device(0), device(1), device(2), None]),
        "library": st.sampled_from([library(0), library(1), library(0, sha256=OTHER, file="f"), None]),
        "settings": st.sampled_from([{}, {"share_gpu": True}, {"per_host_interfaces": True}, {"plane": "auto"}]),
        "sequence": st.sampled_from([0, 1]),
    },
)


@given(st.sampled_from(["host", "nccl"]), RANKS, st.lists(RANKS, min_size=2, max_size=4))
def test_digests_hide_nothing(plane: str, common: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """Whenever the digests say that nothing is to tell, the records agree, and every rank makes the same report."""
    for own in (dict(enumerate(ranks)), {}):
        records = make_world(len(ranks), plane=plane, ranks=own, **common)
        found = digests(records)
        if not needs_full(found):
            assert not telling(records)
            assert {report_from_digests(found, r) for r in records} == {judge(records)}


def test_rank_whose_file_nobody_hashed_hashes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between digests and records a rank with a file of its own adds its digest; the others add nothing."""
    own = library(1, file="own")
    records = make_world(3, plane="nccl", ranks={2: {"library": own}})
    found = digests(records)
    assert needs_full(found)
    monkeypatch.setattr(library_room, "describe", lambda env: {**own, "sha256": OTHER})
    completed = [complete(r, found) for r in records]
    assert completed[:2] == records[:2]
    assert completed[2]["library"]["sha256"] == OTHER
    (error,) = judge(completed).errors
    assert error.check == "library file" and OTHER in error.message


def test_rank_that_cannot_hash_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure at that point is part of the record too."""

    def fail(env: Any) -> None:
        raise LibraryNotFoundError("replaced")

    monkeypatch.setattr(library_room, "describe", fail)
    records = make_world(2, plane="nccl", ranks={1: {"library": library(1, file="own")}})
    completed = complete(records[1], digests(records))
    assert completed["library"] is None and completed["library_error"] == "replaced"


def test_records_that_travelled_are_judged_alike() -> None:
    """What comes out of JSON on another rank gives the same text as the record at home."""
    records = make_world(4, plane="nccl", ranks={1: {"env": {"NCCL_PROTO": "\udc80"}}, 2: {"device": device(0)}})
    travelled = [json.loads(json.dumps(r)) for r in records]
    assert judge(travelled).text() == judge([*records[:2], *travelled[2:]]).text()


def test_a_thousand_ranks_are_judged_at_once() -> None:
    """The comparison of a large job takes a moment, and its text stays short."""
    records = make_world(1000, ranks={r: {"env": {"NCCL_PROTO": str(r)}} for r in range(1000)})
    report = judge(records)
    assert len(report.errors) == 1 and len(report.text()) < 1000


def test_checks_have_names_of_their_own() -> None:
    """A finding is told by its check's name, so no two checks share one."""
    names = [check.name for check in preflight.CHECKS]
    assert len(names) == len(set(names))
