"""NCCL's log of a process: caught in memory, bounded, given up, never guessed; with the real library, in children."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from helpers.child import run_child
from helpers.libnccl_files import NcclFiles, real_library, symbols

from butter_mpi.environment import c_environment
from butter_mpi.nccl_log import SUBSYSTEMS, Capture, expanded, hindrance_of

SETUP = """
import ctypes, json, os, sys
from butter_mpi.environment import c_environment
from butter_mpi.nccl_log import Capture
nccl = ctypes.CDLL(sys.argv[1])
unique_id = lambda: nccl.ncclGetUniqueId(ctypes.byref((ctypes.c_ubyte * 128)()))
refused = lambda: nccl.ncclGetUniqueId(None)  # writes a warning, and one more line
variables = lambda: {n: v for n, v in c_environment().items() if n.startswith("NCCL_")}
capture = lambda: Capture(os.devnull)
told = lambda **what: print(json.dumps(what))
memory = lambda: sum(os.stat(path).st_blocks for path in memfds())
def memfds():
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [path for path in paths if os.path.lexists(path) and os.readlink(path).startswith("/memfd:")]
"""


def exported() -> set[str]:
    """Return what the real library exports."""
    with real_library().open("rb") as file:
        return {symbol.name for symbol in symbols(ELFFile(file))}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A copy of the real library, quick to load."""
    return NcclFiles(real_library(), tmp_path).copy()


def test_lines_come_without_a_file_or_a_variable_left(library: Path, tmp_path: Path) -> None:
    """NCCL's first line is caught, its prefix is ours, the environment is as before, and stdout has nothing."""
    code = """
os.chdir(sys.argv[2])
with capture() as log:
    inside, first = variables(), log.mark()
    unique_id()
    text, hindrance = log.text(), log.hindrance
told(inside=inside, first=first, text=text, after=log.text(), hindrance=[hindrance, log.hindrance], left=variables(),
     python={n: v for n, v in os.environ.items() if n.startswith("NCCL_")}, files=os.listdir("."), pid=os.getpid())
"""
    said = run_child(SETUP + code, library, tmp_path / "copy")
    assert said["inside"].pop("NCCL_DEBUG_FILE").startswith("/proc/self/fd/")
    assert said["inside"] == {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": SUBSYSTEMS}
    assert said["first"] == 0 and said["hindrance"] == ["", ""] and said["text"] == said["after"]
    assert f":{said['pid']}:" in said["text"] and "NCCL INFO Bootstrap" in said["text"]
    assert (said["left"], said["python"], said["files"]) == ({}, {}, ["libnccl.so.2"])


def test_real_prefix_is_read(library: Path) -> None:
    """A message behind the prefix that this library writes is taken for this process's."""
    code = """
from butter_mpi.transport import read_log
with capture() as log:
    unique_id()
text = log.text()
start = text.index("Bootstrap")
line = text[:start] + "Using network IB" + chr(10)
told(own=read_log(line, os.getpid()).networks, other=read_log(line, os.getpid() + 1).networks)
"""
    assert run_child(SETUP + code, library) == {"own": ["IB"], "other": []}


def test_nothing_grows_between_captures_and_a_later_one_reads_on(library: Path) -> None:
    """Thousands of lines after a capture take no memory; the next capture has its own lines only, whole."""
    code = """
with capture() as log:
    unique_id(); refused()
    within = memory()
first = log.text()
for _ in range(5000):
    refused()
between, size = memory(), sum(os.stat(path).st_size for path in memfds())
later = []
for _ in range(3):
    with capture() as log:
        at = log.mark()
        refused()
        mark = log.mark()
        refused()
        rest = log.text(mark)
    later.append([at, log.text(), log.text(mark) == rest, len(rest), log.hindrance, variables()])
told(within=within, between=between, size=size, first=first, later=later, fds=len(memfds()))
"""
    said = run_child(SETUP + code, library)
    assert said["within"] > 0 and said["between"] == said["size"] == 0 and said["fds"] == 3
    one = said["first"][said["first"].index("NCCL WARN") :].splitlines()[1].partition("]")[2]
    for at, text, same, length, hindrance, left in said["later"]:
        assert at == 0 and text.startswith("\n") and text.count(one) == 2 and text.endswith(f"{one}\n")
        assert same and length * 2 == len(text) and (hindrance, left) == ("", {})


def test_descriptor_of_nccl_does_not_reach_programs_that_are_started(library: Path) -> None:
    """NCCL opens its file for children too; afterwards none has it."""
    code = """
import subprocess
with capture() as log:
    unique_id()
inherited = [path for path in memfds() if os.get_inheritable(int(os.path.basename(path)))]
child = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True).stdout
told(inherited=inherited, child="memfd" in child)
"""
    assert run_child(SETUP + code, library) == {"inherited": [], "child": False}


def test_marks_tell_one_start_from_the_next(library: Path) -> None:
    """Only what was written from a mark on counts, also when asked afterwards."""
    code = """
with capture() as log:
    unique_id()
    mark = log.mark()
    refused()
    within = log.text(mark)
told(within=within, after=log.text(mark), end=log.text(log.mark()), all=log.text())
"""
    said = run_child(SETUP + code, library)
    assert said["within"] == said["after"] and said["all"].endswith(said["after"]) and said["end"] == ""
    assert "Bootstrap" in said["all"] and "Bootstrap" not in said["after"] and "NCCL WARN" in said["after"]


def test_nccl_that_started_before_is_a_hindrance(library: Path) -> None:
    """Nothing comes; that is told with its cause, and nothing is kept open."""
    code = """
unique_id(); refused()
with capture() as log:
    unique_id(); refused()
    within = log.hindrance
said = log.connections().as_dict()
told(within=within, after=log.hindrance, text=log.text(), said=said, fds=memfds(), left=variables())
"""
    said = run_child(SETUP + code, library)
    assert "NCCL read its settings before butter_mpi could set them: another package started" in said["within"]
    assert said["within"] == said["after"] == said["said"]["hindrance"]
    assert (said["text"], said["fds"], said["left"], said["said"]["links"]) == ("", [], {}, {})


def test_start_that_never_came_to_nccl_spoils_no_later_one(library: Path) -> None:
    """A capture without a word of NCCL's is given up whole; the error of the block passes."""
    code = """
try:
    with capture():
        raise OSError("before NCCL")
except OSError as error:
    passed = str(error)
fds, left = memfds(), variables()
with capture() as log:
    unique_id()
told(passed=passed, fds=fds, left=left, text=log.text(), hindrance=log.hindrance)
"""
    said = run_child(SETUP + code, library)
    assert (said["passed"], said["fds"], said["left"], said["hindrance"]) == ("before NCCL", [], {}, "")
    assert "Bootstrap" in said["text"]


def test_log_that_another_package_took_over_is_left_to_it(library: Path, tmp_path: Path) -> None:
    """After ``ncclResetDebugInit`` NCCL writes elsewhere: the file that now has that number is not touched."""
    if "ncclResetDebugInit" not in exported():
        pytest.skip("this libnccl.so.2 is older than 2.24 and has no ncclResetDebugInit")
    code = """
with capture() as log:
    unique_id()
os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=sys.argv[2], NCCL_DEBUG_SUBSYS="ALL")
nccl.ncclResetDebugInit()
refused()
for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"):
    del os.environ[name]
with capture() as log:
    refused()
told(hindrance=log.hindrance, text=log.text(), theirs=open(sys.argv[2]).read().count("NCCL WARN"), fds=memfds())
"""
    said = run_child(SETUP + code, library, tmp_path / "their.log")
    assert said["hindrance"].startswith("NCCL read its settings before") and said["text"] == ""
    assert said["theirs"] == 2 and said["fds"] == []


def test_second_capture_at_the_same_time_is_a_hindrance(library: Path) -> None:
    """Lines of two starts cannot be told apart; the first is not disturbed, and a third has its turn."""
    code = """
with capture() as one:
    unique_id()
    with capture() as two:
        refused()
    refused()
with capture() as three:
    refused()
told(one=one.text().count("NCCL WARN"), two=[two.text(), two.mark(), two.hindrance, one.hindrance], three=three.text())
"""
    said = run_child(SETUP + code, library)
    assert said["one"] == 2 and said["two"][:2] == ["", 0] and said["two"][3] == "" and "NCCL WARN" in said["three"]
    assert "at the same time" in said["two"][2]


USERS = """
if "BEFORE" in os.environ:
    refused()
before = variables()
with capture() as log:
    changed = variables() != before
    refused()
told(pid=os.getpid(), text=log.text(), hindrance=log.hindrance, changed=changed, left=variables() != before)
"""


@pytest.mark.parametrize("before", [{}, {"BEFORE": "1"}], ids=["NCCL not started", "NCCL started"])
def test_users_own_file_is_read_from_the_start_on(library: Path, tmp_path: Path, before: dict[str, str]) -> None:
    """Their file gets every line, we read those of the block, and no variable changes."""
    env = {"NCCL_DEBUG": "info", "NCCL_DEBUG_FILE": f"{tmp_path}/a%%b.%h.%p.log", **before}
    said = run_child(SETUP + USERS, library, env=env)
    (path,) = tmp_path.glob("*.log")
    assert path.name.startswith("a%b.") and path.name.endswith(f".{said['pid']}.log")
    assert (said["hindrance"], said["changed"], said["left"]) == ("", False, False)
    assert said["text"].count("NCCL WARN") == 1 and path.read_text().endswith(said["text"])
    assert path.read_text().count("NCCL WARN") == 1 + len(before)


def test_what_an_older_job_left_in_the_users_file_is_no_line(library: Path, tmp_path: Path) -> None:
    """NCCL empties its file when it opens it: a mark in the old content would hide the new."""
    code = """
path = sys.argv[2] + f"/{os.getpid()}.log"
with open(path, "w") as file:
    file.write("an older job's line" * 1000)
with capture() as log:
    old, start = log.text(), log.mark()
    refused()
told(old=old, start=start, text=log.text(), late=log.hindrance)
"""
    env = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{tmp_path}/%p.log"}
    said = run_child(SETUP + code, library, tmp_path, env=env)
    assert (said["old"], said["start"], said["late"]) == ("", 0, "") and "NCCL WARN" in said["text"]
    assert "an older job" not in said["text"]


def test_users_file_that_nccl_did_not_open_is_a_hindrance(library: Path, tmp_path: Path) -> None:
    """A folder that does not exist: NCCL writes to stdout instead, and says nothing of it."""
    code = """
with capture() as log:
    pass
told(hindrance=log.hindrance, text=log.text())
"""
    env = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{tmp_path}/none/%p.log"}
    said = run_child(SETUP + code, library, env=env)
    assert said["hindrance"].startswith("NCCL has not opened the file") and said["text"] == ""


def test_no_file_in_memory_is_a_hindrance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system refuses one, the start goes on, and the reason is told."""

    def refuse(*_: object) -> int:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    for name in [name for name in c_environment() if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    with Capture(os.devnull) as log:
        assert not [name for name in c_environment() if name.startswith("NCCL_")]
    assert "Operation not permitted (set NCCL_DEBUG=INFO and NCCL_DEBUG_FILE=" in log.hindrance
    assert log.connections().as_dict()["hindrance"] == log.hindrance


def test_settings_in_a_configuration_file_are_the_users(library: Path, tmp_path: Path) -> None:
    """They are not overridden, although the environment would win."""
    path = tmp_path / "nccl.conf"
    path.write_text("NCCL_DEBUG=VERSION\n")
    said = run_child(SETUP + USERS, library, env={"NCCL_CONF_FILE": str(path)})
    assert said["hindrance"].startswith('NCCL_DEBUG is "VERSION"') and not said["changed"]


def test_empty_variables_are_as_good_as_unset(library: Path) -> None:
    """They are replaced for the length of the block, and empty again afterwards."""
    said = run_child(SETUP + USERS, library, env={"NCCL_DEBUG": "", "NCCL_DEBUG_FILE": ""})
    assert "NCCL WARN" in said["text"] and (said["hindrance"], said["changed"], said["left"]) == ("", True, False)


FILE = "log.%p"


@pytest.mark.parametrize(
    "given",
    [
        {"NCCL_DEBUG": "INFO"},
        {"NCCL_DEBUG": "trace"},
        {"NCCL_DEBUG": "ABORT", "NCCL_DEBUG_SUBSYS": "init,net"},
        {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "ALL"},
        {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "^COLL,TUNING"},
        {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_LEVELS": "INFO"},
    ],
)
def test_users_settings_that_tell(given: dict[str, str]) -> None:
    """Levels in any case, INIT among the subsystems, and a file of each process's own."""
    assert hindrance_of({**given, "NCCL_DEBUG_FILE": FILE}) == ""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"NCCL_DEBUG": "INFO"}, 'NCCL_DEBUG is "INFO" without NCCL_DEBUG_FILE, so NCCL\'s log goes to stdout'),
        ({"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": FILE}, 'NCCL_DEBUG is "WARN", which leaves out'),
        ({"NCCL_DEBUG": "VERSION"}, 'NCCL_DEBUG is "VERSION", which leaves out'),
        ({"NCCL_DEBUG": "loud", "NCCL_DEBUG_FILE": FILE}, 'NCCL_DEBUG is "loud", which leaves out'),
        ({"NCCL_DEBUG_FILE": FILE}, "NCCL_DEBUG_FILE is set without NCCL_DEBUG"),
        ({"NCCL_DEBUG_SUBSYS": "ALL"}, "NCCL_DEBUG_SUBSYS is set without NCCL_DEBUG"),
        ({"NCCL_DEBUG_LEVELS": "INFO"}, "NCCL_DEBUG_LEVELS is set without NCCL_DEBUG"),
        (
            {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": FILE, "NCCL_DEBUG_SUBSYS": "NET,COLL"},
            'NCCL_DEBUG_SUBSYS is "NET,COLL", which leaves INIT out',
        ),
        (
            {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": FILE, "NCCL_DEBUG_SUBSYS": "^init"},
            'NCCL_DEBUG_SUBSYS is "^init", which leaves INIT out',
        ),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "nccl.%h.log"}, "which several processes could write over"),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "nccl.%%p.log"}, "which several processes could write over"),
    ],
)
def test_users_settings_that_do_not_tell(given: dict[str, str], words: str) -> None:
    """The variable, its value, what is wrong with it, and what to do."""
    why = hindrance_of(given)
    assert words in why and any(word in why for word in ("(unset it, or set", "(set ", "(add INIT", "(give each"))


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("/a/nccl.log", "/a/nccl.log"),
        ("%h.%p", "n-01.7"),
        ("%%h%%%p%%", "%h%7%"),
        ("%x%y", "%x%y"),
        ("100%", "100%"),
        ("~/%h", "~/n-01"),
    ],
)
def test_path_is_made_as_nccl_makes_it(pattern: str, path: str) -> None:
    """Host up to its first dot, pairs that mean nothing as they stand, no home folder."""
    assert expanded(pattern, "n%01.example.org", 7) == path
