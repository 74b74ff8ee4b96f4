"""Run a collective in one phase of loads and stores on a board; see `loads` and `comm/board`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpizero.arrays import Quiet, View
from mpizero.collectives.agree import check_records
from mpizero.collectives.buffers import Square
from mpizero.collectives.loads import tasks
from mpizero.collectives.parts import Finder, Job, all_mapped
from mpizero.comm import WORDS, mappings
from mpizero.comm.waiting import drive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpizero.collectives.buffers import Arithmetic, Layout
    from mpizero.comm.board import Board
    from mpizero.typing import Bytes, CommunicatorLike, Wait

__all__ = ["Fallback", "Meeting", "PhaseCall"]

Fallback = Callable[[View, View], "Iterator[Wait]"]
REMEMBERED = 16
"""Sets of buffers whose parts a call keeps."""


class Meeting(NamedTuple):
    """Say which collective this is, in words that a record can hold."""

    operation: str
    root: int
    signature: int
    """What all ranks must have in common; see `agree`."""
    extra: int
    """A checksum of uneven counts; a record has the channel beside it."""
    what: str
    """The collective's name, for errors."""


class PhaseCall:
    """Be one collective in a phase of loads and stores, with everything decided but the buffers; may be run again."""

    def __init__(
        self, comm: CommunicatorLike, meeting: Meeting, layout: Layout, arithmetic: Arithmetic, fallback: Fallback
    ) -> None:
        """Decide what can be decided.

        Args:
            comm: the ranks, all on one board.
            meeting: which collective.
            layout: where this rank's chunks lie.
            arithmetic: what is done with them.
            fallback: gives the steps of the same collective by messages, taken by all ranks where one has a private
                buffer and the kernel lets no rank reach into another.
        """
        self.comm, self.meeting, self.layout, self.fallback = comm, meeting, layout, fallback
        self.board: Board = comm.board
        self.stats = comm.transport.stats
        self.arithmetic, self.dtype = arithmetic, arithmetic.dtype
        self.told = isinstance(layout, Square) and not layout.alike
        """Whether ranks have to tell each other where their parts begin, through their cells."""
        self.tasks = tasks(meeting.operation, comm.size, comm.rank, meeting.root)
        self._posted: tuple[int, int, int, int] = (0, 0, -1, 0)
        """Addresses of input and output, version of the mappings and channel, for which `_record` was made."""
        self._record = b""
        self._quiet = Quiet()
        self._jobs: dict[tuple[bytes, ...], list[Job]] = {}
        """This rank's jobs by all ranks' records, for the last few buffers."""

    def steps(self, source: View, output: View) -> Iterator[Wait]:
        """Run it once, step by step.

        Args:
            source: this rank's input; empty where it has none. Peers find it by this rank's record.
            output: this rank's result; empty where it gets none.

        Raises:
            CollectiveError: on every rank, where the ranks' records differ.
        """
        board, what = self.board, self.meeting.what
        with board.collective:
            self._come(source.data, output.data)
            yield board.all_arrived(what, self.stats)
            check_records(board)
            if self._is_out_of_reach():
                yield from self.fallback(source, output)
                return
            self._work(source.data, output.data)
            yield board.all_finished(what, self.stats)

    def run(self, source: Bytes, output: Bytes) -> None:
        """Run it once in this thread; see `steps`."""
        board, what = self.board, self.meeting.what
        with board.collective:
            self._come(source, output)
            board.await_all(board.arrived, what, self.stats)
            check_records(board)
            if self._is_out_of_reach():
                drive(self.fallback(View(source, self.dtype), View(output, self.dtype)))
            else:
                self._work(source, output)
                board.await_all(board.finished, what, self.stats)

    def bind(self, source: Bytes, output: Bytes) -> Callable[[], None]:
        """Return `run` on these arrays."""
        return partial(self.run, source, output)

    def _come(self, source: Bytes, output: Bytes) -> None:
        """Post this rank's record: what it calls, then address, segment and place in it of its input and its output."""
        board = self.board
        parity = board.number & 1
        channel = self.comm.channel_number
        posted = (_address(source), _address(output), mappings().version, channel)
        if posted != self._posted:
            self._posted = posted
            words = [self.meeting.signature, channel << 32 | self.meeting.extra]
            for address, array in zip(posted, (source, output), strict=False):
                place = mappings().find(address, array.nbytes, board.pids) if address else None
                words += [address, *(place or (0, 0))]
            self._record = struct.pack(f"{WORDS}Q", *words)
        at = board.records[parity][board.rank]
        board.octets[8 * at : 8 * (at + WORDS)] = self._record
        if self.told:
            cell = board.cell(parity, board.rank)[: 8 * board.size].view(np.int64)
            cell[:] = [self.layout.input_at(board.rank * board.size + peer) for peer in range(board.size)]
        board.arrive()

    def _is_out_of_reach(self) -> bool:
        """Return whether some rank's buffer can be reached by nobody; all ranks see the same records."""
        return self.board.reach is None and not all_mapped(self.board)

    def _work(self, source: Bytes, output: Bytes) -> None:
        """Run this rank's tasks, with the parts of all ranks found anew only where a buffer has moved."""
        board = self.board
        records = tuple([board.bytes_of(at) for at in board.records[board.number & 1]])
        jobs = self._jobs.get(records)
        if jobs is None or self.told:
            finder = Finder(self.comm, self.meeting.operation, self.layout, self.arithmetic)
            jobs = [finder.job(task) for task in self.tasks]
            if len(self._jobs) == REMEMBERED:
                self._jobs.clear()
            self._jobs[records] = jobs
        for job in jobs:
            # Infinity minus infinity is the caller's data, and no reason to warn.
            self.stats.bytes_loaded += self._quiet.run(job.run, source, output)
        board.finish()


def _address(array: Bytes) -> int:
    address: int = array.__array_interface__["data"][0]
    return address if array.size else 0
