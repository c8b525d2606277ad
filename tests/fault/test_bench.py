"""The benchmark: a table from rank 0 on the stand-ins, one refusal where there is no GPU."""

from __future__ import annotations

from helpers.mpirun import run_job
from helpers.standin import build

BENCH = ["-m", "butter_mpi.bench"]


def test_table_of_ratios() -> None:
    """Every layer stands in the table, as a multiple of the bare call; the policy is set where it is unset."""
    result = run_job(2, BENCH, env=build().env(), timeout=60)
    assert result.rc == 0 and not result.rank_out[1], result.text
    head, first, *rest = result.rank_out[0].splitlines()
    assert head.startswith("host time of one all_reduce of 16 float32, 2 ranks, transport P2P"), result.text
    assert first.split()[-2:] == ["1.00", "x"] and len(rest) == 3, result.text


def test_no_gpu_is_said_once() -> None:
    """Without a GPU the command ends with the reason, from one rank, and no traceback."""
    result = run_job(2, BENCH, timeout=60)
    assert result.rc != 0 and not result.rank_err[1], result.text
    assert "no CUDA driver" in result.rank_err[0] and "Traceback" not in result.text, result.text
    assert "it needs GPUs" in result.rank_err[0] and "host" not in result.rank_err[0], result.text


def test_gpu_that_ranks_share_without_being_asked() -> None:
    """Two ranks on one GPU are refused with what this command can do about it, and nothing else."""
    result = run_job(2, BENCH, env=build().env(devices=1), timeout=60)
    assert result.rc == 3, result.text
    assert "--share-gpu" in result.rank_err[0] and "host" not in result.rank_err[0].replace("on host", ""), result.text
