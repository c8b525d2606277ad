"""``python -m butter_mpi.selftest``: wrong arguments are found before MPI is, and told once for all ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from butter_mpi.launch import LaunchInfo, outside_any_step, read_launch
from butter_mpi.selftest.console import ask_for, sound_streams
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
    with sound_streams():
        return _main(sys.argv[1:] if arguments is None else arguments)


def _main(arguments: Sequence[str]) -> int:
    info = read_launch(os.environ)
    speaks = info.claimed_rank in (None, 0)
    usage = ""
    try:
        options = parse(arguments)
        if options.receipt is not None and speaks:
            check_receipt_path(options.receipt)
    except UsageError as error:
        options, usage = Options(), str(error)
    if usage and speaks:
        sys.stderr.write(f"{_NAME}: {usage} (--help lists the options)\n")
    # Without MPI nobody knows what the other ranks of a job were asked for.
    alone = info.claimed_size in (None, 1)
    if usage and alone:
        return USAGE
    return _run(options, usage, speaks, info) if options.runs or not alone else answer(options, True)


def answer(options: Options, speaks: bool) -> int:
    """Do what needs no communicator: print the options or the checks, or compare two receipts.

    Parameters
    ----------
    options : Options
        Of which :attr:`Options.runs` is false.
    speaks : bool
        Whether this process prints.

    Returns
    -------
    int
        The exit status.
    """
    if options.compare is not None:
        return _compare(options.compare, speaks)
    if options.help:
        return _tell(help_text(), speaks, FAILED)
    from butter_mpi.selftest.catalogue import CHECKS

    lines = [f"{c.number:3} {c.id:15} {'--faults  ' * c.faults}{c.title}\n" for c in CHECKS]
    return _tell("".join(lines), speaks, FAILED)


def _tell(text: str, speaks: bool, status: int) -> int:
    return ask_for(text, _NAME, status) if speaks else PASSED


def _compare(paths: tuple[Path, Path], speaks: bool) -> int:
    from butter_mpi.errors import ReceiptError
    from butter_mpi.receipt import compare
    from butter_mpi.selftest.receipts import load, table

    try:
        differences = compare(*map(load, paths))
        text = table(differences, (str(paths[0]), str(paths[1]))) if differences else "no difference"
    except ReceiptError as error:
        if speaks:
            sys.stderr.write(f"{_NAME}: {error}\n")
        return USAGE
    return _tell(f"{text}\n", speaks, USAGE) or (FAILED if differences else PASSED)


def _run(options: Options, usage: str, speaks: bool, info: LaunchInfo) -> int:
    outside = outside_any_step(info)
    if outside and options.np_expected != 1:
        sys.stderr.write(
            f"{_NAME}: {outside} and would run alone; start it with srun, or, if one rank is meant, with "
            "--np-expected 1\n"
        )
        return REFUSED
    from butter_mpi.environment import set_c
    from butter_mpi.policy import set_unset_policy

    # Before NumPy, MPI or anything else that could load a library which reads them.
    try:
        policy_set = set_unset_policy()
    except ValueError:
        # A configuration file that cannot be read: this rank's record will say so, to all ranks.
        policy_set = {}
    if options.start_deadline is not None:
        set_c("BUTTER_MPI_START_DEADLINE", f"{options.start_deadline:g}")
    from butter_mpi.selftest.runner import run

    instead = None if options.runs else partial(answer, options)
    return run(options, usage, speaks, policy_set, instead)
