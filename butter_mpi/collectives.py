"""Operations as data: what each one reads, writes and tells the other ranks.

One row of :data:`RULES` per operation, so that one checked path serves all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from sys import _getframe
from types import CodeType, FrameType
from typing import Any

from butter_mpi.enums import DType, PreMulSum, ReduceOp, parse_op
from butter_mpi.settings import shown

__all__ = [
    "BY_GRAPH",
    "RULES",
    "Operation",
    "Owners",
    "Rule",
    "call_site",
    "carried",
    "check_op",
    "check_plan",
    "control_signature",
    "graph_facts",
    "pairs_of",
    "signature",
]

_INSIDE = (
    *("butter_mpi.communicator", "butter_mpi.exchanges", "butter_mpi.plans", "butter_mpi.arguments"),
    *("butter_mpi.memory", "butter_mpi.splitting", "butter_mpi.planes", "butter_mpi.lane", "contextlib"),
)
_LONGEST_SITE = 120
_MOST_SITES = 4096
# By code and instruction, which are cheaper to ask for than a line; empty: inside this library. Codes are kept, so that
# their ids stay their own.
_SITES: dict[tuple[int, int], str] = {}
_CODES: list[CodeType] = []
# Of each instruction number the place that was found there first, with its code: few numbers are met in two codes.
_NEAR: dict[int, tuple[CodeType, str]] = {}


BY_GRAPH = "a CUDA graph"
"""The way of an operation that is launched as a graph, as messages name it."""

Owners = tuple[Any, ...]
"""The arrays that an operation uses, which must stay alive as long as it does."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Which buffers an operation has (in blocks of ``count`` elements; -1: one a rank), and who takes part.

    ``from_root``: only root sends; ``to_root``: only root receives. ``uneven``: every rank has counts of its own, so
    the operation is a name and a number that all ranks compare, and its data goes by sends and receives that are
    submitted with it and compared pair by pair.
    """

    send_blocks: int
    recv_blocks: int
    reduces: bool = False
    rooted: bool = False
    paired: bool = False
    from_root: bool = False
    to_root: bool = False
    in_place: bool = True
    uneven: bool = False


RULES: Mapping[str, Rule] = {
    "all_reduce": Rule(1, 1, reduces=True),
    "all_gather": Rule(1, -1),
    "reduce_scatter": Rule(-1, 1, reduces=True),
    "broadcast": Rule(1, 1, rooted=True),
    "barrier": Rule(0, 0),
    "send": Rule(1, 0, paired=True),
    "recv": Rule(0, 1, paired=True),
    "reduce": Rule(1, 1, reduces=True, rooted=True, to_root=True),
    "gather": Rule(1, -1, rooted=True, to_root=True),
    "scatter": Rule(-1, 1, rooted=True, from_root=True),
    "all_to_all": Rule(-1, -1, in_place=False),
    "gather_v": Rule(0, 0, rooted=True, uneven=True),
    "scatter_v": Rule(0, 0, rooted=True, uneven=True),
    "all_to_all_v": Rule(0, 0, uneven=True),
}

_CARRIERS = {
    DType.INT16: (DType.UINT8, 2),
    DType.UINT16: (DType.UINT8, 2),
    DType.BOOL: (DType.UINT8, 1),
    DType.COMPLEX64: (DType.FLOAT32, 2),
    DType.COMPLEX128: (DType.FLOAT64, 2),
}
_WHOLE = (DType.INT16, DType.UINT16)
_BOOL_OPS = {
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.MAX: ReduceOp.MAX,
    ReduceOp.PROD: ReduceOp.MIN,
    ReduceOp.MIN: ReduceOp.MIN,
}
_PAIRS_OF_REALS = (ReduceOp.SUM, ReduceOp.AVG)


_ONE_CALL = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


@dataclass(slots=True)
class Operation:
    """One operation: everything that a plane needs, and where the call stands in the user's program.

    ``stream`` is the ordered stream. ``aside``: on the communicator's own stream, between what ``stream`` holds and
    what comes later. ``waits``: return when it is done; ``waits_for_ever``: it is never late. ``named``: the other
    streams that its arrays name; it comes after what they hold when it is called, and before what comes later there.

    Nobody changes one: it is submitted again where the same is asked for again, so it has no arrays either, which are
    handed beside it. (It is not frozen, as it would be made four times as slowly.) ``plain``: one call on its stream,
    and nothing to wait for. ``graph``: that of all ranks which is launched for it. The last three are what others keep
    in it of earlier submissions: ``code`` the recorder, ``call`` and ``issued`` what puts it on a stream.
    """

    kind: str
    count: int
    dtype: DType
    send: int = 0
    recv: int = 0
    op: ReduceOp | PreMulSum | None = None
    root: int | None = None
    peer: int | None = None
    site: str = "?"
    stream: int = 0
    aside: bool = False
    waits: bool = False
    waits_for_ever: bool = False
    named: tuple[int, ...] = ()
    graph: Any = field(default=None, compare=False, repr=False)
    plain: bool = field(default=False, init=False, compare=False, repr=False)
    code: tuple[Any, float, bytes] = field(default=(None, 0.0, b""), init=False, compare=False, repr=False)
    call: Any = field(default=None, init=False, compare=False, repr=False)
    issued: Any = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        special = self.aside or self.waits or not self.dtype.native or isinstance(self.op, PreMulSum)
        self.plain = self.kind in _ONE_CALL and not special

    @property
    def rule(self) -> Rule:
        """Return the row of :data:`RULES`."""
        return RULES[self.kind]

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return self.count * self.dtype.itemsize


def check_op(op: ReduceOp | PreMulSum, dtype: DType) -> None:
    """Raise where an element type has no such reduction.

    Raises
    ------
    ValueError
        Truth values have "or" and "and" only, complex numbers what pairs of reals have; or a factor does not fit.
    """
    if dtype is DType.BOOL and op not in _BOOL_OPS:
        raise ValueError(f"op {op.label} is none of bool, which has sum and max (or), prod and min (and)")
    if dtype in (DType.COMPLEX64, DType.COMPLEX128) and not isinstance(op, PreMulSum) and op not in _PAIRS_OF_REALS:
        raise ValueError(f"op {op.label} is none of {dtype.label}, which has sum, avg and PreMulSum")
    if isinstance(op, PreMulSum) and "int" in dtype.label:
        signed = dtype.label.startswith("int")
        bits = 8 * dtype.itemsize - signed
        low, high = -(2**bits) if signed else 0, 2**bits - 1
        if not isinstance(op.factor, int) or not low <= op.factor <= high:
            raise ValueError(f"factor of PreMulSum must be of {dtype.label}, {low} to {high}; got {op.factor!r}")


def carried(operation: Operation) -> Operation:
    """Return an operation as planes move it: what NCCL has no type for goes as elements of one that it has.

    Reductions of 16-bit integers have no other type: they stay as they are.
    """
    dtype = operation.dtype
    if dtype.native or (operation.op is not None and dtype in _WHOLE):
        return operation
    carrier, parts = _CARRIERS[dtype]
    op = operation.op
    if dtype is DType.BOOL and isinstance(op, ReduceOp):
        op = _BOOL_OPS[op]
    return replace(operation, dtype=carrier, count=operation.count * parts, op=op)


def pairs_of(operation: Operation, rank: int, world_size: int) -> list[Operation]:
    """Return a gather, scatter or all_to_all as the sends and receives of one rank that move the same data."""
    rule, step, every = operation.rule, operation.nbytes, range(world_size)
    root = [peer for peer in every if peer == operation.root]
    senders, receivers = root if rule.from_root else every, root if rule.to_root else every
    send_step, recv_step = (step if blocks < 0 else 0 for blocks in (rule.send_blocks, rule.recv_blocks))
    pair = replace(operation, root=None)
    sends = [
        replace(pair, kind="send", send=pair.send + peer * send_step, peer=peer)
        for peer in (receivers if rank in senders else ())
    ]
    recvs = [
        replace(pair, kind="recv", recv=pair.recv + peer * recv_step, peer=peer)
        for peer in (senders if rank in receivers else ())
    ]
    return [*sends, *recvs]


def signature(operation: Operation, number: int) -> dict[str, Any]:
    """Return what other ranks compare (all keys but ``at``) and are told (``at``, the call site).

    A plane adds ``way`` where it does an operation in another way than its own usual one.
    """
    record = {
        "n": number,
        "kind": operation.kind,
        "count": operation.count,
        "dtype": operation.dtype.label,
        "op": operation.op.label if operation.op else None,
        "root": operation.root,
        "at": operation.site,
    }
    if operation.graph is not None:
        record["way"] = BY_GRAPH
    return record


def control_signature(kind: str, number: int, site: str) -> dict[str, Any]:
    """Return the signature of what ranks do together over the control plane: it moves no data and takes no number."""
    return {"n": number, "kind": kind, "count": 0, "dtype": "json", "op": None, "root": None, "at": site}


def graph_facts(operation: Operation) -> dict[str, Any]:
    """Return what ranks compare, beside the place, where they make a graph of an operation together."""
    facts = signature(operation, 0)
    return {**{name: facts[name] for name in ("count", "dtype", "op", "root")}, "way": operation.kind}


def describe(record: Mapping[str, Any]) -> str:
    """Return a signature as people read it: ``all_reduce #41 (float32 x 1024, sum) at train.py:33``."""
    rule = RULES.get(record["kind"])
    facts = record["dtype"] if rule is not None and rule.uneven else f"{record['dtype']} x {record['count']}"
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
    try:
        code, text = _NEAR[frame.f_lasti]
        if code is frame.f_code:
            return text
    except KeyError:
        pass
    return _outside(frame)


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
                    _NEAR.setdefault(frame.f_lasti, (frame.f_code, text))
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
    collectives = [name for name, rule in RULES.items() if not rule.paired and not rule.uneven]
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
        "op": _planned_op(plan["op"]) if rule.reduces else None,
        "root": plan.get("root"),
    }


def _planned_op(op: Any) -> str:
    """Return the name of an operator; the factor of a sum that multiplies first is each rank's own."""
    return PreMulSum.label if op == PreMulSum.label else parse_op(op).label


def _is_whole(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _known(what: str, found: Iterable[Any], allowed: Iterable[str]) -> None:
    allowed = tuple(allowed)
    for name in found:
        if name not in allowed:
            raise ValueError(f"{what} must be one of {', '.join(allowed)}; got {shown(name)}")
