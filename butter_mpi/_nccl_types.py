"""The table of NCCL's C interface as Python values: prototypes, and the structs and constants of each release."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from butter_mpi._nccl_table import HEADERS, TABLE

__all__ = [
    "CONSTANTS",
    "FUNCTIONS",
    "NEWEST",
    "OLDEST",
    "REQUIRED",
    "RESULTS",
    "STRUCTS",
    "UNDEFINED",
    "UNIQUE_ID_BYTES",
    "Declared",
    "Function",
    "UniqueId",
    "ctype",
    "header_of",
    "in_release",
    "structure",
    "version_code",
    "version_text",
]

_DECLARED = re.compile(r"(.*?)(\w+)(?:\[(\d+)\])?(?: = (\S+))?")
_PROTOTYPE = re.compile(r"(.*[ *])(\w+)\((.*)\)")


class Declared(NamedTuple):
    """An argument, a field or a constant: first release, C type and name, length of an array, value at the start."""

    since: str
    type: str
    name: str
    length: int | None
    value: int | float | None


class Function(NamedTuple):
    """A C function: its first release, its name, the C type that it returns, its arguments."""

    since: str
    name: str
    returns: str
    arguments: tuple[Declared, ...]


def version_code(text: str) -> int:
    """Return the integer that ``ncclGetVersion`` gives for a release from 2.9 on.

    Parameters
    ----------
    text : str
        For example ``"2.32.3"``; a patch that is left out is 0.

    Returns
    -------
    int
        For example 23203.
    """
    major, minor, patch = (*map(int, text.split(".")), 0)[:3]
    return major * 10000 + minor * 100 + patch


def version_text(version: int) -> str:
    """Return the dotted form of ``ncclGetVersion``'s integer.

    Parameters
    ----------
    version : int
        For example 23203.

    Returns
    -------
    str
        For example ``"2.32.3"``.
    """
    major, rest = divmod(version, 10000 if version >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _sections() -> dict[str, list[list[str]]]:
    """Return the rows below each title: since when, and what."""
    sections = {}
    for paragraph in TABLE.strip().split("\n\n"):
        title, *rows = re.sub(r"\n {5,}", " ", paragraph).splitlines()
        sections[title] = [row.split(maxsplit=1) for row in rows]
    return sections


_SECTIONS = _sections()
_MACROS = {text.split(" = ")[0]: text.split(" = ")[1] for _, text in _SECTIONS["macros"]}


def _declared(since: str, text: str) -> Declared:
    """Read one declaration; a value may be a macro's name."""
    found = _DECLARED.fullmatch(text)
    assert found is not None, text
    kind, name, length, value = found.groups()
    return Declared(since, kind.strip(), name, int(length) if length else None, _number(_MACROS.get(value, value)))


def _number(text: str | None) -> int | float | None:
    if text is None:
        return None
    return float(text) if "." in text else int(text, 0)


def _function(since: str, text: str) -> Function:
    """Read one prototype."""
    found = _PROTOTYPE.fullmatch(text)
    assert found is not None, text
    returns, name, arguments = found.groups()
    parts = arguments.split(", ") if arguments else ()
    return Function(since, name, returns.strip(), tuple(_declared(since, part) for part in parts))


def _rows(kind: str) -> dict[str, tuple[Declared, ...]]:
    """Return the declarations of every struct, union or enum, by its C name."""
    titles = [title for title in _SECTIONS if title.startswith(f"{kind} ")]
    return {title.split()[1]: tuple(_declared(*row) for row in _SECTIONS[title]) for title in titles}


_ENUMS, _UNIONS = _rows("enum"), _rows("union")
_HEADERS = tuple(version_code(header) for header in HEADERS.split())

OLDEST = 21800
"""The oldest ``ncclGetVersion`` that is supported."""

NEWEST = _HEADERS[-1]
"""The newest release whose declarations are known."""

FUNCTIONS = {row.name: row for row in (_function(*row) for row in _SECTIONS["functions"])}
"""Every function, in the order of ``nccl.h``."""

REQUIRED = tuple(row.name for row in FUNCTIONS.values() if version_code(row.since) <= OLDEST)
"""What every supported release has: a library without one of these is no whole NCCL."""

STRUCTS = _rows("struct") | _UNIONS
"""The fields of every struct, of all releases."""

CONSTANTS = (*(_declared(*row) for row in _SECTIONS["macros"]), *(row for rows in _ENUMS.values() for row in rows))
"""Every macro and enumerator, of all releases."""

UNDEFINED = int(_MACROS["NCCL_CONFIG_UNDEF_INT"], 0)
"""An integer field with this value is not set."""


def in_release(rows: Iterable[Declared], header: int) -> Mapping[str, Declared]:
    """Return the rows that hold in a release; a later row takes the place of an earlier one.

    Parameters
    ----------
    rows : iterable of Declared
        Rows of all releases.
    header : int
        A known header's version.

    Returns
    -------
    mapping of str to Declared
        By name.
    """
    return {row.name: row for row in rows if version_code(row.since) <= header}


RESULTS: Mapping[int, str] = MappingProxyType(
    {
        int(row.value or 0): name
        for name, row in in_release(_ENUMS["ncclResult_t"], NEWEST).items()
        if name != "ncclNumResults"
    }
)
"""``ncclResult_t`` of NCCL 2.18 to 2.32; another number is an error without a name."""


def header_of(version: int) -> int:
    """Return the version of the newest known header that is not newer than a library.

    Parameters
    ----------
    version : int
        What ``ncclGetVersion`` gave.

    Returns
    -------
    int
        For example 23004 for 23006, because the headers of 2.30.5 and 2.30.6 were not read.
    """
    return max((header for header in _HEADERS if header <= version), default=_HEADERS[0])


_SCALARS: dict[str, Any] = {
    "bool": ctypes.c_bool,
    "float": ctypes.c_float,
    "int": ctypes.c_int,
    "size_t": ctypes.c_size_t,
    "unsigned int": ctypes.c_uint,
    **{f"{sign}int{bits}_t": getattr(ctypes, f"c_{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **dict.fromkeys(_ENUMS, ctypes.c_int),
    **dict.fromkeys(("ncclComm_t", "ncclParamHandle_t", "ncclWindow_t"), ctypes.c_void_p),
    **dict.fromkeys(("cudaEvent_t", "cudaStream_t"), ctypes.c_void_p),
}
_POINTERS: dict[str, Any] = {"char": ctypes.c_char_p, "void": ctypes.c_void_p}


def ctype(text: str, header: int) -> Any:
    """Return the ctypes type of a C type; pointers to anything but ``char`` and ``void`` are typed.

    Parameters
    ----------
    text : str
        For example ``"const ncclConfig_t *"``.
    header : int
        The known header that lays the structs out.

    Returns
    -------
    type or None
        The type; ``None`` for ``void``.
    """
    words = text.replace("*", " * ").split()
    base, stars = " ".join(word for word in words if word not in ("*", "const")), words.count("*")
    if base == "void" and not stars:
        return None
    kind: Any = _POINTERS.get(base) or _SCALARS.get(base) or structure(base, header)
    for _ in range(stars - (base in _POINTERS)):
        kind = ctypes.POINTER(kind)
    return kind


def structure(name: str, header: int) -> Any:
    """Return a struct with the layout of a release; where releases have one layout, they have one class.

    Parameters
    ----------
    name : str
        The C name.
    header : int
        A known header's version.

    Returns
    -------
    type
        A class of ``ctypes.Structure`` or ``ctypes.Union``; without fields where the release has no such struct.
    """
    fields = []
    for row in in_release(STRUCTS[name], header).values():
        kind = ctype(row.type, header)
        fields.append((row.name, kind * row.length if row.length else kind))
    return _layout(name, tuple(fields))


@functools.cache
def _layout(name: str, fields: tuple[tuple[str, Any], ...]) -> Any:
    base: Any = ctypes.Union if name in _UNIONS else ctypes.Structure
    return type(name, (base,), {"_fields_": fields, "__module__": "nccl.h"})


UniqueId: Any = structure("ncclUniqueId", _HEADERS[0])
"""``ncclUniqueId``, which is passed by value: bytes, zeros among them."""

UNIQUE_ID_BYTES: int = ctypes.sizeof(UniqueId)
