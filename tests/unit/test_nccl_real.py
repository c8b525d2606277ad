"""The declarations on a real library: its symbols, its own header, and what it answers without a driver."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile
from helpers.child import run_child
from helpers.libnccl_files import NcclFiles, real_library, symbols
from helpers.nccl_recorder import FACTS
from helpers.require import need

from butter_mpi._libnccl import Library
from butter_mpi._nccl_types import CONSTANTS, FUNCTIONS, STRUCTS, in_release, version_code

WITHOUT_DRIVER = pytest.mark.skipif(
    Path("/proc/driver/nvidia/version").exists(), reason="this machine has a CUDA driver, so NCCL would go on"
)

START = """
import json, sys
from butter_mpi import nccl
from butter_mpi._libnccl import Library
from butter_mpi.errors import NCCLError
library = Library(sys.argv[1])
said = {"version": library.version}
def ask(name, function, *args):
    try:
        said[name] = function(*args)
    except NCCLError as error:
        said[name] = [error.result, error.detail]
"""

ASK = (
    START
    + """
import ctypes
def raw(name, *args):
    return nccl.prepared(library, name, *args)()
ask("nothing is open", nccl.close_leaked_groups, library)
said["version NULL"] = raw("ncclGetVersion", None)
said["texts"] = [library.function("ncclGetErrorString")(code).decode() for code in range(-1, 10)]
ask("id NULL", nccl.call, library, "ncclGetUniqueId", None)
ask("state NULL", nccl.get_async_error, library, 0)
ask("count NULL", nccl.comm_count, library, 0)
ask("all_reduce NULL", nccl.call, library, "ncclAllReduce", 0, 0, 1, 7, 0, 0, None)
ask("built-in operator", nccl.destroy_redop, library, 0, 0)
ask("destroy NULL", nccl.destroy, library, 0)
ask("abort NULL", nccl.abort, library, 0)
ask("finalize NULL", nccl.finalize, library, 0)
nccl.group_start(library)
ask("group", nccl.group_end, library)
ask("no group", nccl.group_end, library)
ask("nothing is open still", nccl.close_leaked_groups, library)
print(json.dumps(said))
"""
)

FAIL = (
    START
    + """
unique_id = nccl.get_unique_id(library)
comm = nccl.Handle()
for _ in range(3):
    ask("start", nccl.init_rank_config, library, comm, 1, unique_id, 0, nccl.make_config(library, blocking=0))
said["comm"] = comm.value
said["leaked"] = nccl.close_leaked_groups(library)
said["leaked afterwards"] = nccl.close_leaked_groups(library)
from butter_mpi._nccl_types import UniqueId
arguments = (comm.out(), 1, UniqueId.from_buffer_copy(unique_id), 0)
said["plain start"] = nccl.prepared(library, "ncclCommInitRank", *arguments)()
said["plain leaked"] = nccl.close_leaked_groups(library)
if library.has("ncclMemAlloc"):
    ask("memory", nccl.mem_alloc, library, 4096)
print(json.dumps(said))
"""
)


@pytest.fixture
def library_file(tmp_path: Path) -> Path:
    """A copy of the real library without device code."""
    return NcclFiles(real_library(), tmp_path).copy()


def test_the_real_library_exports_what_its_release_has(library_file: Path) -> None:
    """Each declared function is exported if and only if the release is not older than its first one."""
    with real_library().open("rb") as file:
        exported = {symbol.name for symbol in symbols(ELFFile(file))}
    version = run_child(START + "print(json.dumps(said))", library_file)["version"]
    expected = {row[3] for row in FACTS["functions"] if version_code(row[1]) <= version}
    assert {row[3] for row in FACTS["functions"]} & exported == expected


def test_answers_to_null_and_to_nothing(library_file: Path) -> None:
    """What is known of a library on any machine: version, texts, refused NULLs, ends of nothing, groups."""
    said = run_child(ASK, library_file)
    version = said.pop("version")
    texts = [text for _, text in FACTS["error_strings"]]
    if version < version_code("2.30.3"):
        texts[9] = "unknown result code"
    stray = [5, "ncclGroupEnd: not in a group call."]
    assert said == {
        "nothing is open": 0,
        "version NULL": 4,
        "texts": texts,
        "id NULL": [4, "GetUniqueId : out argument is NULL"],
        "state NULL": [4, "ncclGetAsyncError : comm argument is NULL"],
        "count NULL": [4, "CommCount : comm argument is NULL"],
        "all_reduce NULL": [4, "AllReduce : comm argument is NULL"],
        "built-in operator": [4, "ncclRedOpDestroy : operator is a NCCL builtin."],
        "destroy NULL": None,
        "abort NULL": None,
        "finalize NULL": 0,
        "group": 0,
        "no group": stray,
        "nothing is open still": 0,
    }


@WITHOUT_DRIVER
def test_a_start_without_a_driver_fails_and_its_leaked_groups_are_closed(library_file: Path) -> None:
    """The ID goes by value into both ways to start; each failed start of the newer way leaves a group open."""
    said = run_child(FAIL, library_file)
    assert said["start"][0] == said["plain start"] == 1
    assert said["comm"] is None
    leaks = 3 if said["version"] >= version_code("2.23.4") else 0
    assert (said["leaked"], said["leaked afterwards"], said["plain leaked"]) == (leaks, 0, 0)
    if "memory" in said:
        assert said["memory"][0] == 1 and "CUDA driver version is insufficient" in said["memory"][1]


# The header that lies beside the library, read by a C compiler.

_STUBS = {
    "cuda_runtime.h": "typedef struct CUstream_st *cudaStream_t;\ntypedef struct CUevent_st *cudaEvent_t;\n",
    "cuda_fp16.h": "",
    "cuda_bf16.h": "",
    "cuda_fp8.h": "",
}
_DEFINES = ("-D__CUDA_BF16_TYPES_EXIST__", "-DCUDART_VERSION=12000", "-DNCCL_OS_LINUX")


def printed(header: Path, folder: Path, lines: list[str]) -> list[Any]:
    """Compile lines that print against a header; return what each printed, as JSON values."""
    compiler = shutil.which("cc")
    need("cc", compiler, "no cc in PATH")
    for name, text in _STUBS.items():
        (folder / name).write_text(text)
    source, program = folder / "print.c", folder / "print"
    body = "\n".join(lines)
    source.write_text(f'#include <stdio.h>\n#include <stddef.h>\n#include "{header}"\nint main(void) {{\n{body}\n}}\n')
    command = [str(compiler), *_DEFINES, f"-I{folder}", "-o", str(program), str(source)]
    subprocess.run(command, check=True, timeout=60)
    out = subprocess.run([str(program)], check=True, timeout=10, capture_output=True, text=True).stdout
    return [json.loads(line) for line in out.splitlines()]


def test_the_librarys_own_header_says_the_same(tmp_path: Path) -> None:
    """Sizes, offsets, constants and prototypes are as a C compiler finds them in the header beside the library."""
    library = real_library()
    header = library.parent.parent / "include" / "nccl.h"
    need("nccl", header.is_file(), f"there is no {header}")
    version = printed(header, tmp_path, ['printf("%d\\n", NCCL_VERSION_CODE);'])[0]

    class Release(Library):
        def __init__(self) -> None:
            self.path, self.version = str(header), version

    release = Release()
    lines: list[str] = []
    expected: list[Any] = []
    for struct in STRUCTS:
        fields = in_release(STRUCTS[struct], version)
        if not fields or struct in ("ncclCommProperties_t", "ncclConfigExtKey", "ncclConfigExtValue"):
            continue
        kind = release.structure(struct)
        lines.append(f'printf("%zu\\n", sizeof({struct}));')
        expected.append(ctypes.sizeof(kind))
        for field in fields:
            lines.append(f'printf("[%zu, %zu]\\n", offsetof({struct}, {field}), sizeof((({struct} *)0)->{field}));')
            expected.append([getattr(kind, field).offset, getattr(kind, field).size])
    for name, row in in_release(CONSTANTS, version).items():
        if isinstance(row.value, int):
            lines.append(f'printf("%lld\\n", (long long)({name}));')
            expected.append(row.value)
    for function in FUNCTIONS.values():
        if version_code(function.since) <= version:
            arguments = ", ".join(f"{row.type} {row.name}" for row in function.arguments) or "void"
            same = f"__builtin_types_compatible_p(__typeof__({function.name}), {function.returns} ({arguments}))"
            lines.append(f'printf("[%d, \\"{function.name}\\"]\\n", {same});')
            expected.append([1, function.name])
    assert printed(header, tmp_path, lines) == expected
