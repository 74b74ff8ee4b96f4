"""Collectives on device memory through the host: copied out, taken by the host's own collective, and copied in.

The pieces are pipelined: while one is summed between the ranks, the next is copied from the device and the one before
is copied back, each on a stream of its own. So the whole takes as long as its longest part, which is the host's for any
but the slowest bus. Where all ranks are on one host, the pieces lie in memory that all have mapped, and the host's part
is loads and stores.

Steps and bytes are those of the host's collective, and S bytes over the bus each way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpizero.arrays import View, dtype_named
from mpizero.collectives.buffers import Line, Square
from mpizero.collectives.on_host import plan_on_host
from mpizero.collectives.registry import OPERATIONS
from mpizero.collectives.schedule import even_offsets
from mpizero.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from mpizero.arrays import Event
    from mpizero.collectives.route import Plan, Route
    from mpizero.comm.side import DeviceSide
    from mpizero.typing import Wait

__all__ = ["Staged"]

SLOT = 8 << 20
"""Bytes of a piece, of input or of output: large beside the 20 us in which a copy is started and found done, and small
enough that a piece of every rank stays in the host's last cache."""
SLOTS = 3
"""Pieces under way: one on its way out, one at the host, one on its way in."""


class Staged:
    """Be one collective through the host with everything decided but the buffers; may be run again."""

    def __init__(self, route: Route, side: DeviceSide, name: str) -> None:
        """Decide what can be decided.

        Args:
            route: the call, but for its arrays.
            side: what the communicator keeps on the device.
            name: the algorithm of the host's collectives.
        """
        self.route, self.side, self.name = replace(route, device=None), side, name
        self.memory = side.pinned_room("staged", 2 * SLOTS * SLOT)
        self.what = f"{route.operation.name} (staged)"
        traits = route.operation
        self.is_line = traits.input in {"whole", "root"} and traits.output in {"whole", "root"}
        self.streams = [side.stream, side.out_stream]
        """The streams on which it works."""
        self._plans: dict[tuple[int, ...], Plan] = {}

    def steps(self, source: View, output: View) -> Iterator[Wait]:
        """Run it once, step by step."""
        longest = self.route.layout.longest
        if isinstance(self.route.layout, Square) and self.route.uneven:
            longest = yield from self._agree(longest)
        pieces = self._lines(source, output) if self.is_line else self._chunks(source, output, longest)
        coming: dict[int, Event] = {}
        going: dict[int, Event] = {}
        for ahead in range(min(SLOTS - 1, len(pieces))):
            coming[ahead] = self._bring(pieces[ahead], ahead, None)
        for number, piece in enumerate(pieces):
            yield self.side.reached(coming.pop(number), self.what)
            slot = number % SLOTS
            given = self._view(slot, 0, piece.given)
            in_place = not piece.apart and piece.taken == piece.given
            yield from piece.plan.steps(given, given if in_place else self._view(slot, piece.apart, piece.taken))
            going[slot] = self._take(piece, slot)
            following = number + SLOTS - 1
            if following < len(pieces):
                coming[following] = self._bring(
                    pieces[following], following % SLOTS, going.pop(following % SLOTS, None)
                )

    def _agree(self, longest: int) -> Generator[Wait, None, int]:
        """Return the longest chunk of all ranks."""
        word = View(np.array([longest], np.int64), dtype_named("int64"))
        route = replace(
            self.route,
            operation=OPERATIONS["all_reduce"],
            dtype=word.dtype,
            op="max",
            layout=Line(even_offsets(1, self.route.comm.size)),
            total=1,
            uneven=(),
        )
        yield from plan_on_host(route, route.choose("auto")).steps(word, word)
        return int(word.data[0])

    def _bring(self, piece: _Piece, slot: int, behind: Event | None) -> Event:
        """Start the copy of a piece's input to the host, behind the copy of the slot's last result to the device."""
        stream = self.side.stream
        if behind is not None:
            stream.wait(behind)
        view = self._view(slot, 0, piece.given)
        at = 0
        for run in piece.brings:
            self.side.device.copy(view.data[at : at + run.count], run.data, stream)
            at += run.count
        return stream.record()

    def _take(self, piece: _Piece, slot: int) -> Event:
        """Start the copy of a piece's result to the device."""
        stream = self.side.out_stream
        view = self._view(slot, piece.apart, piece.taken)
        at = 0
        for run in piece.takes:
            self.side.device.copy(run.data, view.data[at : at + run.count], stream)
            at += run.count
        return stream.record()

    def _view(self, slot: int, apart: int, count: int) -> View:
        """Return elements of a slot: of its first half, or of its second where the result lies apart."""
        start = (2 * slot + apart) * SLOT
        dtype = self.route.dtype
        return View(self.memory[start : start + count * dtype.itemsize].view(dtype.storage), dtype)

    def _lines(self, source: View, output: View) -> list[_Piece]:
        """Cut a collective on whole buffers."""
        room, total = SLOT // self.route.dtype.itemsize, self.route.total
        rank, size, traits = self.route.comm.rank, self.route.comm.size, self.route.operation
        is_root = not traits.rooted or rank == self.route.root
        takes = traits.output == "whole" or is_root
        pieces = []
        for start in range(0, total, room):
            stop = min(start + room, total)
            count = stop - start
            gives = traits.input != "root" or is_root
            given = output if traits.input == "root" else source
            brings = [given.part(start, stop)] if gives else []
            into = [output.part(start, stop)] if takes and not (traits.input == "root" and is_root) else []
            plan = self._plan((count,), Line(even_offsets(count, size)), count)
            # In place on the host: what is summed is not needed any more.
            pieces.append(_Piece(brings, into, count, count if takes else 0, 0, plan))
        return pieces

    def _chunks(self, source: View, output: View, longest: int) -> list[_Piece]:
        """Cut a collective on chunks: a piece is the same part of every chunk."""
        room = SLOT // self.route.dtype.itemsize // self.route.comm.size or 1
        return [self._part(source, output, start, room) for start in range(0, longest, room)]

    def _part(self, source: View, output: View, start: int, room: int) -> _Piece:
        layout, size, rank = self.route.layout, self.route.comm.size, self.route.comm.rank
        traits, root = self.route.operation, self.route.root

        def length(chunk: int) -> int:
            return max(0, min(room, layout.length(chunk) - start))

        def cut(view: View, at: int, chunk: int) -> View:
            return view.part(at + start, at + start + length(chunk)) if length(chunk) else view.part(0, 0)

        if isinstance(layout, Square):
            leaving = [rank * size + peer for peer in range(size)]
            arriving = [peer * size + rank for peer in range(size)]
            brings = [cut(source, layout.input_at(chunk), chunk) for chunk in leaving]
            takes = [cut(output, layout.output_at(chunk), chunk) for chunk in arriving]
            ends = _offsets([length(chunk) for chunk in leaving]), _offsets([length(chunk) for chunk in arriving])
            inner = Square(rank, size, *ends, alike=layout.alike)
            plan = self._plan((*ends[0], *ends[1]), inner, ends[0][-1])
            return _Piece(brings, takes, ends[0][-1], ends[1][-1], 1, plan)
        everything = list(range(size))
        is_root = not traits.rooted or rank == root
        given = [rank] if traits.input == "chunk" else everything if traits.input == "whole" or is_root else []
        taken = [rank] if traits.output == "chunk" else everything if is_root else []
        brings = [cut(source, layout.input_at(chunk), chunk) for chunk in given]
        takes = [cut(output, layout.output_at(chunk), chunk) for chunk in taken]
        offsets = _offsets([length(chunk) for chunk in everything])
        line = Line(
            offsets,
            offsets[rank] if traits.input == "chunk" else 0,
            offsets[rank] if traits.output == "chunk" else 0,
        )
        counts = sum(view.count for view in brings), sum(view.count for view in takes)
        return _Piece(brings, takes, *counts, 1, self._plan(tuple(offsets), line, offsets[-1]))

    def _plan(self, key: tuple[int, ...], layout: Line | Square, total: int) -> Plan:
        """Return the host's plan for a piece of such lengths."""
        if key not in self._plans:
            size = self.route.comm.size
            even = isinstance(layout, Line) and layout.offsets == even_offsets(total, size)
            even = even or (isinstance(layout, Square) and layout.alike)
            route = replace(self.route, layout=layout, total=total, uneven=() if even else key)
            try:
                name = route.choose(self.name)
            except ArgumentError:  # the algorithm that was asked for takes even pieces alone
                name = route.choose("auto")
            self._plans[key] = plan_on_host(route, name)
        return self._plans[key]


class _Piece(NamedTuple):
    """Be what is at the host at a time."""

    brings: list[View]
    takes: list[View]
    given: int
    """Elements of the input on the host."""
    taken: int
    """Elements of the result on the host."""
    apart: int
    """1 where the result lies apart from the input."""
    plan: Plan


def _offsets(lengths: list[int]) -> list[int]:
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return offsets
