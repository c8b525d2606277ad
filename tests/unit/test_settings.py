"""Settings from arguments, variables and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from butter_mpi.settings import FaultPolicy, Settings


def test_arguments_win_over_variables_and_those_over_defaults() -> None:
    """An argument wins over its variable, a variable over the default; an empty variable is none."""
    env = {"BUTTER_MPI_PLANE": "host", "BUTTER_MPI_START_DEADLINE": "5", "BUTTER_MPI_SHARE_GPU": ""}
    assert Settings.resolve(env) == Settings(plane="host", start_deadline=5.0)
    assert Settings.resolve(env, plane="auto", share_gpu=True) == Settings(start_deadline=5.0, share_gpu=True)
    assert Settings.resolve(env, FaultPolicy(start_deadline=7), plane=None).start_deadline == 7


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"BUTTER_MPI_PLANE": "gpu"}, "BUTTER_MPI_PLANE must be one of auto, nccl, host; got 'gpu'"),
        (
            {"BUTTER_MPI_PLAIN": "host"},
            r"BUTTER_MPI_PLAIN is not a variable of butter_mpi \(did you mean BUTTER_MPI_PLANE\?\); known are BUTTER",
        ),
        ({"BUTTER_MPI_QQQ": "1"}, "BUTTER_MPI_QQQ is not a variable of butter_mpi; known are BUTTER_MPI_ACTION"),
        ({"BUTTER_MPI_START_DEADLINE": "soon"}, "must be a number of seconds from 1 to 3600; got 'soon'"),
        ({"BUTTER_MPI_START_DEADLINE": "nan"}, "must be a number of seconds from 1 to 3600; got 'nan'"),
        ({"BUTTER_MPI_COLLECTIVE_DEADLINE": "301"}, "must be a number of seconds from 10 to 300; got '301'"),
        (
            {"BUTTER_MPI_SHARE_GPU": "perhaps"},
            "BUTTER_MPI_SHARE_GPU must be one of 1, true, yes, on, 0, false, no, off",
        ),
        ({"BUTTER_MPI_REQUIRE_TRANSPORT": "TCP"}, "must be one of P2P, SHM, NET/IB, NET/Socket; got 'TCP'"),
        ({"BUTTER_MPI_WATCH": "host"}, "must be one of on, debugger, node, off; got 'host'"),
        ({"BUTTER_MPI_WATCH_INTERFACE": "eth0, ib0"}, "must name network interfaces, with commas"),
        ({"BUTTER_MPI_WATCH_INTERFACE": "eth0|"}, r"or bars between names of one network on different hosts \(eth0,"),
        ({"BUTTER_MPI_WATCH_INTERFACE": "/dev/net"}, "BUTTER_MPI_WATCH_INTERFACE must name network interfaces"),
        ({"BUTTER_MPI_ACTION": "shrug"}, "BUTTER_MPI_ACTION must be one of raise, abort, shrink; got 'shrug'"),
        ({"BUTTER_MPI_START_DEADLINE": "9" * 5000}, r"9\.\.\. \(5002 characters\)$"),
    ],
)
def test_malformed_variables_are_told_with_what_is_allowed(env: dict[str, str], message: str) -> None:
    """A malformed or unknown variable is refused by name, with the allowed values."""
    with pytest.raises(ValueError, match=message):
        Settings.resolve(env)


def test_malformed_variable_is_told_although_an_argument_wins() -> None:
    """A variable over which an argument wins is checked all the same."""
    env = {"BUTTER_MPI_PLANE": "gpu", "BUTTER_MPI_START_DEADLINE": "soon"}
    with pytest.raises(ValueError, match="BUTTER_MPI_PLANE must be one of"):
        Settings.resolve(env, plane="host")
    del env["BUTTER_MPI_PLANE"]
    with pytest.raises(ValueError, match="BUTTER_MPI_START_DEADLINE must be a number"):
        Settings.resolve(env, FaultPolicy())


@pytest.mark.parametrize("fault", [[], 3, "abort", {"action": "abort"}, FaultPolicy])
def test_fault_must_be_a_policy(fault: object) -> None:
    """Anything but a policy is refused by the argument's name."""
    with pytest.raises(TypeError, match=r"^fault must be a FaultPolicy; got "):
        Settings.resolve({}, fault)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [10**400, -(10**5000)], ids=["400 digits", "5000 digits"])
def test_number_that_no_float_can_hold_is_out_of_range(value: int) -> None:
    """A huge integer is refused like any other number out of the range."""
    with pytest.raises(ValueError, match=r"^start_deadline must be a number of seconds from 1 to 3600; got "):
        FaultPolicy(start_deadline=value)


def test_test_variables_are_free() -> None:
    """Variables of the project's own tests are not taken for misspelt settings."""
    assert Settings.resolve({"BUTTER_MPI_TEST_NCCL": "x"}) == Settings()


@pytest.mark.parametrize("name", ["verdict_file", "recorder_file"])
def test_file_of_the_watcher_is_a_path_and_needs_it(name: str, tmp_path: Path) -> None:
    """Whatever is a path names the file; without a watcher nobody would write it."""

    def resolved(value: Any, env: Mapping[str, str]) -> Settings:
        arguments: dict[str, Any] = {name: value}
        return Settings.resolve(env, **arguments)

    assert getattr(resolved(tmp_path / "v", {}), name) == str(tmp_path / "v")
    for wrong in (3, b"v", "a\0b"):
        with pytest.raises(ValueError, match=f"{name} must be a path"):
            resolved(wrong, {})
    with pytest.raises(ValueError, match=f"{name} needs the watcher"):
        resolved("v", {"BUTTER_MPI_WATCH": "off"})


def test_names_of_interfaces_are_as_long_as_the_kernel_allows() -> None:
    """Each of them, however many there are."""
    long = "enp129s0f0np0|enp65s0f1np1,ibp129s0|ibp65s0"
    assert Settings.resolve({"BUTTER_MPI_WATCH_INTERFACE": long}).watch_interface == long


def test_what_is_not_given_is_none() -> None:
    """A setting that nobody gave, or gave empty, is one value in every receipt: nothing."""
    assert "" not in asdict(Settings()).values()
    env = {"BUTTER_MPI_VERDICT_FILE": "", "BUTTER_MPI_RECORDER_FILE": ""}
    assert Settings.resolve(env, verdict_file="", recorder_file="") == Settings()
