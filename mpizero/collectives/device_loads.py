"""Collectives by loads and stores between the GPUs of one host: kernels that read and write the peers' memory.

Symmetric buffers (`mpizero.empty(..., device="cuda")`) are read and written where they lie, in one phase, as on the
host: see `loads`. Any other memory goes through windows, a piece at a time: every rank copies its piece into its
window, all meet, and every rank's kernel loads what it needs from all windows (one-shot); an all-reduce or a reduce
over more than two ranks and `ONE_SHOT` bytes is cut once more, so that every rank sums its part of a piece, all meet
again, and the parts are gathered (two-shot). Ranks meet on the host, through the board: kernels never wait for one
another, since the processes that share a GPU take turns on it.

[Note: windows] A window has two halves, used by collectives of even and of odd number on the board. A rank fills a
half again two collectives later, and comes there only after all have arrived at the one between, which they did after
their kernels had read the first. So each piece needs one meeting, and a rank waits for its kernels before it arrives
anywhere.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from mpizero.arrays import View, address_of
from mpizero.collectives.agree import check_records
from mpizero.collectives.buffers import Square
from mpizero.collectives.loads import tasks
from mpizero.collectives.registry import OPERATIONS
from mpizero.collectives.schedule import even_offsets
from mpizero.comm import device_mappings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpizero.arrays import DeviceArray
    from mpizero.collectives.buffers import Arithmetic, Layout
    from mpizero.collectives.phase import Meeting
    from mpizero.comm.board import Board
    from mpizero.comm.side import DeviceSide
    from mpizero.typing import CommunicatorLike, Wait

__all__ = ["ONE_SHOT", "DeviceLoads", "meet"]

ONE_SHOT = 256 << 10
"""Bytes of a piece up to which every rank sums all of it: the second meeting of two-shot costs more than the loads that
it saves."""
_ABSENT, _PRIVATE = 0, 2
"""What a record says in place of a segment's key, which is odd."""


class DeviceLoads:
    """Be one collective with everything decided but the buffers; may be run again."""

    def __init__(self, side: DeviceSide, meeting: Meeting, layout: Layout, arithmetic: Arithmetic) -> None:
        """Decide what can be decided.

        Args:
            side: what the communicator keeps on the device, with windows.
            meeting: which collective.
            layout: where this rank's chunks lie.
            arithmetic: what is done with them.
        """
        self.side, self.meeting, self.layout = side, meeting, layout
        self.dtype, self.op, self.divisor = arithmetic
        self.traits = OPERATIONS[meeting.operation]
        self.rank, self.size = side.comm.rank, side.comm.size
        self.board: Board = side.comm.board
        self.stats = side.comm.transport.stats
        self.streams = [side.stream]
        """The streams on which it works."""
        self.is_root = not self.traits.rooted or self.rank == meeting.root

    def steps(self, source: View, output: View) -> Iterator[Wait]:
        """Run it once, step by step.

        Raises:
            CollectiveError: on every rank, where the ranks' records differ.
        """
        board = self.board
        with board.collective:
            places = [*self._place(source), *self._place(output)]
            if any(key > _PRIVATE for key in places[::2]):
                yield self._quiet()  # peers may load and store it as soon as they know of it
            self._come(places)
            yield board.all_arrived(self.meeting.what, self.stats)
            check_records(board)
            mapped, longest = self._what_all_have()
            if mapped:
                self._phase(source, output)
                yield self._quiet()
                board.finish()
                yield board.all_finished(self.meeting.what, self.stats)
        if not mapped:
            yield from self._by_windows(source, output, longest)

    def _quiet(self) -> Wait:
        """Return the wait for all that this rank's stream was given."""
        return self.side.reached(self.side.stream.record(), self.meeting.what)

    def _place(self, view: View) -> tuple[int, int]:
        if not view.count:
            return _ABSENT, 0
        found = device_mappings().find(address_of(view.data), view.data.nbytes, self.board.pids)
        return (_PRIVATE, 0) if found is None else found

    def _come(self, places: list[int]) -> None:
        """Post this rank's record: what it calls, the places of its input and its output, its longest chunk."""
        board = self.board
        at = board.records[board.number & 1][board.rank]
        channel = self.side.comm.channel_number
        words = [self.meeting.signature, channel << 32 | self.meeting.extra, *places, self.layout.longest]
        for number, word in enumerate(words):
            board.words[at + number] = word
        board.arrive()

    def _what_all_have(self) -> tuple[bool, int]:
        """Return whether all buffers are symmetric ones, and the elements of the longest chunk of all."""
        words, records = self.board.words, self.board.records[self.board.number & 1]
        plain = not (isinstance(self.layout, Square) and not self.layout.alike)
        mapped = plain and all(words[at + field] != _PRIVATE for at in records for field in (2, 4))
        return mapped, max(words[at + 6] for at in records)

    def _phase(self, source: View, output: View) -> None:
        """Start this rank's tasks on all ranks' buffers, where they lie."""
        kernels, stream = self.side.device.kernels, self.side.stream.handle
        for task in tasks(self.meeting.operation, self.size, self.rank, self.meeting.root):
            length = self.layout.length(task.chunk)
            given = [self._given(rank, task.chunk, length, source) for rank in task.sources]
            targets = [self._taken(rank, task.chunk, length, output) for rank in task.targets]
            self.stats.bytes_loaded += (
                length * self.dtype.itemsize * sum(rank != self.rank for rank in (*task.sources, *task.targets))
            )
            if not self.traits.reduces:
                targets = [view for view in targets if address_of(view.data) != address_of(given[0].data)]
            if length and targets:
                kernels.reduce(self.op if self.traits.reduces else "copy", targets, given, self.divisor, stream)

    def _given(self, rank: int, chunk: int, length: int, source: View) -> View:
        start = self.layout.input_at(chunk) if rank == self.rank else self._start(chunk, self.traits.input)
        return source.part(start, start + length) if rank == self.rank else self._theirs(rank, 2, start, length)

    def _taken(self, rank: int, chunk: int, length: int, output: View) -> View:
        start = self.layout.output_at(chunk) if rank == self.rank else self._start(chunk, self.traits.output)
        return output.part(start, start + length) if rank == self.rank else self._theirs(rank, 4, start, length)

    def _start(self, chunk: int, kind: str) -> int:
        """Return the element of a peer's buffer at which a chunk begins."""
        if isinstance(self.layout, Square):
            return int(self.layout.leaving[self.rank])  # what a peer has for this rank: all cut alike
        offsets: list[int] = self.layout.offsets  # type: ignore[attr-defined]  # else it is a line
        return 0 if kind == "chunk" else int(offsets[chunk])

    def _theirs(self, peer: int, field: int, start: int, length: int) -> View:
        at = self.board.records[self.board.number & 1][peer] + field
        key, place = self.board.words[at : at + 2]
        width = self.dtype.itemsize
        first = place + start * width
        memory = device_mappings().segment(key).memory[self.side.pids[peer]][first : first + length * width]
        return View(memory.view(self.dtype.storage), self.dtype)

    def _by_windows(self, source: View, output: View, longest: int) -> Iterator[Wait]:
        """Take all pieces through the windows; the next one is copied in behind the kernels of the one before."""
        pieces = self._pieces(source, output, longest)
        if not pieces:
            return
        first = pieces[0]
        self._bring(first, (self.board.number + 1) & 1)
        yield self._quiet()
        for piece, following in zip(pieces, [*pieces[1:], None], strict=True):
            with self.board.collective:
                half = self.board.number & 1
                yield from meet(self.side.comm, self.meeting, self.meeting.what)
                if piece.parts is not None:
                    self._sum_part(piece, half)
                    yield self._quiet()
                    self.board.finish()
                    yield self.board.all_finished(self.meeting.what, self.stats)
                self._take(piece, half)
                if following is not None:
                    self._bring(following, 1 - half)
                yield self._quiet()

    def _pieces(self, source: View, output: View, longest: int) -> list[_Piece]:
        """Cut the collective in pieces that fit in half a window; equally many on all ranks."""
        room = self.side.window // self.dtype.itemsize
        if self.traits.input in {"whole", "root"} and self.traits.output in {"whole", "root"}:
            total = self.layout.offsets[-1]  # type: ignore[attr-defined]
            return [self._line(source, output, at, min(at + room, total)) for at in range(0, total, room)]
        step = room if self.traits.input == "chunk" else room // self.size // 64 * 64
        return [self._chunks(source, output, at, step) for at in range(0, longest, step)]

    def _line(self, source: View, output: View, start: int, stop: int) -> _Piece:
        """Return the piece of elements [start, stop) of a whole buffer."""
        count, root = stop - start, self.meeting.root
        gives = self.traits.input != "root" or self.is_root
        given = output if self.traits.input == "root" else source  # a broadcast's root has its input in place
        brings = [_Run(given.part(start, stop), 0)] if gives and given.count else []
        takes = self.traits.output == "whole" or self.is_root
        into = output.part(start, stop) if takes and output.count else None
        if not self.traits.reduces:
            pulls = [] if into is None or self.rank == root else [_Pull((root,), 0, into)]
            return _Piece(brings, pulls, None)
        if self.size <= 2 or count * self.dtype.itemsize <= ONE_SHOT:
            everyone = tuple(range(self.size))
            return _Piece(brings, [] if into is None else [_Pull(everyone, 0, into)], None)
        parts = even_offsets(count, self.size)
        ends = list(pairwise(parts))
        pulls = [] if into is None else [_Pull((r,), at, into.part(at, end)) for r, (at, end) in enumerate(ends)]
        return _Piece(brings, pulls, ends)

    def _chunks(self, source: View, output: View, start: int, step: int) -> _Piece:
        """Return the piece of elements [start, start + step) of every chunk; chunk c lies at c * step of a window."""
        rank, size, layout = self.rank, self.size, self.layout
        root = self.meeting.root

        def cut(view: View, at: int, chunk: int) -> View:
            length = max(0, min(step, layout.length(chunk) - start))
            return view.part(at + start, at + start + length) if length else view.part(0, 0)

        kind = self.traits.input
        if kind == "row":
            brings = [
                _Run(cut(source, layout.input_at(rank * size + d), rank * size + d), d * step) for d in range(size)
            ]
            pulls = [
                _Pull((s,), rank * step, cut(output, layout.output_at(s * size + rank), s * size + rank))
                for s in range(size)
            ]
        elif kind == "chunk":
            brings = [_Run(cut(source, layout.input_at(rank), rank), 0)]
            takes = self.traits.output == "whole" or self.is_root
            pulls = [_Pull((s,), 0, cut(output, layout.output_at(s), s)) for s in range(size)] if takes else []
        else:
            gives = kind == "whole" or self.is_root
            brings = [_Run(cut(source, layout.input_at(c), c), c * step) for c in range(size)] if gives else []
            sources = tuple(range(size)) if self.traits.reduces else (root,)
            pulls = [_Pull(sources, rank * step, cut(output, layout.output_at(rank), rank))]
        return _Piece(brings, pulls, None)

    def _bring(self, piece: _Piece, half: int) -> None:
        """Start the copy of this rank's part of a piece into its window."""
        width = self.dtype.itemsize
        base = address_of(self._windows()[self.rank]) + half * self.side.window
        runs = [(address_of(run.view.data), base + run.place * width, run.view.data.nbytes) for run in piece.brings]
        self._move(runs)

    def _sum_part(self, piece: _Piece, half: int) -> None:
        """Start the sum of this rank's part of a piece, into its own window."""
        assert piece.parts is not None  # noqa: S101  (asked for a piece in two shots alone)
        start, stop = piece.parts[self.rank]
        if start == stop:
            return
        views = [self._window_view(rank, half, start, stop - start) for rank in range(self.size)]
        self.side.device.kernels.reduce(self.op, [views[self.rank]], views, self.divisor, self.side.stream.handle)
        self.stats.bytes_loaded += (self.size - 1) * views[0].data.nbytes

    def _take(self, piece: _Piece, half: int) -> None:
        """Start loading this rank's result of a piece from the windows."""
        runs = []
        for pull in piece.pulls:
            count = pull.into.count
            views = [self._window_view(rank, half, pull.place, count) for rank in pull.ranks]
            self.stats.bytes_loaded += sum(rank != self.rank for rank in pull.ranks) * pull.into.data.nbytes
            if len(views) > 1 and count:
                self.side.device.kernels.reduce(self.op, [pull.into], views, self.divisor, self.side.stream.handle)
            elif count:
                runs.append((address_of(views[0].data), address_of(pull.into.data), pull.into.data.nbytes))
        self._move(runs)

    def _move(self, runs: list[tuple[int, int, int]]) -> None:
        runs = [run for run in runs if run[2] and run[0] != run[1]]
        if runs:
            self.side.device.kernels.move(runs, self.side.stream.handle)

    def _windows(self) -> list[DeviceArray]:
        assert self.side.windows is not None  # noqa: S101  (loads are chosen where there are windows alone)
        return self.side.windows

    def _window_view(self, rank: int, half: int, place: int, count: int) -> View:
        width = self.dtype.itemsize
        start = half * self.side.window + place * width
        memory = self._windows()[rank][start : start + count * width]
        return View(memory.view(self.dtype.storage), self.dtype)


def meet(comm: CommunicatorLike, meeting: Meeting, what: str) -> Iterator[Wait]:
    """Meet all ranks on the board, in the collective that it is at, and compare what they call.

    Raises:
        CollectiveError: on every rank, where it differs.
    """
    board: Board = comm.board
    at = board.records[board.number & 1][board.rank]
    board.words[at] = meeting.signature
    board.words[at + 1] = comm.channel_number << 32 | meeting.extra
    board.arrive()
    yield board.all_arrived(what, comm.transport.stats)
    check_records(board)


class _Run(NamedTuple):
    """Be elements that go to a place, counted in elements, of this rank's window."""

    view: View
    place: int


class _Pull(NamedTuple):
    """Be elements that are loaded from a place of the windows of ranks, and summed where these are several."""

    ranks: tuple[int, ...]
    place: int
    into: View


class _Piece(NamedTuple):
    """Be what passes through the windows between two meetings."""

    brings: list[_Run]
    pulls: list[_Pull]
    parts: list[tuple[int, int]] | None
    """Every rank's part of a piece that is taken in two shots."""
