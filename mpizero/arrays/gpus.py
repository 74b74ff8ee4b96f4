"""Which device an array lies on, and the devices of this process, found through CuPy at their first use."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpizero.arrays.device import Device
from mpizero.errors import ArgumentTypeError, must_be

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Gpus", "device_of", "gpus", "is_cupy"]


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


def is_cupy(x: Any) -> bool:
    """Return whether `x` is a CuPy array; loads nothing."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def _through_cupy(number: int) -> Device:
    try:
        runtime = import_module("cupy.cuda.runtime")
    except ImportError as error:
        torch = sys.modules.get("torch")
        version = getattr(getattr(torch, "version", None), "cuda", None) or "13"
        remedy = f"pip install 'mpizero[cuda{version.partition('.')[0]}]'"
        rule = "in host memory where CuPy is not installed"
        raise ArgumentTypeError(must_be("x", rule, f"an array of GPU {number}", remedy)) from error
    kernels = import_module("mpizero.arrays.cuda_kernels").CudaKernels()
    return Device(runtime, kernels, number, users=_users_streams)  # type: ignore[arg-type]  # a module is a Runtime


def _users_streams(number: int) -> Iterator[int]:
    """Give the handles of the current streams of torch and CuPy, of those that are loaded."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and torch.cuda.is_initialized():
        yield int(torch.cuda.current_stream(number).cuda_stream)
    if cupy is not None:
        yield int(cupy.cuda.get_current_stream(number).ptr)
