"""The selftest: numbered checks over the live data plane, and the receipt of what ran.

``mpirun -np 2 python -m butter_mpi.selftest``; ``docs/reference/selftest.md`` lists the options.
"""
