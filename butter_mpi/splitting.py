"""Communicators from communicators: what all ranks of one agree on before each part of them makes its own."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, SupportsIndex

from butter_mpi.descent import members, refused
from butter_mpi.lane import LANE
from butter_mpi.planes.base import Plane

__all__ = ["Part", "Splits"]

Part = Callable[[str, str, int | None, Sequence[int], Sequence[str]], Any]
"""Makes the communicator of one part of the ranks: by the call's name, the part's name and color (``None``: no part),
its ranks in their new order, and their nodes."""

_ERRORS: Mapping[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError}


def _index(value: Any) -> Any:
    """Return an integer of any kind (NumPy's too) as Python's; what is none, and truth values, as they are."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


class Splits:
    """Base of ``Communicator``: what makes further communicators of its ranks."""

    _plane: Plane
    _record: Mapping[str, Any]
    _part: Part
    _survive: Callable[[], Any]
    _splits = 0

    def split(self, color: SupportsIndex | None, key: SupportsIndex = 0) -> Self | None:
        """Make a communicator of the ranks that give the same `color`, for each color.

        It is a whole communicator: with a sequence, a health and a watcher of its own, on the same plane, with the
        settings of this one, and closed by itself. This one may be closed before it; a failure of one is none of the
        other, but for a rank that ends, which is lost to all that have it.

        Parameters
        ----------
        color : int or None
            Which ranks go together, 0 to 2**31 - 1; ``None``: this rank is in none of them.
        key : int, default 0
            The ranks of a communicator are in the order of their keys; of equal ones, in that of their ranks here.

        Returns
        -------
        Communicator or None
            The one with this rank; ``None`` for color ``None``.

        Raises
        ------
        TypeError, ValueError
            An argument of some rank is wrong: the same error on every rank. Nothing was made.
        PreflightError, StartError, NotSupportedError, TransportError
            The part with this rank could not be made, as in ``init``; this communicator, and other parts, go on.
        CommunicatorBrokenError, CommunicatorClosedError
            As for ``all_reduce``.

        Notes
        -----
        **Collective**: every rank calls it, in order with the collectives; it takes no sequence number. **Stream**:
        none. The backend of what is made has the stream that ``init`` was given, or one of its own. **Blocking**: until
        every rank has come, then until the part stands, at most the start deadline. **In place**: no buffers.

        See Also
        --------
        dup : All ranks together, in the same order (``MPI_Comm_split``).
        """
        return self._divided("split", color, key)

    def dup(self) -> Self:
        """Make a further communicator of all ranks, in the same order: a ``split`` in which all give one color.

        Returns
        -------
        Communicator
            Independent of this one, as a split's is.

        Raises
        ------
        PreflightError, StartError, NotSupportedError, TransportError
            It could not be made, as in ``init``; this communicator goes on.
        CommunicatorBrokenError, CommunicatorClosedError
            As for ``all_reduce``.

        Notes
        -----
        **Collective**, **Stream**, **Blocking**, **In place**: as for ``split``.

        See Also
        --------
        split : Some ranks each (``MPI_Comm_dup``).
        """
        made = self._divided("dup", 0, 0)
        assert made is not None
        return made

    def shrink(self) -> Self:
        """Make a communicator of the ranks that are left, after the loss of others; it replaces this one.

        The ranks keep their order. Where another rank is lost meanwhile, those that are left then agree anew; where one
        is lost later, the new communicator is broken in its turn, and can be shrunk. Its sequence goes on after the
        largest number of any survivor. Handles, symmetric arrays and plans of this one are void; communicators that
        were split off it go on, or break and are shrunk, by themselves.

        Returns
        -------
        Communicator
            Healthy, with the settings and the plane of this one; of one rank, if only this one is left.

        Raises
        ------
        NotSupportedError
            This launcher, MPI or setting does not let survivors go on; nothing was tried. The text has the remedy.
        CollectiveTimeoutError
            A rank that lives did not call it within the start deadline: which one.
        CommunicatorBrokenError
            Ranks called different things: which one what; or this rank had been stopped, and others went on without it.
        PreflightError, StartError, TransportError
            What is left could not be made, as in ``init``; this one is as it was, and can be shrunk again.
        ValueError
            Nothing broke; or inside a group.
        CommunicatorClosedError
            It was closed or aborted.

        Notes
        -----
        **Collective**: every rank that lives, but no other. **Stream**: none; what was under way is given up.
        **Blocking**: until every survivor has come, then until the new one stands, each at most the start deadline.
        **In place**: no buffers.

        See Also
        --------
        attempt_reconnect : Where every rank lives (``MPIX_Comm_shrink``).
        """
        made: Self = self._survive()
        return made

    def _divided(self, what: str, color: Any, key: Any) -> Self | None:
        plane, color, key = self._plane, _index(color), _index(key)
        wrong = refused(what, color, key)
        mine = {"refused": wrong} if wrong else {"refused": None, "color": color, "key": key}
        mine["node"] = self._record["machine"]
        with LANE.held(plane.who, what, plane.deadline):
            said = [json.loads(one) for one in plane._exchanged(what, json.dumps(mine).encode())]
            # An argument that is wrong on one rank is told on all, or they would wait for it.
            for rank, one in enumerate(said):
                if one["refused"]:
                    kind, text = one["refused"]
                    elsewhere = "" if rank == plane.rank() else f"rank {rank}: "
                    raise _ERRORS[kind](f"{plane.who}: {elsewhere}{text}")
            self._splits += 1
            name = f"dup {self._splits}" if what == "dup" else f"split {self._splits} color {color}"
            ranks = [] if color is None else members(said, color)
            made: Self | None = self._part(what, name, color, ranks, [said[rank]["node"] for rank in ranks])
            return made
