"""``python -m butter_mpi`` on healthy and broken machines and launchers: one page, no traceback, no context."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.mpirun import find_mpi, run_job

SECTIONS = [
    "versions",
    "MPI",
    "launcher",
    "Slurm and PMI",
    "butter_mpi variables",
    "watcher",
    "NCCL variables",
    "libnccl",
    "CUDA devices",
    "network",
    "shared memory",
]

# Runs the doctor inside a process that then tells which libraries it has mapped.
WATCHED = """
from butter_mpi.doctor import main
main(["--json"])
mapped = {line.split("/")[-1].strip() for line in open("/proc/self/maps") if ".so" in line}
print([name for name in mapped if name.startswith(("libmpi", "libnccl", "libcuda", "libnvidia"))])
"""

# Runs the doctor as an ordinary user of a machine with systemd, with one configuration file.
LOG_OUT = """
import functools, os, sys
from butter_mpi import doctor, machine
os.getuid = lambda: 1000
machine.remove_ipc = functools.partial(machine.remove_ipc, running=os.getcwd(), files=[sys.argv[1]])
doctor.main([])
"""


@pytest.fixture
def doctor(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that runs the doctor in an environment and returns its page."""

    def run(**env: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "butter_mpi", "--json"]
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **env}, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        page = json.loads(done.stdout)
        assert list(page) == SECTIONS
        return dict(page)

    return run


def test_the_page_has_every_section_in_words() -> None:
    """The text has each title on a line of its own, the MPI that would be loaded, and what needs care after a !."""
    command = [sys.executable, "-m", "butter_mpi"]
    env = {**os.environ, "NCCL_IB_TIMEOUT": "22"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=True)
    lines = done.stdout.splitlines()
    assert [line for line in lines if line in SECTIONS] == SECTIONS
    assert any(line.startswith("  library: ") for line in lines)
    assert '  ! NCCL_IB_TIMEOUT is "22", must be 10: export NCCL_IB_TIMEOUT=10' in lines


def test_nothing_dangerous_is_loaded_into_the_doctor_itself() -> None:
    """MPI, NCCL and CUDA libraries are asked in children: the doctor's own process maps none, so no context is made."""
    command = [sys.executable, "-c", WATCHED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_module_and_package_give_the_same_page() -> None:
    """``python -m butter_mpi.doctor`` is ``python -m butter_mpi``; a wrong option is one line and status 2."""
    for module in ("butter_mpi", "butter_mpi.doctor"):
        command = [sys.executable, "-m", module, "--nonsense"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert done.stderr.endswith("error: unrecognized arguments: --nonsense\n"), done.stderr


def test_machine_on_which_no_watcher_can_run() -> None:
    """What the watcher lacks is told with the reason, what it comes to, and the way round it."""
    code = "import os; del os.pidfd_open; from butter_mpi.doctor import main; main([])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert "  pidfd_open: no: " in done.stdout
    warning = (
        "  ! the watcher cannot run here without pidfd_open: every start is refused, but with BUTTER_MPI_WATCH=off"
    )
    assert warning in done.stdout


@pytest.mark.parametrize("asked", ["--help", "--json", ""])
@pytest.mark.parametrize("lost", [">/dev/full", ">&-", ">&- 2>&- <&-", ">/dev/full 2>/dev/full"])
def test_page_that_cannot_be_written_is_told(asked: str, lost: str) -> None:
    """A full or closed stdout is one line on stderr where there is one, and status 1."""
    command = f"{sys.executable} -m butter_mpi {asked} {lost}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    told = "" if "2>" in lost else "butter_mpi: stdout cannot be written: "
    assert done.stderr.startswith(told) and done.stderr.count("\n") == bool(told), done.stderr


def test_page_that_nobody_reads() -> None:
    """Where the reader has left the doctor ends silently, as SIGPIPE would have ended it."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "butter_mpi", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("lost", ["2>&-", "2>/dev/full"])
def test_wrong_option_without_a_stderr(lost: str) -> None:
    """Also where nobody can be told, a wrong option has status 2."""
    command = f"{sys.executable} -m butter_mpi --nonsense {lost}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda file: file.write_text("this is no library"), "not a shared library"),
        (lambda file: file.write_bytes(Path(sys.executable).resolve().read_bytes()[:5000]), "is not usable"),
        (lambda file: None, "NCCL_LIBRARY names no file"),
    ],
    ids=["text", "cut short", "missing"],
)
def test_a_broken_library_is_a_sentence(doctor: Callable[..., Any], tmp_path: Path, make: Any, reason: str) -> None:
    """A library that cannot be used is told with its path and reason, and every other section is there."""
    file = tmp_path / "libnccl.so.2"
    make(file)
    page = doctor(NCCL_LIBRARY=str(file))
    assert reason in page["libnccl"]["cannot tell"]
    assert str(file) in page["libnccl"]["cannot tell"]
    assert "Error" not in page["libnccl"]["cannot tell"]


def test_a_machine_with_nothing_on_path_is_told(doctor: Callable[..., Any]) -> None:
    """Without mpirun and srun on PATH the page says so; an MPI library that cannot be loaded has its reason."""
    page = doctor(PATH="/nonexistent", MPI4PY_LIBMPI="/nonexistent/libmpi.so")
    assert page["MPI"]["mpirun"] == "none on PATH"
    assert page["MPI"]["library"].startswith("cannot tell: loading mpi4py's MPI library failed: "), page["MPI"]
    assert page["Slurm and PMI"]["srun"] == "not on PATH"


def test_secrets_and_policy(doctor: Callable[..., Any]) -> None:
    """A value that may be a secret is not shown; each policy variable that is wrong has the remedy of this launcher."""
    page = doctor(NCCL_FOO_TOKEN="hunter2", NCCL_IB_TIMEOUT="10", NCCL_IB_RETRY_CNT="7")
    assert "hunter2" not in json.dumps(page)
    assert page["NCCL variables"]["warnings"] == ['NCCL_IB_RETRY_CNT is "7", must be 1: export NCCL_IB_RETRY_CNT=1']


def test_settings_and_the_watcher(doctor: Callable[..., Any]) -> None:
    """The page has the settings that the environment gives, a wrong one with what it does, and what the watcher has."""
    page = doctor(BUTTER_MPI_PLANE="host", BUTTER_MPI_WATCH="never", BUTTER_MPI_TEST_JOB="1")
    assert page["butter_mpi variables"] == {
        "BUTTER_MPI_PLANE": "host",
        "BUTTER_MPI_WATCH": "never",
        "warnings": ["every start is refused: BUTTER_MPI_WATCH must be one of on, debugger, node, off; got 'never'"],
    }
    section = page["watcher"]
    assert {section[what] for what in ("/proc", "pidfd_open", "memfd_create", "interpreter")} == {"yes"}
    assert section["ptrace scope"] and section["PID namespace"] and "warnings" not in section


def test_slurm_facts_and_the_line_to_try(doctor: Callable[..., Any]) -> None:
    """Inside an allocation but outside any step the page says so and gives the srun line for this MPI library."""
    page = doctor(SLURM_JOB_ID="7", SLURM_NTASKS="4")
    section = page["Slurm and PMI"]
    assert section["where"] == "inside an allocation, outside any step"
    assert section["to try"].startswith("srun --mpi=p")
    assert section["warnings"] == [
        "this Slurm allocation is for 4 tasks, but this process is outside any step: start it with srun"
    ]


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_under_its_own_launcher_rank_0_prints_one_page(mpi: str) -> None:
    """Under the right mpirun MPI itself is asked, and only rank 0 prints."""
    result = run_job(2, ["-m", "butter_mpi", "--json"], mpi=mpi)
    assert result.rc == 0, result.text
    page = json.loads(result.rank_out[0])
    assert page["MPI"]["job"] == "rank 0 of 2 (launcher: 2 ranks)"
    assert page["launcher"]["size"].startswith("2 (")
    assert result.rank_out[1] == ""


@pytest.mark.parametrize(("mpi", "library"), [("mpich", "openmpi"), ("openmpi", "mpich")])
def test_the_launcher_of_another_mpi_is_named(mpi: str, library: str) -> None:
    """With the wrong mpirun the page comes all the same, and says which mpirun would be right."""
    result = run_job(2, ["-m", "butter_mpi", "--json"], mpi=mpi, library=library)
    page = json.loads(result.rank_out[0])
    assert any("but mpi4py runs on" in warning for warning in page["MPI"]["warnings"]), page["MPI"]
    assert "Traceback" not in result.text


def test_an_mpirun_of_another_mpi_on_path_is_named(doctor: Callable[..., Any]) -> None:
    """Outside any job, an mpirun on PATH that does not fit mpi4py's library is a warning with the one that does."""
    other = find_mpi("openmpi")
    page = doctor(PATH=f"{Path(other.mpirun).parent}:{os.environ['PATH']}")
    (warning,) = page["MPI"]["warnings"]
    assert "this mpirun is of Open MPI" in warning
    assert str(Path(sys.executable).parent / "mpirun") in warning


@pytest.mark.parametrize(("value", "warned"), [("yes", True), ("no", False)])
def test_shared_memory_that_goes_at_log_out_is_warned_of(tmp_path: Path, value: str, warned: bool) -> None:
    """Where systemd would remove shared memory under a running job the page says so, with the remedy; else nothing."""
    file = tmp_path / "logind.conf"
    file.write_text(f"[Login]\nRemoveIPC={value}\n")
    command = [sys.executable, "-c", LOG_OUT, str(file)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True)
    lines = done.stdout.splitlines()
    assert f"  RemoveIPC: RemoveIPC={value} ({file})" in lines
    warning = [line for line in lines if line.startswith("  ! systemd removes shared memory of this user at log-out")]
    assert len(warning) == warned
    assert all("set RemoveIPC=no in /etc/systemd/logind.conf" in line for line in warning)
