"""The transport that a job requires, and what can be told of it before NCCL has chosen one."""

from __future__ import annotations

from butter_mpi.findings import Finding

__all__ = ["judge_host"]


def judge_host(required: str | None, plane: str) -> Finding | None:
    """Return the finding about a required transport on a plane that has no NCCL.

    Parameters
    ----------
    required : str or None
        What was asked for.
    plane : {"host", "solo"}
        The data plane.

    Returns
    -------
    Finding or None
        Nothing where nothing is required; else an error, because a transport that nothing chose cannot be verified.
    """
    if required is None:
        return None
    why = "there is one rank and no transport" if plane == "solo" else "MPI carries the data"
    return Finding(
        "transport",
        "cannot tell",
        "error",
        f"transport {required} is required, and cannot be verified on plane {plane}: {why}",
        'run on GPUs with plane "nccl", or leave require_transport (BUTTER_MPI_REQUIRE_TRANSPORT) out',
    )
