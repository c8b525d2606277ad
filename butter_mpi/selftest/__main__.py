"""``python -m butter_mpi.selftest``."""

import sys

from butter_mpi.selftest.cli import main

if __name__ == "__main__":
    sys.exit(main())
