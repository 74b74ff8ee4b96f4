"""What a disk carries: large unbuffered reads and writes, as an offloaded optimizer's step makes them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpizero.arrays.disk import Scratch, page_aligned

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["PIECE", "DiskSpeed", "measure_disk"]

PIECE = 32 << 20
"""Bytes of one read or write: a group's, see `Offload.group_bytes`."""
PIECES = 12


@dataclass(frozen=True, kw_only=True)
class DiskSpeed:
    """Hold one process's bytes per second."""

    read: float
    write: float
    both: float
    """Read and written, each, when both go on at once."""
    unbuffered: bool
    """Whether the page cache was passed by."""
    in_memory: bool = False
    """Whether it is no disk, but a file system in memory."""


def measure_disk(folder: Path, *, piece: int = PIECE, pieces: int = PIECES) -> DiskSpeed:
    """Measure a folder's disk, in a second or a few; leaves nothing behind.

    Args:
        folder: on the disk.
        piece: bytes at a time, a multiple of 4096.
        pieces: how many of them; so many bytes are taken, twice over.

    Raises:
        DiskError: if there is no room for it, or no right.
    """
    scratch = Scratch(folder)
    regions = scratch.grow(piece * pieces), scratch.grow(piece * pieces)
    memories = [page_aligned(piece)[:piece] for _ in regions]
    for memory in memories:
        memory[:] = bytes(range(256)) * (piece // 256)
    for region, memory in zip(regions, memories, strict=True):  # the first writes of a file take longer
        _pass(region.write, memory, pieces)
    write = _rate(lambda: _pass(regions[0].write, memories[0], pieces), piece * pieces)
    for region in regions:
        region.forget()
    read = _rate(lambda: _pass(regions[0].read, memories[0], pieces), piece * pieces)
    with ThreadPoolExecutor(2) as threads:

        def at_once() -> None:
            jobs = [
                threads.submit(_pass, regions[0].read, memories[0], pieces),
                threads.submit(_pass, regions[1].write, memories[1], pieces),
            ]
            for job in jobs:
                job.result()

        both = _rate(at_once, piece * pieces)
    return DiskSpeed(read=read, write=write, both=both, unbuffered=scratch.unbuffered, in_memory=scratch.in_memory)


def _rate(call: Callable[[], None], nbytes: int) -> float:
    start = time.perf_counter()
    call()
    return nbytes / (time.perf_counter() - start)


def _pass(move: Callable[[memoryview, int], None], memory: memoryview, pieces: int) -> None:
    for number in range(pieces):
        move(memory, number * len(memory))
