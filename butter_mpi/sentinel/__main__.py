"""The watcher's process: started by file name, with a JSON object on standard input."""

import os
import sys

if __name__ == "__main__":
    # As a script, this folder would be searched first. The package's is searched last: beside it may lie files that are
    # named like modules of Python.
    del sys.path[0]
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from butter_mpi.sentinel.watcher import main

    main()
