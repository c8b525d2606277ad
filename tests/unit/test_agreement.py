"""The one outcome that all ranks of a test have."""

from __future__ import annotations

import itertools

import pytest

from butter_mpi.agreement import FAILED, PASSED, SKIPPED, XFAILED, XPASSED, judge

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
