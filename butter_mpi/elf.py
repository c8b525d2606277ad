"""Just enough of the ELF format to tell, before the loader maps it, that a file is a whole library for this machine."""

from __future__ import annotations

import os
import struct

__all__ = ["ElfError", "check_elf"]

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SHARED_OBJECT = 3
_MACHINES = {3: "x86", 21: "ppc64le", 40: "arm", 62: "x86-64", 183: "aarch64", 243: "riscv64"}


class ElfError(ValueError):
    """The file is not a whole shared library for this machine; the message says why."""


def _header(path: str) -> tuple[int, ...]:
    with open(path, "rb") as file:
        raw = file.read(_HEADER.size)
    if len(raw) < _HEADER.size or raw[:4] != b"\x7fELF":
        raise ElfError(f"not a shared library (it begins with {raw[:4]!r}, no ELF header)")
    if raw[4:6] != b"\x02\x01":
        raise ElfError("not a 64-bit little-endian library")
    return _HEADER.unpack(raw)[1:]


def _segments_end(path: str, offset: int, size: int, count: int) -> int:
    """Return the end of the last byte that the loader maps."""
    with open(path, "rb") as file:
        file.seek(offset)
        table = file.read(size * count)
    if size < _SEGMENT.size or len(table) < size * count:
        return offset + size * count
    rows = [_SEGMENT.unpack_from(table, i * size) for i in range(count)]
    return max((row[2] + row[5] for row in rows), default=0)


def check_elf(path: str) -> int:
    """Return the size of a file that is a whole shared library for this machine.

    Parameters
    ----------
    path : str
        The file.

    Returns
    -------
    int
        Its size in bytes.

    Raises
    ------
    ElfError
        It is something else, or for another machine, or ends before its own headers say.
    OSError
        It cannot be read.
    """
    kind, machine, _, _, segments, sections, _, _, segment_size, segment_count, section_size, section_count, _ = (
        _header(path)
    )
    if kind != _SHARED_OBJECT:
        raise ElfError(f"not a shared library (ELF type {kind})")
    mine = _header("/proc/self/exe")[1]
    if machine != mine:
        raise ElfError(f"for {_machine(machine)}, but this process is {_machine(mine)}")
    size = os.path.getsize(path)
    end = max(_segments_end(path, segments, segment_size, segment_count), sections + section_size * section_count)
    if size < end:
        raise ElfError(f"cut short: it has {size} bytes, but its headers reach to {end}")
    return size


def _machine(number: int) -> str:
    return _MACHINES.get(number, f"machine {number}")
