"""How a start that failed is shown where the program does not catch it: its traceback once, by the first rank.

Every rank raises, and one mistake would be as many tracebacks as there are ranks, line by line in one another.
"""

from __future__ import annotations

import sys
import traceback
import weakref
from types import TracebackType

from butter_mpi.errors import ButterError

__all__ = ["show_once"]

_SHORT: weakref.WeakKeyDictionary[ButterError, str] = weakref.WeakKeyDictionary()


def show_once(error: ButterError, who: str, rank: int | None) -> None:
    """On other ranks than the first, let an error that nobody catches be shown without its traceback.

    Its text is whole on each: what another rank comes to show before the job ends cannot be known. A hook of the
    program's own shows it as it likes.

    Parameters
    ----------
    error : ButterError
        What is about to be raised.
    who : str
        This rank.
    rank : int or None
        Its number; ``None``: there is no other rank.
    """
    if not rank:
        return
    text = error.message if error.message.startswith("rank ") else f"{who}: {error.message}"
    _SHORT[error] = f"{type(error).__name__}: {text}"
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # Nothing refers weakly to errors of Python's own.
    text = _SHORT.get(error) if isinstance(error, ButterError) else None
    if text is None or _has_more(error):
        sys.__excepthook__(kind, error, trace)
    else:
        # Where Python would, and at once, so that lines of other ranks come before or after it.
        sys.stderr.write(f"butter_mpi: {text}\n  raised at {_place(trace)}\n")
        sys.stderr.flush()


def _place(trace: TracebackType | None) -> str:
    """Return the innermost line of the program's own."""
    outside = (
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(trace)
        if not str(frame.f_globals.get("__name__", "")).startswith("butter_mpi.")
    )
    *_, place = ("?", *outside)
    return place


def _has_more(error: BaseException) -> bool:
    """Whether a traceback says what the text does not: an error that is not ours behind it, or a note."""
    behind = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return hasattr(error, "__notes__") or not (behind is None or isinstance(behind, ButterError))
