"""``python -m butter_mpi.selftest``: wrong arguments are found before MPI is, and told once for all ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from butter_mpi.launch import LaunchInfo, read_launch
from butter_mpi.selftest.options import (
    FAILED,
    PASSED,
    REFUSED,
    USAGE,
    Options,
    UsageError,
    check_receipt_path,
    help_text,
    parse,
)

__all__ = ["main"]

_NAME = "butter_mpi.selftest"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selftest on this rank, or compare two receipts.

    Parameters
    ----------
    arguments : sequence of str, optional
        The command line; default ``sys.argv[1:]``.

    Returns
    -------
    int
        The exit status: 0 passed or no difference, 1 failed or different, 2 wrong arguments, 3 the start was refused.
    """
    info = read_launch(os.environ)
    speaks = info.claimed_rank in (None, 0)
    usage = ""
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        if options is not None and options.receipt is not None and speaks:
            check_receipt_path(options.receipt)
    except UsageError as error:
        options, usage = Options(), str(error)
    if options is None:
        return _tell(help_text(), speaks)
    if usage and speaks:
        sys.stderr.write(f"{_NAME}: {usage} (--help lists the options)\n")
    if usage and info.claimed_size in (None, 1):
        return USAGE
    return _without_mpi(options, speaks) if options.list or options.compare else _run(options, usage, speaks, info)


def _tell(text: str, speaks: bool) -> int:
    if speaks:
        sys.stdout.write(text)
    return PASSED


def _without_mpi(options: Options, speaks: bool) -> int:
    if options.compare is not None:
        return _compare(options, speaks)
    from butter_mpi.selftest.catalogue import CHECKS

    return _tell("".join(f"{c.number:3} {c.id:15} {'--faults  ' * c.faults}{c.title}\n" for c in CHECKS), speaks)


def _compare(options: Options, speaks: bool) -> int:
    from butter_mpi.errors import ReceiptError
    from butter_mpi.receipt import compare
    from butter_mpi.selftest.receipts import load, table

    assert options.compare is not None
    one, other = options.compare
    try:
        differences = compare(load(one), load(other))
    except ReceiptError as error:
        if speaks:
            sys.stderr.write(f"{_NAME}: {error}\n")
        return USAGE
    names = (str(one), str(other))
    _tell(f"{table(differences, names)}\n" if differences else "no difference\n", speaks)
    return FAILED if differences else PASSED


def _run(options: Options, usage: str, speaks: bool, info: LaunchInfo) -> int:
    tasks = info.allocation_tasks or 1
    if info.in_allocation and info.claimed_size is None and tasks > 1 and options.np_expected != 1:
        sys.stderr.write(
            f"{_NAME}: this Slurm allocation is for {tasks} tasks, but this process is outside any step and would run "
            "alone; start it with srun, or, if one rank is meant, with --np-expected 1\n"
        )
        return REFUSED
    from butter_mpi.environment import set_c
    from butter_mpi.policy import set_unset_policy

    # Before NumPy, MPI or anything else that could load a library which reads them.
    policy_set = set_unset_policy()
    if options.start_deadline is not None:
        set_c("BUTTER_MPI_START_DEADLINE", f"{options.start_deadline:g}")
    from butter_mpi.selftest.runner import run

    return run(options, usage, speaks, policy_set)
