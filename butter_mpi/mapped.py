"""The files that are mapped into this process: which of them are libnccl, and whether a file on disk is one of them."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Mapped", "is_mapped_file", "mapped_files", "mapped_libraries"]

_BASENAME = re.compile(r"libnccl\.so(\.\d+)*")
_MAP_LINE = re.compile(r"([0-9a-f]+)-\S+ \S+ \S+ (\S+) (\d+)\s+(/.*)")
_DELETED = " (deleted)"


@dataclass(frozen=True, slots=True)
class Mapped:
    """A libnccl in this process: its file, the device and inode by which the kernel lists it, whether it is gone."""

    path: str
    file: tuple[str, int]
    deleted: bool


def _maps() -> list[tuple[int, str, int, str]]:
    """Start address, device, inode and file of every mapped file."""
    text = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    rows = [m.groups() for line in text.split("\n") if (m := _MAP_LINE.match(line))]
    return [(int(start, 16), device, int(inode), path) for start, device, inode, path in rows]


def mapped_files() -> frozenset[str]:
    """Return the path of every file that is mapped into this process."""
    return frozenset(path for _, _, _, path in _maps())


def mapped_libraries(also: str = "") -> tuple[Mapped, ...]:
    """Return every different libnccl file that is mapped into this process.

    Parameters
    ----------
    also : str, optional
        A file that counts whatever its name is.

    Returns
    -------
    tuple of Mapped
        One a file; a file that was deleted or replaced since it was mapped is marked.
    """
    found: dict[tuple[str, int], Mapped] = {}
    real = os.path.realpath(also) if also else ""
    for _, device, inode, listed in _maps():
        path = listed.removesuffix(_DELETED)
        if _BASENAME.fullmatch(os.path.basename(path)) or path == real:
            found.setdefault((device, inode), Mapped(path, (device, inode), listed.endswith(_DELETED)))
    return tuple(found.values())


def is_mapped_file(descriptor: int, mapped: Mapped) -> bool:
    """Whether an open file is the mapped one: the kernel lists a page of it under the same device and inode.

    The inode that ``stat`` gives is of no use here: on overlay file systems it is another than the one listed.
    """
    with mmap.mmap(descriptor, mmap.PAGESIZE, access=mmap.ACCESS_COPY) as page:
        view = ctypes.c_char.from_buffer(page)
        address = ctypes.addressof(view)
        del view
        listed = [(device, inode) for start, device, inode, _ in _maps() if start == address]
    return listed == [mapped.file]
