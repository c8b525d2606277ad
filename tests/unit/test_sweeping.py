"""Communicators of closed planes, which are freed once every rank has said goodbye."""

from __future__ import annotations

import pytest

from butter_mpi.planes import peers


class _Retiring:
    """As much of a control plane as is asked; meanwhile another thread sweeps too."""

    def __init__(self, *, settled: bool) -> None:
        self._settled, self._asked, self.freed = settled, False, 0

    def settled(self) -> bool:
        assert not self.freed, "what is freed is not asked"
        if not self._asked:
            self._asked = True
            peers.sweep()
        return self._settled

    def free(self) -> None:
        self.freed += 1


def test_two_threads_that_sweep_at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each communicator is freed once, and what is not settled yet stays."""
    every = [_Retiring(settled=True), _Retiring(settled=False), _Retiring(settled=True)]
    monkeypatch.setattr(peers, "_RETIRING", [(one, ()) for one in every])
    peers.sweep()
    peers.sweep()
    assert [one.freed for one in every] == [1, 0, 1]
    assert len(peers._RETIRING) == 1
