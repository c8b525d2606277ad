"""Operations that are asked for again: made once, and checked each time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from butter_mpi.arguments import Arguments
from butter_mpi.collectives import Operation, Owners
from butter_mpi.enums import ReduceOp
from butter_mpi.planes.solo import SoloPlane


class _Plane(SoloPlane):
    """A plane that keeps what is submitted."""

    def __init__(self) -> None:
        super().__init__(who="rank 0/1 on here", deadline=10)
        self.submitted: list[Operation] = []

    def submit(self, operation: Operation, owners: Owners = ()) -> None:
        self.submitted.append(operation)
        super().submit(operation, owners)


@pytest.fixture
def plane() -> _Plane:
    """Such a plane."""
    return _Plane()


def test_the_same_call_at_the_same_place_is_one_operation(plane: _Plane) -> None:
    """A loop submits one object; another argument or another line is another one."""
    data = np.zeros(8, np.uint8)
    for nbytes in (4, 4, 8):
        plane.all_gather(data.ctypes.data, data.ctypes.data, nbytes)
    plane.all_gather(data.ctypes.data, data.ctypes.data, 4)
    first, second, longer, elsewhere = plane.submitted
    assert first is second and longer is not first and elsewhere is not first
    assert (longer.count, elsewhere.count) == (8, 4) and first.site != elsewhere.site and first.site == longer.site
    assert plane.sequence == 4


def test_the_same_call_on_arrays_is_one_operation(plane: _Plane) -> None:
    """So is it with arrays, which are handed beside it: other memory, or another line, makes another one."""
    arguments, data, other = Arguments(plane), np.zeros(8), np.zeros(8)
    made = [arguments.collective("all_reduce", array, None, None, op="sum") for array in (data, data, data[:], other)]
    made.append(arguments.collective("all_reduce", data, None, None, op=ReduceOp.SUM))
    (same, again, view, elsewhere, later) = (operations[0] for operations, _ in made)
    assert same is again is view and elsewhere is not same and later is not same and later.send == same.send
    assert [len(owners) for _, owners in made] == [1] * 5 and made[2][1][0].base is data and made[3][1][0] is other
    halves = arguments.collective("all_gather", data[:4], data[4:], None)[1]
    assert [half.base is data for half in halves] == [True, True]


@pytest.mark.parametrize("nbytes", [True, 1.0, np.int64(1)], ids=["bool", "float", "another integer"])
def test_what_is_merely_equal_is_refused(plane: _Plane, nbytes: Any) -> None:
    """A number of another type is refused also where an equal one was taken at the same place."""
    data = np.zeros(8, np.uint8)

    def gather(one: Any) -> None:
        plane.all_gather(data.ctypes.data, data.ctypes.data, one)

    gather(1)
    with pytest.raises(TypeError, match="nbytes must be an int"):
        gather(nbytes)
    assert plane.sequence == 1


def test_there_is_no_end_of_operations(plane: _Plane) -> None:
    """However many different ones are asked for, few are kept."""
    data = np.zeros(5000, np.uint8)
    for nbytes in range(5000):
        plane.all_gather(data.ctypes.data, data.ctypes.data, nbytes)
    assert len(plane._operations) <= 4096 and [one.count for one in plane.submitted] == list(range(5000))
