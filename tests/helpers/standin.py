"""The stand-ins for the CUDA driver and NCCL under tests/standin: build them, and say how a process runs on them.

A build is kept under build/standin, which git ignores, by the content of its sources, so that it is made once. It needs
a C compiler: the system's ``cc``, the one that ``CC`` names, or the one in the package ``ziglang``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from helpers.require import need

__all__ = ["FLAGS", "SOURCES", "Ended", "Kind", "Standin", "build"]

Kind = Literal["plain", "tsan"]

SOURCES = Path(__file__).resolve().parents[1] / "standin"
FLAGS = ("-std=gnu11", "-O2", "-g", "-fwrapv", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")

_ROOT = SOURCES.parents[1]
_KERNELS = _ROOT / "butter_mpi" / "kernels"
_CACHE = _ROOT / "build" / "standin"
_LIBRARIES = {"libcuda.so.1": "cuda", "libnccl.so.2": "nccl"}
_WATCHED = ("cuda/kernels.c", "nccl/arithmetic.c")
"""The files whose reads and writes ThreadSanitizer sees: all that touches device memory."""


def _compiler() -> list[str]:
    named = shlex.split(os.environ.get("CC", "")) or ["cc"]
    if shutil.which(named[0]):
        return named
    zig = importlib.util.find_spec("ziglang") is not None
    need("cc", zig, "no cc on the PATH, CC names none, and the package ziglang is not installed")
    return [sys.executable, "-m", "ziglang", "cc"]


def _run(command: Sequence[str | Path]) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


def _sanitizer(compiler: Sequence[str]) -> Path:
    """Return the library of ThreadSanitizer; skip where there is none, or where it cannot run."""
    found = Path(_run([*compiler, "-print-file-name=libtsan.so"]).strip()) if "ziglang" not in compiler else Path()
    need("tsan", found.is_absolute(), "the compiler has no libtsan.so")
    library = found.resolve()
    probe = subprocess.run(["true"], env={**os.environ, "LD_PRELOAD": str(library)}, capture_output=True, check=False)
    said = probe.stderr.decode(errors="replace").strip()
    need("tsan", probe.returncode == 0, f"{library} does not run: {said}; sysctl vm.mmap_rnd_bits=28 may help")
    return library


@dataclass(frozen=True)
class Standin:
    """One build.

    Parameters
    ----------
    folder : path
        Where both libraries are.
    sanitizer : path, optional
        ThreadSanitizer's library, which a process must load first.
    """

    folder: Path
    sanitizer: Path | None = None

    @property
    def cuda(self) -> Path:
        """The driver."""
        return self.folder / "libcuda.so.1"

    @property
    def nccl(self) -> Path:
        """NCCL."""
        return self.folder / "libnccl.so.2"

    def env(
        self,
        *,
        devices: int = 4,
        faults: str = "",
        transport: str | None = None,
        version: int | None = None,
        **more: str,
    ) -> dict[str, str]:
        """Return the variables of a rank.

        Parameters
        ----------
        devices : int
            How many GPUs the machine has.
        faults : str
            What shall go wrong; the grammar is in tests/standin/README.md.
        transport : {"P2P", "SHM", "NET/Socket", "NET/IB"}, optional
            What every connection uses; if not given, P2P within a host and NET between hosts.
        version : int, optional
            What ``ncclGetVersion`` returns.
        **more : str
            More variables.

        Returns
        -------
        dict of str to str
            For ``env`` or ``rank_env`` of a job. Those of a ThreadSanitizer build belong into ``rank_env``: the
            launcher should not load it.
        """
        paths = filter(None, [str(self.folder), os.environ.get("LD_LIBRARY_PATH")])
        own = {"LD_LIBRARY_PATH": os.pathsep.join(paths), "NCCL_LIBRARY": str(self.nccl)}
        own["STANDIN_DEVICES"] = str(devices)
        if faults:
            own["STANDIN_FAULTS"] = faults
        if transport:
            own["STANDIN_TRANSPORT"] = transport
        if version:
            own["STANDIN_NCCL_VERSION"] = str(version)
        if self.sanitizer:
            own["LD_PRELOAD"] = str(self.sanitizer)
            own["TSAN_OPTIONS"] = f"exitcode=66 report_signal_unsafe=0 suppressions={SOURCES / 'tsan.supp'}"
        return {**own, **more}

    def start(self, code: str, *arguments: object, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a Python program on the stand-ins; ``env`` is added to what :meth:`env` gives."""
        foreign = ("NCCL_", "CUDA_", "STANDIN_")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        path = os.pathsep.join(filter(None, [str(SOURCES.parent), os.environ.get("PYTHONPATH")]))
        return subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            env={**clean, "PYTHONPATH": path, **self.env(), **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, *arguments: object, env: Mapping[str, str] | None = None, timeout: float = 60.0) -> Any:
        """Run such a program to its end; return the JSON value that it prints last."""
        ended = _end(self.start(code, *arguments, env=env), timeout)
        assert ended.rc == 0, ended.text
        return ended.value

    def run_ranks(
        self,
        n: int,
        code: str,
        *,
        env: Mapping[str, str] | None = None,
        rank_env: Mapping[int, Mapping[str, str]] | None = None,
        timeout: float = 60.0,
    ) -> list[Ended]:
        """Run ``n`` processes with ``sys.argv[1:] = rank, n``; the first line of rank 0 goes to the others' stdin."""
        given = rank_env or {}
        ranks = [
            self.start(code, rank, n, env={**(env or {}), "STANDIN_RANK": str(rank), **given.get(rank, {})})
            for rank in range(n)
        ]
        first = _first_line(ranks[0])
        for process in ranks[1:]:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(first)
                process.stdin.flush()
        return [_end(process, timeout) for process in ranks]


def _first_line(process: subprocess.Popen[str]) -> str:
    """Read one line and no byte more: what a buffer held, ``communicate`` would not find."""
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(process.stdout.fileno(), 1)):
        line += byte
    return line.decode()


@dataclass(frozen=True)
class Ended:
    """How a process ended: its status (-9 for one that was cut) and what it wrote."""

    rc: int
    out: str
    err: str

    @property
    def value(self) -> Any:
        """The JSON value that it printed last."""
        assert self.rc == 0, self.text
        return json.loads(self.out.splitlines()[-1])

    @property
    def text(self) -> str:
        """Everything, for a message."""
        return f"status {self.rc}\n{self.out}\n--- stderr\n{self.err}"


def _end(process: subprocess.Popen[str], timeout: float) -> Ended:
    with process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err += f"\ncut after {timeout:g} s"
    return Ended(process.returncode, out, err)


def _digest(compiler: Sequence[str], kind: Kind) -> str:
    content = hashlib.sha256(repr((FLAGS, _WATCHED, kind)).encode())
    content.update(_run([*compiler, "--version"]).encode())
    for file in (*sorted(SOURCES.glob("*/*.[ch]")), *sorted(_KERNELS.glob("*.cu"))):
        content.update(str(file.relative_to(_ROOT)).encode() + b"\0" + file.read_bytes())
    return content.hexdigest()[:16]


def _compile(compiler: Sequence[str], kind: Kind, folder: Path) -> None:
    watch = [] if kind == "plain" else ["-DSTANDIN_TSAN"]
    commands: list[list[str | Path]] = []
    parts: dict[str, list[Path]] = {}
    for library, room in _LIBRARIES.items():
        for source in [*sorted((SOURCES / room).glob("*.c")), SOURCES / "shared" / "faults.c"]:
            target = folder / f"{room}-{source.stem}.o"
            seen = ["-fsanitize=thread"] if watch and f"{room}/{source.name}" in _WATCHED else []
            commands.append([*compiler, *FLAGS, *watch, *seen, "-c", source, "-o", target])
            parts.setdefault(library, []).append(target)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, commands))
    sanitize = ["-fsanitize=thread"] if watch else []
    for library, objects in parts.items():
        link = ["-shared", f"-Wl,-soname,{library}", "-Wl,-Bsymbolic", "-Wl,-z,defs" if not watch else "-lc"]
        _run([*compiler, *sanitize, *link, *objects, "-o", folder / library, "-lpthread", "-lm", "-ldl"])
    for objects in parts.values():
        for part in objects:
            part.unlink()


def build(kind: Kind = "plain") -> Standin:
    """Return the stand-ins, building them if these sources were not built yet.

    Parameters
    ----------
    kind : {"plain", "tsan"}
        ``"tsan"`` finds missing waits between streams; see tests/standin/README.md.

    Returns
    -------
    Standin
        The build.
    """
    compiler = _compiler()
    sanitizer = _sanitizer(compiler) if kind == "tsan" else None
    folder = _CACHE / f"{kind}-{_digest(compiler, kind)}"
    if not folder.is_dir():
        _CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_CACHE) as fresh:
            made = Path(fresh) / "made"
            made.mkdir()
            _compile(compiler, kind, made)
            # Another process may have been quicker: then its folder is as good.
            if not folder.is_dir():
                try:
                    made.rename(folder)
                except OSError:
                    assert folder.is_dir()
    return Standin(folder, sanitizer)
