"""Checked NCCL calls, on copies of the real library that return what they are told to."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.child import run_child
from helpers.libnccl_files import NcclFiles, real_library

from butter_mpi.nccl import RESULTS, version_text

ASK = """
import json, sys
from butter_mpi import nccl
from butter_mpi._libnccl import Library
from butter_mpi.errors import ButterError, NCCLError
library = Library(sys.argv[1])
try:
    said = nccl.require(library) if sys.argv[2] == "require" else nccl.get_unique_id(library).hex()
    print(json.dumps(said))
except NCCLError as error:
    print(json.dumps([error.call, error.result, error.message, error.detail]))
except ButterError as error:
    print(json.dumps([type(error).__name__, error.message]))
"""


@pytest.fixture
def files(tmp_path: Path) -> NcclFiles:
    """Altered copies of the real library."""
    return NcclFiles(real_library(), tmp_path)


@pytest.mark.parametrize(
    ("version", "text"), [(23203, "2.32.3"), (21800, "2.18.0"), (22809, "2.28.9"), (2804, "2.8.4"), (30001, "3.0.1")]
)
def test_version_has_a_dotted_form(version: int, text: str) -> None:
    """Both of NCCL's ways to pack a version are read."""
    assert version_text(version) == text


def test_version_is_what_the_library_says(files: NcclFiles) -> None:
    """Whatever the environment claims, the integer of the loaded library counts."""
    assert run_child(ASK, files.with_version(22809), "require", env={"NCCL_VERSION": "2.15.5-1"}) == 22809


def test_library_older_than_supported_is_refused(files: NcclFiles) -> None:
    """The error names the file, its version and the oldest that works."""
    path = files.with_version(21799)
    kind, message = run_child(ASK, path, "require")
    assert kind == "NotSupportedError"
    assert message.startswith(f"{path} is NCCL 2.17.99 (21799); ") and "NCCL 2.18.0 or newer" in message


def test_library_without_a_required_function_is_refused(files: NcclFiles) -> None:
    """The error names the file and the function."""
    path = files.without_symbol("ncclCommInitRankConfig")
    kind, message = run_child(ASK, path, "require")
    assert kind == "NotSupportedError" and message.startswith(f"{path} has no ncclCommInitRankConfig; ")


def test_unique_id_is_fresh_and_whole(files: NcclFiles) -> None:
    """The real call gives 128 bytes, and others each time."""
    path = files.copy()
    one, two = (run_child(ASK, path, "unique_id") for _ in range(2))
    assert len(one) == len(two) == 256 and one != two


@pytest.mark.parametrize("result", [1, 5, 7, 8])
def test_known_result_is_an_error_with_name_number_and_text(files: NcclFiles, result: int) -> None:
    """Whatever is not success raises, "in progress" and the newest code too."""
    call, number, message, _ = run_child(ASK, files.with_unique_id_result(result), "unique_id")
    assert (call, number) == ("ncclGetUniqueId", result)
    assert message.startswith(f"ncclGetUniqueId failed with {RESULTS[result]} ({result}): ")


@pytest.mark.parametrize("result", [9, 99])
def test_unknown_result_is_an_error_with_its_number(files: NcclFiles, result: int) -> None:
    """A code of a release to come is never success."""
    call, number, message, _ = run_child(ASK, files.with_unique_id_result(result), "unique_id")
    assert (call, number) == ("ncclGetUniqueId", result)
    assert message == f"ncclGetUniqueId failed with result {result}, which NCCL 2.18 to 2.32 does not define"


def test_nccls_own_words_are_kept(files: NcclFiles) -> None:
    """A real failure carries the library's last error text."""
    env = {"NCCL_SOCKET_IFNAME": "nosuchinterface"}
    _, number, message, detail = run_child(ASK, files.copy(), "unique_id", env=env)
    assert number in RESULTS and number != 0
    assert detail and message.endswith(f"; NCCL says: {detail}")
