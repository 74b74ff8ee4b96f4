"""The reductions of a step: in what memory gradients wait, and which of them travel together.

It follows `mpizero.shard.reductions`, whose notes say why: room in the node's shared memory for the root and two units,
small units in buckets, at most two reductions under way where they hold memory of their own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpizero.plan.ledger import Move
from mpizero.plan.moved import HOST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpizero.plan.flats import Flat
    from mpizero.plan.ledger import Ledger
    from mpizero.plan.setup import Setup

__all__ = ["AT_ONCE", "ROOMS", "Buckets"]

ROOMS = 2
"""Units beside the root whose gradients have room that peers can read."""
AT_ONCE = 2
"""Reductions under way at a time where gradients are cut, and on a GPU: each holds a unit's gradients."""


@dataclass(kw_only=True)
class _Taken:
    """Be the gradients of one flat buffer that are about to be reduced."""

    unit: int
    flat: Flat
    width: int
    """Bytes of an element."""
    private: int
    """Bytes outside of rooms and accumulators."""
    kept: bool
    """Whether they lie in what `no_sync` has kept."""

    @property
    def nbytes(self) -> int:
        return self.flat.length * self.width


@dataclass(kw_only=True)
class _Job:
    """Be a reduction under way."""

    units: set[int]
    flying: int
    kept: int


class Buckets:
    """Collect the gradients of one backward and reduce them."""

    def __init__(self, flats: Sequence[Sequence[Flat]], setup: Setup, ledger: Ledger) -> None:
        """Make room.

        Args:
            flats: of each unit, the root's last.
            setup: the job.
            ledger: the books.
        """
        self._flats, self._setup, self._ledger = flats, setup, ledger
        self._bytes = [sum(flat.gradient_bytes for flat in unit) for unit in flats]
        self._rooms: list[int] = []
        if setup.rooms:
            *units, root = self._bytes
            sizes = [root, *[max(units, default=0)] * min(ROOMS, len(units))]
            self._rooms = [nbytes for nbytes in sizes if nbytes >= setup.bucket_bytes]
        self._largest = max(self._rooms, default=0)
        self.room_bytes = sum(self._rooms)
        """Bytes of shared memory in which this rank's gradients are collected, always there."""
        self._lent: dict[int, int] = {}
        self._private: dict[int, list[int]] = {}
        """By unit, the bytes of its buffers' gradients that have arrived outside of rooms and accumulators."""
        self._jobs: deque[_Job] = deque()
        self._held: list[int] = []
        self._first = True

    def arrive(self, unit: int) -> None:
        """Have all gradients of a unit come."""
        self._lend(unit)
        places = []
        for flat in self._flats[unit]:
            in_place = not self._setup.cut and flat.reduce == flat.master and not self._ledger.kept
            places.append(0 if in_place or unit in self._lent else flat.gradient_bytes)
        self._private[unit] = places
        self._ledger.add(flying=sum(places))

    def _lend(self, unit: int) -> None:
        needed = self._bytes[unit]
        if not self._setup.bucket_bytes <= needed <= self._largest:
            return
        while not (fitting := [room for room in self._rooms if room >= needed]) and self._jobs:
            self._finish_first()
        if fitting:
            self._rooms.remove(min(fitting))
            self._lent[unit] = min(fitting)

    def start(self, unit: int) -> None:
        """Reduce a unit, or hold it until the bucket is full."""
        if not self._bytes[unit]:
            return
        self._held.append(unit)
        if self._first or sum(self._bytes[held] for held in self._held) >= self._setup.bucket_bytes:
            self.flush()

    def flush(self) -> None:
        """Begin to reduce what is held."""
        units, self._held, self._first = self._held, [], False
        taken = [one for unit in units for one in self._take(unit)]
        if self._setup.ranks == 1:
            self._ledger.add(flying=-sum(one.private for one in taken), kept=-sum(_kept(one) for one in taken))
            if taken and self._carried(taken):
                self._ledger.act("reduce", taken[0].unit, (), self._carried(taken))
                self._ledger.act("reduced", -1)
            return
        at_once = AT_ONCE if len(units) == 1 else 1
        freed = 0
        for width in dict.fromkeys(one.width for one in taken):
            alike = [one for one in taken if one.width == width]
            while len(self._jobs) >= at_once and self._is_bounded(alike):
                self._finish_first()
            freed += self._launch(alike, set(units))
        self._ledger.add(flying=-freed)  # what was packed, or widened, goes when all are launched

    def _take(self, unit: int) -> list[_Taken]:
        """Return a unit's gradients, with what `no_sync` has kept of them."""
        found = []
        for flat, private in zip(self._flats[unit], self._private.pop(unit), strict=True):
            if not flat.trained:
                continue
            kept = self._ledger.kept > 0
            if kept:
                self._ledger.add(flying=-private)
            width = flat.master if kept else flat.reduce
            found.append(_Taken(unit=unit, flat=flat, width=width, private=0 if kept else private, kept=kept))
        return found

    def _is_bounded(self, alike: list[_Taken]) -> bool:
        in_place = len(alike) == 1 and not alike[0].private and not alike[0].kept
        return self._setup.cut or (self._setup.on_gpu and not in_place)

    def _launch(self, alike: list[_Taken], units: set[int]) -> int:
        """Begin one reduction; return the bytes of its operands that it does not hold itself."""
        setup, first = self._setup, alike[0]
        packed = len(alike) > 1
        nbytes, width = sum(one.nbytes for one in alike), first.width
        own, kept = sum(one.private for one in alike), sum(_kept(one) for one in alike)
        flying, freed = own, 0
        if packed:
            flying, freed = nbytes, own
        if setup.hybrid and width != first.flat.master:  # partial sums are fp32
            freed += flying
            nbytes = nbytes // width * first.flat.master
            flying, width = nbytes, first.flat.master
        fresh = not packed and not first.kept and first.width == first.flat.master
        if setup.cut and not fresh:
            flying += nbytes // setup.shards
        self._ledger.add(flying=flying + freed - own)
        if packed and kept:  # the kept ones go with the other operands
            self._ledger.add(kept=-kept)
            kept = 0
        moves = [Move("reduce_scatter" if setup.cut else "all_reduce", nbytes, setup.shards)]
        if setup.hybrid:
            moves.append(Move("all_reduce", nbytes // setup.shards, setup.ranks // setup.shards, across=True))
        self._ledger.act("reduce", first.unit, tuple(moves), self._carried(alike))
        self._jobs.append(_Job(units=units, flying=flying, kept=kept))
        return freed

    def _carried(self, taken: list[_Taken]) -> int:
        """Return the bytes of reduced gradients that go to host memory."""
        moved = self._setup.offload
        if moved is None or moved.optimizer != HOST:
            return 0
        return sum(one.flat.shard * (one.flat.master if self._setup.hybrid else one.width) for one in taken)

    def finish(self) -> None:
        """Reduce what is held and wait for all."""
        self.flush()
        while self._jobs:
            self._finish_first()
        self._first = True

    def _finish_first(self) -> None:
        job = self._jobs.popleft()
        self._ledger.act("reduced", -1)
        self._ledger.add(flying=-job.flying, kept=-job.kept)
        for unit in job.units - {unit for other in self._jobs for unit in other.units}:
            if unit in self._lent:
                self._rooms.append(self._lent.pop(unit))


def _kept(taken: _Taken) -> int:
    return taken.nbytes if taken.kept else 0
