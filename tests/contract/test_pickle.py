"""Errors travel between processes whole: class, message, every fact, notes."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from butter_mpi import errors
from butter_mpi.findings import Finding, PreflightReport

CLASSES = [getattr(errors, name) for name in errors.__all__]

REPORT = PreflightReport(
    2,
    "host",
    (
        Finding(
            "policy", "differ", "error", '"10" on rank 0, unset on rank 1', "mpirun -x NCCL_IB_TIMEOUT=10 ...", (1,)
        ),
    ),
)

FACTS: dict[str, Any] = {
    "call": "ncclCommAbort",
    "code": 100,
    "detail": "a text",
    "elapsed": 1.5,
    "found": ("SHM", "P2P"),
    "lost_ranks": (1, 3),
    "needs": "NCCL 2.18",
    "operation": "all_reduce",
    "path": "/a/file",
    "phase": "collective",
    "records": {0: "all_reduce #1", 1: "barrier #1"},
    "report": REPORT,
    "required": "NET/IB",
    "result": 99,
    "sequence": 41,
    "tried": ("one place", "another"),
}


def pickled(protocol: int, value: Any) -> Any:
    """Return what comes out of a pickle."""
    return pickle.loads(pickle.dumps(value, protocol))


WAYS: dict[str, Callable[[Any], Any]] = {
    **{f"pickle-{protocol}": functools.partial(pickled, protocol) for protocol in range(2, 6)},
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", CLASSES, ids=[cls.__name__ for cls in CLASSES])
def test_an_error_keeps_everything(cls: type[errors.ButterError], way: str) -> None:
    """Class, text, each fact and each note of an error are equal after the journey."""
    error = cls("rank 3/8: what happened\n  detail", **{name: FACTS[name] for name in cls.FACTS})
    error.add_note("and then closing failed too")
    back = WAYS[way](error)
    assert type(back) is cls
    assert back is not error
    assert str(back) == str(error) == "rank 3/8: what happened\n  detail"
    assert back.message == error.message
    assert back.args == error.args
    assert {name: getattr(back, name) for name in cls.FACTS} == {name: FACTS[name] for name in cls.FACTS}
    assert back.__notes__ == ["and then closing failed too"]


def test_every_fact_is_tried_here() -> None:
    """The facts above are exactly those that the classes declare, so that none goes untested."""
    assert {name for cls in CLASSES for name in cls.FACTS} == set(FACTS)


@pytest.mark.parametrize("cls", CLASSES, ids=[cls.__name__ for cls in CLASSES])
def test_facts_have_defaults_and_unknown_ones_are_refused(cls: type[errors.ButterError]) -> None:
    """Every fact is an attribute also when it is not given; a fact that a class does not have is a TypeError."""
    error = cls("what happened")
    assert all(getattr(error, name) == value for name, value in cls.FACTS.items())
    with pytest.raises(TypeError, match=f"{cls.__name__} has no fact colour"):
        cls("what happened", colour="red")


def test_a_copy_does_not_share_notes() -> None:
    """A note on a copy stays on the copy."""
    error = errors.ButterError("what happened")
    error.add_note("one")
    copy.deepcopy(error).add_note("two")
    assert error.__notes__ == ["one"]


@pytest.mark.parametrize("way", WAYS)
def test_a_report_keeps_everything(way: str) -> None:
    """A PreflightReport and its findings are equal after the journey, and say the same."""
    back = WAYS[way](REPORT)
    assert back == REPORT
    assert back.text() == REPORT.text()
    assert back.to_json() == REPORT.to_json()
