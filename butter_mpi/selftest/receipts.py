"""Receipts as files: read, checked against the published schema, written whole or not at all."""

from __future__ import annotations

import importlib.resources
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema

from butter_mpi.errors import ReceiptError
from butter_mpi.receipt import SCHEMA_FILE, SCHEMA_VERSION, Difference, Receipt
from butter_mpi.selftest.console import one_line, printable
from butter_mpi.selftest.options import part_of, receipt_file

__all__ = ["check", "load", "schema", "table", "write"]

_LONGEST_CELL = 70
_LONGEST_PROBLEM = 300
_MOST_PROBLEMS = 5
_LARGEST_FILE = 1 << 28


def schema() -> dict[str, Any]:
    """Return the published JSON Schema."""
    text = importlib.resources.files("butter_mpi").joinpath(SCHEMA_FILE).read_text(encoding="utf-8")
    return dict(json.loads(text))


def check(value: Any, name: str) -> Receipt:
    """Return the receipt that `value`, as it came from JSON, is.

    Raises
    ------
    ReceiptError
        It is none; the message names each wrong field.
    """
    try:
        return _checked(value, name)
    except RecursionError:
        raise ReceiptError(f"{name} is not a valid receipt: it is nested too deeply", path=name) from None


def _checked(value: Any, name: str) -> Receipt:
    version = value.get("schema") if isinstance(value, dict) else None
    if isinstance(version, int) and not isinstance(version, bool) and version != SCHEMA_VERSION:
        text = f"{name} is a receipt of version {version}; this butter_mpi reads version {SCHEMA_VERSION}"
        raise ReceiptError(text, path=name)
    validator = jsonschema.Draft202012Validator(schema())
    problems = sorted(validator.iter_errors(value), key=lambda problem: problem.json_path)
    if problems:
        told = [f"{p.json_path.removeprefix('$').lstrip('.') or 'the whole'}: {_said(p)}" for p in problems]
        more = f"; and {len(told) - _MOST_PROBLEMS} more" if len(told) > _MOST_PROBLEMS else ""
        raise ReceiptError(f"{name} is not a valid receipt: {'; '.join(told[:_MOST_PROBLEMS])}{more}", path=name)
    return Receipt.from_json(value)


def _said(problem: jsonschema.ValidationError) -> str:
    """Return what is wrong; the validator shows the whole value, which can be the whole receipt."""
    text = one_line(problem.message, _LONGEST_PROBLEM)
    return text if len(problem.message) <= _LONGEST_PROBLEM else f"{text}, against {problem.validator!r} of the schema"


def load(path: Path) -> Receipt:
    """Return the receipt in a file.

    Raises
    ------
    ReceiptError
        It cannot be read, is not JSON, or is not valid by the schema.
    """
    name = one_line(str(path))
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise ReceiptError(f"{name} cannot be read: {error.strerror}", path=str(path)) from None
    if len(content) > _LARGEST_FILE:
        raise ReceiptError(f"{name} cannot be read: it has more than {_LARGEST_FILE >> 20} MiB", path=str(path))
    try:
        value = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ReceiptError(f"{name} is not JSON: it is not UTF-8 text ({error.reason})", path=str(path)) from None
    except (ValueError, RecursionError) as error:
        raise ReceiptError(f"{name} is not JSON: {error}", path=str(path)) from None
    return check(value, name)


def write(receipt: Receipt, path: Path) -> None:
    """Write a receipt that is valid by the schema: a reader finds the old file or the whole new one.

    A link to a regular file stays, and the file that it leads to is replaced.

    Raises
    ------
    ReceiptError
        It is not valid, or the file cannot be written.
    """
    check(receipt.to_json(), "the receipt of this run")
    try:
        file = receipt_file(path)
        part = part_of(file)
        try:
            with part.open("x", encoding="utf-8") as opened:
                opened.write(receipt.text())
                opened.flush()
                os.fsync(opened.fileno())
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise ReceiptError(f"{one_line(str(path))} cannot be written: {error.strerror}", path=str(path)) from None


def table(differences: Sequence[Difference], names: tuple[str, str]) -> str:
    """Return the differences of two receipts as lines of three columns."""
    rows = [("", *map(one_line, names))]
    rows += [(one_line(d.what), _cell(d.first), _cell(d.second)) for d in differences]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{what:{widths[0]}}  {a:{widths[1]}}  {b}".rstrip() for what, a, b in rows)


def _cell(value: Any) -> str:
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value)
    text = printable(" ".join(text.split()))
    return text if len(text) <= _LONGEST_CELL else f"{text[: _LONGEST_CELL - 3]}..."
