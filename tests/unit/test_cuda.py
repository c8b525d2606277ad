"""CUDA devices by the driver API, on a driver made of plain Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from butter_mpi import cuda
from butter_mpi.errors import CUDAError


class Status(int):
    """A ``CUresult``."""

    name = "CUDA_ERROR_OF_A_TEST"


class Driver:
    """A driver with some devices, each call of which is written down."""

    def __init__(self, count: int, *, fails: dict[str, int] | None = None, name: bytes = b"NVIDIA H200") -> None:
        self._count, self._fails, self._name = count, fails or {}, name
        self.calls: list[str] = []

    def __getattr__(self, call: str) -> Any:
        if not call.startswith("cu") or call.endswith("_v2"):
            raise AttributeError(call)
        values: dict[str, Callable[..., tuple[Any, ...]]] = {
            "cuInit": lambda flags: (),
            "cuDeviceGetCount": lambda: (self._count,),
            "cuDeviceGet": lambda ordinal: (ordinal,),
            "cuDeviceGetName": lambda size, device: (self._name.ljust(size, b"\0"),),
            "cuDeviceGetUuid": lambda device: (SimpleNamespace(bytes=bytes(15) + bytes([device])),),
            "cuDeviceGetPCIBusId": lambda size, device: (f"0000:{device:02x}:00.0".encode().ljust(size, b"\0"),),
        }

        def answer(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(call)
            status = self._fails.get(call, 0)
            return (Status(status), *(values[call](*arguments) if not status else ()))

        return answer


def use(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> Driver:
    """Put a driver in the place of the real one."""
    monkeypatch.setattr(cuda, "load_driver", lambda: driver)
    return driver


def test_devices_are_listed_without_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """UUID, name, bus address and ordinal of each; nothing that would make a context is called."""
    driver = use(monkeypatch, Driver(2))
    assert cuda.devices({}) == [
        {"uuid": f"GPU-00000000-0000-0000-0000-{i:012x}", "name": "NVIDIA H200", "pci": f"0000:0{i}:00.0", "ordinal": i}
        for i in (0, 1)
    ]
    assert not [call for call in driver.calls if "Ctx" in call or "Context" in call]


def test_mig_instance_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The UUID of a MIG instance is not shown as a GPU's."""
    use(monkeypatch, Driver(1, name=b"NVIDIA A100-SXM4-40GB MIG 1g.5gb"))
    assert cuda.devices({})[0]["uuid"].startswith("MIG-")


@pytest.mark.parametrize(("count", "fails"), [(0, {}), (0, {"cuInit": 100}), (1, {"cuInit": 34})])
def test_no_visible_device_is_absence(monkeypatch: pytest.MonkeyPatch, count: int, fails: dict[str, int]) -> None:
    """No device, and a stub driver, mean absence, and what hides devices is in the error."""
    use(monkeypatch, Driver(count, fails=fails))
    with pytest.raises(CUDAError, match=r'no CUDA device is visible \(CUDA_VISIBLE_DEVICES is "7"') as caught:
        cuda.devices({"CUDA_VISIBLE_DEVICES": "7"})
    assert cuda.device_absent(caught.value)


def test_no_driver_is_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no driver can be opened, the loader's words and the remedy are told."""

    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    cuda._library.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(
        CUDAError, match=r"no CUDA driver: the loader says libcuda\.so\.1: .*BUTTER_MPI_PLANE=host"
    ) as caught:
        cuda.devices({})
    assert cuda.device_absent(caught.value) and caught.value.code == cuda.NO_DRIVER


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGetCount", "cuDeviceGetUuid"])
def test_failing_driver_is_no_absence(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A broken driver is an error by call, name and number, never "no device"."""
    use(monkeypatch, Driver(1, fails={call: 803}))
    with pytest.raises(CUDAError, match=rf"{call} failed with CUDA_ERROR_OF_A_TEST \(803\)") as caught:
        cuda.devices({})
    assert (caught.value.call, caught.value.code) == (call, 803)
    assert not cuda.device_absent(caught.value)


@pytest.mark.parametrize(("local_rank", "count", "ordinal"), [(0, 1, 0), (3, 1, 0), (None, 1, 0), (0, 4, 0), (3, 4, 3)])
def test_device_is_the_only_one_or_that_of_the_local_rank(local_rank: int | None, count: int, ordinal: int) -> None:
    """One visible device is everybody's own; of several, each local rank has its."""
    visible = [{"ordinal": i} for i in range(count)]
    assert cuda.pick_device(local_rank, visible)["ordinal"] == ordinal


def test_local_rank_beyond_the_devices_is_told_with_both_numbers() -> None:
    """The message has the local rank, the devices, and what Slurm sets when it binds one GPU to a rank."""
    message = r"local rank 2 has no device: 2 visible \(ordinals 0 to 1\).*SLURM_STEP_GPUS"
    with pytest.raises(CUDAError, match=message) as caught:
        cuda.pick_device(2, [{}, {}])
    assert not cuda.device_absent(caught.value)


def test_unknown_local_rank_guesses_nothing() -> None:
    """With several devices and no local rank there is no device, and the message says so."""
    with pytest.raises(CUDAError, match="the local rank is unknown and 2 devices are visible") as caught:
        cuda.pick_device(None, [{}, {}])
    assert not cuda.device_absent(caught.value)
