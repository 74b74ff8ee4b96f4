"""Which device an array lies on, and the devices of this process, found through CuPy at their first use."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Any

from mpizero.arrays.device import Device
from mpizero.errors import ArgumentTypeError, must_be

__all__ = ["Gpus", "device_of", "gpus", "is_cupy", "parse_device"]


class Gpus:
    """Hold the process's devices."""

    def __init__(self) -> None:
        self._devices: dict[int, Device] = {}
        self.stand_in: Device | None = None
        """A device on which torch's CPU tensors are taken to lie, for tests on machines without a GPU."""

    def device(self, number: int) -> Device:
        """Return the device of a number, which CuPy must be there to drive.

        Raises:
            ArgumentTypeError: where CuPy is not installed; names the extra that brings it.
        """
        if number not in self._devices:
            self._devices[number] = _through_cupy(number)
        return self._devices[number]

    def current(self) -> int:
        """Return the number of the device that is current for CuPy."""
        return int(_runtime(0).getDevice())


@cache
def gpus() -> Gpus:
    """Return the process's table of devices."""
    return Gpus()


_GPUS = gpus()


def device_of(x: Any) -> Device | None:
    """Return the device whose memory holds a torch tensor or a CuPy array; None for host memory.

    Raises:
        ArgumentTypeError: for an array of a GPU where CuPy is not installed.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        if x.device.type == "cuda":
            return _GPUS.device(x.device.index)
        return _GPUS.stand_in if x.device.type == "cpu" else None
    return _GPUS.device(x.device.id) if is_cupy(x) else None


def parse_device(device: Any) -> Device:
    """Return the device that `cuda`, `cuda:1`, a number or a torch device means; `cuda` is the current one.

    Raises:
        ArgumentTypeError: for what means no CUDA device, and where CuPy is not installed.
    """
    kind, _, number = str(device).partition(":")
    if isinstance(device, int) and not isinstance(device, bool):
        kind, number = "cuda", str(device)
    if kind != "cuda" or not (number.isdecimal() or not number):
        raise ArgumentTypeError(must_be("device", "cuda, cuda:N or None for host memory", str(device)))
    if _GPUS.stand_in is not None:
        return _GPUS.stand_in
    torch = sys.modules.get("torch")
    if not number and torch is not None and torch.cuda.is_available():
        number = str(torch.cuda.current_device())
    if not number:
        number = str(_GPUS.current())
    return _GPUS.device(int(number))


def is_cupy(x: Any) -> bool:
    """Return whether `x` is a CuPy array; loads nothing."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def _through_cupy(number: int) -> Device:
    kernels = import_module("mpizero.arrays.cuda_kernels").CudaKernels()
    return Device(_runtime(number), kernels, number, users=_users_streams, entered=_entered)


def _runtime(number: int) -> Any:
    try:
        return import_module("cupy.cuda.runtime")
    except ImportError as error:
        torch = sys.modules.get("torch")
        version = getattr(getattr(torch, "version", None), "cuda", None) or "13"
        remedy = f"pip install 'mpizero[cuda{version.partition('.')[0]}]'"
        rule = "in host memory where CuPy is not installed"
        raise ArgumentTypeError(must_be("x", rule, f"an array of GPU {number}", remedy)) from error


def _users_streams(number: int, *, cupys: bool) -> list[int]:
    """Return the handles of the current streams of torch and CuPy, of those that are loaded."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    streams = []
    if torch is not None and torch.cuda.is_initialized():
        streams.append(int(torch.cuda.current_stream(number).cuda_stream))
    if cupy is not None:
        stream = int(cupy.cuda.get_current_stream(number).ptr)
        if stream or cupys or not streams:  # CuPy is loaded to drive the device: its default stream may say nothing
            streams.append(stream)
    return streams


def _entered(number: int, handle: int) -> Any:
    """Return a context manager that makes a stream torch's current one."""
    cuda = import_module("torch").cuda
    return cuda.stream(cuda.ExternalStream(handle, device=number))
