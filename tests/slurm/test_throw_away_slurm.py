"""The Slurm that other tests stand on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.mpirun import MPIS
from helpers.slurm import Slurm, throw_away_slurm

HELLO = """
from mpi4py import MPI
print(MPI.COMM_WORLD.rank, 'of', MPI.COMM_WORLD.size, 'on', MPI.Get_processor_name())
"""


@pytest.mark.parametrize("mpi", MPIS)
def test_srun_starts_one_job_over_both_nodes(slurm: Slurm, mpi: str) -> None:
    """Under srun with the PMI that it understands, each MPI's ranks form one job on two nodes."""
    result = slurm.run_job(4, HELLO, mpi=mpi)
    assert result.rc == 0, result.text
    assert [line.split(" on ")[0] for line in result.rank_out] == [f"{rank} of 4" for rank in range(4)]
    assert {line.split(" on ")[1].strip() for line in result.rank_out} == {"n1", "n2"}


def test_nothing_is_left_of_it() -> None:
    """Stopping ends every daemon and task and removes the folder."""
    program = "import signal\nprint('up', flush=True)\nsignal.pause()\n"
    with throw_away_slurm(nodes=1) as slurm, slurm.start_job(1, program) as job:
        job.wait_for("up", rank=0)
        assert len(slurm.members()) >= 4
    assert slurm.members() == []
    assert not slurm.folder.exists()


def test_nodes_share_no_memory(slurm: Slurm) -> None:
    """A file in the machine's or another node's /dev/shm is not in a node's: no step meets what a dead one left."""
    ours = Path(f"/dev/shm/butter-of-the-machine-{os.getpid()}")
    program = (
        f"import os\nprint(sorted(name for name in os.listdir('/dev/shm') if {str(os.getpid())!r} in name))\n"
        f"open(f'/dev/shm/of-{{os.uname().nodename}}-{os.getpid()}', 'w').close()"
    )
    seen = []
    ours.touch()
    try:
        for node in ("n1", "n2", "n1"):
            result = slurm.run_job(1, program, pmi="none", options=["--nodelist", node])
            assert result.rc == 0, result.text
            seen.append(result.rank_out[0].strip())
    finally:
        ours.unlink()
    assert seen == ["[]", "[]", f"['of-n1-{os.getpid()}']"]
