"""The policy variables: required values in the C environment, and nothing else counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.child import run_child

from butter_mpi.policy import POLICY, check_policy, policy_values

GOOD = dict(POLICY)

SET_UNSET = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None)
for name, value in json.loads(sys.argv[1]).items():
    libc.setenv(name.encode(), value.encode(), 1)
from butter_mpi.environment import c_environment
from butter_mpi.policy import policy_values, set_unset_policy
print(json.dumps([set_unset_policy(), policy_values(c_environment())]))
"""


def test_policy_is_what_the_contract_says() -> None:
    """The two values that bound a lost RoCE peer."""
    assert GOOD == {"NCCL_IB_TIMEOUT": "10", "NCCL_IB_RETRY_CNT": "1"}


def test_met_policy_has_no_fault(tmp_path: Path) -> None:
    """The required values are accepted, whatever else is set."""
    assert check_policy({**GOOD, "NCCL_PROTO": "LL"}, str(tmp_path / "none")) == {}


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("NCCL_IB_TIMEOUT", None, "unset"),
        ("NCCL_IB_TIMEOUT", "22", '"22"'),
        ("NCCL_IB_TIMEOUT", "", '"" (malformed: NCCL takes a whole number from 0 to 31)'),
        ("NCCL_IB_TIMEOUT", "abc", '"abc" (malformed: NCCL takes a whole number from 0 to 31)'),
        ("NCCL_IB_TIMEOUT", "012", '"012"'),
        ("NCCL_IB_TIMEOUT", "32", '"32" (malformed: NCCL takes a whole number from 0 to 31)'),
        ("NCCL_IB_RETRY_CNT", "7", '"7"'),
        ("NCCL_IB_RETRY_CNT", "8", '"8" (malformed: NCCL takes a whole number from 0 to 7)'),
        ("NCCL_IB_RETRY_CNT", " 1", '" 1" (malformed: NCCL takes a whole number from 0 to 7)'),
    ],
)
def test_any_other_value_is_a_fault(tmp_path: Path, name: str, value: str | None, found: str) -> None:
    """Unset, different and malformed values are told as found, the last with what is allowed."""
    env = {k: v for k, v in {**GOOD, name: value}.items() if v is not None}
    assert check_policy(env, str(tmp_path / "none")) == {name: found}


def test_value_that_only_a_file_gives_does_not_count(tmp_path: Path) -> None:
    """A configuration file is no environment: the fault names it."""
    path = tmp_path / "nccl.conf"
    path.write_text("NCCL_IB_TIMEOUT=10\nNCCL_IB_RETRY_CNT=1\n")
    faults = check_policy({"NCCL_CONF_FILE": str(path)}, str(tmp_path / "none"))
    assert faults == dict.fromkeys(POLICY, f"unset (set only in {path}, which is no environment)")


def test_unset_variables_are_set_and_told() -> None:
    """What is missing is put into the C environment, and only that is told."""
    set_here, values = run_child(SET_UNSET, '{"NCCL_IB_TIMEOUT": "10"}')
    assert set_here == {"NCCL_IB_RETRY_CNT": "1"}
    assert values == GOOD


def test_a_different_value_is_left_alone() -> None:
    """A value that somebody set, in C only or empty, is not replaced."""
    set_here, values = run_child(SET_UNSET, '{"NCCL_IB_TIMEOUT": "22", "NCCL_IB_RETRY_CNT": ""}')
    assert set_here == {}
    assert values == {"NCCL_IB_TIMEOUT": "22", "NCCL_IB_RETRY_CNT": ""}


def test_values_are_those_of_the_given_environment() -> None:
    """An unset variable is ``None``, not an empty text."""
    assert policy_values({"NCCL_IB_TIMEOUT": ""}) == {"NCCL_IB_TIMEOUT": "", "NCCL_IB_RETRY_CNT": None}
