"""Hosts on one machine, as network name spaces with two networks: ``ctl0`` of launchers and names, ``data0`` of MPI.

Both are bridges in a name space of their own, so nothing touches the machine's network. A script stands in for ssh: it
runs a command with a host's network, name and table of hosts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from helpers import processes
from helpers.job import Job, Plan, Program
from helpers.mpirun import find_mpi
from helpers.require import need

__all__ = ["BETWEEN", "CONTROL", "DATA", "Hosts"]

CONTROL, DATA = "ctl", "data"
_NETWORKS = {CONTROL: "10.77.0", DATA: "10.78.0"}
BETWEEN = {
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "data0",
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_btl_tcp_if_include": f"{_NETWORKS[DATA]}.0/24",
}
"""What tells each MPI to use the network for data."""
_PROGRAMS = ("ip", "nsenter", "unshare", "mount", "hostname")

# As ssh is called: options, a host, a command. UCX lists devices from /sys, which must be that of the name space;
# slurmd wants what is mounted there.
_ON = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
exec nsenter --net=/run/netns/{prefix}"${{host#host}}" unshare --uts --mount sh -c '
  hostname "$0" && mount --bind {folder}/hosts /etc/hosts && mount --rbind /sys/fs/cgroup {folder}/cgroup &&
  mount -t sysfs sysfs /sys && mount --rbind {folder}/cgroup /sys/fs/cgroup || exit 99
  exec sh -c "$*"' "$host" "$@"
"""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}: {done.stderr}")


def hindrance() -> str:
    """Return what keeps hosts from being made; empty: nothing."""
    absent = [name for name in _PROGRAMS if not shutil.which(name)]
    if absent:
        return f"no {', '.join(absent)}"
    if os.geteuid() != 0:
        return "name spaces with a network between them need root"
    line = ["unshare", "--net", "--mount", "ip", "link", "add", "a0", "type", "veth", "peer", "name", "b0"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=20, check=False)
    return done.stderr.strip() if done.returncode else ""


class Hosts:
    """Some hosts, named host1, host2 ...; use them in a ``with``."""

    def __init__(self, count: int) -> None:
        why = hindrance()
        need("netns", not why, why)
        self.count = count
        self._prefix = f"bmt{uuid.uuid4().hex[:6]}"
        self._switch = f"{self._prefix}sw"
        self.folder = Path(tempfile.mkdtemp(prefix=processes.FOLDER_PREFIX, dir="/tmp"))
        self.on = self.folder / "on"
        self.on.write_text(_ON.format(prefix=self._prefix, folder=self.folder))
        self.on.chmod(0o755)
        (self.folder / "cgroup").mkdir()
        names = "".join(f"{_NETWORKS[CONTROL]}.{one} host{one}\n" for one in self._numbers)
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")

    @property
    def _numbers(self) -> range:
        return range(1, self.count + 1)

    def __enter__(self) -> Hosts:
        _run("ip", "netns", "add", self._switch)
        for network in _NETWORKS:
            _run("ip", "-n", self._switch, "link", "add", f"br{network}", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", f"br{network}", "up")
        for number in self._numbers:
            self._connect(number)
        return self

    def _connect(self, number: int) -> None:
        space = f"{self._prefix}{number}"
        _run("ip", "netns", "add", space)
        _run("ip", "-n", space, "link", "set", "lo", "up")
        for network, net in _NETWORKS.items():
            near, far = f"{network}{number}", f"{network}0"
            _run("ip", "-n", self._switch, "link", "add", near, "type", "veth", "peer", "name", far, "netns", space)
            _run("ip", "-n", self._switch, "link", "set", near, "master", f"br{network}", "up")
            _run("ip", "-n", space, "addr", "add", f"{net}.{number}/24", "dev", far)
            _run("ip", "-n", space, "link", "set", far, "up")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for space in (*(f"{self._prefix}{number}" for number in self._numbers), self._switch):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=20, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def address(self, number: int) -> str:
        """Return the address that a host's name has."""
        return f"{_NETWORKS[CONTROL]}.{number}"

    def cut(self, number: int, *networks: str) -> None:
        """Take a host off networks, without a word to anybody."""
        for network in networks:
            _run("ip", "-n", self._switch, "link", "set", f"{network}{number}", "down")

    def mend(self, number: int, *networks: str) -> None:
        """Connect it again."""
        for network in networks:
            _run("ip", "-n", self._switch, "link", "set", f"{network}{number}", "up")

    def processes(self, number: int, job: str) -> list[int]:
        """Return those of a job on a host, by the job's mark."""
        space = os.stat(f"/run/netns/{self._prefix}{number}").st_ino
        found = []
        for pid in processes.marked(job):
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{pid}/ns/net").st_ino == space:
                    found.append(pid)
        return found

    def start_job(
        self,
        n: int,
        program: Program,
        *,
        mpi: str,
        options: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        rank_env: Mapping[int, Mapping[str, str | None]] | None = None,
        timeout: float = 60.0,
    ) -> Job:
        """Start ranks on the hosts in turn, as ``mpirun.start_job`` does on one."""
        found = find_mpi(mpi)
        between = {
            "mpich": self._mpich,
            "openmpi": self._open_mpi,
        }[mpi](n)
        plan = Plan(n, program, found.python, env or {}, rank_env or {}, timeout=timeout)
        command = [str(self.on), "host1", found.mpirun, *between, *options, "-np", str(n)]
        return Job(command, plan, {**found.env, **BETWEEN})

    def _mpich(self, n: int) -> list[str]:
        hosts = ",".join(f"host{number}" for number in self._numbers)
        each = str(-(-n // self.count))
        return ["-launcher", "ssh", "-launcher-exec", str(self.on), "-iface", "ctl0", "-hosts", hosts, "-ppn", each]

    def _open_mpi(self, n: int) -> list[str]:
        each = -(-n // self.count)
        return [
            *("--prtemca", "plm_ssh_agent", str(self.on)),
            *("--prtemca", "prte_if_include", f"{_NETWORKS[CONTROL]}.0/24"),
            *("--host", ",".join(f"host{number}:{each}" for number in self._numbers)),
        ]
