"""The watcher's process: started by file name, with a JSON object on standard input."""

import os
import sys

if __name__ == "__main__":
    # As a script, this folder would be searched first; and no installed package is needed.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from butter_mpi.sentinel.watcher import main

    main()
