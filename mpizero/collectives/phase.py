"""Run a collective in one phase of loads and stores on a board; see `loads` and `comm/board`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpizero.arrays import UFUNCS, Quiet, View, combine
from mpizero.collectives.agree import check_records
from mpizero.collectives.loads import Task, tasks
from mpizero.collectives.registry import OPERATIONS, build
from mpizero.collectives.schedule import Recv, Reduce, Ref, Space
from mpizero.comm import WORDS, mappings
from mpizero.comm.waiting import drive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpizero.arrays import DType
    from mpizero.collectives.buffers import Arithmetic, Layout
    from mpizero.comm.board import Board
    from mpizero.comm.reach import Reach
    from mpizero.typing import Bytes, CommunicatorLike, Wait

__all__ = ["BLOCK", "FAR_BLOCK", "Fallback", "Meeting", "PhaseCall"]

Fallback = Callable[[View, View], "Iterator[Wait]"]
BLOCK = 256 << 10
"""Bytes of a chunk to work on at a time: a block of every source, the result and the partial sums stay in a core's
cache between the load that brings them and the store that takes them away."""

FAR_BLOCK = 1 << 20
"""The same where the kernel has to be asked for some of them, which takes microseconds each time."""

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
        self.dtype, self.op, self.divisor = arithmetic
        self.tasks = tasks(meeting.operation, comm.size, comm.rank, meeting.root)
        self._posted: tuple[int, int, int, int] = (0, 0, -1, 0)
        """Addresses of input and output, version of the mappings and channel, for which `_record` was made."""
        self._record = b""
        self._quiet = Quiet()
        self._jobs: dict[tuple[bytes, ...], list[_Job | _PairJob]] = {}
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
        with board.collective():
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
        board.number += 1
        whole = False
        try:
            self._come(source, output)
            board.await_all(board.arrived, what, self.stats)
            check_records(board)
            if self._is_out_of_reach():
                drive(self.fallback(View(source, self.dtype), View(output, self.dtype)))
            else:
                self._work(source, output)
                board.await_all(board.finished, what, self.stats)
            whole = True
        finally:
            if not whole:
                board.health.sound = False

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
        if OPERATIONS[self.meeting.operation].input == "row":
            cell = board.cell(parity, board.rank)[: 8 * board.size].view(np.int64)
            cell[:] = [self.layout.input_at(board.rank * board.size + peer) for peer in range(board.size)]
        board.arrive()

    def _is_out_of_reach(self) -> bool:
        """Return whether some rank's buffer can be reached by nobody; all ranks see the same records."""
        return self.board.reach is None and not _Far(self.board, self.dtype).all_mapped()

    def _work(self, source: Bytes, output: Bytes) -> None:
        """Run this rank's tasks, with the parts of all ranks found anew only where a buffer has moved."""
        board = self.board
        records = tuple([board.bytes_of(at) for at in board.records[board.number & 1]])
        jobs = self._jobs.get(records)
        if jobs is None or OPERATIONS[self.meeting.operation].input == "row":
            finder = _Finder(self, _Far(board, self.dtype), source, output)
            jobs = [finder.job(task) for task in self.tasks]
            if len(self._jobs) == REMEMBERED:
                self._jobs.clear()
            self._jobs[records] = jobs
        for job in jobs:
            self.stats.bytes_loaded += self._quiet.run(job.run)  # infinity minus infinity is the caller's data
        board.finish()


def _address(array: Bytes) -> int:
    address: int = array.__array_interface__["data"][0]
    return address if array.size else 0


class _Far:
    """Find peers' buffers by their records."""

    def __init__(self, board: Board, dtype: DType) -> None:
        self.board, self.dtype = board, dtype
        self.records = board.records[board.number & 1]
        self.parity = board.number & 1

    def all_mapped(self) -> bool:
        """Return whether every buffer lies in memory that all have mapped; all ranks see the same records."""
        words = self.board.words
        first = (at + part for at in self.records for part in (2, 5))
        return not any(words[at] and not words[at + 1] for at in first)

    def input(self, peer: int, start: int, length: int, block: int) -> _Part:
        """Return `length` elements from `start` on of a peer's input, to be loaded in blocks of at most `block`."""
        return self._part(peer, self.records[peer] + 2, start, length, block)

    def output(self, peer: int, start: int, length: int, block: int) -> _Part:
        """Return the same of a peer's output."""
        return self._part(peer, self.records[peer] + 5, start, length, block)

    def leaving(self, peer: int, target: int) -> int:
        """Return the element of a peer's input at which its part for `target` begins, in an all-to-all."""
        return int(self.board.cell(self.parity, peer)[8 * target : 8 * target + 8].view(np.int64)[0])

    def _part(self, peer: int, at: int, start: int, length: int, block: int) -> _Part:
        address, key, place = self.board.words[at : at + 3]
        width = self.dtype.itemsize
        if key:
            first = place + start * width
            return _Mapped(mappings().bytes_of(key)[first : first + length * width].view(self.dtype.storage))
        reach = self.board.reach
        assert reach is not None  # noqa: S101  (else all ranks have fallen back)
        scratch = np.empty(min(block, length), self.dtype.storage)
        return _Private(reach, peer, address + start * width, scratch)


class _Mapped:
    """Be one rank's part of a chunk in memory that this rank has mapped, its own included."""

    def __init__(self, array: Bytes) -> None:
        self.array = array

    def load(self, start: int, stop: int) -> Bytes:
        """Return elements [start, stop) of the chunk, in place."""
        part: Bytes = self.array[start:stop]
        return part

    def store(self, start: int, stop: int, data: Bytes) -> None:
        """Store `data` as elements [start, stop) of the chunk."""
        self.array[start:stop] = data


class _Private:
    """Be one rank's part of a chunk in memory that only the kernel can reach."""

    def __init__(self, reach: Reach, peer: int, address: int, scratch: Bytes) -> None:
        self.reach, self.peer, self.address = reach, peer, address
        self.scratch = scratch
        self.place: int = scratch.ctypes.data
        self.width = scratch.itemsize

    def load(self, start: int, stop: int) -> Bytes:
        """Return a copy of elements [start, stop) of the chunk."""
        target: Bytes = self.scratch[: stop - start]
        self.reach.read(self.peer, self.address + start * self.width, self.place, (stop - start) * self.width)
        return target

    def store(self, start: int, stop: int, data: Bytes) -> None:
        """Store `data` as elements [start, stop) of the chunk."""
        width = self.width
        self.reach.write(self.peer, self.address + start * width, data.ctypes.data, (stop - start) * width)


_Part = _Mapped | _Private


class _Job:
    """Be one task with all its parts found."""

    def __init__(self, length: int, step: int, kernel: Callable[[int, int], Bytes], targets: list[_Part]) -> None:
        self.length, self.step, self.kernel, self.targets = length, step, kernel, targets
        self.foreign = 0
        """Bytes that this rank loads from its peers and stores to them."""

    def run(self) -> int:
        """Load, sum and store the chunk, block by block; return the bytes that came from and went to peers."""
        kernel, targets, length, step = self.kernel, self.targets, self.length, self.step
        for start in range(0, length, step):
            stop = min(start + step, length)
            result = kernel(start, stop)
            for target in targets:
                target.store(start, stop, result)
        return self.foreign


class _PairJob:
    """Be the task of an all-reduce of plain elements on two ranks with mapped buffers: the shortest loop there is."""

    def __init__(self, ufunc: np.ufunc, arrays: tuple[Bytes, Bytes, Bytes, Bytes], step: int) -> None:
        self.ufunc, self.arrays, self.step = ufunc, arrays, step
        self.foreign = 2 * arrays[0].nbytes

    def run(self) -> int:
        """Load, sum and store the chunk, block by block; return the bytes that came from and went to the peer."""
        ufunc, step = self.ufunc, self.step
        left, right, own, theirs = self.arrays
        for start in range(0, left.size, step):
            stop = start + step
            result = own[start:stop]
            ufunc(left[start:stop], right[start:stop], out=result)
            theirs[start:stop] = result
        return self.foreign


class _Finder:
    """Make jobs of tasks: find the parts of all ranks, and make a block's worth of scratch."""

    def __init__(self, call: PhaseCall, far: _Far, source: Bytes, output: Bytes) -> None:
        self.traits = OPERATIONS[call.meeting.operation]
        self.layout, self.op, self.divisor = call.layout, call.op, call.divisor
        self.source, self.output, self.far = source, output, far
        self.rank, self.size = call.comm.rank, call.comm.size
        self.dtype = call.dtype
        self.step = (BLOCK if far.all_mapped() else FAR_BLOCK) // self.dtype.itemsize

    def job(self, task: Task) -> _Job | _PairJob:
        """Return a task with its parts."""
        length = self.layout.length(task.chunk)
        if not length:
            return _Job(0, 1, lambda _start, _stop: self.source, [])
        sources = [self._source(rank, task.chunk, length) for rank in task.sources]
        targets = [self._target(rank, task.chunk, length) for rank in task.targets if rank != self.rank]
        own = self._target(self.rank, task.chunk, length).array if self.rank in task.targets else None
        if own is not None and self._is_pair(sources, targets):
            left, right = (source.array for source in sources)
            return _PairJob(UFUNCS[self.op], (left, right, own, targets[0].array), self.step)
        kernel = self._summing(sources, own) if self.traits.reduces else self._copying(sources[0], own)
        job = _Job(length, self.step, kernel, targets)
        foreign = sum(rank != self.rank for rank in (*task.sources, *task.targets))
        job.foreign = foreign * length * self.dtype.itemsize
        return job

    def _is_pair(self, sources: list[Any], targets: list[Any]) -> bool:
        two = self.size == 2 and self.traits.reduces and len(targets) == 1
        plain = self.divisor == 1 and not self.dtype.is_half
        return two and plain and all(isinstance(part, _Mapped) for part in (*sources, *targets))

    def _source(self, rank: int, chunk: int, length: int) -> Any:
        if rank == self.rank:
            start = self.layout.input_at(chunk)
            return _Mapped(self.source[start : start + length])
        if self.traits.input == "row":
            start = self.far.leaving(rank, chunk % self.size)
        else:
            start = 0 if self.traits.input == "chunk" else self._whole(chunk)
        return self.far.input(rank, start, length, self.step)

    def _target(self, rank: int, chunk: int, length: int) -> Any:
        if rank == self.rank:
            start = self.layout.output_at(chunk)
            return _Mapped(self.output[start : start + length])
        start = 0 if self.traits.output == "chunk" else self._whole(chunk)
        return self.far.output(rank, start, length, self.step)

    def _whole(self, chunk: int) -> int:
        """Return the element of a whole buffer at which a chunk begins; all-to-all aside, layouts are lines."""
        offsets: list[int] = self.layout.offsets  # type: ignore[attr-defined]
        return offsets[chunk]

    @staticmethod
    def _copying(source: _Part, own: Bytes | None) -> Callable[[int, int], Bytes]:
        """Return what brings a block here: into this rank's own result, if it has one and the block is not there."""
        if own is None or (isinstance(source, _Mapped) and source.array.ctypes.data == own.ctypes.data):
            return source.load
        if isinstance(source, _Private):
            reach, peer, address, width = source.reach, source.peer, source.address, source.width
            place: int = own.ctypes.data

            def fetch(start: int, stop: int) -> Bytes:
                part: Bytes = own[start:stop]
                reach.read(peer, address + start * width, place + start * width, part.nbytes)
                return part

            return fetch
        array = source.array

        def block(start: int, stop: int) -> Bytes:
            part: Bytes = own[start:stop]
            part[...] = array[start:stop]
            return part

        return block

    def _summing(self, sources: list[_Part], own: Bytes | None) -> Callable[[int, int], Bytes]:
        """Return what sums a block: the local steps of direct exchange, on operands that lie where they were put."""
        program = _program(self.size, self.rank)
        acc = self.dtype.accumulator(self.op)
        partial = [np.empty(self.step, acc.storage) for _ in range(program.slots)]
        out = np.empty(self.step, self.dtype.storage) if own is None else None
        add = self._adder()

        def block(start: int, stop: int) -> Bytes:
            count = stop - start
            result: Bytes = own[start:stop] if out is None else out[:count]  # type: ignore[index]
            for dst, left, right in program.steps:
                add(
                    result if dst < 0 else partial[dst][:count],
                    sources[left].load(start, stop) if left >= 0 else partial[~left][:count],
                    sources[right].load(start, stop) if right >= 0 else partial[~right][:count],
                    dst < 0,
                )
            return result

        return block

    def _adder(self) -> Callable[[Bytes, Bytes, Bytes, bool], None]:
        """Return what combines two arrays into a third; the last argument says that the result is final."""
        op, divisor, dtype = self.op, self.divisor, self.dtype
        acc = dtype.accumulator(op)
        if divisor == 1 and not dtype.is_half:
            ufunc = UFUNCS[op]

            def plain(dst: Bytes, left: Bytes, right: Bytes, final: bool) -> None:  # noqa: ARG001, FBT001
                ufunc(left, right, out=dst)

            return plain

        def view(array: Bytes) -> View:
            return View(array, dtype if array.dtype == dtype.storage else acc)

        def rounded(dst: Bytes, left: Bytes, right: Bytes, final: bool) -> None:  # noqa: FBT001
            combine(op, view(dst), view(left), view(right), divisor if final else 1, once=True)

        return rounded


class _Program(NamedTuple):
    """Be the sum of all ranks' blocks in the canonical order.

    Steps are (result, left, right): a result is an accumulator's slot, or -1 for the final one; an operand is a rank's
    block, or `~slot`.
    """

    steps: tuple[tuple[int, int, int], ...]
    slots: int


@lru_cache(maxsize=64)
def _program(size: int, rank: int) -> _Program:
    """Return the local steps of direct exchange, with what it would have received named by rank."""
    schedule = build("reduce_scatter", "direct", size, rank)
    round_ = schedule.rounds[0]
    raw = {message.refs[0]: message.peer for message in round_.messages if isinstance(message, Recv)}

    def operand(ref: Ref) -> int:
        return ~ref.slot if ref.space is Space.ACC else raw.get(ref, rank)

    steps = tuple(
        (step.dst.slot if step.dst.space is Space.ACC else -1, operand(step.left), operand(step.right))
        for step in round_.local
        if isinstance(step, Reduce)
    )
    return _Program(steps, schedule.acc_slots)
