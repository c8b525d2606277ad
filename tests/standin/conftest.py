"""The build that most tests here run on."""

from __future__ import annotations

import pytest
from helpers.standin import Standin, build


@pytest.fixture(scope="session")
def standin() -> Standin:
    """Return the plain build."""
    return build()
