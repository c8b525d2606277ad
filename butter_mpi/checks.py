"""The checks of preflight: each one a small pure function from what every rank said to findings.

A check returns what must be told; nothing to tell is agreement. Findings are values of all records together, so they
are equal on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from butter_mpi.environment import Nature, nature
from butter_mpi.findings import Finding, grouped, quoted, ranks_text
from butter_mpi.launch import LaunchInfo, false_green, forwarding, outside_any_step, srun_line
from butter_mpi.policy import POLICY
from butter_mpi.transport import judge_host

__all__ = [
    "GENERAL_CHECKS",
    "Check",
    "Record",
    "World",
    "differ",
    "launch_info",
    "named",
    "own_faults",
    "resolve_plane",
    "value_texts",
    "values",
]

Record = Mapping[str, Any]

_EVERY, _SHARED, _WITHOUT_NCCL = ("host", "solo", "nccl"), ("host", "nccl"), ("host", "solo")
_MOST_VARIABLES = 20
_SAME_BUILD = "install the same butter_mpi on every rank"


@dataclass(frozen=True, slots=True)
class World:
    """The records by their place in the communicator, its size, and the plane by whose rules they are judged."""

    records: Mapping[int, Record]
    size: int
    plane: str

    def said(self, what: Callable[[Record], Any]) -> list[tuple[int, Any]]:
        """Return what each rank says, except the ranks that have nothing to say (``None``)."""
        return [(rank, value) for rank, r in self.records.items() if (value := what(r)) is not None]


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its name, the planes it applies to, what finds, and what all agree on when nothing is found."""

    name: str
    planes: tuple[str, ...]
    find: Callable[[World], Iterable[Finding]]
    says: Callable[[Record], str]


def resolve_plane(records: Sequence[Record], size: int) -> str:
    """Return the plane by whose rules these records are judged; a mix is judged by the stricter one."""
    if size == 1:
        return "solo"
    wanted = {r["settings"]["plane"] for r in records}
    has_device = any(r["device"] or r["device_error"] for r in records)
    return "nccl" if "nccl" in wanted or ("auto" in wanted and has_device) else "host"


def launch_info(record: Record) -> LaunchInfo:
    """Return the launcher's claims of a record."""
    return LaunchInfo(**{**record["launch"], "malformed": tuple(record["launch"]["malformed"])})


def named(said: Iterable[tuple[int, Any]]) -> tuple[int, ...]:
    """Return the ranks of (rank, what it said)."""
    return tuple(sorted({rank for rank, _ in said}))


def differ(check: str, what: str, said: list[tuple[int, str]], remedy: str) -> list[Finding]:
    """Return an error where not all said the same."""
    if len({text for _, text in said}) < 2:
        return []
    return [Finding(check, "differ", "error", f"{what}: {grouped(said)}", remedy, named(said))]


def _package(world: World) -> list[Finding]:
    said = world.said(lambda r: f"{r['package']} (record {r['record']})")
    return differ("package", "butter_mpi", said, _SAME_BUILD)


def _assignment(world: World) -> list[Finding]:
    wrong = [(i, f"says rank {r['rank']}") for i, r in world.records.items() if r["rank"] != i]
    wrong += [(i, f"says {r['world_size']} ranks") for i, r in world.records.items() if r["world_size"] != world.size]
    if not wrong:
        return []
    text = f"ranks are not 0 to {world.size - 1}, one each: {grouped(wrong)}"
    remedy = "start every rank in one job, with the mpirun of the MPI library that mpi4py loads"
    return [Finding("assignment", "differ", "error", text, remedy, named(wrong))]


def _claims(info: LaunchInfo, record: Record) -> tuple[str, str] | None:
    """Return what is wrong between the launcher's claims and MPI, and the remedy."""
    size, world = info.claimed_size, record["comm_world_size"]
    if info.malformed:
        return "; ".join(info.malformed), "these variables are the launcher's own: do not set them"
    if size is not None and size > world:
        cause, remedy = false_green(info, record["mpi_library"])
        return f"{info.size_variable} says {size} ranks, but MPI.COMM_WORLD has {world}: {cause}", remedy
    rank = info.claimed_rank
    if size == world and rank is not None and rank != record["comm_world_rank"]:
        text = f"the launcher says rank {rank}, but MPI says rank {record['comm_world_rank']} of MPI.COMM_WORLD"
        return text, "start every rank in one job, with the mpirun of the MPI library that mpi4py loads"
    return None


def _launcher(world: World) -> list[Finding]:
    found: dict[tuple[str, str], list[int]] = {}
    for rank, record in world.records.items():
        wrong = _claims(launch_info(record), record)
        if wrong:
            found.setdefault(wrong, []).append(rank)
    return [
        Finding("launcher", "differ", "error", f"{text} ({ranks_text(ranks)})", remedy, tuple(ranks))
        for (text, remedy), ranks in found.items()
    ]


def _allocation(world: World) -> list[Finding]:
    """Warn of a process that no launcher started, alone where several tasks were asked for."""
    record = next(iter(world.records.values()))
    info = launch_info(record)
    outside = outside_any_step(info)
    if world.size > 1 or record["comm_world_size"] > 1 or not outside:
        return []
    remedy = f"start it with {srun_line(record['mpi_library'])}"
    return [Finding("allocation", "differ", "warning", f"{outside}, so it runs alone", remedy)]


def own_faults(check: str, said: Iterable[tuple[int, str]]) -> list[Finding]:
    """Return an error for each fault that ranks found by themselves, grouped by text."""
    found: dict[str, list[int]] = {}
    for rank, text in said:
        found.setdefault(text, []).append(rank)
    return [
        Finding(check, "cannot tell", "error", f"{ranks_text(ranks)}: {text}", "", tuple(ranks))
        for text, ranks in found.items()
    ]


def _failures(world: World) -> list[Finding]:
    return own_faults("start", [(rank, text) for rank, r in world.records.items() for text in r["failures"]])


def _settings(world: World) -> list[Finding]:
    # The settings of a rank that could not read them are the defaults, and would differ for no reason of their own.
    sound = [(rank, r["settings"]) for rank, r in world.records.items() if not r["failures"]]
    findings = []
    for name in sound[0][1] if sound else ():
        said = [(rank, quoted(None if s[name] is None else str(s[name]))) for rank, s in sound]
        remedy = f"pass the same {name} to init on every rank, or set BUTTER_MPI_{name.upper()} alike"
        findings += differ("settings", name, said, remedy)
    return findings


def _plan(world: World) -> list[Finding]:
    def text(record: Record) -> str | None:
        plan = record["plan"]
        if record["failures"]:
            return None
        return "undeclared" if plan is None else ", ".join(f"{k} {plan[k]}" for k in sorted(plan))

    said = world.said(text)
    return differ("plan", "planned collective", said, "declare the same plan on every rank, or on none")


def _sequence(world: World) -> list[Finding]:
    said = world.said(lambda r: str(r["sequence"]))
    return differ("sequence", "collective sequence", said, "every rank must have submitted the same collectives")


def value_texts(world: World, name: str) -> list[tuple[int, str]]:
    """Return the value of a variable in words for each rank, with the file that it came from."""
    texts = []
    for rank, record in world.records.items():
        value, source = record["environment"].get(name, (None, "environment"))
        texts.append((rank, quoted(value) + ("" if source == "environment" else f" from {quoted(source)[1:-1]}")))
    return texts


def values(world: World, name: str) -> dict[int, str | None]:
    """Return the value of a variable for each rank."""
    return {rank: r["environment"].get(name, (None,))[0] for rank, r in world.records.items()}


def _nature(world: World, name: str) -> Nature:
    return nature(name, share_gpu=all(r["settings"]["share_gpu"] for r in world.records.values()))


def _differs(world: World, name: str) -> bool:
    found = values(world, name)
    per_host = all(r["settings"]["per_host_interfaces"] for r in world.records.values())
    if not (per_host and _nature(world, name) is Nature.INTERFACE):
        return len(set(found.values())) > 1
    by_host: dict[str, set[str | None]] = {}
    for rank, value in found.items():
        by_host.setdefault(world.records[rank]["host"], set()).add(value)
    return any(len(several) > 1 for several in by_host.values())


def _is_plain(value: str) -> bool:
    """Whether a message shows a value as it is: only then a command line with it can be typed."""
    return quoted(value) == f'"{value}"' and not value.startswith("<hidden")


def _environment_remedy(world: World, name: str) -> str:
    info = launch_info(next(iter(world.records.values())))
    shown = next((v for v in values(world, name).values() if v is not None and _is_plain(v)), "VALUE")
    remedy = f"give every rank the same value: {forwarding(info, quoted(name)[1:-1], shown)}"
    if _nature(world, name) is Nature.INTERFACE:
        remedy += "; or allow one value a host: per_host_interfaces=True (BUTTER_MPI_PER_HOST_INTERFACES=1)"
    return remedy


def _rest(severity: str, names: Sequence[str], ranks: tuple[int, ...]) -> Finding:
    """Return one finding for many variables: a file of thousands must not drown the message."""
    shown = ", ".join(quoted(name)[1:-1] for name in names[:_MOST_VARIABLES])
    more = f" and {len(names) - _MOST_VARIABLES} others" if len(names) > _MOST_VARIABLES else ""
    text = f"{len(names)} more {'variable differs' if len(names) == 1 else 'variables differ'}: {shown}{more}"
    remedy = "give every rank the same environment and the same NCCL configuration files"
    return Finding("environment", "differ", severity, text, remedy, ranks)


def _environment(world: World) -> list[Finding]:
    differing: dict[str, list[str]] = {"error": [], "warning": []}
    for name in sorted({name for r in world.records.values() for name in r["environment"]}):
        kind = _nature(world, name)
        told_elsewhere = world.plane == "nccl" and name in POLICY
        if kind is Nature.FREE or told_elsewhere or not _differs(world, name):
            continue
        differing["warning" if kind is Nature.WARN else "error"].append(name)
    findings, ranks = [], tuple(world.records)
    for severity, names in differing.items():
        for name in names[:_MOST_VARIABLES]:
            text = f"{quoted(name)[1:-1]}: {grouped(value_texts(world, name))}"
            findings.append(Finding("environment", "differ", severity, text, _environment_remedy(world, name), ranks))
        if names[_MOST_VARIABLES:]:
            findings.append(_rest(severity, names[_MOST_VARIABLES:], ranks))
    return findings


def _transport(world: World) -> list[Finding]:
    required = sorted({str(r["settings"]["require_transport"]) for r in world.records.values()} - {"None"})
    return [finding for name in required if (finding := judge_host(name, world.plane)) is not None]


def _mpi(world: World) -> list[Finding]:
    said = world.said(lambda r: f"{quoted(r['mpi_library'])} at thread level {r['thread_level']}")
    found = differ("mpi", "MPI library", said, "use one MPI library for every rank")
    return [Finding(f.check, f.outcome, "warning", f.message, f.remedy, f.ranks) for f in found]


def _environment_says(record: Record) -> str:
    count = sum(nature(name) is Nature.ALIKE for name in record["environment"])
    return f"the NCCL environment ({count} variables that must be alike)"


GENERAL_CHECKS = (
    Check("package", _EVERY, _package, lambda r: f"butter_mpi {r['package']}, record {r['record']}"),
    Check("assignment", _EVERY, _assignment, lambda r: f"ranks are 0 to {r['world_size'] - 1}, one each"),
    Check("launcher", _EVERY, _launcher, lambda r: "the launcher and MPI agree on size and rank"),
    Check("allocation", _EVERY, _allocation, lambda r: "no rank is alone inside a larger allocation"),
    Check("start", _EVERY, _failures, lambda r: "no rank found a fault of its own"),
    Check("settings", _EVERY, _settings, lambda r: f"settings (plane {r['settings']['plane']})"),
    Check("plan", _EVERY, _plan, lambda r: "planned collective" if r["plan"] else "no planned collective"),
    Check("sequence", _EVERY, _sequence, lambda r: f"collective sequence {r['sequence']}"),
    Check("mpi", _EVERY, _mpi, lambda r: "one MPI library"),
    Check("environment", _SHARED, _environment, _environment_says),
    Check("transport", _WITHOUT_NCCL, _transport, lambda r: "no transport is required"),
)
"""The checks of every plane, in the order of the report."""
