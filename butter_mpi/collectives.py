"""Operations as data: what each one reads, writes and tells the other ranks.

One row of :data:`RULES` per operation, so that one checked path serves all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from sys import _getframe
from types import CodeType, FrameType
from typing import Any

from butter_mpi.enums import DType, ReduceOp
from butter_mpi.settings import shown

__all__ = ["RULES", "Operation", "Rule", "call_site", "check_plan", "control_signature", "signature"]

_INSIDE = ("butter_mpi.communicator", "butter_mpi.plans", "butter_mpi.planes", "butter_mpi.lane", "contextlib")
_LONGEST_SITE = 120
_MOST_SITES = 4096
# By code and instruction, which are cheaper to ask for than a line; empty: inside this library. Codes are kept, so that
# their ids stay their own.
_SITES: dict[tuple[int, int], str] = {}
_CODES: list[CodeType] = []


@dataclass(frozen=True, slots=True)
class Rule:
    """Which buffers an operation has (in blocks of ``count`` elements; -1: one a rank), and who takes part."""

    send_blocks: int
    recv_blocks: int
    reduces: bool = False
    rooted: bool = False
    paired: bool = False


RULES: Mapping[str, Rule] = {
    "all_reduce": Rule(1, 1, reduces=True),
    "all_gather": Rule(1, -1),
    "reduce_scatter": Rule(-1, 1, reduces=True),
    "broadcast": Rule(1, 1, rooted=True),
    "barrier": Rule(0, 0),
    "send": Rule(1, 0, paired=True),
    "recv": Rule(0, 1, paired=True),
}


_ONE_CALL = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


@dataclass(slots=True)
class Operation:
    """One operation: everything that a plane needs, and where the call stands in the user's program.

    ``stream`` is the ordered stream. ``aside``: on the communicator's own stream, between what ``stream`` holds and
    what comes later. ``waits``: return when it is done; ``waits_for_ever``: it is never late. ``named``: the other
    streams that its arrays name; it comes after what they hold when it is called, and before what comes later there.

    Nobody changes one: it is submitted again where the same is asked for again. (It is not frozen, as it would be made
    four times as slowly.) ``plain``: one call on its stream, and nothing to wait for. The last three are what others
    keep in it of earlier submissions: ``code`` the recorder, ``call`` and ``issued`` what puts it on a stream.
    """

    kind: str
    count: int
    dtype: DType
    send: int = 0
    recv: int = 0
    op: ReduceOp | None = None
    root: int | None = None
    peer: int | None = None
    site: str = "?"
    stream: int = 0
    aside: bool = False
    waits: bool = False
    waits_for_ever: bool = False
    named: tuple[int, ...] = ()
    plain: bool = field(default=False, init=False, compare=False, repr=False)
    code: Any = field(default=None, init=False, compare=False, repr=False)
    call: Any = field(default=None, init=False, compare=False, repr=False)
    issued: Any = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.plain = self.kind in _ONE_CALL and not (self.aside or self.waits)

    @property
    def rule(self) -> Rule:
        """Return the row of :data:`RULES`."""
        return RULES[self.kind]

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return self.count * self.dtype.itemsize


def signature(operation: Operation, number: int) -> dict[str, Any]:
    """Return what other ranks compare (all keys but ``at``) and are told (``at``, the call site).

    A plane adds ``way`` where it does an operation in another way than its own usual one.
    """
    return {
        "n": number,
        "kind": operation.kind,
        "count": operation.count,
        "dtype": operation.dtype.label,
        "op": operation.op.label if operation.op else None,
        "root": operation.root,
        "at": operation.site,
    }


def control_signature(kind: str, number: int, site: str) -> dict[str, Any]:
    """Return the signature of what ranks do together over the control plane: it moves no data and takes no number."""
    return {"n": number, "kind": kind, "count": 0, "dtype": "json", "op": None, "root": None, "at": site}


def describe(record: Mapping[str, Any]) -> str:
    """Return a signature as people read it: ``all_reduce #41 (float32 x 1024, sum) at train.py:33``."""
    facts = f"{record['dtype']} x {record['count']}"
    if record["op"]:
        facts += f", {record['op']}"
    if record["root"] is not None:
        facts += f", root {record['root']}"
    if record.get("way"):
        facts += f", by {record['way']}"
    return f"{record['kind']} #{record['n']} ({facts}) at {record['at']}"


def call_site(depth: int = 1) -> str:
    """Return ``folder/file.py:line`` of the innermost caller outside this library.

    Parameters
    ----------
    depth : int, default 1
        How many frames up to begin: as many as there are of this library at least, since each one looked at costs time.

    Returns
    -------
    str
        The place, or ``"?"``.
    """
    try:
        frame = _getframe(depth)
    except ValueError:
        # A thread whose first frame is of this library.
        return "?"
    return _SITES.get((id(frame.f_code), frame.f_lasti)) or _outside(frame)


def _outside(frame: FrameType | None) -> str:
    """Return where the innermost frame outside this library stands, of `frame` and its callers."""
    while frame is not None:
        place = id(frame.f_code), frame.f_lasti
        text = _SITES.get(place)
        if text is None:
            text = _place(frame)
            if len(_SITES) < _MOST_SITES:
                _CODES.append(frame.f_code)
                _SITES[place] = text
        if text:
            return text
        frame = frame.f_back
    return "?"


def _place(frame: FrameType) -> str:
    """Return where a frame stands, as people read it, or nothing where it is of this library."""
    if str(frame.f_globals.get("__name__", "")).startswith(_INSIDE):
        return ""
    return f"{os.sep.join(frame.f_code.co_filename.rsplit(os.sep, 2)[-2:])}:{frame.f_lineno}"[-_LONGEST_SITE:]


_PLAN_KEYS = ("operation", "count", "dtype", "op", "root")
_MOST_ELEMENTS = 2**63 - 1


def check_plan(plan: Mapping[str, Any] | None, world_size: int | None = None) -> dict[str, Any] | None:
    """Return the planned first collective in one form, or ``None``.

    Parameters
    ----------
    plan : mapping, optional
        ``operation`` (one of the collectives), ``count`` (elements of one block), ``dtype``, and ``op`` or ``root``
        where the operation has one.
    world_size : int, optional
        The ranks that there are, of which the root must be one.

    Returns
    -------
    dict or None
        All five keys, in names and numbers.

    Raises
    ------
    TypeError
        It is no mapping.
    ValueError
        An unknown key or operation, or a value that the operation does not have.
    """
    if plan is None:
        return None
    if not isinstance(plan, Mapping):
        raise TypeError(f"plan must be a mapping with the keys {', '.join(_PLAN_KEYS)}; got {type(plan).__name__}")
    _known("plan key", plan, _PLAN_KEYS)
    kind = plan.get("operation")
    collectives = [name for name, rule in RULES.items() if not rule.paired]
    _known("plan operation", [kind], collectives)
    rule, count = RULES[str(kind)], plan.get("count", 0)
    if not _is_whole(count, _MOST_ELEMENTS):
        raise ValueError(f"plan count must be a number of elements, 0 or more; got {shown(count)}")
    for key, wanted in (("op", rule.reduces), ("root", rule.rooted)):
        if (plan.get(key) is not None) != wanted:
            raise ValueError(f"plan: {kind} {'needs' if wanted else 'has no'} {key!r}; got {shown(plan.get(key))}")
    last = _MOST_ELEMENTS if world_size is None else world_size - 1
    if rule.rooted and not _is_whole(plan["root"], last):
        ranks = "0 or more" if world_size is None else f"0 to {last}"
        raise ValueError(f"plan root must be a rank, {ranks}; got {shown(plan['root'])}")
    return {
        "operation": kind,
        "count": count,
        "dtype": DType.parse(plan.get("dtype", "uint8")).label,
        "op": ReduceOp.parse(plan["op"]).label if rule.reduces else None,
        "root": plan.get("root"),
    }


def _is_whole(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _known(what: str, found: Iterable[Any], allowed: Iterable[str]) -> None:
    allowed = tuple(allowed)
    for name in found:
        if name not in allowed:
            raise ValueError(f"{what} must be one of {', '.join(allowed)}; got {shown(name)}")
