"""One throw-away Slurm for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.slurm import Slurm, throw_away_slurm


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A Slurm of two nodes with four CPUs each."""
    with throw_away_slurm() as started:
        yield started
