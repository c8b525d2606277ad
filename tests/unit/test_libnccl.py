"""Declarations of NCCL's C interface, held against a real library."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from helpers.child import run_child
from helpers.libnccl_files import NcclFiles, real_library

from butter_mpi._libnccl import Library
from butter_mpi._nccl_types import FUNCTIONS, REQUIRED, UNIQUE_ID_BYTES, UniqueId

ASK = """
import json, sys
from butter_mpi._libnccl import Library
from butter_mpi.errors import NotSupportedError
library = Library(sys.argv[1])
said = [library.missing()]
try:
    library.function("ncclCommAbort")
except NotSupportedError as error:
    said.append([error.message, error.needs])
print(json.dumps(said))
"""


def test_unique_id_is_128_bytes_that_may_be_zero() -> None:
    """The structure has NCCL's size and keeps what follows a zero byte."""
    assert ctypes.sizeof(UniqueId) == UNIQUE_ID_BYTES == 128
    unique_id = UniqueId.from_buffer_copy(bytes(range(128)))
    assert bytes(unique_id) == bytes(range(128))


def test_what_every_release_has_is_required() -> None:
    """The 27 functions of NCCL 2.18 are required, later ones are not."""
    assert len(REQUIRED) == 27
    assert {"ncclGetVersion", "ncclCommAbort", "ncclCommInitRankConfig"} <= set(REQUIRED)
    assert "ncclMemAlloc" not in REQUIRED and "ncclMemAlloc" in FUNCTIONS


def test_missing_function_is_told_with_path_and_need(tmp_path: Path) -> None:
    """A library without a function says so by name, path and version: no AttributeError."""
    path = NcclFiles(real_library(), tmp_path).without_symbol("ncclCommAbort")
    missing, (message, needs) = run_child(ASK, path)
    assert missing == ["ncclCommAbort"]
    assert message.startswith(f"{path} (NCCL 2.") and message.endswith(
        ") has no ncclCommAbort: it needs NCCL 2.18 or newer"
    )
    assert needs == "NCCL 2.18"


def test_whole_library_misses_nothing(tmp_path: Path) -> None:
    """The unaltered copy has every required function."""
    assert run_child(ASK, NcclFiles(real_library(), tmp_path).copy()) == [[]]


def test_what_the_loader_refuses_is_an_os_error(tmp_path: Path) -> None:
    """The loader's own words are kept."""
    (tmp_path / "f").write_text("text")
    with pytest.raises(OSError, match="f: "):
        Library(str(tmp_path / "f"))
