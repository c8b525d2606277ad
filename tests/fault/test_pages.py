"""The programs that pages show run, and print what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.mpirun import run_job

ROOT = Path(__file__).resolve().parents[2]


def fences(page: str, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_the_readme_program_prints_what_the_readme_shows(tmp_path: Path) -> None:
    """The README's program, under two ranks, gives the README's output (of ranks, in any order)."""
    program, _on_gpus = fences("README.md", "python")
    (session,) = fences("README.md", "console")
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "program.py").write_text(program)
    result = run_job(2, ["demo/program.py"], cwd=tmp_path, env={"BUTTER_MPI_PLANE": "host"})
    assert result.rc == 0, result.text
    shown = sorted(line for line in session.splitlines() if not line.startswith("$"))
    assert sorted("".join(result.rank_out).splitlines()) == shown, result.text


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_readme_program_on_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    """With another -np than the README's, or none, it ends well; each of several ranks is told of another's call."""
    (tmp_path / "program.py").write_text(fences("README.md", "python")[0])
    result = run_job(ranks, ["program.py"], cwd=tmp_path)
    assert result.rc == 0 and not any(result.rank_err), result.text
    told = [re.findall(r"is told of .*float64 x (\d)", out) for out in result.rank_out]
    assert told == ([["4"], ["5"], ["3"]] if ranks == 3 else [[]]), result.text


def test_the_shown_tests_pass(tmp_path: Path) -> None:
    """The test files of the page about pytest pass under two ranks."""
    blocks = [text for text in fences("docs/howto/test_with_pytest.md", "python") if "def test_" in text]
    assert blocks
    for number, text in enumerate(blocks):
        (tmp_path / f"test_{number}.py").write_text(text)
    options = ["-m", "pytest", "--with-mpi", "--butter-plane=host", "-p", "no:cacheprovider"]
    result = run_job(2, options, cwd=tmp_path)
    assert result.rc == 0, result.text
    assert f"{len(blocks)} passed" in result.rank_out[0], result.text
