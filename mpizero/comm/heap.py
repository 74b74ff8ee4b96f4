"""Symmetric buffers: memory of one rank that the host's other ranks can load and store like their own.

A heap is made of segments (see `segment`), each with an equal share for every rank. All ranks allocate in the same
order and of the same size, so a block lies at the same place of every rank's share. A block is free again when its
array has been dropped on every rank, which is found out at the next allocation, in which all ranks take part anyway.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from mpizero.comm.segment import PAGE, share

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["Heap", "Mappings", "Place", "mappings"]

ALIGN = 64
SMALLEST = 1 << 20
"""Bytes of a rank's share of a segment, at least."""


class Place(NamedTuple):
    """Say where an array lies: `start` bytes into the segment `key`."""

    key: int
    start: int


class Mappings:
    """Know every segment that this process has mapped, or opened."""

    def __init__(self) -> None:
        self._segments: dict[int, Any] = {}
        self.version = 0
        """Changes whenever an address may mean something else."""

    def add(self, segment: Any) -> None:
        """Remember a segment."""
        self.version += 1
        self._segments[segment.key] = segment

    def drop(self, segment: Any) -> None:
        """Forget a segment; its memory goes when its last array does."""
        self.version += 1
        self._segments.pop(segment.key, None)

    def find(self, address: int, nbytes: int, pids: frozenset[int]) -> Place | None:
        """Return where the bytes from `address` on lie; None unless all processes of `pids` have mapped them."""
        for segment in self._segments.values():
            if segment.start <= address and address + nbytes <= segment.stop:
                return Place(segment.key, address - segment.start) if pids <= segment.pids else None
        return None

    def segment(self, key: int) -> Any:
        """Return a segment that `find` gave to some rank."""
        return self._segments[key]


@cache
def mappings() -> Mappings:
    """Return the process's table of segments."""
    return Mappings()


class _Span(NamedTuple):
    """Be a piece of every rank's share of a segment."""

    segment: Any
    """A `Segment`, or a `DeviceSegment`."""
    start: int
    stop: int


class Heap:
    """Give out symmetric buffers to the ranks of one host."""

    def __init__(
        self,
        mpi_comm: Any,
        make: Callable[[Any, int], Any] = share,
        table: Any = None,
        meet: Callable[[], None] | None = None,
    ) -> None:
        """Give out pieces of segments.

        Args:
            mpi_comm: an mpi4py communicator whose ranks run on one host.
            make: makes a segment of so many bytes per rank, or None on all ranks; collective.
            table: where segments are remembered, `mappings()` by default.
            meet: waits for all ranks; called ahead of each allocation.
        """
        self._await_all = meet
        self._comm, self._make = mpi_comm, make
        self._table = mappings() if table is None else table
        self._used: dict[int, _Span] = {}
        self._segments: list[Any] = []
        self._dead: set[int] = set()
        self._count = 0

    def allocate(self, nbytes: int) -> Any:
        """Return `nbytes` bytes of this rank; None, on all ranks, where no segment can be made for them. Collective.

        Every rank must ask for the same number; the largest is given where they differ.
        """
        if self._await_all is not None:
            self._await_all()
        asked = self._comm.allgather((nbytes, tuple(self._dead)))
        size = -(-max(1, *(number for number, _ in asked)) // ALIGN) * ALIGN
        for number in set.intersection(*(set(dead) for _, dead in asked)):
            del self._used[number]
            self._dead.discard(number)
        span = self._find(size) or self._grow(size)
        if span is None:
            return None
        self._count += 1
        self._used[self._count] = span
        owner, array = span.segment.take(self._comm.rank, span.start, size)
        weakref.finalize(owner, self._dead.add, self._count).atexit = False
        return array[:nbytes]

    def close(self) -> None:
        """Forget the segments; arrays that are still in use keep their memory."""
        for segment in self._segments:
            self._drop(segment)
        self._segments.clear()

    def _drop(self, segment: Any) -> None:
        self._table.drop(segment)
        segment.close(self._comm)

    def _find(self, size: int) -> _Span | None:
        """Return the first gap between used spans that is large enough: the same on all ranks."""
        for segment in self._segments:
            at = 0
            for used in sorted(span for span in self._used.values() if span.segment is segment):
                if used.start - at >= size:
                    break
                at = used.stop
            if segment.share - at >= size:
                return _Span(segment, at, at + size)
        return None

    def _grow(self, size: int) -> _Span | None:
        """Make a new segment, after those that nobody uses have been let go."""
        live = {span.segment.key for span in self._used.values()}
        for segment in self._segments:
            if segment.key not in live:
                self._drop(segment)
        self._segments = [segment for segment in self._segments if segment.key in live]
        made = self._make(self._comm, max(-(-size // PAGE) * PAGE, SMALLEST))
        if made is None and size < SMALLEST:
            made = self._make(self._comm, -(-size // PAGE) * PAGE)
        if made is None:
            return None
        self._segments.append(made)
        self._table.add(made)
        return _Span(made, 0, size)
