"""The Slurm that other tests stand on."""

from __future__ import annotations

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
