"""`mpizero.empty`: memory that the other ranks of the host can load and store like their own."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from mpizero.arrays import from_device_memory, from_memory, parse_device, parse_dtype
from mpizero.collectives.call import default_communicator
from mpizero.errors import ArgumentError, must_be

if TYPE_CHECKING:
    from mpizero.arrays import Device, DeviceArray

__all__ = ["empty"]


def empty(shape: int | tuple[int, ...], dtype: Any = "float32", comm: Any = None, *, device: Any = None) -> Any:
    """Return a new symmetric buffer: an array in memory that all ranks of this host can load and store. Collective.

    Collectives on such buffers move each byte once, by loads and stores, where other memory takes messages, windows or
    the kernel's help. The memory is given back, for the next buffers, when the array and all its views have been
    dropped on every rank. Where /dev/shm has no room, or the GPUs' memory cannot be opened by other processes, one rank
    says so and all get private memory, slower and otherwise the same.

    Args:
        shape: of the array, the same on all ranks.
        dtype: a numpy dtype or its name for a numpy (or CuPy) array, a torch dtype for a torch tensor.
        comm: the communicator; None means `mpizero.world()`.
        device: None for host memory; `cuda`, `cuda:N` or a torch device for memory of this rank's GPU.

    Returns:
        An uninitialised, C-ordered array.

    Raises:
        ArgumentError: for a negative extent.
        ArgumentTypeError: for a dtype that no collective takes, and for a device that is no CUDA one.
        DeviceMemoryError: on all ranks of the host, where a GPU of one has no room.
    """
    comm = default_communicator(comm)
    extents = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(extent < 0 for extent in extents):
        raise ArgumentError(must_be("shape", "whole numbers of 0 or more", shape))
    kind, library = parse_dtype(dtype)
    nbytes = math.prod(extents) * kind.itemsize
    comm.notes.pop("plans", None)  # they may hold memory of buffers that are gone
    if device is not None:
        place = parse_device(device)
        with place.current():
            return from_device_memory(_on_device(nbytes, comm, place), extents, kind, library)
    heap = getattr(comm, "heap", None)
    memory = None if heap is None else heap.allocate(nbytes)
    if memory is None and heap is not None and comm.node.rank == 0:
        os.write(2, _apology(nbytes, comm).encode())
    return from_memory(memory, extents, kind, library)


def _on_device(nbytes: int, comm: Any, device: Device) -> DeviceArray:
    """Return symmetric bytes, or private ones where the GPUs' memory cannot be shared."""
    side = getattr(comm, "node", comm).side(device)
    memory: DeviceArray | None = side.heap.allocate(nbytes) if side.windows is not None else None
    return device.allocate(nbytes) if memory is None else memory


def _apology(nbytes: int, comm: Any) -> str:
    from mpizero.comm.segment import free_bytes

    ranks = comm.node.size
    return (
        f"mpizero: symmetric buffers need {nbytes * ranks:,} bytes of /dev/shm for {ranks} ranks on "
        f"{comm.hosts[comm.rank]} (got {free_bytes():,} free): private memory is used instead, which is slower; "
        "a container gets more with --shm-size\n"
    )
