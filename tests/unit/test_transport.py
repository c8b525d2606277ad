"""A required transport on planes on which it cannot be verified."""

from __future__ import annotations

import pytest

from butter_mpi.transport import judge_host


@pytest.mark.parametrize("plane", ["host", "solo"])
def test_required_transport_fails_closed_without_nccl(plane: str) -> None:
    """Where NCCL carries nothing, a required transport cannot be told, and that is an error."""
    finding = judge_host("NET/IB", plane)
    assert finding is not None
    assert (finding.outcome, finding.severity) == ("cannot tell", "error")
    assert "NET/IB" in finding.message and plane in finding.message and "require_transport" in finding.remedy


def test_nothing_required_is_nothing_to_tell() -> None:
    """Without a requirement there is no finding."""
    assert judge_host(None, "host") is None
