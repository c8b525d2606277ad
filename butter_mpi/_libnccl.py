"""One opened ``libnccl.so.2``, with the types of its release; nothing is decided here.

Whether a function is there is asked of the library itself. How a struct is laid out is told by the newest known header
that is not newer than the library. That is also the ``version`` that a struct claims: a library believes every field up
to that version, so a struct must not claim a field that it lacks.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from butter_mpi._nccl_types import (
    CONSTANTS,
    FUNCTIONS,
    OLDEST,
    REQUIRED,
    STRUCTS,
    UNDEFINED,
    Declared,
    ctype,
    header_of,
    in_release,
    structure,
    version_code,
    version_text,
)
from butter_mpi.errors import NotSupportedError

__all__ = ["Library"]

_SET_BY_NEW = ("size", "magic", "version")


class Library:
    """One opened ``libnccl.so.2``.

    Parameters
    ----------
    path : str
        The file.

    Raises
    ------
    OSError
        The dynamic loader refuses it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._handle = ctypes.CDLL(path)
        self._functions: dict[str, Any] = {}
        self._untyped: dict[str, Any] = {}

    @functools.cached_property
    def version(self) -> int:
        """What ``ncclGetVersion`` gives, or 0 where it gives nothing."""
        version = ctypes.c_int(0)
        get = getattr(self._handle, "ncclGetVersion", None)
        return version.value if get is not None and get(ctypes.byref(version)) == 0 else 0

    @functools.cached_property
    def header(self) -> int:
        """The version of the header whose structs and constants are used."""
        if self.version < OLDEST:
            needs = f"NCCL {version_text(OLDEST)}"
            raise NotSupportedError(f"{self._named()}: structs are known from {needs} on", needs=needs)
        return header_of(self.version)

    def _named(self) -> str:
        return f"{self.path} ({f'NCCL {version_text(self.version)}' if self.version else 'of unknown version'})"

    def _lacks(self, what: str, since: str) -> NotSupportedError:
        text = f"{self._named()} has no {what}: it needs NCCL {since} or newer"
        return NotSupportedError(text, needs=f"NCCL {since}")

    def missing(self) -> tuple[str, ...]:
        """Return the names of required functions that this library lacks.

        Returns
        -------
        tuple of str
            In the order of ``nccl.h``.
        """
        return tuple(name for name in REQUIRED if not self.has(name))

    def has(self, name: str) -> bool:
        """Return whether the library exports a function.

        Parameters
        ----------
        name : str
            The C name.

        Returns
        -------
        bool
            Whether :meth:`function` gives it.
        """
        return hasattr(self._handle, name)

    def function(self, name: str) -> Any:
        """Return a function with its types set.

        Parameters
        ----------
        name : str
            The C name.

        Returns
        -------
        callable
            The function.

        Raises
        ------
        NotSupportedError
            This library lacks it.
        """
        if name not in self._functions:
            pointer = self._pointer(name)
            pointer.argtypes = tuple(self._type(row) for row in FUNCTIONS[name].arguments)
            self._functions[name] = pointer
        return self._functions[name]

    def untyped(self, name: str) -> Any:
        """Return a function that takes its arguments as they are, for those that its types have prepared.

        Parameters
        ----------
        name : str
            The C name.

        Returns
        -------
        callable
            The function; a bare int would be cut to 32 bits.

        Raises
        ------
        NotSupportedError
            This library lacks it.
        """
        if name not in self._untyped:
            self._untyped[name] = self._pointer(name)
        return self._untyped[name]

    def _pointer(self, name: str) -> Any:
        """Return a new function object; those that attribute access gives are shared."""
        row = FUNCTIONS[name]
        try:
            pointer = self._handle[name]
        except AttributeError:
            raise self._lacks(name, row.since) from None
        pointer.restype = ctype(row.returns, 0)
        return pointer

    def _type(self, row: Declared) -> Any:
        base = row.type.replace("const", "").strip(" *")
        if base in STRUCTS:
            self.structure(base)
            return ctype(row.type, self.header)
        return ctype(row.type, 0)

    def structure(self, name: str) -> Any:
        """Return a struct with the layout of this library.

        Parameters
        ----------
        name : str
            The C name.

        Returns
        -------
        type
            The class.

        Raises
        ------
        NotSupportedError
            This library's release has no such struct.
        """
        since = STRUCTS[name][0].since
        if version_code(since) > self.header:
            raise self._lacks(name, since)
        return structure(name, self.header)

    def new(self, name: str, **fields: Any) -> Any:
        """Return a struct that is filled as NCCL's own initializer does it, and then with values.

        Parameters
        ----------
        name : str
            The C name, for example ``"ncclConfig_t"``.
        **fields
            Values by field; a field that is left out keeps NCCL's mark for "not set".

        Returns
        -------
        ctypes.Structure
            It keeps the strings that it points to.

        Raises
        ------
        NotSupportedError
            This library's release has no such struct or field.
        TypeError
            No release has such a field, it is set here, or a value has the wrong type.
        ValueError
            A number does not fit.
        """
        kind = self.structure(name)
        value = kind()
        if name == "ncclConfig_t":
            # Releases put new fields into what was padding: so the padding is "not set" too.
            words = (ctypes.c_int * (ctypes.sizeof(kind) // 4)).from_buffer(value)
            words[:] = [UNDEFINED] * len(words)
        derived = {"size": ctypes.sizeof(kind), "version": self.header}
        for field, row in in_release(STRUCTS[name], self.header).items():
            start = getattr(kind(), field) if row.value is None else row.value
            setattr(value, field, derived.get(field, start))
        for field, given in fields.items():
            self._set(value, name, field, given)
        return value

    def _set(self, value: Any, struct: str, field: str, given: Any) -> None:
        rows = [row for row in STRUCTS[struct] if row.name not in _SET_BY_NEW]
        row = next((row for row in rows if row.name == field), None)
        if row is None:
            names = ", ".join(dict.fromkeys(row.name for row in rows))
            raise TypeError(f"{struct} has no field {field!r} to set; it has {names}")
        if version_code(row.since) > self.header:
            raise self._lacks(f"{struct}.{field}", row.since)
        text = row.type == "const char *"
        if text and not isinstance(given, str | bytes | None):
            raise TypeError(f"{struct}.{field} must be a string; got {given!r}")
        try:
            setattr(value, field, given.encode() if isinstance(given, str) else given)
        except TypeError as error:
            raise TypeError(f"{struct}.{field}: {error}; got {given!r}") from None
        if isinstance(given, int) and not text and getattr(value, field) != given:
            raise ValueError(f"{struct}.{field}: {given} does not fit into {row.type}")

    def constant(self, name: str) -> Any:
        """Return the value of a macro or an enumerator.

        Parameters
        ----------
        name : str
            The C name, for example ``"ncclFloat8e4m3"``.

        Returns
        -------
        int or float
            Its value.

        Raises
        ------
        NotSupportedError
            This library's release has no such constant.
        """
        rows = [row for row in CONSTANTS if row.name == name]
        known = in_release(rows, self.header)
        if name not in known:
            raise self._lacks(name, rows[0].since)
        return known[name].value
