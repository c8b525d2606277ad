"""The benchmarks: a table from rank 0 on the stand-ins, one refusal where there is no GPU."""

from __future__ import annotations

import json
import re
import textwrap
from itertools import product
from pathlib import Path

import pytest
from helpers.mpirun import run_job
from helpers.standin import build

BENCH = ["-m", "butter_mpi.bench"]
SWEEP = ["-m", "butter_mpi.sweep"]
DIFFERENT = (
    "every rank must have the same arguments: --from is 8 on rank 0, 16 on rank 1; "
    "--to is 1024 on rank 0, 1073741824 on rank 1"
)


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
        "plan",
        "backend.all_reduce",
        "Communicator.all_reduce",
    ], result.text
    assert rest[2].startswith("  plan with a graph "), result.text
    costs = {line[2:30].strip(): [int(one) for one in line[30:].split()[::2]] for line in features[1:]}
    bounded = ["health", "sequence", "in-flight mark", "call site", "record"]
    assert list(costs)[:5] == bounded and all(costs[name][0] > 0 for name in bounded), result.text
    assert costs["record"][1] > 0, result.text
    for column, whole in enumerate(costs["the first five together"]):
        assert abs(whole - sum(costs[name][column] for name in bounded)) <= len(bounded), result.text


def test_sizes(tmp_path: Path) -> None:
    """Each size and type has a row with the bare call's time and every variant as its multiple; FILE has the times."""
    file = tmp_path / "times.json"
    words = ["--op", "all_reduce,reduce_scatter", "--from", "512", "--to", "1K", "--json", str(file)]
    result = run_job(2, [*SWEEP, *words], env=build().env(), timeout=100)
    assert result.rc == 0 and not result.rank_out[1], result.text
    lines, scattered, notes = (part.splitlines() for part in result.rank_out[0].split("\n\n"))
    assert lines[0] == "all_reduce, 2 ranks, NCCL 23203, transport P2P", result.text
    assert lines[2].split()[5:] == ["plane", "plan", "graph", "registered", "symmetric"], result.text
    rows = json.loads(file.read_text())["rows"]
    every = product(("all_reduce", "reduce_scatter"), ("float32", "bfloat16"), (512, 1024))
    assert [(row["operation"], row["dtype"], row["bytes"]) for row in rows] == list(every)
    assert scattered[0].startswith("reduce_scatter, 2 ranks"), result.text
    for row, line in zip(rows, lines[3:] + scattered[3:], strict=True):
        assert float(line.split()[5]) == pytest.approx(row["us"]["plane"] / row["us"]["bare"], abs=6e-4), result.text
    assert notes == ["add path: needs two ranks, and NVRTC on both"], result.text


@pytest.mark.parametrize("command", [BENCH, [*SWEEP, "--from", "8", "--to", "8"]], ids=["bench", "sweep"])
def test_no_graph_is_no_row(command: list[str]) -> None:
    """Where graphs are not used nothing is said of them."""
    result = run_job(2, command, env=build().env(transport="NET/Socket"), timeout=60)
    assert result.rc == 0 and "plan" in result.rank_out[0] and "graph" not in result.rank_out[0], result.text


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter"])
def test_wrong_result_is_no_time(name: str) -> None:
    """A variant that does not give the result ends the benchmark, by its name and the element, on three ranks too."""
    program = f"""
    import butter_mpi.sweep as sweep
    real = sweep.Sweep.variants
    def variants(self, operation, nbytes, dtype):
        found = real(self, operation, nbytes, dtype)
        found[1].call = lambda: None
        return found
    sweep.Sweep.variants = variants
    raise SystemExit(sweep.main(["--op", "{name}", "--from", "8", "--to", "20"]))
    """
    result = run_job(3, textwrap.dedent(program), env=build().env(), timeout=60)
    assert result.rc != 0, result.text
    # The buffer of 8 bytes has a whole element for each rank.
    told = rf"butter_mpi\.sweep: rank (\d): plane: {name} of 3 float32 is wrong at element (\d)"
    wrong = {
        "all_reduce": dict.fromkeys(range(3), 0),
        "all_gather": {0: 1, 1: 0, 2: 0},
        "reduce_scatter": {0: 0, 1: 1, 2: 2},
    }
    found = {int(rank): int(at) for rank, at in re.findall(told, result.text)}
    assert found and found.items() <= wrong[name].items(), result.text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--to", "2"], "4 or more"),
        (["--from", "8", "--to", "7"], "--from"),
        (["--op", "all_reduce,all"], "no operation 'all': it is all_reduce, all_gather, reduce_scatter"),
        (["--fro", "8"], "unrecognized arguments: --fro 8"),
        (["--torch"], "--torch needs PyTorch, and it is not installed here"),
    ],
)
def test_sizes_that_are_none(words: list[str], text: str) -> None:
    """A wrong size is a usage error."""
    result = run_job(1, [*SWEEP, *words], timeout=60)
    assert result.rc == 2 and text in result.rank_err[0] and "Traceback" not in result.text, result.text


def test_file_that_cannot_be_written(tmp_path: Path) -> None:
    """The table is there all the same; rank 0 says in one line why the file is not."""
    words = ["--from", "8", "--to", "8", "--json", str(tmp_path / "none" / "times.json")]
    result = run_job(2, [*SWEEP, *words], env=build().env(), timeout=60)
    assert result.rc == 3 and result.rank_out[0].startswith("all_reduce, 2 ranks"), result.text
    told = rf"butter_mpi\.sweep: {re.escape(words[-1])} cannot be written: No such file or directory\n"
    assert re.fullmatch(told, result.rank_err[0]) and not result.rank_err[1], result.text


@pytest.mark.parametrize(
    ("name", "mpi", "words", "told"),
    [
        ("bench", "mpich", ["--nothing", "--nothing"], "unrecognized arguments: --nothing"),
        (
            "sweep",
            "openmpi",
            ["", "--nothing", "--from 8 --to 7"],
            "rank 1: unrecognized arguments: --nothing; rank 2: --from must not be larger than --to",
        ),
        ("bench", "mpich", ["", "--help"], "rank 1: --help was asked for"),
        (
            "sweep",
            "mpich",
            ["--json a --to 1K", "--json b --from 16"],
            DIFFERENT,
        ),
    ],
    ids=["of all", "of others", "help", "different"],
)
def test_wrong_arguments_are_said_once(name: str, mpi: str, words: list[str], told: str) -> None:
    """In one line, by rank 0, however late; every rank ends with the status of wrong arguments."""
    # A rank that leaves with a status has Open MPI end all others.
    program = f"""
    import os, runpy, sys, time
    time.sleep(float(os.environ["LATE"]))
    sys.argv[1:] = os.environ["WORDS"].split()
    runpy.run_module("butter_mpi.{name}", run_name="__main__")
    """
    ranks = {rank: {"WORDS": some, "LATE": "0" if rank else "1"} for rank, some in enumerate(words)}
    result = run_job(len(words), textwrap.dedent(program), mpi=mpi, rank_env=ranks, timeout=60)
    assert result.rc == 2 and not any(result.rank_err[1:]), result.text
    assert result.rank_err[0] == f"butter_mpi.{name}: {told} (--help lists the options)\n", result.text


@pytest.mark.parametrize("command", [BENCH, SWEEP], ids=["bench", "sweep"])
def test_no_gpu_is_said_once(command: list[str]) -> None:
    """Without a GPU the command ends with the reason, from one rank, and no traceback."""
    result = run_job(2, command, timeout=60)
    assert result.rc != 0 and not result.rank_err[1], result.text
    assert "no CUDA driver" in result.rank_err[0] and "Traceback" not in result.text, result.text
    assert "it needs GPUs" in result.rank_err[0] and "host" not in result.rank_err[0], result.text


def test_gpu_that_ranks_share_without_being_asked() -> None:
    """Two ranks on one GPU are refused with what this command can do about it, and nothing else."""
    result = run_job(2, BENCH, env=build().env(devices=1), timeout=60)
    assert result.rc == 3, result.text
    assert "--share-gpu" in result.rank_err[0] and "host" not in result.rank_err[0].replace("on host", ""), result.text
