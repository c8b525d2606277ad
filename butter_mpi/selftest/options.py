"""The command line: what may be asked for, and what is wrong with it, found without MPI."""

from __future__ import annotations

import argparse
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from butter_mpi.selftest.console import Parser, UsageError, one_line
from butter_mpi.settings import PLANES, TRANSPORTS, FaultPolicy

__all__ = [
    "FAILED",
    "PASSED",
    "REFUSED",
    "USAGE",
    "Options",
    "UsageError",
    "check_receipt_path",
    "help_text",
    "parse",
    "part_of",
    "receipt_file",
]

PASSED, FAILED, USAGE, REFUSED = 0, 1, 2, 3
"""Exit statuses; a comparison of receipts takes the first three for no difference, differences and no receipt."""

_MOST_DIGITS = 19
_PROGRAM = "python -m butter_mpi.selftest"
_EPILOG = """\
exit status: 0 every check passed (--compare: no difference); 1 a check failed, a rank crashed or the communicator broke
(--compare: differences); 2 wrong arguments (--compare: a receipt cannot be read); 3 the start was refused.
docs/reference/selftest.md has every option, check and status.
"""


@dataclass(frozen=True, slots=True)
class Options:
    """What one rank was asked for."""

    help: bool = False
    list: bool = False
    compare: tuple[Path, Path] | None = None
    plane: str | None = None
    share_gpu: bool = False
    require_transport: str | None = None
    start_deadline: float | None = None
    np_expected: int | None = None
    faults: bool = False
    seed: int | None = None
    json: bool = False
    receipt: Path | None = None

    @property
    def runs(self) -> bool:
        """Whether checks are to be run."""
        return not (self.help or self.list or self.compare)

    def common(self) -> dict[str, Any]:
        """Return what decides what is run and told, and so must be equal on every rank."""
        return {
            "--help": self.help,
            "--list": self.list,
            "--compare": None if self.compare is None else [str(path) for path in self.compare],
            "--faults": self.faults,
            "--np-expected": self.np_expected,
            "--seed": self.seed,
            "--json": self.json,
            "--receipt": None if self.receipt is None else str(self.receipt),
        }


def _whole(low: int, high: int) -> Any:
    def number(text: str) -> int:
        if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and low <= int(text) <= high:
            return int(text)
        raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high}; got {text!r}")

    return number


def _deadline(text: str) -> float:
    try:
        return FaultPolicy(start_deadline=text).start_deadline  # type: ignore[arg-type]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parser() -> Parser:
    parser = Parser(
        prog=_PROGRAM,
        description="Checks every operation of butter_mpi over the live data plane: mpirun -np 2 " + _PROGRAM,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="print this")
    add("--list", action="store_true", help="print the checks; starts nothing")
    add("--compare", nargs=2, type=Path, metavar=("A", "B"), help="print how two receipts differ; starts nothing")
    add("--plane", choices=PLANES, help="data plane (default: auto, or BUTTER_MPI_PLANE)")
    add("--share-gpu", action="store_true", help="allow two ranks on one GPU")
    add("--require-transport", choices=TRANSPORTS, help="the transport that must be verified to be in use")
    add("--start-deadline", type=_deadline, metavar="SECONDS", help="for MPI_Init, and for the start after it (60)")
    add("--np-expected", type=_whole(1, 10**6), metavar="N", help="refuse to run with another number of ranks")
    add("--faults", action="store_true", help="also the checks that break the communicator on purpose")
    add("--seed", type=_whole(0, 2**63 - 1), metavar="S", help="of the random data (default: a fresh one)")
    add("--json", action="store_true", help="print the receipt on stdout, everything else on stderr")
    add("--receipt", type=Path, metavar="PATH", help="write the receipt to this file (an old one is replaced)")
    return parser


def help_text() -> str:
    """Return the text of ``--help``."""
    return _parser().format_help()


def parse(arguments: Sequence[str]) -> Options:
    """Return the options; of ``--help`` and others, help alone.

    Raises
    ------
    UsageError
        An unknown option, a wrong value, or options that exclude one another.
    """
    found = vars(_parser().parse_args(arguments))
    if found["help"]:
        return Options(help=True)
    if found["compare"] is not None:
        found["compare"] = tuple(found["compare"])
    options = Options(**found)
    for name, alone in (("--list", Options(list=True)), ("--compare", Options(compare=options.compare))):
        if found[name[2:]] and options != alone:
            raise UsageError(f"argument {name}: it runs no check, so it takes no other option beside it")
    return options


def receipt_file(path: Path) -> Path:
    """Return the file to write for `path`: itself, or where links lead to.

    Raises
    ------
    OSError
        It is there and no regular file, or leads nowhere; ``strerror`` says why.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise OSError(None, f"it is a link to {one_line(os.readlink(path))}, which is not there") from None
        return path
    if stat.S_ISDIR(mode):
        raise OSError(None, "it is a folder; name a file in it")
    if not stat.S_ISREG(mode):
        raise OSError(None, "it is no regular file")
    return path.resolve()


def part_of(file: Path) -> Path:
    """Return the name of a file beside `file`, to be written first and then put in its place."""
    return file.parent / f".butter_mpi-{secrets.token_hex(8)}.part"


def check_receipt_path(path: Path) -> None:
    """Find out now whether a receipt can be written there later.

    Raises
    ------
    UsageError
        It cannot; the message says why.
    """
    name = one_line(str(path))
    try:
        file = receipt_file(path)
    except OSError as error:
        raise UsageError(f"argument --receipt: {name} cannot be written: {error.strerror}") from None
    folder = one_line(str(file.parent))
    try:
        # Only an attempt tells: access(2) knows nothing of quotas and, for root, of modes.
        probe = part_of(file)
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        probe.unlink()
    except OSError as error:
        if not os.path.isdir(file.parent):
            raise UsageError(f"argument --receipt: there is no folder {folder}; make it first") from None
        raise UsageError(f"argument --receipt: cannot write in {folder}: {error.strerror}") from None
