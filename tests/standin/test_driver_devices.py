"""The stand-in for the CUDA driver: its build, devices, contexts, and injected faults."""

from __future__ import annotations

import re

import pytest
from helpers.standin import SOURCES, Standin, build
from helpers.standin_ranks import driver_value


def test_build_is_kept(standin: Standin) -> None:
    """A second build of the same sources is the first one, and holds the two libraries and nothing else."""
    assert build() == standin
    assert sorted(file.name for file in standin.folder.iterdir()) == ["libcuda.so.1", "libnccl.so.2"]


DEVICES = """
from butter_mpi.cuda import devices
from butter_mpi.errors import CUDAError
import os
try:
    print(json.dumps([[d["ordinal"], d["uuid"], d["name"], d["pci"]] for d in devices(os.environ)]))
except CUDAError as error:
    print(json.dumps(error.code))
"""


def test_devices_have_names_of_their_own(standin: Standin) -> None:
    """As many as asked for, each with a UUID, a name and an address; another machine has other UUIDs."""
    here = driver_value(standin, DEVICES, STANDIN_DEVICES="3")
    assert [row[0] for row in here] == [0, 1, 2]
    assert all(len({row[column] for row in here}) == 3 for column in (1, 2, 3))
    there = driver_value(standin, DEVICES, STANDIN_DEVICES="3", STANDIN_MACHINE="another")
    assert not {row[1] for row in here} & {row[1] for row in there}
    assert driver_value(standin, DEVICES, STANDIN_DEVICES="3") == here


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("2,0", [2, 0]),
        ("0,9,1", [0]),
        ("1,1", 100),
        ("", 100),
        ("-1", 100),
        ("GPU-3", 100),
    ],
)
def test_visible_devices(standin: Standin, visible: str, expected: list[int] | int) -> None:
    """``CUDA_VISIBLE_DEVICES`` chooses, orders and hides as it does for the driver."""
    found = driver_value(standin, DEVICES, CUDA_VISIBLE_DEVICES=visible)
    if isinstance(expected, int):
        assert found == expected
    else:
        assert [row[2] for row in found] == [f"Stand-in GPU {number}" for number in expected]
        assert [row[0] for row in found] == list(range(len(expected)))


def test_visible_device_by_uuid(standin: Standin) -> None:
    """A whole UUID names its device, and the beginning of one that several have names none."""
    uuid = driver_value(standin, DEVICES)[2][1]
    assert [row[1:3] for row in driver_value(standin, DEVICES, CUDA_VISIBLE_DEVICES=uuid)] == [[uuid, "Stand-in GPU 2"]]
    assert driver_value(standin, DEVICES, CUDA_VISIBLE_DEVICES=uuid[:12]) == 100


def test_machine_without_device(standin: Standin) -> None:
    """No device: initialization says so."""
    assert driver_value(standin, DEVICES, STANDIN_DEVICES="0") == 100


def test_contexts_are_per_thread(standin: Standin) -> None:
    """A thread without a current context is told so; push, pop and a context beside the primary one work."""
    code = """
    g = Gpu(1)
    seen = []
    t = threading.Thread(target=lambda: seen.append(status(driver.cuMemAlloc(4)))); t.start(); t.join()
    first = check(driver.cuDevicePrimaryCtxRetain(0))
    check(driver.cuCtxPushCurrent(first))
    inner = int(check(driver.cuCtxGetDevice()))
    s = g.stream()
    check(driver.cuCtxPopCurrent())
    owner = [int(check(driver.cuStreamGetCtx(s))[0] if isinstance(check(driver.cuStreamGetCtx(s)), list)
                 else check(driver.cuStreamGetCtx(s))) == int(first), int(check(driver.cuCtxGetDevice()))]
    check(driver.cuDevicePrimaryCtxRelease(0))
    print(json.dumps([seen, inner, owner, [int(v) for v in check(driver.cuDevicePrimaryCtxGetState(0))],
                      status(driver.cuDevicePrimaryCtxRelease(0))]))
    """
    assert driver_value(standin, code) == [[201], 0, [True, 1], [0, 0], 201]


def test_before_init_nothing_works(standin: Standin) -> None:
    """Calls before cuInit are refused, names of statuses and the version are not."""
    code = """
    print(json.dumps([status(driver.cuDeviceGetCount()), int(check(driver.cuDriverGetVersion())),
                      check(driver.cuGetErrorName(driver.CUresult.CUDA_ERROR_NOT_READY)).decode(),
                      check(driver.cuGetErrorString(driver.CUresult.CUDA_ERROR_NOT_READY)).decode()]))
    """
    found = driver_value(standin, code, STANDIN_DRIVER_VERSION="12080")
    assert found == [3, 12080, "CUDA_ERROR_NOT_READY", "device not ready"]


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ("", [0, 0, 0, 0, 0]),
        ("cuMemsetD8Async#2=2", [0, 2, 0, 0, 0]),
        ("cuMemsetD8Async#2+=46", [0, 46, 46, 0, 0]),
        ("cuMemsetD8Async#2=700!", [0, 700, 700, 700, 700]),
        ("0@cuMemsetD8Async=1", [0, 0, 0, 0, 0]),
        ("3@cuStreamSynchronize#1=719,cuCtxSynchronize=2", [0, 0, 0, 719, 2]),
    ],
)
def test_faults_come_where_they_are_asked_for(standin: Standin, faults: str, expected: list[int]) -> None:
    """The call of that number, of that function, in that rank; a sticky one everywhere after."""
    code = """
    g = Gpu()
    s, x = g.stream(), g.blank(8)
    print(json.dumps([*[status(driver.cuMemsetD8Async(x, 1, 8, s)) for _ in range(3)],
                      status(driver.cuStreamSynchronize(s)), status(driver.cuCtxSynchronize())]))
    """
    assert driver_value(standin, code, STANDIN_FAULTS=faults, STANDIN_RANK="3") == expected


def test_fault_of_the_device_comes_asynchronously(standin: Standin) -> None:
    """The call succeeds, the wait fails, and nothing after the fault was run."""
    code = """
    g = Gpu()
    s, x = g.stream(), g.blank(8)
    given = [status(driver.cuMemsetD8Async(x, 1, 8, s)) for _ in range(2)]
    print(json.dumps([given, status(driver.cuStreamSynchronize(s)), status(driver.cuMemAlloc(4))]))
    """
    assert driver_value(standin, code, STANDIN_FAULTS="work#2=719") == [[0, 0], 719, 719]


@pytest.mark.parametrize("rule", ["cuInit", "cuInit=perhaps", "cuInit#0=1", "#1=2", "cuInit=5x"])
def test_fault_that_cannot_be_read_is_refused(standin: Standin, rule: str) -> None:
    """A misspelt fault would mean a test that tests nothing."""
    with standin.start("import ctypes; ctypes.CDLL('libcuda.so.1')", env={"STANDIN_FAULTS": rule}) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == -6 and rule.split("=")[0] in err


def test_function_that_is_missing_is_named(standin: Standin) -> None:
    """What the stand-in lacks raises an error of cuda-python's with the name; nothing pretends to work."""
    code = """
    Gpu()
    try:
        driver.cuMulticastCreate(driver.CUmulticastObjectProp())
    except Exception as error:
        print(json.dumps(str(error)))
    """
    assert "cuMulticastCreate" in driver_value(standin, code)


def test_readme_names_every_variable() -> None:
    """Each variable that the sources read is in the README, and the README names no other."""
    sources = "".join(file.read_text() for file in SOURCES.glob("*/*.c"))
    read = set(re.findall(r'"(STANDIN_[A-Z_]+)"', sources))
    named = set(re.findall(r"`(STANDIN_[A-Z_]+)", (SOURCES / "README.md").read_text()))
    assert read and read == named
