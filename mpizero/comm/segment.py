"""Memory that the ranks of one host share: a file in /dev/shm, mapped by all and unlinked at once.

A file rather than `MPI_Win_allocate_shared`, for `posix_fallocate` tells beforehand whether there is room, where a
window that is too large ends in SIGBUS at some later store; see docs/decisions/0006.
"""

from __future__ import annotations

import mmap
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpizero.typing import Bytes

__all__ = ["PAGE", "Segment", "fence", "free_bytes", "share"]

FOLDER = "/dev/shm"  # noqa: S108  (it is memory, and the file has no name any more when this module returns)
PAGE = 4096


class Segment:
    """Be one shared mapping, of equally many bytes for every rank."""

    def __init__(self, memory: mmap.mmap, key: int, pids: frozenset[int]) -> None:
        """Hold `memory`, known to its ranks, the processes `pids`, as `key`; the shares lie in the order of ranks."""
        self.key = key
        self.pids = pids
        self.share = len(memory) // len(pids)
        self.bytes: Bytes = np.frombuffer(memory, np.uint8)
        self.start: int = self.bytes.ctypes.data
        self.stop = self.start + self.bytes.nbytes

    def close(self, mpi_comm: Any) -> None:
        """Do nothing: a mapping of a file is each process's own, and goes with its last array."""

    def take(self, rank: int, start: int, nbytes: int) -> tuple[object, Bytes]:
        """Return bytes of a rank's share, and what lives as long as any array of them."""
        owner = _Block(self, rank * self.share + start, nbytes)
        return owner, np.asarray(owner)


class _Block:
    """Own one allocation: every array made of it keeps it alive."""

    def __init__(self, segment: Segment, start: int, nbytes: int) -> None:
        self.segment = segment
        self.__array_interface__ = {
            "data": (segment.start + start, False),
            "typestr": "|u1",
            "shape": (nbytes,),
            "version": 3,
        }


def free_bytes() -> int:
    """Return how many bytes /dev/shm has left; 0 where there is none."""
    try:
        found = os.statvfs(FOLDER)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def share(mpi_comm: Any, nbytes: int) -> Segment | None:
    """Make a segment with `nbytes` bytes for each rank; None, on all of them, where one cannot have it. Collective.

    Each rank allocates the pages of its own share, so that they lie on its own NUMA node.

    Args:
        mpi_comm: an mpi4py communicator whose ranks run on one host.
        nbytes: bytes of one rank's share, a multiple of `PAGE`.
    """
    total = nbytes * mpi_comm.size
    file, name, key = -1, "", 0
    if mpi_comm.rank == 0:
        key = int.from_bytes(os.urandom(7), "little") | 1
        name = f"{FOLDER}/mpizero-{key:x}"
        file = _attempt(lambda: os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        if file >= 0 and (free_bytes() < total or _attempt(lambda: _zero(os.ftruncate, file, total)) < 0):
            Path(name).unlink()
            os.close(file)
            file = -1
    name, key, made = mpi_comm.bcast((name, key, file >= 0))
    if not made:
        return None
    if mpi_comm.rank:
        file = _attempt(lambda: os.open(name, os.O_RDWR))
    place = nbytes * mpi_comm.rank
    good = file >= 0 and _attempt(lambda: _zero(os.posix_fallocate, file, place, nbytes)) >= 0
    found = mpi_comm.allgather((good, os.getpid()))
    agreed = all(good for good, _ in found)
    if mpi_comm.rank == 0:
        Path(name).unlink()
    memory = mmap.mmap(file, total) if agreed else None
    if file >= 0:
        os.close(file)
    return None if memory is None else Segment(memory, key, frozenset(pid for _, pid in found))


def fence() -> Callable[[], None] | None:
    """Return what orders this processor's stores before its later ones and its loads after earlier ones.

    None on x86-64, where ordinary stores and loads are ordered as flags need them. Elsewhere a lock's atomic operations
    are the only barrier that Python has; they have not been tried on such a machine.
    """
    if platform.machine() in {"x86_64", "AMD64"}:
        return None
    import threading

    lock = threading.Lock()

    def order() -> None:
        with lock:
            pass

    return order


def _zero(call: Callable[..., None], *arguments: int) -> int:
    """Call what returns nothing, and return 0."""
    call(*arguments)
    return 0


def _attempt(call: Callable[[], int]) -> int:
    """Return what `call` returns, or -1 where the system refuses."""
    try:
        return call()
    except OSError:
        return -1
