"""Run a schedule on real memory over a transport."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from mpizero.arrays import View, address_of, scratch_view
from mpizero.collectives.machine import HOST
from mpizero.collectives.schedule import Copy, Recv, Ref, Round, Schedule, Send, Space
from mpizero.comm import STRANDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpizero.collectives.buffers import Buffers
    from mpizero.collectives.machine import Machine
    from mpizero.typing import Bytes, Transport, Wait

__all__ = ["IN_FLIGHT", "SCRATCH", "Workshop", "execute"]

SCRATCH = 8 << 20
"""Bytes of scratch that a collective may use before it is cut in segments.

[Note: segments] The elements of a chunk are independent, so a schedule may be run on a part of every chunk at a time.
A chunk is cut in segments so that all scratch slots of the schedule fit in this many bytes, which also keeps them in
the cache between the receive that fills them and the sum that empties them. All ranks cut alike: the cut follows from
the chunk lengths, the dtype and the schedule's slots on rank 0, which every rank can build.

Up to `IN_FLIGHT` segments are under way at a time, so that one is summed, or passes between ranks of a host, while
another is on the wire. Their messages never meet: each of these strands has a tag of its own.
"""
IN_FLIGHT = STRANDS

_NOTHING = np.empty(0, np.uint8)


class Workshop(Protocol):
    """Supply what a schedule is run with."""

    @property
    def transport(self) -> Transport:
        """Return the wire."""
        ...

    def scratch(self, nbytes: int) -> Bytes:
        """Return at least `nbytes` of memory, of the kind in which the buffers lie."""
        ...


def execute(
    schedule: Schedule,
    buffers: Buffers,
    comm: Workshop,
    *,
    segment: int,
    what: str,
    machines: Sequence[Machine] = (HOST,) * IN_FLIGHT,
) -> Iterator[Wait]:
    """Run one rank's schedule, step by step: yields where it has to wait.

    Args:
        schedule: the rank's own.
        buffers: its input and output.
        comm: supplies the transport and the scratch memory.
        machines: do the local steps, one per strand.
        segment: elements of a chunk to work on at a time, equal on all ranks; see [Note: segments].
        what: the collective's name, for errors.
    """
    step = min(segment, buffers.layout.longest) or 1
    starts = range(0, buffers.layout.longest, step)
    depth = min(IN_FLIGHT, len(starts))
    room = _room(schedule, buffers, step)
    memory = comm.scratch(depth * sum(room)) if sum(room) else np.empty(0, np.uint8)
    frame = _Frame(schedule, buffers, comm.transport, room, step)
    strands = []
    for strand in range(depth):
        scratch = memory[strand * sum(room) : (strand + 1) * sum(room)]
        runs = [_Run(frame, scratch, start, (strand, machines[strand])) for start in starts[strand::depth]]
        strands.append(_strand(runs, what))
    whole = False
    try:
        yield from strands[0] if depth == 1 else _together(strands)
        whole = True
    finally:
        if not whole:
            comm.transport.health.sound = False


def _strand(runs: list[_Run], what: str) -> Iterator[Wait]:
    for run in runs:
        yield from run.rounds(what)


def _together(strands: list[Iterator[Wait]]) -> Iterator[Wait]:
    """Advance several strands, whichever can go on."""
    waits: list[Wait | None] = [next(strand, None) for strand in strands]
    while True:
        open_ = [wait for wait in waits if wait is not None]
        if not open_:
            return
        yield _Any(open_)
        for index, wait in enumerate(waits):
            if wait is not None and wait.done():
                wait.settle(0.0, finished=True)
                waits[index] = next(strands[index], None)


class _Any:
    """Wait for the first of several waits."""

    def __init__(self, waits: list[Wait]) -> None:
        self.waits = waits

    def done(self) -> bool:
        """Return whether one of them is over."""
        return any(wait.done() for wait in self.waits)

    def block(self, done: Callable[[], bool] | None = None) -> bool:
        """Return True once one is over, False after the time-out."""
        return self.waits[0].block(done or self.done)

    def overdue(self, seconds: float) -> bool:
        """Return whether `seconds` is more than the time-out."""
        return self.waits[0].overdue(seconds)

    def settle(self, seconds: float, *, finished: bool) -> None:
        """Count the wait with the first of them, and if it was given up, give all up."""
        if finished:
            self.waits[0].count(seconds)
            return
        for wait in self.waits:
            wait.settle(seconds, finished=False)

    def count(self, seconds: float) -> None:
        """Count seconds of waiting."""
        self.waits[0].count(seconds)

    def late(self) -> Exception:
        """Return the error of the first."""
        return self.waits[0].late()


def _room(schedule: Schedule, buffers: Buffers, step: int) -> tuple[int, int]:
    """Return the bytes of scratch that one segment needs, in the dtype and in that of accumulators."""
    dtype, op, _ = buffers.arithmetic
    raw = schedule.raw_slots * step * dtype.itemsize
    acc = schedule.acc_slots * step * dtype.accumulator(op).itemsize
    return _aligned(raw), _aligned(acc)


class _Frame(NamedTuple):
    """Hold what the segments of one collective have in common."""

    schedule: Schedule
    buffers: Buffers
    transport: Transport
    room: tuple[int, int]
    step: int


class _Run:
    """Hold one segment's run: resolves refs to memory, and packs messages of several chunks."""

    def __init__(self, frame: _Frame, memory: Bytes, start: int, strand: tuple[int, Machine]) -> None:
        self.schedule, self.buffers, self.transport, (raw, acc), self.step = frame
        self.start, (self.strand, self.machine) = start, strand
        self.dtype, self.op, self.divisor = self.buffers.arithmetic
        self.raw = scratch_view(memory[:raw], self.dtype)
        self.accumulators = scratch_view(memory[raw : raw + acc], self.dtype.accumulator(self.op))

    def rounds(self, what: str) -> Iterator[Wait]:
        """Run every round."""
        machine = self.machine
        for round_ in self.schedule.rounds:
            machine.turn()
            packed = self._pack(round_)
            if round_.messages and (settled := machine.settled()) is not None:
                yield settled
            unpack = self._post(round_, packed)
            early = _is_apart(round_)
            if early:
                self._local(round_)
            wait = self.transport.pending(what)
            if wait is not None:
                yield wait
            for message, views in unpack:
                machine.unpack(message, views)
            if not early:
                self._local(round_)

    def _pack(self, round_: Round) -> list[Bytes]:
        """Return what a round's sends carry, of several chunks packed; empty messages included."""
        packed = []
        for step in round_.messages:
            if isinstance(step, Send):
                views = self._views(step.refs)
                packed.append(views[0] if len(views) == 1 else self.machine.pack(views) if views else _NOTHING)
        return packed

    def _post(self, round_: Round, packed: list[Bytes]) -> list[tuple[Bytes, list[Bytes]]]:
        """Post a round's messages, receives first; return those that have to be unpacked afterwards."""
        unpack: list[tuple[Bytes, list[Bytes]]] = []
        self.transport.strand = self.strand
        for step in round_.messages:
            if not isinstance(step, Recv):
                continue
            views = self._views(step.refs)
            if len(views) == 1:
                self.transport.receive(step.peer, views[0])
            elif views:
                message = self.machine.room(sum(view.nbytes for view in views))
                self.transport.receive(step.peer, message)
                unpack.append((message, views))
        sends = (step for step in round_.messages if isinstance(step, Send))
        for step, data in zip(sends, packed, strict=True):
            if data.nbytes:
                self.transport.send(step.peer, data)
        return unpack

    def _views(self, refs: tuple[Ref, ...]) -> list[Bytes]:
        """Return the memory of the refs as arrays: chunks that adjoin are one, and empty ones are left out.

        Both ends of a message leave out the same, and its bytes are the same however they are joined.
        """
        runs: list[tuple[View, int, int]] = []
        for ref in refs:
            pool, start, stop = self._place(ref)
            if start == stop:
                continue
            if runs and runs[-1][0] is pool and runs[-1][2] == start:
                runs[-1] = (pool, runs[-1][1], stop)
            else:
                runs.append((pool, start, stop))
        return [pool.data[start:stop] for pool, start, stop in runs]

    def _local(self, round_: Round) -> None:
        for step in round_.local:
            target = self.view(step.dst)
            divisor = self.divisor if step.dst.space is Space.OUT else 1
            if isinstance(step, Copy):
                source = self.view(step.src)
                if address_of(source.data) != address_of(target.data) or divisor != 1:
                    self.machine.copy(target, source, divisor)
            else:
                self.machine.combine(self.op, target, self.view(step.left), self.view(step.right), divisor)

    def view(self, ref: Ref) -> View:
        """Return the memory of a ref within this segment."""
        pool, start, stop = self._place(ref)
        return pool.part(start, stop)

    def _place(self, ref: Ref) -> tuple[View, int, int]:
        """Return where a ref lies within this segment: the memory, and its elements from where to where."""
        layout = self.buffers.layout
        length = max(0, min(self.step, layout.length(ref.chunk) - self.start))
        if ref.space is Space.IN:
            start = layout.input_at(ref.chunk) + self.start
            return self.buffers.input, start, start + length
        if ref.space is Space.OUT:
            start = layout.output_at(ref.chunk) + self.start
            return self.buffers.output, start, start + length
        pool = self.raw if ref.space is Space.RAW else self.accumulators
        return pool, ref.slot * self.step, ref.slot * self.step + length


@lru_cache(maxsize=4096)
def _is_apart(round_: Round) -> bool:
    """Return whether a round's local steps touch nothing that its messages touch: they may run meanwhile.

    In an in-place call IN and OUT are the same memory, so chunks are compared, whatever the space; slots are compared
    by themselves.
    """
    if not round_.local or not round_.messages:
        return False
    sent = {_cell(ref) for step in round_.messages for ref in step.refs}
    return not any(_cell(ref) in sent for step in round_.local for ref in step)


def _cell(ref: Ref) -> tuple[bool, str, int]:
    """Return a name for memory that two refs share or not."""
    if ref.space is Space.IN or ref.space is Space.OUT:
        return (True, "", ref.chunk)
    return (False, ref.space.value, ref.slot)


def _aligned(nbytes: int) -> int:
    """Return the next multiple of 64 bytes, a cache line."""
    return -(-nbytes // 64) * 64
