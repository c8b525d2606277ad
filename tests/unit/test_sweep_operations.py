"""What the sweep asks of torch.distributed, which is not installed where the others are tried."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from butter_mpi.enums import DType
from butter_mpi.sweep_operations import OPERATIONS, Place, Torch

# The second block of three, of 8 bytes each.
PLACE = Place(4096, 8, 1, 3, DType.FLOAT32)
WHOLE, OWN = (4096, 24, "float32"), (4104, 8, "float32")


@pytest.mark.parametrize(
    ("name", "function", "tensors"),
    [
        ("all_reduce", "all_reduce", (WHOLE,)),
        ("all_gather", "all_gather_into_tensor", (WHOLE, OWN)),
        ("reduce_scatter", "reduce_scatter_tensor", (OWN, WHOLE)),
    ],
)
def test_torch_takes_the_result_first(name: str, function: str, tensors: tuple[Any, ...]) -> None:
    """It is called with tensors over the buffer and this rank's block of it."""
    called: list[Any] = []

    def as_tensor(memory: Any, device: str) -> Any:
        assert device == "cuda:1"
        (nbytes,), (pointer, _) = (memory.__cuda_array_interface__[key] for key in ("shape", "data"))
        return SimpleNamespace(view=lambda dtype: (pointer, nbytes, dtype))

    torch = Torch.__new__(Torch)
    vars(torch).update(
        _torch=SimpleNamespace(as_tensor=as_tensor, float32="float32", bfloat16="bfloat16"),
        _device="cuda:1",
        _distributed=SimpleNamespace(**{function: lambda *given: called.append(given)}),
    )
    torch.call(OPERATIONS[name], PLACE)()
    assert called == [tensors]
