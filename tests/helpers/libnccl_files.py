"""Altered copies of a real ``libnccl.so.2``: what ranks meet when installations differ, without a compiler.

The copies run the real host code; device code and debugging data, which is nearly all of the file, are left out, so
that making and hashing one takes milliseconds. ``BUTTER_MPI_TEST_NCCL`` names the real file.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import Symbol, SymbolTableSection

from helpers.require import need

__all__ = ["VARIABLE", "NcclFiles", "real_library", "symbols"]

VARIABLE = "BUTTER_MPI_TEST_NCCL"
_DEVICE_CODE = ("__nv_relfatbin", ".nv_fatbin")
_OTHER_MACHINE = {"EM_X86_64": 183, "EM_AARCH64": 62}
_PT_LOAD = 1
_PAGE = 0x10000
_MACHINE_AT, _SEGMENTS_AT, _COUNTS_AT = 18, 32, 56
_ROW = struct.Struct("<IIQQQQQQ")


def real_library() -> Path:
    """Return the real library, or skip (fail where it is required)."""
    named = os.environ.get(VARIABLE)
    need("nccl", named and Path(named).is_file(), f"{VARIABLE} names no libnccl.so.2; ./launch/test installs a wheel")
    return Path(str(named))


def symbols(elf: ELFFile) -> list[Symbol]:
    """Return the symbols that a library exports."""
    table = elf.get_section_by_name(".dynsym")
    assert isinstance(table, SymbolTableSection)
    return [symbol for symbol in table.iter_symbols() if symbol["st_shndx"] != "SHN_UNDEF"]


class _Segment(NamedTuple):
    """A row of the table of segments."""

    kind: int
    flags: int
    offset: int
    address: int
    physical: int
    in_file: int
    in_memory: int
    align: int


class NcclFiles:
    """A maker of copies, each in a folder of its own below ``folder`` and called ``libnccl.so.2``."""

    def __init__(self, source: Path, folder: Path) -> None:
        self._folder = folder
        with source.open("rb") as file:
            elf = ELFFile(file)
            self._machine = str(elf["e_machine"])
            self._sections = {s.name: (s["sh_addr"], s["sh_size"]) for s in elf.iter_sections()}
            self._addresses = {s.name: s["st_value"] for s in symbols(elf)}
            file.seek(elf["e_phoff"])
            segments = [_Segment(*_ROW.unpack(file.read(_ROW.size))) for _ in range(elf["e_phnum"])]
            self._image, self._loaded = self._laid_out(file, segments)

    def _pieces(self, segment: _Segment) -> Iterator[tuple[int, int]]:
        """The address ranges of a loaded segment that hold no device code."""
        start, end = segment.address, segment.address + segment.in_file
        for address, size in sorted(self._sections[name] for name in _DEVICE_CODE if name in self._sections):
            low, high = -(-address // _PAGE) * _PAGE, (address + size) // _PAGE * _PAGE
            if start <= low < high <= end:
                yield start, low
                start = high
        yield start, end

    def _laid_out(self, file: BinaryIO, segments: list[_Segment]) -> tuple[bytes, list[_Segment]]:
        """Put the pieces one behind the other, each congruent to its address, and the new table of segments last."""
        image, loaded = bytearray(), []
        for segment in (s for s in segments if s.kind == _PT_LOAD):
            for start, end in self._pieces(segment):
                image.extend(bytes((start - len(image)) % _PAGE))
                tail = segment.in_memory - segment.in_file if end == segment.address + segment.in_file else 0
                piece = segment._replace(offset=len(image), address=start, physical=start, align=_PAGE)
                loaded.append(piece._replace(in_file=end - start, in_memory=end - start + tail))
                file.seek(segment.offset + start - segment.address)
                image.extend(file.read(end - start))
        rows = loaded + [s._replace(offset=_place(loaded, s.address)) for s in segments if s.kind != _PT_LOAD]
        image.extend(bytes(-len(image) % 8))
        struct.pack_into("<QQ", image, _SEGMENTS_AT, len(image), 0)
        struct.pack_into("<HHH", image, _COUNTS_AT, len(rows), 64, 0)
        return bytes(image) + b"".join(_ROW.pack(*row) for row in rows), loaded

    def copy(self, name: str = "copy") -> Path:
        """Return an unaltered copy; all copies of a source are equal, byte by byte."""
        target = self._folder / name / "libnccl.so.2"
        target.parent.mkdir(parents=True)
        target.write_bytes(self._image)
        return target

    def with_note_changed(self) -> Path:
        """Return a copy with one byte changed that no code reads (the last one of its build note)."""
        address, size = self._sections[".note.gnu.build-id"]
        last = _place(self._loaded, address) + size - 1
        return self._patched("note", last, bytes([self._image[last] ^ 0xFF]))

    def with_version(self, version: int) -> Path:
        """Return a copy whose ``ncclGetVersion`` gives another integer."""
        x86 = b"\xc7\x07" + version.to_bytes(4, "little") + b"\x31\xc0\xc3"
        low, high = version & 0xFFFF, version >> 16
        words = [0x52800001 | low << 5, 0x72A00001 | high << 5, 0xB9000001, 0x52800000, 0xD65F03C0]
        return self._code(f"version{version}", "ncclGetVersion", x86, words)

    def with_unique_id_result(self, result: int) -> Path:
        """Return a copy whose ``ncclGetUniqueId`` does nothing but return a code."""
        x86 = b"\xb8" + result.to_bytes(4, "little") + b"\xc3"
        return self._code(f"result{result}", "ncclGetUniqueId", x86, [0x52800000 | result << 5, 0xD65F03C0])

    def without_symbol(self, name: str) -> Path:
        """Return a copy that exports a function under another name."""
        address, size = self._sections[".dynstr"]
        start = _place(self._loaded, address)
        found = self._image.index(name.encode() + b"\0", start, start + size)
        return self._patched(f"without-{name}", found + len(name) - 1, b"_")

    def for_other_machine(self) -> Path:
        """Return a copy whose header names another processor."""
        return self._patched("machine", _MACHINE_AT, _OTHER_MACHINE[self._machine].to_bytes(2, "little"))

    def cut_short(self) -> Path:
        """Return a copy that lost its second half."""
        target = self.copy("short")
        os.truncate(target, target.stat().st_size // 2)
        return target

    def text(self) -> Path:
        """Return a text file under the library's name."""
        target = self._folder / "text" / "libnccl.so.2"
        target.parent.mkdir(parents=True)
        target.write_text("<html>404: no such file</html>\n")
        return target

    def _code(self, name: str, symbol: str, x86: bytes, aarch64: list[int]) -> Path:
        code = x86 if self._machine == "EM_X86_64" else b"".join(word.to_bytes(4, "little") for word in aarch64)
        return self._patched(name, _place(self._loaded, self._addresses[symbol]), code)

    def _patched(self, name: str, offset: int, replacement: bytes) -> Path:
        before = self._image[offset : offset + len(replacement)]
        if len(before) != len(replacement) or before == replacement:
            raise ValueError(f"{name}: nothing would change at {offset}")
        target = self.copy(name)
        with target.open("r+b") as file:
            file.seek(offset)
            file.write(replacement)
        return target


def _place(loaded: list[_Segment], address: int) -> int:
    """The offset in the new file of an address; 0 for an address that no file holds."""
    for segment in loaded:
        if segment.address <= address < segment.address + segment.in_file:
            return segment.offset + address - segment.address
    return 0
