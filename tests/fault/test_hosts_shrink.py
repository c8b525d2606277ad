"""Back to work on several hosts, without MPI: a rank is lost, then a whole host; a part that is cut off stops."""

from __future__ import annotations

import time

from helpers.hosts import CONTROL, DATA, Hosts
from helpers.surviving import HEAD, on_standins, waits

ON_HOST = (
    """
import os, socket
os.environ["STANDIN_MACHINE"] = HOST = socket.gethostname()
from butter_mpi import recovery
if HOST != "host1":
    # As on a machine of its own: the launcher is not seen from here.
    recovery._command_lines = lambda: iter(())
"""
    + HEAD
)
# Six ranks, two on each host. Rank 3 dies, then host3 is cut off, as the test does once all are back.
PROGRAM = (
    ON_HOST
    + """
comm = start(action="shrink")
hosts = comm.all_gather_json(HOST)
assert hosts == ["host1", "host1", "host2", "host2", "host3", "host3"], hosts
assert total(comm) == 21
if RANK == 3:
    die()
assert lost(comm).lost_ranks == (3,)
new = comm.shrink()
assert total(new) == 15
say(f"back {time.monotonic()} {new!r}")
big = "x" * 300_000 + str(RANK)
assert new.all_gather_json(big) == ["x" * 300_000 + str(rank) for rank in (0, 1, 2, 4, 5)]
child, part = new.dup(), new.split(0 if HOST == "host2" else 1)
assert total(child) == 15 and total(part) == (1 if HOST == "host2" else 10)
# One that is alone on its host closes, and its watcher ends: the others hear that, and go on without it.
early = new.split(None if RANK == 5 else 0)
if RANK == 4:
    early.close()
elif early is not None:
    # Another rank may have told of it before this one comes to its barrier.
    raised(lambda: early.barrier() or early.wait_for_async_error(10), butter_mpi.PeerLostError)
    early = early.shrink()
    assert total(early) == 6
    early.close()
plan = child.plan_barrier(stream=child.backend.stream)
plan()
# Of ranks on several hosts: compared, and made healthy again.
child.barrier() if HOST == "host1" else total(child)
raised(lambda: child.wait_for_async_error(10), butter_mpi.CollectiveMismatchError)
child.attempt_reconnect()
assert total(child) == 15
# So are sends and receives.
place = memory(child)
pointer = place.put(np.zeros(8, np.float32))
if child.rank == 0:
    child.backend.send_to(pointer, 32, 4, child.backend.stream)
if child.rank == 4:
    child.backend.recv_from(pointer, 16, 0, child.backend.stream)
error = raised(lambda: child.wait_for_async_error(10), butter_mpi.CollectiveMismatchError)
assert "as send and recv #" in str(error) and set(error.records) == {0, 4}, error
child.attempt_reconnect()
assert total(child) == 15
say(f"dies {time.monotonic()} cut")
error = lost(child)
assert error.lost_ranks == ((0, 1, 2) if HOST == "host3" else (3, 4)), error
if HOST == "host3":
    error = raised(child.shrink, butter_mpi.PeerLostError)
    assert "the first two hosts, whose watchers have ranks agree" in str(error), error
    say("stays")
    sys.exit("left out")
assert "no word from host host3 (ranks 3-4) for" in str(error), error
younger = child.shrink()
assert total(younger) == 6
say(f"back {time.monotonic()} {younger!r}")
lost(new)
newer = new.shrink()
assert total(newer) == 6 and newer.all_gather_json(HOST) == ["host1", "host1", "host2"]
# Two of four ranks are left: those with the lowest.
part = part.shrink() if HOST == "host1" else part
assert total(part) == (1 if HOST == "host2" else 3)
twin = newer.dup()
assert total(twin) == 6
for one in (twin, newer, younger, part):
    one.close()
say("done")
"""
)
_SURVIVORS = (0, 1, 2)
# Three ranks, one on each host; host1, on which the launcher is too, is cut off from the network of the data.
PARTED = (
    ON_HOST
    + """
comm = start(action="shrink")
assert total(comm) == 6
say("stands")
error = lost(comm)
named = "no word from host host1 (rank 0) over data0 for 4."
assert error.lost_ranks == ((1, 2) if RANK == 0 and named not in str(error) else (0,)), error
assert "cut off there, as it is heard over another network" in str(error), error
if RANK == 0:
    raised(comm.shrink, butter_mpi.PeerLostError)
    sys.exit("left out")
comm = comm.shrink()
assert total(comm) == 3
say(f"back {time.monotonic()} {comm!r}")
twin = comm.dup()
assert total(twin) == 3
for one in (twin, comm):
    one.close()
say("done")
"""
)


def test_survivors_of_a_rank_and_of_a_host_go_on() -> None:
    """Without MPI, with right sums, parts and reconnects, soon after it is known; those that are cut off do not."""
    how = on_standins()
    options = [*how["options"], "--map-by", "slot"]
    with Hosts(3) as hosts, hosts.start_job(6, PROGRAM, mpi="openmpi", options=options, env=how["env"]) as job:
        for rank in range(6):
            if rank != 3:
                job.wait_for("cut\n", rank, 40)
        hosts.cut(3, CONTROL, DATA)
        cut = time.monotonic()
        for rank in _SURVIVORS:
            job.wait_for("done\n", rank, 30)
        for rank in (4, 5):
            job.wait_for("it ends alone, by SIGTERM", rank, 30)
        hosts.mend(3, CONTROL, DATA)
        result = job.wait(30)
    first = waits(result, list(_SURVIVORS))[0]
    backs = [float(result.rank_out[rank].split("back ")[2].split()[0]) for rank in _SURVIVORS]
    assert first < 1.5 and max(backs) - cut < 6.5, (first, max(backs) - cut, result.text)
    for rank in _SURVIVORS:
        assert result.rank_out[rank].endswith("leaves with 0\n"), result.text


def test_others_go_on_without_a_host_that_the_network_of_the_data_loses() -> None:
    """That alone, as NCCL is told to use it, and though the host is the one whose watcher decides otherwise."""
    how = on_standins()
    env = {**how["env"], "NCCL_SOCKET_IFNAME": "data0"}
    with Hosts(3) as hosts, hosts.start_job(3, PARTED, mpi="openmpi", options=how["options"], env=env) as job:
        for rank in range(3):
            job.wait_for("stands\n", rank, 40)
        hosts.cut(1, DATA)
        cut = time.monotonic()
        for rank in (1, 2):
            job.wait_for("done\n", rank, 30)
        result = job.wait(30)
    for rank in (1, 2):
        back = float(result.rank_out[rank].split("back ")[1].split()[0])
        assert back - cut < 6.5 and result.rank_out[rank].endswith("leaves with 0\n"), result.text
    assert "raised PeerLostError: " in result.rank_out[0] and "left out" in result.rank_err[0], result.text
