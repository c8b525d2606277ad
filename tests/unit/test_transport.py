"""A required transport: its names, and planes on which it cannot be verified."""

from __future__ import annotations

import pytest

from butter_mpi.settings import TRANSPORTS
from butter_mpi.transport import judge_host, parse_transport


@pytest.mark.parametrize("name", TRANSPORTS)
def test_known_transports_are_accepted(name: str) -> None:
    """Every transport that a setting may have is known here."""
    assert parse_transport(name) == name


@pytest.mark.parametrize("name", ["IB", "net/ib", "", "NET"])
def test_another_name_is_refused_with_the_allowed_ones(name: str) -> None:
    """There is one spelling; the error lists it."""
    with pytest.raises(ValueError, match=r"transport must be one of P2P, SHM, NET/IB, NET/Socket; got"):
        parse_transport(name)


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
