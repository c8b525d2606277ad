"""The selftest's command line as far as it needs no MPI: wrong arguments, help, list, comparison, refusal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.receipts import check, receipt

from butter_mpi.selftest import cli, options
from butter_mpi.selftest.catalogue import CHECKS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "selftest.md"
FOREIGN = re.compile(r"(BUTTER|OMPI|PMI|PMIX|SLURM|MPI)_")

WRONG = {
    "unknown option": (["--plan", "host"], "unrecognized arguments: --plan"),
    "plane": (["--plane", "gpu"], "argument --plane: invalid choice: 'gpu'"),
    "plane missing": (["--plane"], "argument --plane: expected one argument"),
    "transport": (["--require-transport", "IB"], "argument --require-transport: invalid choice: 'IB'"),
    "deadline": (["--start-deadline", "0"], "must be a number of seconds from 1 to 3600; got '0'"),
    "deadline word": (["--start-deadline", "soon"], "must be a number of seconds from 1 to 3600; got 'soon'"),
    "ranks": (["--np-expected", "0"], "argument --np-expected: must be a whole number from 1 to"),
    "seed": (["--seed", "-1"], "argument --seed: must be a whole number from 0 to"),
    "compare one": (["--compare", "a"], "argument --compare: expected 2 arguments"),
    "compare and run": (["--compare", "a", "b", "--faults"], "argument --compare: it runs no check"),
    "list and run": (["--list", "--json"], "argument --list: it runs no check"),
    "list and compare": (["--list", "--compare", "a", "b"], "argument --list: it runs no check"),
    "receipt folder": (["--receipt", "/nowhere/a.json"], "argument --receipt: there is no folder /nowhere"),
    "receipt is folder": (["--receipt", "/tmp"], "argument --receipt: /tmp cannot be written: it is a folder; name"),
    "receipt is a device": (["--receipt", "/dev/null"], "argument --receipt: /dev/null cannot be written: it is no re"),
    "receipt name too long": (["--receipt", "x" * 300], "cannot be written: File name too long"),
    "receipt below a file": (["--receipt", __file__ + "/a"], "test_selftest_cli.py/a cannot be written: Not a dir"),
    "receipt on two lines": (["--receipt", "a\nb/c\x1b"], "argument --receipt: there is no folder a\\nb; make it"),
    "seed of many digits": (["--seed", "9" * 5000], "argument --seed: must be a whole number from 0 to"),
    "argument of many lines": (["\n\x1b" * 10**5], "unrecognized arguments: \\n\\x1b"),
    "receipt unwritable": (["--receipt", "/proc/a.json"], "argument --receipt: cannot write in /proc: "),
}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what a launcher of the tests themselves may have set."""
    for name in [name for name in os.environ if FOREIGN.match(name)]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("arguments", "said"), WRONG.values(), ids=WRONG)
def test_wrong_argument_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong argument gives status 2 and one line on stderr that names it."""
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1 and err[:-1].isprintable() and len(err) < 700
    assert err.startswith("butter_mpi.selftest: ")


def test_wrong_argument_loads_no_mpi() -> None:
    """A wrong argument is found in a process that has neither MPI nor NumPy."""
    program = (
        "import sys; from butter_mpi.selftest.cli import main; status = main(['--plane', 'gpu']); "
        "print(status, [name for name in ('mpi4py', 'numpy', 'cuda') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "2 []\n"


# Each stream that cannot take what is written to it, as a shell gives it to a command.
LOST = [">/dev/full", ">&-", ">&- 2>&- <&-", ">/dev/full 2>/dev/full", ">/dev/full 2>&-"]


def shell(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the selftest in a shell, which has the arguments and redirections."""
    line = f"{sys.executable} -m butter_mpi.selftest {command}"
    return subprocess.run(["bash", "-c", line], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def two_receipts(folder: Path) -> str:
    """Write two receipts that differ; return their names for a command line."""
    (folder / "a").write_text(receipt().text())
    (folder / "b").write_text(receipt(status="failed", checks=[check(outcome="failed")]).text())
    return "a b"


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize(("asked", "status"), [("--help", 1), ("--list", 1), ("--compare", 2)])
def test_answer_that_cannot_be_written_is_told(asked: str, status: int, lost: str, tmp_path: Path) -> None:
    """A full or closed stdout is a line on stderr where there is one, and a status that is no answer."""
    files = two_receipts(tmp_path) if asked == "--compare" else ""
    done = shell(f"{asked} {files} {lost}", tmp_path)
    assert done.returncode == status, done.stderr
    assert re.fullmatch(r"(butter_mpi\.selftest: stdout cannot be written: [A-Za-z ]+\n)?", done.stderr), done.stderr
    assert bool(done.stderr) == ("2>" not in lost)


@pytest.mark.parametrize("asked", ["--help", "--list", "--compare"])
def test_answer_that_nobody_reads(asked: str, tmp_path: Path) -> None:
    """Where the reader has left, the command ends silently, as SIGPIPE would have ended it."""
    files = two_receipts(tmp_path) if asked == "--compare" else ""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "butter_mpi.selftest", asked, *files.split()]
    done = subprocess.run(
        command, cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("lost", ["2>&-", "2>/dev/full", ">&- 2>&- <&-"])
def test_wrong_argument_without_a_stderr(lost: str, tmp_path: Path) -> None:
    """Also where nobody can be told, a wrong argument and an unreadable receipt have their status."""
    for command in ("--bogus", "--compare missing missing"):
        done = shell(f"{command} {lost}", tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_comparison_of_what_no_terminal_can_show(tmp_path: Path) -> None:
    """Lone surrogates and control characters in a receipt are shown as escapes, in any encoding of stdout."""
    for name, text in (("a", "\ud800\x1b[31m"), ("b", "\u00e9")):
        (tmp_path / name).write_text(receipt(plane={"asked": "auto", "ran": "host", "why": text}).text())
    for encoding, accent in (("utf-8", "\u00e9"), ("ascii", "\\xe9")):
        command = [sys.executable, "-m", "butter_mpi.selftest", "--compare", "a", "b"]
        env = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, encoding="utf-8", timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (1, "")
        assert done.stdout.splitlines()[1].split() == ["plane", "why", "\\ud800\\x1b[31m", accent]


def test_list_has_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    """``--list`` prints number, name and title of each check, and says which ones need ``--faults``."""
    assert cli.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CHECKS)
    for line, row in zip(lines, CHECKS, strict=True):
        assert line.split()[:2] == [str(row.number), row.id]
        assert line.endswith(row.title)
        assert ("--faults" in line) == row.faults


def test_checks_have_names_of_their_own() -> None:
    """No number is left out, no two checks share a name or a number; those that break the communicator come last."""
    assert sorted(row.number for row in CHECKS) == list(range(1, len(CHECKS) + 1))
    assert [row.number for row in CHECKS if row.faults] == [13, 14]
    assert len({row.id for row in CHECKS}) == len(CHECKS)
    assert [row.faults for row in CHECKS] == sorted(row.faults for row in CHECKS)


def test_comparison_of_equal_receipts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two receipts of the same facts give status 0."""
    one, other = tmp_path / "a.json", tmp_path / "b.json"
    one.write_text(receipt().text())
    other.write_text(receipt(seed=9).text())
    assert cli.main(["--compare", str(one), str(other)]) == 0
    assert capsys.readouterr().out == "no difference\n"


def test_comparison_of_different_receipts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Differences are a table with one line each, under the names of the two files, and status 1."""
    one, other = tmp_path / "a.json", tmp_path / "b.json"
    one.write_text(receipt().text())
    other.write_text(receipt(status="failed", checks=[check(outcome="failed")]).text())
    assert cli.main(["--compare", str(one), str(other)]) == 1
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == [str(one), str(other)]
    assert [re.split(r"  +", row) for row in rows] == [
        ["status", "passed", "failed"],
        ["check identity", "passed", "failed"],
    ]


@pytest.mark.parametrize("broken", [0, 1])
def test_comparison_with_what_is_no_receipt(broken: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is no receipt, first or second, gives status 2 and one line that names it and the field."""
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        path.write_text(receipt().text())
    paths[broken].write_text(receipt().text().replace('"passed"', '"fine"'))
    assert cli.main(["--compare", *map(str, paths)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"{paths[broken]} is not a valid receipt: " in err
    assert "status: 'fine' is not one of" in err


@pytest.mark.parametrize(
    "env",
    [{"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, {}],
    ids=["batch script", "interactive step", "SLURM_NTASKS alone"],
)
def test_outside_a_step_is_refused(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where several tasks were asked for but nothing started them the run is refused before MPI, naming srun."""
    for name, value in {**env, "SLURM_NTASKS": "4"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main([]) == 3
    err = capsys.readouterr().err
    assert "4 tasks" in err
    assert "start it with srun" in err
    assert err.count("\n") == 1


def test_probe_of_the_receipt_leaves_nothing(tmp_path: Path) -> None:
    """Looking whether a receipt can be written neither makes nor changes a file."""
    path = tmp_path / "a.json"
    options.check_receipt_path(path)
    assert list(tmp_path.iterdir()) == []
    path.write_text("old")
    options.check_receipt_path(path)
    assert path.read_text() == "old"


@pytest.mark.parametrize("kind", ["pipe", "dangling link", "link to a device", "link to itself", "link to a folder"])
def test_receipt_goes_to_a_regular_file_only(kind: str, tmp_path: Path) -> None:
    """What is there and no regular file, also at the end of a link, is refused and stays as it is."""
    path = tmp_path / "a"
    target = {"dangling link": "b", "link to a device": "/dev/null", "link to itself": "a", "link to a folder": "/tmp"}
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target[kind])
    before = path.lstat()
    with pytest.raises(options.UsageError, match=r"^argument --receipt: .*/a cannot be written: "):
        options.check_receipt_path(path)
    assert path.lstat() == before
    assert list(tmp_path.iterdir()) == [path]


def test_page_has_every_option_and_check() -> None:
    """The reference page has a row for each option and for each check, and none for others."""
    text = PAGE.read_text()
    offered = set(re.findall(r"--[a-z-]+", options.help_text()))
    assert set(re.findall(r"^\| `(--[a-z-]+)", text, re.MULTILINE)) == offered
    rows = re.findall(r"^\| (\d+) \| `([a-z_]+)`", text, re.MULTILINE)
    assert rows == [(str(row.number), row.id) for row in CHECKS]
