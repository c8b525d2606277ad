"""What the benchmarks share: their start and its refusals, an array on the device, and a wait that is bounded."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from butter_mpi import bootstrap
from butter_mpi.communicator import Communicator
from butter_mpi.device import Device
from butter_mpi.environment import c_environment
from butter_mpi.errors import ButterError
from butter_mpi.findings import by_value, grouped, ranks_text
from butter_mpi.launch import read_launch
from butter_mpi.policy import set_unset_policy
from butter_mpi.selftest.console import Parser, UsageError, ask_for
from butter_mpi.selftest.options import USAGE
from butter_mpi.selftest.start import Refused, Together, load_mpi

__all__ = ["Array", "command_line", "parsed", "run", "wait"]

_HELP = "--help was asked for"
# Where only rank 0 looks.
_OF_RANK_0 = ("json",)

_SECONDS = 60.0
_OTHER_PLANE = re.compile(r',? or (run without a GPU: |take )plane="host"[^;\n]*')


class Array:
    """A float32 array in device memory.

    Parameters
    ----------
    device : Device
        Where.
    count : int
        Elements.
    stream : int
        The stream that it names.
    pointer : int, optional
        Its memory; new memory if not given.
    """

    def __init__(self, device: Device, count: int, stream: int, pointer: int = 0) -> None:
        self.pointer = pointer or device.alloc(4 * count)
        shape = {"shape": (count,), "typestr": "<f4", "version": 3, "stream": stream}
        self.__cuda_array_interface__ = {**shape, "data": (self.pointer, False)}


def wait(comm: Communicator, device: Device, stream: int, pause: float = 1e-4) -> None:
    """Wait until a stream is done.

    Parameters
    ----------
    comm : Communicator
        Whose work is on it.
    device : Device
        The device.
    stream : int
        The stream.
    pause : float, default 1e-4
        Seconds between two looks.

    Raises
    ------
    ButterError
        It was not done in time, or is only because the communicator broke.
    """
    end = time.monotonic() + _SECONDS
    while not device.ready(stream):
        if time.monotonic() > end:
            raise ButterError(f"the stream was not done within {_SECONDS:g} s")
        if pause:
            time.sleep(pause)
    comm.check_async_error()


def command_line(name: str, text: str) -> Parser:
    """Return the parser of a benchmark's command line, with what all of them take.

    Parameters
    ----------
    name : str
        Of the benchmark.
    text : str
        Its module's docstring, of which the first line says what it is.

    Returns
    -------
    Parser
        To be given what is its own, and for :func:`parsed`.
    """
    parser = Parser(
        prog=f"python -m butter_mpi.{name}", description=text.split("\n")[0], allow_abbrev=False, add_help=False
    )
    parser.add_argument("-h", "--help", action="store_true", help="print this")
    parser.add_argument("--share-gpu", action="store_true", help="allow two ranks on one GPU")
    return parser


def parsed(
    name: str,
    parser: Parser,
    arguments: Sequence[str] | None,
    check: Callable[[argparse.Namespace], None] = lambda _options: None,
) -> argparse.Namespace | int:
    """Return the options of a command line; or, where rank 0 has told what is wrong or printed the help, the status.

    Parameters
    ----------
    name : str
        Of the benchmark.
    parser : Parser
        Its own.
    arguments : sequence of str or None
        The command line; ``None``: that of this process.
    check : callable
        Raises ``UsageError`` for options that do not go together.

    Returns
    -------
    argparse.Namespace or int
        One of them; a status where one rank has wrong arguments, on every rank.
    """
    info, usage, given = read_launch(c_environment()), "", {}
    try:
        options = parser.parse_args(arguments)
        given = {name: str(value) for name, value in vars(options).items() if name not in _OF_RANK_0}
        if options.help:
            usage = _HELP
        else:
            check(options)
    except UsageError as error:
        usage = str(error)
    every: list[tuple[str, Mapping[str, str]]] = [(usage, given)]
    rank = info.claimed_rank or 0
    if (info.claimed_size or 1) > 1:
        with contextlib.suppress(Refused):
            every, rank = _exchanged(usage, given, rank)
    said = [text for text, _ in every]
    if set(said) == {_HELP}:
        return 0 if rank else ask_for(parser.format_help(), f"butter_mpi.{name}", 1)
    text = _by_rank(said) or _differing(parser, [facts for _, facts in every])
    if not text:
        return options
    if rank == 0:
        sys.stderr.write(f"butter_mpi.{name}: {text} (--help lists the options)\n")
    return USAGE


def _by_rank(said: Sequence[str]) -> str:
    """Return what is wrong with the arguments of some ranks; without the ranks, where it is so with all."""
    wrong = by_value((number, text) for number, text in enumerate(said) if text)
    if len(wrong) == 1 and all(said):
        return said[0]
    return "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in wrong.items())


def _differing(parser: Parser, every: Sequence[Mapping[str, str]]) -> str:
    """Return which options are not the same on every rank: ranks would make different calls."""
    names = {action.dest: action.option_strings[-1] for action in parser._actions}
    parts = [
        f"{names[dest]} is {grouped([(rank, facts[dest]) for rank, facts in enumerate(every)])}"
        for dest in every[0]
        if len({facts[dest] for facts in every}) > 1
    ]
    return f"every rank must have the same arguments: {'; '.join(parts)}" if parts else ""


def _exchanged(
    usage: str, given: Mapping[str, str], claimed_rank: int
) -> tuple[list[tuple[str, Mapping[str, str]]], int]:
    """Return what is wrong with each rank's arguments, and which they are; and this rank's number.

    Raises
    ------
    Refused
        There is no MPI in which they could say it.
    """
    # Before MPI or anything else that could load a library which reads them.
    set_unset_policy()
    seconds = bootstrap.start_deadline()
    together = Together(load_mpi(seconds), seconds)
    every = [(text, facts) for text, facts in together.gather((usage, given), "comparing arguments")]
    together.close()
    # Where MPI made N worlds of one rank out of a job of N, the launcher knows better who is rank 0.
    return every, claimed_rank if together.size == 1 else together.rank


def run(name: str, options: argparse.Namespace, measure: Callable[[Communicator], None]) -> int:
    """Start on the nccl plane, with the policy variables set where they are unset, and measure.

    Parameters
    ----------
    name : str
        Of the benchmark.
    options : argparse.Namespace
        With ``share_gpu``.
    measure : callable
        Takes the communicator.

    Returns
    -------
    int
        0, or 3 where there is no nccl plane or the measuring failed.
    """
    set_unset_policy()
    try:
        comm = bootstrap.init(plane="nccl", share_gpu=options.share_gpu or None)
    except ButterError as error:
        # A refusal is the same on every rank, and once is enough.
        if not read_launch(c_environment()).claimed_rank:
            sys.stderr.write(f"butter_mpi.{name}: {_fitting(str(error))}\n")
        return 3
    if comm.world_size < 2:
        comm.close()
        sys.stderr.write(f"butter_mpi.{name}: one rank makes no NCCL call; start it with mpirun -np 2\n")
        return 3
    try:
        with comm:
            measure(comm)
    except ButterError as error:
        # What breaks a communicator names the rank itself.
        who = "" if str(error).startswith(f"rank {comm.rank}/") else f"rank {comm.rank}: "
        sys.stderr.write(f"butter_mpi.{name}: {who}{error}\n")
        return 3
    return 0


def _fitting(text: str) -> str:
    """Return what refused a start, without the way round it that a benchmark has not: another plane."""
    fitting = _OTHER_PLANE.sub("", text)
    return fitting if fitting == text else f"{fitting}\n  The benchmark measures NCCL's calls, so it needs GPUs"
