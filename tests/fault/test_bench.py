"""The benchmark: a table from rank 0 on the stand-ins, one refusal where there is no GPU."""

from __future__ import annotations

from helpers.mpirun import run_job
from helpers.standin import build

BENCH = ["-m", "butter_mpi.bench"]


def test_table_of_ratios() -> None:
    """Every layer stands in the table, as a multiple of the bare call; the policy is set where it is unset.

    So does what each feature of a submission costs, and the sum of those that have a bound.
    """
    result = run_job(2, BENCH, env=build().env(), timeout=60)
    assert result.rc == 0 and not result.rank_out[1], result.text
    layers, features = (part.splitlines() for part in result.rank_out[0].split("\n\n"))
    head, first, *rest = layers
    assert head.startswith("host time of one all_reduce of 16 float32, 2 ranks, transport P2P"), result.text
    assert first.split()[-2:] == ["1.00", "x"] and [line.split()[0] for line in rest] == [
        "ctypes,",
        "plan",
        "backend.all_reduce",
        "Communicator.all_reduce",
    ], result.text
    costs = {line[2:30].strip(): int(line.split()[-2]) for line in features[1:]}
    bounded = ["health", "sequence", "in-flight mark", "call site", "record"]
    assert list(costs)[:5] == bounded and all(costs[name] > 0 for name in bounded), result.text
    assert abs(costs["the first five together"] - sum(costs[name] for name in bounded)) <= len(bounded), result.text


def test_no_gpu_is_said_once() -> None:
    """Without a GPU the command ends with the reason, from one rank, and no traceback."""
    result = run_job(2, BENCH, timeout=60)
    assert result.rc != 0 and not result.rank_err[1], result.text
    assert "no CUDA driver" in result.rank_err[0] and "Traceback" not in result.text, result.text
