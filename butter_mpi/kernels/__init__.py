"""Kernels that butter_mpi ships as source, compiled for this device by NVRTC when they are asked for."""

from __future__ import annotations

import importlib.resources
from typing import Any

from butter_mpi.device import Device
from butter_mpi.errors import CUDAError, NotSupportedError

__all__ = ["bf16_add_inplace", "premul"]

_COMPILED: dict[tuple[str, int], int] = {}


def bf16_add_inplace(device: Device) -> int:
    """Return the kernel that adds one bfloat16 array to another, for ``CommBackend.set_add_kernel``.

    Parameters
    ----------
    device : Device
        Where it will run.

    Returns
    -------
    int
        The handle of a function ``(target, source, count)``: two device pointers and a 64-bit number of elements. It
        is compiled once a process and stays loaded.

    Raises
    ------
    NotSupportedError
        NVRTC is not installed.
    CUDAError
        It does not compile for this device, or cannot be loaded.
    """
    return _kernel(device, "bf16_add.cu", "bf16_add_inplace")


def premul(device: Device) -> int:
    """Return the kernel that multiplies an array by a factor, in its own element type, as NCCL's ``PreMulSum`` does.

    Parameters
    ----------
    device : Device
        Where it will run.

    Returns
    -------
    int
        The handle of a function ``(data, count, factor, kind)``: a device pointer, a 64-bit number of elements, one
        element in the lowest bytes of 64 bits, and the number of its ``DType``. It is compiled once a process.

    Raises
    ------
    NotSupportedError, CUDAError
        As for :func:`bf16_add_inplace`.
    """
    return _kernel(device, "premul.cu", "premul")


def _kernel(device: Device, file: str, name: str) -> int:
    """Return a kernel of a file beside this one."""
    known = _COMPILED.get((name, device.ordinal))
    if known is None:
        source = importlib.resources.files(__package__).joinpath(file).read_text(encoding="utf-8")
        known = device.load_kernel(_compiled(source, file, device.capability), name)
        _COMPILED[name, device.ordinal] = known
    return known


def _compiled(source: str, file: str, capability: tuple[int, int]) -> bytes:
    """Return machine code for a compute capability."""
    try:
        from cuda.bindings import nvrtc

        program = _call(nvrtc, "nvrtcCreateProgram", source.encode(), file.encode(), 0, [], [])
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise NotSupportedError(
            f"NVRTC, which compiles kernels, cannot be loaded: {reason}; install it (pip install nvidia-cuda-nvrtc)",
            needs="NVRTC",
        ) from None
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode()]
    try:
        _call(nvrtc, "nvrtcCompileProgram", program, len(options), options)
    except CUDAError as error:
        log = bytearray(_call(nvrtc, "nvrtcGetProgramLogSize", program))
        nvrtc.nvrtcGetProgramLog(program, log)
        error.message += f": {log.decode(errors='replace').rstrip(chr(0)).strip()}"
        raise
    code = bytearray(_call(nvrtc, "nvrtcGetCUBINSize", program))
    _call(nvrtc, "nvrtcGetCUBIN", program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(code)


def _call(nvrtc: Any, name: str, *arguments: Any) -> Any:
    status, *values = getattr(nvrtc, name)(*arguments)
    if int(status):
        raise CUDAError(f"{name} failed with {status.name} ({int(status)})", call=name, code=int(status))
    return values[0] if values else None
