"""Which library is used, what is checked before it is opened, and what is hashed."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from helpers.child import run_child
from helpers.libnccl_files import NcclFiles, real_library

from butter_mpi.errors import LibraryNotFoundError
from butter_mpi.library import check_expected, check_file, find_library

DESCRIBE = """
import ctypes, json, os, sys
from butter_mpi import library
from butter_mpi.environment import c_environment
from butter_mpi.errors import ButterError
for path in sys.argv[1:]:
    ctypes.CDLL(path)
try:
    print(json.dumps(library.describe(c_environment())))
except ButterError as error:
    print(json.dumps([type(error).__name__, error.message, list(getattr(error, "tried", ()))]))
"""

HASHES = """
import builtins, hashlib, json, os, sys
from butter_mpi import library
calls = []
real = hashlib.file_digest
hashlib.file_digest = lambda *a: (calls.append(1), real(*a))[1]
env = {"NCCL_LIBRARY": sys.argv[1]}
said = [library.describe(env, hashed=False)["sha256"], library.describe(env)["sha256"], library.describe(env)["sha256"]]
copy = sys.argv[1] + ".copy"
library.digest(copy)
with open(copy, "ab") as file:
    file.write(b"more")
library.digest(copy)
print(json.dumps([said, len(calls)]))
"""

REPLACED = """
import json, os, sys
from butter_mpi import library
from butter_mpi.errors import ButterError
env = {"NCCL_LIBRARY": sys.argv[1]}
mapped = library.open_library(env)[2]
os.replace(sys.argv[2], sys.argv[1])
said = []
for call in (lambda: library.describe(env), lambda: library.digest(sys.argv[1], mapped)):
    try:
        said.append(call())
    except ButterError as error:
        said.append(error.message)
print(json.dumps(said))
"""

REPLACED_MEANWHILE = """
import json, os, sys
from butter_mpi import library, nccl
from butter_mpi.errors import ButterError
real = nccl.require
nccl.require = lambda opened: (os.replace(sys.argv[2], sys.argv[1]), real(opened))[1]
try:
    print(json.dumps(library.describe({"NCCL_LIBRARY": sys.argv[1]})))
except ButterError as error:
    print(json.dumps(error.message))
"""

RENAMED = """
import json, os, sys
from butter_mpi import library
library.open_library({"NCCL_LIBRARY": sys.argv[1]})
os.rename(sys.argv[1], sys.argv[1] + ".2")
os.rename(sys.argv[2], sys.argv[1])
print(json.dumps(library.describe({})))
"""


@pytest.fixture
def files(tmp_path: Path) -> NcclFiles:
    """Altered copies of the real library."""
    return NcclFiles(real_library(), tmp_path)


def site_with_wheel(folder: Path, library: Path, name: str, size: int | None = None) -> Path:
    """A site folder with an installed NCCL wheel that records ``size`` for its library."""
    place = folder / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(library, place)
    info = folder / f"{name.replace('-', '_')}-2.32.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.32.3\n")
    (info / "RECORD").write_text(f"nvidia/nccl/lib/libnccl.so.2,,{size or library.stat().st_size}\n")
    return place


def test_named_file_is_used_and_hashed(files: NcclFiles) -> None:
    """``NCCL_LIBRARY`` wins; version, size and digest are those of the file itself, never of ``NCCL_VERSION``."""
    path = files.with_version(22809)
    said = run_child(DESCRIBE, env={"NCCL_LIBRARY": str(path), "NCCL_VERSION": "2.15.5-1"})
    content = path.read_bytes()
    assert (said["path"], said["found_via"]) == (str(path), "NCCL_LIBRARY")
    assert (said["version"], said["version_text"], said["size"]) == (22809, "2.28.9", len(content))
    assert said["sha256"] == hashlib.sha256(content).hexdigest()


def test_one_changed_byte_is_another_digest(files: NcclFiles) -> None:
    """Two files of one version and size differ by their digest alone."""
    one, two = files.copy(), files.with_note_changed()
    first, second = (run_child(DESCRIBE, env={"NCCL_LIBRARY": str(path)}) for path in (one, two))
    assert (first["version"], first["size"]) == (second["version"], second["size"])
    assert first["sha256"] != second["sha256"]


def test_library_that_is_mapped_already_is_the_one(files: NcclFiles, tmp_path: Path) -> None:
    """What another package has loaded is used rather than a second one from the wheel."""
    mapped, other = files.copy("mapped"), files.with_note_changed()
    site_with_wheel(tmp_path / "site", other, "nvidia-nccl-cu13")
    code = f"import sys; sys.path.append({str(tmp_path / 'site')!r})\n{DESCRIBE}"
    said = run_child(code, mapped)
    assert (said["path"], said["found_via"]) == (str(mapped), "already mapped")


@pytest.mark.parametrize("name", ["nvidia-nccl-cu13", "nvidia-nccl-cu12"])
def test_wheel_is_found_by_its_metadata(files: NcclFiles, tmp_path: Path, name: str) -> None:
    """Without a named or mapped one, the installed wheel's file is used, though no package is imported."""
    place = site_with_wheel(tmp_path / "site", files.copy(), name)
    code = f"import sys; sys.path.append({str(tmp_path / 'site')!r})\n{DESCRIBE}"
    said = run_child(code)
    assert (said["path"], said["found_via"]) == (str(place), f"wheel {name}")


def test_system_loader_comes_last(files: NcclFiles) -> None:
    """A library on ``LD_LIBRARY_PATH`` is found when there is nothing else."""
    path = files.copy()
    said = run_child(DESCRIBE, env={"LD_LIBRARY_PATH": f"/nonexistent::{path.parent}"})
    assert (said["path"], said["found_via"]) == (str(path), "system loader (LD_LIBRARY_PATH)")


def test_stub_first_on_the_path_is_told_by_symbol_and_path(files: NcclFiles) -> None:
    """Another libnccl that wins and lacks a function is an error that names both, not an AttributeError."""
    path = files.without_symbol("ncclCommAbort")
    kind, message, _ = run_child(DESCRIBE, env={"LD_LIBRARY_PATH": str(path.parent)})
    assert kind == "NotSupportedError" and message.startswith(f"{path} has no ncclCommAbort; ")


def test_nothing_found_tells_every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no library is, the error lists all four places, each with its reason."""
    monkeypatch.setattr("butter_mpi.library._LOADER_CACHE", "/nonexistent")
    monkeypatch.setattr("butter_mpi.library._SYSTEM_FOLDERS", ())
    monkeypatch.setattr("butter_mpi.library._WHEELS", ("no-such-wheel",))
    with pytest.raises(
        LibraryNotFoundError, match=r"no libnccl\.so\.2 found; tried NCCL_LIBRARY \(unset\); "
    ) as caught:
        find_library({})
    places = ["NCCL_LIBRARY", "this process", "the NVIDIA wheel (no-such-wheel is not installed)", "the system loader"]
    assert [tried.startswith(place) for tried, place in zip(caught.value.tried, places, strict=True)] == [True] * 4
    assert "pip install nvidia-nccl-cu13" in caught.value.message


def test_loader_cache_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file that only the loader's cache lists is found; a listed one that is gone is passed over."""
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"")
    cache = tmp_path / "cache"
    cache.write_bytes(b"glibc\0libnccl.so.2\0/gone/libnccl.so.2\0libnccl.so.2\0" + bytes(library) + b"\0libz.so\0")
    monkeypatch.setattr("butter_mpi.library._LOADER_CACHE", str(cache))
    monkeypatch.setattr("butter_mpi.library._WHEELS", ())
    found = find_library({})
    assert (found.path, found.found_via) == (str(library), "system loader")
    assert [tried.split(" (")[0] for tried in found.tried] == ["NCCL_LIBRARY", "this process", "the NVIDIA wheel"]


@pytest.mark.parametrize("make", ["text", "cut_short", "for_other_machine"])
def test_unusable_file_is_refused_before_it_is_opened(files: NcclFiles, make: str) -> None:
    """A text file, half a file and another machine's file are clear errors, and kill nobody."""
    reasons = {"text": "not a shared library", "cut_short": "cut short", "for_other_machine": "but this process is"}
    path = getattr(files, make)()
    kind, message, tried = run_child(DESCRIBE, env={"NCCL_LIBRARY": str(path)})
    assert kind == "LibraryNotFoundError"
    assert message.startswith(f"{path} is not usable: ") and reasons[make] in message
    assert len(tried) == 1 and reasons[make] in tried[0]


def test_named_file_that_is_missing_is_not_replaced_by_another(files: NcclFiles) -> None:
    """A wrong ``NCCL_LIBRARY`` is an error although a library is on the path."""
    env = {"NCCL_LIBRARY": "/nonexistent/libnccl.so.2", "LD_LIBRARY_PATH": str(files.copy().parent)}
    kind, message, _ = run_child(DESCRIBE, env=env)
    assert kind == "LibraryNotFoundError" and message.startswith(
        "NCCL_LIBRARY names no file: /nonexistent/libnccl.so.2; "
    )


def test_file_that_may_not_be_read_is_told(tmp_path: Path) -> None:
    """What the system says about the file is in the error."""
    with pytest.raises(LibraryNotFoundError, match=r"missing is not usable: No such file or directory; "):
        check_file(str(tmp_path / "missing"))


def test_size_is_held_against_the_wheels_record(files: NcclFiles, tmp_path: Path) -> None:
    """A file of another size than its wheel recorded is refused; with two wheels on one path, either may match."""
    library = files.copy()
    size = library.stat().st_size
    place = site_with_wheel(tmp_path / "site", library, "nvidia-nccl-cu13", size + 4096)
    code = f"import sys; sys.path.append({str(tmp_path / 'site')!r})\n{DESCRIBE}"
    kind, message, _ = run_child(code)
    assert kind == "LibraryNotFoundError"
    assert message.startswith(f"{place} is not usable: it has {size} bytes, but its wheel records {size + 4096}; ")
    site_with_wheel(tmp_path / "site", library, "nvidia-nccl-cu12", size)
    assert run_child(code)["found_via"] == "wheel nvidia-nccl-cu13"


def test_two_libraries_in_one_process_are_refused(files: NcclFiles) -> None:
    """Two different files are an error that names both, whether both are mapped or one is about to be."""
    one, two = files.copy("one"), files.with_note_changed()
    for arguments, env in (((one, two), {}), ((one,), {"NCCL_LIBRARY": str(two)})):
        kind, message, _ = run_child(DESCRIBE, *arguments, env=env)
        assert kind == "LibraryNotFoundError"
        assert message.startswith("two different libnccl in one process: ")
        assert str(one) in message and str(two) in message


def test_deleted_library_beside_a_whole_one_is_refused(files: NcclFiles) -> None:
    """A mapped library whose file is gone cannot be told equal to another one."""
    one, two = files.copy("one"), files.copy("two")
    code = f"import ctypes, os, sys\nctypes.CDLL({str(one)!r})\nos.unlink({str(one)!r})\n{DESCRIBE}"
    kind, message, _ = run_child(code, env={"NCCL_LIBRARY": str(two)})
    assert kind == "LibraryNotFoundError" and message.startswith("two different libnccl in one process: ")


def test_file_replaced_under_the_process_is_not_hashed(files: NcclFiles) -> None:
    """The bytes at the path are another library than the mapped one: an error instead of a wrong digest."""
    described, digested = run_child(REPLACED, files.copy(), files.with_note_changed())
    assert "was deleted or replaced after this process mapped it" in described
    assert "is not the file that this process mapped" in digested


def test_file_replaced_while_it_is_described_is_not_hashed(files: NcclFiles) -> None:
    """A library that is replaced between opening and hashing has no digest, rather than its successor's."""
    path = files.copy()
    said = run_child(REPLACED_MEANWHILE, path, files.with_note_changed())
    assert said == f"{path} is not the file that this process mapped; it was replaced: start the job again"


def test_renamed_library_is_hashed_where_it_is_now(files: NcclFiles) -> None:
    """The digest is of the mapped file under its new name, not of another one that took its old name."""
    path = files.copy()
    content = path.read_bytes()
    said = run_child(RENAMED, path, files.with_note_changed())
    assert said["path"] == f"{path}.2"
    assert said["sha256"] == hashlib.sha256(content).hexdigest()


def test_file_is_read_once_a_process_until_it_changes(files: NcclFiles) -> None:
    """Describing twice hashes once, not hashing is possible, and a changed file is hashed again."""
    path = files.copy()
    shutil.copy(path, f"{path}.copy")
    (not_hashed, first, second), count = run_child(HASHES, path)
    assert not_hashed is None and first == second == hashlib.sha256(path.read_bytes()).hexdigest()
    assert count == 3


@pytest.mark.parametrize("expected", [None, "", "AB" * 32])
def test_launchers_digest_may_be_absent_or_equal(expected: str | None) -> None:
    """No digest, or the same one in either case, is no fault."""
    assert check_expected(expected, "ab" * 32) is None


@pytest.mark.parametrize("expected", ["ab", "zz" * 32, "ab" * 33, "sha256:" + "ab" * 32])
def test_malformed_launchers_digest_is_told(expected: str) -> None:
    """What is allowed is in the fault, also where the file's own digest is unknown."""
    assert str(check_expected(expected, None)).startswith("must be 64 hex digits; got ")


def test_different_launchers_digest_is_told() -> None:
    """Both digests are in the fault."""
    fault = str(check_expected("cd" * 32, "ab" * 32))
    assert "cd" * 32 in fault and "ab" * 32 in fault
    assert check_expected("cd" * 32, None) is None


def test_the_runtime_version_is_the_loaded_librarys(files: NcclFiles) -> None:
    """The integer comes from the library that this process uses, not from what is installed beside it."""
    code = "from butter_mpi.library import nccl_runtime_version\nprint(nccl_runtime_version())"
    assert run_child(code, env={"NCCL_LIBRARY": str(files.with_version(22809))}) == 22809
