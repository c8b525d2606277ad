"""Back to work after a loss: survivors go on in a communicator of their own, and the job ends well."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.job import TESTS
from helpers.mpirun import Job, JobResult, run_job, start_job
from helpers.surviving import HEAD, on_standins, waits

TWICE = """
import glob, json
from helpers.standin_rank import until
os.environ["BUTTER_MPI_RECORDER_FILE"] = "recorded"
comm = start()
assert total(comm) == 10
plan, child = comm.plan_barrier(stream=comm.backend.stream), comm.dup()
handle = comm.backend.register_buffer(memory(comm).put(np.zeros(64)), 512)
with comm.symmetric(64, "float32") as x:
    if RANK == 1:
        die()
    lost(comm)
    new = comm.shrink()
    assert total(new) == 6
say(f"back {time.monotonic()} {new!r}")
assert new.sequence == 2 and new.rank == [0, None, 1, 2][RANK] and new.world_size == 3
assert "replaced by shrink 1: ranks 0, 2-3 of init" in str(raised(comm.barrier, butter_mpi.PeerLostError))
assert "replaced by shrink 1" in str(raised(comm.shrink, butter_mpi.PeerLostError))
assert "replaced by shrink 1" in str(raised(plan, butter_mpi.PeerLostError))
raised(lambda: comm.backend.deregister_buffer(handle), ValueError)
comm.close()
lost(child)
part = child.shrink()
assert total(part) == 6 and "dup 1, shrink 1" in repr(part), part
part.close()
assert new.all_gather_json({"rank": RANK}) == [{"rank": rank} for rank in (0, 2, 3)]
raised(lambda: new.split("x" if RANK == 2 else 0), TypeError)
# Without MPI: parts of two, of one, of none, each with all that communicators have; and parts of parts.
child, lone, part = new.dup(), new.split(0 if RANK < 3 else None), new.split(RANK % 3, key=-RANK)
assert total(child) == 6 and "shrink 1, dup 1" in repr(child), child
assert lone is None if RANK == 3 else (total(lone) == 3 and "shrink 1, split 2 color 0" in repr(lone)), lone
assert part.rank == [1, None, 0, 0][RANK] and total(part) == [3, None, 1, 3][RANK], part
child.barrier() if RANK else total(child)
raised(lambda: child.wait_for_async_error(10), butter_mpi.CollectiveMismatchError)
child.attempt_reconnect()
# One that takes late what others have sent meanwhile.
from butter_mpi import control
from butter_mpi.sentinel.relayed import RelayedControl
gather = RelayedControl.all_gather
def late(self, payload, watch, phase, look):
    return gather(self, payload, watch, phase, lambda: time.sleep(0.3) or look())
RelayedControl.all_gather = late if RANK == 2 else gather
grandchild = child.dup()
RelayedControl.all_gather = gather
x = memory(grandchild).put(np.zeros(8))
plan = grandchild.plan_barrier(stream=grandchild.backend.stream)
plan()
grandchild.close()
# What was closed is not kept.
counts = []
for _ in range(2):
    child.dup().close()
    counts.append(len(control._LISTENING))
assert counts[0] == counts[1], counts
assert total(child) == 6 and total(new) == 6
if RANK == 2:
    die()
if RANK == 0:
    assert lost(lone).lost_ranks == (1,)
    assert total(lone.shrink()) == 1
assert total(part) == 3
part.close()
assert lost(child).lost_ranks == (1,)
younger = child.shrink()
assert total(younger) == 3 and "shrink 1, dup 1, shrink 1" in repr(younger), younger
younger.close()
error = lost(new)
assert error.lost_ranks == (1,) and "rank 1/3 of shrink 1 (rank 2/4 of init)" in str(error), error
newer = new.shrink()
assert total(newer) == 3
say(f"back {time.monotonic()} {newer!r}")
def recorded():
    lines = [json.loads(line) for path in glob.glob("recorded*") for line in open(path)]
    return {(line["communicator"]["name"], line["world_size"], line["rank"]) for line in lines}
assert until(lambda: {("init", 4, 3), ("shrink 1", 3, 2)} <= recorded()), recorded()
newer.close()
"""

ALONE = """
comm = start()
assert total(comm) == 6
if RANK:
    die()
lost(comm)
new = comm.shrink()
assert total(new) == 1 and new.world_size == 1 and new.sequence == 2, new
say(f"back {time.monotonic()} {new!r}")
new.close()
"""

DURING = """
comm = start()
assert total(comm) == 10
if RANK == 1:
    die()
lost(comm)
if RANK == 2:
    die_in_recovery("nccl", die)
new = comm.shrink()
assert total(new) == 3
say(f"back {time.monotonic()} {new!r}")
assert "shrink 2 (rank" in repr(new), new
new.close()
"""

STRICT = """
how = {"plane": "nccl", "fault": butter_mpi.FaultPolicy(action="shrink")}
raised(lambda: butter_mpi.init(watch="off", **how), butter_mpi.NotSupportedError)
comm = start(check="strict", action="shrink")
assert total(comm) == 6
if RANK == 0:
    die()
error = lost(comm)
assert error.__notes__ == ["Survivors go on with comm.shrink(), called by every rank that lives"], error.__notes__
new = comm.shrink()
assert total(new) == 3
say(f"back {time.monotonic()} {new!r}")
long = "x" * 100_000 + str(RANK)
assert new.all_gather_json(long) == ["x" * 100_000 + "1", "x" * 100_000 + "2"]
raised(lambda: new.all_gather_json("x" * (1 << 20)), ValueError)
error = raised(new.barrier if RANK == 1 else lambda: total(new), butter_mpi.CollectiveMismatchError)
assert error.records.keys() == {0, 1} and "barrier #3" in error.records[0], error.records
new.attempt_reconnect()
assert new.sequence == 3 and total(new) == 3
with new:
    sys.exit(0)
"""

# Rank 2 dies, and rank 1 does not call what rank 0 calls.
NOT_COME = """
comm = start(seconds=2)
assert total(comm) == 6
if RANK == 2:
    die()
lost(comm)
if RANK == 0:
    error = raised(comm.shrink, butter_mpi.CollectiveTimeoutError)
    assert error.lost_ranks == (1,) and "from rank 1/3 on" in str(error) and "it has not called it" in str(error), error
"""

# It does something else later, then the same as rank 0.
NOT_CALLED = (
    NOT_COME
    + """\
    MPI.COMM_WORLD.send(None, 1)
else:
    MPI.COMM_WORLD.recv(None, 0)
    error = raised(comm.attempt_reconnect, butter_mpi.PeerLostError)
    assert error.lost_ranks == (2,)
    # A bug that no other rank can know of.
    from butter_mpi import survivors
    wanted, survivors.RelayedControl = survivors.RelayedControl, None
began = time.monotonic()
error = raised(comm.shrink, TypeError if RANK else butter_mpi.StartError)
assert RANK or "rank 1/2 of shrink 1" in str(error) and "ended by TypeError" in str(error), error
assert time.monotonic() - began < 1.5
if RANK:
    survivors.RelayedControl = wanted
new = comm.shrink()
assert total(new) == 3 and "shrink 2 " in repr(new)
new.close()
"""
)

# Nobody is lost; rank 0 calls shrink where the other tries to reconnect.
OTHER_CALL = """
comm = start()
with comm.group():
    raised(comm.shrink, ValueError)
raised(comm.shrink, ValueError)
comm.barrier() if RANK else total(comm)
raised(lambda: comm.wait_for_async_error(10), butter_mpi.CollectiveMismatchError)
began = time.monotonic()
error = raised(comm.attempt_reconnect if RANK else comm.shrink, butter_mpi.CommunicatorBrokenError)
assert "rank 0 called shrink(); rank 1 called attempt_reconnect(). All must call the same" in str(error), error
assert time.monotonic() - began < 5
MPI.COMM_WORLD.send(None, 0) if RANK else MPI.COMM_WORLD.recv(None, 1)
comm.attempt_reconnect()
assert total(comm) == 3
comm.close()
raised(comm.shrink, butter_mpi.CommunicatorClosedError)
say("done")
"""

# Rank 1 is stopped, and runs again once the others have gone on without it.
STOPPED = """
from helpers.standin_rank import until
comm = start()
pids = comm.all_gather_json(os.getpid())
if RANK == 3:
    comm.close()
    assert until(lambda: os.path.exists("over"), 20)
    sys.exit()
if RANK == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
    lost(comm)
    error = raised(comm.shrink, butter_mpi.PeerLostError)
    assert "ranks 0, 2 went on without this rank" in str(error), error
    sys.exit("left out")
lost(comm)
new = comm.shrink()
assert total(new) == 3
if RANK == 0:
    process = os.pidfd_open(pids[1])
    os.kill(pids[1], signal.SIGCONT)
    assert select.select([process], [], [], 10)[0]
new.all_gather_json("it is gone")
assert total(new) == 3
if RANK == 0:
    process = os.pidfd_open(pids[3])
    open("over", "w").close()
    assert select.select([process], [], [], 10)[0]
new.all_gather_json("so is the one that had closed before")
new.close()
"""

# Rank 3 dies in the start of the new communicator.
HOST = """
import glob
from helpers.standin_rank import until
comm = start(action="shrink")
assert total(comm) == 15
open(f"through{RANK}", "w").close()
if RANK == 1:
    # MPI may need a rank that has its sum for that of others.
    assert until(lambda: len(glob.glob("through*")) == SIZE)
    die()
# Not MPI's words, which do not know how.
assert "was killed by SIGKILL" in str(lost(comm))
new = comm.shrink()
assert total(new) == 10
say(f"back {time.monotonic()} {new!r}")
assert "replaced by shrink 1: ranks 0, 2-4 of init" in str(raised(comm.barrier, butter_mpi.PeerLostError))
part = new.split(0)
assert total(part) == 10
part.close()
if RANK == 2:
    die()
error = lost(new)
assert error.lost_ranks == (1,), error
if RANK == 3:
    die_in_recovery("host", die)
newer = new.shrink()
assert total(newer) == 3 and newer.sequence == 3 and "shrink 3 " in repr(newer), newer
say(f"back {time.monotonic()} {newer!r}")
newer.all_gather_json("all are back")
if RANK == 4:
    die()
assert lost(newer).lost_ranks == (1,)
last = newer.shrink()
assert total(last) == 1 and last.world_size == 1 and last.sequence == 4, last
say(f"back {time.monotonic()} {last!r}")
last.close()
"""

# Over MPI: who does not come is named, and can come later.
NOT_CALLED_HOST = (
    NOT_COME
    + """\
    open("named", "w").close()
from helpers.standin_rank import until
assert until(lambda: os.path.exists("named"))
new = comm.shrink()
assert total(new) == 3 and "shrink 1 " in repr(new), new
new.close()
"""
)
CLOSED_HOST = """
from helpers.standin_rank import until
comm = start(seconds=2)
if RANK == 0:
    comm.close()
    open("closed", "w").close()
    assert until(lambda: os.path.exists("named"), 20)
    sys.exit()
if RANK == 1:
    assert until(lambda: os.path.exists("closed"))
    die()
lost(comm)
error = raised(comm.shrink, butter_mpi.CollectiveTimeoutError)
assert error.lost_ranks == (0,) and "rank 0 closed its communicator after no operation; MPI waits" in str(error), error
open("named", "w").close()
say("named")
"""
OTHER_CALL_HOST = """
comm = start()
raised(comm.barrier if RANK else lambda: total(comm), butter_mpi.CollectiveMismatchError)
began = time.monotonic()
error = raised(comm.attempt_reconnect if RANK else comm.shrink, butter_mpi.CommunicatorBrokenError)
assert "rank 0 called shrink(); rank 1 called attempt_reconnect(). All must call the same" in str(error), error
assert time.monotonic() - began < 5
comm.attempt_reconnect()
assert total(comm) == 3
comm.close()
say("done")
"""

# Its own detector is off, so MPI waits for a rank that is stopped.
STOPPED_HOST = """
from butter_mpi.sentinel.client import Sentinel
from helpers.standin_rank import until
hear = Sentinel._hear
def late(self, message):
    # The verdict is heard before.
    time.sleep(0.3 if message["kind"] == "stopped" else 0)
    hear(self, message)
if RANK == 0:
    Sentinel._hear = late
comm = start()
if RANK == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
lost(comm)
began = time.monotonic()
error = raised(comm.shrink, butter_mpi.CollectiveTimeoutError)
assert time.monotonic() - began < 5 and error.lost_ranks == (1,) and "--mca mpi_ft_detector true" in str(error), error
say("named")
# The first that ends, ends the job.
open(f"named {RANK}", "w").close()
assert until(lambda: all(os.path.exists(f"named {rank}") for rank in (0, 2)))
"""

# Each rank takes itself for alone on its node, and the watchers of nodes are not linked.
NODES = """
from butter_mpi.sentinel import client
client.node_key = lambda: f"node {RANK}"
os.environ["BUTTER_MPI_WATCH"] = "node"
comm = start(action="shrink")
assert total(comm) == 6
if RANK == 1:
    die()
assert lost(comm).lost_ranks == (1,)
new = comm.shrink()
assert total(new) == 3
new.close()
"""
NODES_REFUSED = """
from butter_mpi.sentinel import client
client.node_key = lambda: f"node {RANK}"
os.environ["BUTTER_MPI_WATCH"] = "node"
error = raised(lambda: start(action="shrink"), butter_mpi.NotSupportedError)
assert "ranks are on several nodes" in str(error) and "--with-ft ulfm" in str(error), error
"""

# One is left, and ends as its program says; in a function, so that sys.exit is taken before anything is known.
LEFT = """
def main():
    comm = start()
    total(comm)
    if RANK:
        die()
    lost(comm)
    new = comm.shrink()
    new.close()
    %s
sys.exit(main())
"""
STATUSES = {
    "return 0": 0,
    "return 3": 3,
    "raise SystemExit(3)": 1,
    "raise KeyError": 1,
    "MPI.Finalize()": 0,
    "try: return 1 // 0\n    finally: MPI.Finalize()": 1,
}

# On another host than the launcher's, which one rank sees.
UNSEEN = """
from butter_mpi import recovery
if RANK:
    recovery._command_lines = lambda: iter(())
comm = start()
total(comm)
if RANK == 0:
    die()
raise lost(comm)
"""

# The last one that is left has lost another, and leaves what broke open.
LOST_ALL = """
comm = start()
total(comm)
if RANK == 1:
    die()
lost(comm)
new = comm.shrink()
total(new)
if RANK == 2:
    die()
lost(new)
"""

REFUSED = """
error = raised(lambda: start(action="shrink"), butter_mpi.PreflightError)
assert "action 'shrink': " + os.environ["WHY"] in str(error), error
"""

REFUSED_LATER = """
comm = start()
if RANK == 1:
    comm.abort("enough")
    raised(comm.shrink, butter_mpi.CommunicatorClosedError)
    sys.exit()
lost(comm)
error = raised(comm.shrink, butter_mpi.NotSupportedError)
assert os.environ["WHY"] in str(error) and "--with-ft ulfm" in str(error), error
assert "enough" in str(raised(comm.barrier, butter_mpi.PeerLostError))
say("refused")
"""

ULFM: dict[str, Any] = {"mpi": "openmpi", "options": ["--with-ft", "ulfm"]}
ENDS = "ends every rank of a job that has lost one"
GOES = "MPICH does not go on once a rank is lost"


@pytest.fixture(scope="module")
def jobs() -> Iterator[dict[str, Job]]:
    """Jobs that mostly wait; they do so beside one another."""
    watched = on_standins()
    nccl = watched["env"]
    programs: dict[str, tuple[int, str, dict[str, Any]]] = {
        "not called": (3, NOT_CALLED, watched),
        "other call": (2, OTHER_CALL, watched),
        "not called over mpi": (3, NOT_CALLED_HOST, {"env": {"PLANE": "host"}, **ULFM}),
        "other call over mpi": (2, OTHER_CALL_HOST, {"env": {"PLANE": "host"}, **ULFM}),
        "stopped": (4, STOPPED, watched),
        "stopped host": (3, STOPPED_HOST, {"env": {"PLANE": "host"}, **ULFM}),
        "closed host": (3, CLOSED_HOST, {"env": {"PLANE": "host"}, **ULFM}),
        "nodes": (3, NODES, {"env": nccl, **ULFM}),
        "nodes refused": (2, NODES_REFUSED, watched),
        "refused": (2, REFUSED, {"env": {**nccl, "WHY": f"mpirun of Open MPI {ENDS}"}, "mpi": "openmpi"}),
        "refused on the host plane": (2, REFUSED + REFUSED_LATER, {"env": {"PLANE": "host", "WHY": GOES}}),
    }
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(start_job(n, HEAD + program, timeout=50, **how))
            for name, (n, program, how) in programs.items()
        }


@pytest.mark.parametrize(
    ("n", "program", "survivors"),
    [(4, TWICE, [0, 3]), (3, ALONE, [0]), (4, DURING, [0, 3]), (3, STRICT, [1, 2])],
    ids=["twice", "alone", "during", "strict"],
)
def test_survivors_go_on(n: int, program: str, survivors: list[int]) -> None:
    """On the nccl plane a right sum on the survivors comes soon after a death, however often; the job ends well."""
    _goes_on(run_job(n, HEAD + program, timeout=50, **on_standins()), survivors, 1.5)


def test_losses_are_told_in_a_table(tmp_path: Path) -> None:
    """The program that measures losses on GPUs: who was told what and when, and how long it took to go on."""
    program = str(TESTS / "gpu" / "losses.py")
    result = run_job(4, [program, "--lost", "2", "--json", str(tmp_path / "seen")], timeout=50, **on_standins())
    assert result.rc == 0 and "2 of 4 ranks killed at once" in result.rank_out[0], result.text
    seen = json.loads((tmp_path / "seen").read_text())["seen"]
    assert [row["rank"] for row in seen] == [0, 3] and all(0 < row["told_ms"] < row["back_ms"] for row in seen), seen
    assert all(row["named"] and set(row["named"]) <= {1, 2} for row in seen), seen


def test_status_of_whoever_is_left() -> None:
    """The program's own status is the job's; where it is not known, and where all others are lost, the job fails."""
    how = on_standins()
    with contextlib.ExitStack() as stack:
        last = stack.enter_context(start_job(3, HEAD + LOST_ALL, timeout=50, **how))
        unseen = stack.enter_context(start_job(2, HEAD + UNSEEN, timeout=50, **how))
        ends = {end: stack.enter_context(start_job(2, HEAD + LEFT % end, timeout=50, **how)) for end in STATUSES}
        found = {end: job.wait() for end, job in ends.items()}
        assert {end: result.rc for end, result in found.items()} == STATUSES, found
        assert "use sys.exit(status)" in found["raise SystemExit(3)"].rank_err[0], found
        result = last.wait()
        assert result.rc == 1 and "that nobody closed" in result.rank_err[0], result.text
        assert unseen.wait().rc == 1


def test_survivors_go_on_over_mpi() -> None:
    """So it does on the host plane, over a fault-tolerant MPI."""
    _goes_on(run_job(5, HEAD + HOST, timeout=50, env={"PLANE": "host"}, **ULFM), [0], 2.0)


def _goes_on(result: JobResult, survivors: list[int], bound: float) -> None:
    assert result.rc == 0, result.text
    assert all(result.rank_out[rank].endswith("leaves with 0\n") for rank in survivors), result.text
    found = waits(result, survivors)
    assert found and max(found) < bound, (found, result.text)


def test_nodes_go_on_over_mpi(jobs: dict[str, Job]) -> None:
    """Where no watcher sees all ranks, those of the nccl plane go on too, over a fault-tolerant MPI."""
    result = jobs["nodes"].wait()
    assert result.rc == 0, result.text
    assert all(result.rank_out[rank].endswith("leaves with 0\n") for rank in (0, 2)), result.text


@pytest.mark.parametrize(
    ("name", "survivors"), [("not called", [0, 1]), ("not called over mpi", [0, 1]), ("stopped", [0, 2])]
)
def test_ranks_that_do_not_come(name: str, survivors: list[int], jobs: dict[str, Job]) -> None:
    """A rank that lives is waited for, and named at the deadline; one that is stopped or has closed is left out.

    Such a one harms nobody, and does not wait in MPI_Finalize for those that went on without it.
    """
    result = jobs[name].wait()
    assert all(result.rank_out[rank].endswith("leaves with 0\n") for rank in survivors), result.text
    for err in (result.rank_err[1], result.rank_err[3]) if name == "stopped" else ():
        assert "it ends alone, by SIGTERM" in err, result.text


def test_a_rank_that_mpi_waits_for_is_named(jobs: dict[str, Job]) -> None:
    """Over MPI one that is stopped keeps the others from going on, which they are told in seconds; or has closed."""
    closed = jobs["closed host"].wait()
    assert "named\n" in closed.rank_out[2] and "it ends alone" in closed.rank_err[0], closed.text
    result = jobs["stopped host"].wait()
    assert all("named\n" in result.rank_out[rank] for rank in (0, 2)), result.text


@pytest.mark.parametrize("name", ["other call", "other call over mpi"])
def test_different_calls_are_told_at_once(name: str, jobs: dict[str, Job]) -> None:
    """Where one rank shrinks and another reconnects, each is told who did what, and all can do the same then."""
    result = jobs[name].wait()
    assert result.rc == 0 and all(out.endswith("done\n") for out in result.rank_out), result.text


def test_a_launcher_that_ends_survivors_is_refused(jobs: dict[str, Job]) -> None:
    """Where survivors cannot go on, a start that asks for it is refused on every rank, and a shrink at once."""
    for name in ("refused", "nodes refused"):
        started = jobs[name].wait()
        assert started.rc == 0, started.text
    later = jobs["refused on the host plane"].wait()
    assert "refused\n" in later.rank_out[0], later.text
