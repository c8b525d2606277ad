"""A Slurm of our own for tests: munged, slurmctld and some slurmd on this machine, without systemd and cgroups.

Needs root and Debian's slurm-wlm, slurm-wlm-basic-plugins and munge; for ``--mpi=pmix`` also libpmix-dev, whose
``libpmix.so`` Slurm's plug-in opens.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from helpers import processes
from helpers.hosts import BETWEEN, Hosts
from helpers.job import Job, JobResult, Plan, Program, clean_environment
from helpers.mpirun import find_mpi
from helpers.require import need

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "unshare")
# An ordinary user's PATH lacks them, and so may root's.
SYSTEM_FOLDERS = ("/usr/sbin", "/sbin", "/usr/local/sbin")
PMI = {"mpich": "pmi2", "openmpi": "pmix", "debian-openmpi": "pmix"}
READY = 20.0

_CONF = """\
ClusterName=throwaway
SlurmctldHost={host}({address})
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n/spool
TmpFS={folder}/%n/tmp
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n/log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
MpiDefault=none
LaunchParameters=use_interactive_step
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=30
KillWait=2
MessageTimeout=5
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=30 State=UP
"""


def free_ports(count: int) -> list[int]:
    """Return TCP ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _between_nodes(env: Mapping[str, str]) -> dict[str, str]:
    """Return an MPI's variables with a transport that also reaches another node."""
    return {name: f"{value},tcp" if name == "OMPI_MCA_btl" else value for name, value in env.items()}


def search_path() -> str:
    """Return the PATH on which programs are looked for."""
    return os.pathsep.join([*os.environ.get("PATH", os.defpath).split(os.pathsep), *SYSTEM_FOLDERS])


def hindrance() -> str:
    """Return everything that keeps this Slurm from starting, with what helps; empty: nothing."""
    reasons = []
    absent = [name for name in PROGRAMS if not shutil.which(name, path=search_path())]
    if absent:
        reasons.append(f"no {', '.join(absent)}; apt-get install slurm-wlm slurm-wlm-basic-plugins munge")
    if os.geteuid() != 0:
        reasons.append("its daemons need root here, and this user is not; run the tests as root")
    return "; and ".join(reasons)


class Slurm:
    """A running throw-away Slurm of ``nodes`` nodes named n1, n2 ..., each with ``cpus`` CPUs."""

    networks: ClassVar[Mapping[str, str]] = {}
    """What tells an MPI its network."""

    def __init__(self, nodes: int = 2, cpus: int = 4) -> None:
        why = hindrance()
        need("slurm", not why, why)
        self.id = uuid.uuid4().hex
        self.nodes = nodes
        self.folder = Path(tempfile.mkdtemp(prefix=processes.FOLDER_PREFIX, dir="/tmp"))
        self.folder.chmod(0o755)
        own = {processes.MARK: self.id, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": search_path()}
        # The shell is what salloc starts in the allocation's interactive step.
        self.env = {**clean_environment(), **own, "SHELL": "/bin/sh"}
        self._configure(cpus)

    def _configure(self, cpus: int) -> None:
        ports = free_ports(self.nodes + 1)
        lines = []
        for number in range(1, self.nodes + 1):
            name, address, host = self._node(number)
            lines.append(
                f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={ports[number]} CPUs={cpus} "
                "RealMemory=1000 State=UNKNOWN"
            )
            # Each node has its own TmpFS: PMIx makes a folder of the same name for a step in every node's.
            for folder in ("spool", "tmp"):
                (self.folder / name / folder).mkdir(parents=True)
        for folder in ("state", "munge"):
            (self.folder / folder).mkdir(mode=0o711)
        host, address = self._controller()
        text = _CONF.format(host=host, address=address, folder=self.folder, ports=ports, nodes="\n".join(lines))
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\nIgnoreSystemd=yes\n")
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)

    def _controller(self) -> tuple[str, str]:
        """Return the host of slurmctld and its address."""
        return socket.gethostname().split(".")[0], "127.0.0.1"

    def _node(self, number: int) -> tuple[str, str, str]:
        """Return the name of a node, its address and the name of its host."""
        return (f"n{number}", "127.0.0.1", self._controller()[0])

    def _at_controller(self) -> list[str]:
        """Return what runs a command where users are."""
        return []

    def _at_node(self, number: int) -> list[str]:
        """Return what runs a script as a node: under its own host name, as PMIx looks a node up by it."""
        return ["unshare", "--uts", "--mount", "sh", "-c", f'hostname n{number} && eval "$0"']

    def run(self, *command: str, timeout: float = 30.0, **how: Any) -> subprocess.CompletedProcess[str]:
        """Run a command of this Slurm and return what it said."""
        there = self._at_controller()
        # Who stands in for ssh has a shell there, as that does.
        return self._run([*there, shlex.join(command)] if there else command, timeout, **how)

    def _run(self, line: Sequence[str], timeout: float = 30.0, **how: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(line, env=self.env, timeout=timeout, text=True, capture_output=True, check=False, **how)

    def start(self) -> None:
        """Start the daemons and wait until every node is idle."""
        munge = self.folder / "munge"
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._daemon("munged", "--force", *(f"--{option}={munge / name}" for option, name in files.items()))
        self._daemon("slurmctld")
        for number in range(1, self.nodes + 1):
            # With its own shared memory: MPICH names its segment after the step, so what a killed rank of step 3.0 left
            # would meet step 3.0 of the next Slurm.
            script = f"mount -t tmpfs tmpfs /dev/shm && exec slurmd -N {self._node(number)[0]}"
            self._started(self._run([*self._at_node(number), script]))
        self._await_idle()

    def batch(self, *command: str | Path, cwd: Path, timeout: float = 60.0) -> tuple[str, str]:
        """Submit a batch script and wait for its end; return its exit code as Slurm writes it, and its output."""
        submitted = self.run("sbatch", "--parsable", *map(str, command), cwd=cwd)
        if submitted.returncode:
            raise AssertionError(f"sbatch refuses {command}: {submitted.stderr}")
        number = submitted.stdout.strip()
        end = time.monotonic() + timeout
        while (job := self._job(number))["JobState"] in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            if time.monotonic() > end:
                self.run("scancel", number)
                written = Path(job["StdOut"]).read_text(errors="replace")
                raise AssertionError(f"job {number} was cut after {timeout:g} s: {job}\n{written}")
            time.sleep(0.1)  # sbatch --wait itself looks only every 10 s
        return job["ExitCode"], Path(job["StdOut"]).read_text(errors="replace")

    def _job(self, number: str) -> dict[str, str]:
        words = self.run("scontrol", "--oneliner", "show", "job", number).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def _daemon(self, *command: str) -> None:
        self._started(self.run(*command))

    def _started(self, done: subprocess.CompletedProcess[str]) -> None:
        if done.returncode:
            raise AssertionError(f"{' '.join(done.args)} does not start: {done.stdout}{done.stderr}")

    def _await_idle(self) -> None:
        end = time.monotonic() + READY
        said = ""
        while time.monotonic() < end:
            said = self.run("sinfo", "-h", "-N", "-o", "%N %T").stdout
            if said.split().count("idle") == self.nodes:
                return
            time.sleep(0.05)  # Slurm has no event for it
        logs = "\n".join(path.read_text()[-1500:] for path in sorted(self.folder.glob("**/*log")))
        raise AssertionError(f"nodes are not idle after {READY:g} s: {said}\n{logs}")

    def members(self) -> list[int]:
        """Return the living processes of this Slurm; its step daemons wipe their environment."""
        return processes.marked(self.id) + processes.inside(self.folder)

    def stop(self) -> None:
        """End every daemon and every task, and remove the folder."""
        processes.kill_all(self.members)
        shutil.rmtree(self.folder, ignore_errors=True)

    def start_job(
        self,
        n: int,
        program: Program,
        *,
        mpi: str = "mpich",
        pmi: str | None = None,
        options: Sequence[str] = ("-K",),
        env: Mapping[str, str | None] | None = None,
        rank_env: Mapping[int, Mapping[str, str | None]] | None = None,
        unset: Sequence[str] = (),
        timeout: float = 60.0,
    ) -> Job:
        """Start ``n`` ranks by ``srun``, spread over the nodes; arguments as for ``helpers.mpirun.start_job``.

        ``pmi`` is the value of ``--mpi``, by default the one that the MPI understands.
        """
        found = find_mpi(mpi)
        plan = Plan(n, program, found.python, env or {}, rank_env or {}, unset, None, timeout)
        nodes = [] if any(one.startswith("--nod") for one in options) else [f"--nodes={min(n, self.nodes)}"]
        launcher = [*self._at_controller(), "srun", *nodes, f"--ntasks={n}", f"--mpi={pmi or PMI[mpi]}", *options]
        return Job(launcher, plan, {**_between_nodes(found.env), **self.networks, "SLURM_CONF": self.env["SLURM_CONF"]})

    def run_job(self, n: int, program: Program, **how: Any) -> JobResult:
        """Run a job to its end; arguments as for ``start_job``."""
        with self.start_job(n, program, **how) as job:
            return job.wait()


class SlurmOnHosts(Slurm):
    """One whose nodes are hosts with networks of their own, all but the last, where its users are."""

    networks: ClassVar[Mapping[str, str]] = BETWEEN

    def __init__(self, hosts: Hosts, cpus: int = 8) -> None:
        self.hosts = hosts
        super().__init__(hosts.count - 1, cpus)

    def _controller(self) -> tuple[str, str]:
        return f"host{self.hosts.count}", self.hosts.address(self.hosts.count)

    def _node(self, number: int) -> tuple[str, str, str]:
        return f"host{number}", self.hosts.address(number), f"host{number}"

    def _at_controller(self) -> list[str]:
        return [str(self.hosts.on), f"host{self.hosts.count}"]

    def _at_node(self, number: int) -> list[str]:
        return [str(self.hosts.on), f"host{number}"]


@contextlib.contextmanager
def throw_away_slurm(nodes: int = 2, cpus: int = 4) -> Iterator[Slurm]:
    """Start a Slurm, and end it with everything it started."""
    slurm = Slurm(nodes, cpus)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()
