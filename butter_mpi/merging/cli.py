"""``python -m butter_mpi.recorder``: the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from butter_mpi.merging.comparing import merge
from butter_mpi.merging.findings import Merged
from butter_mpi.merging.reading import Gathered
from butter_mpi.merging.report import as_json, as_text
from butter_mpi.selftest.console import Parser, UsageError, ask_for, one_line, sound_streams

__all__ = ["main"]

_NAME = "butter_mpi.recorder"
_AGREED, _DIFFERENT, _UNUSABLE = 0, 1, 2
_MOST_SHOWN = 4096
_EPILOG = """\
exit status: 0 no divergence; 1 a divergence, or a rank is behind, or not in the files; 2 wrong arguments, or a file
that cannot be used.
"""


def _count(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 4 and int(text) <= _MOST_SHOWN:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number from 0 to {_MOST_SHOWN}; got {text!r}")


def _parser() -> Parser:
    parser = Parser(
        prog="python -m butter_mpi.recorder",
        description="Merge what recorders of ranks held, and name the first number at which ranks submitted different "
        "operations, or who is behind.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    add = parser.add_argument
    add("files", nargs="*", metavar="FILE", help="of init(recorder_file=...), or of Communicator.dump_recorder")
    add("-h", "--help", action="store_true", help="print this")
    add("--last", type=_count, default=8, metavar="N", help="common numbers to show, and diverging ones (8)")
    add("--communicator", metavar="KEY", help="only this communicator, by its key or its name")
    add("--json", action="store_true", help="print JSON, by the schema in the package")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Merge the files and print what they tell.

    Parameters
    ----------
    arguments : sequence of str, optional
        The command line; default ``sys.argv[1:]``.

    Returns
    -------
    int
        0: no divergence; 1: a divergence, or a rank is behind or missing; 2: a wrong argument or a file that cannot be
        used, or stdout cannot be written (141: nobody reads it any more).
    """
    with sound_streams():
        try:
            return _main(sys.argv[1:] if arguments is None else arguments)
        except UsageError as error:
            sys.stderr.write(f"{_NAME}: {error} (--help lists the options)\n")
            return _UNUSABLE


def _main(arguments: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.help:
        return ask_for(parser.format_help(), _NAME, _UNUSABLE)
    if not options.files:
        raise UsageError("name at least one FILE")
    gathered = Gathered(options.files)
    if gathered.problems:
        sys.stderr.write("".join(f"{_NAME}: {problem}\n" for problem in gathered.problems))
        return _UNUSABLE
    merged = _merged(gathered, options.communicator, options.last)
    found = as_json(merged, gathered.files) if options.json else None
    text = as_text(merged, gathered.files) if found is None else json.dumps(found, indent=1, allow_nan=False) + "\n"
    return ask_for(text, _NAME, _UNUSABLE) or (_AGREED if all(one.settled for one in merged) else _DIFFERENT)


def _merged(gathered: Gathered, chosen: str | None, last: int) -> list[Merged]:
    found = gathered.communicators()
    wanted = [ranks for ranks in found if chosen in (None, ranks[0].key, ranks[0].name)]
    if not wanted:
        known = ", ".join(f"{one_line(ranks[0].key)} ({one_line(ranks[0].name)})" for ranks in found)
        raise UsageError(f"argument --communicator: there is none of that key or name; there are {known}")
    return [merge(ranks, last) for ranks in wanted]
