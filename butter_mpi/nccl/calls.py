"""How one NCCL call is made and judged."""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Callable
from typing import Any

from butter_mpi._libnccl import Library
from butter_mpi._nccl_types import FUNCTIONS, RESULTS, Declared
from butter_mpi.errors import NCCLError

__all__ = ["IN_PROGRESS", "SUCCESS", "Handle", "call", "check", "last_error", "prepared"]

SUCCESS = 0
IN_PROGRESS = 7

# The least and the largest number of each type; ctypes alone would cut others to size.
_RANGES: dict[Any, tuple[int, int]] = {
    ctypes.c_int: (-(2**31), 2**31 - 1),
    ctypes.c_uint: (0, 2**32 - 1),
    ctypes.c_size_t: (0, 2**64 - 1),
    ctypes.c_void_p: (0, 2**64 - 1),
}


class Handle(ctypes.c_void_p):
    """Where NCCL writes a new communicator or window: ``value`` is an integer, or ``None`` for NULL.

    It starts as NULL. NCCL may write it from a thread of its own, and after a call that fails, so keep it until the
    operation is complete. ``kept`` is what NCCL still reads by address (a communicator's name, for one): keep the
    handle as long as what it names.
    """

    kept: tuple[Any, ...] = ()

    def out(self, *kept: Any) -> Any:
        """Return what NCCL gets to write to.

        Parameters
        ----------
        *kept
            What NCCL reads by address.

        Returns
        -------
        object
            The argument.

        Raises
        ------
        ValueError
            It is not NULL: NCCL 2.18 to 2.22 can follow what they find there, and crash.
        """
        if self.value is not None:
            raise ValueError(f"the handle must be NULL before the call; it is {self.value:#x}")
        self.kept = kept
        return ctypes.byref(self)


def last_error(library: Library) -> str:
    """Return NCCL's latest warning of this process, of whatever call, thread and communicator.

    Parameters
    ----------
    library : Library
        The library.

    Returns
    -------
    str
        One line, or nothing.
    """
    text = library.function("ncclGetLastError")(None)
    return " ".join((text or b"").decode(errors="replace").split())


def check(library: Library, call: str, result: int, *, in_progress: bool = False) -> int:
    """Raise unless a call's result is success, or in progress where that is no failure.

    Parameters
    ----------
    library : Library
        The library, which is asked for its texts.
    call : str
        The C function.
    result : int
        What it returned.
    in_progress : bool, default False
        Whether ``IN_PROGRESS`` may come.

    Returns
    -------
    int
        ``SUCCESS`` or ``IN_PROGRESS``.

    Raises
    ------
    NCCLError
        Any other result, also one that this version has no name for.
    """
    if result == SUCCESS or (in_progress and result == IN_PROGRESS):
        return result
    # First of all, because the next call of any thread may write over it.
    detail = last_error(library)
    if result in RESULTS:
        what = (library.function("ncclGetErrorString")(result) or b"").decode(errors="replace")
        name = f"{RESULTS[result]} ({result}): {what}"
    else:
        name = f"result {result}, which NCCL 2.18 to 2.32 does not define"
    text = f"{call} failed with {name}" + (f"; NCCL says: {detail}" if detail else "")
    raise NCCLError(text, call=call, result=result, detail=detail)


def _converted(kind: Any, value: Any) -> Any:
    """Return a value as ctypes passes it."""
    if kind in _RANGES and hasattr(value, "__index__"):
        number, (least, largest) = operator.index(value), _RANGES[kind]
        if not least <= number <= largest:
            raise ValueError(f"must be {least} to {largest}")
        return kind.from_param(number)
    if isinstance(value, str):
        raise TypeError(f"a string is not {kind.__name__}")
    return kind.from_param(value)


def _argument(function: str, row: Declared, kind: Any, value: Any) -> Any:
    """Return one argument as ctypes passes it, or say which one is wrong."""
    try:
        return _converted(kind, value)
    except ValueError as error:
        raise ValueError(f"{function}: {row.name} {error}; got {value}") from None
    except (TypeError, ctypes.ArgumentError) as error:
        raise TypeError(f"{function}: {row.name}: {error}; got {value!r}") from None


def prepared(library: Library, name: str, *args: Any) -> Callable[[], Any]:
    """Return a call whose arguments are checked and converted now, once, for calling it many times.

    Parameters
    ----------
    library : Library
        The library.
    name : str
        The C function.
    *args
        All of its arguments, in its order.

    Returns
    -------
    callable
        Takes nothing and returns what the function returns: the result is for :func:`check`. A ``Handle`` or another
        ctypes object among the arguments is read at each call, a plain value is not read again.

    Raises
    ------
    NotSupportedError
        This library lacks the function, or a struct that it takes.
    TypeError
        The number of arguments or the type of one is wrong.
    ValueError
        A number does not fit.
    """
    declared, kinds = FUNCTIONS[name].arguments, library.function(name).argtypes
    if len(args) != len(declared):
        names = ", ".join(row.name for row in declared)
        raise TypeError(f"{name} takes {len(declared)} arguments ({names}); got {len(args)}")
    rows = zip(declared, kinds, args, strict=True)
    converted = [_argument(name, row, kind, value) for row, kind, value in rows]
    return functools.partial(library.untyped(name), *converted)


def call(library: Library, name: str, *args: Any, in_progress: bool = False) -> int:
    """Call a function that returns a result, and check the result.

    Parameters
    ----------
    library : Library
        The library.
    name : str
        The C function.
    *args
        All of its arguments, in its order.
    in_progress : bool, default False
        Whether ``IN_PROGRESS`` is no failure.

    Returns
    -------
    int
        ``SUCCESS`` or ``IN_PROGRESS``.

    Raises
    ------
    NCCLError
        It failed.
    NotSupportedError
        This library lacks it.
    """
    return check(library, name, prepared(library, name, *args)(), in_progress=in_progress)
