"""The checks of the nccl plane: policy, refused variables, library, devices."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.records import SHA, device, library, make_record, make_world

from butter_mpi.findings import Finding
from butter_mpi.preflight import judge

OTHER = "cd" * 32


def told(records: list[dict[str, Any]]) -> list[Finding]:
    """The findings that a person must see."""
    return [f for f in judge(records).findings if f.severity != "info"]


def nccl(size: int, **how: Any) -> list[dict[str, Any]]:
    """Records of ranks that asked for the nccl plane."""
    return make_world(size, plane="nccl", **how)


@pytest.mark.parametrize("plane", ["host", "nccl"])
def test_single_rank_needs_no_policy_library_or_device(plane: str) -> None:
    """World size one is the solo plane: those checks do not apply."""
    report = judge([make_record(plane=plane, policy={"NCCL_IB_TIMEOUT": "unset"}, library_error="none")])
    assert report.ok and report.plane == "solo"
    outcomes = {f.check: f.outcome for f in report.findings}
    assert [outcomes[c] for c in ("policy", "library", "device")] == ["does not apply"] * 3


def test_host_plane_needs_no_policy() -> None:
    """What only NCCL needs is not asked of the host plane."""
    assert told(make_world(2, policy={"NCCL_IB_TIMEOUT": "unset"}, env={"NCCL_COMM_ID": "1.2.3.4:5"})) == []


def test_policy_fault_names_variable_value_rank_and_option() -> None:
    """One message a variable, grouped by what was found, with the launcher's way to hand it on."""
    ranks = {1: {"policy": {"NCCL_IB_TIMEOUT": "unset"}}, 2: {"policy": {"NCCL_IB_TIMEOUT": '"22"'}}}
    (finding,) = told(nccl(4, ranks=ranks))
    message = 'NCCL_IB_TIMEOUT must be "10" in the C environment of every rank; it is unset on rank 1, "22" on rank 2'
    assert (finding.check, finding.message) == ("policy", message)
    assert finding.remedy.startswith("mpirun -genv NCCL_IB_TIMEOUT 10 ...")


def test_policy_variable_that_differs_is_told_once() -> None:
    """The policy's finding says all; the comparison of the environment does not repeat it."""
    ranks = {1: {"policy": {"NCCL_IB_TIMEOUT": '"22"'}, "env": {"NCCL_IB_TIMEOUT": "22"}}}
    assert [f.check for f in told(nccl(2, ranks=ranks))] == ["policy"]
    assert [f.check for f in told(make_world(2, ranks={1: {"env": {"NCCL_IB_TIMEOUT": "22"}}}))] == ["environment"]


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        ("NCCL_COMM_ID", "10.0.0.1:1234", True),
        ("NCCL_COMM_BLOCKING", "1", True),
        ("NCCL_ENV_PLUGIN", "libsite.so", True),
        ("NCCL_ENV_PLUGIN", "none", False),
    ],
)
def test_variables_that_take_over_are_refused(name: str, value: str, refused: bool) -> None:
    """What would replace the ID, the communicator's mode or the environment itself may not be set."""
    found = told(nccl(2, env={name: value}))
    assert [f.check for f in found] == ["refused variables"] * refused
    assert all(f'{name} is set: "{value}" on ranks 0-1: ' in f.message and f.remedy == f"unset {name}" for f in found)


def test_versions_are_told_by_rank() -> None:
    """Two NCCL versions are refused, whatever NCCL_VERSION says."""
    old = library(0, version=22809, version_text="2.28.9", file="old", sha256=OTHER)
    found = told(nccl(4, ranks={r: {"library": old} for r in (2, 3)}))
    assert [f.check for f in found] == ["library", "library file"]
    assert found[0].message == "NCCL version: 2.32.3 on ranks 0-1, 2.28.9 on ranks 2-3"


def test_one_version_in_two_files_is_refused_with_paths_and_digests() -> None:
    """Equal versions do not hide that the bytes differ: both paths and both digests are told."""
    other = library(0, path="/other/libnccl.so.2", file="other", sha256=OTHER)
    (finding,) = told(nccl(2, ranks={1: {"library": other}}))
    assert finding.check == "library file"
    assert finding.message == (
        f"libnccl.so.2 is not one file: sha256 {SHA} (/site/nvidia/nccl/lib/libnccl.so.2) on rank 0, "
        f"sha256 {OTHER} (/other/libnccl.so.2) on rank 1"
    )


def test_equal_files_at_two_paths_are_one_library() -> None:
    """Paths may differ between hosts; the digest decides."""
    other = library(0, path="/other/libnccl.so.2", file="other")
    assert told(nccl(2, ranks={1: {"library": other, "host": "n02", "machine": "n02/boot"}})) == []


def test_one_hash_a_node_and_file_is_enough() -> None:
    """Ranks that did not hash take the digest of the same file on their machine, and only there."""
    assert told(nccl(4)) == []
    (finding,) = told(nccl(4, ranks={3: {"machine": "n02/boot"}}))
    assert finding.outcome == "cannot tell" and "sha256 not known" in finding.message and "rank 3" in finding.message


def test_digest_that_no_rank_knows_fails_closed() -> None:
    """Files that nobody hashed are not taken for equal."""
    (finding,) = told(nccl(2, library=library(1)))
    assert (finding.check, finding.outcome, finding.severity) == ("library file", "cannot tell", "error")


def test_rank_that_cannot_load_the_library_is_named_with_the_reason() -> None:
    """One rank's failure is an error on all, and the others' libraries are compared all the same."""
    bad = {"library": None, "library_error": "/x is not usable: not a shared library"}
    (finding,) = told(nccl(3, ranks={1: bad}))
    assert (finding.check, finding.ranks) == ("library", (1,))
    assert finding.message == "rank 1: /x is not usable: not a shared library"


def test_nobody_has_a_library() -> None:
    """Where no rank has one, the report is still made."""
    (finding,) = told(nccl(2, library=None, library_error="no libnccl.so.2 found"))
    assert finding.message == "ranks 0-1: no libnccl.so.2 found"


@pytest.mark.parametrize(
    ("value", "words"), [(OTHER, f"the mapped one has {SHA}"), ("xyz", 'must be 64 hex digits; got "xyz"'), (SHA, "")]
)
def test_launchers_digest_is_held_against_the_mapped_file(value: str, words: str) -> None:
    """Another digest and a malformed one are refused; also for ranks that did not hash themselves."""
    found = told(nccl(2, env={"BUTTER_NCCL_LIBRARY_SHA256": value}))
    assert [f.check for f in found] == ["library file"] * bool(words)
    assert all(words in f.message and f.ranks == (0, 1) for f in found)


def test_two_ranks_on_one_gpu_are_refused_with_everything_needed() -> None:
    """Host, UUID, what each rank sees, and both remedies are told."""
    ranks = {1: {"device": device(0, local_rank=1, visible=1, cuda_visible_devices="0")}}
    (finding,) = told(nccl(2, ranks=ranks))
    assert (finding.check, finding.ranks) == ("sharing", (0, 1))
    assert finding.message == (
        "ranks 0-1 share GPU-00000000-0000-0000-0000-000000000000 (NVIDIA H200): "
        "rank 0 on n01 (local rank 0, CUDA_VISIBLE_DEVICES unset, 8 visible); "
        'rank 1 on n01 (local rank 1, CUDA_VISIBLE_DEVICES "0", 1 visible)'
    )
    for words in ("share_gpu=True", "BUTTER_MPI_SHARE_GPU=1", 'plane="host"', "--gpus-per-task=1"):
        assert words in finding.remedy


def test_one_gpu_seen_from_two_containers_is_one_gpu() -> None:
    """A UUID is one GPU whatever the host is called."""
    ranks = {1: {"device": device(0), "host": "container-b"}}
    (finding,) = told(nccl(2, ranks=ranks))
    assert "rank 0 on n01" in finding.message and "rank 1 on container-b" in finding.message


def test_sharing_on_purpose_is_accepted_and_said() -> None:
    """With the option the start goes on, and the report still names the ranks."""
    report = judge(nccl(2, ranks={1: {"device": device(0)}}, settings={"share_gpu": True}))
    assert report.ok
    (finding,) = [f for f in report.findings if f.check == "sharing"]
    assert finding.severity == "info" and finding.message.startswith("ranks 0-1 share GPU-")


def test_two_mig_instances_of_one_gpu_have_a_message_of_their_own() -> None:
    """NCCL knows a GPU by its bus address: two UUIDs at one address of one host are told as that."""
    ranks: dict[int, dict[str, Any]] = {r: {"device": device(r, uuid=f"MIG-{r}", pci="0000:07:00.0")} for r in range(2)}
    (finding,) = told(nccl(2, ranks=ranks))
    assert finding.check == "sharing" and "use MIG instances of one GPU at 0000:07:00.0" in finding.message
    assert "MIG-0, MIG-1" in finding.message and "share " not in finding.message
    ranks[1]["host"] = "n02"
    assert told(nccl(2, ranks=ranks)) == []


def test_mix_of_ranks_with_and_without_a_device_is_refused() -> None:
    """Under auto some ranks with a device and some without are named, with the reason of each."""
    absent = {"device": None, "device_absent": "no CUDA driver", "library": None}
    found = told(nccl(3, ranks={2: absent}, settings={"plane": "auto"}))
    assert [f.check for f in found] == ["device", "device"]
    assert found[0].message == "some ranks have a CUDA device (ranks 0-1), others have none (rank 2)"
    assert found[1].message == "rank 2: no CUDA driver"
    assert 'plane="host"' in found[0].remedy


def test_plane_nccl_without_devices_is_refused() -> None:
    """Where nccl was asked for, no device anywhere is an error, not another plane."""
    report = judge(nccl(2, device=None, device_absent="no CUDA driver"))
    assert report.plane == "nccl" and [f.message for f in report.errors] == ["ranks 0-1: no CUDA driver"]


def test_auto_without_devices_is_the_host_plane() -> None:
    """Where no rank has a device, auto is host, and nothing is refused."""
    report = judge(make_world(2, plane="auto", device_absent="no CUDA driver"))
    assert report.ok and report.plane == "host"


def test_broken_device_under_auto_does_not_become_the_host_plane() -> None:
    """A driver that fails on every rank is an error: nothing is chosen silently."""
    report = judge(make_world(2, plane="auto", device_error="cuInit failed with 803"))
    assert report.plane == "nccl" and [f.message for f in report.errors] == ["ranks 0-1: cuInit failed with 803"]


def test_ranks_that_ask_for_different_planes_are_told_only_that() -> None:
    """A rank that asked for the host plane looked at no device, and is not blamed for it."""
    records = nccl(2)
    records[1] = make_record(1, 2, env={"NCCL_IB_TIMEOUT": "10", "NCCL_IB_RETRY_CNT": "1"})
    assert [f.message for f in told(records)] == ['plane: "nccl" on rank 0, "host" on rank 1']
