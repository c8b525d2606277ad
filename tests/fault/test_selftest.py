"""The selftest under real launchers: what passes, what is refused, what breaks, and that every rank ends alike."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers.libnccl_files import NcclFiles, real_library
from helpers.mpirun import MPIS, JobResult, run_job, start_job
from helpers.receipts import receipt
from helpers.selftest import MAIN, arguments, outcomes, run_selftest, statuses, told

from butter_mpi.selftest import receipts
from butter_mpi.selftest.catalogue import CHECKS

ON_DEVICE = ["producer_stream", "add_path", "registered", "capture"]

EACH_MPI = pytest.mark.parametrize("mpi", MPIS)

# One check, which does on rank 1 what the test wants.
BAD_CHECK = """
def bad(context):
    comm = context.comm
    if comm.rank == 1:
        {deed}
    comm.barrier()
    yield from ()
runner.CHECKS = (checks.Check(1, "bad", "a bad one", bad), *runner.CHECKS[:2])
"""

# One check, which passes and writes to stdout as a library may.
NOISY_CHECK = """
def noisy(context):
    print("from Python")
    os.system("echo from a child")
    yield from ()
runner.CHECKS = (checks.Check(1, "noisy", "it prints", noisy), *runner.CHECKS[:2])
"""

# The selftest as a person starts it, which tells what the C environment has when a library is about to be loaded.
WATCHED = """
import ctypes, os, runpy, sys

getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
seen = set()

def watch(event, arguments):
    name = os.path.basename(str(arguments[0])) if event in ("import", "ctypes.dlopen") else ""
    if name in ("numpy", "mpi4py.MPI", "libnccl.so.2") and name not in seen:
        seen.add(name)
        print(name, getenv(b"NCCL_IB_TIMEOUT"), getenv(b"NCCL_IB_RETRY_CNT"), flush=True)

sys.addaudithook(watch)
sys.argv[1:] = ["--plane", "nccl"]
runpy.run_module("butter_mpi.selftest", run_name="__main__", alter_sys=True)
"""


def on_host(*words: str) -> dict[str, str]:
    """Return the variable that carries a rank's arguments, which ask for the host plane."""
    return arguments("--plane", "host", *words)


def selftest(n: int, *words: str, env: dict[str, str] | None = None, **how: Any) -> JobResult:
    """Run the selftest on small data, on the host plane unless `env` has other arguments."""
    return run_selftest(n, env={**on_host(*words), **(env or {})}, **how)


@EACH_MPI
def test_every_check_passes(mpi: str, tmp_path: Path) -> None:
    """The real command passes on two ranks: a line a check from rank 0 only, and a valid receipt of what ran."""
    command = ["-m", "butter_mpi.selftest", "--plane", "host", "--faults", "--receipt", "r.json", "--np-expected", "2"]
    result = run_job(2, command, mpi=mpi, cwd=tmp_path, timeout=90)
    assert result.rc == 0, result.text
    assert outcomes(result.rank_out[0]) == {check.id: "not" if check.id in ON_DEVICE else "ok" for check in CHECKS}
    assert "plane     host: host was asked for" in result.rank_out[0]
    assert "NCCL_IB_TIMEOUT=10 (set here, it was unset)" in result.rank_out[0]
    assert f"passed: {len(CHECKS) - len(ON_DEVICE)} checks, plane host, 2 ranks" in result.rank_out[0].splitlines()[-1]
    assert (result.rank_out[1], result.rank_err) == ("", ["", ""]), result.text
    made = receipts.load(tmp_path / "r.json")
    assert made.status == "passed"
    assert made.world_size == len(made.ranks) == 2
    assert made.launcher == {"name": "mpich" if mpi == "mpich" else "openmpi", "size": 2}
    assert ("MPICH" in str(made.versions["mpi_library"])) == (mpi == "mpich")
    assert {(row["name"], row["value"], row["set_by"]) for row in made.policy} == {
        ("NCCL_IB_TIMEOUT", "10", "selftest"),
        ("NCCL_IB_RETRY_CNT", "1", "selftest"),
    }
    reasons = {check["id"]: check["reason"] for check in made.checks if check["outcome"] != "passed"}
    assert reasons == dict.fromkeys(ON_DEVICE, "it is for the nccl plane, and plane host runs")
    assert made.transport == {"required": None, "found": {}}
    phases = made.timings["start"]
    waits = {name: phases.pop(name) for name in list(phases) if name not in ("mpi", "options", "communicator")}
    assert list(phases) == ["mpi", "options", "communicator"]
    assert list(waits) == [
        "collecting this rank's record",
        "duplicating the communicator",
        "agreeing on the watchers",
        "comparing preflight digests",
        "the watcher of this node",
    ]
    assert phases["communicator"] / 2 < sum(waits.values()) < phases["communicator"], made.timings
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_json_is_all_of_stdout(mpi: str) -> None:
    """With ``--json`` rank 0's stdout is the receipt alone, whatever else writes there; the lines are on stderr."""
    result = selftest(2, "--json", "--seed", "5", extra=NOISY_CHECK, mpi=mpi, env={"NCCL_IB_TIMEOUT": "10"})
    assert result.rc == 0, result.text
    made = receipts.check(json.loads(result.rank_out[0]), "stdout")
    assert made.seed == 5
    assert {row["name"]: row["set_by"] for row in made.policy} == {
        "NCCL_IB_TIMEOUT": "environment",
        "NCCL_IB_RETRY_CNT": "selftest",
    }
    assert result.rank_out[1] == ""
    for err in result.rank_err:
        assert "from Python" in err
        assert "from a child" in err
    assert outcomes(result.rank_err[0]) == {"noisy": "ok", "identity": "ok", "all_reduce": "ok"}


def test_one_rank_says_that_nothing_was_sent() -> None:
    """One rank passes on plane solo, says that no communication was tested, and runs no check that needs two."""
    result = selftest(1, "--faults")
    assert result.rc == 0, result.text
    found = outcomes(result.rank_out[0])
    assert [name for name, outcome in found.items() if outcome == "not"] == [*ON_DEVICE, "mismatch", "reconnect"]
    assert set(found.values()) == {"ok", "not"}
    assert "plane     solo" in result.rank_out[0]
    assert "world size 1: no communication was tested" in result.rank_out[0].splitlines()[-1]


def test_a_different_seed_each_time() -> None:
    """Without ``--seed`` two runs have different seeds, each the same on both ranks, or the checks could not pass."""
    seeds = set()
    for _ in range(2):
        result = selftest(2, extra="runner.CHECKS = runner.CHECKS[:3]")
        assert result.rc == 0, result.text
        seeds.add(next(line.split()[1] for line in result.rank_out[0].splitlines() if line.split()[0] == "seed"))
    assert len(seeds) == 2


@EACH_MPI
def test_wrong_argument_is_told_once(mpi: str) -> None:
    """Wrong arguments on every rank: one line from rank 0, status 2 on every rank."""
    result = selftest(2, "--colour", mpi=mpi)
    assert statuses(result) == ["2", "2"], result.text
    assert told(result) == ["butter_mpi.selftest: unrecognized arguments: --colour (--help lists the options)\n", ""]
    assert result.rc == 2 or mpi != "mpich", result.text


@EACH_MPI
@pytest.mark.parametrize("rank", [0, 1])
def test_wrong_argument_on_one_rank(mpi: str, rank: int) -> None:
    """A wrong argument on one rank leaves the other waiting nowhere: told by rank 0, status 2 on both, in seconds."""
    result = selftest(2, mpi=mpi, rank_env={rank: on_host("--seed", "x")})
    assert statuses(result) == ["2", "2"], result.text
    assert "argument --seed: must be a whole number" in told(result)[0]
    assert ("on rank 1" in told(result)[0]) == (rank == 1)
    assert (told(result)[1], told(result)[0].count("\n")) == ("", 1)
    assert result.seconds < 15, result.text


def test_options_that_differ_are_refused() -> None:
    """Ranks that would run different checks do not begin: option and values are named, status 2 on both."""
    result = selftest(2, rank_env={1: on_host("--faults")})
    assert statuses(result) == ["2", "2"], result.text
    assert "argument --faults: ranks were given different ones: false on rank 0, true on rank 1" in told(result)[0]
    assert told(result)[1] == ""


@pytest.mark.parametrize("path", ["missing/r.json", "."])
def test_receipt_that_cannot_be_written_is_found_first(path: str) -> None:
    """A receipt with no place to go is refused before any check, status 2 on every rank."""
    result = selftest(2, "--receipt", path)
    assert statuses(result) == ["2", "2"], result.text
    assert "argument --receipt: " in told(result)[0]
    assert result.rank_out == ["", ""]


def test_receipt_that_fails_in_the_end_fails_the_run() -> None:
    """Where the folder of the receipt goes away during the run, every rank ends with status 1 and rank 0 says why."""
    deed = "pass\n    elif os.path.isdir('gone'):\n        os.rmdir('gone')"
    extra = f"os.makedirs('gone', exist_ok=True)\n{BAD_CHECK.format(deed=deed)}"
    result = selftest(2, "--receipt", "gone/r.json", extra=extra)
    assert statuses(result) == ["1", "1"], result.text
    assert "gone/r.json cannot be written: No such file or directory" in told(result)[0]


@pytest.mark.parametrize("words", [["--help"], ["--list"], ["--compare", "a", "b"]])
def test_one_rank_answers(words: list[str], tmp_path: Path) -> None:
    """What runs no check is printed by rank 0 alone where every rank was asked for it."""
    for name in ("a", "b"):
        (tmp_path / name).write_text(receipt().text())
    result = selftest(2, env=arguments(*words), cwd=tmp_path)
    assert (result.rc, statuses(result), told(result)) == (0, ["0", "0"], ["", ""]), result.text
    assert result.rank_out[0] != "" and result.rank_out[1] == ""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("words", [["--help"], ["--list"], ["--compare", "a", "b"], ["--json"], ["--receipt", "r"]])
def test_one_rank_is_asked_for_something_else(words: list[str], rank: int) -> None:
    """An option that one rank alone was given is a wrong argument on every rank, in seconds, and nothing is run."""
    result = selftest(2, env=arguments(), rank_env={rank: arguments(*words)})
    assert statuses(result) == ["2", "2"], result.text
    assert f"argument {words[0]}: ranks were given different ones: " in told(result)[0]
    assert (told(result)[1], result.rank_out) == ("", ["", ""]), result.text
    assert result.seconds < 15, result.text


def test_answer_without_a_usable_mpi() -> None:
    """Where MPI cannot be loaded, what needs none is printed all the same."""
    result = selftest(2, env={**arguments("--list"), "MPI4PY_LIBMPI": "/nowhere/libmpi.so"})
    assert statuses(result) == ["0", "0"], result.text
    assert len(result.rank_out[0].splitlines()) == len(CHECKS) and result.rank_out[1] == ""


# Rank 0's own output goes where a test wants, before the selftest begins.
LOST = """
runner.CHECKS = runner.CHECKS[:3]
if "0" == os.environ.get("PMI_RANK"):
    {how}
"""
FULL = "os.dup2(os.open('/dev/full', os.O_WRONLY), {number})"
NOBODY = "r, w = os.pipe(); os.dup2(w, 1); os.close(r); os.close(w)"
CLOSED = "os.close(1); sys.stdout = None"


@pytest.mark.parametrize("words", [[], ["--json"]], ids=["lines", "json"])
@pytest.mark.parametrize("how", [FULL.format(number=1), NOBODY, CLOSED], ids=["full", "nobody", "closed"])
def test_output_that_cannot_be_written_fails_the_run(how: str, words: list[str], tmp_path: Path) -> None:
    """Where rank 0's stdout is lost the checks go on, the receipt is written, one line says it, and all end with 1."""
    result = selftest(2, "--receipt", "r.json", *words, extra=LOST.format(how=how), cwd=tmp_path)
    assert statuses(result) == ["1", "1"], result.text
    assert told(result)[0].splitlines()[-1].startswith("butter_mpi.selftest: stdout cannot be written: ")
    assert "Traceback" not in result.text
    assert receipts.load(tmp_path / "r.json").status == "passed"


@pytest.mark.parametrize("how", [FULL.format(number=2), "os.close(2); sys.stderr = None"], ids=["full", "closed"])
def test_run_without_a_stderr(how: str) -> None:
    """A rank that can tell nobody passes and refuses like any other, and leaves the other rank nowhere."""
    extra = LOST.format(how=how) + "import builtins; builtins.print = lambda *what, **where: None\n"
    assert selftest(2, extra=extra).rc == 0
    for words in (["--bogus"], ["--np-expected", "3"]):
        result = selftest(2, *words, extra=extra)
        assert result.rc == (2 if words == ["--bogus"] else 3), result.text
        assert result.seconds < 15, result.text


@pytest.mark.parametrize("rank", [0, 1])
def test_configuration_file_that_never_ends_is_refused(rank: int) -> None:
    """A rank whose NCCL_CONF_FILE is a device says so to all ranks, and is not left reading it."""
    result = selftest(2, rank_env={rank: {"NCCL_CONF_FILE": "/dev/zero"}})
    assert statuses(result) == ["3", "3"], result.text
    assert f'rank {rank}: ValueError: NCCL\'s configuration file "/dev/zero" is no regular file' in told(result)[0]


@EACH_MPI
def test_refused_start_is_told_once(mpi: str) -> None:
    """A start that preflight refuses is told once, by rank 0, with status 3 on every rank."""
    result = selftest(2, mpi=mpi, rank_env={1: {"NCCL_ALGO": "Ring"}})
    assert statuses(result) == ["3", "3"], result.text
    assert 'NCCL_ALGO: unset on rank 0, "Ring" on rank 1' in told(result)[0]
    assert told(result)[1] == ""
    assert result.rank_out == ["", ""]


def test_another_policy_is_refused_on_nccl() -> None:
    """A policy variable with another value is refused on the nccl plane, while the unset one was set."""
    result = selftest(2, env={**arguments("--plane", "nccl"), "NCCL_IB_TIMEOUT": "14"})
    assert statuses(result) == ["3", "3"], result.text
    assert 'NCCL_IB_TIMEOUT must be "10"' in told(result)[0]
    assert "NCCL_IB_RETRY_CNT must" not in told(result)[0]


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_policy_is_set_before_any_library_is_loaded(mpi: str, tmp_path: Path) -> None:
    """When NumPy, MPI and NCCL are loaded, each in its turn, the C environment has both policy variables already."""
    library = NcclFiles(real_library(), tmp_path).copy()
    result = run_job(2, WATCHED, mpi=mpi, env={"NCCL_LIBRARY": str(library)}, timeout=40)
    for out in result.rank_out:
        loaded = dict(line.split(" ", 1) for line in out.splitlines())
        assert loaded == dict.fromkeys(("numpy", "mpi4py.MPI", "libnccl.so.2"), "b'10' b'1'"), result.text


def test_required_transport_is_refused_on_host() -> None:
    """A transport that cannot be verified refuses the start."""
    result = selftest(2, "--require-transport", "NET/IB")
    assert statuses(result) == ["3", "3"], result.text
    assert "transport NET/IB is required" in told(result)[0]


def test_another_number_of_ranks_is_refused() -> None:
    """``--np-expected`` refuses another world size, with both numbers."""
    result = selftest(2, "--np-expected", "3")
    assert statuses(result) == ["3", "3"], result.text
    assert told(result) == [
        "butter_mpi.selftest: 2 ranks, but --np-expected says 3; start it with mpirun -np 3 (or srun -n)\n",
        "",
    ]


def test_two_worlds_of_one_rank_are_refused() -> None:
    """The mpirun of another MPI makes two worlds of one rank: refused on both, told once, never green."""
    result = selftest(2, mpi="mpich", library="openmpi")
    assert statuses(result) == ["3", "3"], result.text
    assert "PMI_SIZE says 2 ranks, but MPI.COMM_WORLD has 1" in told(result)[0]
    assert "PMI_SIZE says" not in told(result)[1]
    assert result.rc != 0


def test_missing_mpi_is_one_line() -> None:
    """Where MPI cannot be loaded, one line says what to install, with status 3."""
    result = selftest(1, env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"})
    assert statuses(result) == ["3"], result.text
    assert "MPI cannot be loaded: " in told(result)[0]
    assert "butter_mpi[mpich]" in told(result)[0]
    assert told(result)[0].count("\n") == 1


@EACH_MPI
def test_rank_that_never_comes_to_mpi_init(mpi: str) -> None:
    """A rank that does not come leaves nobody in MPI_Init: it ends at the start deadline, with a traceback."""
    stay = 'if "1" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):\n'
    stay += "    import signal\n    signal.pause()\n"
    result = selftest(2, "--start-deadline", "3", extra=stay, mpi=mpi)
    assert result.rc != 0, result.text
    assert 3 <= result.seconds < 15, result.text
    assert "_start_mpi_or_end_this_process_at_the_start_deadline" in result.rank_err[0]
    assert "Timeout (0:00:03)!" in result.rank_err[0]


@EACH_MPI
def test_crash_of_one_rank_ends_the_job(mpi: str) -> None:
    """An exception on one rank ends every rank within seconds, with its traceback, each line under its rank."""
    result = selftest(3, extra=BAD_CHECK.format(deed="raise RuntimeError('on purpose')"), mpi=mpi)
    assert result.rc != 0, result.text
    assert result.seconds < 15, result.text
    lines = [line for line in result.rank_err[1].splitlines() if line.startswith("rank 1/3: ")]
    assert lines[0] == "rank 1/3: Traceback (most recent call last):"
    assert lines[-1] == "rank 1/3: RuntimeError: on purpose"


def test_check_without_memory_fails_and_the_others_run() -> None:
    """Memory that one rank cannot get for a check fails that check with the cause; it is no traceback and no end."""
    check = BAD_CHECK.replace("    comm.barrier()\n", "")
    result = selftest(2, extra=check.format(deed="import numpy; numpy.empty(2**60, numpy.uint8)"))
    assert statuses(result) == ["1", "1"], result.text
    assert "Traceback" not in result.text
    assert outcomes(result.rank_out[0]) == {"bad": "FAILED", "identity": "ok", "all_reduce": "ok"}
    assert "ended early, no memory: Unable to allocate 1.00 EiB" in result.rank_out[0], result.text


def test_check_without_memory_that_others_wait_in_says_so() -> None:
    """Where the other ranks are in an operation of the check, the run stops there; the rank without memory says why."""
    result = selftest(2, extra=BAD_CHECK.format(deed="raise MemoryError('17 GiB')"))
    assert result.rc != 0 and "Traceback" not in result.text, result.text
    expected = "rank 1/2: selftest stopped in check bad: ended early, no memory: 17 GiB; the communicator is poisoned: "
    assert expected in result.rank_err[1], result.text


@EACH_MPI
def test_killed_rank_ends_the_job(mpi: str) -> None:
    """A rank that is killed in a check ends the job within five seconds, and not with status 0."""
    deed = "import signal, sys; print('here', file=sys.stderr, flush=True); signal.pause()"
    program = MAIN.format(extra=BAD_CHECK.format(deed=deed))
    with start_job(2, program, env=on_host(), mpi=mpi, timeout=40) as job:
        job.wait_for("here", 1)
        job.signal(1, signal.SIGKILL)
        result = job.wait(timeout=5)
    assert result.rc != 0, result.text


@EACH_MPI
def test_poisoned_communicator_stops_the_run(mpi: str, tmp_path: Path) -> None:
    """A communicator that breaks stops the run on every rank, says so, and leaves a receipt that says so too."""
    deed = "import numpy; comm.all_reduce(numpy.zeros(3))"
    result = selftest(2, "--receipt", "r.json", extra=BAD_CHECK.format(deed=deed), mpi=mpi, cwd=tmp_path)
    assert result.rc != 0, result.text
    for rank in range(2):
        assert f"rank {rank}/2: selftest stopped in check bad: the communicator is poisoned: " in result.rank_err[rank]
    assert "FAILED: 1 of 1 checks (bad)" in result.rank_out[0]
    assert "stopped there, the communicator broke" in result.rank_out[0]
    made = receipts.load(tmp_path / "r.json")
    assert made.status == "broken"
    assert [check["outcome"] for check in made.checks] == ["failed", "not run", "not run"]
    assert "all_reduce #" in made.checks[0]["failures"][0]["facts"][0]


def test_faults_are_not_provoked_where_they_end_the_job() -> None:
    """With action ``abort`` the checks that break the communicator are not run, and say why."""
    extra = "runner.CHECKS = tuple(check for check in runner.CHECKS if check.faults)"
    result = selftest(2, "--faults", extra=extra, env={"BUTTER_MPI_ACTION": "abort"})
    assert statuses(result) == ["0", "0"], result.text
    assert set(outcomes(result.rank_out[0]).values()) == {"not"}
    assert 'BUTTER_MPI_ACTION is "abort"' in result.rank_out[0]


# What a plane could do wrong, each with the check that must see it and the ranks that must tell it.
SABOTAGE = {
    "all_reduce, one bit": ("all_reduce", "spoiled('all_reduce', flip)", {1}),
    "all_reduce, not written": ("all_reduce", "spoiled('all_reduce', untouched)", {1}),
    "all_reduce, one byte too far": ("all_reduce", "spoiled('all_reduce', stray)", {1}),
    "all_reduce, send buffer": ("all_reduce", "spoiled('all_reduce', scribble)", {0, 1}),
    "broadcast, one bit": ("broadcast", "spoiled('broadcast', flip)", {1}),
    "all_gather, one bit": ("all_gather", "spoiled('all_gather', flip)", {1}),
    "all_gather, one byte too far": ("all_gather", "spoiled('all_gather', stray)", {1}),
    "reduce_scatter, one bit": ("reduce_scatter", "spoiled('reduce_scatter', flip)", {1}),
    "reduce_scatter, not written": ("reduce_scatter", "spoiled('reduce_scatter', untouched)", {1}),
    "send, one bit": ("send_recv", "other_data()", {0}),
    "group, one bit": ("group", "other_data()", {0}),
    "barrier that waits for nobody": ("barrier", "patched('barrier', lambda self: None)", {0, 1}),
    "reduce, one bit": ("rooted", "spoiled('reduce', flip)", {1}),
    "gather, one bit": ("rooted", "spoiled('gather', flip)", {1}),
    "scatter, one bit": ("rooted", "spoiled('scatter', flip)", {1}),
    "all_to_all, not written": ("rooted", "spoiled('all_to_all', untouched)", {1}),
    "all_gather_v, one byte too far": ("uneven", "spoiled('all_gather_v', stray)", {1}),
    "reduce_scatter_v, one bit": ("uneven", "spoiled('reduce_scatter_v', flip)", {1}),
    "all_to_all_v, one bit": ("uneven", "spoiled('all_to_all_v', flip)", {1}),
    "carried types, one bit": ("carried", "spoiled('all_reduce', flip)", {1}),
    "order, one bit": ("order", "spoiled('all_reduce', nudge)", {0, 1}),
    "two numbers a collective": ("sequence", "patched('all_reduce', twice)", {0, 1}),
    "strided arrays taken": ("refusals", "patched('broadcast', copying)", {0, 1}),
    "another plane": ("identity", "patched('plane', property(lambda self: ['host', 'nccl'][self.rank]))", {0, 1}),
    "one rank on another plane": ("alone", "patched('plane', property(lambda self: 'host'))", {0, 1}),
    "operators not compared": ("mismatch", "not_compared('op')", {0, 1}),
}

SABOTEUR = """
import contextlib, ctypes
import numpy as np
from butter_mpi.communicator import Communicator
from butter_mpi.planes import meeting
from butter_mpi.selftest.catalogue import CHECKS

@contextlib.contextmanager
def patched(name, value, owner=Communicator):
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)

def spoiled(name, harm):
    original = getattr(Communicator, name)
    def call(self, *arrays, **how):
        two = len(arrays) > 1 and isinstance(arrays[1], np.ndarray)
        result = arrays[1] if two else arrays[0]
        before = result.copy()
        original(self, *arrays, **how)
        if self.rank == 1 and result.size:
            harm(result, before, arrays[0] if two else None)
    return patched(name, call)

def flip(result, before, send):
    result.view(np.uint8)[-1] ^= 0x40

def nudge(result, before, send):
    result.view(np.uint8)[0] ^= 1

def untouched(result, before, send):
    result[...] = before

def stray(result, before, send):
    ctypes.memset(result.ctypes.data + result.nbytes, 0, 1)

def scribble(result, before, send):
    if send is not None:
        flip(send, None, None)

def other_data():
    original = Communicator.send
    def send(self, buffer, peer):
        buffer = buffer.copy()
        if self.rank == 1 and buffer.size:
            flip(buffer, None, None)
        original(self, buffer, peer)
    return patched("send", send)

def twice(self, *arrays, original=Communicator.all_reduce, **how):
    original(self, *arrays, **how)
    original(self, np.zeros(1))

def copying(self, buffer, root=0, original=Communicator.broadcast):
    original(self, np.ascontiguousarray(buffer), root)

def not_compared(name, original=meeting._key):
    return patched("_key", lambda record: original({**record, name: None}), meeting)

def sabotaged(base, how):
    def run(context):
        with eval(how):
            yield from base.run(context)
    return run

bases = {check.id: check for check in CHECKS}
rows = json.loads(os.environ["BUTTER_MPI_TEST_SABOTAGE"])
runner.CHECKS = tuple(
    checks.Check(number, "row", title, sabotaged(bases[base], how)) for number, (title, base, how) in enumerate(rows, 1)
)
"""


def test_every_check_can_fail() -> None:
    """Whatever a plane does wrong is seen by the check that is there for it, on the ranks where it shows; status 1."""
    rows = [(title, base, how) for title, (base, how, _) in SABOTAGE.items()]
    env = {"BUTTER_MPI_TEST_SABOTAGE": json.dumps(rows)}
    result = selftest(2, "--json", extra=SABOTEUR, env=env)
    assert statuses(result) == ["1", "1"], result.text
    made = receipts.check(json.loads(result.rank_out[0]), "stdout")
    assert made.status == "failed"
    found = {check["title"]: {row["rank"] for row in check["failures"]} for check in made.checks}
    assert found == {title: ranks for title, (_, _, ranks) in SABOTAGE.items()}
