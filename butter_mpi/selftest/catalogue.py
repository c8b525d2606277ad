"""Every check, in the order in which they run."""

from __future__ import annotations

from butter_mpi.selftest import collectives, devices, exchanges, faults, rules
from butter_mpi.selftest.checks import Check

__all__ = ["CHECKS"]

CHECKS = (
    Check(1, "identity", "ranks and world size are the same by every way to ask", rules.identity),
    Check(2, "all_reduce", "every element type and operator, in and out of place", collectives.all_reduce),
    Check(3, "broadcast", "every element type, every root", collectives.broadcast),
    Check(4, "all_gather", "every element type, in and out of place", collectives.all_gather),
    Check(5, "reduce_scatter", "every element type and operator, in and out of place", collectives.reduce_scatter),
    Check(6, "barrier", "no rank leaves before a late one has come", collectives.barrier),
    Check(7, "send_recv", "a ring of pairs in a group, and a pair without one", collectives.send_recv),
    Check(8, "group", "operations of all kinds submitted together", collectives.group),
    Check(9, "sequence", "each collective takes one number", rules.sequence),
    Check(10, "order", "a result is there for whoever uses it next", rules.order),
    Check(11, "refusals", "wrong arguments are refused and poison nothing", rules.refusals),
    Check(12, "alone", "one rank alone: the same results, numbers and errors", rules.alone, rules.hindrance_alone),
    Check(
        15, "producer_stream", "beside a slow producer, and on its stream", devices.producer_stream, devices.hindrance
    ),
    Check(16, "add_path", "two ranks send, receive and add bfloat16", devices.add_path, devices.hindrance_add_path),
    Check(17, "registered", "memory of NCCL's allocator, registered", devices.registered, devices.hindrance_registered),
    Check(18, "capture", "a captured stream is refused and stays whole", devices.capture, devices.hindrance),
    Check(19, "rooted", "reduce, gather, scatter and all_to_all, changing roots", exchanges.rooted),
    Check(20, "uneven", "another count for each rank, or for each pair", exchanges.uneven),
    Check(21, "carried", "bool, complex and 16-bit integers; each rank's own factor", exchanges.carried),
    Check(13, "mismatch", "ranks that differ are all told, and where", faults.mismatch, faults.hindrance, True),
    Check(14, "reconnect", "a reconnect heals a broken communicator", faults.reconnect, faults.hindrance, True),
)
