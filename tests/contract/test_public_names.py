"""The public face: exactly these names, sorted, each with a docstring."""

from __future__ import annotations

import inspect

import pytest

import butter_mpi
from butter_mpi import errors

NAMES = [
    "ButterError",
    "CUDAError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "Communicator",
    "CommunicatorBrokenError",
    "CommunicatorClosedError",
    "DType",
    "FaultPolicy",
    "LibraryNotFoundError",
    "NCCLError",
    "NotSupportedError",
    "PeerLostError",
    "PreMulSum",
    "PreflightError",
    "PreflightReport",
    "Receipt",
    "ReceiptError",
    "ReduceOp",
    "StartError",
    "StartTimeoutError",
    "TransportError",
    "__version__",
    "init",
    "versions",
]


def test_public_names_are_exactly_these() -> None:
    """A name is public only if it stands here and in ``__all__``, sorted."""
    assert butter_mpi.__all__ == NAMES
    assert sorted(NAMES) == NAMES
    assert dir(butter_mpi) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_public_name_is_there_and_documented(name: str) -> None:
    """Each name loads, and carries its own docstring (the version is a string)."""
    value = getattr(butter_mpi, name)
    if name == "__version__":
        assert isinstance(value, str)
    else:
        assert inspect.cleandoc(value.__doc__)
        assert not isinstance(value, type) or "__doc__" in vars(value)


def test_every_error_is_public() -> None:
    """No error class of the tree is left out, and each derives from ButterError."""
    tree = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert tree == set(errors.__all__)
    assert tree <= set(NAMES)
    assert all(issubclass(getattr(errors, name), errors.ButterError) for name in tree)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name gives the usual error; a type checker sees it too, or it would refuse the ignore here."""
    with pytest.raises(AttributeError, match="module 'butter_mpi' has no attribute 'Comunicator'"):
        _ = butter_mpi.Comunicator  # type: ignore[attr-defined]
