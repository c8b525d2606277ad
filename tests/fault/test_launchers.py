"""The launchers: what they make, what they survive, and the one line they say when they cannot go on."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.mpirun import find_mpi, run_job
from helpers.processes import FOLDER_PREFIX
from helpers.require import need
from helpers.script import NOBODY, Script, ScriptResult, run_script
from helpers.standin import build

ROOT = Path(__file__).resolve().parents[2]
SELFTEST = ROOT / "launch" / "selftest"
OFFLINE = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
DEVICE_FILES = list(Path("/dev").glob("nvidia[0-9]*"))


def ordinary_user() -> tuple[str | Path, ...]:
    """Return what comes before a command to run it without the rights of root."""
    if os.geteuid() != 0:
        return ()
    known = any(entry.pw_name == "nobody" for entry in pwd.getpwall())
    need("user", known and shutil.which("setpriv"), "no user nobody, or no setpriv")
    return NOBODY


@pytest.fixture
def checkout() -> Iterator[Path]:
    """A copy of the sources, without environments, under a path with spaces that every user can read."""
    place = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir="/tmp"))
    place.chmod(0o755)
    copy = place / "a checkout"
    copy.mkdir()
    for name in ("LICENSE", "README.md", "pyproject.toml", "butter_mpi", "launch"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, copy / name)
    yield copy
    copy.chmod(0o755)
    shutil.rmtree(place)


def stub(folder: Path, name: str, text: str) -> Path:
    """Make a program of our own and return it."""
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def one_line(result: ScriptResult) -> str:
    """Return the only line that a refusal may say; it has no traceback and a status other than 0."""
    assert result.rc not in (0, 124), result.text
    lines = result.err.splitlines()
    assert (len(lines), result.out) == (1, ""), result.text
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mpi", "lam"], "launch: --mpi takes mpich, openmpi or system; got 'lam'"),
        (["--mpi"], "launch: --mpi needs a value"),
        (["-np", "0"], "launch: -np takes a number from 1 to 9999; got '0'"),
        (["-np", "two"], "launch: -np takes a number from 1 to 9999; got 'two'"),
    ],
)
def test_wrong_option_is_refused_in_one_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    """A wrong option of the launcher names what is allowed, before anything is made."""
    assert one_line(run_script([SELFTEST, *arguments], cwd=tmp_path)) == said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name the folder for what is found: ./launch/gpus FOLDER"),
        (["a", "b"], "one folder; got 'a' and 'b'"),
        (["a", "-n"], "no option '-n'; --help lists them"),
        (["a", "--ranks=two"], "--ranks takes numbers with commas between them; got 'two'"),
        (["a", "--ranks", "1"], "--ranks needs 2 or more"),
        (["a", "--nothing", "3"], "butter_mpi.sweep: unrecognized arguments: --nothing 3 (--help lists the options)"),
        (["a", "--to=2"], "butter_mpi.sweep: argument --to: a size is a number of bytes, 4 or more"),
        (["a"], "the GPUs cannot be counted: no CUDA driver"),
        (["a", "--ranks", "2"], "NCCL_LIBRARY names no file: /none/libnccl.so.2"),
    ],
)
def test_measuring_gpus_is_refused_in_one_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    """What would end a job later ends launch/gpus before the first one, with a reason; no folder is left."""
    mpi = find_mpi("openmpi")
    path = f"{Path(mpi.mpirun).parent}:/usr/bin:/bin"
    env = {"PATH": path, "LD_LIBRARY_PATH": str(tmp_path), "NCCL_LIBRARY": "/none/libnccl.so.2"}
    # A library that is none: also where there is a driver.
    (tmp_path / "libcuda.so.1").write_text("")
    line = one_line(run_script([ROOT / "launch" / "gpus", *arguments], env=env, cwd=tmp_path))
    assert line.startswith(f"launch: {said}") and [*tmp_path.iterdir()] == [tmp_path / "libcuda.so.1"], line


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pytest_mpi", r"\S+/python lacks pytest_mpi \(not whole\): python -m pip install '\S+\[test\]'"),
        ("cupy", r"CuPy, .*, does not work here \(ImportError: not whole\): python -m pip install 'cupy-cuda13x.*"),
    ],
)
def test_measuring_gpus_needs_what_its_last_job_imports(name: str, said: str, tmp_path: Path) -> None:
    """A package that is not there, or does not work, ends launch/gpus before its first job, with what brings it."""
    mpi = find_mpi("openmpi")
    (tmp_path / f"{name}.py").write_text("raise ImportError('not whole')\n")
    env = {"PATH": f"{Path(mpi.mpirun).parent}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path)}
    env["NCCL_LIBRARY"] = str(build().nccl)
    line = one_line(run_script([ROOT / "launch" / "gpus", "found", "--ranks", "2"], env=env, cwd=tmp_path))
    assert re.fullmatch(f"launch: {said}", line) and not (tmp_path / "found").exists(), line


@pytest.mark.parametrize(
    ("program", "said"), [(None, "no mpirun in PATH"), ("echo 'HYDRA build details:'", "is not Open MPI's")]
)
def test_measuring_gpus_needs_the_mpirun_of_open_mpi(program: str | None, said: str, tmp_path: Path) -> None:
    """Another one would end each job at its options."""
    for name in ("bash", "dirname", "grep", "readlink", "timeout"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    stub(tmp_path, "python", "exit 1")
    if program:
        stub(tmp_path, "mpirun", program)
    command: list[str | Path] = [str(shutil.which("bash")), ROOT / "launch" / "gpus", "found"]
    line = one_line(run_script(command, env={"PATH": str(tmp_path)}, cwd=tmp_path))
    assert line.startswith("launch: ") and line.endswith(said), line


def test_help_says_what_it_starts(tmp_path: Path) -> None:
    """--help shows the head of the script and starts nothing."""
    result = run_script([SELFTEST, "--help"], cwd=tmp_path)
    assert result.rc == 0
    assert "--mpi openmpi -np 4" in result.out
    assert "set -euo" not in result.out


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (
            "3.10.4 False True /old/python3",
            "needs Python 3.11 or newer, found 3.10.4: .*install python3.11 python3.11-venv",
        ),
        (
            "3.12.1 True False /bare/python3",
            r"Python 3.12.1 \(/bare/python3\) cannot make environments: .*install python3.12-venv",
        ),
    ],
)
def test_unfit_python_is_named_with_the_command_that_helps(
    facts: str, said: str, checkout: Path, tmp_path: Path
) -> None:
    """A Python that is too old or cannot make environments is refused in one line with an install command."""
    python = stub(tmp_path / "bin", "python3", f"echo {facts}")
    env = {"PYTHON": str(python), "PATH": "/usr/bin:/bin"}
    line = one_line(run_script([checkout / "launch" / "selftest"], env=env, cwd=tmp_path))
    assert re.search(said, line), line


def test_uv_stands_in_for_a_missing_venv_module(checkout: Path, tmp_path: Path) -> None:
    """Where Python cannot make environments and uv is there, uv is used; its failure is passed on in one line."""
    python = stub(tmp_path / "bin", "python3", "echo 3.12.1 True False /bare/python3")
    stub(tmp_path / "bin", "uv", 'echo "no room for $*"; exit 1')
    env = {"PYTHON": str(python), "PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    result = run_script([checkout / "launch" / "selftest"], env=env, cwd=tmp_path)
    assert result.rc == 2, result.text
    assert "uv failed: no room for venv -q --seed --python /bare/python3" in result.err.splitlines()[-1]


def test_first_start_without_network_says_so(checkout: Path, tmp_path: Path) -> None:
    """Without a package index the first start ends with one clear line, and leaves nothing that counts as made."""
    result = run_script([checkout / "launch" / "selftest"], env=OFFLINE, cwd=tmp_path)
    assert result.rc == 2, result.text
    making, reason = result.err.splitlines()
    assert "making" in making
    assert "no package index answers" in reason
    assert not (checkout / ".venv" / "mpich" / "stamp").exists()


def test_no_place_to_write_is_said(checkout: Path) -> None:
    """Where neither the checkout nor the cache can be written, one line says what to set."""
    user = ordinary_user()
    checkout.chmod(0o555)
    env = {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": None}
    result = run_script([*user, checkout / "launch" / "selftest"], env=env, cwd=checkout)
    assert "set XDG_CACHE_HOME to a folder that you can write" in one_line(result)


def _package_index(folder: Path) -> bool:
    command: list[str | Path] = [
        find_mpi("mpich").python,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "-d",
        folder,
        "hatchling",
    ]
    return run_script(command, cwd=folder).rc == 0


def test_first_start_survives_a_cut_and_a_double_start(checkout: Path, tmp_path: Path) -> None:
    """An ordinary user's first start that was killed is made good by the next two at once; later ones need no network.

    The checkout cannot be written, its path has spaces, and the shell of the later start has another Python's variables
    and a working folder with modules of the same names.
    """
    need("network", _package_index(tmp_path), "pip can download nothing")
    user, home = ordinary_user(), checkout.parent / "home"
    home.mkdir()
    if user:
        shutil.chown(home, "nobody")
    checkout.chmod(0o555)
    command = [*user, checkout / "launch" / "selftest"]
    env = {"HOME": str(home), "XDG_CACHE_HOME": None, "TMPDIR": str(home), "PYTHON": "/usr/bin/python3"}

    cut = Script(command, env=env, cwd=home)
    _await_package(home)
    cut.kill()

    both = [Script([*command, "--list"], env=env, cwd=home) for _ in range(2)]
    ended = [script.wait(120) for script in both]
    assert [result.rc for result in ended] == [0, 0], "\n".join(result.text for result in ended)
    assert sum("launch: making" in result.err for result in ended) == 1
    assert sum("another start is making" in result.err for result in ended) == 1
    assert not (checkout / ".venv").exists()

    for name in ("numpy", "mpi4py", "json"):
        (home / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    hostile = {"PYTHONPATH": str(home), "PYTHONHOME": "/nowhere", "VIRTUAL_ENV": "/nowhere", "PIP_NO_INDEX": "1"}
    later = run_script(command, env={**env, **hostile, "PYTHON": None}, cwd=home)
    assert later.rc == 0, later.text
    assert "making" not in later.err


# A Python that makes an environment of itself; its pip leaves a temporary file and does not come to an end.
LEAVING = """
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip") touch "$TMPDIR/pip-unpack-1" "$HOME/started" && exec sleep 60 ;;
  *) echo "3.11.2 True True $0" ;;
esac"""


def test_interrupted_start_leaves_no_temporary_files(checkout: Path, tmp_path: Path) -> None:
    """Ctrl-C while pip installs leaves nothing of it, neither in TMPDIR nor beside the environment."""
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    temporary.mkdir()
    env = {"HOME": str(home), "TMPDIR": str(temporary), "PYTHON": str(stub(tmp_path / "bin", "python", LEAVING))}
    script = Script([checkout / "launch" / "selftest"], env=env, cwd=home)
    script.await_file(home / "started", 30)
    script.interrupt()
    assert script.wait(20).rc != 0
    assert [*temporary.iterdir()] == []
    assert {path.name for path in (checkout / ".venv").iterdir()} == {"mpich", "mpich.lock", "mpich.log"}


def _await_package(home: Path) -> None:
    """Wait until pip has begun to unpack into the new environment."""
    end = time.monotonic() + 60
    while not list(home.glob(".cache/butter_mpi/*/mpich/lib/python3*/site-packages/numpy")):
        assert time.monotonic() < end, "pip unpacks nothing"
        time.sleep(0.01)  # the folders to watch do not exist yet


@pytest.mark.parametrize(
    ("gpus", "visible", "count"),
    [(0, None, len(DEVICE_FILES)), (2, None, 2), (2, "0", 1), (2, "", 0), (2, "-1", 0), (1, "0,1,2", 1)],
)
def test_devices_are_counted_as_a_program_would_see_them(
    gpus: int, visible: str | None, count: int, tmp_path: Path
) -> None:
    """The count is the driver's, narrowed by CUDA_VISIBLE_DEVICES."""
    lines = "\n".join(f"echo 'GPU {number}: Some GPU (UUID: GPU-{number})'" for number in range(gpus))
    stub(tmp_path / "bin", "nvidia-smi", lines or "echo 'NVIDIA-SMI has failed'; exit 9")
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": visible}
    result = run_script(["bash", "-c", '. "$0"; count_devices', ROOT / "launch" / "lib.sh"], env=env, cwd=tmp_path)
    assert result.out.strip() == str(count), result.text


@pytest.mark.parametrize(
    ("gpus", "ranks", "env", "arguments", "chosen"),
    [
        (0, 2, {}, "--faults", "--plane host"),
        (1, 2, {}, "--faults", "--plane host"),
        (2, 2, {}, "--faults", ""),
        (4, 2, {}, "", ""),
        (1, 1, {}, "", ""),
        (0, 2, {}, "--plane nccl", ""),
        (0, 2, {}, "--plane=auto", ""),
        (1, 2, {}, "--share-gpu", ""),
        (1, 2, {"BUTTER_MPI_SHARE_GPU": "1"}, "", ""),
        (1, 2, {"BUTTER_MPI_SHARE_GPU": "0"}, "", "--plane host"),
        (0, 2, {"BUTTER_MPI_PLANE": "auto"}, "", ""),
    ],
)
def test_fewer_gpus_than_ranks_take_the_host_plane(
    gpus: int, ranks: int, env: dict[str, str], arguments: str, chosen: str, tmp_path: Path
) -> None:
    """The plane is left to auto where every rank has a GPU, and where an option or a variable has chosen."""
    stub(tmp_path / "bin", "nvidia-smi", "\n".join(["echo 'GPU 0: Some GPU'"] * gpus) or "exit 9")
    given = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": None if gpus else ""}
    command: list[str | Path] = [
        "bash",
        "-c",
        'set -eu; . "$0"; plane_options "$@"',
        ROOT / "launch" / "lib.sh",
        str(ranks),
    ]
    result = run_script([*command, *arguments.split()], env={**given, **env}, cwd=tmp_path)
    assert (result.rc, result.out.strip()) == (0, chosen), result.text
    sharing = "to let ranks share a GPU: ./launch/selftest -np 2"
    assert (sharing in result.err) == (chosen != "" and gpus > 0), result.text
    assert (f"GPUs: {gpus}, ranks: {ranks}: taking the host plane" in result.err) == (chosen != ""), result.text


@pytest.mark.parametrize(
    ("gpus", "library", "arguments", "needed"),
    [(1, False, "", True), (1, True, "", False), (0, False, "", False), (1, False, "--plane host", False)],
)
def test_nccl_is_added_where_its_plane_may_be_taken(
    gpus: int, library: bool, arguments: str, needed: bool, tmp_path: Path
) -> None:
    """NCCL is wanted from the package index on GPUs only, unless the host plane was chosen or a library is found."""
    (tmp_path / "environment").mkdir()
    stub(tmp_path / "bin", "nvidia-smi", "echo 'GPU 0: Some GPU'" if gpus else "exit 9")
    stub(tmp_path / "environment" / "bin", "python", "exit 0" if library else "exit 1")
    script = 'set -eu; . "$0"; ENV_DIR=$1; shift; if needs_nccl "$@"; then echo yes; else echo no; fi'
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": None if gpus else ""}
    command: list[str | Path] = [
        "bash",
        "-c",
        script,
        ROOT / "launch" / "lib.sh",
        tmp_path / "environment",
        *arguments.split(),
    ]
    result = run_script(command, env=env, cwd=tmp_path)
    assert result.out.strip() == ("yes" if needed else "no"), result.text


@pytest.mark.parametrize(("driver", "extra"), [("570.12.01", "cu12"), ("580.65.06", "cu13"), ("610.3", "cu13")])
def test_extra_fits_the_driver(driver: str, extra: str, tmp_path: Path) -> None:
    """The NCCL that is added is for the CUDA that the driver runs."""
    stub(tmp_path / "bin", "nvidia-smi", f"echo {driver}")
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    result = run_script(
        ["bash", "-c", 'set -eu; . "$0"; nccl_extra', ROOT / "launch" / "lib.sh"], env=env, cwd=tmp_path
    )
    assert result.out.strip() == extra, result.text


@pytest.mark.parametrize(
    ("mpi", "line", "options"),
    [
        (
            "mpich",
            "localhost:2",
            "-f hosts -genv NCCL_IB_TIMEOUT 10 -genv NCCL_IB_RETRY_CNT 1 -genv NCCL_IB_HCA mlx5_0",
        ),
        (
            "openmpi",
            "localhost slots=2",
            "--hostfile hosts -x NCCL_IB_TIMEOUT=10 -x NCCL_IB_RETRY_CNT=1 -x NCCL_IB_HCA=mlx5_0",
        ),
    ],
    ids=["mpich", "openmpi"],
)
def test_host_file_launcher_forwards_variables(mpi: str, line: str, options: str, tmp_path: Path) -> None:
    """mpirun_hosts.sh forwards what a rank elsewhere must have, by the options of the mpirun that is active."""
    found = find_mpi(mpi)
    (tmp_path / "hosts").write_text(line)
    stub(tmp_path / "bin", "mpirun", f'echo "with $*"; exec "{found.mpirun}" "$@"')
    stub(tmp_path / "bin", "python", f'exec "{found.python}" "$@"')
    env = {**found.env, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    command: list[str | Path] = [ROOT / "launch" / "mpirun_hosts.sh", "hosts", "2", "--plane", "host"]
    result = run_script(command, env={**env, "NCCL_IB_HCA": "mlx5_0"}, cwd=tmp_path)
    assert result.rc == 0, result.text
    assert f"with {options} -np 2 {tmp_path}/bin/python -m butter_mpi.selftest --plane host" in result.out


def test_host_file_launcher_names_a_missing_file(tmp_path: Path) -> None:
    """A host file that cannot be read is named in one line."""
    assert "cannot read the host file 'none'" in one_line(
        run_script([ROOT / "launch" / "mpirun_hosts.sh", "none", "2"], cwd=tmp_path)
    )


CANNOT_JOIN = "this job was started by mpirun of Open MPI, but mpi4py runs on MPICH"


@pytest.mark.parametrize("launcher", ["openmpi", "debian-openmpi"])
def test_mpich_under_open_mpi_is_told_before_it_aborts(launcher: str) -> None:
    """A rank says in one line who it is, what does not fit and what to do, where MPICH would end it in MPI_Init."""
    result = run_job(2, ["-m", "butter_mpi.selftest", "--plane", "host"], mpi=launcher, library="mpich")
    assert result.rc != 0, result.text
    said = {rank: err for rank, err in enumerate(result.rank_err) if err}
    assert said, result.text
    for rank, err in said.items():
        assert err.startswith(f"butter_mpi.selftest: rank {rank}/2 on "), result.text
        assert CANNOT_JOIN in err and "use the mpirun of the MPI library that mpi4py loads" in err, result.text
        assert err.count("\n") == 1, result.text


def test_mpich_under_open_mpi_is_an_error_of_init_each_time() -> None:
    """A program that catches the error and starts again gets the same one, and may go on without MPI."""
    program = """
import butter_mpi
for _ in range(2):
    try:
        butter_mpi.init()
    except butter_mpi.StartError as error:
        print(error.phase, error)
"""
    result = run_job(2, program, mpi="openmpi", library="mpich")
    assert result.rc == 0, result.text
    for rank, out in enumerate(result.rank_out):
        first, again = out.splitlines()
        assert first == again and first.startswith(f"MPI rank {rank}/2 on ") and CANNOT_JOIN in first, result.text
