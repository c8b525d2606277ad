"""Letters between two nodes over a way that loses, repeats and swaps: each comes once, in order, and few at a time."""

from __future__ import annotations

import random
from typing import Any

import pytest

from butter_mpi.sentinel.mailing import Mail

TICK = 0.2


class Way:
    """Two nodes, and what is under way between them."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.under_way = chance, list[tuple[int, str, dict[str, Any]]]()
        self.come: list[int] = []
        self.most = 0
        self.mails = [Mail(me, self._carry, lambda fields: self.come.append(fields["body"]["n"])) for me in (0, 1)]

    def _carry(self, node: int, _attempt: int, kind: str, **fields: Any) -> None:
        self.under_way.append((node, kind, fields))

    def pass_time(self) -> None:
        """Let what is under way arrive, or not, or twice, in any order; then a look of both."""
        self.most = max(self.most, len(self.under_way))
        moved, self.under_way = self.under_way, []
        self.chance.shuffle(moved)
        for node, kind, fields in moved:
            for _ in range(self.chance.choice((0, 1, 1, 2))):
                self.mails[node].hear(kind, fields)
        for mail in self.mails:
            mail.tick(TICK)


@pytest.mark.parametrize("seed", range(20))
def test_each_comes_once_and_in_order(seed: int) -> None:
    """Whatever the way does; and only as much is under way as is allowed."""
    way = Way(random.Random(seed))
    for number in range(40):
        way.mails[0].post(1, body={"n": number, "x": "x" * 8000})
    assert way.mails[0].waiting(1) == 40
    for _ in range(4000):
        way.pass_time()
        if not way.mails[0].waiting(1):
            break
    assert way.come == list(range(40)) and way.most < 20
