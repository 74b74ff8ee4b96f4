"""Run a schedule on real memory over a transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpizero.arrays import DType, View, combine, copy, scratch_view
from mpizero.collectives.schedule import Copy, Recv, Ref, Round, Schedule, Send, Space

if TYPE_CHECKING:
    from mpizero.typing import Bytes, CommunicatorLike

__all__ = ["SCRATCH", "Buffers", "execute"]

SCRATCH = 8 << 20
"""Bytes of scratch that a collective may use before it is cut in segments.

[Note: segments] The elements of a chunk are independent, so a schedule may be run on a part of every chunk at a time.
A chunk is cut in segments so that all scratch slots of the schedule fit in this many bytes, which also keeps them in
the cache between the receive that fills them and the sum that empties them. All ranks cut alike: the cut follows from
the chunk lengths, the dtype and the schedule's slots on rank 0, which every rank can build.
"""


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """Say where a schedule's IN and OUT lie."""

    input: View
    output: View
    """Empty on a rank that gets no result."""
    offsets: list[int]
    """Element offsets of the chunks in the whole buffer."""
    input_start: int = 0
    """The whole buffer's element at which `input` begins: a rank that puts in its own chunk has no other."""
    output_start: int = 0
    """The same for `output`."""
    op: str = "sum"
    divisor: int = 1
    """What final results are divided by: the number of ranks for a mean."""


def execute(schedule: Schedule, buffers: Buffers, comm: CommunicatorLike, *, segment: int, what: str) -> None:
    """Run one rank's schedule.

    Args:
        schedule: the rank's own.
        buffers: its input and output.
        comm: supplies the transport and the scratch memory.
        segment: elements of a chunk to work on at a time, equal on all ranks; see [Note: segments].
        what: the collective's name, for errors.
    """
    longest = max(stop - start for start, stop in zip(buffers.offsets, buffers.offsets[1:], strict=False))
    step = min(segment, longest) or 1
    for start in range(0, longest, step):
        _Run(schedule, buffers, comm, start, step).rounds(what)


class _Run:
    """Hold one segment's run: resolves refs to memory, and packs messages of several chunks."""

    def __init__(self, schedule: Schedule, buffers: Buffers, comm: CommunicatorLike, start: int, step: int) -> None:
        self.schedule, self.buffers, self.transport = schedule, buffers, comm.transport
        self.start, self.step = start, step
        self.dtype: DType = buffers.input.dtype
        self.acc: DType = self.dtype.accumulator(buffers.op)
        raw_bytes = _aligned(schedule.raw_slots * step * self.dtype.itemsize)
        acc_bytes = _aligned(schedule.acc_slots * step * self.acc.itemsize)
        memory = comm.scratch(raw_bytes + acc_bytes) if raw_bytes + acc_bytes else np.empty(0, np.uint8)
        self.raw = scratch_view(memory[:raw_bytes], self.dtype)
        self.accumulators = scratch_view(memory[raw_bytes : raw_bytes + acc_bytes], self.acc)

    def rounds(self, what: str) -> None:
        """Run every round."""
        for round_ in self.schedule.rounds:
            unpack = self._post(round_)
            self.transport.wait(what)
            for packed, refs in unpack:
                self._unpack(packed, refs)
            self._local(round_)

    def _post(self, round_: Round) -> list[tuple[Bytes, tuple[Ref, ...]]]:
        """Post a round's messages, receives first; return those that have to be unpacked afterwards."""
        unpack: list[tuple[Bytes, tuple[Ref, ...]]] = []
        for step in round_.messages:
            if not isinstance(step, Recv):
                continue
            views = self._views(step.refs)
            if len(views) == 1:
                self.transport.receive(step.peer, views[0])
            elif views:
                packed = np.empty(sum(view.nbytes for view in views), np.uint8)
                self.transport.receive(step.peer, packed)
                unpack.append((packed, step.refs))
        for step in round_.messages:
            if isinstance(step, Send):
                views = self._views(step.refs)
                if views:
                    data = views[0] if len(views) == 1 else np.concatenate([view.view(np.uint8) for view in views])
                    self.transport.send(step.peer, data)
        return unpack

    def _views(self, refs: tuple[Ref, ...]) -> list[Bytes]:
        """Return the memory of the refs, without empty ones: both ends of a message leave out the same."""
        views = [self.view(ref).data for ref in refs]
        return [view for view in views if view.size]

    def _unpack(self, packed: Bytes, refs: tuple[Ref, ...]) -> None:
        position = 0
        for view in self._views(refs):
            view.view(np.uint8)[:] = packed[position : position + view.nbytes]
            position += view.nbytes

    def _local(self, round_: Round) -> None:
        for step in round_.local:
            target = self.view(step.dst)
            divisor = self.buffers.divisor if step.dst.space is Space.OUT else 1
            if isinstance(step, Copy):
                source = self.view(step.src)
                if source.data.ctypes.data != target.data.ctypes.data or divisor != 1:
                    copy(target, source, divisor)
            else:
                combine(self.buffers.op, target, self.view(step.left), self.view(step.right), divisor)

    def view(self, ref: Ref) -> View:
        """Return the memory of a ref within this segment."""
        offsets = self.buffers.offsets
        low, high = offsets[ref.chunk] + self.start, offsets[ref.chunk + 1]
        low, high = min(low, high), min(low + self.step, high)
        if ref.space is Space.IN:
            start = low - self.buffers.input_start
            return self.buffers.input.part(start, start + high - low)
        if ref.space is Space.OUT:
            start = low - self.buffers.output_start
            return self.buffers.output.part(start, start + high - low)
        pool = self.raw if ref.space is Space.RAW else self.accumulators
        return pool.part(ref.slot * self.step, ref.slot * self.step + high - low)


def _aligned(nbytes: int) -> int:
    """Return the next multiple of 64 bytes, a cache line."""
    return -(-nbytes // 64) * 64
