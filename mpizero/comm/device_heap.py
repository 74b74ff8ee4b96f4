"""Symmetric buffers in device memory: blocks of plain `cudaMalloc` that the host's other ranks have opened by CUDA IPC.

The heap of `heap`, whose segments lie on every rank's own device instead of in one file.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.arrays import DeviceArray
from mpizero.comm.heap import Heap, Mappings
from mpizero.comm.reached import together
from mpizero.errors import MpiZeroError

if TYPE_CHECKING:
    from mpizero.arrays import Device

__all__ = ["GRANULE", "DeviceSegment", "device_heap", "device_mappings"]

GRANULE = 2 << 20
"""A handle opens whole pages of the device, of 2 MiB: smaller allocations would share theirs with strangers."""


class DeviceSegment:
    """Be memory of equally many bytes on every rank's device, which all ranks can load and store."""

    def __init__(self, memory: dict[int, DeviceArray], key: int) -> None:
        """Hold the memory of every process, this one's own included, known to all of them as `key`, an odd number."""
        self.memory, self.key, self.pids = memory, key, frozenset(memory)
        own = memory[os.getpid()]
        self.share = own.nbytes
        self.start = own.address
        self.stop = self.start + self.share

    def close(self, mpi_comm: Any) -> None:
        """Close what peers gave, before any of them can free it; arrays in use keep this rank's own. Collective."""
        own = self.memory[os.getpid()]
        self.memory = {os.getpid(): own}
        mpi_comm.Barrier()

    def take(self, rank: int, start: int, nbytes: int) -> tuple[object, DeviceArray]:  # noqa: ARG002
        """Return bytes of this rank's share, and what lives as long as any array of them."""
        own = self.memory[os.getpid()]
        owner = _Block(self)
        return owner, DeviceArray(own.device, own.address + start, nbytes, np.uint8, owner)


class _Block:
    """Own one allocation: every array made of it keeps it alive."""

    def __init__(self, segment: DeviceSegment) -> None:
        self.segment = segment


@cache
def device_mappings() -> Mappings:
    """Return the process's table of segments of device memory."""
    return Mappings()


def device_heap(mpi_comm: Any, device: Device) -> Heap:
    """Return a heap on this rank's device, over an mpi4py communicator whose ranks run on one host."""

    def make(mpi_comm: Any, nbytes: int) -> DeviceSegment | None:
        return _share(mpi_comm, device, nbytes)

    return Heap(mpi_comm, make, device_mappings())


def _share(mpi_comm: Any, device: Device, nbytes: int) -> DeviceSegment | None:
    """Make a segment of `nbytes` on every rank's device; None, on all of them, where IPC is refused. Collective.

    Raises:
        DeviceMemoryError: on all ranks, where a device has no room.
    """
    nbytes = -(-nbytes // GRANULE) * GRANULE
    mine = together(mpi_comm, lambda: device.allocate(nbytes))
    try:
        handle = device.share(mine)
    except MpiZeroError:
        handle = b""
    found = mpi_comm.allgather((os.getpid(), handle, int.from_bytes(os.urandom(7), "little") | 1))
    memory = {os.getpid(): mine}
    good = all(given for _, given, _ in found)
    try:
        for pid, given, _ in found if good else ():
            if pid not in memory:
                memory[pid] = device.open(given, nbytes)
    except MpiZeroError:
        good = False
    if all(mpi_comm.allgather(good)):
        return DeviceSegment(memory, found[0][2])
    memory.clear()  # what peers gave is closed before any of them frees it; `mine` lives until the return
    mpi_comm.Barrier()
    return None
