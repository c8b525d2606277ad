"""A C library with NCCL's functions that writes down what it was called with, made from the recorded prototypes.

Each function has the prototype that ``tests/contract/nccl_abi.json`` records, so that a wrong declaration of an
argument shows as another value on the C side. Through pointers it reads what is there (a struct as long as its first
member says) and writes :data:`INTEGER` and :data:`HANDLE`.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from butter_mpi._libnccl import Library
from butter_mpi._nccl_types import version_code
from helpers.require import need

__all__ = ["FACTS", "HANDLE", "INTEGER", "UNIQUE_ID", "Recorder"]

FACTS: dict[str, list[Any]] = json.loads((Path(__file__).parents[1] / "contract" / "nccl_abi.json").read_text())

INTEGER = 42
HANDLE = 0x7E57_0000_89AB_CDEF
UNIQUE_ID = bytes((7 * i) % 256 if i % 3 else 0 for i in range(128))

_SIZED = ("ncclConfig_t", "ncclCollConfig_t", "ncclSimInfo_t", "ncclEncryptionConfig_t")
_ENUMS = {row[0] for row in FACTS["enums"]}
_OPAQUE = ("ncclWaitSignalDesc_t",)
_POINTERS = ("ncclComm_t", "ncclWindow_t", "ncclParamHandle_t", "cudaStream_t", "cudaEvent_t")

_HEAD = f"""
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
typedef struct {{ char internal[128]; }} ncclUniqueId;
{"".join(f"typedef void *{name};" for name in _POINTERS)}
{"".join(f"typedef enum {{ {name}_first = -1, {name}_last = 1 << 30 }} {name};" for name in _ENUMS)}
{"".join(f"typedef struct {{ size_t size; }} {name};" for name in (*_SIZED, *_OPAQUE))}
char record_text[8192];
int record_result;
static size_t used;
static void add(const char *name, const char *format, unsigned long long value) {{
  used += (size_t)sprintf(record_text + used, " %s=", name);
  used += (size_t)sprintf(record_text + used, format, value);
}}
static void add_bytes(const char *name, const void *from, size_t size) {{
  used += (size_t)sprintf(record_text + used, " %s=", name);
  const unsigned char *bytes = from;
  for (size_t i = 0; i < size; i++) used += (size_t)sprintf(record_text + used, "%02x", bytes[i]);
}}
static void begin(const char *name) {{ used = (size_t)sprintf(record_text, "%s", name); }}
const char *ncclGetErrorString(ncclResult_t code) {{
  static char text[64];
  sprintf(text, "text of %d", (int)code);
  return text;
}}
const char *ncclGetLastError(ncclComm_t comm) {{ return comm == NULL ? "the latest\\n  warning" : "of one"; }}
"""

_PLAIN = {"int": "%lld", "unsigned int": "%llu", "size_t": "%llu"}


def _recorded(kind: str, name: str) -> str:
    """Return the C code that writes one argument down."""
    base, pointer = kind.replace("const", "").replace("*", "").strip(), "*" in kind
    if not pointer and (base in _PLAIN or base in _ENUMS):
        return f'add("{name}", "{_PLAIN.get(base, "%lld")}", (unsigned long long){name});'
    if kind == "ncclUniqueId":
        return f'add_bytes("{name}", &{name}, sizeof {name});'
    code = f'add("{name}", "%#llx", (unsigned long long)(uintptr_t){name});'
    if kind in ("int *", "ncclRedOp_t *", "ncclResult_t *"):
        code += f'if ({name}) {{ add("{name}[0]", "%lld", (unsigned long long)*{name}); *{name} = {INTEGER}; }}'
    elif kind in ("void **", "ncclComm_t *", "ncclWindow_t *"):
        code += f'if ({name}) {{ add("{name}[0]", "%#llx", (unsigned long long)(uintptr_t)*{name}); '
        code += f"*{name} = (void *){HANDLE:#x}; }}"
    elif base in _SIZED:
        code += f'if ({name}) add_bytes("*{name}", {name}, {name}->size);'
    elif kind == "ncclUniqueId *":
        values = ", ".join(map(str, UNIQUE_ID))
        code += f"static const unsigned char id[] = {{ {values} }}; if ({name}) memcpy({name}, id, sizeof id);"
    elif kind == "const char *":
        code += f'if ({name}) add_bytes("*{name}", {name}, strlen({name}));'
    return code


def _function(returns: str, name: str, arguments: list[list[str]]) -> str:
    parameters = ", ".join(f"{kind} {argument}" for kind, argument, _ in arguments) or "void"
    body = " ".join(_recorded(kind, argument) for kind, argument, _ in arguments)
    end = "" if returns == "void" else "return (ncclResult_t)record_result;"
    return f'{returns} {name}({parameters}) {{ begin("{name}"); {body} {end} }}\n'


def _source(version: str) -> str:
    """Return a library that has the functions of a release, and says that it is this release."""
    rows = [row for row in FACTS["functions"] if version_code(row[0]) <= version_code(version)]
    own = ("ncclGetErrorString", "ncclGetLastError", "ncclGetVersion")
    functions = [_function(row[2], row[3], row[4:]) for row in rows if row[3] not in own]
    get = "ncclResult_t ncclGetVersion(int *version)"
    tell = f"if (version == NULL) return (ncclResult_t)4; *version = {version_code(version)}; return (ncclResult_t)0;"
    return f"{_HEAD}{get} {{ {tell} }}\n{''.join(functions)}"


class Recorder:
    """The recorder as a release of NCCL, built in a folder."""

    def __init__(self, folder: Path, version: str) -> None:
        compiler = shutil.which("cc")
        need("cc", compiler, "no cc in PATH")
        source, path = folder / f"recorder-{version}.c", folder / f"recorder-{version}.so"
        source.write_text(_source(version))
        command = [str(compiler), "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(path), str(source)]
        subprocess.run(command, check=True, timeout=60)
        self.library = Library(str(path))
        shared = ctypes.CDLL(str(path))
        self._text = (ctypes.c_char * 8192).in_dll(shared, "record_text")
        self._result = ctypes.c_int.in_dll(shared, "record_result")

    def answer(self, result: int) -> None:
        """Let every later call return a result."""
        self._result.value = result

    @property
    def said(self) -> tuple[str, dict[str, str]]:
        """The last call: its name, and what came in each argument."""
        name, *arguments = self._text.value.decode().split()
        return name, dict(part.split("=") for part in arguments)
