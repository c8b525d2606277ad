"""Docstrings in NumPy form that agree with the code: parameters, results, errors, units."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
from numpydoc.docscrape import NumpyDocString
from numpydoc.validate import validate

import butter_mpi
from butter_mpi.errors import ButterError

# Not asked of everyone: an extended summary, See Also, Examples. Notes come before See Also here.
NOT_ASKED = {"ES01", "SA01", "EX01", "GL07"}
MADE_FOR_THE_CALLER = {"Communicator", "DType", "ReduceOp"}
UNITS = {r"timeout|deadline|elapsed|seconds|patience": r"\b(seconds|s)\b", r"nbytes|bytes": r"\bbytes\b"}


def qualified(value: Any) -> str:
    """Return the name by which numpydoc finds a thing."""
    return f"{value.__module__}.{value.__qualname__}"


def members(cls: type) -> Iterator[str]:
    """Yield the qualified names of a class's own public methods and properties."""
    for name, value in vars(cls).items():
        if not name.startswith("_") and isinstance(value, property | classmethod | staticmethod | type(members)):
            yield f"{qualified(cls)}.{name}"


def public() -> Iterator[str]:
    """Yield everything that a user may call: public names, and the public methods of public classes."""
    for name in butter_mpi.__all__:
        value = getattr(butter_mpi, name)
        if name != "__version__":
            yield qualified(value)
            if isinstance(value, type):
                yield from members(value)


def rooms() -> Iterator[str]:
    """Yield what each room offers to others: the functions, classes and methods behind its ``__all__``."""
    for info in pkgutil.walk_packages(butter_mpi.__path__, "butter_mpi."):
        if not info.name.endswith("__main__"):
            module = importlib.import_module(info.name)
            for name in getattr(module, "__all__", ()):
                value = getattr(module, name)
                if callable(value) and getattr(value, "__module__", "") == info.name and hasattr(value, "__qualname__"):
                    yield qualified(value)
                    yield from members(value) if isinstance(value, type) else ()


PUBLIC = sorted(public())
ROOMS = sorted(rooms())


def resolve(name: str) -> Any:
    """Return the thing that a qualified name means; of a property, its function."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            value = inspect.getattr_static(value, part)
        return getattr(value, "fget", None) or getattr(value, "__func__", value)
    raise AssertionError(f"{name} cannot be found")


def excused(name: str, value: Any) -> set[str]:
    """Return which rules do not hold for a thing: errors tell their facts as attributes, some classes nobody calls."""
    error = isinstance(value, type) and issubclass(value, ButterError) and value is not ButterError
    return {"PR01"} if error or name.split(".")[-1] in MADE_FOR_THE_CALLER else set()


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_docstring_is_complete(name: str) -> None:
    """Summary, each parameter with type and meaning in the signature's order, result: as numpydoc checks them."""
    wrong = [
        f"{code}: {text}"
        for code, text in validate(name)["errors"]
        if code not in NOT_ASKED | excused(name, resolve(name))
    ]
    assert wrong == []


@pytest.mark.parametrize("name", sorted(set(ROOMS) - set(PUBLIC)))
def test_no_docstring_names_a_parameter_that_is_not_there(name: str) -> None:
    """Where a room's docstring lists parameters, they are those of the signature, in its order."""
    documented = NumpyDocString(inspect.cleandoc(resolve(name).__doc__ or ""))["Parameters"]
    rules = ("PR01", "PR02", "PR03") if documented else ()
    assert [text for code, text in validate(name)["errors"] if code in rules] == []


def raised(function: Any) -> set[str]:
    """Return the classes that a function's own body raises by name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
    names = [call.func if isinstance(call, ast.Call) else call for call in calls]
    return {name.id for name in names if isinstance(name, ast.Name) and name.id[0].isupper()}


def documented_errors(function: Any) -> set[str]:
    """Return the classes of the Raises section."""
    rows = NumpyDocString(inspect.cleandoc(function.__doc__ or ""))["Raises"]
    return {word for row in rows for word in re.findall(r"\w+", row.type or row.name)}


FUNCTIONS = [name for name in sorted({*PUBLIC, *ROOMS}) if inspect.isfunction(resolve(name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_body_raises_is_documented(name: str) -> None:
    """Each class that a body raises itself is in the Raises section; a method inside a room may have none at all."""
    function = resolve(name)
    documented = documented_errors(function)
    method = "." in function.__qualname__
    if documented or not method or name in PUBLIC:
        assert raised(function) <= documented


@pytest.mark.parametrize("name", PUBLIC)
def test_units_are_said(name: str) -> None:
    """A parameter, attribute or result that is a time says seconds, one that is a size says bytes."""
    parsed = NumpyDocString(inspect.cleandoc(resolve(name).__doc__ or ""))
    for section in ("Parameters", "Attributes", "Returns"):
        for row in parsed[section]:
            for pattern, unit in UNITS.items():
                if re.search(pattern, row.name):
                    told = " ".join([row.type, *row.desc])
                    assert re.search(unit, told, re.IGNORECASE), f"{section}: {row.name}"
