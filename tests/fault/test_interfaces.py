"""What the doctor says of network interfaces, in name spaces made for it, against what the real libnccl takes there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from helpers.libnccl_files import real_library
from helpers.require import need

BOOTSTRAP = """
import ctypes, sys
ctypes.CDLL(sys.argv[1]).ncclGetUniqueId(ctypes.create_string_buffer(128))
"""

LOOPBACK = "ip link set lo up"


def cable(name: str, address: str, state: str) -> list[str]:
    """Return the commands that make an interface, with a peer that is up or not, and wait for its state."""
    end = f"{name}x"
    return [
        f"ip link add {name} type veth peer name {end}",
        f"ip link set {name} addrgenmode none && ip link set {end} addrgenmode none",
        f"ip addr add {address} dev {name} && ip link set {name} up",
        *([f"ip link set {end} up"] if state == "UP" else []),
        f"until ip -o link show {name} | grep -q 'state {state} '; do :; done",
    ]


DOCKER = cable("docker0", "172.17.0.1/16", "UP")

SCENES = {
    "nothing": ([], ""),
    "loopback": ([LOOPBACK], "lo"),
    "loopback of IPv6 alone": ([LOOPBACK, "ip addr del 127.0.0.1/8 dev lo"], ""),
    "docker's bridge": ([LOOPBACK, *DOCKER], "docker0"),
    "a cable": ([LOOPBACK, *DOCKER, *cable("eth0", "10.1.2.3/24", "UP")], "eth0"),
    "a cable that is not plugged in": ([LOOPBACK, *DOCKER, *cable("eth0", "10.1.2.3/24", "LOWERLAYERDOWN")], "docker0"),
    "IPv6 before IPv4": ([*cable("a0", "fd00::1/64", "UP"), *cable("b0", "10.1.2.3/24", "UP")], "b0"),
}


def in_name_space(*commands: str) -> str:
    """Run commands in a network name space of their own; return what they wrote."""
    line = ["unshare", "--net", "sh", "-ec", "\n".join(commands)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def _name_spaces() -> None:
    line = ["unshare", "--net", "ip", "link", "add", "a0", "type", "veth", "peer", "name", "b0"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=20, check=False)
        reason = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        reason = str(error)
    need("netns", not reason, f"{' '.join(line)}: {reason}")


@pytest.mark.parametrize("scene", SCENES)
def test_first_candidate_is_what_nccl_takes(scene: str) -> None:
    """The doctor's first candidate is the interface of NCCL's bootstrap; without one it warns, and NCCL fails."""
    commands, wanted = SCENES[scene]
    python = shlex.quote(sys.executable)
    nccl = f"NCCL_DEBUG=INFO {python} -c {shlex.quote(BOOTSTRAP)} {shlex.quote(str(real_library()))}"
    said, page = in_name_space(*commands, nccl, "echo THE DOCTOR", f"{python} -m butter_mpi --json").split("THE DOCTOR")
    taken = re.findall(r"Bootstrap: Using ([^:]+):", said)
    assert taken == ([wanted] if wanted else []) and ("no socket interface found" in said) is (not wanted), said
    network = json.loads(page)["network"]
    assert network["NCCL's candidates"].split("; ")[0].split(", ")[0] == (wanted or "none"), network
    assert ("warnings" in network) is (not wanted), network


def test_networks_of_watchers_are_told() -> None:
    """With the addresses that they have here, and a warning for one that has none."""
    command = ["ip link set lo up", "BUTTER_MPI_WATCH_INTERFACE='lo,ib7|ib8' " + shlex.quote(sys.executable)]
    network = json.loads(in_name_space(command[0], f"{command[1]} -m butter_mpi --json"))["network"]
    assert network["watchers of several nodes"] == "lo (127.0.0.1, ::1); ib7|ib8 (no address)", network
    assert any("ib7|ib8 has no address: a start is refused" in one for one in network["warnings"]), network
