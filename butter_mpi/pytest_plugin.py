"""Plugin for suites that run as ``mpirun -np N python -m pytest --with-mpi``: one outcome for all ranks, and fixtures.

It does nothing unless pytest-mpi's ``--with-mpi`` or ``--only-mpi`` is given and there are several ranks. Then, after
the set-up, the call and the teardown of each test, the ranks tell each other how it went: a failure on one rank is a
failure on all, and so is a skip on some ranks only. Who waits how long:

* A rank whose test failed may have left the others inside a collective: it prints its traceback, waits
  ``--mpi-agree-seconds`` (5) for them and then ends the job.
* A rank whose test passed waits for a slow one; it says so after 5 s and ends the job after ``--mpi-late-seconds``
  (300).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import pytest

from butter_mpi.agreement import Rounds
from butter_mpi.launch import false_green, read_launch
from butter_mpi.pytest_guard import Guard
from butter_mpi.pytest_session import SharedSession
from butter_mpi.settings import PLANES, Settings

if TYPE_CHECKING:
    from butter_mpi.communicator import Communicator

__all__ = ["all_ranks", "butter_comm"]

_FLAGS = ("--with-mpi", "--only-mpi")
_SESSION = pytest.StashKey[SharedSession]()
_GUARD = pytest.StashKey[Guard]()
_OWN_FILES = ("xmlpath", "log_file", "basetemp")
_SHORTEST, _LONGEST = 0.1, 86400.0
_SECONDS = {
    "mpi_agree_seconds": ("5", "how long a rank whose test failed waits for the others before it ends the job"),
    "mpi_late_seconds": ("300", "how long a rank whose test passed waits for slow ones before it ends the job"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options; each time is also an ini value of the same name."""
    group = parser.getgroup("butter_mpi", "one outcome for all ranks (with --with-mpi or --only-mpi)")
    group.addoption("--butter-plane", choices=PLANES, help="data plane of the butter_comm fixture")
    for name, (default, text) in _SECONDS.items():
        group.addoption(f"--{name.replace('_', '-')}", dest=name, metavar="SECONDS", help=f"{text} (default {default})")
        parser.addini(name, text, default=default)


def _seconds(config: pytest.Config, name: str) -> float:
    text = config.getoption(name, None) or config.getini(name)
    with contextlib.suppress(ValueError):
        if _SHORTEST <= float(text) <= _LONGEST:
            return float(text)
    option = f"--{name.replace('_', '-')}"
    raise pytest.UsageError(f"{option} must be a number of seconds from {_SHORTEST:g} to {_LONGEST:g}; got {text!r}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> Generator[None, object, object]:
    """Name a missing or shadowed pytest-mpi; tell the other ranks if a conftest fails here."""
    known = early_config.known_args_namespace
    if any(flag in args for flag in _FLAGS):
        _check_neighbours(hasattr(known, "with_mpi"))
        _refuse_workers(known)
    try:
        return (yield)
    except BaseException as error:
        session = _join(early_config, known)
        if session is not None:
            session.end(int(pytest.ExitCode.USAGE_ERROR), f"{type(error).__name__}: {error}", failing=True)
        raise


def _check_neighbours(provided: bool) -> None:
    """Two distributions install the import package pytest_mpi, and only pytest-mpi's has the options."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("mpi-pytest")
        raise pytest.UsageError(
            "mpi-pytest is installed; it and pytest-mpi both bring an import package pytest_mpi, and only pytest-mpi "
            "has --with-mpi: pip uninstall -y mpi-pytest pytest-mpi, then pip install pytest-mpi"
        )
    if not provided:
        raise pytest.UsageError(f"{' and '.join(_FLAGS)} need pytest-mpi, which is not here: pip install pytest-mpi")


def _refuse_workers(options: Any) -> None:
    """Refuse pytest-xdist's workers: processes that the launcher does not know, and that would take a rank's place."""
    if getattr(options, "numprocesses", None) or getattr(options, "dist", "no") != "no":
        raise pytest.UsageError(
            "pytest-xdist's workers are no ranks: leave -n and --dist out, and start as many ranks as there shall be: "
            "mpirun -np N python -m pytest --with-mpi"
        )


def _join(config: pytest.Config, options: Any) -> SharedSession | None:
    """Return what this rank shares with the others; none where there is nothing to share."""
    if _SESSION in config.stash:
        return config.stash[_SESSION]
    if not (getattr(options, "with_mpi", False) or getattr(options, "only_mpi", False)):
        return None
    mpi = _mpi()
    _refuse_false_green(mpi)
    if mpi.COMM_WORLD.size == 1:
        return None
    from butter_mpi.ending import ENDING

    ENDING.register(mpi)
    agree, late = (_seconds(config, name) for name in _SECONDS)
    session = SharedSession(config, Rounds(mpi.COMM_WORLD, mpi), agree, late, ENDING)
    config.stash[_SESSION] = session
    return session


def _mpi() -> Any:
    """Return mpi4py's MPI, started; the other ranks may be late for it, but not for ever."""
    from butter_mpi.selftest.start import Refused, load_mpi

    try:
        return load_mpi(Settings.resolve(os.environ).start_deadline)
    except (Refused, ValueError) as error:
        raise pytest.UsageError(str(error)) from None


def _refuse_false_green(mpi: Any) -> None:
    """Refuse N sessions of one rank each, which all would pass."""
    info = read_launch(os.environ)
    size = mpi.COMM_WORLD.size
    if info.claimed_size is not None and info.claimed_size > size:
        cause, remedy = false_green(info, mpi.Get_library_version())
        raise pytest.UsageError(
            f"{info.size_variable} says that this job has {info.claimed_size} ranks, MPI says {size}: {cause}; {remedy}"
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, Any, Any]:
    """Run the session together with the other ranks, if there are any."""
    session = _join(config, config.option)
    if session is None:
        return (yield)
    guard = config.stash[_GUARD] = Guard(session)
    config.pluginmanager.register(guard, "butter_mpi_guard")
    try:
        with _own_corner(config, session.rank):
            status = int((yield))
    except BaseException as error:
        status = pytest.ExitCode.USAGE_ERROR if isinstance(error, pytest.UsageError) else pytest.ExitCode.INTERNAL_ERROR
        session.end(int(status), f"{type(error).__name__}: {error}", failing=True)
        if session.rank and isinstance(error, pytest.UsageError):
            return session.status
        raise
    return session.end(status, "", failing=False)


@contextlib.contextmanager
def _own_corner(config: pytest.Config, rank: int) -> Iterator[None]:
    """Keep ranks other than 0 out of rank 0's terminal and files."""
    if rank == 0:
        yield
        return
    config.option.log_file = config.option.log_file or config.getini("log_file")
    for name in _OWN_FILES:
        value = getattr(config.option, name, None)
        if value:
            path = Path(value)
            setattr(config.option, name, str(path.with_suffix(f".rank{rank}{path.suffix}")))
    # The terminal reporter keeps the stdout that it finds when it is made.
    stdout = sys.stdout
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        config.pluginmanager.register(_Corner(rank, stdout), "butter_mpi_corner")
        yield


class _Corner:
    """What a rank other than 0 has for itself."""

    def __init__(self, rank: int, stdout: TextIO) -> None:
        self._rank, self._stdout = rank, stdout

    def pytest_configure(self, config: Any) -> None:
        """Let this rank read the cache, which rank 0 writes."""
        if getattr(config, "cache", None) is not None:
            config.cache = _ReadOnlyCache(config.cache, self._rank)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Give stdout back to the tests: the terminal reporter has been made."""
        sys.stdout = self._stdout


class _ReadOnlyCache:
    """pytest's cache, of which a rank other than 0 writes nothing that rank 0 writes too."""

    def __init__(self, cache: pytest.Cache, rank: int) -> None:
        self._cache, self._rank = cache, rank
        self._own: dict[str, object] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def get(self, key: str, default: Any) -> Any:
        return self._own.get(key) if key in self._own else self._cache.get(key, default)

    def set(self, key: str, value: object) -> None:
        self._own[key] = value

    def mkdir(self, name: str) -> Path:
        return self._cache.mkdir(f"{name}.rank{self._rank}")


@pytest.fixture
def butter_comm(request: pytest.FixtureRequest) -> Generator[Communicator]:
    """Return a fresh, healthy communicator of all ranks; it is closed after the test, whatever the test did to it.

    The plane is that of ``--butter-plane``, else of ``BUTTER_MPI_PLANE``, else ``auto``.
    """
    from butter_mpi.bootstrap import init

    comm = init(plane=request.config.getoption("--butter-plane"))
    yield comm
    # Waits for nobody: a rank that failed elsewhere in its teardown keeps no other one here.
    comm.close()


@pytest.fixture
def all_ranks(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return ``all_ranks(condition, facts="")``: an assertion that every rank makes and that holds or fails on all.

    A plain ``assert`` that fails on one rank leaves the others in the next collective. This one tells them first.
    """
    guard = request.config.stash.get(_GUARD, None)

    def check(condition: object, facts: object = "") -> None:
        __tracebackhide__ = True
        if guard is None:
            assert condition, f"all_ranks: does not hold: {facts}".removesuffix(": ")
        else:
            caller = sys._getframe(1)
            at = f"{request.node.nodeid} (all_ranks, {Path(caller.f_code.co_filename).name}:{caller.f_lineno})"
            guard.check(bool(condition), str(facts), at)

    return check
