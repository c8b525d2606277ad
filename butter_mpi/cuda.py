"""CUDA devices by the driver API, without making a context."""

from __future__ import annotations

import ctypes
import functools
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from butter_mpi.errors import CUDAError
from butter_mpi.findings import quoted

__all__ = [
    "NO_DRIVER",
    "call",
    "check",
    "device_absent",
    "devices",
    "load_driver",
    "pick_device",
    "prepared",
    "typed",
]

NO_DRIVER = -2
"""The code of an error that no driver gave, because there is none."""

_STUB_LIBRARY, _NO_DEVICE, _INVALID_DEVICE = 34, 100, 101
_INSTALL = 'install the NVIDIA driver, or run without a GPU: plane="host", BUTTER_MPI_PLANE=host or --plane host'


def device_absent(error: CUDAError) -> bool:
    """Return whether an error means that this machine has no CUDA device for this process, rather than a broken one.

    Parameters
    ----------
    error : CUDAError
        What :func:`devices` or :func:`pick_device` raised.

    Returns
    -------
    bool
        True for no driver and no visible device.
    """
    return error.code in (NO_DRIVER, _STUB_LIBRARY, _NO_DEVICE)


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def load_driver() -> Any:
    """Return cuda-python's module of the driver API, after looking whether there is a driver.

    Returns
    -------
    module
        ``cuda.bindings.driver``.

    Raises
    ------
    CUDAError
        There is no driver, with the code :data:`NO_DRIVER`.
    """
    try:
        _library()
    except OSError as error:
        text = f"no CUDA driver: the loader says {error}; {_INSTALL}"
        raise CUDAError(text, call="dlopen", code=NO_DRIVER) from None
    from cuda.bindings import driver

    return driver


def call(driver: Any, name: str, *arguments: Any) -> Any:
    """Call a driver function.

    Parameters
    ----------
    driver : module
        From :func:`load_driver`.
    name : str
        The C function.
    *arguments
        Its inputs.

    Returns
    -------
    object
        Its output, ``None`` where it has none.

    Raises
    ------
    CUDAError
        It failed; the message has its name and the code's.
    """
    status, *values = getattr(driver, name)(*arguments)
    check(name, status)
    return values[0] if values else None


def prepared(name: str, *arguments: Any) -> Any:
    """Return a driver call by ctypes, for what is asked at every operation: a quarter of the time of :func:`call`.

    Parameters
    ----------
    name : str
        The C function.
    *arguments
        Of ctypes: what ``from_param`` or ``byref`` gives. A bare int would be cut to 32 bits.

    Returns
    -------
    callable
        Takes nothing and returns the number of a ``CUresult``, for :func:`check`.
    """
    return functools.partial(_library()[name], *arguments)


def typed(name: str, *types: Any) -> Any:
    """Return a driver function by ctypes, as :func:`prepared` does, for arguments that change.

    Parameters
    ----------
    name : str
        The C function.
    *types
        Of its arguments.

    Returns
    -------
    callable
        Returns the number of a ``CUresult``, for :func:`check`.
    """
    function = _library()[name]
    function.argtypes = types
    return function


def check(name: str, status: Any) -> None:
    """Raise unless a driver call succeeded.

    Parameters
    ----------
    name : str
        The C function.
    status : CUresult
        What it returned.

    Raises
    ------
    CUDAError
        It failed; the message has its name and the code's.
    """
    if int(status) != 0:
        text = f"CUDA driver call {name} failed with {status.name} ({int(status)})"
        raise CUDAError(text, call=name, code=int(status))


def _text(raw: bytes) -> str:
    return raw.split(b"\0")[0].decode(errors="replace").strip()


def _describe(driver: Any, ordinal: int) -> dict[str, Any]:
    device = call(driver, "cuDeviceGet", ordinal)
    name = _text(call(driver, "cuDeviceGetName", 128, device))
    # In older bindings the call without _v2 names the parent GPU of a MIG instance.
    ask = "cuDeviceGetUuid_v2" if hasattr(driver, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    identity = uuid.UUID(bytes=bytes(call(driver, ask, device).bytes))
    kind = "MIG" if " MIG " in f"{name} " else "GPU"
    pci = _text(call(driver, "cuDeviceGetPCIBusId", 32, device))
    return {"uuid": f"{kind}-{identity}", "name": name, "pci": pci, "ordinal": ordinal}


def devices(env: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return every CUDA device that this process can see; no context is made.

    Parameters
    ----------
    env : mapping of str to str
        The environment, for ``CUDA_VISIBLE_DEVICES`` in the error.

    Returns
    -------
    list of dict
        ``uuid``, ``name``, ``pci`` (bus address) and ``ordinal`` of each.

    Raises
    ------
    CUDAError
        No driver, no visible device, or a driver that fails; :func:`device_absent` tells them apart.
    """
    driver = load_driver()
    try:
        call(driver, "cuInit", 0)
        count = call(driver, "cuDeviceGetCount")
        found = [_describe(driver, ordinal) for ordinal in range(count)]
    except CUDAError as error:
        if device_absent(error):
            raise _none_visible(env, error.code) from None
        raise
    if not found:
        raise _none_visible(env, _NO_DEVICE)
    return found


def _none_visible(env: Mapping[str, str], code: int) -> CUDAError:
    visible = quoted(env.get("CUDA_VISIBLE_DEVICES"))
    text = f"no CUDA device is visible (CUDA_VISIBLE_DEVICES is {visible}, cuInit gives {code})"
    return CUDAError(f'{text}; make one visible, or take plane="host"', call="cuInit", code=code)


def pick_device(local_rank: int | None, visible: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the device of a rank: the only one, where the launcher shows each rank its own, else by local rank.

    Parameters
    ----------
    local_rank : int or None
        The rank among those of this node, if known.
    visible : sequence of mapping
        What :func:`devices` returned; at least one.

    Returns
    -------
    dict
        The device.

    Raises
    ------
    CUDAError
        The local rank is unknown or beyond the devices; the message has both numbers.
    """
    index = 0 if len(visible) == 1 else local_rank
    hint = "one GPU a rank: srun --gpus-per-task=1 (Slurm then sets CUDA_VISIBLE_DEVICES and SLURM_STEP_GPUS)"
    if index is None:
        text = f"the local rank is unknown and {len(visible)} devices are visible: no rule gives this rank one of them"
        raise CUDAError(f"{text}; give {hint}", call="cuDeviceGet", code=_INVALID_DEVICE)
    if index >= len(visible):
        text = f"local rank {local_rank} has no device: {len(visible)} visible (ordinals 0 to {len(visible) - 1})"
        text = f"{text}; start fewer ranks on this node, or give {hint}"
        raise CUDAError(text, call="cuDeviceGet", code=_INVALID_DEVICE)
    return dict(visible[index])
