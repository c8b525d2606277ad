"""The hooks of a pytest session on several ranks: every step has one outcome for all of them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Generator
from typing import NoReturn

import pytest

from butter_mpi.agreement import FAILED, PASSED, XFAILED, XPASSED, Message, judge
from butter_mpi.findings import grouped, ranks_text
from butter_mpi.pytest_session import SharedSession

__all__ = ["Guard"]

_LONGEST_TEXT = 16384
_LONGEST_LINE = 300
_SHOWN_TESTS = 5


def _outcome(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return XFAILED if report.skipped else XPASSED
    return report.outcome


def _line(report: pytest.TestReport) -> str:
    """Return why, in one line."""
    reason = report.longrepr
    if isinstance(reason, tuple):
        text = reason[2].removeprefix("Skipped: ")
    else:
        crash = getattr(reason, "reprcrash", None)
        text = crash.message if crash else str(reason or "")
    return (text.strip().splitlines() or [""])[0][:_LONGEST_LINE]


def _text(report: pytest.TestReport) -> str:
    """Return the traceback with what was captured."""
    sections = [f"{title:-^60}\n{content}" for title, content in report.sections]
    return "\n".join([report.longreprtext, *sections])[-_LONGEST_TEXT:]


def _by_rank(said: list[Message], key: str, skip: int | None = None) -> str:
    return grouped([(rank, other[key]) for rank, other in enumerate(said) if rank != skip])


def _reasons(said: list[Message], skip: int | None = None) -> str:
    """Return a line for each reason with the ranks that have it."""
    groups: dict[str, list[int]] = {}
    for rank, other in enumerate(said):
        if rank != skip and other["line"]:
            groups.setdefault(f"{other['outcome']}: {other['line']}", []).append(rank)
    return "\n".join(f"{ranks_text(ranks)}: {reason}" for reason, ranks in groups.items())


class Guard:
    """One outcome for all ranks.

    Parameters
    ----------
    session : SharedSession
        What this rank shares with the others.
    """

    def __init__(self, session: SharedSession) -> None:
        self._session = session
        self._all_run = self._in_phase = False
        self._reason = ""
        self._failed_subtests: list[str] = []
        self._collection_errors: list[str] = []
        self._verdicts: list[str] = []

    # -- one test ----------------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None]:
        """Mark the phase: a report from inside it is a subtest's."""
        return (yield from self._phase())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None]:
        """Mark the phase: a report from inside it is a subtest's."""
        return (yield from self._phase())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None]:
        """Mark the phase: a report from inside it is a subtest's."""
        return (yield from self._phase())

    def _phase(self) -> Generator[None]:
        self._in_phase = True
        try:
            yield
        finally:
            self._in_phase = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Agree on the outcome of each phase."""
        report = yield
        if self._in_phase:
            if report.failed:
                self._failed_subtests.append(_text(report))
            return report
        if self._failed_subtests and report.passed:
            report.outcome = "failed"
            report.longrepr = "\n".join([f"failed subtests: {len(self._failed_subtests)}", *self._failed_subtests])
        self._failed_subtests = []
        self._agree(report)
        return report

    def _agree(self, report: pytest.TestReport) -> None:
        at = f"{report.nodeid} ({report.when})"
        said = self._meet(at, report)
        while asked := [rank for rank, other in enumerate(said) if other["kind"] == "check"]:
            report.longrepr = (
                f"{ranks_text(asked)} came to {said[asked[0]]['at']}, {ranks_text([self._session.rank])} did not\n"
                f"{report.longreprtext}"
            )
            report.outcome = "failed"
            said = self._meet(at, report)
        if any(other["at"] != at for other in said):
            self._session.quit(f"ranks run different tests: {_by_rank(said, 'at')}", 1)
        self._take(report, said)

    def _meet(self, at: str, report: pytest.TestReport) -> list[Message]:
        outcome = _outcome(report)
        text = _text(report) if outcome == FAILED else ""
        return self._session.meet("phase", at, outcome, line=_line(report), text=text, failing=outcome == FAILED)

    def _take(self, report: pytest.TestReport, said: list[Message]) -> None:
        """Give `report` the outcome that all ranks have."""
        rank, size = self._session.rank, self._session.size
        own, verdict = said[rank]["outcome"], judge(other["outcome"] for other in said)
        if verdict == FAILED:
            self._verdicts.append(f"{report.nodeid} ({report.when}): {_by_rank(said, 'outcome')}")
        others = [_by_rank(said, "outcome", skip=rank), _reasons(said, skip=rank)]
        if own == FAILED and len({other["line"] for other in said}) > 1:
            report.sections.append((f"this is rank {rank} of {size}; the others", "\n".join(others).rstrip()))
        if own in (FAILED, verdict):
            return
        traces = [f"[rank {peer}/{size}]\n{other['text']}" for peer, other in enumerate(said) if other["text"]]
        report.longrepr = "\n".join([f"{own} here (rank {rank} of {size}), {others[0]}", *others[1:], *traces[:1]])
        report.outcome = "failed" if verdict == FAILED else "skipped"
        if verdict == FAILED and hasattr(report, "wasxfail"):
            del report.wasxfail

    def check(self, condition: bool, text: str, at: str) -> None:
        """Agree on a condition inside a test.

        Parameters
        ----------
        condition : bool
            Whether it holds on this rank.
        text : str
            The facts of this rank.
        at : str
            The test and the line of the call.

        Raises
        ------
        AssertionError
            It does not hold on some rank, or some rank did not come here; on every rank that came.
        """
        __tracebackhide__ = True
        outcome = PASSED if condition else FAILED
        full = f"all_ranks: does not hold: {text}"
        said = self._session.meet("check", at, outcome, line=text, text=full, failing=not condition)
        if any(other["at"] != at for other in said):
            places = "\n".join(f"rank {rank}: {other['at']}" for rank, other in enumerate(said))
            raise AssertionError(f"all_ranks: the ranks are at different places\n{places}\n{_reasons(said)}".rstrip())
        bad = [rank for rank, other in enumerate(said) if other["outcome"] == FAILED]
        if bad:
            facts = grouped([(rank, said[rank]["line"]) for rank in bad if said[rank]["line"]])
            raise AssertionError(
                f"all_ranks: does not hold on {ranks_text(bad)} of {len(said)}: {facts}".removesuffix(": ")
            )

    # -- the session -------------------------------------------------------------------------------------------------

    def pytest_report_header(self) -> str:
        """Say that outcomes are agreed."""
        return f"butter_mpi: {self._session.size} ranks, one outcome for all; this is rank {self._session.rank}"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note what could not be collected."""
        if report.failed:
            self._collection_errors.append(f"{report.nodeid}\n{report.longreprtext}")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Stop before the first test if the ranks did not collect the same tests in the same order."""
        error = sys.exc_info()[1]
        if error is not None:
            self._collection_errors.append(f"{type(error).__name__}: {error}")
        ids = [item.nodeid for item in session.items]
        digest = hashlib.sha256("\n".join(ids).encode()).hexdigest()[:8]
        errors = "\n".join(self._collection_errors)[-_LONGEST_TEXT:]
        outcome = FAILED if errors else PASSED
        said = self._session.meet("collect", "the collection", outcome, line=f"{len(ids)} ({digest})", text=errors)
        bad = {rank: other["text"] for rank, other in enumerate(said) if other["outcome"] == FAILED}
        if 0 < len(bad) < len(said):
            self._refuse(f"the collection failed on {ranks_text(bad)} of {len(said)}\n{next(iter(bad.values()))}")
        if len({other["line"] for other in said}) > 1:
            self._refuse(self._differences(ids, _by_rank(said, "line")))

    def _differences(self, ids: list[str], counts: str) -> str:
        said = self._session.meet("names", "the collection", PASSED, text="\n".join(ids))
        lists = [other["text"].split("\n") for other in said]
        common = set(lists[0]).intersection(*lists[1:])
        parts = []
        for rank, own in enumerate(lists):
            extra = [name for name in own if name and name not in common]
            if extra:
                more = f" and {len(extra) - _SHOWN_TESTS} more" if len(extra) > _SHOWN_TESTS else ""
                parts.append(f"on rank {rank}, not on all ranks: {', '.join(extra[:_SHOWN_TESTS])}{more}")
        order = "the same tests in another order: give every rank the same order (the same random seed)"
        return "\n".join([f"the ranks collected different tests: {counts}", *(parts or [order])])

    def _refuse(self, reason: str) -> NoReturn:
        """End before the first test; rank 0 says why, as for a wrong command line."""
        session = self._session
        session.over, session.reason, session.status = True, reason, int(pytest.ExitCode.USAGE_ERROR)
        if session.rank == 0:
            raise pytest.UsageError(reason)
        pytest.exit(reason, returncode=session.status)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """Note that this rank came to the end of its tests."""
        result = yield
        self._all_run = True
        return result

    def pytest_internalerror(self, excrepr: object) -> None:
        """Keep what to tell the others."""
        self._reason = f"INTERNALERROR\n{excrepr}"

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Keep what to tell the others."""
        self._reason = f"{excinfo.typename}: {excinfo.value}".rstrip(": ")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """End together, with one exit status."""
        reason = self._reason or str(session.shouldfail or session.shouldstop or "")
        self._session.end(int(exitstatus), reason, failing=not self._all_run)

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """List the failing ranks of each test."""
        if self._verdicts:
            terminalreporter.section("failures by rank")
            for verdict in self._verdicts:
                terminalreporter.line(verdict)
