"""The policy: two variables that bound how long NCCL waits for a lost RoCE peer.

With NCCL's defaults a lost peer was not reported within 5 s; with these values it is ``ncclRemoteError`` after about
half a second. They are required whatever transport is expected: a fallback that nobody meant must not weaken the bound.
"""

from __future__ import annotations

from collections.abc import Mapping

from butter_mpi.environment import SYSTEM_FILE, c_environment, effective_nccl, set_c
from butter_mpi.findings import quoted

__all__ = ["POLICY", "RANGES", "check_policy", "policy_values", "set_unset_policy"]

POLICY: Mapping[str, str] = {"NCCL_IB_TIMEOUT": "10", "NCCL_IB_RETRY_CNT": "1"}
"""The required value of each variable."""

RANGES: Mapping[str, tuple[int, int]] = {"NCCL_IB_TIMEOUT": (0, 31), "NCCL_IB_RETRY_CNT": (0, 7)}
"""What NCCL itself takes."""


def policy_values(env: Mapping[str, str]) -> dict[str, str | None]:
    """Return the value of each policy variable.

    Parameters
    ----------
    env : mapping of str to str
        The C environment.

    Returns
    -------
    dict of str to (str or None)
        ``None``: unset.
    """
    return {name: env.get(name) for name in POLICY}


def _problem(name: str, value: str | None, source: str | None) -> str:
    if value is None:
        return f"unset (set only in {source}, which is no environment)" if source else "unset"
    low, high = RANGES[name]
    if not (value.isascii() and value.isdigit() and low <= int(value) <= high):
        return f"{quoted(value)} (malformed: NCCL takes a whole number from {low} to {high})"
    return quoted(value)


def check_policy(env: Mapping[str, str], system_file: str = SYSTEM_FILE) -> dict[str, str]:
    """Return what is wrong with each policy variable.

    Parameters
    ----------
    env : mapping of str to str
        The C environment.
    system_file : str, default "/etc/nccl.conf"
        The configuration file that NCCL always reads; a value that only a file gives does not count.

    Returns
    -------
    dict of str to str
        By name, what was found instead of the required value; empty when the policy is met.
    """
    effective = effective_nccl(env, system_file)
    found = {}
    for name, value in policy_values(env).items():
        if value != POLICY[name]:
            found[name] = _problem(name, value, effective[name][1] if name in effective else None)
    return found


def set_unset_policy() -> dict[str, str]:
    """Set each unset policy variable in this process; only before any library that reads it is loaded.

    Returns
    -------
    dict of str to str
        What was set; a variable that has another value is left alone, and preflight refuses it.
    """
    present = c_environment()
    missing = {name: value for name, value in POLICY.items() if name not in present}
    for name, value in missing.items():
        set_c(name, value)
    return missing
