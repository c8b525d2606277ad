"""Programs of operations drawn at random, beside NumPy: rank 0 draws, every rank runs and compares the same one.

``BUTTER_MPI_TEST_PROPERTY_SECONDS`` goes on with fresh seeds for that long; a failure names its seed and the smallest
program that shows it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers.arrays import Array, Arrays
from helpers.memory import PLANE
from helpers.model import TYPES, check, contribution, factor, operators, raw, reduced
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from mpi4py import MPI

from butter_mpi import Communicator, DType, PreMulSum, ReduceOp

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(MPI.COMM_WORLD.size < 2, reason="needs 2 ranks")]

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
RANKS = range(SIZE)
SECONDS = float(os.environ.get("BUTTER_MPI_TEST_PROPERTY_SECONDS", "0"))
EXAMPLES = 120 // SIZE
NOT_REDUCED = [DType.INT16, DType.UINT16] if PLANE == "nccl" else []

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_v")
MOVES = ("broadcast", "all_gather", "gather", "scatter", "all_to_all", "all_gather_v", "gather_v", "scatter_v")
PAIRS = ("sendrecv", "pair")
KINDS = (*REDUCTIONS, *MOVES, "all_to_all_v", *PAIRS)
ROOTED = ("reduce", "broadcast", "gather", "scatter", "gather_v", "scatter_v")
SPREAD = ("reduce_scatter", "reduce_scatter_v", "scatter", "scatter_v")
GATHERED = ("all_gather", "all_gather_v", "gather", "gather_v")
SAME_PLACE = ("all_reduce", "reduce", "broadcast")
STREAMS = ("the plane's", "the array's", "another than the array's")


@dataclass(frozen=True)
class Call:
    """One call, the same on every rank; `counts` has a row for each rank, equal ones but for all_to_all_v."""

    kind: str
    dtype: DType
    op: str
    counts: tuple[tuple[int, ...], ...]
    root: int
    in_place: bool
    stream: str
    planned: bool

    @property
    def operator(self) -> ReduceOp | PreMulSum:
        """The operator, on this rank."""
        return PreMulSum(factor(RANK, self.dtype)) if self.op == PreMulSum.label else ReduceOp.parse(self.op)


Program = tuple[bool, tuple[Call, ...]]
"""Whether it is one group, and its calls."""


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Draw a call that every rank can make."""
    kind = draw(st.sampled_from(KINDS))
    some = st.integers(0, 9) | st.sampled_from([1000, 4097])
    if kind == "all_to_all_v":
        counts = tuple(draw(st.tuples(*[st.tuples(*[some] * SIZE)] * SIZE)))
    else:
        row = draw(st.tuples(*[some] * SIZE)) if kind.endswith("_v") else (draw(some),) * SIZE
        counts = (row,) * SIZE
    dtype = draw(st.sampled_from([one for one in DType if kind not in REDUCTIONS or one not in NOT_REDUCED]))
    op = draw(st.sampled_from([one.label for one in operators(dtype)])) if kind in REDUCTIONS else ""
    root, stream = draw(st.sampled_from(RANKS)), draw(st.sampled_from(STREAMS))
    return Call(kind, dtype, op, counts, root, draw(st.booleans()), stream, draw(st.booleans()))


def programs() -> st.SearchStrategy[Program]:
    """Draw a program."""
    return st.tuples(st.booleans(), st.lists(calls(), min_size=1, max_size=4).map(tuple))


# -- the model -------------------------------------------------------------------------------------------------------


def sent(call: Call, rank: int, number: int) -> Array | None:
    """Return what a rank gives to a call; ``None``: it gives nothing."""
    row, own = call.counts[rank], call.counts[rank][rank]
    if call.kind in REDUCTIONS:
        return contribution(rank, sum(row) if call.kind in SPREAD else row[0], call.dtype)
    if call.kind in ("scatter", "scatter_v", "broadcast", "pair") and rank != call.root:
        return None
    whole = call.kind in SPREAD or call.kind.startswith("all_to_all")
    return raw(rank + SIZE * number, sum(row) if whole else own, TYPES[call.dtype])


def wanted(call: Call, rank: int, number: int) -> Array | None:
    """Return what a rank gets of a call; ``None``: it gets nothing."""
    row = call.counts[rank]
    own = slice(sum(row[:rank]), sum(row[: rank + 1]))
    if call.kind in ("reduce", "gather", "gather_v") and rank != call.root:
        return None
    if call.kind in REDUCTIONS:
        total = reduced(sum(row) if call.kind in SPREAD else row[0], call.dtype, call.operator)
        return total[own] if call.kind in SPREAD else total
    every = [sent(call, r, number) for r in RANKS]
    if call.kind == "pair":
        return every[call.root] if rank == (call.root + 1) % SIZE else None
    if call.kind == "broadcast":
        return every[call.root]
    if call.kind == "sendrecv":
        return every[(rank - 1) % SIZE]
    whole = [one for one in every if one is not None]
    if call.kind in SPREAD:
        return whole[0][own]
    if call.kind in GATHERED:
        return np.concatenate(whole)
    starts = [sum(call.counts[source][:rank]) for source in RANKS]
    blocks = [whole[source][at : at + call.counts[source][rank]] for source, at in zip(RANKS, starts, strict=True)]
    return np.concatenate(blocks)


# -- running ---------------------------------------------------------------------------------------------------------


@dataclass
class Ready:
    """A call with its buffers: `whole` is looked at from `start` on, if anything is wanted."""

    submit: Callable[[], None]
    whole: Any
    start: int
    want: Array | None
    what: str


class Broken(BaseException):
    """A program has broken the communicator."""


class Runner:
    """Runs programs on one communicator, on every rank alike."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._arrays = {STREAMS[0]: Arrays(comm), STREAMS[1]: Arrays(comm, own_stream=True)}
        self._arrays[STREAMS[2]] = self._arrays[STREAMS[1]]

    def run(self, program: Program) -> list[str]:
        """Run a program; return what went wrong, equal on every rank.

        Raises
        ------
        Broken
            No other program can be run, not even a smaller one.
        """
        try:
            self._run(program)
            text = ""
        except Exception:
            text = f"rank {RANK}: {traceback.format_exc()}"
        said = WORLD.allgather((text, self._comm.sequence, self._comm.is_healthy()))
        wrong = [text for text, _, _ in said if text]
        numbers = {number for _, number, _ in said}
        wrong += [] if len(numbers) == 1 else [f"numbers differ: {numbers}"]
        if not all(healthy for _, _, healthy in said):
            raise Broken("\n".join([str(program), *wrong]))
        return wrong

    def _run(self, program: Program) -> None:
        grouped, drawn = program
        ready = [self._ready(call, number) for number, call in enumerate(drawn)]
        with self._comm.group() if grouped else contextlib.nullcontext():
            for one in ready:
                one.submit()
        for call, one in zip(drawn, ready, strict=True):
            if one.want is not None:
                got = self._arrays[call.stream].get(one.whole)
                check(got[one.start : one.start + one.want.size], one.want, one.what)

    def _ready(self, call: Call, number: int) -> Ready:
        """Make the buffers of a call, and the call."""
        make, give, want = self._arrays[call.stream], sent(call, RANK, number), wanted(call, RANK, number)
        row, start = call.counts[RANK], 0
        own_at = sum(row[:RANK])
        send = None if give is None else make(give)
        recv = None if want is None else make(np.zeros(want.size, TYPES[call.dtype]))
        whole = recv
        if call.kind == "broadcast":
            whole = send = recv if send is None else send
        elif call.in_place and call.kind in SAME_PLACE:
            whole = send
            recv = None
        elif call.in_place and call.kind in GATHERED and want is not None and give is not None:
            filled = np.zeros(want.size, TYPES[call.dtype])
            filled[own_at : own_at + give.size] = give
            whole = recv = make(filled)
            send = make.part(recv, own_at, give.size)
        elif call.in_place and call.kind in SPREAD and send is not None and want is not None:
            whole, start = send, own_at
            recv = make.part(send, own_at, want.size)
        return Ready(self._call(call, send, recv), whole, start, want, f"{call.kind} {call.dtype.label} {call.op}")

    def _call(self, call: Call, send: Any, recv: Any) -> Callable[[], None]:
        """Return what submits a call."""
        kind, more = call.kind, dict[str, Any]()
        following, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
        if kind == "pair":
            if RANK not in (call.root, (call.root + 1) % SIZE):
                return lambda: None
            kind, arguments = ("send", [send, following]) if call.root == RANK else ("recv", [recv, before])
        elif kind == "sendrecv":
            arguments = [send, following, recv, before]
        elif kind == "broadcast":
            arguments = [send, call.root]
        else:
            arguments = [send, recv, *self._counts(call), *([call.root] if kind in ROOTED else [])]
        if kind in REDUCTIONS:
            more["op"] = call.operator
        if call.stream == STREAMS[2]:
            more["stream"] = self._arrays[STREAMS[0]].stream
        if call.planned:
            return getattr(self._comm, f"plan_{kind}")(*arguments, **more)
        return partial(getattr(self._comm, kind), *arguments, **more)

    def _counts(self, call: Call) -> Sequence[Sequence[int] | None]:
        if call.kind == "all_to_all_v":
            return call.counts[RANK], [row[RANK] for row in call.counts]
        if call.kind in ("gather_v", "scatter_v"):
            return (call.counts[RANK] if call.root == RANK else None,)
        return (call.counts[RANK],) if call.kind.endswith("_v") else ()


def seeds() -> Iterator[int]:
    """Yield a seed that is always the same, then fresh ones as long as that was asked for."""
    yield 0
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        yield random.SystemRandom().getrandbits(32)


def examples(number: int, run: Callable[[Program], list[str]]) -> None:
    """Draw programs from a seed and run them; raises for the smallest one that goes wrong."""

    @seed(number)
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(program=programs())
    def each(program: Program) -> None:
        wrong = run(program)
        assert not wrong, f"seed {number}: {program}\n" + "\n".join(wrong)

    each()


def told(failure: str) -> None:
    """Fail with what rank 0 found."""
    if failure:
        pytest.fail(failure, pytrace=False)


def test_random_programs(comm: Communicator) -> None:
    """Whatever is asked for in whatever order, way and place: every rank has what NumPy says."""
    runner = Runner(comm)
    if RANK:
        with contextlib.suppress(Broken):
            while (program := WORLD.bcast(None)) is not None:
                runner.run(program)
        told(WORLD.bcast(None))
        return
    failure = ""
    try:
        for number in seeds():
            examples(number, lambda program: runner.run(WORLD.bcast(program)))
        WORLD.bcast(None)
    except Broken as error:
        failure = str(error)
    except Exception as error:
        failure = str(error)
        WORLD.bcast(None)
    told(WORLD.bcast(failure))


def test_model_covers_every_operation() -> None:
    """Every operation of a communicator on arrays is drawn."""
    planned = {name.removeprefix("plan_") for name in dir(Communicator) if name.startswith("plan_")}
    assert planned - {"barrier"} == {*KINDS, "send", "recv"} - {"pair"}
    assert len(list(itertools.islice(seeds(), 1))) == 1
