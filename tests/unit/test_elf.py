"""A library file is looked at before the loader maps it."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from butter_mpi.elf import ElfError, check_elf

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")


def write(
    path: Path, *, ident: bytes = b"\x7fELF\x02\x01\x01", kind: int = 3, machine: int | None = None, **at: int
) -> Path:
    """A file with only a header, of this machine unless said otherwise."""
    mine = struct.unpack_from("<H", Path(sys.executable).resolve().read_bytes(), 18)[0]
    sections, count = at.get("sections", 0), at.get("count", 0)
    number = mine if machine is None else machine
    header = HEADER.pack(ident.ljust(16, b"\0"), kind, number, 1, 0, 64, sections, 0, 64, 56, 0, 64, count, 0)
    path.write_bytes(header + bytes(at.get("tail", 0)))
    return path


def test_whole_library_of_this_machine_is_accepted(tmp_path: Path) -> None:
    """Its size is returned."""
    assert check_elf(str(write(tmp_path / "f", sections=64, count=2, tail=128))) == 192


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"ident": b"<htm"}, r"not a shared library \(it begins with b'<htm', no ELF header\)"),
        ({"ident": b"\x7fELF\x01\x01"}, "not a 64-bit little-endian library"),
        ({"ident": b"\x7fELF\x02\x02"}, "not a 64-bit little-endian library"),
        ({"kind": 1}, r"not a shared library \(ELF type 1\)"),
        ({"machine": 21}, "for ppc64le, but this process is (x86-64|aarch64)"),
        ({"machine": 9999}, "for machine 9999, but"),
        ({"sections": 64, "count": 2, "tail": 127}, "cut short: it has 191 bytes, but its headers reach to 192"),
    ],
)
def test_anything_else_is_refused_with_the_reason(tmp_path: Path, how: dict[str, Any], reason: str) -> None:
    """Text, another format, another machine, and a file shorter than its own headers say."""
    with pytest.raises(ElfError, match=reason):
        check_elf(str(write(tmp_path / "f", **how)))


@pytest.mark.parametrize("content", [b"", b"\x7fELF"])
def test_file_too_short_for_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    """An empty file or a few bytes are no library."""
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(ElfError, match="not a shared library"):
        check_elf(str(tmp_path / "f"))


def test_missing_segment_beyond_the_end_is_found(tmp_path: Path) -> None:
    """A segment that reaches beyond the end of the file is what kills a process: it is refused."""
    path = write(tmp_path / "f")
    header = bytearray(path.read_bytes())
    struct.pack_into("<Q", header, 32, 64)
    struct.pack_into("<H", header, 56, 1)
    path.write_bytes(bytes(header) + struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, 4096, 4096, 4096))
    with pytest.raises(ElfError, match="cut short: it has 120 bytes, but its headers reach to 4096"):
        check_elf(str(path))
    with path.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ElfError, match="cut short: it has 100 bytes, but its headers reach to 120"):
        check_elf(str(path))
