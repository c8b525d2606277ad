"""The harness that starts jobs: what it must cut, find and report, or no other test can be trusted."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from helpers import processes
from helpers.mpirun import MPIS, JobFailure, run_job, start_job
from helpers.require import NAMES, VARIABLE, need
from helpers.slurm import PROGRAMS, Slurm

HELLO = "from mpi4py import MPI\nprint(MPI.COMM_WORLD.rank, 'of', MPI.COMM_WORLD.size)\n"
ORPHAN = "import subprocess\nsubprocess.Popen(['sleep', '60'], start_new_session=True)\n"
WAITS = """
import signal, sys
print("up", flush=True)
signal.pause()
"""


@pytest.mark.parametrize("mpi", MPIS)
def test_ranks_know_each_other_under_every_mpi(mpi: str) -> None:
    """Each MPI starts one job of two ranks, and each rank's output is kept apart."""
    result = run_job(2, HELLO, mpi=mpi)
    assert (result.rc, result.rank_out) == (0, ["0 of 2\n", "1 of 2\n"]), result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_one_rank_can_be_made_different(mpi: str) -> None:
    """Variables are set and removed for all ranks or for one, in the environment that C sees."""
    program = "import os\nprint([os.environ.get(n) for n in 'ABCD'], os.environ['HOME'])\n"
    result = run_job(
        2, program, mpi=mpi, env={"A": "a", "B": "b", "C": "c"}, unset=["C"], rank_env={1: {"A": None, "D": "d"}}
    )
    assert result.rc == 0, result.text
    assert result.rank_out[0].startswith("['a', 'b', None, None] /tmp/bmj-")
    assert result.rank_out[1].startswith("[None, 'b', None, 'd'] /tmp/bmj-")


@pytest.mark.parametrize("mpi", MPIS)
def test_job_that_hangs_is_cut(mpi: str) -> None:
    """A job that does not end in time fails with what it had written, and no process of it is left."""
    with start_job(2, WAITS, mpi=mpi, timeout=1.5) as job:
        started = time.monotonic()
        with pytest.raises(JobFailure, match=r"cut after 1\.5 s[\s\S]*rank 1 stdout\nup"):
            job.wait()
        assert processes.marked(job.id) == []
    assert time.monotonic() - started < 10


def test_event_and_signal_reach_one_rank() -> None:
    """A test can wait for a rank's word and kill that rank, and the launcher's status shows it."""
    with start_job(2, WAITS) as job:
        job.wait_for("up", rank=1)
        job.signal(1, signal.SIGKILL)
        result = job.wait(timeout=10)
    assert result.rc != 0
    assert result.seconds < 10


def test_word_that_never_comes_is_an_error() -> None:
    """Waiting for a word ends with the job or with the time limit, never later."""
    with start_job(1, "print('another')") as job, pytest.raises(JobFailure, match="the job ended before 'word'"):
        job.wait_for("word", rank=0)
    with start_job(1, WAITS) as job, pytest.raises(JobFailure, match=r"0\.5 s passed before 'word'"):
        job.wait_for("word", rank=0, timeout=0.5)


def test_process_left_behind_is_found_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that outlives its job fails the test, also from another session, and is ended."""
    monkeypatch.setattr("helpers.job.GRACE", 0.3)
    with start_job(1, ORPHAN) as job:
        with pytest.raises(JobFailure, match=r"left behind:\n  process \d+: sleep 60"):
            job.wait()
        assert processes.marked(job.id) == []


@pytest.mark.parametrize("place", ["/dev/shm", "/tmp", "TMPDIR"])
def test_file_left_behind_is_found(place: str) -> None:
    """A file that a job leaves in a shared or temporary folder fails the test by its name."""
    name = f"butter-leftover-{os.getpid()}"
    program = f"import os\nopen(os.path.join(os.environ.get({place!r}, {place!r}), {name!r}), 'w').close()\n"
    try:
        with pytest.raises(JobFailure, match=rf"left behind:\n  /[^\n]*{name}"):
            run_job(1, program)
    finally:
        (Path(place) / name).unlink(missing_ok=True)


def test_file_of_the_mpi_is_forgiven_only_after_a_bad_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What MPICH leaves in /dev/shm when a job is aborted is removed; after a good end it fails the test."""
    monkeypatch.setenv("BUTTER_MPI_TEST_ALONE", "1")
    file = Path(f"/dev/shm/mpich_shm_test{os.getpid()}")
    program = f"import sys\nopen({str(file)!r}, 'w').close()\nsys.exit(int(sys.argv[1]))\n"
    with pytest.raises(JobFailure, match=f"left behind:\n  {file}"):
        run_job(1, ["-c", program, "0"])
    assert not file.exists()
    assert run_job(1, ["-c", program, "3"]).rc == 3
    assert not file.exists()


def test_variables_of_the_shell_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person's own NCCL, launcher and butter_mpi variables do not reach a job's ranks."""
    for name in ("NCCL_DEBUG", "SLURM_NTASKS", "BUTTER_MPI_PLANE", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.setenv(name, "from the shell")
    result = run_job(1, "import os\nprint([n for n, v in os.environ.items() if v == 'from the shell'])\n")
    assert result.rank_out == ["[]\n"], result.text


def test_missing_thing_is_a_skip_unless_required(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine lacks is skipped by name, fails where it is required, and a misspelt name is refused."""
    monkeypatch.setenv("BUTTER_MPI_TEST_REQUIRE", "mpi,openmpi")
    need("slurm", True, "there")
    with pytest.raises(pytest.skip.Exception, match=r"slurm .*: not there"):
        need("slurm", False, "not there")
    with pytest.raises(pytest.fail.Exception, match=r"openmpi .* is required .*: not there"):
        need("openmpi", False, "not there")
    with pytest.raises(ValueError, match="unknown 'slrum'"):
        need("slrum", True, "there")
    monkeypatch.setenv("BUTTER_MPI_TEST_REQUIRE", "mpi,opnmpi")
    with pytest.raises(pytest.UsageError, match="unknown opnmpi"):
        need("slurm", False, "not there")


def test_gate_skips_nothing() -> None:
    """The gate requires everything for whose absence a test may be skipped."""
    gate = (Path(__file__).resolve().parents[2] / ".ci" / "run").read_text()
    (required,) = re.findall(rf"{VARIABLE}=(\S+)", gate)
    assert required == ",".join(sorted(NAMES))


@pytest.fixture
def slurm_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Say why a Slurm is skipped where its programs are in a folder that PATH lacks, or not there, for some user."""
    system = tmp_path / "sbin"
    system.mkdir()
    monkeypatch.setattr("helpers.slurm.SYSTEM_FOLDERS", (str(system),))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("BUTTER_MPI_TEST_REQUIRE", raising=False)

    def skipped(*, lacking: Sequence[str], user: int) -> str:
        for name in set(PROGRAMS) - set(lacking):
            (system / name).write_text("#!/bin/sh\n")
            (system / name).chmod(0o755)
        monkeypatch.setattr(os, "geteuid", lambda: user)
        with pytest.raises(pytest.skip.Exception) as skip:
            Slurm()
        return str(skip.value)

    return skipped


def test_slurm_that_only_needs_root_says_that(slurm_of: Callable[..., str]) -> None:
    """For an ordinary user, whose PATH lacks the system's folders, nothing that is there is said to be missing."""
    said = slurm_of(lacking=[], user=1000)
    assert "its daemons need root here" in said
    assert "apt-get" not in said


def test_slurm_that_is_not_installed_says_what_to_install(slurm_of: Callable[..., str]) -> None:
    """What is missing is named, with the packages; to root nothing is said of root."""
    said = slurm_of(lacking=["munged", "srun"], user=0)
    assert said.endswith("no munged, srun; apt-get install slurm-wlm slurm-wlm-basic-plugins munge")


def test_slurm_with_two_hindrances_says_both(slurm_of: Callable[..., str]) -> None:
    """Nobody installs something and then learns that root was needed as well."""
    said = slurm_of(lacking=["slurmd"], user=1000)
    assert "no slurmd; apt-get install" in said
    assert "need root" in said
