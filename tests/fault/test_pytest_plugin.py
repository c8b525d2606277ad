"""Real pytest sessions on several ranks: what happens on one rank is seen on all, soon, and nobody is left waiting."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.mpirun import MPIS, Job, JobResult, run_job, start_job

EACH_MPI = pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
LIMIT = 40.0

HEAD = """
import pytest
from mpi4py import MPI
COMM = MPI.COMM_WORLD
RANK = COMM.rank
"""

# Prints the status with which each rank would leave; a rank that the job's end has taken prints none.
RUNNER = """
import sys
import pytest
status = pytest.main({arguments!r})
print("left with", int(status), flush=True)
sys.exit(status)
"""


class Suite:
    """A folder with one generated test file, and the sessions that run it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, body: str, name: str = "test_it.py") -> None:
        """Write a test file (or conftest) with the usual head."""
        (self.folder / name).write_text(HEAD + textwrap.dedent(body))

    def _program(self, options: tuple[str, ...]) -> str:
        # Another's plugin, which would load for half a second on each rank.
        unused = ["-p", "no:hypothesispytest"]
        return RUNNER.format(arguments=["--with-mpi", *unused, f"--basetemp={self.folder}/base", *options])

    def run(self, *options: str, n: int = 2, **how: Any) -> JobResult:
        """Run a session to its end."""
        return run_job(n, self._program(options), cwd=self.folder, **{"timeout": LIMIT, **how})

    def start(self, *options: str, n: int = 2, **how: Any) -> Job:
        """Start a session."""
        return start_job(n, self._program(options), cwd=self.folder, **{"timeout": LIMIT, **how})


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    """Return an empty suite."""
    return Suite(tmp_path)


def statuses(result: JobResult) -> list[int | None]:
    """Return the status with which each rank left by itself."""
    found = [re.search(r"left with (\d+)", out) for out in result.rank_out]
    return [int(match.group(1)) if match else None for match in found]


@pytest.mark.parametrize("mpi", MPIS)
def test_a_failure_on_one_rank_is_a_failure_on_all(suite: Suite, mpi: str) -> None:
    """Rank 0 reports the test that failed on rank 1 only, with rank 1's traceback, and both leave with status 1."""
    suite.write(
        """
        def test_good(): assert COMM.allreduce(1) == 2
        def test_bad(): assert RANK != 1, "a bug of rank one"
        def test_after(): assert COMM.allreduce(1) == 2
        """
    )
    result = suite.run(mpi=mpi)
    assert statuses(result) == [1, 1], result.text
    out = result.rank_out[0]
    assert "passed here (rank 0 of 2), failed on rank 1" in out, result.text
    assert re.search(r"^E +AssertionError: a bug of rank one$", out, re.MULTILINE), result.text
    assert "1 failed, 2 passed" in out
    assert result.rc != 0


@EACH_MPI
def test_a_rank_that_fails_before_a_collective_ends_the_job(suite: Suite, mpi: str) -> None:
    """The traceback is out within 5 s, no later test pairs with the old collective, the job ends by the deadline."""
    suite.write(
        """
        def test_bad():
            assert RANK != 1, "a bug of rank one"
            COMM.allreduce(1)
        def test_after(): assert COMM.allreduce(1) == 2
        """
    )
    with suite.start("--mpi-agree-seconds=4", mpi=mpi) as job:
        job.wait_for("collected 2 items", 0)
        begun = time.monotonic()
        job.wait_for("a bug of rank one", 1, timeout=5)
        seen = time.monotonic() - begun
        result = job.wait()
    assert seen < 5, result.text
    assert result.seconds < 20, result.text
    assert result.rc != 0
    assert statuses(result) == [None, None], result.text
    assert "rank 0 still in it" in result.rank_err[1], result.text
    assert "passed" not in result.rank_out[0], result.text


def test_a_slow_rank_is_no_fault(suite: Suite) -> None:
    """A rank whose test takes longer than the deadline of a failed one fails nothing; the waiting rank says so."""
    suite.write(
        """
        import time
        def test_slow():
            if RANK == 1: time.sleep(7)
        def test_after(): assert COMM.allreduce(1) == 2
        """
    )
    result = suite.run("--mpi-agree-seconds=1")
    assert statuses(result) == [0, 0], result.text
    assert "2 passed" in result.rank_out[0]
    assert "waiting for rank 1 for 5 s" in result.rank_err[0], result.text


def test_a_rank_that_never_comes_ends_the_job_without_any_failure(suite: Suite) -> None:
    """One rank in a collective that the others do not call is named, and the job ends after --mpi-late-seconds."""
    suite.write(
        """
        def test_it():
            if RANK == 1: COMM.barrier()
        """
    )
    result = suite.run("--mpi-late-seconds=3")
    assert result.rc != 0
    assert "test_it.py::test_it (call): rank 1 did not come to its end within 3 s" in result.rank_err[0], result.text
    assert result.seconds < 10


@pytest.mark.parametrize("phase", ["setup", "teardown"])
def test_fixtures_are_agreed_too(suite: Suite, phase: str) -> None:
    """A fixture that fails on one rank only is an error of that phase on all ranks, and the session goes on."""
    suite.write(
        f"""
        @pytest.fixture
        def thing():
            assert ({phase!r}, RANK) != ("setup", 1), "set-up bug"
            yield
            assert ({phase!r}, RANK) != ("teardown", 1), "tear-down bug"
        def test_it(thing): pass
        def test_after(): assert COMM.allreduce(1) == 2
        """
    )
    result = suite.run()
    assert statuses(result) == [1, 1], result.text
    assert f"ERROR at {phase} of test_it" in result.rank_out[0]
    assert "passed here (rank 0 of 2), failed on rank 1" in result.rank_out[0]
    assert "1 error in" in result.rank_out[0]


def test_a_barrier_in_a_teardown_meets_all_ranks_after_a_failure(suite: Suite) -> None:
    """A test that failed on one rank does not keep that rank out of a collective in a fixture's teardown."""
    suite.write(
        """
        @pytest.fixture
        def thing():
            yield
            COMM.barrier()
        def test_it(thing): assert RANK != 1
        """
    )
    result = suite.run()
    assert statuses(result) == [1, 1], result.text
    assert "1 failed" in result.rank_out[0]
    assert result.seconds < 10


def test_a_teardown_that_fails_before_its_barrier_is_bounded(suite: Suite) -> None:
    """A fixture that raises on one rank before the teardown's collective ends the job by the deadline."""
    suite.write(
        """
        @pytest.fixture
        def thing():
            yield
            assert RANK != 1, "tear-down bug"
            COMM.barrier()
        def test_it(thing): pass
        """
    )
    result = suite.run("--mpi-agree-seconds=2")
    assert result.rc != 0
    assert "tear-down bug" in result.rank_err[1], result.text
    assert "test_it.py::test_it (teardown)" in result.rank_err[1]
    assert result.seconds < 10


def test_a_skip_on_one_rank_is_a_failure(suite: Suite) -> None:
    """A test that one rank skips and another runs fails, with the reason of the skip; one that all skip is skipped."""
    suite.write(
        """
        def test_one():
            if RANK == 1: pytest.skip("no thing here")
        def test_all(): pytest.skip("nowhere")
        @pytest.mark.xfail
        def test_expected(): assert RANK != 1
        """
    )
    result = suite.run()
    assert statuses(result) == [1, 1], result.text
    assert "passed here (rank 0 of 2), skipped on rank 1\nrank 1: skipped: no thing here" in result.rank_out[0]
    assert "1 failed, 1 skipped, 1 xfailed" in result.rank_out[0], result.text


@pytest.mark.parametrize(("option", "shown"), [("-x", "1 failed"), ("--maxfail=2", "2 failed, 1 passed")])
def test_all_ranks_stop_at_the_same_failure(suite: Suite, option: str, shown: str) -> None:
    """A limit of failures ends every rank after the same test, whichever ranks failed."""
    suite.write(
        """
        def test_one(): assert RANK != 1
        def test_two(): pass
        def test_three(): assert RANK != 0
        def test_four(): COMM.barrier()
        """
    )
    result = suite.run(option)
    assert statuses(result) == [1, 1], result.text
    assert f"= {shown} in" in result.rank_out[0], result.text


def test_different_tests_on_the_ranks_are_refused_before_the_first_runs(suite: Suite) -> None:
    """Rank 0 names the tests that not all ranks collected; no test runs and every rank leaves with status 4."""
    suite.write(
        """
        def test_common(): print("test has run")
        if RANK == 1:
            def test_extra(): pass
        """
    )
    result = suite.run("-s")
    assert statuses(result) == [4, 4], result.text
    assert "ERROR: the ranks collected different tests: 1 " in result.rank_err[0]
    assert "on rank 1, not on all ranks: test_it.py::test_extra" in result.rank_err[0]
    assert "test has run" not in result.text


def test_the_same_tests_in_another_order_are_refused(suite: Suite) -> None:
    """An order of tests that differs between ranks is an error that says so."""
    suite.write(
        """
        def pytest_collection_modifyitems(items):
            if RANK == 1: items.reverse()
        """,
        "conftest.py",
    )
    suite.write("def test_one(): pass\ndef test_two(): pass")
    result = suite.run()
    assert statuses(result) == [4, 4], result.text
    assert "the same tests in another order" in result.rank_err[0]


@pytest.mark.parametrize("name", ["test_it.py", "conftest.py"])
def test_a_file_that_fails_to_import_on_one_rank_ends_all(suite: Suite, name: str) -> None:
    """An import error of a test file or a conftest on one rank ends every rank, soon, and its text is shown."""
    suite.write("def test_it(): COMM.barrier()")
    (suite.folder / name).write_text(f'{HEAD}\nif RANK == 1: raise ImportError("no such thing")\ndef test_it(): pass\n')
    result = suite.run()
    assert statuses(result) == [4, 4], result.text
    assert "no such thing" in result.text
    assert "rank 1" in result.rank_err[0] + result.rank_out[0], result.text
    assert result.seconds < 10


@pytest.mark.parametrize("raised", ["KeyboardInterrupt", 'pytest.exit("enough", returncode=7)', "SystemExit(3)"])
def test_a_rank_that_ends_its_session_ends_all(suite: Suite, raised: str) -> None:
    """An interrupt or pytest.exit on one rank ends the session of the others at their next step, with the reason."""
    statement = raised if raised.startswith("pytest.exit") else f"raise {raised}"
    suite.write(
        f"""
        def test_it():
            if RANK == 1: {statement}
        def test_after(): COMM.barrier()
        """
    )
    result = suite.run()
    left = statuses(result)
    assert left[0] == left[1], result.text
    assert left[0] in (1, 2, 7), result.text
    if "System" not in raised:
        assert "rank 1 of 2 ended the session" in result.rank_out[0], result.text
    assert result.seconds < 10


def test_an_interrupt_while_others_are_in_a_collective_is_bounded(suite: Suite) -> None:
    """A rank that was interrupted inside a test waits for the others no longer than a failed one, then ends the job."""
    suite.write(
        """
        def test_it():
            if RANK == 1: raise KeyboardInterrupt
            COMM.barrier()
        """
    )
    result = suite.run("--mpi-agree-seconds=2")
    assert result.rc != 0
    assert "the session: rank 0 did not come to its end within 2 s" in result.rank_err[1], result.text
    assert result.seconds < 10


def test_an_internal_error_on_one_rank_is_shown_and_ends_all(suite: Suite) -> None:
    """A hook that raises on rank 1, whose terminal is quiet, still shows its traceback and ends both ranks."""
    suite.write(
        """
        def pytest_runtest_logfinish(nodeid):
            if RANK == 1: raise RuntimeError("a broken hook")
        """,
        "conftest.py",
    )
    suite.write("def test_it(): pass\ndef test_after(): COMM.barrier()")
    result = suite.run()
    assert all(status not in (0, None) for status in statuses(result)), result.text
    assert "[rank 1/2]" in result.rank_err[1]
    assert "a broken hook" in result.rank_err[1], result.text
    assert result.seconds < 10


@EACH_MPI
def test_a_rank_that_lingers_at_its_end_is_bounded(suite: Suite, mpi: str) -> None:
    """All tests passed, one rank hangs in shutdown: the result is out, the rank is named, and the job ends."""
    suite.write(
        """
        import atexit, signal
        def test_it():
            if RANK == 1: atexit.register(signal.pause)
        """
    )
    result = suite.run("--mpi-late-seconds=3", mpi=mpi)
    assert statuses(result) == [0, 0], result.text
    assert "1 passed" in result.rank_out[0]
    assert "after the session with exit status 0: rank 1 did not come to its end within 3 s" in result.rank_err[0]
    assert result.rc != 0
    assert result.seconds < 12


def test_the_summary_lists_failing_ranks_and_rank_0_speaks_alone(suite: Suite) -> None:
    """Rank 0 lists each failed test with its ranks; the terminals of the others stay quiet."""
    suite.write(
        """
        def test_one(): assert RANK not in (1, 2)
        def test_two(): assert False
        """
    )
    result = suite.run(n=3)
    assert statuses(result) == [1, 1, 1], result.text
    assert "failures by rank" in result.rank_out[0]
    assert "test_it.py::test_one (call): passed on rank 0, failed on ranks 1-2" in result.rank_out[0]
    assert "test_it.py::test_two (call): failed on ranks 0-2" in result.rank_out[0]
    assert [out.splitlines() for out in result.rank_out[1:]] == [["left with 1"]] * 2, result.text


def test_files_of_ranks_do_not_collide(suite: Suite) -> None:
    """JUnit files, log files and base folders are per rank, and only rank 0 writes the cache that all read."""
    suite.write(
        """
        def test_one(tmp_path): assert RANK != 1
        def test_two(cache):
            cache.set("mine/rank", RANK)
            assert cache.get("mine/rank", None) == RANK
        """
    )
    result = suite.run("--junitxml=out/report.xml", "--log-file=log.txt")
    assert statuses(result) == [1, 1], result.text
    for name in ("report.xml", "report.rank1.xml"):
        cases = ET.parse(suite.folder / "out" / name).getroot().iter("testcase")
        assert [bool(list(case)) for case in cases] == [True, False], name
    assert {path.name for path in suite.folder.glob("base*")} == {"base", "base.rank1"}
    assert {path.name for path in suite.folder.glob("log*")} == {"log.txt", "log.rank1.txt"}
    assert (suite.folder / ".pytest_cache/v/mine/rank").read_text() == "0"
    again = suite.run("--last-failed")
    assert "collected 1 item\n" in again.rank_out[0], again.text
    assert statuses(again) == [1, 1], again.text


def test_subtests_count_for_all_ranks(suite: Suite) -> None:
    """A subtest that fails on one rank only fails the test on all ranks; ranks may have different numbers of them."""
    if not hasattr(pytest, "Subtests"):
        pytest.skip(f"pytest {pytest.__version__} has no subtests; 9.0 does")
    suite.write(
        """
        def test_it(subtests):
            for i in range(3):
                with subtests.test(i=i): assert (i, RANK) != (1, 1), "a subtest of rank one"
        def test_more_on_one_rank(subtests):
            for i in range(3 + RANK):
                with subtests.test(i=i): pass
        """
    )
    result = suite.run()
    assert statuses(result) == [1, 1], result.text
    assert "1 failed, 1 passed" in result.rank_out[0], result.text
    assert "a subtest of rank one" in result.rank_out[0], result.text


def test_all_ranks_fails_on_every_rank_and_hangs_on_none(suite: Suite) -> None:
    """all_ranks raises everywhere when it does not hold, is not called, or another rank failed before it."""
    suite.write(
        """
        def test_holds(all_ranks): all_ranks(COMM.allreduce(1) == 2)
        def test_one(all_ranks):
            with pytest.raises(AssertionError, match=r"does not hold on rank 1 of 2: x=1"):
                all_ranks(RANK != 1, f"x={RANK}")
            COMM.barrier()
        def test_not_called(all_ranks):
            if RANK == 0: all_ranks(True)
        def test_failed_before(all_ranks):
            assert RANK != 0, "before"
            all_ranks(True)
        """
    )
    result = suite.run()
    assert statuses(result) == [1, 1], result.text
    assert "2 failed, 2 passed" in result.rank_out[0], result.text
    assert "test_it.py::test_not_called (call): failed on ranks 0-1" in result.rank_out[0]
    assert "test_it.py::test_failed_before (call): failed on ranks 0-1" in result.rank_out[0]
    assert result.seconds < 10


def test_butter_comm_is_fresh_for_each_test(suite: Suite) -> None:
    """A communicator that one test poisons or leaves broken does not reach the next; errors come on all ranks."""
    suite.write(
        """
        import numpy
        import butter_mpi
        def test_sum(butter_comm):
            x = numpy.ones(3, "float32")
            butter_comm.all_reduce(x)
            assert x.tolist() == [2, 2, 2] and butter_comm.plane == "host"
        def test_mismatch_on_all(butter_comm):
            with pytest.raises(butter_mpi.CollectiveMismatchError):
                butter_comm.all_reduce(numpy.ones(3 + RANK, "float32"))
        def test_fails_on_one(butter_comm): assert RANK != 1, "a bug of rank one"
        def test_sum_again(butter_comm): test_sum(butter_comm)
        """
    )
    result = suite.run("--butter-plane=host", "--deselect=test_it.py::test_fails_on_one")
    assert statuses(result) == [0, 0], result.text
    assert "3 passed, 1 deselected" in result.rank_out[0]
    assert result.rc == 0, result.text
    failed = suite.run("--butter-plane=host", "-Werror")
    assert statuses(failed) == [1, 1], failed.text
    assert "1 failed, 3 passed" in failed.rank_out[0]
    assert "Abort" not in failed.text, "the failed test left an open communicator behind"


def test_the_launcher_of_another_mpi_is_refused(suite: Suite) -> None:
    """The mpirun of MPICH with Open MPI's library gives N sessions of one rank; each is refused and says why."""
    suite.write("def test_it(): pass")
    result = suite.run(mpi="mpich", library="openmpi")
    assert statuses(result) == [4, 4], result.text
    assert all("PMI_SIZE says that this job has 2 ranks, MPI says 1" in err for err in result.rank_err), result.text
    assert result.rc != 0


def test_one_rank_alone_is_an_ordinary_session(suite: Suite) -> None:
    """With one rank the fixtures work and no step is agreed with anybody."""
    suite.write(
        """
        def test_it(all_ranks, butter_comm):
            all_ranks(butter_comm.world_size == 1)
            with pytest.raises(AssertionError, match="does not hold: why"): all_ranks(False, "why")
        """
    )
    result = suite.run(n=1)
    assert statuses(result) == [0], result.text
    assert "one outcome for all" not in result.rank_out[0]


@pytest.fixture
def plain(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs pytest without a launcher."""
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")

    def run(*options: str, path: str = "") -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))}
        command = [sys.executable, "-m", "pytest", "test_it.py", *options]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)

    return run


def test_mpi_pytest_beside_pytest_mpi_is_named(
    plain: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Where mpi-pytest, which brings the same import package, is installed, one line says which to remove."""
    info = tmp_path / "site" / "mpi_pytest-2026.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mpi-pytest\nVersion: 2026.0\n")
    done = plain("--with-mpi", path=str(info.parent))
    assert done.returncode == 4
    assert done.stderr.startswith("ERROR: mpi-pytest is installed"), done.stderr
    assert "pip uninstall" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("options", [["--numprocesses=2"], ["--dist=load"]])
def test_workers_of_xdist_are_refused(
    plain: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, options: list[str]
) -> None:
    """Workers are no ranks: one line says how to start those."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "like_xdist.py").write_text(
        "def pytest_addoption(parser):\n"
        "    parser.addoption('--numprocesses', dest='numprocesses', type=int)\n"
        "    parser.addoption('--dist', dest='dist', default='no')\n"
    )
    done = plain("--with-mpi", "-p", "like_xdist", *options, path=str(site))
    assert done.returncode == 4 and done.stderr.startswith("ERROR: pytest-xdist's workers are no ranks"), done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_missing_pytest_mpi_is_named(plain: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Without pytest-mpi its option gives one line that says what to install."""
    done = plain("--with-mpi", "-p", "no:pytest_mpi", "-p", "no:mpi")
    assert done.returncode == 4
    assert done.stderr.startswith("ERROR: --with-mpi and --only-mpi need pytest-mpi"), done.stderr


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "1e9"])
def test_a_deadline_that_is_no_time_is_refused(suite: Suite, value: str) -> None:
    """A malformed number of seconds is an error of the command line that names the option and the range."""
    suite.write("def test_it(): pass")
    result = suite.run(f"--mpi-agree-seconds={value}")
    assert statuses(result) == [4, 4], result.text
    assert f"--mpi-agree-seconds must be a number of seconds from 0.1 to 86400; got '{value}'" in result.rank_err[0]


@EACH_MPI
def test_a_lost_peer_that_a_test_expects_is_no_failure_of_the_session(suite: Suite, mpi: str) -> None:
    """A test may provoke and expect the loss of a peer: all ranks meet at the end, so the session leaves with 0."""
    suite.write(
        """
        import butter_mpi
        def test_lost(butter_comm):
            if RANK == 1: butter_comm.close()
            else:
                with pytest.raises(butter_mpi.PeerLostError): butter_comm.barrier()
        def test_after(butter_comm): butter_comm.barrier()
        """
    )
    result = suite.run("--butter-plane=host", mpi=mpi)
    assert result.rc == 0 and statuses(result) == [0, 0], result.text
