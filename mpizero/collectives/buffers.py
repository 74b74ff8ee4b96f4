"""Where the chunks of a collective lie in the buffers of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from mpizero.arrays import DType, View

__all__ = ["Arithmetic", "Buffers", "Layout", "Line", "Square"]


class Arithmetic(NamedTuple):
    """Say what is done with the elements."""

    dtype: DType
    op: str = "sum"
    divisor: int = 1
    """What final results are divided by: the number of ranks for a mean."""


class Layout(Protocol):
    """Map chunk numbers to elements."""

    @property
    def longest(self) -> int:
        """Return the elements of the longest chunk, equal on all ranks where the chunks' lengths are."""
        ...

    def length(self, chunk: int) -> int:
        """Return the elements of a chunk."""
        ...

    def input_at(self, chunk: int) -> int:
        """Return the element of the rank's input at which a chunk begins."""
        ...

    def output_at(self, chunk: int) -> int:
        """Return the element of the rank's output at which a chunk begins."""
        ...

    def key(self) -> tuple[object, ...]:
        """Return a hashable value that equal layouts share."""
        ...


@dataclass(frozen=True, slots=True)
class Line:
    """Cut one buffer in chunks that follow each other."""

    offsets: list[int]
    """Element offsets of the chunks in the whole buffer, and its end."""
    input_start: int = 0
    """The whole buffer's element at which the input begins: a rank that puts in its own chunk has no other."""
    output_start: int = 0
    """The same for the output."""

    @property
    def longest(self) -> int:
        """Return the elements of the longest chunk."""
        return max(stop - start for start, stop in zip(self.offsets, self.offsets[1:], strict=False))

    def length(self, chunk: int) -> int:
        """Return the elements of a chunk."""
        return self.offsets[chunk + 1] - self.offsets[chunk]

    def input_at(self, chunk: int) -> int:
        """Return the element of the input at which a chunk begins."""
        return self.offsets[chunk] - self.input_start

    def output_at(self, chunk: int) -> int:
        """Return the element of the output at which a chunk begins."""
        return self.offsets[chunk] - self.output_start

    def key(self) -> tuple[object, ...]:
        """Return a hashable value that equal layouts share."""
        return (*self.offsets, self.input_start, self.output_start)


@dataclass(frozen=True, slots=True)
class Square:
    """Cut an all-to-all: chunk s * p + d goes from rank s to rank d."""

    rank: int
    size: int
    leaving: list[int]
    """Element offsets in the input of what goes to each rank, and its end."""
    arriving: list[int]
    """Element offsets in the output of what comes from each rank, and its end."""
    alike: bool = False
    """Whether all ranks cut alike, into equal parts."""

    @property
    def longest(self) -> int:
        """Return the elements of the longest chunk that this rank has to do with."""
        lengths = [self.leaving[i + 1] - self.leaving[i] for i in range(self.size)]
        return max(*lengths, *(self.arriving[i + 1] - self.arriving[i] for i in range(self.size)))

    def length(self, chunk: int) -> int:
        """Return the elements of a chunk; one between two other ranks is taken to be as long as all are."""
        source, target = divmod(chunk, self.size)
        if target == self.rank:
            return self.arriving[source + 1] - self.arriving[source]
        place = target if source == self.rank else 0
        return self.leaving[place + 1] - self.leaving[place]

    def input_at(self, chunk: int) -> int:
        """Return the element of the input at which a chunk begins."""
        return self.leaving[chunk % self.size]

    def output_at(self, chunk: int) -> int:
        """Return the element of the output at which a chunk begins."""
        return self.arriving[chunk // self.size]

    def key(self) -> tuple[object, ...]:
        """Return a hashable value that equal layouts share."""
        return (*self.leaving, *self.arriving, self.alike)


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffers:
    """Say where a schedule's IN and OUT lie."""

    input: View
    """Empty on a rank that puts nothing in."""
    output: View
    """Empty on a rank that gets no result."""
    layout: Layout
    arithmetic: Arithmetic
