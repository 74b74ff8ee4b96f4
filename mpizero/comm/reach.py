"""Reach into another process's memory on the same host: process_vm_readv and process_vm_writev.

The kernel copies straight from one private buffer to another. It grants that to processes of one user unless a sandbox
or Yama's ptrace_scope forbids it, so `probe` tries it once.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.errors import CollectiveError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Reach", "probe"]

WITNESS = 0x6D70697A65726F21


class _Part(ctypes.Structure):
    """Be one `struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Reach:
    """Read and write the memory of the node's other ranks."""

    def __init__(self, pids: list[int]) -> None:
        """Know rank r as process `pids[r]`."""
        self._pids = pids
        self._here, self._there = _Part(), _Part()
        self._near, self._far = ctypes.byref(self._here), ctypes.byref(self._there)
        self._read, self._write = _calls()

    def read(self, peer: int, address: int, into: int, nbytes: int) -> None:
        """Copy `nbytes` of the peer's memory, from `address` on, to this process's memory at `into`."""
        self._move(self._read, peer, address, into, nbytes)

    def write(self, peer: int, address: int, data: int, nbytes: int) -> None:
        """Copy `nbytes` of this process's memory, from `data` on, to the peer's memory at `address`."""
        self._move(self._write, peer, address, data, nbytes)

    def _move(self, call: Any, peer: int, address: int, start: int, left: int) -> None:
        here, there = self._here, self._there
        while left:
            here.base, here.length, there.base, there.length = start, left, address, left
            moved = call(self._pids[peer], self._near, 1, self._far, 1, 0)
            if moved <= 0:
                reason = os.strerror(ctypes.get_errno())
                raise CollectiveError(f"the memory of rank {peer} must be within reach (got {reason}): has it ended?")
            start, address, left = start + moved, address + moved, left - moved


def probe(mpi_comm: Any) -> Reach | None:
    """Return the reach of these ranks into each other; None, on all of them, where one is refused. Collective.

    Args:
        mpi_comm: an mpi4py communicator whose ranks run on one host.
    """
    witness = np.array([WITNESS, 0], np.uint64)
    homes = mpi_comm.allgather((os.getpid(), witness.ctypes.data))
    found = _attempt(lambda: Reach([pid for pid, _ in homes]))
    good = found is not None
    for peer, (_, address) in enumerate(homes):
        if found is not None and peer != mpi_comm.rank:
            good = good and _sees(found, peer, address)
    agreed = all(mpi_comm.allgather(good))  # nobody's witness goes before all have looked
    return found if agreed else None


def _sees(reach: Reach, peer: int, address: int) -> bool:
    seen = np.zeros(1, np.uint64)
    try:
        reach.read(peer, address, seen.ctypes.data, 8)
        reach.write(peer, address + 8, seen.ctypes.data, 8)
    except CollectiveError:
        return False
    return int(seen[0]) == WITNESS


def _attempt(make: Callable[[], Reach]) -> Reach | None:
    try:
        return make()
    except (AttributeError, OSError):  # no such function in this C library
        return None


@cache
def _calls() -> tuple[Any, Any]:
    library = ctypes.CDLL(None, use_errno=True)
    calls = library.process_vm_readv, library.process_vm_writev
    part = ctypes.c_void_p
    for call in calls:
        call.restype = ctypes.c_ssize_t
        call.argtypes = [ctypes.c_int, part, ctypes.c_ulong, part, ctypes.c_ulong, ctypes.c_ulong]
    return calls
