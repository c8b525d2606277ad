"""Which ``libnccl.so.2`` this process uses: found, checked before it is opened, and hashed as it is mapped.

Two wheels may put different files of one version at one path, another package may have loaded a libnccl first, and a
truncated file kills the process when it is used: so the file is looked at before it is opened, and what is mapped
afterwards is compared with it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from butter_mpi import nccl
from butter_mpi._libnccl import Library
from butter_mpi.elf import ElfError, check_elf
from butter_mpi.environment import LIBRARY_VARIABLE, c_environment
from butter_mpi.errors import LibraryNotFoundError
from butter_mpi.findings import quoted
from butter_mpi.mapped import Mapped, is_mapped_file, mapped_libraries

__all__ = [
    "Found",
    "check_expected",
    "check_file",
    "describe",
    "digest",
    "find_library",
    "nccl_runtime_version",
    "open_library",
]

SONAME = "libnccl.so.2"
_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_IN_WHEEL = f"nvidia/nccl/lib/{SONAME}"
_SYSTEM_FOLDERS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")
_LOADER_CACHE = "/etc/ld.so.cache"
_REMEDY = f"install one (pip install nvidia-nccl-cu13, or nvidia-nccl-cu12), or name the file with {LIBRARY_VARIABLE}"


@dataclass(frozen=True, slots=True)
class Found:
    """Where the library was found, by which rule, and what was tried before."""

    path: str
    found_via: str
    tried: tuple[str, ...]


_OPENED: dict[str, tuple[Library, Found]] = {}
_DIGESTS: dict[tuple[int, ...], str] = {}


def _explicit(env: Mapping[str, str]) -> tuple[str | None, str]:
    named = env.get(LIBRARY_VARIABLE)
    if not named:
        return None, f"{LIBRARY_VARIABLE} (unset)"
    path = os.path.abspath(named)
    if not os.path.isfile(path):
        text = f"{LIBRARY_VARIABLE} names no file: {path}; correct it, or unset it to use the wheel's library"
        raise LibraryNotFoundError(text, tried=(f"{LIBRARY_VARIABLE} ({path}: no such file)",))
    return path, LIBRARY_VARIABLE


def _already_mapped(_env: Mapping[str, str]) -> tuple[str | None, str]:
    mapped = mapped_libraries()
    return (mapped[0].path, "already mapped") if mapped else (None, "this process (no libnccl is mapped)")


def _wheel(_env: Mapping[str, str]) -> tuple[str | None, str]:
    reasons = []
    for name in _WHEELS:
        try:
            path = str(importlib.metadata.distribution(name).locate_file(_IN_WHEEL))
        except importlib.metadata.PackageNotFoundError:
            reasons.append(f"{name} is not installed")
            continue
        if os.path.isfile(path):
            return path, f"wheel {name}"
        reasons.append(f"{name} has no {path}")
    return None, f"the NVIDIA wheel ({', '.join(reasons)})"


def _system(env: Mapping[str, str]) -> tuple[str | None, str]:
    for folder in (env.get("LD_LIBRARY_PATH") or "").split(":"):
        path = os.path.join(folder, SONAME)
        if folder and os.path.isfile(path):
            return os.path.abspath(path), "system loader (LD_LIBRARY_PATH)"
    listed = _listed_by_loader()
    for path in (*listed, *(os.path.join(f, SONAME) for f in (os.path.join(sys.prefix, "lib"), *_SYSTEM_FOLDERS))):
        if os.path.isfile(path):
            return path, "system loader"
    return None, f"the system loader (no {SONAME} in LD_LIBRARY_PATH, {_LOADER_CACHE} and the usual folders)"


def _listed_by_loader() -> list[str]:
    """Files of that name in the loader's cache, whose entries are strings that end with a zero byte."""
    try:
        cache = Path(_LOADER_CACHE).read_bytes()
    except OSError:
        return []
    pattern = rb"(/[^\0]*/" + re.escape(SONAME.encode()) + rb")\0"
    return [os.fsdecode(path) for path in re.findall(pattern, cache)]


_STEPS: tuple[Callable[[Mapping[str, str]], tuple[str | None, str]], ...] = (
    _explicit,
    _already_mapped,
    _wheel,
    _system,
)


def find_library(env: Mapping[str, str]) -> Found:
    """Return the ``libnccl.so.2`` to use: named by ``NCCL_LIBRARY``, else mapped already, the wheel's, the system's.

    Parameters
    ----------
    env : mapping of str to str
        The C environment.

    Returns
    -------
    Found
        The file.

    Raises
    ------
    LibraryNotFoundError
        There is none, or ``NCCL_LIBRARY`` names no file; the message has every place that was tried.
    """
    tried: list[str] = []
    for step in _STEPS:
        path, note = step(env)
        if path is not None:
            return Found(path, note, tuple(tried))
        tried.append(note)
    text = f"no {SONAME} found; tried {'; '.join(tried)}; {_REMEDY}"
    raise LibraryNotFoundError(text, tried=tuple(tried))


def _same_file(one: str, other: str) -> bool:
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def _recorded_sizes(path: str) -> list[int]:
    """Return the sizes that installed NCCL wheels record for this file."""
    sizes = []
    for name in _WHEELS:
        try:
            files = importlib.metadata.distribution(name).files or []
        except importlib.metadata.PackageNotFoundError:
            continue
        here = [file for file in files if str(file) == _IN_WHEEL and _same_file(str(file.locate()), path)]
        sizes += [file.size for file in here if file.size is not None]
    return sizes


def check_file(path: str) -> None:
    """Look at a library before the loader maps it.

    Parameters
    ----------
    path : str
        The file.

    Raises
    ------
    LibraryNotFoundError
        It cannot be read, is no shared library for this machine, or is cut short.
    """
    try:
        size = check_elf(path)
    except (ElfError, OSError) as error:
        reason = f"{error.strerror}" if isinstance(error, OSError) else str(error)
        raise LibraryNotFoundError(
            f"{path} is not usable: {reason}; {_REMEDY}", tried=(f"{path} ({reason})",)
        ) from None
    sizes = _recorded_sizes(path)
    if sizes and size not in sizes:
        reason = f"it has {size} bytes, but its wheel records {' or '.join(map(str, sizes))}"
        raise LibraryNotFoundError(
            f"{path} is not usable: {reason}; reinstall the wheel", tried=(f"{path} ({reason})",)
        )


def _only_one(found: Found) -> Mapped | None:
    """Return the mapped libnccl, if any; refuse two different ones, and another one than was found."""
    mapped, real = mapped_libraries(found.path), os.path.realpath(found.path)
    if any(m.path != real and not _same_file(m.path, real) for m in mapped):
        paths = sorted({m.path for m in mapped} | {real})
        text = f"two different libnccl in one process: {' and '.join(paths)}"
        remedy = f"another package loads its own; let {LIBRARY_VARIABLE} name that file, or keep one of them"
        raise LibraryNotFoundError(f"{text}; {remedy}", tried=tuple(paths))
    if any(m.deleted for m in mapped):
        text = f"{real} was deleted or replaced after this process mapped it, so its bytes cannot be hashed"
        raise LibraryNotFoundError(f"{text}; start the job again", tried=(real,))
    return mapped[0] if mapped else None


def _opened(found: Found) -> tuple[Library, Found]:
    """Return the library of a file, and how it was found when this process opened it first."""
    real = os.path.realpath(found.path)
    if real not in _OPENED:
        try:
            _OPENED[real] = Library(found.path), found
        except OSError as error:
            text = f"{found.path} cannot be loaded: {error}; {_REMEDY}"
            raise LibraryNotFoundError(text, tried=(f"{found.path} ({error})",)) from None
    return _OPENED[real]


def open_library(env: Mapping[str, str]) -> tuple[Library, Found, Mapped]:
    """Find the library, check its file, open it, and find what the kernel mapped.

    Parameters
    ----------
    env : mapping of str to str
        The C environment.

    Returns
    -------
    library, found, mapped : Library, Found, Mapped
        The library; where and how it was found; the file that is mapped.

    Raises
    ------
    LibraryNotFoundError
        None is found, it is unusable, or two different ones are in this process.
    NotSupportedError
        It lacks a required function or is too old.
    """
    found = find_library(env)
    if _only_one(found) is None:
        check_file(found.path)
    library, found = _opened(found)
    mapped = _only_one(found)
    if mapped is None:
        raise LibraryNotFoundError(
            f"{found.path} was opened, but /proc/self/maps does not list it", tried=(found.path,)
        )
    return library, found, mapped


def nccl_runtime_version() -> int:
    """Return the version that the library of this process reports; it is opened if it is not yet.

    Returns
    -------
    int
        What ``ncclGetVersion`` gives, for example 23203.

    Raises
    ------
    LibraryNotFoundError
        None is found, it is unusable, or two different ones are in this process.
    NotSupportedError
        It lacks a required function or is too old.
    NCCLError
        It cannot tell its version.
    """
    library, _, _ = open_library(c_environment())
    return nccl.require(library)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def digest(path: str, mapped: Mapped | None = None) -> str:
    """Return the SHA-256 of a file, read once a process as long as it does not change.

    Parameters
    ----------
    path : str
        The file.
    mapped : Mapped, optional
        What must be the same file.

    Returns
    -------
    str
        64 hex digits.

    Raises
    ------
    LibraryNotFoundError
        The file is not, or no longer, the mapped one.
    """
    with open(path, "rb") as file:
        identity = _identity(os.fstat(file.fileno()))
        if mapped is not None and not is_mapped_file(file.fileno(), mapped):
            text = f"{path} is not the file that this process mapped; it was replaced: start the job again"
            raise LibraryNotFoundError(text, tried=(path,))
        if identity not in _DIGESTS:
            _DIGESTS[identity] = hashlib.file_digest(file, "sha256").hexdigest()
    return _DIGESTS[identity]


def check_expected(expected: str | None, actual: str | None) -> str | None:
    """Return what is wrong with the digest that the launcher passed.

    Parameters
    ----------
    expected : str or None
        ``BUTTER_NCCL_LIBRARY_SHA256``; ``None`` or empty: the launcher passed none.
    actual : str or None
        The digest of the mapped file, where it is known.

    Returns
    -------
    str or None
        The fault, or nothing.
    """
    if not expected:
        return None
    if not re.fullmatch(r"[0-9a-fA-F]{64}", expected):
        return f"must be 64 hex digits; got {quoted(expected)}"
    if actual is not None and expected.lower() != actual:
        return f"the launcher resolved a file with sha256 {expected.lower()}, but the mapped one has {actual}"
    return None


def describe(env: Mapping[str, str], hashed: bool = True) -> dict[str, Any]:
    """Return what a preflight record says of the library; it is opened if it is not yet.

    Parameters
    ----------
    env : mapping of str to str
        The C environment.
    hashed : bool, default True
        Whether to hash the mapped file; one rank a node does, and the others are the same file by ``file``.

    Returns
    -------
    dict
        ``path``, ``found_via``, ``version``, ``version_text``, ``size``, ``file`` (device, inode, size and times of
        the mapped file) and ``sha256`` (``None`` where not hashed).

    Raises
    ------
    LibraryNotFoundError
        None is found, it is unusable, or two different ones are in this process.
    NotSupportedError
        It lacks a required function or is too old.
    NCCLError
        It cannot tell its version.
    """
    library, found, mapped = open_library(env)
    version = nccl.require(library)
    status = os.stat(mapped.path)
    return {
        "path": mapped.path,
        "found_via": found.found_via,
        "version": version,
        "version_text": nccl.version_text(version),
        "size": status.st_size,
        "file": "-".join(map(str, _identity(status))),
        "sha256": digest(mapped.path, mapped) if hashed else None,
    }
