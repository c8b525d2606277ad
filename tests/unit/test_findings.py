"""Words for what ranks said."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from butter_mpi.findings import Finding, PreflightReport, grouped, quoted, ranks_text, stand_in

ERROR = Finding("plan", "differ", "error", "a on rank 0, b on rank 1", "declare one", (0, 1))
SECOND = Finding("policy", "differ", "error", "unset on ranks 0-1", "", (0, 1))
WARNING = Finding("environment", "differ", "warning", "NCCL_DEBUG differs", "set it alike", (0, 1))
AGREED = Finding("mpi", "agree", "info", "one MPI library")


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([4], "rank 4"), ([0, 1, 2, 3, 5], "ranks 0-3, 5"), ([7, 1], "ranks 1, 7"), ([2, 2, 3], "ranks 2-3")],
)
def test_ranks_are_written_as_runs(ranks: list[int], text: str) -> None:
    """Neighbouring ranks are one range, whatever their order."""
    assert ranks_text(ranks) == text


@given(st.sets(st.integers(0, 60), min_size=1))
def test_ranks_text_says_exactly_these_ranks(ranks: set[int]) -> None:
    """Reading the ranges back gives the ranks again."""
    runs = ranks_text(ranks).split(" ", 1)[1].split(", ")
    bounds = [(int(run.split("-")[0]), int(run.split("-")[-1])) for run in runs]
    assert {rank for low, high in bounds for rank in range(low, high + 1)} == ranks


def test_values_are_grouped_by_the_lowest_rank() -> None:
    """What ranks said is grouped by text, whatever the order in which it came."""
    said = [(4, "unset"), (0, '"10"'), (2, '"10"'), (3, '"22"'), (1, '"10"')]
    assert grouped(said) == '"10" on ranks 0-2, "22" on rank 3, unset on rank 4'
    assert grouped(list(reversed(said))) == grouped(said)


def test_many_groups_are_cut() -> None:
    """Of very many values the first are shown and the ranks of the rest are still named."""
    text = grouped([(rank, str(rank)) for rank in range(1000)])
    assert text.endswith("7 on rank 7, 992 other values on ranks 8-999")
    assert len(text) < 300


@pytest.mark.parametrize("value", ["plain", "two\nlines", "\x1b[31mred", "\udc80", "é", '"q"'])
def test_quoted_values_are_one_line_of_printable_ascii(value: str) -> None:
    """A value from an environment cannot break a line, colour a terminal or fail to be written."""
    shown = quoted(value)
    assert shown.isascii() and shown.isprintable()


def test_long_value_is_cut_and_still_told_apart() -> None:
    """Two long values that differ at the end look different."""
    one, other = quoted("x" * 5000 + "1"), quoted("x" * 5000 + "2")
    assert len(one) < 250 and one != other and "5001 characters" in one


def test_stand_in_tells_equality_and_nothing_else() -> None:
    """A stand-in is the same for the same value, another for another, and holds no part of it."""
    assert stand_in("hunter2") == stand_in("hunter2") != stand_in("hunter3")
    assert "hunter" not in stand_in("hunter2") and "7 characters" in stand_in("hunter2")


def test_refusal_says_all_at_once_and_its_first_line_is_whole() -> None:
    """The first line names the first error; every other finding and each remedy follow, agreements do not."""
    text = PreflightReport(2, "host", (AGREED, WARNING, ERROR, SECOND)).text()
    assert text.split("\n") == [
        "preflight refuses this start (2 ranks, plane host; 2 errors, the first): a on rank 0, b on rank 1",
        "    remedy: declare one",
        "  error [policy] unset on ranks 0-1",
        "  warning [environment] NCCL_DEBUG differs",
        "    remedy: set it alike",
    ]


def test_warnings_alone_do_not_refuse() -> None:
    """A report with warnings only is ok, and tells them."""
    report = PreflightReport(1, "solo", (AGREED, WARNING))
    assert report.ok and report.warnings == (WARNING,)
    assert report.text().startswith("preflight: 1 rank, plane solo: agreed\n  warning [environment]")
    assert not PreflightReport(1, "solo", (ERROR,)).ok


def test_report_travels() -> None:
    """A report survives pickling, and its JSON holds every finding and the verdict."""
    report = PreflightReport(2, "host", (AGREED, ERROR))
    assert pickle.loads(pickle.dumps(report)) == report
    plain = report.to_json()
    assert plain["ok"] is False and plain["world_size"] == 2
    assert plain["findings"][1] == {
        "check": "plan",
        "outcome": "differ",
        "severity": "error",
        "message": "a on rank 0, b on rank 1",
        "remedy": "declare one",
        "ranks": [0, 1],
    }
