"""Which libnccl files are mapped into this process."""

from __future__ import annotations

from pathlib import Path

from helpers.child import run_child
from helpers.libnccl_files import NcclFiles, real_library

LIST = """
import ctypes, json, os, sys
from butter_mpi.mapped import is_mapped_file, mapped_libraries
handles = [ctypes.CDLL(path) for path in sys.argv[2:]]
if sys.argv[1] == "delete":
    os.unlink(sys.argv[2])
if sys.argv[1] == "replace":
    os.replace(sys.argv[2] + ".new", sys.argv[2])
also = sys.argv[2] if sys.argv[1] == "also" else ""
found = mapped_libraries(also)
same = []
for m in found:
    if os.path.exists(m.path):
        with open(m.path, "rb") as file:
            same.append(is_mapped_file(file.fileno(), m))
print(json.dumps([[m.path, m.deleted] for m in found] + [same]))
"""


def test_nothing_is_mapped_before_anything_is_loaded() -> None:
    """A process without NCCL lists none."""
    assert run_child(LIST, "") == [[]]


def test_loaded_library_is_listed_once_and_is_its_file(tmp_path: Path) -> None:
    """One entry a file, also through a link, and the open file is known to be the mapped one."""
    path = NcclFiles(real_library(), tmp_path).copy()
    link = tmp_path / "libnccl.so"
    link.symlink_to(path)
    assert run_child(LIST, "", path, link) == [[str(path), False], [True]]


def test_two_copies_are_two(tmp_path: Path) -> None:
    """Equal bytes in two files are still two libraries."""
    files = NcclFiles(real_library(), tmp_path)
    one, two = files.copy("one"), files.copy("two")
    assert sorted(run_child(LIST, "", one, two)[:2]) == [[str(one), False], [str(two), False]]


def test_deleted_file_is_marked(tmp_path: Path) -> None:
    """The kernel's mark is read, and is no part of the path."""
    path = NcclFiles(real_library(), tmp_path).copy()
    assert run_child(LIST, "delete", path) == [[str(path), True], []]


def test_replaced_file_is_not_the_mapped_one(tmp_path: Path) -> None:
    """A file that took the place of the mapped one is told from it."""
    path = NcclFiles(real_library(), tmp_path).copy()
    Path(f"{path}.new").write_bytes(path.read_bytes())
    assert run_child(LIST, "replace", path) == [[str(path), True], [False]]


def test_file_of_another_name_counts_when_named(tmp_path: Path) -> None:
    """A library that is not called libnccl is found if it is asked for."""
    path = NcclFiles(real_library(), tmp_path).copy()
    other = path.rename(path.parent / "mine.so")
    assert run_child(LIST, "", other) == [[]]
    assert run_child(LIST, "also", other) == [[str(other), False], [True]]
