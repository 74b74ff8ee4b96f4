"""The parts of a chunk on all ranks of a host, and the loops that load, sum and store them; see `phase`.

[Note: what is kept] Jobs are kept for the next call on the same buffers. They name this rank's own buffers by place
alone and get the arrays at each run, so that a buffer which the caller drops is free at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpizero.arrays import UFUNCS, View, can_add_halves, combine, halves_adder
from mpizero.collectives.buffers import Square
from mpizero.collectives.registry import OPERATIONS, build
from mpizero.collectives.schedule import Recv, Reduce, Ref, Space
from mpizero.comm import mappings

if TYPE_CHECKING:
    from mpizero.arrays import DType
    from mpizero.collectives.buffers import Arithmetic, Layout
    from mpizero.collectives.loads import Task
    from mpizero.comm.board import Board
    from mpizero.comm.reach import Reach
    from mpizero.typing import Bytes, CommunicatorLike

__all__ = ["BLOCK", "FAR_BLOCK", "Finder", "Job", "all_mapped"]

BLOCK = 256 << 10
"""Bytes of a chunk to work on at a time: a block of every source, the result and the partial sums stay in a core's
cache between the load that brings them and the store that takes them away."""
FAR_BLOCK = 1 << 20
"""The same where the kernel has to be asked for some of them, which takes microseconds each time."""
SMALLEST_BLOCK = 64 << 10
ROOM = 4 << 20
"""Bytes of scratch for all blocks that a job has under way."""

_NOTHING: Bytes = np.empty(0, np.uint8)


def all_mapped(board: Board) -> bool:
    """Return whether every buffer of the current collective lies in memory that all have mapped.

    All ranks see the same records, so all get the same answer.
    """
    words = board.words
    first = (at + part for at in board.records[board.number & 1] for part in (2, 5))
    return not any(words[at] and not words[at + 1] for at in first)


class _Mapped:
    """Be one rank's part of a chunk in memory that this rank has mapped, its own included."""

    __slots__ = ("array",)

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

    def __init__(self, reach: Reach, peer: int, address: int, width: int) -> None:
        self.reach, self.peer, self.address, self.width = reach, peer, address, width
        self.scratch = _NOTHING
        self.place = 0
        """Where a loaded block goes, as array and as address; given to sources that are summed."""

    def give(self, scratch: Bytes) -> None:
        """Give the part memory for the blocks that it loads."""
        self.scratch, self.place = scratch, scratch.ctypes.data

    def load(self, start: int, stop: int) -> Bytes:
        """Return a copy of elements [start, stop) of the chunk."""
        target: Bytes = self.scratch[: stop - start]
        self.fetch(start, stop, self.place)
        return target

    def fetch(self, start: int, stop: int, place: int) -> None:
        """Copy elements [start, stop) of the chunk to the address `place`."""
        width = self.width
        self.reach.read(self.peer, self.address + start * width, place, (stop - start) * width)

    def store(self, start: int, stop: int, data: Bytes) -> None:
        """Store `data` as elements [start, stop) of the chunk."""
        width = self.width
        self.reach.write(self.peer, self.address + start * width, data.ctypes.data, (stop - start) * width)


_Part = _Mapped | _Private
_Block = Callable[[int, int], None]


class _Own(NamedTuple):
    """Say where a chunk lies in this rank's own input and output, and hold both while a job runs."""

    given: _Mapped
    given_at: int
    result: _Mapped
    result_at: int
    length: int

    def open(self, source: Bytes, output: Bytes) -> None:
        """Point at the arrays of this run; an array that the task does not touch may be empty."""
        self.given.array = source[self.given_at : self.given_at + self.length]
        self.result.array = output[self.result_at : self.result_at + self.length]

    def close(self) -> None:
        """Let the arrays go."""
        self.given.array = self.result.array = _NOTHING


class Job:
    """Be one task with all its parts found."""

    def __init__(self, own: _Own, step: int, block: _Block, foreign: int) -> None:
        """Hold what is to be done.

        Args:
            own: this rank's parts.
            step: elements of a block.
            block: loads, sums and stores elements [start, stop) of the chunk.
            foreign: bytes that this rank loads from its peers and stores to them.
        """
        self.own, self.step, self.block, self.foreign = own, step, block, foreign

    def run(self, source: Bytes, output: Bytes) -> int:
        """Do the chunk block by block; return the bytes that came from and went to peers."""
        own, step, block = self.own, self.step, self.block
        own.open(source, output)
        try:
            for start in range(0, own.length, step):
                block(start, min(start + step, own.length))
        finally:
            own.close()
        return self.foreign


def _pair(ufunc: np.ufunc, own: _Own, operands: list[_Mapped], target: _Mapped) -> _Block:
    """Return the shortest loop there is: two ranks, plain elements, mapped buffers."""
    left, right = operands
    result = own.result

    def block(start: int, stop: int) -> None:
        total = result.array[start:stop]
        ufunc(left.array[start:stop], right.array[start:stop], out=total)
        target.array[start:stop] = total

    return block


def _pair_of_halves(dtype: DType, own: _Own, operands: list[_Mapped], target: _Mapped) -> _Block:
    """Return the same for sums of 16-bit floats: torch adds in fp32 and rounds once."""
    left, right = operands
    result = own.result
    adders: list[Callable[[int, int], None]] = []

    def block(start: int, stop: int) -> None:
        if start == 0:
            adders[:] = [halves_adder(dtype, result.array, left.array, right.array)]
        adders[0](start, stop)
        target.array[start:stop] = result.array[start:stop]
        if stop == own.length:
            adders.clear()  # it holds this rank's own arrays

    return block


def _storing(bring: Callable[[int, int], Bytes], targets: list[_Part]) -> _Block:
    """Return what brings a block and stores it into the targets."""

    def block(start: int, stop: int) -> None:
        result = bring(start, stop)
        for target in targets:
            target.store(start, stop, result)

    return block


class Finder:
    """Make jobs of tasks: find the parts of all ranks, and the scratch for a block of each."""

    def __init__(self, comm: CommunicatorLike, operation: str, layout: Layout, arithmetic: Arithmetic) -> None:
        """Look at the records of the board's current collective.

        Args:
            comm: the ranks.
            operation: the collective's name.
            layout: where this rank's chunks lie.
            arithmetic: what is done with them.
        """
        self.comm, self.layout = comm, layout
        self.board: Board = comm.board
        self.traits = OPERATIONS[operation]
        self.dtype, self.op, self.divisor = arithmetic
        self.rank, self.size = comm.rank, comm.size
        self.parity = self.board.number & 1
        self.mapped = all_mapped(self.board)

    def job(self, task: Task) -> Job:
        """Return a task with its parts."""
        length, width = self.layout.length(task.chunk), self.dtype.itemsize
        own = _Own(_Mapped(_NOTHING), self._given_at(task), _Mapped(_NOTHING), self._result_at(task), length)
        sources: list[Any] = [self._source(rank, task.chunk, length) for rank in task.sources]
        if self.rank in task.sources:
            sources[task.sources.index(self.rank)] = own.given
        targets: list[Any] = [self._target(rank, task.chunk, length) for rank in task.targets if rank != self.rank]
        foreign = sum(rank != self.rank for rank in (*task.sources, *task.targets)) * length * width
        here = self.rank in task.targets
        if not self.traits.reduces:
            step = (BLOCK if self.mapped else FAR_BLOCK) // width
            return Job(own, step, _storing(self._copying(sources[0], own, here=here), targets), foreign)
        if here and self._is_pair(sources, targets):
            if not self.dtype.is_half:
                return Job(own, BLOCK // width, _pair(UFUNCS[self.op], own, sources, targets[0]), foreign)
            if self.op == "sum" and can_add_halves():
                return Job(own, BLOCK // width, _pair_of_halves(self.dtype, own, sources, targets[0]), foreign)
        blocks = _Blocks(self, sources, here=here)
        return Job(own, blocks.step, _storing(self._summing(sources, own, blocks), targets), foreign)

    def _is_pair(self, sources: list[Any], targets: list[Any]) -> bool:
        two = self.size == 2 and len(targets) == 1
        return two and self.divisor == 1 and all(isinstance(part, _Mapped) for part in (*sources, *targets))

    def _given_at(self, task: Task) -> int:
        return self.layout.input_at(task.chunk) if self.rank in task.sources else 0

    def _result_at(self, task: Task) -> int:
        return self.layout.output_at(task.chunk) if self.rank in task.targets else 0

    def _source(self, rank: int, chunk: int, length: int) -> _Part:
        if rank == self.rank:
            return _Mapped(_NOTHING)  # its own, which comes with each run
        if isinstance(self.layout, Square):
            start = self._leaving(self.layout, rank, chunk % self.size)
        else:
            start = 0 if self.traits.input == "chunk" else self._whole(chunk)
        return self._part(rank, 2, start, length)

    def _leaving(self, layout: Square, rank: int, target: int) -> int:
        """Return the element of a rank's input at which its part for `target` begins."""
        if layout.alike:
            return layout.leaving[target]
        cell = self.board.cell(self.parity, rank)
        return int(cell[8 * target : 8 * target + 8].view(np.int64)[0])

    def _target(self, rank: int, chunk: int, length: int) -> _Part:
        start = 0 if self.traits.output == "chunk" else self._whole(chunk)
        return self._part(rank, 5, start, length)

    def _whole(self, chunk: int) -> int:
        """Return the element of a whole buffer at which a chunk begins; all-to-all aside, layouts are lines."""
        offsets: list[int] = self.layout.offsets  # type: ignore[attr-defined]
        return offsets[chunk]

    def _part(self, peer: int, field: int, start: int, length: int) -> _Part:
        """Return a peer's part, found by its record: address, segment and place of its input (2) or its output (5)."""
        at = self.board.records[self.parity][peer] + field
        address, key, place = self.board.words[at : at + 3]
        width = self.dtype.itemsize
        if key:
            first = place + start * width
            return _Mapped(mappings().segment(key).bytes[first : first + length * width].view(self.dtype.storage))
        reach = self.board.reach
        assert reach is not None  # noqa: S101  (else all ranks have fallen back)
        return _Private(reach, peer, address + start * width, width)

    def _copying(self, source: _Part, own: _Own, *, here: bool) -> Callable[[int, int], Bytes]:
        """Return what brings a block here: into this rank's own result, if it has one and the block is not there."""
        if not here:
            return source.load
        result = own.result

        def fetch(start: int, stop: int) -> Bytes:
            part = result.load(start, stop)
            source.fetch(start, stop, part.ctypes.data)  # type: ignore[union-attr]
            return part

        def copy(start: int, stop: int) -> Bytes:
            part, data = result.load(start, stop), source.load(start, stop)
            if part.ctypes.data != data.ctypes.data:
                part[...] = data
            return part

        return fetch if isinstance(source, _Private) else copy

    def _summing(self, sources: list[_Part], own: _Own, blocks: _Blocks) -> Callable[[int, int], Bytes]:
        """Return what sums a block: the local steps of direct exchange, on operands that lie where they were put."""
        steps, partial, out = blocks.program.steps, blocks.partial, blocks.out
        result, add = own.result, self._adder()

        def block(start: int, stop: int) -> Bytes:
            count = stop - start
            final = result.load(start, stop) if out is None else out[:count]
            for dst, left, right in steps:
                add(
                    final if dst < 0 else partial[dst][:count],
                    sources[left].load(start, stop) if left >= 0 else partial[~left][:count],
                    sources[right].load(start, stop) if right >= 0 else partial[~right][:count],
                    dst < 0,
                )
            return final

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


class _Blocks:
    """Hold the scratch of a sum: blocks of sources that have to be fetched, of partial sums, of a result for others.

    It is the communicator's scratch, which the jobs of its collectives use one after the other.
    """

    def __init__(self, finder: Finder, sources: list[_Part], *, here: bool) -> None:
        dtype = finder.dtype
        acc = np.dtype(dtype.accumulator(finder.op).storage)
        self.program = _program(finder.size, finder.rank)
        fetched = [part for part in sources if isinstance(part, _Private)]
        storages = [np.dtype(dtype.storage)] * (len(fetched) + (not here)) + [acc] * self.program.slots
        width = sum(storage.itemsize for storage in storages)
        most = (BLOCK if finder.mapped else FAR_BLOCK) // dtype.itemsize
        least = SMALLEST_BLOCK // dtype.itemsize
        self.step = max(least, min(most, ROOM // width // 64 * 64)) if width else most
        memory = finder.comm.scratch(self.step * width) if width else _NOTHING
        arrays = []
        for storage in storages:
            nbytes = self.step * storage.itemsize
            arrays.append(memory[:nbytes].view(storage))
            memory = memory[nbytes:]
        for part, array in zip(fetched, arrays, strict=False):
            part.give(array)
        self.out: Bytes | None = None if here else arrays[len(fetched)]
        self.partial = arrays[len(fetched) + (not here) :]


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
