"""Variables that NCCL reads once, set before it does: when it connects, and how ranks may share a GPU."""

from __future__ import annotations

import functools
import socket

from butter_mpi.environment import c_environment, set_own

__all__ = ["connects_late", "prepare"]

_CONNECT = "NCCL_RUNTIME_CONNECT"
_SHARES_BY_P2P = 23000
_CHANNELS_OF_A_SHARED_GPU = "4"


def prepare(version: int, rank: int, *, share_gpu: bool, required: str | None) -> dict[str, str]:
    """Set what this process needs in the C environment, where nobody has set it.

    Parameters
    ----------
    version : int
        What ``ncclGetVersion`` returns.
    rank : int
        This rank.
    share_gpu : bool
        Whether ranks may share a GPU. NCCL allows that from 2.30 on; to an older one, or over the network, each rank
        is a host of its own.
    required : str or None
        The transport that was asked for.

    Returns
    -------
    dict of str to str
        What was set.
    """
    # Connections are made at the start, within its deadline, instead of inside the first operation.
    wanted = {_CONNECT: "0"}
    env = c_environment()
    if share_gpu:
        # The kernels of all ranks wait for one another, so all of them must fit on the GPU at once: else they hang.
        wanted |= dict.fromkeys(("NCCL_MAX_NCHANNELS", "NCCL_MAX_P2P_NCHANNELS"), _CHANNELS_OF_A_SHARED_GPU)
        if "NCCL_HOSTID" not in env and "NCCL_MULTI_RANK_GPU_ENABLE" not in env:
            over_network = version < _SHARES_BY_P2P or (required or "").startswith("NET/")
            own_host = {"NCCL_HOSTID": f"{socket.gethostname()}-{rank}"}
            wanted |= own_host if over_network else {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    chosen = {name: value for name, value in wanted.items() if name not in env}
    for name, value in chosen.items():
        set_own(name, value)
    return chosen


@functools.cache
def connects_late() -> bool:
    """Return whether operations may make connections; asked after :func:`prepare`.

    Returns
    -------
    bool
        True where the user has set something else than 0. As NCCL reads the variable once a process, so does this.
    """
    return c_environment().get(_CONNECT) != "0"
