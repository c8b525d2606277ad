"""The tool of the fault matrix: its selection covers, its judge is just, its page says what was run."""

from __future__ import annotations

import datetime
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import hosts
from matrix import choosing, reporting
from matrix.__main__ import main, scenes
from matrix.cells import PARTS, RECOVERY_PART, Cell, every_cell, fits
from matrix.judging import NONE, OVER, PASSED, WRONG, Outcome, judge, judge_calm
from matrix.running import Runner, Seen
from matrix.table import CALM, ENDING, FAULTS, LAUNCHERS, NOTHING, ON_GPU, PHASES, PLANES, RANKS, RECOVERIES

ROOT = Path(__file__).resolve().parents[2]
ALL = list(every_cell())
WITHOUT_GPU = [launcher.name for launcher in LAUNCHERS.values() if not launcher.gpu]


def test_selection_covers_every_pair() -> None:
    """Two values that go together in any cell are together in a chosen one."""
    tables = (FAULTS, PHASES, PLANES, WITHOUT_GPU, RECOVERIES)
    chosen = [(cell.fault, cell.phase, cell.plane, cell.launcher, cell.recovery) for cell in choosing.selection()]
    possible = [values for values in itertools.product(*tables) if fits(Cell(*values))]
    for first, second in itertools.combinations(range(len(tables)), 2):
        wanted = {(values[first], values[second]) for values in possible}
        assert wanted == {(values[first], values[second]) for values in chosen}


@pytest.mark.parametrize("choose", [choosing.selection, choosing.for_ci])
def test_dangerous_pairs_are_there_in_full(choose: Callable[[], list[Cell]]) -> None:
    """SIGKILL and SIGSTOP are run in every phase on both planes, also in CI; nothing is chosen twice."""
    chosen = choose()
    found = {(cell.fault, cell.phase, cell.plane) for cell in chosen}
    only_nccl = {"unique-id", "nccl-init", "python", "foreign", "full"}
    for fault, phase in itertools.product(("kill", "stop"), PHASES):
        assert (fault, phase, "nccl") in found
        assert ((fault, phase, "host") in found) == (phase not in only_nccl)
    assert len(set(chosen)) == len(chosen) and chosen == choose()


def test_dangerous_faults_of_ranks_are_there_between_hosts() -> None:
    """A rank is killed and stopped in every phase that cells on several hosts have; each fault of hosts in each."""
    found = {(cell.fault, cell.phase) for cell in choosing.selection() if cell.on_hosts}
    phases = ("idle", "wait", "foreign", "mpi")
    assert found >= set(itertools.product(("kill", "stop", "host-freeze", "cut-both"), phases))


def test_ci_fits_and_has_every_fault_phase_launcher_and_recovery() -> None:
    """The part for CI keeps its time, is a part of the whole, and leaves out no value of any table altogether."""
    chosen = choosing.for_ci()
    assert choosing.cost(chosen) <= choosing.CI_SECONDS
    assert set(chosen) <= set(choosing.selection())
    for name, table in (
        ("fault", FAULTS),
        ("phase", PHASES),
        ("launcher", WITHOUT_GPU),
        ("recovery", RECOVERIES),
        ("part", PARTS),
    ):
        assert {getattr(cell, name) for cell in chosen} == set(table)


def test_cells_of_gpus() -> None:
    """On a shared GPU every fault that needs no stand-in has a cell, the dangerous ones each phase after the join."""
    chosen = choosing.on_gpus(list(ON_GPU))
    assert len(set(chosen)) == len(chosen)
    assert all(LAUNCHERS[cell.launcher].gpu for cell in chosen)
    for plane in ("gpu-p2p", "gpu-socket"):
        of_it = [cell for cell in chosen if cell.plane == plane]
        on_one_host = {fault.name for fault in FAULTS.values() if not fault.outside}
        assert {cell.fault for cell in of_it} == on_one_host - {"background", "call"}
        back = {(cell.fault, cell.recovery) for cell in of_it if cell.part == RECOVERY_PART}
        assert back >= {("kill", "shrink"), ("stop", "shrink"), ("freeze", "reconnect"), ("kill-during", "shrink")}
        for fault in ("kill", "stop"):
            phases = {cell.phase for cell in of_it if cell.fault == fault and cell.recovery == NOTHING}
            assert phases == set(PHASES) - {"join", "exchange"}
    assert {(cell.fault, cell.plane) for cell in chosen} >= set(itertools.product(("kill", "stop"), ON_GPU))


# -- the judge ---------------------------------------------------------------------------------------------------------

KILL = Cell("kill", "wait", "host", "openmpi-ulfm")
MISMATCH = Cell("other-count", "foreign", "nccl", "mpich")
LATE = Cell("late", "wait", "host", "mpich")
VERDICT = "rank 1/3 on n (process 7) was killed by SIGKILL"
SITES = "CollectiveMismatchError at matrix/scene.py:1 and at matrix/scene.py:2, rank 1"


def seen(cell: Cell, after: float = 0.01, **facts: Any) -> Seen:
    """Return what is seen of a cell that goes well; ``after`` are the seconds until ranks learn of it."""
    late, text = cell.kind == "late", SITES if cell.kind == "mismatch" else VERDICT
    error = {"mismatch": "CollectiveMismatchError", "late": "CollectiveTimeoutError"}.get(cell.kind, "PeerLostError")
    raised = {"what": "raised", "error": error, "lost": [1] if cell.blames else [], "text": text, "records": 3, **facts}
    said: dict[int, list[dict[str, Any]]] = {rank: [{"what": "ready", "t": 100.0}] for rank in range(cell.ranks)}
    said[1].append({"what": "fault", "t": 100.0, "watcher": 1})
    for rank in cell.judged:
        said[rank] += [{"what": "warned", "t": 105.1, "text": "for rank 1"}] if late else []
        said[rank] += [{"what": what, "t": 100 + after} for what in ("poisoned", "returned")]
        said[rank].append({"t": 100 + after + 0.001, **raised})
    ends = dict.fromkeys(range(cell.ranks), (100 + after + 0.5, "ended with exit status 1"))
    return Seen(said, ends, f"butter_mpi: {text}\n", [{"text": text}], "", 1)


@pytest.mark.parametrize(
    ("cell", "after", "status"),
    [
        (KILL, 0.01, PASSED),
        (KILL, 0.28, OVER),  # the exception is in time, the poisoning is not
        (KILL, 0.4, OVER),
        (replace(KILL, phase="foreign", plane="nccl"), 1.6, OVER),
        (Cell("stop", "wait", "host", "mpich"), 4.9, PASSED),
        (Cell("stop", "wait", "host", "mpich"), 5.1, OVER),
        (MISMATCH, 1.9, PASSED),
        (MISMATCH, 2.1, OVER),
        (LATE, 10.5, PASSED),
        (LATE, 9.5, OVER),
        (LATE, 11.5, OVER),
        (Cell("kill", "join", "host", "mpich"), 7.9, WRONG),  # no start may end in PeerLostError
    ],
)
def test_judge_by_time(cell: Cell, after: float, status: str) -> None:
    """Each kind of fault has its bound, and late is early too."""
    assert judge(cell, [seen(cell, after)]).status == status


def test_judge_counts_from_the_first_that_waits() -> None:
    """The rank whose wait is over first tells one that began a moment later."""
    one = seen(LATE, 10.002)
    one.said[2][0] = {"what": "ready", "t": 100.005}
    assert judge(LATE, [one]).status == PASSED


def test_judge_takes_the_median_of_all_runs() -> None:
    """One slow poisoning among several is no fault, if the exceptions were in time."""
    runs = [seen(KILL, after) for after in (0.01, 0.02, 0.26)]
    outcome = judge(KILL, runs)
    assert outcome.status == PASSED and max(outcome.ms["poisoned"]) == pytest.approx(260)


def _by_launcher(one: Seen, ranks: tuple[int, ...]) -> None:
    for rank in ranks:
        one.said[rank] = one.said[rank][:1]
        one.ends[rank] = (100.01, "was killed by SIGKILL")


def _hangs(one: Seen) -> None:
    one.said[0].pop()
    del one.ends[0]


def _no_warning(one: Seen) -> None:
    one.said[2] = [said for said in one.said[2] if said["what"] != "warned"]


@pytest.mark.parametrize(
    ("cell", "change", "status", "why"),
    [
        (KILL, lambda one: _by_launcher(one, (0, 2)), NONE, "the launcher ended every rank first"),
        (KILL, lambda one: _by_launcher(one, (0,)), PASSED, ""),
        (KILL, _hangs, WRONG, "rank 0 hangs"),
        (KILL, lambda one: one.said[1].pop(), WRONG, "the fault did not happen"),
        (KILL, lambda one: one.verdicts.clear(), WRONG, "no verdict in the file"),
        (KILL, lambda one: setattr(one, "err", "rank 1"), WRONG, "no verdict on stderr"),
        (KILL, lambda one: setattr(one, "left", "the job left behind: /tmp/x"), WRONG, "left behind"),
        (KILL, lambda one: setattr(one, "err", one.err + "Fatal Python error: Aborted"), WRONG, "a process crashed"),
        (KILL, lambda one: one.ends.update({0: (100.1, "was killed by SIGSEGV")}) or one.said[0].pop(), WRONG, "SEGV"),
        (LATE, _no_warning, OVER, "rank 2: warned never"),
    ],
)
def test_judge_by_what_was_seen(cell: Cell, change: Callable[[Seen], object], status: str, why: str) -> None:
    """A hang, a crash, a missing verdict, leavings, or no survivors is never a pass."""
    one = seen(cell, 10.5 if cell is LATE else 0.01)
    change(one)
    outcome = judge(cell, [one])
    assert outcome.status == status and why in "\n".join(outcome.why), outcome


def test_judge_takes_whom_the_watcher_saw_first() -> None:
    """Of ranks that are killed at one time either may be named."""
    cell = Cell("kill-others", "python", "nccl", "openmpi-recovery", recovery="shrink")
    one = seen_back(cell, 0.1)
    text = "rank 2/3 on n (process 8) was killed by SIGKILL"
    one.err, one.verdicts[:] = f"butter_mpi: {text}\n", [{"text": text}]
    assert judge(cell, [one]).status == PASSED, judge(cell, [one])
    one.verdicts.clear()
    assert "no verdict in the file" in judge(cell, [one]).why


def test_judge_without_survivors_needs_the_verdict() -> None:
    """Where the launcher was first and nothing names the rank, the cell is wrong."""
    one = seen(KILL)
    _by_launcher(one, (0, 2))
    one.err = ""
    assert judge(KILL, [one]).status == WRONG


@pytest.mark.parametrize(
    ("cell", "facts", "why"),
    [
        (KILL, {"error": "CollectiveTimeoutError"}, "CollectiveTimeoutError instead of PeerLostError"),
        (KILL, {"lost": [2]}, "lost_ranks [2]"),
        (KILL, {"text": "somebody died"}, "the rank is not named"),
        (MISMATCH, {"text": "at matrix/scene.py:1, rank 1"}, "both call sites are not named"),
        (MISMATCH, {"records": 1}, "1 records"),
        (Cell("watcher-kill", "idle", "host", "mpich"), {}, "the watcher is not named"),
    ],
)
def test_judge_by_what_was_raised(cell: Cell, facts: dict[str, Any], why: str) -> None:
    """Another error, or one that names nobody, is wrong however soon it comes."""
    outcome = judge(cell, [seen(cell, **facts)])
    assert outcome.status == WRONG and why in "\n".join(outcome.why), outcome


# -- the judge, between hosts ------------------------------------------------------------------------------------------

FAR = Cell("kill", "idle", "nccl", "hosts-openmpi-ulfm")
CUT = Cell("cut-both", "idle", "host", "hosts-mpich")
ON_HOST2 = "rank 1/3 on host2 (process 7) was killed by SIGKILL"
SIDES = {1: "no word from host host1 (rank 0), host host3 (rank 2)", 0: "no word from host host2 (rank 1)"}


def seen_between(cell: Cell, after: float = 0.01) -> Seen:
    """Return what is seen of a cell between hosts that goes well."""
    one = seen(cell, after, text=ON_HOST2)
    one.err, one.verdicts = f"butter_mpi: {ON_HOST2}", [{"text": ON_HOST2}]
    if cell.kind == "cut":
        for rank in cell.judged:
            raised_by(one, rank).update(text=SIDES.get(rank, SIDES[0]), lost=[0, 2] if rank == 1 else [1])
    return one


def raised_by(one: Seen, rank: int) -> dict[str, Any]:
    """Return what a rank said that it raised."""
    return next(said for said in one.said[rank] if said["what"] == "raised")


@pytest.mark.parametrize(
    ("cell", "after", "status"),
    [
        (FAR, 0.4, PASSED),  # more than on one host
        (FAR, 0.6, OVER),
        (replace(FAR, fault="stop"), 4.9, PASSED),
        (replace(FAR, fault="host-freeze"), 5.1, OVER),
        (replace(FAR, fault="watcher-kill"), 0.4, OVER),  # on its own host it is told at once
        (CUT, 4.2, PASSED),
        (CUT, 5.1, OVER),
    ],
)
def test_judge_between_hosts_by_time(cell: Cell, after: float, status: str) -> None:
    """A rank that was killed has its bound between hosts, all else the one of five seconds."""
    one = seen_between(cell, after)
    if cell.fault == "watcher-kill":
        raised_by(one, 1)["text"] = "the watcher of this node has ended"
    assert judge(cell, [one]).status == status, judge(cell, [one])


@pytest.mark.parametrize(
    ("cell", "change", "why"),
    [
        (FAR, lambda one: raised_by(one, 0).update(text=VERDICT), "the host is not named"),
        (FAR, lambda one: one.verdicts[0].update(text=VERDICT), "no verdict in the file"),
        (CUT, lambda one: raised_by(one, 1).update(lost=[1]), "lost_ranks [1]"),
        (CUT, lambda one: raised_by(one, 0).update(lost=[0, 2]), "lost_ranks [0, 2]"),
        (CUT, lambda one: raised_by(one, 1).update(text=SIDES[0]), "the rank is not named, the host is not named"),
    ],
)
def test_judge_between_hosts_by_who_is_named(cell: Cell, change: Callable[[Seen], object], why: str) -> None:
    """Each side of a cut names the other one, and a host is named wherever a rank of it is lost."""
    one = seen_between(cell, 0.01 if cell is FAR else 4.2)
    change(one)
    outcome = judge(cell, [one])
    assert outcome.status == WRONG and why in "\n".join(outcome.why), outcome


# -- the judge, back to work -------------------------------------------------------------------------------------------

SHRUNK = replace(KILL, recovery="shrink")
TWICE = replace(SHRUNK, fault="kill-twice")
AGAIN = Cell("freeze", "wait", "nccl", "mpich", "reconnect")


def seen_back(cell: Cell, *after: float) -> Seen:
    """Return what is seen of ranks that are back at work so many seconds after the fault, or after all know of it."""
    one = seen(cell, 4.2 if cell is AGAIN else 0.01)
    begin = 100.0 if cell is not AGAIN else raised_by(one, 0)["t"]
    left = cell.judged
    for rank in left:
        one.said[rank].append({"what": "again", "t": begin})
        for seconds in after:
            one.said[rank].append(
                {"what": "back", "t": begin + seconds, "ranks": len(left), "sum": len(left) * (len(left) + 1) // 2}
            )
        one.ends[rank] = (begin + 10, "ended with exit status 0")
    return one


@pytest.mark.parametrize(
    ("cell", "after", "status"),
    [
        (SHRUNK, 1.9, PASSED),
        (SHRUNK, 2.1, OVER),
        (replace(SHRUNK, plane="nccl"), 1.4, PASSED),
        (replace(SHRUNK, plane="nccl"), 1.6, OVER),
        (AGAIN, 1.4, PASSED),
        (AGAIN, 1.6, OVER),
    ],
)
def test_judge_of_a_recovery_by_time(cell: Cell, after: float, status: str) -> None:
    """Each plane has its bar, from a death, or from when all know where nobody died."""
    outcome = judge(cell, [seen_back(cell, after)])
    assert outcome.status == status and max(outcome.ms["back"]) == pytest.approx(after * 1000, abs=2), outcome


def _back(one: Seen, rank: int) -> dict[str, Any]:
    return next(said for said in one.said[rank] if said["what"] == "back")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda one: _back(one, 0).update(sum=6), "rank 0: a sum of 6 over 2 ranks"),
        (lambda one: _back(one, 2).update(ranks=1, sum=1), "rank 2: a sum of 1 over 1 ranks"),
        (lambda one: one.said[2].pop(), "rank 2 was back at work 0 times instead of 1"),
        (lambda one: one.ends.update({0: (101.0, "was killed by SIGKILL")}), "rank 0 did not end well"),
    ],
)
def test_judge_of_a_recovery_by_what_was_seen(change: Callable[[Seen], object], why: str) -> None:
    """Wrong data, another number of ranks, a rank that is not back and a bad end are each wrong."""
    one = seen_back(SHRUNK, 0.1)
    change(one)
    outcome = judge(SHRUNK, [one])
    assert outcome.status == WRONG and why in "\n".join(outcome.why), outcome


def test_judge_of_two_recoveries_in_a_row() -> None:
    """Each is counted from the death before it; one alone is not enough."""
    one = seen_back(TWICE, 0.1, 3.5)
    one.said[2].append({"what": "fault", "t": 103.0, "watcher": 1})
    outcome = judge(TWICE, [one])
    assert outcome.status == PASSED and outcome.ms["back"] == pytest.approx([100, 500]), outcome
    late = seen_back(TWICE, 0.1, 5.5)
    late.said[2].append({"what": "fault", "t": 103.0, "watcher": 1})
    assert judge(TWICE, [late]).status == OVER
    assert judge(TWICE, [seen_back(TWICE, 0.1)]).status == WRONG


# -- the judge, endings and scenes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ENDING)
def test_judge_of_an_ending(phase: str) -> None:
    """Of ranks that have closed is asked that they end, in time."""
    cell = replace(KILL, phase=phase)
    assert judge(cell, [seen(cell)]).status == PASSED
    assert judge(cell, [seen(cell, 5.0)]).status == OVER
    hanging = seen(cell)
    del hanging.ends[2]
    assert judge(cell, [hanging]).status == WRONG


def test_judge_of_scenes_that_must_end_well() -> None:
    """A verdict, a status other than 0 and a rank that says nothing are each a false alarm."""
    well: dict[str, Any] = {"what": "well", "t": 1.0, "rounds": 1}
    ends = dict.fromkeys(range(RANKS), (2.0, "ended with exit status 0"))
    good = Seen({rank: [well] for rank in range(RANKS)}, ends, rc=0)
    assert judge_calm(good).status == PASSED
    silent = replace(good, said={**good.said, 2: []})
    for bad in (replace(good, rc=1), replace(good, verdicts=[{"text": VERDICT}]), silent, replace(good, left="x")):
        assert judge_calm(bad).status == WRONG


# -- the page ----------------------------------------------------------------------------------------------------------


def test_page_says_what_was_run_and_what_was_not() -> None:
    """The page counts every status apart, gives reasons, and says what the planes were: stand-ins, or GPUs."""
    cells = {KILL: judge(KILL, [seen(KILL)]), LATE: Outcome(NONE, ["why"]), MISMATCH: Outcome(WRONG, ["rank 0 hangs"])}
    text = reporting.page(cells, {}, what="a part", load=[1.0, 2.0], date=datetime.date(2026, 1, 2))
    assert "Cells: 3: 1 passed, 1 no survivors, 1 wrong." in text
    assert "The nccl plane ran on the stand-ins" in text
    assert "* `other-count.foreign.nccl.mpich`, wrong: rank 0 hangs" in text
    assert (
        "| kill | wait | host | openmpi-ulfm | passed | 10 / 10 | 10 / 10 | 11 / 11 | 0: PeerLostError at 11 ms; "
        in text
    )
    assert "## Several hosts" not in text and "## Back to work" not in text
    more = {FAR: judge(FAR, [seen_between(FAR)]), SHRUNK: judge(SHRUNK, [seen_back(SHRUNK, 0.5)])}
    text = reporting.page(more, {}, what="a part", load=[1.0], date=datetime.date(2026, 1, 2))
    assert "## Cells" not in text and "## Several hosts" in text
    assert "| kill | wait | host | openmpi-ulfm | shrink | passed | 11 / 11 | 500 / 500 |" in text
    cells = {cell: Outcome() for cell in choosing.on_gpus(["gpu-p2p"])}
    text = reporting.page(cells, {}, what="a part", load=[1.0], date=datetime.date(2026, 1, 2))
    assert "`gpu-p2p`: three ranks on one GPU, over P2P" in text and "stand-ins" not in text


def test_part_of_a_page_is_put_in_its_place() -> None:
    """A part that ran alone takes the place of its section, or finds one; the others stay, but for the words."""
    day = datetime.date(2026, 1, 2)
    whole = reporting.page({KILL: Outcome()}, {"child.host.mpich": Outcome()}, what="it", load=[1.0], date=day)
    first = reporting.with_parts(whole, {SHRUNK: Outcome(WRONG, ["rank 0 hangs"])}, {}, load=[1.0], date=day)
    order = ["## Cells", "## Back to work", f"* `{SHRUNK.name}`, wrong: rank 0 hangs", "## False alarms", "## Words"]
    assert order == sorted(order, key=first.index)
    later = datetime.date(2026, 1, 3)
    second = reporting.with_parts(first, {SHRUNK: Outcome()}, {}, load=[1.0], date=later)
    assert "rank 0 hangs" not in second and second.count("## ") == first.count("## ") == whole.count("## ") + 1
    outage = {"outage.host.hosts-openmpi": Outcome()}
    third = reporting.with_parts(second, {FAR: Outcome()}, outage, load=[1.0], date=day)
    order = ["## Back to work", "## Several hosts", "| outage.host.hosts-openmpi |", "## False alarms"]
    assert order == sorted(order, key=third.index)
    assert "Run apart from the other sections: 2026-01-03" in second and "* 2026-01-02, " in second


def test_committed_page_is_of_this_table() -> None:
    """The page under docs has the dangerous cells and every scene, and no cell that the table does not know."""
    text = (ROOT / "docs" / "fault_matrix.md").read_text()
    rows = re.findall(
        r"^\| (\S+) \| (\S+) \| (\S+) \| (\S+) \| (?:passed|over its bound|wrong|no survivors|not run) \|", text, re.M
    )
    recovered = re.findall(
        r"^\| (\S+) \| (\S+) \| (\S+) \| (\S+) \| (reconnect|shrink) \| (?:passed|over its bound|wrong) \|", text, re.M
    )
    found = {Cell(*one) for one in [*rows, *recovered]}
    assert found <= set(ALL) and set(choosing.dangerous()) <= found
    assert {cell.fault for cell in found} == set(FAULTS) and {cell.recovery for cell in found} == set(RECOVERIES)
    for scene in scenes():
        assert f"| {'.'.join(scene)} | {CALM[scene[0]].text} |" in text


def test_scenes_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """One command runs every scene that must end well, and no cell."""
    assert main(["--scenes", "--list"]) == 0
    assert capsys.readouterr().out.split() == [".".join(scene) for scene in scenes()]


# -- real jobs ---------------------------------------------------------------------------------------------------------


def test_one_cell(capsys: pytest.CaptureFixture[str]) -> None:
    """A cell runs, is judged and told in a line, and its status is that of the tool."""
    assert main(["--cell", "other-count.foreign.nccl.mpich.reconnect"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("passed          other-count.foreign.nccl.mpich.reconnect "), out
    assert "returned " in out and "back " in out, out


def test_cell_whose_watchers_are_not_linked_does_not_pass() -> None:
    """Where watchers of different hosts do not talk, a host that is frozen is found by nobody: the tool must see it."""
    cell = Cell("host-freeze", "idle", "nccl", "hosts-mpich")
    with Runner() as runner:
        outcome = judge(cell, [runner.cell(cell, BUTTER_MPI_WATCH="node")])
    assert outcome.status == WRONG, outcome


def test_cell_without_a_watcher_does_not_pass() -> None:
    """Where nobody watches, a killed rank is found late, or not by name: the tool must see that."""
    with Runner() as runner:
        outcome = judge(KILL, [runner.cell(KILL, BUTTER_MPI_WATCH="off")])
    assert outcome.status not in (PASSED, NONE), outcome


def test_launcher_that_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A cell whose launcher is not on this machine was not run, and says what is missing; never passed."""
    monkeypatch.setenv("BUTTER_MPI_TEST_OPENMPI", "/nowhere")
    monkeypatch.setenv("BUTTER_MPI_TEST_REQUIRE", "")
    main(["--cell", KILL.name])
    out = capsys.readouterr().out
    assert out.startswith(f"not run         {KILL.name} ") and "no bin/mpirun in the environment /nowhere" in out, out
    monkeypatch.setenv("BUTTER_MPI_TEST_REQUIRE", "openmpi")
    with pytest.raises(pytest.fail.Exception, match="is required"):
        main(["--cell", KILL.name])


def test_hosts_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where there may be no name spaces, cells and scenes of several hosts were not run, and say why."""
    monkeypatch.setattr(hosts, "hindrance", lambda: "name spaces with a network between them need root")
    monkeypatch.setenv("BUTTER_MPI_TEST_REQUIRE", "")
    assert main(["--cell", FAR.name, "--cell", "outage.host.hosts-openmpi"]) == 0
    out = capsys.readouterr().out
    assert out.count("not run  ") == 2 and out.count("need root") == 2, out


def test_unknown_cell_is_refused() -> None:
    """A name that is none says how names are made."""
    with pytest.raises(SystemExit, match=r"no cell kill\.wait; a name is FAULT\.PHASE\.PLANE\.LAUNCHER\[\.RECOVERY\]"):
        main(["--cell", "kill.wait"])
