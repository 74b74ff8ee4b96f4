"""Where each parameter lies in the flat buffer of its unit, and which part of it each rank holds.

[Note: unit layout] Every parameter starts on a multiple of 64 elements and a shard's length is a multiple of 64, so a
parameter is only ever cut at a multiple of 64 of its own elements: torch's fused optimizers give other bits for a slice
that is cut elsewhere. The layout is the same at every stage; stage 0 merely does not cut it. Padding is zero and is
never saved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpizero.errors import ArgumentError, must_be

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ALIGNMENT", "Layout", "Piece", "Slot", "layout_of"]

ALIGNMENT = 64
"""Elements."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Place one parameter in its unit's flat buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int
    """The flat buffer's element at which the parameter begins."""

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """Return the flat buffer's element after the parameter's last one."""
        return self.offset + self.numel


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Name the elements of one parameter that lie in one rank's shard; none where start equals stop."""

    start: int
    """The first element, counted within the parameter."""
    stop: int
    position: int
    """Where the piece begins within the shard."""

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Hold the slots of one flat buffer and how it is cut into shards of equal length."""

    slots: tuple[Slot, ...]
    ranks: int
    shard_length: int
    """Elements of one rank's shard, a multiple of `ALIGNMENT`."""

    @property
    def length(self) -> int:
        """Return the elements of the flat buffer, padding included."""
        return self.shard_length * self.ranks

    @property
    def numel(self) -> int:
        """Return the elements of all parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    def piece(self, index: int, rank: int) -> Piece:
        """Return the part of parameter `index` that lies in the shard of `rank`."""
        slot, begin = self.slots[index], rank * self.shard_length
        low = min(max(slot.offset, begin), slot.stop)
        high = max(min(slot.stop, begin + self.shard_length), low)
        position = low - begin if high > low else 0
        return Piece(start=low - slot.offset, stop=high - slot.offset, position=position)

    def gaps(self) -> list[tuple[int, int]]:
        """Return the ranges of padding, as (start, stop) in elements of the flat buffer."""
        stops = [0, *(slot.stop for slot in self.slots)]
        starts = [*(slot.offset for slot in self.slots), self.length]
        return [(low, high) for low, high in zip(stops, starts, strict=True) if high > low]


def layout_of(parameters: Sequence[tuple[str, tuple[int, ...]]], ranks: int) -> Layout:
    """Lay out parameters, in the given order, for `ranks` shards.

    Args:
        parameters: (name, shape) of each; shapes may be () or hold zeros.
        ranks: the number of shards, at least 1.

    Example: shapes (7, 5) and (7,) on 2 ranks start at 0 and 64; the buffer has 128 elements, 64 for each rank.
    """
    if ranks < 1:
        raise ArgumentError(must_be("ranks", "at least 1", ranks))
    slots, position = [], 0
    for name, shape in parameters:
        slots.append(Slot(name=name, shape=tuple(shape), offset=position))
        position = _round_up(slots[-1].stop, ALIGNMENT)
    return Layout(slots=tuple(slots), ranks=ranks, shard_length=_round_up(position, ALIGNMENT * ranks) // ranks)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
