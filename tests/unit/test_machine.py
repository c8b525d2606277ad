"""What the kernel's files say of this machine, and what NCCL makes of interface names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from butter_mpi.interfaces import interfaces, nccl_interfaces
from butter_mpi.machine import (
    infiniband,
    pid_namespace,
    ptrace_scope,
    remove_ipc,
    shared_memory,
)


def rows(*names: str, down: str = "", bare: str = "", loose: str = "", six: str = "") -> list[dict[str, Any]]:
    """Return interfaces of these names; one may be down, without an address, without a carrier, or of IPv6 alone."""
    found = []
    for name in names:
        addresses = [] if name == bare else ["::1" if name == "lo" else "fd00::1"] if name == six else ["10.0.0.1"]
        found.append({"name": name, "up": name != down, "running": name not in (down, loose), "addresses": addresses})
    return found


def test_this_machine_has_a_loopback() -> None:
    """The interfaces of this machine are listed with their addresses."""
    found = {row["name"]: row for row in interfaces()}
    assert found["lo"]["up"] and found["lo"]["running"]
    assert "127.0.0.1" in found["lo"]["addresses"]


@pytest.mark.parametrize(
    ("found", "names", "chosen"),
    [
        (rows("lo", "docker0", "eth0", "ib0"), None, ["ib0"]),
        (rows("lo", "docker0", "virbr0", "eth0", "eno1"), None, ["eth0", "eno1"]),
        (rows("lo", "docker0", "eth0", down="eth0"), None, ["docker0"]),
        (rows("lo", "docker0", "eth0", loose="eth0"), None, ["docker0"]),
        (rows("lo", "eth0", bare="eth0"), None, ["lo"]),
        (rows("lo", six="lo"), None, []),
        (rows("eth0", "eth1", six="eth0"), None, ["eth1", "eth0"]),
        (rows("lo", "eth0", down="lo", bare="eth0"), None, []),
        (rows("lo", "eth0", "eth01", "eno1"), "eth", ["eth0", "eth01"]),
        (rows("lo", "eth0", "eth01", "eno1"), "=eth0", ["eth0"]),
        (rows("lo", "eth0", "eth01", "eno1"), "^eth,lo", ["eno1"]),
        (rows("lo", "eth0", "eth01", "eno1"), "^=eth0", ["lo", "eth01", "eno1"]),
        (rows("lo", "mlx0", "eno1"), "mlx0:1,eno", ["mlx0", "eno1"]),
        (rows("lo", "eth0"), "ib", []),
    ],
)
def test_interfaces_are_taken_by_name_as_nccl_does(
    found: list[dict[str, Any]], names: str | None, chosen: list[str]
) -> None:
    """A given list is one of prefixes, of whole names after =, refused after ^; else ib, other, docker, lo in turn."""
    taken, rule = nccl_interfaces(found, names)
    assert taken == chosen
    assert ("NCCL_SOCKET_IFNAME is unset" in rule) == (names is None)


def test_rdma_ports_are_listed(tmp_path: Path) -> None:
    """Each port of each RDMA device is a line with state and link layer."""
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "link_layer").write_text("Ethernet\n")
    assert infiniband(str(tmp_path)) == ["mlx5_0 port 1: 4: ACTIVE, Ethernet"]
    assert infiniband(str(tmp_path / "none")) == []


def test_shared_memory_is_measured() -> None:
    """Size and free bytes of a file system; one that is not there is an error."""
    facts = shared_memory()
    assert 0 <= facts["free"] <= facts["size"]
    with pytest.raises(OSError, match="No such file"):
        shared_memory("/dev/shm/nothing/here")


@pytest.mark.parametrize(
    ("user", "text", "removes"),
    [
        (1000, "", True),
        (1000, "[Login]\n#RemoveIPC=no\n", True),
        (1000, "[Login]\nRemoveIPC=no\n", False),
        (1000, "[Login]\nRemoveIPC = yes\n", True),
        (0, "", False),
    ],
)
def test_remove_ipc_follows_the_configuration(tmp_path: Path, user: int, text: str, removes: bool) -> None:
    """Systemd removes an ordinary user's objects unless its configuration says no; a system user's stay."""
    (tmp_path / "logind.conf").write_text(text)
    files = [str(tmp_path / "logind.conf"), str(tmp_path / "logind.conf.d")]
    answer, why = remove_ipc(user, running=str(tmp_path), files=files)
    assert answer is removes
    assert "RemoveIPC=" in why


def test_a_later_file_wins(tmp_path: Path) -> None:
    """A file in the folder of additions overrides the first one, and is named."""
    (tmp_path / "logind.conf").write_text("[Login]\nRemoveIPC=no\n")
    (tmp_path / "logind.conf.d").mkdir()
    (tmp_path / "logind.conf.d" / "site.conf").write_text("[Login]\nRemoveIPC=yes\n")
    files = [str(tmp_path / "logind.conf"), str(tmp_path / "logind.conf.d")]
    assert remove_ipc(1000, running=str(tmp_path), files=files) == (True, f"RemoveIPC=yes ({files[1]}/site.conf)")
    assert remove_ipc(1000, running=str(tmp_path / "nothing"), files=files) == (False, "systemd does not run here")


@pytest.mark.parametrize(("value", "told"), [("0", "0: not restricted"), ("1", "but no socket"), (None, "no Yama")])
def test_ptrace_scope(tmp_path: Path, value: str | None, told: str) -> None:
    """What the kernel's security module allows is told with what it means; without the module nothing is restricted."""
    file = tmp_path / "ptrace_scope"
    if value is not None:
        file.write_text(f"{value}\n")
    assert told in ptrace_scope(str(file))


@pytest.mark.parametrize(("name", "told"), [("pid:[4026531836]", "machine's own"), ("pid:[7]", "container's own")])
def test_pid_namespace(tmp_path: Path, name: str, told: str) -> None:
    """The first namespace of a kernel is told from those of containers, whose watchers see their own ranks only."""
    (tmp_path / "pid").symlink_to(name)
    assert told in pid_namespace(str(tmp_path / "pid"))
