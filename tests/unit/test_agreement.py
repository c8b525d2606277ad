"""The one outcome that all ranks of a test have."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from butter_mpi import agreement, control
from butter_mpi.agreement import FAILED, PASSED, SKIPPED, XFAILED, XPASSED, Rounds, judge

ALL = (PASSED, FAILED, SKIPPED, XFAILED, XPASSED)


@pytest.mark.parametrize("outcome", ALL)
def test_what_all_ranks_have_stays(outcome: str) -> None:
    """Where every rank has one outcome, it is the outcome."""
    assert judge([outcome] * 3) == outcome


@pytest.mark.parametrize("pair", list(itertools.combinations(ALL, 2)), ids="-".join)
def test_a_mixture_is_a_failure_on_all(pair: tuple[str, str]) -> None:
    """Two outcomes in one test are a failure, in any order, except an expected one that came on some ranks only."""
    expected = XFAILED if set(pair) == {XFAILED, XPASSED} else FAILED
    assert judge(pair) == judge(reversed(pair)) == expected


class _Request:
    """A request of an MPI in which nothing ever arrives."""

    def __init__(self, done: bool) -> None:
        self.done = done

    def Test(self) -> bool:  # noqa: N802
        return self.done


class _World:
    """A communicator of three; it duplicates itself at once or never, and the message of rank 1 never ends."""

    rank, size = 0, 3

    def __init__(self, duplicates: bool) -> None:
        self._duplicates = duplicates

    def Idup(self) -> Any:  # noqa: N802
        return self, _Request(self._duplicates)

    def Isend(self, _what: Any, dest: int, tag: int) -> _Request:  # noqa: N802
        return _Request(False)

    def Improbe(self, source: int, tag: int, status: Any) -> Any:  # noqa: N802
        return SimpleNamespace(Irecv=lambda what: _Request(False)) if source == 1 else None


@pytest.mark.parametrize(("duplicates", "kept"), [(False, 1), (True, 4)])
def test_round_that_is_given_up_keeps_its_requests(
    duplicates: bool, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request under way (the duplication, two sends, a receive) is kept by itself, and is asked at the end."""
    calls: list[tuple[Any, ...]] = []

    def keep(*what: Any) -> None:
        calls.append(what)
        control.keep_for_ever(*what)

    monkeypatch.setattr(agreement, "keep_for_ever", keep)
    mpi = SimpleNamespace(BYTE=None, Status=lambda: SimpleNamespace(Get_count=lambda kind: 5))

    def look(said: dict[int, Any], waited: float) -> None:
        looks.append(said)
        if len(looks) == 3:
            raise TimeoutError

    looks: list[dict[int, Any]] = []
    with pytest.raises(TimeoutError):
        Rounds(_World(duplicates), mpi).hold({}, look)
    assert len(calls) == kept and all(isinstance(request, _Request) and buffers for request, *buffers in calls)
    assert control.unfinished()
    for request, *_ in calls:
        request.done = True
    assert not control.unfinished()
