"""``python -m butter_mpi.recorder``."""

import sys

from butter_mpi.merging.cli import main

if __name__ == "__main__":
    sys.exit(main())
