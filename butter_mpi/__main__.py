"""``python -m butter_mpi``: the doctor's page."""

import sys

from butter_mpi.doctor import main

if __name__ == "__main__":
    sys.exit(main())
