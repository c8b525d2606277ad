"""Imports go from a higher level to a lower one, by the table in docs/explanation/architecture.md."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "butter_mpi"
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
DOOR = "butter_mpi"
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in PACKAGE.rglob("*.py")
)


def table() -> dict[str, int]:
    """Return the level of each room: a module, or a package that ends with a slash."""
    rooms: dict[str, int] = {}
    for level, names in re.findall(r"^\| (\d) \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", names):
            assert name not in rooms, f"{name} stands twice in the table"
            rooms[name] = int(level)
    return rooms


LEVELS = table()


def level(module: str) -> int | None:
    """Return the level of a module; a package's parts have the package's."""
    room = module.removeprefix("butter_mpi.")
    return LEVELS.get(room, LEVELS.get(f"{room.split('.')[0]}/"))


def source(module: str) -> Path:
    """Return the file of a module."""
    path = ROOT / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports(module: str) -> Iterator[str]:
    """Yield every imported module, also inside functions and for type checkers."""
    for node in ast.walk(ast.parse(source(module).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else str(node.module) for name in names)


def own(module: str) -> set[str]:
    """Return the modules of this package that a module imports."""
    return {name for name in imports(module) if name.split(".")[0] == "butter_mpi"}


ROOMS = [module for module in MODULES if module != DOOR]


def test_the_table_and_the_code_have_the_same_rooms() -> None:
    """Every module has exactly one level, and every room of the table exists."""
    assert [module for module in ROOMS if level(module) is None] == []
    named = {room.removesuffix("/") for room in LEVELS}
    assert named == {module.split(".")[1] for module in ROOMS}


@pytest.mark.parametrize("module", ROOMS)
def test_imports_go_down(module: str) -> None:
    """A room imports no room of a higher level, and not the door."""
    mine = level(module)
    assert mine is not None
    for name in own(module):
        assert name != DOOR, f"{module} imports the door"
        theirs = level(name)
        assert theirs is not None, f"{module} imports {name}, which has no level"
        assert theirs <= mine, f"{module} (level {mine}) imports {name} (level {theirs})"


def test_rooms_of_one_level_have_no_cycle() -> None:
    """Imports between rooms of one level have an order."""
    graph = {module: {name for name in own(module) if level(name) == level(module)} for module in ROOMS}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("module", [module for module in ROOMS if (level(module) or 0) < 5])
def test_mpi4py_is_imported_only_at_the_top(module: str) -> None:
    """Below bootstrap no room imports mpi4py: MPI is handed in."""
    assert "mpi4py" not in {name.split(".")[0] for name in imports(module)}


@pytest.mark.parametrize("module", [module for module in ROOMS if level(module) == 0])
def test_level_0_needs_only_the_standard_library(module: str) -> None:
    """Values and rules import the standard library, and each other."""
    foreign = {name.split(".")[0] for name in imports(module)} - {"butter_mpi"}
    assert foreign <= sys.stdlib_module_names


def test_no_room_imports_tests() -> None:
    """Product code imports nothing from tests, and pytest only in the plugin."""
    for module in MODULES:
        roots = {name.split(".")[0] for name in imports(module)}
        assert not roots & {"tests", "helpers", "conftest", "contract", "fault", "ranks", "slurm", "standin", "unit"}
        assert ("pytest" not in roots) or module.startswith("butter_mpi.pytest_"), module


def test_the_door_imports_no_room_when_it_opens() -> None:
    """Outside of type checking, butter_mpi/__init__.py imports only the version."""
    tree = ast.parse(source(DOOR).read_text())
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in top}
    assert names <= {"__future__", "importlib", "typing", "butter_mpi._version"}
