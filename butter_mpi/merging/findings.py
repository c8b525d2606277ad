"""What merged recordings tell, as values."""

from __future__ import annotations

from dataclasses import dataclass

from butter_mpi.merging.reading import Recording, Shape

__all__ = ["Behind", "Divergence", "Group", "Merged", "Row"]


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that submitted the same from the same line; ``time`` is of the lowest of them, ``shape`` too."""

    ranks: tuple[int, ...]
    text: str
    time: float
    shape: Shape | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One number: who submitted what, who has not come to it, and whose record of it is not there."""

    number: int
    groups: tuple[Group, ...]
    absent: tuple[int, ...]
    unknown: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first number at which ranks submitted something else.

    ``kind`` is ``"collective"``, ``"exchange"`` or ``"send/recv"``; ``exact`` false: it may have been before, where
    records are overwritten; ``hint`` is what it looks like.
    """

    kind: str
    number: int
    exact: bool
    groups: tuple[Group, ...]
    absent: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Behind:
    """Ranks that stopped after a number that all have come to, and what the others submitted next."""

    kind: str
    after: int
    ranks: tuple[int, ...]
    ahead: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Merged:
    """What the recordings of one communicator tell together.

    ``missing`` are runs of ranks, first and last; ``outdated`` ranks of which there is only what came before the others
    reconnected; ``common`` is the highest number up to which all are known to have submitted the same, ``None`` where
    some have overwritten what others have not come to yet.
    """

    ranks: tuple[Recording, ...]
    missing: tuple[tuple[int, int], ...] = ()
    outdated: tuple[int, ...] = ()
    common: int | None = None
    divergence: Divergence | None = None
    behind: Behind | None = None
    differing_pairs: tuple[Divergence, ...] = ()
    open_pairs: tuple[Behind, ...] = ()
    rows: tuple[Row, ...] = ()

    @property
    def agreed(self) -> bool:
        """Whether nobody differs and nobody is behind."""
        return not (self.divergence or self.behind or self.differing_pairs or self.open_pairs)

    @property
    def settled(self) -> bool:
        """Whether that is known of every rank of the communicator."""
        return self.agreed and not self.missing and not self.outdated
