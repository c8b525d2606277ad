"""A start with one rank made different: refused on every rank, with the same text, and never left waiting."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.libnccl_files import NcclFiles, real_library
from helpers.mpirun import JobResult, run_job

START = """
import ctypes, json, os, socket, sys
import butter_mpi
from butter_mpi import library

libc = ctypes.CDLL(None)
for name, value in json.loads(os.environ.get("BUTTER_MPI_TEST_C", "{}")).items():
    libc.unsetenv(name.encode()) if value is None else libc.setenv(name.encode(), value.encode(), 1)
if host := os.environ.get("BUTTER_MPI_TEST_HOST"):
    socket.gethostname = lambda: host
for path in json.loads(os.environ.get("BUTTER_MPI_TEST_LOAD", "[]")):
    ctypes.CDLL(path)
if os.environ.get("BUTTER_MPI_TEST_BROKEN"):
    library.describe = lambda env, hashed=True: 1 / 0
status = 0
try:
    with butter_mpi.init(**json.loads(os.environ.get("BUTTER_MPI_TEST_INIT", "{}"))) as comm:
        report = comm.preflight
except butter_mpi.PreflightError as error:
    report, status = error.report, 3
    assert str(error) == report.text()
print(json.dumps([report.text(), report.to_json()]))
print("hashed", len(library._DIGESTS), file=sys.stderr)
sys.exit(status)
"""

# A start on a machine that looks as if it had one GPU for each rank.
WITH_DEVICES = """
import butter_mpi
from butter_mpi import cuda
from mpi4py import MPI

rank = MPI.COMM_WORLD.rank
device = {"uuid": f"GPU-{rank}", "name": "GPU", "pci": f"0000:0{rank}:00.0", "ordinal": 0}
cuda.devices = lambda env: [device]
try:
    with butter_mpi.init() as comm:
        said = f"started on plane {comm.plane}"
except butter_mpi.StartError as error:
    said = error.message
with butter_mpi.init(plane="host") as comm:
    comm.barrier()
print(said)
"""

POLICY = {"NCCL_IB_TIMEOUT": "10", "NCCL_IB_RETRY_CNT": "1"}
NCCL = {**POLICY, "BUTTER_MPI_PLANE": "nccl"}


def c_variables(**variables: str | None) -> dict[str, str]:
    """What a rank sets (``None``: unsets) in its C environment only, where Python does not see it."""
    return {"BUTTER_MPI_TEST_C": json.dumps(variables)}


def init(**arguments: Any) -> dict[str, str]:
    """Arguments for this rank's ``init``."""
    return {"BUTTER_MPI_TEST_INIT": json.dumps(arguments)}


def start(n: int, **how: Any) -> tuple[str, dict[str, Any], JobResult]:
    """Run a start; every rank must give the same report. Returns its text, its JSON form and the job's result."""
    result = run_job(n, START, timeout=30, **how)
    assert result.rank_out[0] and set(result.rank_out) == {result.rank_out[0]}, result.text
    text, report = json.loads(result.rank_out[0])
    assert (result.rc == 0) == report["ok"], result.text
    return text, report, result


def refused(n: int, **how: Any) -> str:
    """Run a start that must be refused; returns the text."""
    text, report, result = start(n, **how)
    assert not report["ok"], result.text
    return text


def test_ranks_that_agree_start() -> None:
    """Nothing differs: the start goes on, and the report says on what all agree."""
    text, report, _ = start(3)
    assert text == "preflight: 3 ranks, plane host: agreed"
    assert {f["outcome"] for f in report["findings"]} == {"agree", "does not apply"}


@pytest.mark.parametrize(("mpi", "remedy"), [("mpich", "mpirun -genv NCCL_PROTO LL"), ("openmpi", "-x NCCL_PROTO=LL")])
def test_variable_that_was_not_handed_on(mpi: str, remedy: str) -> None:
    """A variable of rank 0 alone is named with "unset" for the others, and how this launcher hands it on."""
    text = refused(3, mpi=mpi, rank_env={0: {"NCCL_PROTO": "LL"}})
    assert 'NCCL_PROTO: "LL" on rank 0, unset on ranks 1-2' in text.split("\n")[0]
    assert remedy in text


def test_variable_that_only_c_sees() -> None:
    """What NCCL would read decides, although ``os.environ`` is the same everywhere."""
    text = refused(2, env={"NCCL_BUFFSIZE": "1"}, rank_env={1: c_variables(NCCL_BUFFSIZE="2")})
    assert 'NCCL_BUFFSIZE: "1" on rank 0, "2" on rank 1' in text


def test_variable_from_a_configuration_file(tmp_path: Path) -> None:
    """A file that only one rank has is found, and named."""
    path = tmp_path / "nccl.conf"
    path.write_text("NCCL_ALGO=Tree\n")
    text = refused(2, rank_env={1: {"NCCL_CONF_FILE": str(path)}})
    assert f'NCCL_ALGO: unset on rank 0, "Tree" from {path} on rank 1' in text


def test_debugging_one_rank_is_a_warning() -> None:
    """Only logging differs: every rank starts, with a warning."""
    text, report, _ = start(2, rank_env={1: {"NCCL_DEBUG": "WARN"}})
    assert report["ok"] and 'warning [environment] NCCL_DEBUG: unset on rank 0, "WARN" on rank 1' in text


def test_secret_is_compared_and_never_shown() -> None:
    """A site's own variable differs, and its value is on no stream of any rank."""
    result = run_job(2, START, rank_env={r: {"NCCL_FOO_TOKEN": f"s3cret-{r}"} for r in range(2)})
    assert result.rc != 0 and "NCCL_FOO_TOKEN" in result.rank_out[0] == result.rank_out[1]
    assert "s3cret" not in result.text


@pytest.mark.parametrize(
    ("hosts", "names", "allowed", "ok"),
    [("a b", "eno1 eth0", False, False), ("a b", "eno1 eth0", True, True), ("a a", "eno1 eth0", True, False)],
)
def test_interface_names_of_two_hosts(hosts: str, names: str, allowed: bool, ok: bool) -> None:
    """Names may differ between hosts by the explicit option only, and never on one host."""
    ranks = {
        rank: {"BUTTER_MPI_TEST_HOST": host, "NCCL_SOCKET_IFNAME": name}
        for rank, (host, name) in enumerate(zip(hosts.split(), names.split(), strict=True))
    }
    text, report, _ = start(2, rank_env=ranks, env=init(per_host_interfaces=True) if allowed else {})
    assert report["ok"] is ok
    assert ok or 'NCCL_SOCKET_IFNAME: "eno1" on rank 0, "eth0" on rank 1' in text


def test_what_single_ranks_were_asked_for_wrongly() -> None:
    """A wrong variable, argument or plan of one rank is told by all, with what is allowed."""
    wrong = [
        ({"BUTTER_MPI_PLANE": "gpu"}, "init: BUTTER_MPI_PLANE must be one of auto, nccl, host; got 'gpu'"),
        ({"BUTTER_MPI_START_DEADLINE": "soon"}, "init: BUTTER_MPI_START_DEADLINE must be a number of seconds"),
        ({"BUTTER_MPI_PLAIN": "1"}, "init: BUTTER_MPI_PLAIN is not a variable of butter_mpi (did you mean BUTTER_"),
        (init(require_transport="IB"), "init: require_transport must be one of P2P, SHM, NET/IB, NET/Socket"),
        (init(plan={"operation": "all_reduce", "count": -1}), "init: plan count must be a number of elements"),
        (init(plan={"operation": "broadcast", "root": 8}), "init: plan root must be a rank, 0 to 7; got 8"),
        (init(fault=[]), "init: fault must be a FaultPolicy; got []"),
    ]
    ranks = {rank: env for rank, (env, _) in enumerate(wrong, 1)}
    text = refused(8, env={"BUTTER_MPI_PLANE": "host"}, rank_env=ranks)
    for rank, (_, words) in enumerate(wrong, 1):
        assert f"rank {rank}: {words}" in text


def test_all_findings_at_once() -> None:
    """Three ranks with faults of different kinds: one report with all of them, each with its remedy."""
    ranks = {
        0: {"NCCL_PROTO": "LL"},
        1: {**init(plan={"operation": "barrier"}), "NCCL_DEBUG": "INFO"},
        2: {"BUTTER_MPI_ACTION": "abort"},
    }
    text = refused(3, rank_env=ranks)
    for words in ("NCCL_PROTO: ", "planned collective: ", "action: ", "NCCL_DEBUG: "):
        assert words in text
    assert text.count("remedy: ") == 4


def test_required_transport_without_nccl() -> None:
    """A required transport cannot be verified on the host plane: it fails closed."""
    assert "transport NET/IB is required, and cannot be verified" in refused(2, env=init(require_transport="NET/IB"))


def test_wrong_mpirun_for_this_mpi() -> None:
    """The launcher of another MPI gives jobs of one rank each: every one refuses, with cause and remedy."""
    text = refused(2, mpi="mpich", library="openmpi")
    assert "PMI_SIZE says 2 ranks, but MPI.COMM_WORLD has 1: this job was started by mpirun of MPICH" in text
    assert "mpi4py runs on Open MPI" in text and "use the mpirun of the MPI library that mpi4py loads" in text


@pytest.mark.parametrize(
    ("env", "ok", "words"),
    [
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, False, "SLURM_STEP_NUM_TASKS says 2 ranks, but MPI"),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"}, True, "this Slurm allocation is for 2 tasks, but this process"),
        ({"SLURM_NTASKS": "2"}, True, "SLURM_NTASKS says 2 tasks, but this process is outside any Slurm step"),
        ({"OMPI_COMM_WORLD_SIZE": "many"}, False, 'OMPI_COMM_WORLD_SIZE must be a whole number, 1 or more; got "many"'),
    ],
)
def test_launcher_that_claims_more_than_mpi_has(env: dict[str, str], ok: bool, words: str) -> None:
    """A step of two tasks that MPI does not see is refused; a task outside any step is warned of."""
    gone = ["PMI_SIZE", "PMI_RANK", "PMI_FD", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
    text, report, _ = start(1, env=env, unset=gone)
    assert report["ok"] is ok and words in text
    assert ("srun --mpi=" in text) is ("SLURM" in words or "Slurm" in words)


def test_policy_that_one_rank_lost_in_c() -> None:
    """The C environment counts: a rank that lost the variable there is named, with value and launcher option."""
    text = refused(2, env=NCCL, rank_env={1: c_variables(NCCL_IB_TIMEOUT=None)})
    assert 'NCCL_IB_TIMEOUT must be "10" in the C environment of every rank; it is unset on rank 1' in text
    assert "mpirun -genv NCCL_IB_TIMEOUT 10" in text and "NCCL_IB_RETRY_CNT must" not in text


def test_policy_on_the_host_plane_is_not_asked_for() -> None:
    """The host plane starts without the policy."""
    assert start(2, env={"BUTTER_MPI_PLANE": "host"})[1]["ok"]


def test_policy_with_a_malformed_value_and_a_fixed_id() -> None:
    """A malformed value says what NCCL takes; a variable that would replace the unique ID is refused."""
    text = refused(2, env={**NCCL, "NCCL_COMM_ID": "127.0.0.1:5"}, rank_env={1: {"NCCL_IB_RETRY_CNT": "one"}})
    assert 'it is "one" (malformed: NCCL takes a whole number from 0 to 7) on rank 1' in text
    assert 'NCCL_COMM_ID is set: "127.0.0.1:5" on ranks 0-1' in text


@pytest.fixture
def files(tmp_path: Path) -> NcclFiles:
    """Altered copies of the real library."""
    return NcclFiles(real_library(), tmp_path)


def test_one_library_is_hashed_once_a_node(files: NcclFiles) -> None:
    """Three ranks with one file agree on its version and digest, and one of them has read it."""
    path = files.copy()
    text, report, result = start(3, env={**NCCL, "NCCL_LIBRARY": str(path), "NCCL_VERSION": "2.15.5-1"})
    said = {f["check"]: f["message"] for f in report["findings"]}
    assert re.fullmatch(r"NCCL 2\.\d+\.\d+", said["library"]) and said["library"] != "NCCL 2.15.5"
    assert said["library file"] == f"libnccl.so.2 sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert [err.strip() for err in result.rank_err] == ["hashed 1", "hashed 0", "hashed 0"], result.text
    assert "2.15" not in text and "libnccl" not in text


def test_two_files_of_one_version(files: NcclFiles) -> None:
    """One byte differs: both paths and both digests are told, although version and size are equal."""
    one, two = files.copy(), files.with_note_changed()
    text = refused(2, env={**NCCL, "NCCL_LIBRARY": str(one)}, rank_env={1: {"NCCL_LIBRARY": str(two)}})
    for rank, path in enumerate((one, two)):
        assert f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()} ({path}) on rank {rank}" in text
    assert "NCCL version" not in text


def test_two_versions(files: NcclFiles) -> None:
    """The integers that the libraries themselves return are compared."""
    env = {**NCCL, "NCCL_LIBRARY": str(files.with_version(22809))}
    assert "NCCL version: 2.28.9 on ranks 0-1, 2.29.7 on rank 2" in refused(
        3, env=env, rank_env={2: {"NCCL_LIBRARY": str(files.with_version(22907))}}
    )


def test_unusable_libraries_of_single_ranks(files: NcclFiles) -> None:
    """A text file, half a file, another machine's and a stub: all ranks tell each error, and no file kills anybody."""
    wrong = [
        (files.text(), "is not usable: not a shared library (it begins with b'<htm'"),
        (files.cut_short(), "is not usable: cut short: "),
        (files.for_other_machine(), "is not usable: for "),
        (files.without_symbol("ncclCommAbort"), "has no ncclCommAbort; "),
    ]
    ranks = {rank: {"NCCL_LIBRARY": str(path)} for rank, (path, _) in enumerate(wrong, 1)}
    text = refused(5, env={**NCCL, "NCCL_LIBRARY": str(files.copy())}, rank_env=ranks)
    for rank, (path, words) in enumerate(wrong, 1):
        assert f"rank {rank}: {path} {words}" in text


def test_digest_that_the_launcher_passed(files: NcclFiles) -> None:
    """The launcher hashed another file than the one that is mapped: refused with both digests."""
    path = files.copy()
    env = {**NCCL, "NCCL_LIBRARY": str(path), "BUTTER_NCCL_LIBRARY_SHA256": "ab" * 32}
    text = refused(2, env=env)
    actual = hashlib.sha256(path.read_bytes()).hexdigest()
    assert f"the launcher resolved a file with sha256 {'ab' * 32}, but the mapped one has {actual} on ranks 0-1" in text


def test_two_libraries_in_one_process(files: NcclFiles) -> None:
    """A rank in which another package loaded a libnccl of its own is refused."""
    one, two = files.copy(), files.with_note_changed()
    load = {"BUTTER_MPI_TEST_LOAD": json.dumps([str(two)])}
    text = refused(2, env={**NCCL, "NCCL_LIBRARY": str(one)}, rank_env={1: load})
    assert f"rank 1: two different libnccl in one process: {one} and {two}" in text


def test_exception_of_one_rank_reaches_all(files: NcclFiles) -> None:
    """Whatever one rank meets while it collects is told by all, and none is left waiting."""
    env = {**NCCL, "NCCL_LIBRARY": str(files.copy())}
    text = refused(2, env=env, rank_env={1: {"BUTTER_MPI_TEST_BROKEN": "1"}})
    assert "rank 1: ZeroDivisionError: division by zero" in text


@pytest.mark.parametrize("plane", ["auto", "nccl"])
def test_nccl_plane_never_becomes_host(files: NcclFiles, plane: str) -> None:
    """Where every rank could use nccl, chosen or by auto, every rank is refused; host must be asked for."""
    env = {**POLICY, "NCCL_LIBRARY": str(files.copy()), "BUTTER_MPI_PLANE": plane}
    result = run_job(2, WITH_DEVICES, env=env, timeout=30)
    assert result.rc == 0, result.text
    for out in result.rank_out:
        assert "start: " in out and "no CUDA driver" in out and "started on" not in out, result.text


@pytest.mark.parametrize(
    "options",
    ["", "thread_level='serialized'", "threads=False", "errors='fatal'", "finalize=False", "initialize=False"],
)
def test_mpi_is_started_as_an_import_of_mpi4py_does(options: str) -> None:
    """What mpi4py.rc asks for holds in the same way: thread level, error handler, start, MPI_Finalize at the exit."""
    program = f"""
import sys, mpi4py
mpi4py.rc({options})
if sys.argv[1] == "import":
    from mpi4py import MPI
else:
    from butter_mpi.mpi_start import load_mpi
    MPI = load_mpi(30)
if MPI.Is_initialized():
    handler = MPI.COMM_WORLD.Get_errhandler()
    print(MPI.Query_thread(), handler == MPI.ERRORS_RETURN, handler == MPI.ERRORS_ARE_FATAL)
print(mpi4py.rc.initialize, mpi4py.rc.finalize)
"""
    # Open MPI's launcher fails a job that ends without MPI_Finalize.
    results = [run_job(1, ["-c", program, how], mpi="openmpi") for how in ("import", "load_mpi")]
    text = "\n".join(result.text for result in results)
    assert results[0].rank_out == results[1].rank_out and results[0].rank_out[0], text
    assert [result.rc == 0 for result in results] == ["finalize=False" not in options] * 2, text


def test_init_without_started_mpi_says_so() -> None:
    """Where mpi4py was told not to start MPI, init does not either, and says what to call."""
    program = """
import mpi4py, butter_mpi
mpi4py.rc.initialize = False
try:
    butter_mpi.init()
except butter_mpi.StartError as error:
    print(error)
from mpi4py import MPI
MPI.Init_thread()
print(butter_mpi.init(plane="host").world_size)
MPI.Finalize()
"""
    result = run_job(1, program)
    assert "call MPI.Init_thread() before init" in result.rank_out[0], result.text
    assert result.rc == 0 and result.rank_out[0].endswith("\n1\n"), result.text


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_refusal_that_nobody_catches_has_one_traceback(mpi: str) -> None:
    """Rank 0 shows it as Python does, each other rank only what, and where in the program."""
    result = run_job(3, 'import butter_mpi\nbutter_mpi.init(plane="gpu")\n', mpi=mpi, timeout=30)
    assert result.rc == 1 and result.text.count("Traceback") == 1, result.text
    (whole,) = re.findall(r"^butter_mpi\.errors\.PreflightError: (.*)", result.rank_err[0], re.MULTILINE)
    for rank in (1, 2):
        first, second = result.rank_err[rank].splitlines()
        assert re.match(rf"butter_mpi: PreflightError: rank {rank}/3 on \S+: ", first) and whole in first, result.text
        assert re.fullmatch(r"  raised at \S+/program\.py:2", second), result.text


def test_refusal_with_several_findings_is_whole_on_each_rank() -> None:
    """Whoever ends the job first, and wherever its stderr goes: nothing is left to another rank."""
    env = {"NCCL_IB_TIMEOUT": "3", "NCCL_IB_RETRY_CNT": "9"}
    program = """
import io, sys
import butter_mpi
sys.stderr = io.StringIO()
try:
    butter_mpi.init(plane="nccl")
except butter_mpi.PreflightError as error:
    sys.excepthook(type(error), error, error.__traceback__)
print(sys.stderr.getvalue())
"""
    result = run_job(2, program, env=env, timeout=30)
    for out in result.rank_out:
        assert "NCCL_IB_TIMEOUT" in out and "NCCL_IB_RETRY_CNT" in out, result.text
    assert "Traceback" in result.rank_out[0] and "Traceback" not in result.rank_out[1], result.text


SHOWN = """
import sys
import butter_mpi
from mpi4py import MPI
from butter_mpi.launch import read_launch
rank = read_launch(__import__("os").environ).claimed_rank
{before}
try:
    try:
        butter_mpi.init()
    except butter_mpi.StartError as error:
        if rank == 2: error.add_note("seen on rank 2")
        if rank == 3: raise RuntimeError("another one") from error
        raise
except Exception as error:
    sys.excepthook(type(error), error, error.__traceback__)
"""


def test_failed_start_that_nobody_catches_keeps_what_only_one_rank_knows() -> None:
    """Each rank's own text is shown whole; what a traceback says beside it, and other errors, as Python does."""
    result = run_job(4, SHOWN.format(before="MPI.Finalize()"), timeout=30)
    assert result.rc == 0, result.text
    plain, short, noted, another = result.rank_err
    said = "init: MPI.Finalize was called"
    assert all("Traceback" in one and said in one for one in (plain, noted, another)), result.text
    assert re.match(rf"butter_mpi: StartError: rank 1: {said}.*\n  raised at \S+/program\.py:10\n$", short), result.text
    assert "seen on rank 2" in noted and "RuntimeError: another one" in another, result.text


def test_wrong_launcher_that_nobody_catches_has_one_traceback() -> None:
    """Where MPI is none, or one for each rank alone, ranks are those that the launcher has started."""
    program = SHOWN.format(before="").replace("from mpi4py import MPI\n", "")
    result = run_job(2, program, mpi="openmpi", library="mpich", timeout=30)
    assert result.rc == 0 and result.text.count("Traceback") == 1 and "Traceback" in result.rank_err[0], result.text
    first, second = result.rank_err[1].splitlines()
    said = r"butter_mpi: StartError: rank 1/2 on \S+: start: this job was started by mpirun of Open MPI, but "
    assert re.match(said, first), result.text
    assert re.fullmatch(r"  raised at \S+/program\.py:9", second), result.text
