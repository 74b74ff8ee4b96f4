"""A pass over state that is on a disk, group by group: while one is updated, the next is read and the last written.

[Note: groups] The elements of all shards are cut into groups of a bounded number of bytes. A group is a few parts, each
a run of one flat buffer's elements, and each array of a part (master values, moments) has a slot in the group's memory.
Where they are cut says [Note: cuts] in `plan.groups`. Three memories go around: one is read into, one is updated, one
is written from.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpizero.arrays.disk import page_aligned, whole_blocks
from mpizero.plan.groups import IN_MEMORY, cut_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpizero.arrays.disk import Region

__all__ = ["Array", "Bit", "Group", "Part", "Stream", "groups_of"]

IN_FLIGHT = 4
"""Reads, and writes, that are under way at a time."""


@dataclass(frozen=True, kw_only=True)
class Bit:
    """Name a run of elements of one parameter."""

    index: int
    """Of the parameter in its flat buffer."""
    start: int
    """The first element, counted within the rank's part of the flat buffer."""
    stop: int
    skip: int
    """Elements of the parameter's shard that are before it."""


@dataclass(frozen=True, kw_only=True)
class Array:
    """Be one array on disk that a pass goes over: an element for each of a flat buffer's."""

    region: Region
    dtype: torch.dtype
    written_only: bool = False
    """Whether the pass makes its values and needs no old ones."""


@dataclass(kw_only=True)
class Part:
    """Be a run of one flat buffer's elements."""

    flat: Any
    start: int
    stop: int
    bits: list[Bit]
    slots: dict[str, Tensor] = field(default_factory=dict)
    """By the arrays' names, their elements in memory, while the group is there."""
    memory: dict[str, memoryview] = field(default_factory=dict)
    """The same as bytes, to the end of their last blocks."""


Group = list[Part]
"""What is read, updated and written at a time."""

Moves = list[Future[None]]
"""Reads or writes of one group's slots."""


def groups_of(flats: Sequence[Any], most: int) -> list[Group]:
    """Cut this rank's part of flat buffers into groups.

    Args:
        flats: the buffers.
        most: elements of a group, as `plan.groups.elements_of` says.
    """
    bits = [_bits(flat) for flat in flats]
    runs = cut_groups((flat.master.numel() for flat in flats), most)
    return [[_part(flats[index], bits[index], start, stop) for index, start, stop in group] for group in runs]


def _part(flat: Any, bits: list[Bit], start: int, stop: int) -> Part:
    inside = [bit for bit in bits if start <= bit.start < stop or bit.start < start < bit.stop]
    return Part(flat=flat, start=start, stop=stop, bits=[_cut(bit, start, stop) for bit in inside])


def _bits(flat: Any) -> list[Bit]:
    """Return where each parameter's shard lies; one of no elements at the beginning."""
    found = []
    for index, slot in enumerate(flat.layout.slots):
        start, numel = slot.offset, slot.numel
        if flat.lifetime.cut:
            piece = flat.layout.piece(index, flat.comm.rank)
            start, numel = piece.position, piece.numel
        start = start if numel else 0
        found.append(Bit(index=index, start=start, stop=start + numel, skip=0))
    return found


def _cut(bit: Bit, start: int, stop: int) -> Bit:
    begin = max(bit.start, start)
    return Bit(index=bit.index, start=begin, stop=min(bit.stop, stop), skip=bit.skip + begin - bit.start)


class Stream:
    """Pass over groups; see [Note: groups]."""

    def __init__(self, arrays: Callable[[Any], dict[str, Array]]) -> None:
        """Go over these arrays.

        Args:
            arrays: returns those of a flat buffer, by name.
        """
        self._find = arrays
        self._now: dict[int, dict[str, Array]] = {}
        """What this pass goes over: a buffer may get more meanwhile."""
        self._memories: list[memoryview] = []
        self._readers = ThreadPoolExecutor(IN_FLIGHT, "mpizero disk read")
        self._writers = ThreadPoolExecutor(IN_FLIGHT, "mpizero disk write")

    def run(self, groups: Sequence[Group], update: Callable[[Group], None]) -> None:
        """Read, update and write all groups, in their order.

        Args:
            groups: those of which something changes.
            update: changes the slots of a group's parts; called in this thread.

        Raises:
            DiskError: if the disk fails; what was updated until then may be written or not.
        """
        self._now = {id(part.flat): self._find(part.flat) for group in groups for part in group}
        self._take_memory(groups)
        written: list[Moves] = [[] for _ in range(IN_MEMORY)]
        reading: Moves = []
        try:
            reading = self._begin(groups, 0, written)
            for number, group in enumerate(groups):
                now, reading = reading, self._begin(groups, number + 1, written)
                _await(now)
                update(group)
                written[number % IN_MEMORY] = self._write(group)
        finally:
            failures = [done.exception() for moves in (reading, *written) for done in moves]
        for failure in failures:
            if failure is not None:
                raise failure

    def _take_memory(self, groups: Sequence[Group]) -> None:
        need = max((self._bytes(group) for group in groups), default=0)
        if not self._memories or len(self._memories[0]) < need:
            self._memories = []  # the old ones first: there is not to be more than three
            self._memories = [page_aligned(need) for _ in range(IN_MEMORY)]

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory that it holds."""
        return sum(map(len, self._memories))

    def _bytes(self, group: Group) -> int:
        return sum(
            _blocks(part.stop - part.start, array) for part in group for array in self._arrays(part.flat).values()
        )

    def _arrays(self, flat: Any) -> dict[str, Array]:
        return self._now[id(flat)]

    def _begin(self, groups: Sequence[Group], number: int, written: list[Moves]) -> Moves:
        """Give the parts of a group their slots, and begin to fill them, once the memory's last group is written."""
        if number >= len(groups):
            return []
        memory, before, at, moves = self._memories[number % IN_MEMORY], written[number % IN_MEMORY], 0, []
        for part in groups[number]:
            for name, array in self._arrays(part.flat).items():
                nbytes = _blocks(part.stop - part.start, array)
                slot = memory[at : at + nbytes]
                at += nbytes
                start = part.start * array.dtype.itemsize
                moves.append(self._readers.submit(_fill, before, array, slot, start))
                part.memory[name] = slot
                part.slots[name] = torch.frombuffer(slot, dtype=array.dtype, count=part.stop - part.start)
        return moves

    def _write(self, group: Group) -> Moves:
        """Begin to write the slots of a group, which lets them go."""
        moves = []
        for part in group:
            for name, slot in part.memory.items():
                array = self._arrays(part.flat)[name]
                moves.append(self._writers.submit(array.region.write, slot, part.start * array.dtype.itemsize))
            part.slots.clear()
            part.memory.clear()
        return moves


def _fill(before: Moves, array: Array, slot: memoryview, start: int) -> None:
    _await(before)
    if not array.written_only:
        array.region.read(slot, start)


def _await(moves: Moves) -> None:
    """Wait for reads or writes; raise what the first that failed has raised."""
    for move in moves:
        move.result()


def _blocks(numel: int, array: Array) -> int:
    """Return the bytes of whole blocks for so many elements: the last of a region has room to its end."""
    return whole_blocks(numel * array.dtype.itemsize)
