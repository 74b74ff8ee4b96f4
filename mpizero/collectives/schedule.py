"""What a collective algorithm is: data.

A builder is a pure function `(size, rank, root) -> Schedule`; where an algorithm depends on placement or on a number of
pipelined pieces, it takes that too. A schedule is a list of rounds; a round is a few messages
and then a few local steps over numbered chunks. The same object is executed over a transport (`execute`), proven by
symbolic simulation of all ranks (`simulate`), counted (`sent_bytes`) and printed (`show`).

[Note: spaces] A step names memory by `Ref(space, chunk, slot)`:

- `IN`: the caller's input. Chunk c is its elements [offsets[c], offsets[c + 1]). Never written.
- `OUT`: the caller's result. Written with final values only. In an in-place call it is the same memory as `IN`.
- `RAW`: scratch for values as they came from some rank's `IN`, in the caller's dtype; `slot` says which.
- `ACC`: scratch for partial results, in the accumulation dtype (fp32 for 16-bit floats); `slot` says which.

Partial results live in `ACC` alone, so that a 16-bit value is rounded, and a mean divided, exactly once: on its way
into `OUT`. A message carries the width of the space that it leaves, which is why `IN`, `RAW` and `OUT` may be received
from each other and `ACC` only from `ACC`; the simulator holds every builder to that.

[Note: rounds] The messages of a round are posted together; its local steps run, in order, when all of them are done.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

__all__ = ["Copy", "Recv", "Reduce", "Ref", "Round", "Schedule", "Send", "Space", "Step", "even_offsets"]


class Space(Enum):
    """Name a kind of memory; see [Note: spaces]."""

    __hash__ = object.__hash__  # Enum's own is a Python function, and the simulator asks for it a million times
    IN = "in"
    OUT = "out"
    RAW = "raw"
    ACC = "acc"


class Ref(NamedTuple):
    """Name the memory of one chunk."""

    space: Space
    chunk: int
    slot: int = 0


class Send(NamedTuple):
    """Send the chunks at `refs` to `peer`, as one message."""

    peer: int
    refs: tuple[Ref, ...]


class Recv(NamedTuple):
    """Receive one message of `peer` into `refs`."""

    peer: int
    refs: tuple[Ref, ...]


class Copy(NamedTuple):
    """Store `src` in `dst`."""

    dst: Ref
    src: Ref


class Reduce(NamedTuple):
    """Store `left op right` in `dst`, which may be one of the two. `left` comes first in the order of summation."""

    dst: Ref
    left: Ref
    right: Ref


Step = Send | Recv | Copy | Reduce


class Round(NamedTuple):
    """Group messages that are under way together, and the local steps after them; see [Note: rounds]."""

    messages: tuple[Send | Recv, ...]
    local: tuple[Copy | Reduce, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Hold what one rank does in one collective."""

    chunks: int
    """Into how many chunks the buffer is cut: one per rank (per pair of ranks in all-to-all) where a chunk is some
    rank's, else any number, as lanes and pipelined pieces ask for."""
    rounds: tuple[Round, ...]
    raw_slots: int = 0
    """Chunk-sized scratch blocks in the caller's dtype."""
    acc_slots: int = 0
    """Chunk-sized scratch blocks in the accumulation dtype."""

    def sent_bytes(self, offsets: list[int], itemsize: int, acc_itemsize: int) -> int:
        """Return the payload bytes that this rank sends.

        Args:
            offsets: `chunks + 1` element offsets, as of `even_offsets`.
            itemsize: bytes of an element of the caller's dtype.
            acc_itemsize: bytes of an element of the accumulation dtype.
        """
        total = 0
        for step in self._sends():
            for ref in step.refs:
                width = acc_itemsize if ref.space is Space.ACC else itemsize
                total += (offsets[ref.chunk + 1] - offsets[ref.chunk]) * width
        return total

    def sent_messages(self) -> int:
        """Return the number of messages that this rank sends, when no chunk is empty and none is cut in segments."""
        return len(self._sends())

    def _sends(self) -> list[Send]:
        return [step for round_ in self.rounds for step in round_.messages if isinstance(step, Send)]

    def show(self) -> str:
        """Return the schedule as text, a line per step."""
        lines = [f"{self.chunks} chunks, {self.raw_slots} raw and {self.acc_slots} accumulator slots"]
        for number, round_ in enumerate(self.rounds):
            lines.append(f"round {number}")
            lines += [f"  {_line(step)}" for step in (*round_.messages, *round_.local)]
        return "\n".join(lines)


def even_offsets(count: int, chunks: int) -> list[int]:
    """Return the element offsets of `chunks` chunks of `count` elements: chunk i is [i*n//p, (i+1)*n//p)."""
    return [index * count // chunks for index in range(chunks + 1)]


def _line(step: Step) -> str:
    if isinstance(step, Send):
        return f"send to {step.peer}: {', '.join(map(_name, step.refs))}"
    if isinstance(step, Recv):
        return f"receive from {step.peer}: {', '.join(map(_name, step.refs))}"
    if isinstance(step, Copy):
        return f"{_name(step.dst)} = {_name(step.src)}"
    return f"{_name(step.dst)} = {_name(step.left)} + {_name(step.right)}"


def _name(ref: Ref) -> str:
    slot = f"/{ref.slot}" if ref.space in {Space.RAW, Space.ACC} else ""
    return f"{ref.space.value}[{ref.chunk}]{slot}"
