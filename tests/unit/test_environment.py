"""The NCCL variables of a process as NCCL reads them."""

from __future__ import annotations

import ctypes
import os
import pwd
import re
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from helpers.child import run_child
from helpers.libnccl_files import NcclFiles, real_library

from butter_mpi.environment import (
    Nature,
    c_environment,
    effective_nccl,
    kept_value,
    known_names,
    nature,
    nccl_config_files,
    set_c,
)

FILE = (
    b"""# a comment
NCCL_PROTO=LL
 NCCL_BLANK_BEFORE=1
NCCL_BLANK_AFTER=2 # no comment
NCCL_NO_VALUE
NCCL_EMPTY=
=nameless
NCCL_EQUALS=a=b
NCCL_DOS=crlf\r
NCCL_PROTO=second
NOT_NCCL=1
NCCL_LONG="""
    + b"x" * 2000
)

READ_BY_NCCL = """
import ctypes, json, sys
from butter_mpi.environment import c_environment, effective_nccl
before = c_environment()
said = effective_nccl(before)
ctypes.CDLL(sys.argv[1]).ncclGetUniqueId((ctypes.c_ubyte * 128)())
after = c_environment()
print(json.dumps([{n: v for n, (v, _) in said.items()}, {n: v for n, v in after.items() if n.startswith("NCCL_")}]))
"""


def test_c_environment_is_what_getenv_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that C code sets is seen although ``os.environ`` does not know it."""
    libc = ctypes.CDLL(None)
    monkeypatch.delenv("NCCL_FROM_C", raising=False)
    libc.setenv(b"NCCL_FROM_C", b"1", 1)
    try:
        assert "NCCL_FROM_C" not in os.environ
        assert c_environment()["NCCL_FROM_C"] == "1"
    finally:
        libc.unsetenv(b"NCCL_FROM_C")
    assert "NCCL_FROM_C" not in c_environment()


def test_c_environment_survives_clearenv() -> None:
    """An environment that C code has cleared is empty, not a crash."""
    code = "import ctypes, json; from butter_mpi.environment import c_environment as c; ctypes.CDLL(None).clearenv()"
    assert run_child(f"{code}; print(json.dumps(c()))") == {}


def test_first_of_two_equal_names_counts() -> None:
    """An environment can hold a name twice; ``getenv`` gives the first, and so do we."""
    code = """
import ctypes, json
from butter_mpi.environment import c_environment
entries = (ctypes.c_char_p * 3)(b"NCCL_PROTO=first", b"NCCL_PROTO=second", None)
ctypes.c_void_p.in_dll(ctypes.CDLL(None), "environ").value = ctypes.addressof(entries)
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
print(json.dumps([c_environment()["NCCL_PROTO"], getenv(b"NCCL_PROTO").decode()]))
"""
    assert run_child(code) == ["first", "first"]


def test_set_c_reaches_both_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set here is seen by Python and by C."""
    monkeypatch.setenv("NCCL_TO_C", "0")
    set_c("NCCL_TO_C", "1")
    assert os.environ["NCCL_TO_C"] == c_environment()["NCCL_TO_C"] == "1"


def test_configuration_file_is_read_as_nccl_reads_it(tmp_path: Path) -> None:
    """No blank is stripped, the first of a name wins, a line without a value says nothing."""
    path = tmp_path / "nccl.conf"
    path.write_bytes(FILE)
    ((named, found), _) = nccl_config_files({"NCCL_CONF_FILE": str(path)})
    assert named == str(path)
    assert found == {
        "NCCL_PROTO": "LL",
        " NCCL_BLANK_BEFORE": "1",
        "NCCL_BLANK_AFTER": "2 # no comment",
        "NCCL_EMPTY": "",
        "NCCL_EQUALS": "a=b",
        "NCCL_DOS": "crlf",
        "NOT_NCCL": "1",
        "NCCL_LONG": "x" * 1023,
    }


def test_real_nccl_reads_the_file_the_same_way(tmp_path: Path) -> None:
    """After its first call the real library has put into the environment exactly what was foretold."""
    path = tmp_path / "nccl.conf"
    path.write_bytes(FILE)
    library = NcclFiles(real_library(), tmp_path).copy()
    env = {"NCCL_CONF_FILE": str(path), "NCCL_EQUALS": "from the environment"}
    foretold, read = run_child(READ_BY_NCCL, library, env=env)
    assert foretold == read
    assert read["NCCL_EQUALS"] == "from the environment" and read["NCCL_PROTO"] == "LL"


def test_environment_wins_over_files_and_the_first_file_over_the_second(tmp_path: Path) -> None:
    """Each variable has the value that NCCL will use, and says where it comes from."""
    mine, system = tmp_path / "mine", tmp_path / "system"
    mine.write_text("NCCL_A=mine\nNCCL_B=mine\nPATH=x\n")
    system.write_text("NCCL_A=system\nNCCL_B=system\nNCCL_C=system\n")
    env = {"NCCL_CONF_FILE": str(mine), "NCCL_A": "env", "HOME": "/nowhere", "BUTTER_NCCL_LIBRARY_SHA256": "ab"}
    assert effective_nccl(env, str(system)) == {
        "NCCL_CONF_FILE": (str(mine), "environment"),
        "NCCL_A": ("env", "environment"),
        "NCCL_B": ("mine", str(mine)),
        "NCCL_C": ("system", str(system)),
        "BUTTER_NCCL_LIBRARY_SHA256": ("ab", "environment"),
    }


def test_unreadable_file_sets_nothing(tmp_path: Path) -> None:
    """A missing file or a folder is as silent as in NCCL."""
    for path in (tmp_path, tmp_path / "missing"):
        assert effective_nccl({"NCCL_CONF_FILE": str(path)}, str(path)) == {
            "NCCL_CONF_FILE": (str(path), "environment")
        }


def test_null_device_is_an_empty_file() -> None:
    """The usual way to say that there is no file."""
    assert effective_nccl({"NCCL_CONF_FILE": os.devnull}, os.devnull) == {"NCCL_CONF_FILE": (os.devnull, "environment")}


def test_what_could_be_read_for_ever_is_refused(tmp_path: Path) -> None:
    """A pipe, an endless device and a huge file are faults, named at once and read by nobody; /proc is read."""
    pipe, huge = tmp_path / "pipe", tmp_path / "huge"
    os.mkfifo(pipe)
    with huge.open("wb") as file:
        file.truncate(1 << 40)
    for path, reason in ((pipe, "is no regular file"), (Path("/dev/zero"), "is no regular file"), (huge, "more than")):
        for env, system in (({"NCCL_CONF_FILE": str(path)}, os.devnull), ({"NCCL_CONF_FILE": os.devnull}, str(path))):
            with pytest.raises(ValueError, match=reason) as caught:
                effective_nccl(env, system)
            assert str(path) in str(caught.value)
    assert effective_nccl({"NCCL_CONF_FILE": "/proc/self/status"}, os.devnull).keys() == {"NCCL_CONF_FILE"}


def test_without_a_named_file_the_home_folder_counts() -> None:
    """The file in the home folder of the user database is read, whatever ``HOME`` says."""
    paths = [path for path, _ in nccl_config_files({"HOME": "/elsewhere"})]
    assert paths == [f"{pwd.getpwuid(os.getuid()).pw_dir}/.nccl.conf", "/etc/nccl.conf"]


@pytest.mark.parametrize(
    ("name", "share_gpu", "expected"),
    [
        ("NCCL_PROTO", False, Nature.ALIKE),
        ("NCCL_NEVER_HEARD_OF", False, Nature.ALIKE),
        ("BUTTER_NCCL_LIBRARY_SHA256", False, Nature.ALIKE),
        ("NCCL_DEBUG", False, Nature.WARN),
        ("NCCL_LIBRARY", False, Nature.WARN),
        ("NCCL_DEBUG_FILE", False, Nature.FREE),
        ("NCCL_VERSION", False, Nature.FREE),
        ("NCCL_SOCKET_IFNAME", False, Nature.INTERFACE),
        ("NCCL_IB_HCA", True, Nature.INTERFACE),
        ("NCCL_HOSTID", False, Nature.INTERFACE),
        ("NCCL_HOSTID", True, Nature.FREE),
    ],
)
def test_every_variable_has_a_nature(name: str, share_gpu: bool, expected: Nature) -> None:
    """What may differ is listed; everything else must be alike, unknown names too."""
    assert nature(name, share_gpu) is expected


@pytest.mark.parametrize("name", ["NCCL_FOO_TOKEN", "NCCL_MY_SITE", "NCCL_IB_PKEY", "NCCL_ENCRYPTION_PSK"])
def test_value_of_an_unknown_or_secret_name_is_never_kept(name: str) -> None:
    """Only a stand-in of it leaves the process, by which equality is still seen."""
    kept = kept_value(name, "s3cret-value")
    assert "s3cret" not in kept and kept == kept_value(name, "s3cret-value") != kept_value(name, "other")


def test_value_of_a_known_name_is_kept() -> None:
    """NCCL's own settings are shown as they are."""
    assert kept_value("NCCL_PROTO", "LL") == "LL"


def test_known_names_are_those_of_the_real_library() -> None:
    """Nearly every name in the table is one that the library reads; the others are of older ones, or ours."""
    with real_library().open("rb") as file:
        section = ELFFile(file).get_section_by_name(".rodata")
        assert section is not None
        read = {name.decode() for name in re.findall(rb"NCCL_[A-Z0-9_]+(?=\0)", section.data())}
    others = known_names() - read
    assert "BUTTER_NCCL_LIBRARY_SHA256" in others
    assert len(others) < len(known_names()) / 10, sorted(others)
