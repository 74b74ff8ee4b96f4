"""How state that is on a disk is cut into the groups in which an optimizer's step streams through it.

[Note: cuts] Groups are cut at multiples of `CUT` elements, so that what is read and written are whole blocks of the
disk, and an update has the bits that it has over the whole; see [Note: unit layout] in `layout`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mpizero.arrays.disk import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["CUT", "GROUP_BYTES", "IN_MEMORY", "LEAST", "Run", "cut_groups", "elements_of"]

CUT = BLOCK // 2
"""Elements: a whole block of 2-byte values, two of 4-byte ones."""
IN_MEMORY = 3
"""Groups in memory: one that is read into, one that is updated, one that is written from."""
GROUP_BYTES = 8 << 20
"""Bytes of a group where nobody says otherwise."""
LEAST = 16 * BLOCK
"""Bytes that a group has at least."""


class Run(NamedTuple):
    """Name a run of elements of one buffer."""

    buffer: int
    """The number of the buffer, from 0."""
    start: int
    stop: int


def elements_of(group_bytes: int, width: int) -> int:
    """Return the elements of a group, whose arrays have so many bytes for each of them together."""
    return max(group_bytes // max(width, 8) // CUT * CUT, CUT)


def cut_groups(lengths: Iterable[int], most: int) -> list[list[Run]]:
    """Return groups of runs, which cover buffers of these lengths in their order.

    Args:
        lengths: elements of each buffer.
        most: elements of a group, a multiple of `CUT`; a run of fewer counts as whole cuts.
    """
    groups: list[list[Run]] = []
    room = 0
    for number, length in enumerate(lengths):
        start = 0
        while start < length:
            if room < min(CUT, length - start):
                groups.append([])
                room = most
            stop = min(length, start + room)
            groups[-1].append(Run(number, start, stop))
            room -= -(-(stop - start) // CUT) * CUT
            start = stop
    return groups
