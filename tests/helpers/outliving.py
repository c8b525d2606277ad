"""The shell that a launcher is started from: it is there as long as anything of the job is.

Run under a job: ``python -m helpers.outliving COMMAND...``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from helpers.processes import MARK, await_exit, marked

_LIMIT = 2.0
"""Seconds for what is left once the launcher has ended: whoever waits for this job looks for that too."""


def main() -> int:
    """Run the command; once it and all else of the job have ended, return its status."""
    code = subprocess.run(sys.argv[1:], check=False).returncode
    end, own = time.monotonic() + _LIMIT, {os.getpid(), os.getppid()}
    while (others := [pid for pid in marked(os.environ[MARK]) if pid not in own]) and time.monotonic() < end:
        await_exit(others[0], end - time.monotonic())
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    raise SystemExit(main())
