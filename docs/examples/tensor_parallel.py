"""A linear layer of two matrices, split over the ranks: columns of the first, rows of the second, one all_reduce.

``mpirun -np 2 python docs/examples/tensor_parallel.py`` on NumPy arrays; with ``--gpu`` on CuPy arrays, one GPU a rank.
Every rank also computes the whole layer alone, and the program fails unless both agree.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import butter_mpi

BATCH, INPUTS, HIDDEN, OUTPUTS = 32, 64, 240, 16


def layer(xp: Any, x: Any, first: Any, second: Any) -> Any:
    """Return ``relu(x @ first) @ second``."""
    return xp.maximum(x @ first, 0) @ second


def split(rank: int, world_size: int) -> slice:
    """Return the hidden units of a rank; none is left out where they cannot be divided evenly."""
    return slice(HIDDEN * rank // world_size, HIDDEN * (rank + 1) // world_size)


def main() -> None:
    """Compute the layer on all ranks together, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="CuPy arrays on the nccl plane")
    parser.add_argument("--share-gpu", action="store_true", help="let ranks share a GPU")
    options = parser.parse_args()
    with butter_mpi.init(plane="nccl" if options.gpu else "host", share_gpu=options.share_gpu or None) as comm:
        xp: Any = np
        if options.gpu:
            import cupy

            xp = cupy
        # The same numbers on every rank: each keeps its share of the weights.
        random = np.random.default_rng(0)
        x, first, second = (
            xp.asarray(random.standard_normal(shape), dtype=xp.float64)
            for shape in ((BATCH, INPUTS), (INPUTS, HIDDEN), (HIDDEN, OUTPUTS))
        )
        mine = split(comm.rank, comm.world_size)
        # Each rank has some hidden units: relu needs no others, and the products with their rows add up to the output.
        output = layer(xp, x, xp.ascontiguousarray(first[:, mine]), xp.ascontiguousarray(second[mine]))
        comm.all_reduce(output)
        worst = float(abs(output - layer(xp, x, first, second)).max())
        if worst > 1e-9:
            raise SystemExit(f"rank {comm.rank}: differs from the whole layer by {worst}")
        if comm.rank == 0:
            print(f"{comm.world_size} ranks agree with one: largest difference {worst:.1e}")


if __name__ == "__main__":
    main()
