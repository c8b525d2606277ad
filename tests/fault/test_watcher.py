"""What the watcher tells of real ranks: who died, is stopped or broke, how soon; and what is no fault."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import processes
from helpers.mpirun import Job, JobResult, run_job, start_job

HEAD = """
import ctypes, os, sys, time, threading, signal
import numpy as np
import butter_mpi
from mpi4py import MPI
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
def say(text):
    print(text, flush=True)
def start(**fault):
    # A policy of the program would win over the variables that a test sets.
    return butter_mpi.init(plane="host", fault=butter_mpi.FaultPolicy(**fault) if fault else None)
def raised(error):
    at = time.monotonic()
    say(f"raised {at} {type(error).__name__} {error.lost_ranks} {error.sequence} {error.operation} {error}")
"""
# Operations without an end, with a sign of life every tenth of a second; what ends them is said.
LOOP = """
comm = start(); comm.barrier()
turn, signs, shown = 0, 0, time.monotonic()
try:
    while True:
        turn += 1
        comm.all_reduce(np.zeros(3)); time.sleep(0.001)
        if time.monotonic() - shown > 0.1:
            signs, shown = signs + 1, time.monotonic()
            say(f"sign {signs} in turn {turn} .")
except butter_mpi.CommunicatorBrokenError as error:
    raised(error)
"""
# Open MPI's launcher leaves the others alone, so that they can be seen.
RECOVERY: dict[str, Any] = {"mpi": "openmpi", "options": ["--enable-recovery"]}
_SOON = 0.3
_WITHIN = 5.0
_FROZEN = (3.9, 5.0)


def raised(job: Job, rank: int, timeout: float = 20.0) -> tuple[float, str]:
    """When a rank raised by ``time.monotonic``, and what."""
    job.wait_for("raised ", rank, timeout)
    job.wait_for("\n", rank)
    line = job.read(rank, "out").split("raised ", 1)[1].splitlines()[0]
    at, text = line.split(" ", 1)
    return float(at), text


def go_on(job: Job, ranks: Sequence[int]) -> None:
    """See that ranks are at it: each shows a new sign of life, twice."""
    for _ in range(2):
        shown = {rank: job.read(rank, "out").count("sign ") for rank in ranks}
        for rank, count in shown.items():
            job.wait_for(f"sign {count + 1} ", rank)


def watchers(job: Job) -> list[int]:
    """The processes of the job's watchers."""
    return [pid for pid in processes.marked(job.id) if "sentinel/__main__.py" in processes.command_line(pid)]


def watcher(job: Job) -> int:
    """The process of the job's one watcher."""
    (pid,) = watchers(job)
    return pid


def verdicts(file: Path) -> list[dict[str, Any]]:
    """What the watcher appended to the file that the job named."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def cried(result: JobResult) -> list[str]:
    """The watcher's lines on the standard error of ranks, or of what started them, where none lives any more."""
    said = re.compile(r"butter_mpi: (the watcher|told by rank \d+)[:/].*")
    return [line for text in [*result.rank_err, result.out] for line in text.splitlines() if said.fullmatch(line)]


SITE = re.compile(r"last submitted all_reduce #\d+ \(float64 x 3, sum\) at \S+/program\.py:\d+")

FAULTS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
    "exit 3": ("os._exit(3)", "ended with exit status 3 without closing its communicator"),
    "exit 0": ("os._exit(0)", "ended with exit status 0 without closing its communicator"),
    "exception": ("raise ZeroDivisionError('rank 1 fails')", "ended by ZeroDivisionError: rank 1 fails"),
}


def fault(how: str) -> str:
    """The program in which rank 1 comes to its end after some turns."""
    at = f"        if RANK == 1 and turn == 20:\n            say(f'fault {{time.monotonic()}} .'); {how}\n"
    return HEAD + LOOP.replace("        turn += 1\n", f"        turn += 1\n{at}")


@pytest.mark.parametrize("what", list(FAULTS))
def test_lost_rank_is_raised_by_every_survivor_at_once(what: str, tmp_path: Path) -> None:
    """Whatever ends a rank, each survivor names it, the cause and its last operation within 300 ms."""
    how, cause = FAULTS[what]
    took, file = [], tmp_path / "verdict.jsonl"
    for _ in range(2):
        file.unlink(missing_ok=True)
        with start_job(3, fault(how), **RECOVERY, env={"BUTTER_MPI_VERDICT_FILE": str(file)}, timeout=30) as job:
            job.wait_for(" .", 1)
            told = {rank: raised(job, rank) for rank in (0, 2)}
            at = float(job.read(1, "out").split("fault ")[1].split()[0])
            result = job.wait()
        for when, text in told.values():
            took.append(when - at)
            assert text.startswith("PeerLostError (1,)") and "rank 1/3 on" in text and cause in text, result.text
            if what != "exception":
                assert SITE.search(text) and re.match(r"PeerLostError \(1,\) \d+ all_reduce ", text), result.text
        (verdict,) = verdicts(file)
        assert verdict["verdict"]["lost"] == [1] and cause in verdict["verdict"]["text"], verdict
        assert set(verdict["submitted"]) == {"0", "1", "2"} and len(verdict["submitted"]["1"]) > 1, verdict
        (line,) = cried(result)
        assert cause in line, result.text
    assert statistics.median(took) <= _SOON, took


def test_killed_rank_under_open_mpi_as_people_run_it() -> None:
    """Open MPI's launcher kills the survivors a quarter of a second later: they have raised by then."""
    with start_job(3, HEAD + LOOP, mpi="openmpi", timeout=30) as job:
        go_on(job, range(3))
        at = job.signal(1, signal.SIGKILL)
        told = {rank: raised(job, rank) for rank in (0, 2)}
        result = job.wait()
    assert result.rc != 0 and len(cried(result)) == 1, result.text
    for when, text in told.values():
        assert text.startswith("PeerLostError (1,)") and "was killed by SIGKILL" in text, result.text
        assert when - at <= _SOON, result.text


@pytest.mark.parametrize("what", list(FAULTS))
def test_lost_rank_is_said_where_the_launcher_ends_all_at_once(what: str, tmp_path: Path) -> None:
    """MPICH's launcher leaves survivors no time: the verdict is on stderr, at last of the script, and in the file."""
    how, cause = FAULTS[what]
    file = tmp_path / "verdict"
    with start_job(3, fault(how), env={"BUTTER_MPI_VERDICT_FILE": str(file)}, timeout=30, script=True) as job:
        result = job.wait()
    (verdict,) = verdicts(file)
    assert verdict["verdict"]["lost"] == [1] and cause in verdict["verdict"]["text"], result.text
    (line,) = cried(result)
    assert "rank 1/3 on" in line and cause in line, result.text
    assert SITE.search(line) or what == "exception", result.text


def test_lost_rank_is_said_after_the_launcher_has_ended() -> None:
    """A watcher that has no core before the launcher has ended itself says it where the launcher was started."""
    with start_job(3, HEAD + LOOP, timeout=30, script=True) as job:
        go_on(job, range(3))
        proxy = processes.parent(job.pid(0))
        launcher, late = processes.parent(proxy), watcher(job)
        os.kill(late, signal.SIGSTOP)
        job.signal(1, signal.SIGKILL)
        assert "mpi" in processes.command_line(launcher) and processes.await_exit(launcher, _WITHIN)
        os.kill(late, signal.SIGCONT)
        result = job.wait()
    (line,) = cried(result)
    assert re.search(r"rank \d/3 on", line) and line in result.out, result.text


@pytest.fixture(scope="module")
def disturbed() -> Iterator[dict[str, Job]]:
    """Jobs after what is no fault, which lasts for seconds: side by side, as all of them only wait meanwhile."""
    hold = "signal.signal(signal.SIGUSR1, lambda *_: (say('holds'), ctypes.PyDLL(None).sleep(8), say('held')))\n"
    # Nobody leaves before all have said what they saw.
    debugged: dict[str, Any] = {"program": LOOP + "MPI.COMM_WORLD.Barrier()\n", "env": {"BUTTER_MPI_WATCH": "debugger"}}
    setups = {"stopped": {}, "suspended": {}, "lock held": {"program": hold + LOOP}, "debugger": debugged}
    with contextlib.ExitStack() as stack:
        jobs = {}
        for name, setup in setups.items():
            program = HEAD + setup.get("program", LOOP)
            jobs[name] = stack.enter_context(start_job(3, program, env=setup.get("env"), timeout=80))
            go_on(jobs[name], range(3))
        halted = {"stopped": (3, [1]), "suspended": (6, range(3)), "debugger": (6, [1])}
        jobs["lock held"].signal(2, signal.SIGUSR1)
        began = time.monotonic()
        for name, (_, ranks) in halted.items():
            for rank in ranks:
                jobs[name].signal(rank, signal.SIGSTOP)
        for name, (seconds, ranks) in halted.items():
            time.sleep(max(0.0, began + seconds - time.monotonic()))  # as long as no fault may be seen in it
            for rank in ranks:
                jobs[name].signal(rank, signal.SIGCONT)
        jobs["lock held"].wait_for("held", 2)
        yield jobs


@pytest.mark.parametrize("what", ["suspended", "lock held", "stopped", "debugger"])
def test_what_is_no_fault(disturbed: dict[str, Job], what: str) -> None:
    """Stopped for 3 s, or all at once, or in C code with the interpreter lock, or by a debugger: all ranks go on."""
    job = disturbed[what]
    go_on(job, range(3))
    assert all("raised" not in job.read(rank, "out") for rank in range(3))
    if what in ("suspended", "lock held"):
        job.kill()  # The others are used once more.


def test_stopped_rank(disturbed: dict[str, Job]) -> None:
    """A rank that is stopped for 4 s, also one that once was for less, is named by every other."""
    job = disturbed["stopped"]
    go_on(job, range(3))
    at = job.signal(1, signal.SIGSTOP)
    told = {rank: raised(job, rank) for rank in (0, 2)}
    result = job.wait()
    for when, text in told.values():
        assert text.startswith("PeerLostError (1,)"), result.text
        assert "has been stopped (SIGSTOP or SIGTSTP) for 4." in text, result.text
        assert SITE.search(text) and _FROZEN[0] <= when - at <= _FROZEN[1], (when - at, result.text)
    assert result.rc != 0 and len(cried(result)) == 1, result.text


def test_stopped_watcher(disturbed: dict[str, Job]) -> None:
    """A watcher that is stopped is a fault after 4 s, also with the switch for debuggers."""
    job = disturbed["debugger"]
    go_on(job, range(3))
    pid = watcher(job)
    os.kill(pid, signal.SIGSTOP)
    at = time.monotonic()
    told = [raised(job, rank) for rank in range(3)]
    os.kill(pid, signal.SIGCONT)
    result = job.wait()
    for when, text in told:
        assert "the watcher of this node has not looked for" in text and "stopped" in text, result.text
        assert when - at <= 5, (when - at, result.text)


def test_killed_watcher() -> None:
    """Without a watcher nothing more is taken: every rank says so at once, and a reconnect is refused."""
    after = """
MPI.COMM_WORLD.Barrier()
try:
    comm.attempt_reconnect()
except butter_mpi.ButterError as error:
    say(f"refused {type(error).__name__} {error}")
MPI.COMM_WORLD.Barrier()
"""
    with start_job(3, HEAD + LOOP + after, timeout=40) as job:
        go_on(job, range(3))
        at = time.monotonic()
        os.kill(watcher(job), signal.SIGKILL)
        told = [raised(job, rank) for rank in range(3)]
        result = job.wait()
    for when, text in told:
        assert text.startswith("PeerLostError ()") and "the watcher of this node has ended" in text, result.text
        assert when - at <= _SOON, result.text
    for out in result.rank_out:
        assert "refused CommunicatorBrokenError" in out and "only a new job helps" in out, result.text


def test_verdict_reaches_the_ranks_of_another_node() -> None:
    """A death on one node is raised on another node too, within five seconds."""
    two = """
from butter_mpi.sentinel import client
own = client.node_key()
client.node_key = lambda: f"{own} {RANK == 2}"
"""
    # It does not leave meanwhile: that would tell the others too, and something else.
    program = HEAD + two + LOOP + "time.sleep(8)\n"
    with start_job(3, program, **RECOVERY, timeout=40) as job:
        go_on(job, range(3))
        at = job.signal(1, signal.SIGKILL)
        near = raised(job, 0)
        far = raised(job, 2, 7)
    for when, text in (near, far):
        assert text.startswith("PeerLostError (1,)") and "was killed by SIGKILL" in text, text
        assert when - at <= 5, (when - at, text)


def test_death_of_a_rank_with_a_child_that_lives_on() -> None:
    """A child that holds all that its parent had does not hide its parent's death."""
    fork = """
comm = None
if RANK == 1:
    def fork():
        child = ctypes.PyDLL(None).fork()  # no hook of Python closes anything in it
        if not child:
            ctypes.PyDLL(None).pause()
        say(f"child {child} .")
    signal.signal(signal.SIGUSR1, lambda *_: fork())
"""
    with start_job(3, HEAD + fork + LOOP, **RECOVERY, timeout=40) as job:
        go_on(job, range(3))
        job.signal(1, signal.SIGUSR1)
        job.wait_for("child ", 1)
        job.wait_for(" .", 1)
        child = int(job.read(1, "out").split("child ")[1].split()[0])
        at = job.signal(1, signal.SIGKILL)
        try:
            told = [raised(job, rank) for rank in (0, 2)]
            alive = processes.command_line(child) != "gone"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        result = job.wait()
    assert alive, result.text
    for when, text in told:
        assert text.startswith("PeerLostError (1,)") and "was killed by SIGKILL" in text, result.text
        assert when - at <= _SOON, (when - at, result.text)


START = """
from butter_mpi import preflight
from butter_mpi.sentinel import client
if RANK == 1:
    def end(*_):
        (sentinel,) = client._OPEN
        while {watched} and not sentinel.recorder.beat():
            os.sched_yield()
        say(f"fault {{time.monotonic()}} .")
        os.kill(os.getpid(), signal.{number})
    preflight.digest = end
try:
    start(start_deadline=12)
except butter_mpi.StartError as error:
    say(f"raised {{time.monotonic()}} {{type(error).__name__}} {{error}}")
    raise
"""


@pytest.mark.parametrize(
    ("number", "watched", "how", "within"),
    [
        ("SIGKILL", True, RECOVERY, (0.0, _SOON)),
        ("SIGKILL", False, RECOVERY, (0.0, 1.0)),
        ("SIGSTOP", False, {}, _FROZEN),
    ],
    ids=["killed", "killed before the watcher has looked", "stopped"],
)
def test_rank_lost_during_the_start(
    number: str, watched: bool, how: Mapping[str, Any], within: tuple[float, float]
) -> None:
    """A rank that dies, or is stopped, while others wait for it in the start ends theirs long before the deadline."""
    with start_job(3, HEAD + START.format(number=number, watched=watched), **how, timeout=40) as job:
        told = {rank: raised(job, rank) for rank in (0, 2)}
        at = float(job.read(1, "out").split("fault ")[1].split()[0])
        result = job.wait()
    for when, text in told.values():
        assert text.startswith("StartError") and "rank 1/3 on" in text, result.text
        # One that ended before the watcher looked may have taken its status along.
        expected = "has been stopped" if number == "SIGSTOP" else "was killed by SIGKILL" if watched else "; it "
        assert expected in text, result.text
        assert within[0] <= when - at <= within[1], (when - at, result.text)


def test_watch_off_on_one_rank() -> None:
    """A switch that ranks do not share is found by the comparison of the start, the same on every rank."""
    program = """
try:
    start()
except butter_mpi.PreflightError as error:
    say(f"refused {error}")
"""
    with start_job(3, HEAD + program, rank_env={1: {"BUTTER_MPI_WATCH": "off"}}, timeout=20) as job:
        result = job.wait()
    assert result.rc == 0 and len(set(result.rank_out)) == 1, result.text
    assert "refused" in result.rank_out[0] and "watch" in result.rank_out[0], result.text


def test_watcher_that_cannot_be_started() -> None:
    """Where no rank can start it, every rank's start ends at once, with the reason and the way round it."""
    program = """
sys.executable = ""
begin = time.monotonic()
try:
    start()
except butter_mpi.StartError as error:
    say(f"refused {time.monotonic() - begin < 5} {error}")
    raise
"""
    with start_job(3, HEAD + program, timeout=30) as job:
        result = job.wait()
    assert result.rc != 0 and result.seconds < 15, result.text
    for out in result.rank_out:
        assert "refused True" in out and "no Python interpreter of its own" in out and "watch='off'" in out, result.text


def test_last_words_of_a_watcher_that_ends_in_the_start(tmp_path: Path) -> None:
    """Where the watcher does not come to stand, every rank says what it wrote last, and the way round it."""
    (tmp_path / "python").write_text("#!/bin/sh\nread line; echo cannot run here >&2; exit 1\n")
    (tmp_path / "python").chmod(0o755)
    program = f"""
sys.executable = {str(tmp_path / "python")!r}
try:
    start()
except butter_mpi.StartError as error:
    say(f"refused {{error}}"); time.sleep(0.5)
    raise
"""
    result = run_job(2, HEAD + program, **RECOVERY, timeout=30)
    for out in result.rank_out:
        assert "the watcher of this node has ended (cannot run here)" in out and "watch='off'" in out, result.text


def test_watcher_is_started_by_a_rank_that_can() -> None:
    """One rank of a node without an interpreter of its own leaves the start of the watcher to another."""
    program = "if RANK == 0: sys.executable = ''\nwith start() as comm: comm.barrier()\n"
    result = run_job(2, HEAD + program, timeout=30)
    assert result.rc == 0, result.text


def test_idle_ranks_learn_of_a_death() -> None:
    """Ranks that submit nothing learn of a death by each way to ask, at once."""
    program = """
comm = start(); comm.barrier(); say("up .")
try:
    if RANK == 0:
        while comm.is_healthy(): time.sleep(0.002)
        say(f"unhealthy {time.monotonic()} .")
        comm.check_async_error()
    elif RANK == 2:
        while True: comm.check_async_error(); time.sleep(0.002)
    else:
        comm.wait_for_async_error(60)
except butter_mpi.CommunicatorBrokenError as error:
    raised(error)
"""
    with start_job(4, HEAD + program, **RECOVERY, timeout=30) as job:
        for rank in range(4):
            job.wait_for("up .", rank)
        at = job.signal(1, signal.SIGKILL)
        told = [raised(job, rank) for rank in (0, 2, 3)]
        result = job.wait()
    for when, text in told:
        assert text.startswith("PeerLostError (1,)") and "last submitted barrier #1" in text, result.text
        assert when - at <= _SOON, (when - at, result.text)


def test_action_abort_ends_the_job() -> None:
    """With action abort ranks that are in no call of butter_mpi end too."""
    program = "comm = start(action='abort'); comm.barrier(); say('up .'); signal.pause()\n"
    with start_job(3, HEAD + program, **RECOVERY, timeout=30) as job:
        for rank in range(3):
            job.wait_for("up .", rank)
        at = job.signal(1, signal.SIGKILL)
        result = job.wait(10)
        took = time.monotonic() - at
    assert took < 5, result.text
    for rank in (0, 2):
        assert "(action abort)" in result.rank_err[rank] and "was killed by SIGKILL" in result.rank_err[rank], (
            result.text
        )


SLOW = """
from butter_mpi.sentinel import client
hear = client.Sentinel._hear
def later(self, message):
    time.sleep(0.05 * (message["kind"] == "notice"))
    hear(self, message)
client.Sentinel._hear = later
"""


@pytest.mark.parametrize("listening", ["", SLOW], ids=["at once", "slowly"])
def test_reconnect_after_mismatches_and_then_a_death(listening: str) -> None:
    """After failures that all survive they go on, however fast each hears of them; a later death is still told."""
    again = """
comm = start(); comm.barrier()
def differ(turn):
    if turn % 3 == 0 and RANK == 1:
        comm.all_gather_json(1)
    else:
        comm.all_reduce(np.zeros(3 + (RANK == turn % SIZE)))
    say("no mismatch")
def agree(turn):
    for _ in range(turn % 4):
        comm.all_reduce(np.zeros(3))
for turn in range(30):
    try:
        # Whoever is quicker may be in the next turn, and end this rank's last operation of this one.
        agree(turn - 1)
        differ(turn)
    except butter_mpi.CollectiveMismatchError:
        pass
    comm.attempt_reconnect()
    assert comm.is_healthy()
say("reconnected .")
def start():
    return comm
"""
    # The first to hear must not end the job before the last has.
    stay = "threading.Event().wait(3)\n" if listening else ""
    with start_job(3, HEAD + listening + again + LOOP + stay, **RECOVERY, timeout=60) as job:
        for rank in range(3):
            job.wait_for("reconnected .", rank)
        go_on(job, range(3))
        at = job.signal(1, signal.SIGKILL)
        told = [raised(job, rank) for rank in (0, 2)]
        result = job.wait()
    assert "no mismatch" not in result.text, result.text
    for when, text in told:
        assert text.startswith("PeerLostError (1,)") and "was killed by SIGKILL" in text, result.text
        # Notices of earlier failures may have to be heard first; how soon a death is told is tested by itself.
        assert SITE.search(text) and when - at <= _WITHIN, (when - at, result.text)


def test_death_after_a_failure_that_all_survived() -> None:
    """A rank that dies after a mismatch was told, and before the reconnect, ends the reconnect of the others soon."""
    program = """
comm = start(start_deadline=12)
try:
    comm.all_reduce(np.zeros(3 + RANK))
except butter_mpi.CollectiveMismatchError:
    pass
if RANK == 1:
    say(f"fault {time.monotonic()} ."); os.kill(os.getpid(), signal.SIGKILL)
try:
    comm.attempt_reconnect(); comm.barrier()
except butter_mpi.CommunicatorBrokenError as error:
    raised(error)
"""
    with start_job(3, HEAD + program, **RECOVERY, timeout=40) as job:
        told = [raised(job, rank) for rank in (0, 2)]
        at = float(job.read(1, "out").split("fault ")[1].split()[0])
        result = job.wait()
    for when, text in told:
        assert "(1,)" in text and "was killed by SIGKILL" in text, result.text
        assert when - at <= 5, (when - at, result.text)


def test_stop_after_a_failure_that_all_survived() -> None:
    """A stopped rank ends the reconnects of the others, by name, until it runs again: then one with it succeeds.

    At first the stop itself is what breaks: whoever reconnects as soon as all run again is not refused for it.
    """
    program = """
def stop():
    say(f"fault {time.monotonic()} ."); os.kill(os.getpid(), signal.SIGSTOP)
comm = start(start_deadline=12); comm.barrier()
try:
    if RANK == 1: stop()
    comm.barrier()
except butter_mpi.PeerLostError as error:
    raised(error)
MPI.COMM_WORLD.Barrier()  # at once when the stopped one runs
comm.attempt_reconnect(); comm.barrier(); say("again .")
try:
    comm.all_reduce(np.zeros(3 + RANK))
except butter_mpi.CollectiveMismatchError:
    pass
if RANK == 1: stop()
while not comm.is_healthy():
    try:
        comm.attempt_reconnect()
    except butter_mpi.PeerLostError as error:
        raised(error)
comm.barrier(); comm.close(); say("done")
"""
    with start_job(3, HEAD + program, **RECOVERY, timeout=40) as job:
        for rank in (0, 2):
            raised(job, rank)
        job.signal(1, signal.SIGCONT)
        job.wait_for("again .", 1)
        for rank in (0, 2):
            job.wait_for("attempt_reconnect: rank 1/3 on ", rank)
        job.signal(1, signal.SIGCONT)
        result = job.wait()
    at = float(result.rank_out[1].split("fault ")[2].split()[0])
    for out in (result.rank_out[0], result.rank_out[2]):
        when, text = out.split("again .\nraised ", 1)[1].splitlines()[0].split(" ", 1)
        assert "attempt_reconnect: rank 1/3 on" in text, result.text
        assert "has been stopped (SIGSTOP or SIGTSTP) for 4." in text, result.text
        assert _FROZEN[0] <= float(when) - at <= _FROZEN[1], (float(when) - at, result.text)
    assert result.rc == 0 and all(out.endswith("done\n") for out in result.rank_out), result.text


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_rank_that_was_given_up_begins_nothing_with_the_others(mpi: str) -> None:
    """It hears first that it was: after the reconnect nothing is under way, and the job ends well."""
    program = """
comm = start(start_deadline=12); comm.barrier()
data = np.ones(70_000)
try:
    if RANK == 1:
        say("fault ."); os.kill(os.getpid(), signal.SIGSTOP)
    comm.all_reduce(data)
except butter_mpi.PeerLostError as error:
    raised(error)
MPI.COMM_WORLD.Barrier()  # at once when the stopped one runs
comm.attempt_reconnect()
data = np.full(3, RANK + 1)
comm.all_reduce(data); assert data[0] == 3, data
comm.close(); say("done")
"""
    with start_job(2, HEAD + program, mpi=mpi, timeout=40) as job:
        raised(job, 0)
        job.signal(1, signal.SIGCONT)
        result = job.wait()
    assert result.rc == 0 and all(out.endswith("done\n") for out in result.rank_out), result.text
    assert "PeerLostError (1,)" in result.rank_out[1] and "MPI would wait" not in result.text, result.text


def test_news_that_is_older_than_a_reconnect() -> None:
    """Once every rank has come, what is said of a stop before ends nothing; one who stops then ends it, by name."""
    program = """
from butter_mpi.planes import peers
real = peers.duplicate
comm = start(start_deadline=12)
sentinel = comm.backend._sentinel
def reconnect(then):
    try:
        comm.all_reduce(np.zeros(3 + RANK))
    except butter_mpi.CollectiveMismatchError:
        pass
    peers.duplicate = lambda *arguments: then(*arguments)
    comm.attempt_reconnect(); comm.barrier()
def late(comm, mpi, watch, look):
    # A watcher that learns of it late takes it back a moment later.
    if not RANK:
        sentinel.stopped[1] = "has been stopped, it was said"
        for _ in range(3): look()
        del sentinel.stopped[1]
    return real(comm, mpi, watch, look)
reconnect(late)
come_together = peers.PeerPlane._come_together
def told_before(*arguments):
    control = come_together(*arguments)
    if not RANK:
        sentinel.stopped[1] = "has been stopped, it was said before it came"
    return control
def looks_long(comm, mpi, watch, look):
    end = time.monotonic() + 2 * peers._NEWS_SECONDS
    while time.monotonic() < end:
        look()
    return real(comm, mpi, watch, look)
peers.PeerPlane._come_together = told_before
reconnect(looks_long)
peers.PeerPlane._come_together = come_together
MPI.COMM_WORLD.Barrier()
def stops(comm, mpi, watch, look):
    if RANK == 1:
        say(f"fault {time.monotonic()} ."); os.kill(os.getpid(), signal.SIGSTOP)
    return real(comm, mpi, watch, look)
try:
    reconnect(stops)
except butter_mpi.PeerLostError as error:
    raised(error)
"""
    with start_job(2, HEAD + program, **RECOVERY, timeout=40) as job:
        when, text = raised(job, 0)
        at = float(job.read(1, "out").split("fault ")[1].split()[0])
    assert "attempt_reconnect: rank 1/2 on" in text and "for 4." in text, text
    assert _FROZEN[0] <= when - at <= 5, (when - at, text)


# -- after the close ---------------------------------------------------------------------------------------------------


def test_ends_that_are_no_fault(tmp_path: Path) -> None:
    """Communicators closed in any order, forks, ranks that come late to MPI_Finalize or live on after it: no fault."""
    file = tmp_path / "verdict.jsonl"
    program = """
first, second = start(), start()
first.barrier(); second.barrier()
for comm in (first, second) if RANK else (second, first):
    comm.close()
child = os.fork()
if not child:
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(child, 0)
if RANK == 1:
    time.sleep(3)  # the others wait in MPI_Finalize, for longer than for a lost rank
if RANK != 2:
    MPI.Finalize()
    time.sleep(2 - RANK)  # so long nothing may come of the other's end
    say("lives on")
if RANK == 1:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    result = run_job(3, HEAD + program, **RECOVERY, env={"BUTTER_MPI_VERDICT_FILE": str(file)}, timeout=30)
    assert result.rank_out == ["lives on\n", "lives on\n", ""], result.text
    assert not cried(result) and not file.exists(), result.text


def test_rank_that_is_stopped_while_others_end() -> None:
    """Ranks that wait in MPI_Finalize, by a call or at exit, for one that is stopped end within five seconds."""
    program = """
comm = start(); comm.barrier(); comm.close()
if RANK == 1:
    MPI.COMM_WORLD.recv(); MPI.COMM_WORLD.recv()
    say(f"fault {time.monotonic()} ."); os.kill(os.getpid(), signal.SIGSTOP)
MPI.COMM_WORLD.send(None, 1)
if RANK == 0:
    MPI.Finalize()
"""
    with start_job(3, HEAD + program, timeout=30) as job:
        ends = [os.pidfd_open(job.pid(rank)) for rank in (0, 2)]
        job.wait_for(" .", 1)
        at = float(job.read(1, "out").split("fault ")[1].split()[0])
        for end in ends:
            assert select.select([end], [], [], 10)[0]
            os.close(end)
        took = time.monotonic() - at
        result = job.wait()
    assert took <= _WITHIN and result.rc != 0, (took, result.text)
    verdict, ended = cried(result)
    assert "rank 1/3 on" in verdict and "has been stopped (SIGSTOP or SIGTSTP) for 4." in verdict, result.text
    assert "ranks 0, 2 cannot come out of MPI_Finalize any more" in ended, result.text


def test_rank_that_dies_after_its_close() -> None:
    """It is told at once, disturbs nobody that has closed and computes on, and keeps nobody in MPI_Finalize later.

    However many communicators a program has closed, one watcher stays.
    """
    program = """
for _ in range(3):
    comm = start(); comm.barrier(); comm.close()
say("closed .")
if RANK == 0:
    signal.sigwait([signal.SIGUSR1])
    say("computed")
else:
    threading.Event().wait()
"""
    block = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
    with start_job(2, block + HEAD + program, **RECOVERY, timeout=30) as job:
        for rank in range(2):
            job.wait_for("closed .", rank)
        end = time.monotonic() + _WITHIN
        while len(watchers(job)) > 1 and time.monotonic() < end:
            os.sched_yield()
        assert watcher(job)
        at = job.signal(1, signal.SIGKILL)
        job.wait_for("was killed by SIGKILL after closing its communicator", 0)
        told = time.monotonic() - at
        job.signal(0, signal.SIGUSR1)
        result = job.wait(10)
    assert told <= _SOON and result.rank_out[0] == "closed .\ncomputed\n", (told, result.text)
    assert len(cried(result)) == 1, result.text
    assert "leaving: MPI would wait for a rank that is lost: rank 1/2 on" in result.rank_err[0], result.text


@pytest.mark.parametrize("name", ["none/v.json", "a folder"])
def test_verdict_file_that_cannot_be_written(name: str, tmp_path: Path) -> None:
    """A file that could not be written when something breaks is refused in the start by name, on every rank."""
    (tmp_path / "a folder").mkdir()
    program = "start()\n"
    result = run_job(2, HEAD + program, env={"BUTTER_MPI_VERDICT_FILE": str(tmp_path / name)}, timeout=30)
    assert result.rc != 0, result.text
    reason = "none: no such folder" if name.startswith("none") else "a folder: no regular file"
    for err in result.rank_err:
        assert "start: verdict_file (BUTTER_MPI_VERDICT_FILE) cannot be appended to" in err, result.text
        assert f"ranks 0-1: {tmp_path}/{reason}" in err, result.text
        assert "name a file that this user may write to, in a folder that exists" in err, result.text


def test_watcher_that_was_stopped_and_goes_on_accuses_nobody(tmp_path: Path) -> None:
    """Ranks that gave it up and left say goodbye to it all the same."""
    file = tmp_path / "verdict.jsonl"
    program = """
comm = start(); comm.barrier()
pids = [int(pid) for pid in os.listdir("/proc") if pid.isdigit()]
def line(pid):
    try:
        return open(f"/proc/{pid}/cmdline", "rb").read()
    except OSError:
        return b""
own = f"{os.getuid()}"
watchers = [p for p in pids if b"sentinel/__main__.py" in line(p) and MARK in open(f"/proc/{p}/environ", "rb").read()]
if RANK == 0:
    os.kill(watchers[0], signal.SIGSTOP)
try:
    comm.wait_for_async_error(20)
except butter_mpi.PeerLostError as error:
    say("gave up")
comm.close()
MPI.COMM_WORLD.Barrier()
if RANK == 0:
    os.kill(watchers[0], signal.SIGCONT)
"""
    program = program.replace("MARK", "os.environ['BUTTER_MPI_TEST_JOB'].encode()")
    with start_job(2, HEAD + program, env={"BUTTER_MPI_VERDICT_FILE": str(file)}, timeout=40) as job:
        result = job.wait()
    assert [out.split() for out in result.rank_out] == [["gave", "up"]] * 2, result.text
    assert not cried(result) and not file.exists(), result.text
