"""Data-parallel training: each rank has a share of the batch; gradients are averaged while the backward pass goes on.

``mpirun -np 2 python docs/examples/data_parallel.py`` on NumPy arrays; with ``--gpu`` on CuPy arrays, one GPU a rank.
Every rank also trains the same network alone on the whole batch, and the program fails unless both end alike. With
``--gpu --time WIDTH`` it then says how much of the averaging a step of layers of that width hides behind computation.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

import butter_mpi

BATCH, WIDTHS, STEPS, RATE = 96, (8, 64, 64, 1), 60, 0.05
TIMED_BATCH, TIMED_LAYERS, TIMED_STEPS = 4096, 8, 20


class Network:
    """A small perceptron with one bucket for the gradients of each layer.

    Parameters
    ----------
    xp : module
        NumPy or CuPy.
    widths : sequence of int
        Of the input, the hidden layers and the output.
    """

    def __init__(self, xp: Any, widths: Sequence[int] = WIDTHS) -> None:
        random = np.random.default_rng(1)
        self.xp = xp
        self.weights = [
            xp.asarray(random.standard_normal((n, m)) / n**0.5, dtype=xp.float32) for n, m in pairwise(widths)
        ]
        self.buckets = [xp.zeros_like(weight) for weight in self.weights]

    def loss(self, x: Any, y: Any) -> float:
        """Return the mean squared error."""
        return float(((self._forward(x)[-1] - y) ** 2).mean())

    def _forward(self, x: Any) -> list[Any]:
        values = [x]
        for weight in self.weights[:-1]:
            values.append(self.xp.tanh(values[-1] @ weight))
        return [*values, values[-1] @ self.weights[-1]]

    def backward(self, x: Any, y: Any) -> Iterator[int]:
        """Fill the buckets from the last layer to the first; yield the number of each when it is filled."""
        values = self._forward(x)
        error = 2 * (values[-1] - y) / len(x)
        for layer in reversed(range(len(self.weights))):
            self.buckets[layer][...] = values[layer].T @ error
            yield layer
            if layer:
                error = (error @ self.weights[layer].T) * (1 - values[layer] ** 2)

    def step(self) -> None:
        """Move against the gradients."""
        for weight, bucket in zip(self.weights, self.buckets, strict=True):
            weight -= RATE * bucket


class Reducer:
    """Averages buckets over the ranks beside the computation.

    Parameters
    ----------
    comm : Communicator
        Its ranks.
    xp : module
        NumPy or CuPy. On the host plane the average is there when ``start`` returns.
    """

    def __init__(self, comm: butter_mpi.Communicator, xp: Any) -> None:
        self._comm, self._xp = comm, xp
        self._beside = xp.cuda.Stream(non_blocking=True) if xp is not np else None

    def start(self, bucket: Any) -> None:
        """Average a bucket after what the current stream holds, on a stream of its own: what comes next goes on."""
        if self._beside is None:
            self._comm.all_reduce(bucket, op="avg")
            return
        self._beside.wait_event(self._xp.cuda.get_current_stream().record())
        with self._beside:
            self._comm.all_reduce(bucket, op="avg")

    def finish(self) -> None:
        """Let the current stream wait for all averages."""
        if self._beside is not None:
            self._xp.cuda.get_current_stream().wait_event(self._beside.record())


def step(network: Network, x: Any, y: Any, reducer: Reducer | None = None, *, beside: bool = True) -> None:
    """Train one step on a batch, or on this rank's share of it; not `beside`: average after the backward pass."""
    for layer in network.backward(x, y):
        if reducer is not None and beside:
            reducer.start(network.buckets[layer])
    if reducer is not None:
        for bucket in () if beside else reversed(network.buckets):
            reducer.start(bucket)
        reducer.finish()
    network.step()


def train(network: Network, x: Any, y: Any, reducer: Reducer | None = None) -> None:
    """Train on a batch, or on this rank's share of it."""
    for _ in range(STEPS):
        step(network, x, y, reducer)


def hidden(comm: butter_mpi.Communicator, xp: Any, width: int) -> str:
    """Return what a step takes without averages, with them beside the backward pass, and after it."""
    network = Network(xp, [width] * (TIMED_LAYERS + 1))
    x = xp.asarray(np.random.default_rng(3).standard_normal((TIMED_BATCH, width)), dtype=xp.float32)
    reducer = Reducer(comm, xp)
    ways: dict[str, dict[str, Any]] = {
        "alone": {},
        "beside": {"reducer": reducer},
        "after": {"reducer": reducer, "beside": False},
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(TIMED_STEPS + 2):
        for way, how in ways.items():
            comm.all_gather_json(None)
            began = time.perf_counter()
            step(network, x, x, **how)
            xp.cuda.get_current_stream().synchronize()
            # The first steps make what later ones use again.
            if number > 1:
                times[way].append(1e3 * (time.perf_counter() - began))
    alone, beside, after = (statistics.median(times[way]) for way in ways)
    sent = sum(bucket.nbytes for bucket in network.buckets) / 2**20
    return (
        f"a step on {comm.world_size} ranks, {sent:.0f} MiB averaged: {alone:.2f} ms without, {beside:.2f} beside the "
        f"backward pass, {after:.2f} after it: {(after - beside) / (after - alone):.0%} of the averaging is hidden"
    )


def share(arrays: Sequence[Any], rank: int, world_size: int) -> list[Any]:
    """Return a rank's rows: the average of averages is the whole average where all have as many."""
    if BATCH % world_size:
        raise SystemExit(f"{BATCH} rows cannot be divided evenly over {world_size} ranks")
    rows = BATCH // world_size
    return [array[rank * rows : (rank + 1) * rows] for array in arrays]


def main() -> None:
    """Train on all ranks together and alone, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="CuPy arrays on the nccl plane")
    parser.add_argument("--share-gpu", action="store_true", help="let ranks share a GPU")
    parser.add_argument("--time", type=int, metavar="WIDTH", help="with --gpu: say what layers this wide hide")
    options = parser.parse_args()
    if options.time and not options.gpu:
        parser.error("--time needs --gpu: on the host plane nothing goes on beside an average")
    with butter_mpi.init(plane="nccl" if options.gpu else "host", share_gpu=options.share_gpu or None) as comm:
        xp: Any = np
        if options.gpu:
            import cupy

            xp = cupy
        random = np.random.default_rng(2)
        x = xp.asarray(random.standard_normal((BATCH, WIDTHS[0])), dtype=xp.float32)
        y = xp.sin(x.sum(axis=1, keepdims=True))
        together, alone = Network(xp), Network(xp)
        before = together.loss(x, y)
        own_x, own_y = share((x, y), comm.rank, comm.world_size)
        train(together, own_x, own_y, Reducer(comm, xp))
        train(alone, x, y)
        ours, its = together.loss(x, y), alone.loss(x, y)
        if not (ours < before / 2 and abs(ours - its) < 1e-3 * its):
            raise SystemExit(f"rank {comm.rank}: loss {before} became {ours} together, {its} alone")
        if comm.rank == 0:
            print(f"loss {before:.4f} became {ours:.4f} on {comm.world_size} ranks, {its:.4f} on one")
        said = hidden(comm, xp, options.time) if options.time else ""
        if said and comm.rank == 0:
            print(said)


if __name__ == "__main__":
    main()
