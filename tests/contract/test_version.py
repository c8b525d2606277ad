"""The version has one source."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import butter_mpi

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_stands_in_one_file() -> None:
    """Only ``_version.py`` holds the number; the build reads it from there, and the package shows it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "butter_mpi/_version.py"
    number = re.compile(rf"(?<![\d.]){re.escape(butter_mpi.__version__)}(?![\d.])")
    files = [ROOT / "pyproject.toml", *(ROOT / "butter_mpi").rglob("*.py")]
    assert [file.name for file in files if number.search(file.read_text())] == ["_version.py"]


def test_the_installed_version_is_this_one() -> None:
    """The environment that runs the tests has installed this version, not an older one."""
    assert importlib.metadata.version("butter_mpi") == butter_mpi.__version__


def test_versions_names_every_part() -> None:
    """``versions`` gives this package, Python and mpi4py, and ``None`` for what is not installed."""
    found = butter_mpi.versions()
    assert found["butter_mpi"] == butter_mpi.__version__
    assert found["mpi4py"] == importlib.metadata.version("mpi4py")
    assert {name for name, version in found.items() if version is None} == {
        name for name in found if name != "python" and not _installed(name)
    }


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
