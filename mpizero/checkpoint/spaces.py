"""Which file holds which elements of a tensor, by arithmetic alone.

[Note: spaces] The tensors that are cut together lie behind each other, at offsets, in a *space*, as parameters do in
the flat buffer of a unit. A space of n elements is cut in equal shards, and a shard in as many parts as ranks hold a
copy of it. Every rank writes one file, numbered by shard and copy, with its part of every space. So a manifest names an
offset for each tensor and three numbers for each space, however many ranks there are; every rank works out its own part
without hearing of the others, and a reader finds the files that hold any range in a few divisions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Piece", "Space", "Stored", "range_key"]

GRAIN = 64
"""Elements: parts of a shard begin on multiples of this."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Name a range of a tensor that lies in one file."""

    file: int
    start: int
    """The first element of the stored range, counted within the tensor."""
    stop: int


@dataclass(frozen=True, kw_only=True)
class Space:
    """Say how what is cut together is cut. See [Note: spaces]."""

    length: int
    """Elements of one shard."""
    shards: int
    copies: int = 1
    """The parts of each shard, one for each rank that holds it."""

    def begin(self, file: int) -> int:
        """Return the first element that file number `file` holds; the number after the last file gives the end."""
        shard, copy = divmod(file, self.copies)
        return shard * self.length + self.length // GRAIN * copy // self.copies * GRAIN

    def file_at(self, position: int) -> int:
        """Return the file that holds the element at `position`."""
        shard, rest = divmod(position, self.length)
        file = shard * self.copies + min(rest // GRAIN * self.copies // (self.length // GRAIN), self.copies - 1)
        while self.begin(file + 1) <= position:  # rounding may have put it one too low
            file += 1
        return file


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Say where one tensor of a checkpoint lies."""

    key: str
    """`model/NAME`, `optimizer/STATE/NAME` or `extra/NUMBER`."""
    dtype: str
    """As safetensors names it: F32, BF16, I64, ..."""
    shape: tuple[int, ...]
    space: int | None = None
    """The number of its space; None for a tensor that lies whole in one file."""
    offset: int = 0
    """The element of the space at which it begins; for a whole tensor, the number of its file."""

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def own(self, spaces: tuple[Space, ...], file: int) -> Piece | None:
        """Return the range that one file holds; None if it holds nothing of this tensor."""
        if self.space is None:
            return Piece(file=file, start=0, stop=self.numel) if self.numel and file == self.offset else None
        space = spaces[self.space]
        low = max(space.begin(file) - self.offset, 0)
        high = min(space.begin(file + 1) - self.offset, self.numel)
        return Piece(file=file, start=low, stop=high) if low < high else None

    def pieces(self, spaces: tuple[Space, ...], start: int, stop: int) -> Iterator[Piece]:
        """Yield the stored ranges that hold any of the elements from `start` to `stop`, in their order."""
        if self.space is None:
            if start < stop:
                yield Piece(file=self.offset, start=0, stop=self.numel)
            return
        position = start
        while position < stop:
            piece = self.own(spaces, spaces[self.space].file_at(self.offset + position))
            assert piece is not None  # noqa: S101  (the file was chosen because it holds the element)
            yield piece
            position = piece.stop


def range_key(key: str, piece: Piece) -> str:
    """Return the name that a range has in its file."""
    return f"{key}[{piece.start}:{piece.stop}]"
