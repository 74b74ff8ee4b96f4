"""The board: a little memory that all ranks of one host map, through which they meet.

Every collective on a board has a number, counted by each rank for itself. A rank that has come to it posts a record of
what it calls and where its buffers lie, and then its number as its `arrived` flag; a rank that is done with its peers'
memory posts the number as its `finished` flag. Flags only grow, so nothing is ever reset.

[Note: cells] A small operand is copied into the rank's cell, from where all peers read it. Records and cells come in
two sets, used by collectives of even and of odd number: a rank fills a set again two collectives later, and comes there
only after it has seen all peers arrive at the one between, which they did after they had read the first. So a
collective in cells waits once, provided that every collective waits for every rank's arrival.

[Note: flags] A flag is stored after what it announces and loaded before what it guards. x86-64 keeps both orders by
itself; elsewhere `fence` stands between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpizero.comm.reach import Reach, probe
from mpizero.comm.segment import PAGE, Segment, fence, share
from mpizero.comm.waiting import ADVICE, drive, poll, spins_for
from mpizero.errors import CollectiveTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpizero.comm.health import Health
    from mpizero.comm.stats import Stats
    from mpizero.typing import Bytes

__all__ = ["CELL", "WORDS", "Arrival", "Board", "make_board"]

LINE = 64
"""Bytes of a cache line: flags of different ranks lie on different ones, or each store would disturb all readers."""
WORDS = 8
"""64-bit words of a record."""
PATIENCE = 5000
"""Looks at a flag, some tens of nanoseconds each, before a rank that waits in its own thread waits as all do."""
CELL = 32 << 10
"""Bytes of a cell; two sets of as many cells as there are ranks stay in cache on a node of some dozen ranks."""


class Board:
    """Let the ranks of one host meet, tell each other what they do, and pass small operands."""

    def __init__(self, segment: Segment, mpi_comm: Any, reach: Reach | None, timeout: float, health: Health) -> None:
        self.rank: int = mpi_comm.rank
        self.size: int = mpi_comm.size
        self.timeout = timeout
        self.reach = reach
        self.spins = spins_for(self.size)
        self.patience = spins_for(self.size, PATIENCE)
        self.number = 0
        """The number of the latest collective that this rank has come to."""
        self.health = health
        self.fence = fence()
        self._segment = segment
        self.pids = segment.pids
        self.words = memoryview(segment.bytes).cast("Q")  # type: ignore[arg-type]  # numpy arrays are buffers
        """All of the board as 64-bit words."""
        self.octets = self.words.cast("B")
        stride = segment.share // 8
        self.arrived = [rank * stride for rank in range(self.size)]
        """Per rank, the word that is its arrived flag."""
        self.finished = [rank * stride + LINE // 8 for rank in range(self.size)]
        self.records = [[rank * stride + (2 + parity) * LINE // 8 for rank in range(self.size)] for parity in range(2)]
        """Per set and rank, the first of the `WORDS` words of the record."""
        self.collective = _Collective(self)
        """The context in which one collective runs; a class of its own, since a generator's costs a microsecond."""
        self.peers = [rank for rank in range(self.size) if rank != self.rank]

    def cell(self, parity: int, rank: int) -> Bytes:
        """Return a rank's cell of one set, `CELL` bytes."""
        start = rank * self._segment.share + PAGE + parity * CELL
        return self._segment.bytes[start : start + CELL]

    def bytes_of(self, record: int) -> bytes:
        """Return a record's bytes."""
        return bytes(self.octets[8 * record : 8 * (record + WORDS)])

    def arrive(self) -> None:
        """Say that this rank has come to its current collective, its record and its cell being filled."""
        if self.fence is not None:
            self.fence()
        self.words[self.arrived[self.rank]] = self.number

    def finish(self) -> None:
        """Say that this rank is done with its peers' memory in the current collective."""
        if self.fence is not None:
            self.fence()
        self.words[self.finished[self.rank]] = self.number

    def await_all(self, flags: list[int], what: str, stats: Stats) -> None:
        """Wait for every rank's flag in this thread: `arrived`, or `finished`, spinning a little before `drive`."""
        number, words = self.number, self.words
        left = self.patience
        for peer in self.peers:
            flag = flags[peer]
            while words[flag] < number:
                left -= 1
                if left < 0:
                    drive(iter((Arrival(self, flags, what, stats),)))
                    return
        if self.fence is not None:
            self.fence()

    def all_arrived(self, what: str, stats: Stats) -> Arrival:
        """Return the wait for every rank to come to the current collective."""
        return Arrival(self, self.arrived, what, stats)

    def all_finished(self, what: str, stats: Stats) -> Arrival:
        """Return the wait for every rank to be done with the current collective."""
        return Arrival(self, self.finished, what, stats)


class _Collective:
    """Count one more collective; whatever interrupts it leaves the board broken, since peers count on this rank."""

    __slots__ = ("board",)

    def __init__(self, board: Board) -> None:
        self.board = board

    def __enter__(self) -> None:
        self.board.number += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.board.health.sound = False


class Arrival:
    """Wait for the flags of all ranks to reach the current number."""

    def __init__(self, board: Board, flags: list[int], what: str, stats: Stats) -> None:
        self.board, self.what, self.stats = board, what, stats
        self.number = board.number
        self.words = board.words
        self.flags = flags
        self.position = 0

    def done(self) -> bool:
        """Return whether all flags are there; looks again only at those that were not."""
        flags, words, number = self.flags, self.words, self.number
        position = self.position
        while position < len(flags):
            if words[flags[position]] < number:
                self.position = position
                return False
            position += 1
        self.position = position
        if self.board.fence is not None:
            self.board.fence()
        return True

    def block(self, done: Callable[[], bool] | None = None) -> bool:
        """Return True once all flags are there, False after the time-out."""
        board = self.board
        return poll(done or self.done, board.timeout, lambda: self._missing("waits for"), spins=board.spins)

    def overdue(self, seconds: float) -> bool:
        """Return whether `seconds` is more than the time-out."""
        return seconds > self.board.timeout

    def settle(self, seconds: float, *, finished: bool) -> None:
        """Count the wait; a board that was left half-way is broken."""
        self.count(seconds)
        if not finished:
            self.board.health.sound = False

    def count(self, seconds: float) -> None:
        """Count seconds of waiting."""
        self.stats.wait_seconds += seconds

    def late(self) -> CollectiveTimeoutError:
        """Name the ranks that are missing."""
        return CollectiveTimeoutError(f"{self._missing(f'waited {self.board.timeout:g} s for')}. {ADVICE}")

    def _missing(self, verb: str) -> str:
        absent = [rank for rank, flag in enumerate(self.flags) if self.words[flag] < self.number]
        who = ", ".join(f"rank {rank}" for rank in absent) or "nobody any more"
        return f"{self.what}: rank {self.board.rank} of {self.board.size} {verb} {who}"


def make_board(mpi_comm: Any, timeout: float, health: Health) -> Board | None:
    """Return the board of these ranks; None, on all of them, where they cannot share memory. Collective.

    Args:
        mpi_comm: an mpi4py communicator of more than one rank on one host.
        timeout: seconds after which a wait ends with an error.
        health: the communicator's.
    """
    segment = share(mpi_comm, PAGE + 2 * CELL)
    if segment is None:
        return None
    return Board(segment, mpi_comm, probe(mpi_comm), timeout, health)
