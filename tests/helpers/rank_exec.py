"""Become one rank: take on what the job's plan says for it, write to files of its own, then run its command.

Run by path under a launcher: ``rank_exec.py FOLDER COMMAND...``.
"""

from __future__ import annotations

import json
import os
import sys

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


def _apply(changes: dict[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _redirect(base: str) -> None:
    for descriptor, suffix in ((1, "out"), (2, "err")):
        file = os.open(f"{base}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)


def main() -> None:
    """Exec the command as the rank that the launcher named."""
    folder, command = sys.argv[1], sys.argv[2:]
    rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0")
    with open(f"{folder}/plan.json") as file:
        plan = json.load(file)
    base = f"{folder}/rank{rank}"
    with open(f"{base}.pid.part", "w") as file:
        file.write(str(os.getpid()))
    os.replace(f"{base}.pid.part", f"{base}.pid")
    _redirect(base)
    _apply(dict.fromkeys(plan["unset"]))
    _apply(plan["ranks"].get(rank, {}))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
