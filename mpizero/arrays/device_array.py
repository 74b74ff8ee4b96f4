"""A run of device memory, and the addresses of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["DeviceArray", "address_of"]


class DeviceArray:
    """Name a contiguous run of elements in device memory, and keep it alive. What numpy's flat arrays are on a host."""

    __slots__ = ("address", "device", "dtype", "owner", "size")

    def __init__(self, device: Any, address: int, size: int, dtype: Any, owner: Any) -> None:
        """Name memory.

        Args:
            device: the `Device` whose it is.
            address: of the first byte.
            size: elements.
            dtype: the numpy dtype of one element's bytes.
            owner: what keeps the memory alive.
        """
        self.device, self.address, self.size, self.owner = device, address, size, owner
        self.dtype = np.dtype(dtype)

    @property
    def nbytes(self) -> int:
        """Return the bytes."""
        return int(self.size * self.dtype.itemsize)

    def __len__(self) -> int:
        """Return the number of elements."""
        return self.size

    def __getitem__(self, part: slice) -> DeviceArray:
        """Return the elements of a slice without a step, sharing memory."""
        start, stop, step = part.indices(self.size)
        if step != 1:
            raise IndexError("a slice of device memory must have no step")
        address = self.address + start * self.dtype.itemsize
        return DeviceArray(self.device, address, max(0, stop - start), self.dtype, self.owner)

    def view(self, dtype: Any) -> DeviceArray:
        """Return the same bytes as elements of another numpy dtype."""
        dtype = np.dtype(dtype)
        return DeviceArray(self.device, self.address, self.nbytes // dtype.itemsize, dtype, self.owner)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Describe the memory to CuPy, torch and mpi4py."""
        data = (self.address if self.size else 0, False)
        return {"shape": (self.size,), "typestr": self.dtype.str, "data": data, "version": 3, "stream": None}


def address_of(array: Any) -> int:
    """Return the address of the first element of a flat array, of host or device memory; 0 where it is empty."""
    if isinstance(array, DeviceArray):
        return array.address if array.size else 0
    address: int = array.__array_interface__["data"][0]
    return address if array.size else 0
