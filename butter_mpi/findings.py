"""What a preflight check found, in words: values only, equal on every rank that judges the same records."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Finding", "PreflightReport", "by_value", "grouped", "quoted", "ranks_text", "stand_in"]

_LONGEST_VALUE = 120
_MOST_GROUPS = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Parameters
    ----------
    check : str
        The check's name.
    outcome : {"agree", "differ", "cannot tell", "does not apply"}
        What the comparison gave.
    severity : {"error", "warning", "info"}
        An error refuses the start.
    message : str
        The fact, grouped by value.
    remedy : str
        What to do about it.
    ranks : tuple of int
        The ranks that it names; empty where it holds for all.
    """

    check: str
    outcome: str
    severity: str
    message: str
    remedy: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PreflightReport:
    """Every finding about a start, the same on every rank.

    Parameters
    ----------
    world_size : int
        Ranks of the communicator.
    plane : {"host", "solo", "nccl"}
        The data plane by whose rules it was judged.
    findings : tuple of Finding
        One or more a check, in the order of the checks.
    """

    world_size: int
    plane: str
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that refuse the start."""
        return tuple(f for f in self.findings if f.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that a person should see although the start goes on."""
        return tuple(f for f in self.findings if f.severity == "warning")

    @property
    def ok(self) -> bool:
        """Whether the start may go on."""
        return not self.errors

    def text(self) -> str:
        """Return all errors and warnings with their remedies.

        Returns
        -------
        str
            A first line that is whole in itself (the first error, if any); below it its remedy and the other findings.
        """
        world = f"{self.world_size} {'rank' if self.world_size == 1 else 'ranks'}, plane {self.plane}"
        told = self.errors + self.warnings
        if self.ok:
            return "\n".join([f"preflight: {world}: agreed", *(line for f in told for line in _lines(f))])
        more = f"; {len(self.errors)} errors, the first" if len(self.errors) > 1 else ""
        first = f"preflight refuses this start ({world}{more}): {told[0].message}"
        return "\n".join([first, *_lines(told[0])[1:], *(line for f in told[1:] for line in _lines(f))])

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values.

        Returns
        -------
        dict
            ``world_size``, ``plane``, ``ok`` and the list ``findings``.
        """
        findings = [{**asdict(f), "ranks": list(f.ranks)} for f in self.findings]
        return {"world_size": self.world_size, "plane": self.plane, "ok": self.ok, "findings": findings}


def _lines(finding: Finding) -> list[str]:
    remedy = [f"    remedy: {finding.remedy}"] if finding.remedy else []
    return [f"  {finding.severity} [{finding.check}] {finding.message}", *remedy]


def stand_in(value: str) -> str:
    """Return what is shown and sent instead of a value that may be a secret: equal values give equal stand-ins."""
    # The watcher reads this file, has no use for this, and shall stay small.
    import hashlib

    digest = hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()
    return f"<hidden: sha256 {digest[:12]}, {len(value)} characters>"


def quoted(value: str | None) -> str:
    """Return a value in printable ASCII on one line; ``None`` is "unset", and a long one is cut and told by hash."""
    if value is None:
        return "unset"
    if len(value) > _LONGEST_VALUE:
        return f"{json.dumps(value[:_LONGEST_VALUE])}... {stand_in(value)}"
    return json.dumps(value)


def ranks_text(ranks: Iterable[int]) -> str:
    """Return "rank 4" or "ranks 0-3, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{'rank' if sum(map(len, runs)) == 1 else 'ranks'} {', '.join(words)}"


def by_value(said: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """Return the ranks that said each text, in the order of the lowest rank of each."""
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(said):
        groups.setdefault(text, []).append(rank)
    return groups


def grouped(said: Sequence[tuple[int, str]]) -> str:
    """Return what each rank said, grouped by text, in the order of the lowest rank of each group."""
    groups = by_value(said)
    parts = [f"{text} on {ranks_text(ranks)}" for text, ranks in groups.items()]
    if len(parts) > _MOST_GROUPS:
        rest = [rank for ranks in list(groups.values())[_MOST_GROUPS:] for rank in ranks]
        parts[_MOST_GROUPS:] = [f"{len(groups) - _MOST_GROUPS} other values on {ranks_text(rest)}"]
    return ", ".join(parts)
