"""What the selftest's runner makes of what a check yields."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from butter_mpi.errors import CUDAError
from butter_mpi.selftest.runner import _few


def ending(error: Exception) -> Iterator[str]:
    """Yield seven facts, and then fail."""
    yield from "abcdefg"
    raise error


@pytest.mark.parametrize("error", [MemoryError("lack"), CUDAError("lack", call="cuMemAlloc", code=2)])
def test_lack_of_memory_comes_before_the_other_facts(error: Exception) -> None:
    """Memory that a check cannot have, on the host or the device, is its first fact; those before it are not lost."""
    assert _few(ending(error)) == ["ended early, no memory: lack", *"abcde", "and 2 more"]


def test_other_errors_of_the_driver_are_none_of_a_check() -> None:
    """What is no lack of memory goes on to who can tell what it means."""
    with pytest.raises(CUDAError, match="illegal"):
        _few(ending(CUDAError("illegal address", call="cuMemcpyAsync", code=700)))
