"""Where a benchmark's buffers lie: in host memory, or on a device, which is filled and checked in place.

On a device a call is over when the device is: what is timed ends behind the events that a collective leaves on the
caller's streams, and begins with nothing under way. See [Note: streams and MPI] in `arrays/device`.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

import mpizero as mz
from mpizero.arrays import borrow, parse_device
from mpizero.bench.cases import CPU
from mpizero.bench.data import count_wrong, fill
from mpizero.errors import ArgumentError, must_be

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpizero.arrays import Device

__all__ = ["DevicePlace", "HostPlace", "place_of"]

BLOCK = 1024
"""Periods that are compared at a time, so that the outcome of the comparison takes no memory to speak of."""
CAPACITY = 4 << 30
"""Bytes of the device that the host plays."""


class HostPlace:
    """Be host memory."""

    device: Device | None = None
    """The device that holds the buffers; None for host memory."""

    def new(self, dtype: str, count: int, comm: Any, *, symmetric: bool) -> Any:
        """Return an uninitialised array of `count` elements; collective where it is symmetric."""
        kind: Any = dtype
        if dtype == "bfloat16":
            import torch

            kind = torch.bfloat16
            if not symmetric:
                return torch.empty(count, dtype=kind)
        return mz.empty((count,), kind, comm) if symmetric else np.empty(count, kind)

    def elements(self, array: Any) -> Any:
        """Return an array's elements, as they are stored, for `fill` and `count_wrong`."""
        return borrow(array, writable=True).view.data

    def fill(self, data: Any, period: Any) -> None:
        """Write `period` into elements, over and over."""
        fill(data, period)

    def count_wrong(self, data: Any, period: Any) -> int:
        """Return how many elements differ from `period`, repeated."""
        return count_wrong(data, period)

    def settled(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Return a call that is over when its result is there."""
        return call

    def copying(self, nbytes: int) -> tuple[Any, Callable[[], None]]:
        """Return new private memory, and a function that copies it to other such memory."""
        source, target = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        return source, lambda: np.copyto(target, source)

    def paint(self, memory: Any, value: int) -> None:
        """Set all bytes of memory that `copying` gave."""
        memory[:] = value

    def on_host(self, x: Any, out: Any) -> tuple[Any, Any, Callable[[], None], Callable[[], None]]:
        """Return the elements of both in host memory, and what to do before and after a collective on them."""
        data = self.elements(x), None if out is None else self.elements(out)
        return *data, _nothing, _nothing


class DevicePlace(HostPlace):
    """Be a device's memory, as torch sees it."""

    def __init__(self, device: Device, torch_device: str) -> None:
        """Use a device.

        Args:
            device: the device.
            torch_device: torch's name for it.
        """
        self.device: Device = device
        self.torch_device = torch_device
        self.stream = device.stream()

    def new(self, dtype: str, count: int, comm: Any, *, symmetric: bool) -> Any:
        """Return an uninitialised torch tensor; collective where it is symmetric."""
        import torch

        kind = getattr(torch, dtype)
        if symmetric:
            return mz.empty((count,), kind, comm, device="cuda")
        return torch.empty(count, dtype=kind, device=self.torch_device)

    def elements(self, array: Any) -> Any:
        """Return a tensor's elements as signed integers of their width, or pairs of them: bits are compared."""
        import torch

        width = array.element_size()
        if array.dtype == torch.bool:
            return array.view(torch.uint8).view(torch.int8)
        return array.view(torch.int64).view(-1, 2) if width == 16 else array.view(getattr(torch, f"int{8 * width}"))

    def fill(self, data: Any, period: Any) -> None:
        """Write `period` over and over, and wait until that is done."""
        given = self._period(period)
        whole = len(data) // len(given) * len(given) if len(given) else 0
        if whole:
            data[:whole].view(-1, *given.shape)[:] = given
        data[whole:] = given[: len(data) - whole]
        self.settle()

    def count_wrong(self, data: Any, period: Any) -> int:
        """Return how many elements differ from `period`, repeated."""
        given = self._period(period)
        whole = len(data) // len(given) * len(given) if len(given) else 0
        rows = data[:whole].view(-1, *given.shape)
        parts = [(rows[at : at + BLOCK], given) for at in range(0, len(rows), BLOCK)]
        parts.append((data[whole:], given[: len(data) - whole]))
        found = 0
        for part, wanted in parts:
            differs = part != wanted
            found = found + (differs.any(-1) if data.dim() > 1 else differs).sum()  # stays on the device
        return int(found)

    def settled(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Return a call that is over when the device has done what it was given."""

        def settled() -> None:
            call()
            self.settle()

        return settled

    def settle(self) -> None:
        """Wait for all that the caller's streams were given, and what they wait for."""
        for stream in self.device.users_streams():
            stream.record().synchronize()

    def copying(self, nbytes: int) -> tuple[Any, Callable[[], None]]:
        """Return new device memory, and a function that copies it within the device."""
        source, target = self.device.allocate(nbytes), self.device.allocate(nbytes)

        def copy() -> None:
            self.device.copy(target, source, self.stream)
            self.stream.record().synchronize()

        return source, copy

    def paint(self, memory: Any, value: int) -> None:
        """Leave the memory as it is: where it goes past the caches, values do not change a copy's time."""

    def on_host(self, x: Any, out: Any) -> tuple[Any, Any, Callable[[], None], Callable[[], None]]:
        """Return page-locked copies of both, and what copies all bytes to them and the result's back."""
        device, stream = self.device, self.stream
        ends = [borrow(array, writable=True).view for array in (x, out) if array is not None]
        copies = [device.pinned(end.data.nbytes) for end in ends]

        def before() -> None:
            device.copy(copies[0], ends[0].data, stream)
            stream.record().synchronize()

        def after() -> None:
            device.copy(ends[-1].data, copies[-1], stream)
            stream.record().synchronize()

        data = [copy.view(end.dtype.storage) for copy, end in zip(copies, ends, strict=True)]
        return data[0], None if out is None else data[1], before, after

    def _period(self, period: Any) -> Any:
        """Return a period of the pattern on the device, in the type of `elements`."""
        import torch

        width = period.dtype.itemsize
        stored = np.ascontiguousarray(period).view(np.int64 if width == 16 else f"i{width}")
        given = torch.from_numpy(stored).to(self.torch_device)
        return given.view(-1, 2) if width == 16 else given


@contextmanager
def place_of(device: str) -> Iterator[HostPlace]:
    """Give the place that a device's name means, inside the `with` block.

    Args:
        device: one of `cases.DEVICES`. For `cuda` this rank's GPU is chosen, which has to come before MPI starts.

    Raises:
        ArgumentError: where torch finds no GPU.
        LaunchError: from `choose_gpu`.
    """
    if device == CPU:
        yield HostPlace()
    elif device == "cuda":
        import torch

        if not torch.cuda.is_available():
            rule = "used where torch finds a GPU"
            raise ArgumentError(must_be("-D cuda", rule, f"torch {torch.__version__} without one"))
        number = mz.choose_gpu()
        yield DevicePlace(parse_device(number), f"cuda:{number}")
    else:
        yield from _stand_in()


def _stand_in() -> Iterator[HostPlace]:
    from mpizero.testing.host_runtime import HostRuntime, stand_in

    runtime = HostRuntime(seed=os.getpid(), capacity=CAPACITY)
    # The caller's stream is none that runs at once: a call that is not waited for leaves old results.
    runtime.users = [runtime.streamCreateWithFlags(1)]
    with stand_in(runtime) as played:
        yield DevicePlace(played, "cpu")


def _nothing() -> None:
    """Do nothing."""
