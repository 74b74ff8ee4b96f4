"""Collectives of small operands through the board's cells: one meeting of all ranks, then all read what they need.

Every rank copies its input, of at most `CELL` bytes, into its cell, says that it has come, waits for the others, and
takes its result from all cells: p reads of n bytes instead of the least possible, for one synchronisation instead of
two. The order of summation is the canonical one. See [Note: cells] in `comm/board`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mpizero.arrays import UFUNCS, Quiet, View, combine, copy
from mpizero.collectives.agree import check_records
from mpizero.collectives.order import pairwise
from mpizero.collectives.registry import OPERATIONS
from mpizero.comm import CELL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpizero.collectives.buffers import Arithmetic, Layout
    from mpizero.collectives.phase import Meeting
    from mpizero.comm.board import Board
    from mpizero.typing import Bytes, CommunicatorLike, Wait

__all__ = ["CellCall", "fits"]


def fits(operation: str, nbytes: int, *, uneven: bool) -> bool:
    """Return whether a collective can go through cells.

    Args:
        operation: the collective's name.
        nbytes: bytes of the largest input of a rank, or a bound of it that all ranks know.
        uneven: whether an all-to-all has parts of different lengths, which cells have no room to tell.
    """
    return nbytes <= CELL and not (uneven and OPERATIONS[operation].input == "row")


class CellCall:
    """Be one collective through cells with everything decided but the buffers; may be run any number of times."""

    def __init__(self, comm: CommunicatorLike, meeting: Meeting, layout: Layout, arithmetic: Arithmetic) -> None:
        """Decide what can be decided.

        Args:
            comm: the ranks, all on one board.
            meeting: which collective.
            layout: where this rank's chunks lie.
            arithmetic: what is done with them.
        """
        self.comm, self.meeting, self.layout = comm, meeting, layout
        self.board: Board = comm.board
        self.stats = comm.transport.stats
        self.traits = OPERATIONS[meeting.operation]
        self.dtype, self.op, self.divisor = arithmetic
        self.rank, self.size = comm.rank, comm.size
        self._records = [self.board.records[parity][self.rank] for parity in range(2)]
        self._cells = [[self._cell(parity, rank) for rank in range(self.size)] for parity in range(2)]
        is_rooted = self.traits.rooted and self.traits.input in {"root", "source"}
        self._gives = not is_rooted or self.rank == meeting.root
        self._add = self._sum_of_two()
        self._quiet = Quiet()

    def _cell(self, parity: int, rank: int) -> View:
        width = self.dtype.itemsize
        memory = self.board.cell(parity, rank)
        return View(memory[: CELL // width * width].view(self.dtype.storage), self.dtype)

    def steps(self, source: View, output: View) -> Iterator[Wait]:
        """Run it once, step by step.

        Args:
            source: this rank's input; empty where it has none.
            output: this rank's result; empty where it gets none.
        """
        with self.board.collective:
            self._come(source.data)
            yield self.board.all_arrived(self.meeting.what, self.stats)
            check_records(self.board)
            self._take(output)

    def run(self, source: Bytes, output: Bytes) -> None:
        """Run it once in this thread, by the shortest way that serves signals, time-outs and crowded cores.

        Args:
            source: this rank's input as a flat array of the dtype's storage.
            output: the same for its result.
        """
        board = self.board
        with board.collective:
            self._come(source)
            board.await_all(board.arrived, self.meeting.what, self.stats)
            check_records(board)
            if self._add is None:
                self._take(View(output, self.dtype))
            else:
                low, high = self._cells[board.number & 1]
                self._quiet.run(self._add, low.data[: output.size], high.data[: output.size], out=output)
                self.stats.bytes_loaded += output.nbytes

    def _come(self, source: Bytes) -> None:
        board = self.board
        parity = board.number & 1
        at = self._records[parity]
        board.words[at] = self.meeting.signature
        board.words[at + 1] = self.comm.channel_number << 32 | self.meeting.extra
        if self._gives:
            self._cells[parity][self.rank].data[: source.size] = source
        board.arrive()

    def bind(self, source: Bytes, output: Bytes) -> Callable[[], None]:
        """Return `run` on these arrays, with all that can be looked up beforehand looked up."""
        board = self.board
        if board.fence is not None:
            return partial(self.run, source, output)
        words, collective, comm, stats = board.words, board.collective, self.comm, self.stats
        signature, extra, what = self.meeting.signature, self.meeting.extra, self.meeting.what
        flags, records, rank = board.arrived, self._records, self.rank
        flag, peers = flags[rank], [flags[peer] for peer in board.peers]
        theirs = [[found[peer] for peer in board.peers] for found in board.records]
        mine = [cells[rank].data[: source.size] for cells in self._cells] if self._gives else []
        finish = self._finisher(output)

        def run() -> None:
            with collective:
                number = board.number
                parity = number & 1
                if mine:
                    mine[parity][...] = source
                at = records[parity]
                words[at] = signature
                words[at + 1] = other = comm.channel_number << 32 | extra
                words[flag] = number
                for peer in peers:
                    if words[peer] < number:
                        board.await_all(flags, what, stats)
                        break
                for at in theirs[parity]:
                    if words[at] != signature or words[at + 1] != other:
                        check_records(board)
                finish(parity)

        return run

    def _finisher(self, output: Bytes) -> Callable[[int], None]:
        """Return what makes this rank's result of the cells of one set."""
        view, stats = View(output, self.dtype), self.stats
        if self._add is not None:
            add, quietly = self._add, self._quiet.run
            left, right = ([cells[rank].data[: output.size] for cells in self._cells] for rank in range(2))

            def sum_both(parity: int) -> None:
                quietly(add, left[parity], right[parity], out=output)
                stats.bytes_loaded += output.nbytes

            return sum_both
        if self.traits.reduces:
            return lambda _: self._take(view)
        pulls = self._pulls(view)
        loaded = sum(count for rank, _, _, count in pulls if rank != self.rank) * self.dtype.itemsize
        copies = [
            [(output[to : to + count], cells[rank].data[at : at + count]) for rank, at, to, count in pulls]
            for cells in self._cells
        ]

        def copy_all(parity: int) -> None:
            for target, data in copies[parity]:
                target[...] = data
            stats.bytes_loaded += loaded

        return copy_all

    def _sum_of_two(self) -> np.ufunc | None:
        """Return all the arithmetic of an all-reduce of plain elements on two ranks, None for another call."""
        plain = self.size == 2 and self.divisor == 1 and not self.dtype.is_half and self.dtype.kind != "c"
        return UFUNCS[self.op] if self.meeting.operation == "all_reduce" and plain else None

    def _pulls(self, output: View) -> list[tuple[int, int, int, int]]:
        """Return what a call that sums nothing copies: (rank whose cell, element there, element here, count)."""
        rank, size, layout = self.rank, self.size, self.layout
        kind = self.traits.input
        if self.traits.reduces or kind == "token" or (self.traits.output == "root" and rank != self.meeting.root):
            return []
        if kind == "row":
            pairs = [(peer, peer * size + rank) for peer in range(size)]
            start = layout.input_at(rank * size + rank)  # even: all ranks cut alike
            return [(peer, start, layout.output_at(chunk), layout.length(chunk)) for peer, chunk in pairs]
        if kind == "chunk":
            return [(peer, 0, layout.output_at(peer), layout.length(peer)) for peer in range(size)]
        root = self.meeting.root
        if kind == "source":
            offsets: list[int] = layout.offsets  # type: ignore[attr-defined]
            return [(root, offsets[rank], 0, layout.length(rank))]
        return [] if rank == root else [(root, 0, 0, output.count)]

    def _take(self, output: View) -> None:
        """Make this rank's result of all cells."""
        parity = self.board.number & 1
        cells = self._cells[parity]
        for rank, at, to, count in self._pulls(output):
            output.data[to : to + count] = cells[rank].data[at : at + count]
            self.stats.bytes_loaded += count * self.dtype.itemsize * (rank != self.rank)
        if self.traits.reduces and output.count:
            start = self.layout.offsets[self.rank] if self.traits.output == "chunk" else 0  # type: ignore[attr-defined]
            parts = [cell.part(start, start + output.count) for cell in cells]
            self._sum(parts, output)
            self.stats.bytes_loaded += (self.size - 1) * output.data.nbytes

    def _sum(self, parts: list[View], output: View) -> None:
        if len(parts) == 2:
            combine(self.op, output, parts[0], parts[1], self.divisor)
            return
        acc = self.dtype.accumulator(self.op)

        def pair(left: View, right: View) -> View:
            target = View(np.empty(output.count, acc.storage), acc)
            combine(self.op, target, left, right)
            return target

        copy(output, pairwise(parts, pair), self.divisor)
