"""The watcher of a node: who lives, and who is where in the sequence; outside every rank's interpreter lock.

``client`` is a rank's end; everything else runs in the watcher, a process of its own, which imports only the standard
library, ``recorder`` and the modules of this folder.
"""
