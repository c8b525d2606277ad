"""What a cell was worth: passed, over its bound, wrong, or without survivors; pure, from what was seen."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from helpers.recovery import waits

from matrix.cells import Cell
from matrix.expected import ENDED_WITHIN, LATE_AT, WARNED_AT, back_within, bound, errors
from matrix.running import Seen
from matrix.table import ENDING, FAULTS, HOST, NOTHING, RANKS, RECONNECT, START, STRICT, VICTIM, struck

PASSED, OVER, WRONG, NONE, NOT_RUN = "passed", "over its bound", "wrong", "no survivors", "not run"
MEASURED = ("poisoned", "returned", "raised", "ended", "back")
_WORST_FIRST = (WRONG, OVER, NOT_RUN, NONE, PASSED)
# 14: Open MPI itself, where a rank has lost a connection to another host.
_BY_LAUNCHER = re.compile(r"was killed by SIG(KILL|TERM)|ended with exit status (137|143|14)\b")
_SITE = re.compile(r"scene\.py:\d+")
_SHOWN = 200
_GIVEN_UP = "MPI would wait for data of an operation that broke"
"""Why a job is ended after its close, though all went well again: a cut may leave requests that never complete."""
_CRASH = re.compile(r"Fatal Python error|Segmentation fault|Sanitizer")


@dataclass
class Outcome:
    """The outcome of a cell: a status, why, each rank in short, and milliseconds by what they were measured to."""

    status: str = PASSED
    why: list[str] = field(default_factory=list)
    ranks: dict[int, str] = field(default_factory=dict)
    ms: dict[str, list[float]] = field(default_factory=lambda: {what: [] for what in MEASURED})

    def note(self, status: str, why: str) -> None:
        """Make the outcome as bad as this."""
        self.status = min(self.status, status, key=_WORST_FIRST.index)
        self.why.append(why)


def judge(cell: Cell, runs: Sequence[Seen]) -> Outcome:
    """Return the outcome of all runs of a cell together."""
    outcome = Outcome()
    for seen in runs:
        _Judge(cell, seen, outcome).run()
    limit = bound(cell, cell.judged[0])
    if cell.kind != "late" and outcome.ms["poisoned"]:
        median = statistics.median(outcome.ms["poisoned"])
        if median > limit.poisoned:
            outcome.note(OVER, f"poisoned after {median:.0f} ms (median), {limit.poisoned:.0f} allowed")
    return outcome


class _Judge:
    """Judges one run."""

    def __init__(self, cell: Cell, seen: Seen, outcome: Outcome) -> None:
        self._cell, self._seen, self._outcome = cell, seen, outcome
        fault = seen.first(VICTIM, "fault")
        self._fault = None if fault is None else float(fault["t"])

    def run(self) -> None:
        cell, seen, outcome = self._cell, self._seen, self._outcome
        if self._fault is None:
            outcome.note(WRONG, "the fault did not happen")
            return
        alive = [self._rank(rank) for rank in cell.judged]
        if not any(alive):
            outcome.note(NONE, "the launcher ended every rank first")
        self._verdict(any(alive))
        if cell.recovery != NOTHING:
            self._back()
        if seen.left:
            outcome.note(WRONG, seen.left)
        if found := _CRASH.search(seen.err):
            outcome.note(WRONG, f"a process crashed: {found[0]}")
        for rank in range(cell.ranks):
            if rank not in seen.ends and rank in cell.judged:
                outcome.note(WRONG, f"rank {rank} hangs")

    def _begin(self, rank: int) -> float:
        """Return the time that a rank's milliseconds count from."""
        if self._cell.kind in ("late", "unseen") and self._seen.first(rank, "ready"):
            # The first whose wait is over tells the others.
            every = [self._seen.first(other, "ready") for other in range(self._cell.ranks)]
            return min(float(ready["t"]) for ready in every if ready)
        return self._fault or 0.0

    def _since(self, rank: int, said: dict[str, Any] | None) -> float | None:
        return None if said is None else (float(said["t"]) - self._begin(rank)) * 1000

    def _rank(self, rank: int) -> bool:
        """Judge one rank; returns whether it lived to say something."""
        if self._cell.phase in ENDING:
            return self._ended(rank)
        seen, outcome = self._seen, self._outcome
        poisoned = self._since(rank, seen.first(rank, "poisoned"))
        if poisoned is not None:
            outcome.ms["poisoned"].append(poisoned)
        returned = self._since(rank, seen.first(rank, "returned"))
        if returned is not None and poisoned is not None:
            outcome.ms["returned"].append(returned)
            self._within(rank, "the foreign wait returned", returned, bound(self._cell, rank).foreign)
        raised = seen.first(rank, "raised")
        if raised is None:
            return self._silent(rank, poisoned)
        after = self._since(rank, raised) or 0.0
        if not (self._cell.kind == "late" and rank == VICTIM):
            outcome.ms["raised"].append(after)
        outcome.ranks[rank] = f"{raised['error']} at {after:.0f} ms"
        self._error(rank, raised)
        if self._cell.kind == "late" and rank != VICTIM:
            self._late(rank, after)
        elif self._cell.kind != "late":
            self._within(rank, "raised", after, bound(self._cell, rank).of(self._cell.phase))
        return True

    def _silent(self, rank: int, poisoned: float | None) -> bool:
        """Judge a rank that raised nothing."""
        how = self._seen.ends.get(rank, (0.0, "hangs"))[1]
        if _BY_LAUNCHER.search(how) and self._cell.kind != "late":
            told = "" if poisoned is None else f"poisoned at {poisoned:.0f} ms, "
            self._outcome.ranks[rank] = f"{told}ended by the launcher"
            return False
        self._outcome.ranks[rank] = f"no error: {how}"
        self._outcome.note(WRONG, f"rank {rank} raised nothing: {how}")
        return True

    def _within(self, rank: int, what: str, found: float, allowed: float) -> None:
        if found > allowed:
            self._outcome.note(OVER, f"rank {rank}: {what} at {found:.0f} ms, {allowed:.0f} allowed")

    def _error(self, rank: int, raised: dict[str, Any]) -> None:
        """Judge what was raised: the class, who is named, and by what."""
        cell, text, wrong = self._cell, raised["text"], []
        if raised["error"] not in errors(cell):
            wrong.append(f"{raised['error']} instead of {' or '.join(errors(cell))}")
        may, named = cell.lost(rank), set(raised["lost"])
        if cell.phase not in START and cell.blames and not (named and any(named <= set(those) for those in may)):
            wrong.append(f"lost_ranks {raised['lost']}")
        if cell.kind == "mismatch":
            if len(set(_SITE.findall(text))) < 2:
                wrong.append("both call sites are not named")
            if raised["records"] < 2:
                wrong.append(f"{raised['records']} records")
        elif cell.kind in ("watcher", "watcher-frozen") and (rank == VICTIM or not cell.on_hosts):
            if "watcher" not in text:
                wrong.append("the watcher is not named")
        elif cell.phase != "join" and not any(re.search(rf"\branks? {one}\b", text) for one in itertools.chain(*may)):
            wrong.append("the rank is not named")
        # What MPI itself says first knows no hosts; the verdict does.
        if cell.on_hosts and cell.blames and "MPI lost rank" not in text and not _names_host(text, may):
            wrong.append("the host is not named")
        if wrong:
            self._outcome.note(WRONG, f"rank {rank}: {', '.join(wrong)}: {text.splitlines()[0][:_SHOWN]}")

    def _late(self, rank: int, raised: float) -> None:
        """Judge the warning and the deadline of a late rank."""
        warned = self._since(rank, next((w for w in self._warnings(rank)), None))
        for what, found, (low, high) in (("warned", warned, WARNED_AT), ("raised", raised, LATE_AT)):
            if found is None or not low <= found <= high:
                at = "never" if found is None else f"at {found:.0f} ms"
                self._outcome.note(OVER, f"rank {rank}: {what} {at}, between {low} and {high} allowed")

    def _warnings(self, rank: int) -> list[dict[str, Any]]:
        said = self._seen.said.get(rank, [])
        return [one for one in said if one["what"] == "warned" and _naming([VICTIM]).search(one["text"])]

    def _ended(self, rank: int) -> bool:
        """Judge a rank that has closed, or is at its exit: it must end, and soon."""
        if rank not in self._seen.ends:
            self._outcome.ranks[rank] = "does not end"
            return True
        when, how = self._seen.ends[rank]
        after = (when - self._begin(rank)) * 1000
        self._outcome.ms["ended"].append(after)
        by_launcher = _BY_LAUNCHER.search(how) is not None
        shown = "ended by the launcher" if by_launcher else how.split(" without")[0]
        self._outcome.ranks[rank] = f"{shown} at {after:.0f} ms"
        self._within(rank, "ended", after, ENDED_WITHIN)
        return not by_launcher

    def _back(self) -> None:
        """Judge the return to work: in time, all of them, with right data, and a good end."""
        cell, outcome, ranks = self._cell, self._outcome, self._cell.judged
        backs = {rank: self._seen.every(rank, "back") for rank in ranks}
        # After two recoveries in a row the last sum is that of those who are left.
        times = 2 if cell.fault == "kill-twice" else 1
        for rank, those in backs.items():
            last = those[-1] if those else {}
            if len(those) != times:
                failed = self._seen.first(rank, "failed")
                why = f": {failed['text'].splitlines()[0][:_SHOWN]}" if failed else ""
                outcome.note(WRONG, f"rank {rank} was back at work {len(those)} times instead of {times}{why}")
            elif (last["ranks"], last["sum"]) != (len(ranks), len(ranks) * (len(ranks) + 1) // 2):
                outcome.note(WRONG, f"rank {rank}: a sum of {last['sum']} over {last['ranks']} ranks")
            how = self._seen.ends.get(rank, (0.0, "hangs"))[1]
            if not how.startswith("ended with exit status 0") and _GIVEN_UP not in self._seen.err:
                outcome.note(WRONG, f"rank {rank} did not end well: {how}")
        if any(len(those) != times for those in backs.values()):
            return
        begins = self._begins_of_recovery()
        for seconds in waits(begins, [[one["t"] for one in those] for those in backs.values()]):
            outcome.ms["back"].append(seconds * 1000)
            if seconds * 1000 > back_within(cell):
                outcome.note(OVER, f"back at work after {seconds * 1000:.0f} ms, {back_within(cell):.0f} allowed")

    def _begins_of_recovery(self) -> list[float]:
        """Return when it could begin: at each death; where none died, when the last one could go on."""
        if self._cell.kind == "death":
            return [one["t"] for rank in FAULTS[self._cell.fault].gone for one in self._seen.every(rank, "fault")]
        could = "again" if self._cell.recovery == RECONNECT else "raised"
        begins = [self._seen.first(rank, could) for rank in self._cell.judged]
        return [max((float(one["t"]) for one in begins if one), default=0.0)]

    def _verdict(self, alive: bool) -> None:
        """Judge what stands on stderr and in the file: always needed, and all there is without survivors."""
        cell = self._cell
        if cell.kind in ("watcher", "watcher-frozen"):
            return
        if cell.phase == "join" or (cell.phase in START and cell.kind == "told"):
            # The watcher does not stand yet, or the ranks tell one another.
            return
        said = [line for line in self._seen.err.splitlines() if line.startswith("butter_mpi: ")]
        # Of those that are struck at one time a watcher names the one that it sees first.
        needs = _SITE if cell.kind == "mismatch" else _naming(struck(cell.fault))
        whole = self._seen.err if cell.kind == "mismatch" else "\n".join(said)
        file = "\n".join(str(one["text"]) for one in self._seen.verdicts)
        # Where ranks compare what they submit themselves, each of them raises it, and the program may expect that.
        quiet = cell.kind == "mismatch" and cell.plane in (HOST, STRICT)
        # A launcher that ends all on several hosts may end itself too, before a watcher has had a core.
        quiet |= cell.on_hosts and not alive
        if not quiet and not (said and needs.search(whole)):
            self._outcome.note(WRONG, "no verdict on stderr")
        if not needs.search(file) or (cell.on_hosts and cell.blames and not _names_host(file, cell.lost(0))):
            self._outcome.note(WRONG, "no verdict in the file")


def _naming(ranks: Iterable[int]) -> re.Pattern[str]:
    """Return what finds one of these ranks named."""
    return re.compile(rf"\branks? (?:{'|'.join(map(str, ranks))})\b")


def _names_host(text: str, ranks: Iterable[Iterable[int]]) -> bool:
    """Say whether the host of any of these ranks is named."""
    return any(f"host{rank + 1}" in text for rank in itertools.chain(*ranks))


def judge_calm(seen: Seen) -> Outcome:
    """Return the outcome of a scene that must end well."""
    outcome = Outcome()
    for rank in range(RANKS):
        well = seen.first(rank, "well")
        how = seen.ends.get(rank, (0.0, "hangs"))[1]
        outcome.ranks[rank] = "ended well" if well else how
        if well is None:
            outcome.note(WRONG, f"rank {rank} did not end well: {how}")
    if seen.rc != 0:
        outcome.note(WRONG, f"the job's status is {seen.rc}")
    if seen.verdicts:
        outcome.note(WRONG, f"false alarm: {seen.verdicts[0]['text'].splitlines()[0][:_SHOWN]}")
    if seen.left:
        outcome.note(WRONG, seen.left)
    return outcome
