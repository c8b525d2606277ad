"""The worked programs of docs/examples: right on the host plane, and wrong numbers are no success."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.job import TESTS
from helpers.mpirun import run_job

EXAMPLES = TESTS.parent / "docs" / "examples"
SAYS = {"tensor_parallel": "{0} ranks agree with one", "data_parallel": r"loss \d\.\d+ became 0\.\d+ on {0} ranks"}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", SAYS)
def test_program(name: str, ranks: int) -> None:
    """Together the ranks come to what one comes to alone; rank 0 says so."""
    result = run_job(ranks, [str(EXAMPLES / f"{name}.py")])
    assert result.rc == 0 and re.match(SAYS[name].format(ranks), result.rank_out[0]), result.text
    assert not any(result.rank_out[1:]), result.text


@pytest.mark.parametrize("name", SAYS)
def test_program_that_sums_nothing(name: str, tmp_path: Path) -> None:
    """Without the reduction the program fails: it does compare."""
    text = (EXAMPLES / f"{name}.py").read_text()
    broken = tmp_path / "broken.py"
    broken.write_text(re.sub(r"(?:self\._)?comm\.all_reduce\(", "str(", text).replace('str(bucket, op="avg")', "pass"))
    result = run_job(2, [str(broken)])
    assert result.rc != 0 and re.search(r"rank \d: (?:differs|loss)", result.text), result.text


def test_nothing_to_hide_on_the_host() -> None:
    """What is timed needs a GPU: said before anything starts."""
    result = run_job(1, [str(EXAMPLES / "data_parallel.py"), "--time", "8"])
    assert result.rc == 2 and "--time needs --gpu" in result.text and "Traceback" not in result.text, result.text
