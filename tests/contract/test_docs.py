"""The pages agree with the code: links, variables, errors, programs, commands."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from butter_mpi import errors
from butter_mpi.cuda import pick_device
from butter_mpi.environment import DIGEST_VARIABLE, LIBRARY_VARIABLE
from butter_mpi.policy import POLICY
from butter_mpi.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "launch" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=IDS)

ENVIRONMENT = (ROOT / "docs/reference/environment.md").read_text()
ERRORS = (ROOT / "docs/reference/errors.md").read_text()


def fences(page: Path, *languages: str) -> list[str]:
    """Return the fenced blocks of these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language in languages]


def anchor(heading: str) -> str:
    """Return the anchor that a heading gets on the repository's pages."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@EACH_PAGE
def test_links_resolve(page: Path) -> None:
    """Each link to a file of this repository leads to a file, and its anchor to a heading."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("https://", "http://")):
            continue
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} leads nowhere"
        if fragment:
            assert fragment in map(anchor, re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)), target


@EACH_PAGE
def test_fenced_python_compiles(page: Path) -> None:
    """Each Python block is a program that compiles."""
    for number, text in enumerate(fences(page, "python")):
        compile(text, f"{page.name} block {number}", "exec")


def commands(page: Path) -> list[list[str]]:
    """Return the words of each line that is typed into a shell."""
    lines = [line for text in fences(page, "bash") for line in text.splitlines()]
    lines += [
        line.removeprefix("$ ") for text in fences(page, "console") for line in text.splitlines() if line[:2] == "$ "
    ]
    return [shlex.split(line, comments=True) for line in lines if line and not line.startswith("#")]


@EACH_PAGE
def test_commands_exist(page: Path) -> None:
    """Launchers that a page names are there and can be started; modules behind ``-m`` are found."""
    for words in commands(page):
        for word in words:
            if word.startswith(("./launch/", "launch/")):
                assert (ROOT / word).is_file(), word
                assert word.endswith((".md", ".sbatch")) or os.access(ROOT / word, os.X_OK), word
        for option, module in itertools.pairwise(words):
            if option == "-m":
                assert importlib.util.find_spec(module) is not None, module


def rows(text: str) -> dict[str, list[str]]:
    """Return the cells of each table row that begins with a variable."""
    found = re.findall(r"^\| `([A-Z0-9_]+)` \|(.*)\|$", text, re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in found}


def test_every_setting_is_documented_with_its_default() -> None:
    """The table of settings has exactly the fields of Settings, with their defaults."""
    table = rows(ENVIRONMENT.split("## NCCL")[0])
    assert set(table) == {f"BUTTER_MPI_{field.name.upper()}" for field in fields(Settings)}
    words = {"off": False, "none": None}
    for field in fields(Settings):
        default = table[f"BUTTER_MPI_{field.name.upper()}"][1].strip("`")
        expected = words.get(default, float(default) if default.isdigit() else default)
        assert field.default == expected, field.name


def test_every_other_variable_is_documented_and_used() -> None:
    """What else is read from the environment stands on the page, and the page names nothing that nobody reads."""
    table = rows(ENVIRONMENT.split("## NCCL")[1].split("\n## ")[0])
    assert set(table) == {DIGEST_VARIABLE, LIBRARY_VARIABLE, *POLICY}
    assert {name: table[name][0].strip("`") for name in POLICY} == dict(POLICY)
    set_here = set(
        re.findall(r"`(NCCL_[A-Z_]+)`", ENVIRONMENT.split("## What butter_mpi sets")[1].split("\n| `NCCL_DEBUG")[0])
    )
    made = (ROOT / "butter_mpi" / "nccl_setup.py").read_text()
    assert set_here == set(re.findall(r'"(NCCL_[A-Z_]+)"', made))
    files = [*(ROOT / "tests" / "helpers").glob("*.py"), ROOT / "launch" / "test", ROOT / "tests" / "conftest.py"]
    files += (ROOT / "tests" / "ranks").glob("*.py")
    used = "\n".join(file.read_text() for file in files)
    tests = set(re.findall(r"`(BUTTER_MPI_TEST_[A-Z_]+)`", ENVIRONMENT.split("## Tests")[1]))
    assert {name for name in tests if name not in used} == set()


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_documented_with_its_facts(name: str) -> None:
    """Each class has a section that names its own facts, and stands in the tree."""
    section = re.search(rf"^### {name}\n(.*?)(?=^#|\Z)", ERRORS, re.MULTILINE | re.DOTALL)
    assert section is not None
    cls = getattr(errors, name)
    inherited = set().union(*(getattr(base, "FACTS", {}) for base in cls.__bases__))
    for fact in set(cls.FACTS) - inherited:
        assert f"`.{fact}`" in section.group(1), fact
    assert re.search(rf"^[\s│├└─]*{name}\b", fences(ROOT / "docs/reference/errors.md", "text")[0], re.MULTILINE)


def test_no_section_is_about_an_error_that_is_not_there() -> None:
    """The page has a section for nothing else."""
    assert set(re.findall(r"^### (\w+)$", ERRORS, re.MULTILINE)) == set(errors.__all__)


def test_devices_that_are_missing_are_told_as_the_page_on_slurm_says() -> None:
    """The page quotes what a rank without a device says, of numbers with which it can say it."""
    page = (ROOT / "docs/howto/run_on_slurm.md").read_text()
    (quoted,) = re.findall(r"`(local rank (\d+) has no device: (\d+) visible)`", page)
    text, local_rank, visible = quoted
    with pytest.raises(errors.CUDAError, match=text):
        pick_device(int(local_rank), [{}] * int(visible))


def test_the_readme_tells_what_gpus_need() -> None:
    """Each extra that brings a NCCL, and the library that the program for GPUs imports, which no extra brings."""
    readme = (ROOT / "README.md").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    bring = [extra for extra, packages in extras.items() if any("nvidia-nccl" in package for package in packages)]
    assert bring and all(f"`{extra}`" in readme for extra in bring)
    assert "import cupy" in readme and "pip install cupy-cuda" in readme


def test_the_readme_is_short() -> None:
    """The README can be read in a minute or two: under 120 lines."""
    assert len((ROOT / "README.md").read_text().splitlines()) < 120
