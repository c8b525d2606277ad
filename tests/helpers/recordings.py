"""Recordings of made-up ranks, written by real recorders."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema

from butter_mpi.collectives import Operation
from butter_mpi.enums import DType, ReduceOp
from butter_mpi.recorder import Reader, Recorder
from butter_mpi.recording import append, take

KEY = "butter_mpi-0123456789abcdef"


def operation(count: int = 8, kind: str = "all_reduce", site: str = "app/train.py:7", **more: Any) -> Operation:
    """An operation on float32."""
    op = ReduceOp.SUM if kind in ("all_reduce", "reduce_scatter") else None
    return Operation(kind, count, DType.FLOAT32, op=op, site=site, **more)


def pair(kind: str, peer: int, count: int = 8) -> Operation:
    """A send or receive of float32."""
    return Operation(kind, count, DType.FLOAT32, peer=peer, site=f"app/{kind}.py:3")


def about(rank: int, **changes: Any) -> dict[str, Any]:
    """Whose recording it is: one of three ranks that lives."""
    plain = {"communicator": {"key": KEY, "name": "init"}, "rank": rank, "world_size": 3, "host": "n1"}
    return {**plain, "pid": 100 + rank, "state": "alive", "how": "", "cause": "", **changes}


def recording(
    rank: int,
    operations: Iterable[Any],
    *,
    begin: int | None = None,
    after: Iterable[Any] = (),
    **changes: Any,
) -> dict[str, Any]:
    """What a rank has that submitted these; a text is an exchange; with `begin`, it reconnected and did more."""
    with closing(Recorder(10)) as recorder:
        reader, numbers = Reader(recorder.fd), {"": 0}
        _submit(recorder, operations, numbers)
        if begin is not None:
            pairs = max(numbers.values())
            numbers.clear()
            numbers[""], reader.floor, reader.pairs_floor = begin, begin, pairs
            recorder.begin_at(begin)
            _submit(recorder, after, numbers, pairs)
        return take(reader, about(rank, **changes))


def _submit(recorder: Recorder, operations: Iterable[Any], numbers: dict[str, int], pairs: int = 0) -> None:
    for one in operations:
        if isinstance(one, str):
            recorder.exchange(one, numbers[""], f"app/{one}.py:1")
            continue
        side = "" if one.peer is None else f"{one.kind} {one.peer}"
        numbers[side] = numbers.get(side, pairs) + 1
        recorder.write(one, numbers[side])


def write(path: Path, *recordings: dict[str, Any]) -> str:
    """Write a recorder file."""
    for one in recordings:
        append(path, one)
    return str(path)


def validator(name: str) -> Any:
    """What holds a value against a published schema."""
    text = importlib.resources.files("butter_mpi").joinpath(f"schema/{name}.schema.json").read_text(encoding="utf-8")
    schema = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)
