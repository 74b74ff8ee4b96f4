"""A flat run of elements, in host memory or on a device: what messages and kernels work on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpizero.arrays.device_array import DeviceArray

if TYPE_CHECKING:
    from mpizero.arrays.dtypes import DType

__all__ = ["View", "scratch_view"]


@dataclass(frozen=True, slots=True)
class View:
    """Name a contiguous, one-dimensional run of elements in host or device memory."""

    data: Any
    """The elements as numpy sees them (bfloat16 as uint16): a numpy array, or a `DeviceArray`."""
    dtype: DType

    @property
    def device(self) -> Any:
        """Return the `Device` that holds them; None for host memory."""
        return self.data.device if type(self.data) is DeviceArray else None

    @property
    def count(self) -> int:
        """Return the number of elements."""
        return len(self.data)

    def part(self, start: int, stop: int) -> View:
        """Return the elements [start, stop) of this view, sharing memory."""
        return View(self.data[start:stop], self.dtype)


def scratch_view(memory: Any, dtype: DType) -> View:
    """Return the bytes of `memory` (uint8, 1-D, aligned) as elements of `dtype`."""
    return View(memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype.storage), dtype)
