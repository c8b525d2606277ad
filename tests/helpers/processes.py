"""What a job leaves: its processes, found by a mark in their environment, and its files."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

MARK = "BUTTER_MPI_TEST_JOB"
PLACES = ("/dev/shm", "/tmp")
FOLDER_PREFIX = "bmj-"

# Other people's files and MPI jobs come and go at any time. Where BUTTER_MPI_TEST_ALONE is 1 (.ci/run) every new name
# counts; elsewhere in /tmp only names that a job of ours may give, and nothing that any MPI job may leave.
ALONE = "BUTTER_MPI_TEST_ALONE"
OURS = ("butter", "hydra", "nccl", "ompi", "openmpi", "pmix", "prte", "pymp", "slurm", "ucx")

# What the code of MPICH, Open MPI and NCCL leaves, with any program, when a rank or the launcher is killed or aborts.
OF_THE_MPI = (
    "/dev/shm/nccl-*",
    "/dev/shm/mpich_shm_*",
    "/dev/shm/sm_segment.*",
    "/dev/shm/ucx_shm_posix_*",
    "/dev/shm/vader_segment.*",
    "/tmp/hydra_hwloc_xmlfile_*",
    "*/tmp/ompi.*",
    "*/tmp/pmix-gds-shmem.*",
)


def all_ids() -> list[int]:
    """Return the ids of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def marked(job: str) -> list[int]:
    """Return the living processes that were started with this job's mark."""
    token = f"{MARK}={job}".encode()
    found = []
    for pid in all_ids():
        with contextlib.suppress(OSError):
            if token in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def inside(folder: Path) -> list[int]:
    """Return the living processes that work in a folder; some wipe their environment and with it the mark."""
    found = []
    for pid in all_ids():
        with contextlib.suppress(OSError):
            if Path(os.readlink(f"/proc/{pid}/cwd")).is_relative_to(folder):
                found.append(pid)
    return found


def command_line(pid: int) -> str:
    """Return the command line of a process, for a message."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "gone"


def parent(pid: int) -> int:
    """Return the process that started a living one."""
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()[1])


def await_exit(pid: int, timeout: float) -> bool:
    """Wait for the end of a process; False if it goes on."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout) * 1000))
    finally:
        os.close(handle)


def await_all_gone(job: str, timeout: float) -> list[int]:
    """Wait until the job has no process; return those that are left after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while pids := marked(job):
        if not await_exit(pids[0], end - time.monotonic()):
            return marked(job)
    return []


def kill_all(find: Callable[[], list[int]], timeout: float = 10.0) -> None:
    """SIGKILL every process that ``find`` returns, until it returns none."""
    end = time.monotonic() + timeout
    while pids := find():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not await_exit(pids[0], end - time.monotonic()):
            raise AssertionError(f"processes {pids} outlive SIGKILL")


def alone() -> bool:
    """Say whether nobody else uses this machine."""
    return os.environ.get(ALONE) == "1"


def _owner(path: str) -> int | None:
    try:
        return os.lstat(path).st_uid
    except OSError:
        return None


def listing(user: int | None = None) -> frozenset[str]:
    """Return what a user has in the shared folders now, by default this one.

    Other people's files come and go, and are none of our business.
    """
    user = os.geteuid() if user is None else user
    paths = (f"{place}/{name}" for place in PLACES for name in os.listdir(place))
    return frozenset(path for path in paths if _owner(path) == user)


def _used_paths() -> set[str]:
    used = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
    for pid in all_ids():
        with contextlib.suppress(OSError):
            used.update(line.split(None, 5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
            used.update(os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd"))
            used.add(os.readlink(f"/proc/{pid}/cwd"))
    return used


def _counts(path: str) -> bool:
    name = os.path.basename(path)
    if name.startswith((FOLDER_PREFIX, "pytest-of-")):
        return False
    return path.startswith("/dev/shm/") or alone() or name.startswith(OURS)


def left_behind(before: frozenset[str], user: int | None = None) -> list[str]:
    """Return what a user has anew in the shared folders that is of no use to any living process.

    Folders of pytest and of other jobs of this harness do not count.
    """
    new = [path for path in sorted(listing(user) - before) if _counts(path)]
    used = _used_paths() if new else set()
    unused = [path for path in new if not any(name == path or name.startswith(f"{path}/") for name in used)]
    # Another job may have removed its own in between.
    return [path for path in unused if os.path.lexists(path)]


def sweep(paths: Iterable[str]) -> list[str]:
    """Remove those of the paths that an MPI leaves after a violent end; return the others."""
    others = []
    for path in paths:
        if not any(fnmatch.fnmatch(path, pattern) for pattern in OF_THE_MPI):
            others.append(path)
        elif os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            Path(path).unlink(missing_ok=True)
    return others
