"""One page about this machine and this launcher, for bug reports: ``python -m butter_mpi``.

What could harm this process is asked in a child process with a time limit: the MPI library, libnccl and the CUDA driver
are not loaded here, and no CUDA context is made anywhere. A section that cannot be told says why.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from butter_mpi import machine
from butter_mpi._version import versions
from butter_mpi.child import Untold, ask, output
from butter_mpi.environment import c_environment, effective_nccl, kept_value
from butter_mpi.interfaces import interfaces, named_interface, nccl_interfaces
from butter_mpi.launch import LaunchInfo, forwarding, outside_any_step, read_launch, srun_line
from butter_mpi.mpi_facts import mpi_facts
from butter_mpi.policy import POLICY, check_policy
from butter_mpi.selftest.console import ask_for, printable, sound_streams
from butter_mpi.sentinel.door import networks
from butter_mpi.sentinel.needs import needs
from butter_mpi.settings import Settings, own_variable

__all__ = ["examine", "main", "render"]

Section = dict[str, Any]

_UNWRITTEN, _USAGE = 1, 2
_SHORT_SHM = 1 << 30
_UNWATCHED = "every start is refused, but with BUTTER_MPI_WATCH=off, where lost ranks are found at deadlines only"
_NCCL_CODE = """
import json
from butter_mpi.environment import c_environment
from butter_mpi.library import describe
print(json.dumps(describe(c_environment())))
"""
_CUDA_CODE = """
import json
from butter_mpi.cuda import devices
from butter_mpi.environment import c_environment
print(json.dumps(devices(c_environment())))
"""


def _versions() -> Section:
    found = versions()
    return {
        **{name: version for name, version in found.items() if version},
        "not installed": ", ".join(name for name, version in found.items() if not version),
        "executable": sys.executable,
        "system": f"{platform.platform()}, {platform.machine()}",
    }


def _launch(info: LaunchInfo) -> Section:
    return {
        "launcher": info.launcher,
        "size": f"{info.claimed_size} ({info.size_variable})" if info.claimed_size else "no variable tells it",
        "rank": info.claimed_rank,
        "local rank": info.local_rank,
        "read from": dict(sorted(info.variables.items())),
        "warnings": list(info.malformed),
    }


def _slurm(env: Mapping[str, str], info: LaunchInfo, library: str) -> Section:
    found: Section = {"where": _where(info), "SLURM_ variables": sum(name.startswith("SLURM_") for name in env)}
    found["PMI variables"] = ", ".join(name for name in sorted(env) if name.startswith(("PMI_", "PMIX_"))) or "none"
    srun = shutil.which("srun")
    found["srun"] = srun or "not on PATH"
    if srun:
        try:
            found["plug-ins"] = " ".join(output([srun, "--mpi=list"], "srun --mpi=list", merge=True).split())
        except Untold as error:
            found["plug-ins"] = f"cannot tell: {error}"
    found["to try"] = srun_line(library)
    outside = outside_any_step(info)
    if outside:
        found["warnings"] = [f"{outside}: start it with srun"]
    return found


def _where(info: LaunchInfo) -> str:
    if not info.in_allocation:
        return "outside any Slurm allocation"
    return "inside a step" if info.in_step else "inside an allocation, outside any step"


def _own_variables(env: Mapping[str, str]) -> Section:
    found: Section = {name: printable(value) for name, value in sorted(env.items()) if own_variable(name)}
    if not found:
        found["none is set"] = "every setting has its default, where the program gives no other"
    try:
        Settings.resolve(env)
    except ValueError as error:
        found["warnings"] = [f"every start is refused: {error}"]
    return found


def _watcher() -> Section:
    needed = needs()
    found: Section = {what: f"no: {reason}" if reason else "yes" for what, reason in needed.items()}
    lacking = [what for what, reason in needed.items() if reason]
    found["ptrace scope"] = machine.ptrace_scope()
    found["PID namespace"] = machine.pid_namespace()
    if lacking:
        found["warnings"] = [f"the watcher cannot run here without {', '.join(lacking)}: {_UNWATCHED}"]
    return found


def _nccl_environment(env: Mapping[str, str], info: LaunchInfo) -> Section:
    found: Section = {
        name: kept_value(name, value) + ("" if source == "environment" else f"  (from {source})")
        for name, (value, source) in sorted(effective_nccl(env).items())
    }
    wrong = check_policy(env)
    found["policy"] = (
        "met" if not wrong else "not met; the nccl plane needs it with several ranks, the host plane does not"
    )
    found["warnings"] = [
        f"{name} is {value}, must be {POLICY[name]}: {forwarding(info, name, POLICY[name])}"
        for name, value in wrong.items()
    ]
    return found


def _libnccl() -> Section:
    return dict(ask(_NCCL_CODE, "looking for libnccl.so.2"))


def _cuda(env: Mapping[str, str]) -> Section:
    rows = ask(_CUDA_CODE, "asking the CUDA driver")
    return {
        "CUDA_VISIBLE_DEVICES": env.get("CUDA_VISIBLE_DEVICES", "unset"),
        **{f"device {row['ordinal']}": f"{row['name']}, {row['uuid']}, {row['pci']}" for row in rows},
    }


def _network(env: Mapping[str, str]) -> Section:
    rows = interfaces()
    value = effective_nccl(env).get("NCCL_SOCKET_IFNAME", (None,))[0]
    chosen, rule = nccl_interfaces(rows, value)
    found: Section = {row["name"]: f"{_link(row)}, {', '.join(row['addresses']) or 'no address'}" for row in rows}
    found["NCCL's candidates"] = f"{', '.join(chosen) or 'none'}; {rule}"
    found["RDMA"] = "; ".join(machine.infiniband()) or "no device in /sys/class/infiniband"
    names = None
    with contextlib.suppress(ValueError):
        # What is wrong with it stands with the variables.
        names = Settings.resolve(env).watch_interface
    watched = networks(names, named_interface(rows, value))
    found["watchers of several nodes"] = "; ".join(_watched(*one) for one in watched)
    absent = [name or "this host" for name, addresses in watched if not addresses]
    warnings = ["NCCL would find no interface for its bootstrap, which needs one also on one host"] * (not chosen)
    if absent:
        where = "a start is refused where this is one of the first two nodes"
        warnings.append(f"{', '.join(absent)} has no address: {where}")
    return found | ({"warnings": warnings} if warnings else {})


def _watched(name: str, addresses: Sequence[str]) -> str:
    return f"{name or 'the network of the host name'} ({', '.join(addresses) or 'no address'})"


def _link(row: Mapping[str, Any]) -> str:
    return "down" if not row["up"] else "up" if row["running"] else "up without a carrier"


def _shared_memory() -> Section:
    facts = machine.shared_memory()
    removes, why = machine.remove_ipc(os.getuid())
    found: Section = {
        "/dev/shm": f"{facts['size'] >> 20} MiB, {facts['free'] >> 20} MiB free",
        "RemoveIPC": why,
        "warnings": [],
    }
    if facts["free"] < _SHORT_SHM:
        found["warnings"].append("less than 1 GiB is free in /dev/shm, where NCCL and MPI put shared memory of ranks")
    if removes:
        found["warnings"].append(
            "systemd removes shared memory of this user at log-out, under a running job: set RemoveIPC=no in "
            "/etc/systemd/logind.conf, or loginctl enable-linger"
        )
    return found


def examine() -> dict[str, Section]:
    """Return every section of the page.

    Returns
    -------
    dict of str to dict
        By title; ``warnings`` is a list, ``cannot tell`` says why a section has nothing else.
    """
    env = c_environment()
    info = read_launch(env)
    page: dict[str, Section] = {}

    def add(title: str, make: Callable[[], Section]) -> None:
        try:
            page[title] = make()
        except Untold as error:
            page[title] = {"cannot tell": str(error)}
        except Exception as error:
            page[title] = {"cannot tell": f"{type(error).__name__}: {error}"}

    add("versions", _versions)
    add("MPI", lambda: mpi_facts(info))
    add("launcher", lambda: _launch(info))
    add("Slurm and PMI", lambda: _slurm(env, info, page["MPI"].get("library", "")))
    add("butter_mpi variables", lambda: _own_variables(env))
    add("watcher", _watcher)
    add("NCCL variables", lambda: _nccl_environment(env, info))
    add("libnccl", _libnccl)
    add("CUDA devices", lambda: _cuda(env))
    add("network", lambda: _network(env))
    add("shared memory", _shared_memory)
    return page


def render(page: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page as text.

    Parameters
    ----------
    page : mapping
        What :func:`examine` returned.

    Returns
    -------
    str
        A title a section, a line a fact, and ``!`` before what needs care.
    """
    lines = []
    for title, section in page.items():
        lines.append(title)
        for name, value in section.items():
            if name == "warnings":
                continue
            if isinstance(value, Mapping):
                value = ", ".join(f"{key}={item}" for key, item in value.items()) or "nothing"
            lines.append(f"  {name}: {'unknown' if value is None else value}")
        lines += [f"  ! {warning}" for warning in section.get("warnings", ())]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the page; under a launcher rank 0 alone does, about its own machine.

    Parameters
    ----------
    arguments : sequence of str, optional
        Of the command line; default ``sys.argv``.

    Returns
    -------
    int
        0: also what cannot be told is an answer; 1: stdout cannot be written (141: nobody reads it any more); 2: wrong
        arguments.
    """
    with sound_streams():
        parser = _parser()
        try:
            options = parser.parse_args(arguments)
        except SystemExit:
            return _USAGE
        speaks = not read_launch(c_environment()).claimed_rank
        if options.help:
            return _tell(parser.format_help()) if speaks else 0
        page = examine()
        return _tell((json.dumps(page, indent=2) if options.json else render(page)) + "\n") if speaks else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m butter_mpi",
        description="Say what butter_mpi finds on this machine: one page for bug reports.",
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="print this")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    return parser


def _tell(text: str) -> int:
    return ask_for(text, "butter_mpi", _UNWRITTEN)


if __name__ == "__main__":
    sys.exit(main())
