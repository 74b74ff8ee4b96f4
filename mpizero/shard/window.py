"""The memory that the ranks of a node share for one model: the full parameters, and what each rank is doing.

[Note: node-shared parameters] Where all ranks that a parameter is cut over are on one node, its full copy lives once,
in memory that all of them map. In compute precision equal to the master's a shard is a slice of it, and what one rank's
optimizer writes all others see: a gather moves nothing. That is only safe while nobody reads what is being written.
Each rank has a line with two numbers. `reading` is, from just before the agreement of all ranks at which a forward,
backward or `unsharded` begins to its end, the number of that agreement, else 0. A write waits for the ranks that read
since an agreement which the writer has been through; one with a later number waits for the writer. So no rank can be
about to read unnoticed, and none waits in a circle. `generation` counts the rank's steps; a backward
compares the sum with what its forward saw, since a change by another rank leaves this one's version counters alone. The
addresses never change, so what autograd saved stays valid: docs/decisions/0009.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.arrays import from_memory, parse_dtype
from mpizero.comm.forks import tell_in_child
from mpizero.comm.segment import fence
from mpizero.comm.waiting import poll
from mpizero.comm.watch import story
from mpizero.errors import CollectiveTimeoutError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["LINE", "Window", "make_window"]

LINE = 64
"""Bytes, a cache line's: of a rank's two numbers, and the alignment of what lies in the window."""
_WORDS = LINE // 8


class Window:
    """Give out a node's shared memory, and know who reads it."""

    def __init__(self, comm: Any, memory: Any) -> None:
        """Use `memory`, mapped by all ranks of `comm` and zero so far."""
        self.comm, self.nbytes = comm, memory.nbytes
        self._memory = memory
        self._words = memory[: LINE * comm.size].view(np.uint64)
        self._taken = LINE * comm.size
        self._fence = fence()
        tell_in_child(self)

    def leave_behind(self) -> None:
        """Keep the numbers to oneself, this process being a forked child: the other ranks look at the rank's own."""
        self._words = self._words.copy()

    def take(self, length: int, dtype: torch.dtype) -> Tensor:
        """Return the next `length` elements of the window; the same ones on all ranks."""
        kind, library = parse_dtype(dtype)
        start, self._taken = self._taken, self._taken + _round(length * kind.itemsize)
        found: Tensor = from_memory(self._memory[start : start + length * kind.itemsize], (length,), kind, library)
        return found

    def begin_reading(self, agreement: int) -> None:
        """Say that this rank reads from an agreement on, before it comes to it; see `agree.agreements`."""
        self._set(agreement)

    def end_reading(self) -> None:
        """Say that this rank does not read any more."""
        self._set(0)

    def _set(self, number: int) -> None:
        if self._fence is not None:
            self._fence()
        self._words[_WORDS * self.comm.rank] = number

    def stepped(self) -> None:
        """Count a change of this rank's shards."""
        if self._fence is not None:
            self._fence()
        self._words[_WORDS * self.comm.rank + 1] += np.uint64(1)

    def generation(self) -> int:
        """Return a number that grows with every rank's changes."""
        return int(self._words[1::_WORDS].sum())

    def await_readers(self, agreed: int) -> None:
        """Wait until no other rank reads; this one has ended its own reading, or not begun.

        Args:
            agreed: the number of the latest agreement that this rank has come to.

        Raises:
            CollectiveTimeoutError: after the communicator's time-out; names the ranks.
        """
        if self._readers(agreed) and not poll(
            lambda: not self._readers(agreed),
            self.comm.transport.timeout,
            lambda: self._who(agreed),
            needs=(self.comm.uid, lambda: self._readers(agreed)),
        ):
            text = f"{self._who(agreed)}: a step must come after every rank's forward and backward"
            raise CollectiveTimeoutError(f"{text}\n{story(self.comm.uid)}".strip())
        if self._fence is not None:
            self._fence()

    def _readers(self, agreed: int) -> list[int]:
        """Return the ranks that read since an agreement which this one has been through."""
        numbers = self._words[::_WORDS].tolist()
        return [rank for rank, number in enumerate(numbers) if 0 < number <= agreed and rank != self.comm.rank]

    def _who(self, agreed: int) -> str:
        ranks = self._readers(agreed)
        return f"rank {self.comm.rank} is about to write the shared parameters, which ranks {ranks} still read"


def make_window(comm: Any, sizes: list[int]) -> Window | None:
    """Return a window with room for buffers of these bytes; None, on all ranks, where they can share none. Collective.

    Args:
        comm: the ranks of one group.
        sizes: bytes of each buffer, in the order in which they will be taken.
    """
    if comm.board is None:
        return None
    memory = comm.window(LINE * comm.size + sum(_round(size) for size in sizes))
    return None if memory is None else Window(comm, memory)


def _round(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE
