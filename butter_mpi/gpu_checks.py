"""The checks that only the nccl plane needs: refused variables, the policy, the library, devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from butter_mpi.checks import (
    Check,
    Record,
    World,
    differ,
    launch_info,
    named,
    own_faults,
    value_texts,
    values,
)
from butter_mpi.environment import DIGEST_VARIABLE
from butter_mpi.findings import Finding, grouped, quoted, ranks_text
from butter_mpi.launch import forwarding
from butter_mpi.library import check_expected
from butter_mpi.policy import POLICY

__all__ = ["GPU_CHECKS", "known_digests"]

_NCCL = ("nccl",)
_OWN_GPU = (
    "give each rank its own GPU (srun --gpus-per-task=1; under mpirun, leave all visible: each takes its local rank's)"
)
_SHARE = (
    f"{_OWN_GPU}, or share it on purpose with share_gpu=True (BUTTER_MPI_SHARE_GPU=1, --share-gpu), "
    'or take plane="host" (BUTTER_MPI_PLANE=host, --plane host)'
)
_MOST_DETAILS = 8

_REFUSED: Mapping[str, tuple[str | None, str]] = {
    "NCCL_COMM_ID": (None, "it replaces the unique ID that MPI carries, and two communicators would meet"),
    "NCCL_COMM_BLOCKING": (None, "it overrides how butter_mpi makes every communicator"),
    "NCCL_ENV_PLUGIN": ("none", "a plug-in can replace every variable that was compared"),
}
"""Variables that may not be set, the one value that is harmless, and why."""


def _refused(world: World) -> list[Finding]:
    findings = []
    for name, (harmless, why) in _REFUSED.items():
        ranks = [rank for rank, value in values(world, name).items() if value not in (None, harmless)]
        if ranks:
            said = [(rank, text) for rank, text in value_texts(world, name) if rank in ranks]
            text = f"{name} is set: {grouped(said)}: {why}"
            findings.append(Finding("refused variables", "differ", "error", text, f"unset {name}", tuple(ranks)))
    return findings


def _policy(world: World) -> list[Finding]:
    findings = []
    for name, required in POLICY.items():
        wrong = [(rank, r["policy"][name]) for rank, r in world.records.items() if name in r["policy"]]
        if wrong:
            text = f'{name} must be "{required}" in the C environment of every rank; it is {grouped(wrong)}'
            line = forwarding(launch_info(world.records[wrong[0][0]]), name, required)
            remedy = f"{line} (the scripts in launch/ set it)"
            findings.append(Finding("policy", "differ", "error", text, remedy, named(wrong)))
    return findings


def _library(world: World) -> list[Finding]:
    said = world.said(lambda r: r["library"] and r["library"]["version_text"])
    remedy = "install one NCCL version for every rank (NCCL_VERSION in the environment says nothing about it)"
    faults = own_faults("library", world.said(lambda r: r["library_error"]))
    return faults + differ("library", "NCCL version", said, remedy)


def known_digests(records: Iterable[Record]) -> dict[tuple[str, str], str]:
    """Return the digest of each file that some rank of its machine hashed."""
    return {
        (r["machine"], r["library"]["file"]): r["library"]["sha256"]
        for r in records
        if r["library"] and r["library"]["sha256"]
    }


def _library_file(world: World) -> list[Finding]:
    known = known_digests(world.records.values())
    said: list[tuple[int, str]] = []
    digests: dict[int, str | None] = {}
    for rank, record in world.records.items():
        if (library := record["library"]) is not None:
            digests[rank] = known.get((record["machine"], library["file"]))
            said.append((rank, f"sha256 {digests[rank] or 'not known'} ({quoted(library['path'])[1:-1]})"))
    outcome = "differ" if None not in digests.values() else "cannot tell"
    findings = []
    if len(set(digests.values())) > 1 or outcome == "cannot tell":
        text = f"libnccl.so.2 is not one file: {grouped(said)}"
        remedy = "install the same NCCL wheel on every rank, or let NCCL_LIBRARY name equal files"
        findings.append(Finding("library file", outcome, "error", text, remedy, named(said)))
    return findings + _expected(world, digests)


def _expected(world: World, digests: Mapping[int, str | None]) -> list[Finding]:
    wrong = []
    for rank, value in values(world, DIGEST_VARIABLE).items():
        fault = check_expected(value, digests.get(rank))
        if fault:
            wrong.append((rank, fault))
    if not wrong:
        return []
    text = f"{DIGEST_VARIABLE}: {grouped(wrong)}"
    remedy = f"let the launcher hash the file that NCCL_LIBRARY names, or unset {DIGEST_VARIABLE}"
    return [Finding("library file", "differ", "error", text, remedy, named(wrong))]


def _device(world: World) -> list[Finding]:
    faults = own_faults("device", world.said(lambda r: r["device_error"]))
    absent = own_faults("device", world.said(lambda r: r["device_absent"]))
    having = [rank for rank, r in world.records.items() if r["device"]]
    if absent and having:
        lacking = named(world.said(lambda r: r["device_absent"]))
        text = f"some ranks have a CUDA device ({ranks_text(having)}), others have none ({ranks_text(lacking)})"
        remedy = 'make one visible to every rank, or take plane="host" (BUTTER_MPI_PLANE=host)'
        faults.append(Finding("device", "differ", "error", text, remedy, lacking))
    return faults + absent


def _place(rank: int, record: Record) -> str:
    device = record["device"]
    visible = f"CUDA_VISIBLE_DEVICES {quoted(device['cuda_visible_devices'])}, {device['visible']} visible"
    return f"rank {rank} on {record['host']} (local rank {device['local_rank']}, {visible})"


def _shared(world: World, key: Callable[[Record], Any]) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    for rank, record in world.records.items():
        if record["device"]:
            groups.setdefault(key(record), []).append(rank)
    return [ranks for ranks in groups.values() if len(ranks) > 1]


def _sharing(world: World) -> list[Finding]:
    """Refuse two ranks on one GPU, by its UUID, and on two MIG instances of one GPU, by its bus address."""
    said = []
    for ranks in _shared(world, lambda r: r["device"]["uuid"]):
        device = world.records[ranks[0]]["device"]
        said.append((ranks, f"{ranks_text(ranks)} share {device['uuid']} ({device['name']})"))
    for ranks in _shared(world, lambda r: (r["host"], r["device"]["pci"])):
        uuids = sorted({world.records[rank]["device"]["uuid"] for rank in ranks})
        pci = world.records[ranks[0]]["device"]["pci"]
        if len(uuids) > 1:
            text = f"{ranks_text(ranks)} use MIG instances of one GPU at {pci}, which NCCL takes for one device"
            said.append((ranks, f"{text} ({', '.join(uuids)})"))
    allowed = all(r["settings"]["share_gpu"] for r in world.records.values())
    findings = []
    for ranks, text in said:
        places = "; ".join(_place(rank, world.records[rank]) for rank in ranks[:_MOST_DETAILS])
        outcome, severity, remedy = ("agree", "info", "") if allowed else ("differ", "error", _SHARE)
        findings.append(Finding("sharing", outcome, severity, f"{text}: {places}", remedy, tuple(ranks)))
    return findings


GPU_CHECKS = (
    Check("device", _NCCL, _device, lambda r: "every rank has a CUDA device"),
    Check("refused variables", _NCCL, _refused, lambda r: f"none of {', '.join(_REFUSED)} is set"),
    Check("policy", _NCCL, _policy, lambda r: ", ".join(f"{n}={v}" for n, v in POLICY.items())),
    Check("library", _NCCL, _library, lambda r: f"NCCL {(r['library'] or {}).get('version_text')}"),
    Check("library file", _NCCL, _library_file, lambda r: f"libnccl.so.2 sha256 {(r['library'] or {}).get('sha256')}"),
    Check("sharing", _NCCL, _sharing, lambda r: "no two ranks share a GPU"),
)
"""The checks of the nccl plane, in the order of the report."""
