"""What is set for NCCL where nobody has set it."""

from __future__ import annotations

import pytest

from butter_mpi import nccl_setup

CHANNELS = {"NCCL_MAX_NCHANNELS": "4", "NCCL_MAX_P2P_NCHANNELS": "4"}
CONNECT = {"NCCL_RUNTIME_CONNECT": "0"}


def chosen(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], *, version: int = 23203, **options: object
) -> dict[str, str]:
    """Return what a process with `env` gets; what is returned is what was set."""
    was_set: dict[str, str] = {}
    monkeypatch.setattr(nccl_setup, "c_environment", lambda: env)
    monkeypatch.setattr(nccl_setup, "set_own", was_set.__setitem__)
    monkeypatch.setattr("socket.gethostname", lambda: "n01")
    found = nccl_setup.prepare(version, 3, **{"share_gpu": False, "required": None, **options})  # type: ignore[arg-type]
    assert found == was_set
    return found


def test_a_gpu_each_needs_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that connections are made at the start."""
    assert chosen(monkeypatch, {}) == CONNECT


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({}, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
        ({"required": "P2P"}, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
        ({"required": "NET/Socket"}, {"NCCL_HOSTID": "n01-3"}),
        ({"version": 22809}, {"NCCL_HOSTID": "n01-3"}),
    ],
)
def test_how_ranks_share(monkeypatch: pytest.MonkeyPatch, options: dict[str, object], how: dict[str, str]) -> None:
    """By NCCL's own way where it has one and the network was not asked for, else as hosts; with few channels always."""
    assert chosen(monkeypatch, {}, share_gpu=True, **options) == CONNECT | CHANNELS | how  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE"])
def test_whoever_shares_in_his_own_way_gets_few_channels_too(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """Else kernels that wait for one another need more of the GPU than it has, and hang."""
    assert chosen(monkeypatch, {given: "1"}, share_gpu=True) == CONNECT | CHANNELS


def test_what_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variable by itself."""
    env = {"NCCL_MAX_NCHANNELS": "8", "NCCL_RUNTIME_CONNECT": "1", "NCCL_HOSTID": "a"}
    assert chosen(monkeypatch, env, share_gpu=True) == {"NCCL_MAX_P2P_NCHANNELS": "4"}
