"""Communicators that come and go leave nothing: descriptors, threads, shared memory, memory of host and device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.mpirun import run_job
from helpers.standin import build

PROGRAM = str(Path(__file__).with_name("rounds.py"))
ROUNDS = 32
"""Eight of each end; ``rounds.py --rounds 200`` is run by hand."""
RSS_KIB = 4096
"""What may come by other means than rounds, which leave less than 10 KiB each; a staging buffer has megabytes."""


@pytest.mark.parametrize("plane", ["host", "nccl"])
def test_nothing_grows(plane: str) -> None:
    """Closed, aborted, dropped, or broken and closed: after many communicators a process has what it had after few."""
    env = build().env(NCCL_IB_TIMEOUT="10", NCCL_IB_RETRY_CNT="1") if plane == "nccl" else {}
    result = run_job(2, [PROGRAM, "--plane", plane, "--rounds", str(ROUNDS)], timeout=120, env=env)
    assert result.rc == 0, result.text
    found = json.loads(result.rank_out[0])
    assert found["plane"] == plane and len(found["ranks"]) == 2, result.text
    for rank in found["ranks"]:
        grown = {name: rank["last"][name] - rank["first"][name] for name in rank["first"]}
        assert grown.pop("rss_kib") < RSS_KIB, found
        assert set(grown.values()) == {0}, found
