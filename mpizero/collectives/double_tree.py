"""Two binary trees, each carrying half of the buffer in pipelined pieces: short paths and nearly the full bandwidth.

A binary tree alone leaves its leaves' links idle. Here every rank but the root is an inner node of at most one of two
trees, so that both directions of its link are busy throughout. In a round a piece moves one level: up and down times
are the depth of the trees, at most log2 p, and then a pair of pieces a round.
Source: Sanders, Speck, Traeff, "Two-Tree Algorithms for Full Bandwidth Broadcast, Reduction and Scan", 2009. The trees
are in order of ranks (section 2 there); pieces of both trees move in the same round, so that edges need no colours.

[Note: clock] Every message has a time that both its ends compute: up an edge in time (levels below it) + piece, down
an edge in time (levels above it) + piece, down after up for the same piece. A rank's rounds are its messages by time,
which cannot deadlock: of the messages not yet taken, the earliest has both its ends waiting for it.

The trees' positions are 1 to p - 1, given to the ranks but the root in ascending order. The order of summation is
(left subtree + own part) + right subtree, and the root's part before all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mpizero.collectives.registry import register
from mpizero.collectives.schedule import Copy, Recv, Reduce, Ref, Round, Schedule, Send, Space

if TYPE_CHECKING:
    from mpizero.collectives.order import Expr

__all__: list[str] = []

RAW_SLOTS = 2
ACC_SLOTS = 3
"""Two children's sums arrive while the sum before them is sent."""


@dataclass(frozen=True)
class _Tree:
    """Hold one of the two trees over the ranks."""

    size: int
    root: int
    second: bool
    """The second tree mirrors the first for an even number of positions, and shifts it by one for an odd number, so
    that what is inner in one is a leaf in the other."""

    @property
    def last(self) -> int:
        """Return the highest position."""
        return self.size - 1

    def position(self, rank: int) -> int:
        """Return the position of a rank, 0 for the root."""
        if rank == self.root:
            return 0
        number = rank + (rank < self.root)
        if not self.second:
            return number
        return self.last + 1 - number if self.last % 2 == 0 else (number - 2) % self.last + 1

    def rank(self, position: int) -> int:
        """Return the rank at a position."""
        if position == 0:
            return self.root
        number = position
        if self.second:
            number = self.last + 1 - position if self.last % 2 == 0 else position % self.last + 1
        return number - (number <= self.root)

    def parent(self, position: int) -> int:
        """Return the position above one; the tree's own top hangs on the root."""
        low = position & -position
        above = (position ^ low) | low << 1
        return above if above <= self.last else position ^ low

    def children(self, position: int) -> list[int]:
        """Return the positions below one, the left one first."""
        if position == 0:
            return [1 << self.last.bit_length() - 1] if self.last else []
        low = (position & -position) >> 1
        found = [position - low] if low else []
        while low and position + low > self.last:
            low >>= 1
        return [*found, position + low] if low else found

    def depth(self, position: int) -> int:
        """Return the number of edges between a position and the root."""
        depth = 0
        while position:
            position, depth = self.parent(position), depth + 1
        return depth

    @cached_property
    def height(self) -> int:
        """Return the largest depth."""
        return self.last.bit_length()

    def expr(self, position: int) -> Expr:
        """Return the order in which the ranks from a position down are summed."""
        total: Expr = self.rank(position)
        for child in self.children(position):
            below = self.expr(child)
            total = (below, total) if child < position else (total, below)
        return total


class _Clock:
    """Collect one rank's messages and local steps by time; see [Note: clock]."""

    def __init__(self) -> None:
        self.messages: dict[int, list[Send | Recv]] = {}
        self.local: dict[int, list[Reduce]] = {}

    def rounds(self) -> tuple[Round, ...]:
        """Return the rounds in order of time."""
        return tuple(
            Round(tuple(self.messages[time]), tuple(self.local.get(time, ()))) for time in sorted(self.messages)
        )

    def up(self, tree: _Tree, rank: int, chunks: range) -> None:
        """Add the reduction over one tree to the root's OUT, its piece k in chunk k of `chunks`."""
        position = tree.position(rank)
        start = tree.height - tree.depth(position)
        below = tree.children(position)
        for piece, chunk in enumerate(chunks):
            held = Ref(Space.IN, chunk)
            for number, child in enumerate(
                below, start=int(tree.second and not position)
            ):  # the root has one in each tree
                inner = bool(tree.children(child))
                arriving = Ref(Space.ACC, chunk, 1 + number) if inner else Ref(Space.RAW, chunk, number)
                self._at(start + piece - 1, Recv(tree.rank(child), (arriving,)))
                target = Ref(Space.ACC, chunk, 0) if position else Ref(Space.OUT, chunk)
                pair = (arriving, held) if child < position else (held, arriving)
                self.local.setdefault(start + piece - 1, []).append(Reduce(target, *pair))
                held = target
            if position:
                self._at(start + piece, Send(tree.rank(tree.parent(position)), (held,)))

    def down(self, tree: _Tree, rank: int, chunks: range, start: int) -> None:
        """Add the broadcast over one tree from the root's OUT, whose first message is at time `start`."""
        position = tree.position(rank)
        depth = tree.depth(position)
        for piece, chunk in enumerate(chunks):
            refs = (Ref(Space.OUT, chunk),)
            if position:
                self._at(start + depth - 1 + piece, Recv(tree.rank(tree.parent(position)), refs))
            for child in tree.children(position):
                self._at(start + depth + piece, Send(tree.rank(child), refs))

    def _at(self, time: int, message: Send | Recv) -> None:
        self.messages.setdefault(time, []).append(message)


def _order(size: int, chunk: int, root: int, pieces: int) -> Expr:
    return _Tree(size, root, second=chunk >= pieces).expr(0)


def _order_from_0(size: int, chunk: int, root: int, pieces: int) -> Expr:  # noqa: ARG001
    return _order(size, chunk, 0, pieces)


@register("broadcast", "double_tree", takes="pieces")
def broadcast(size: int, rank: int, root: int, pieces: int) -> Schedule:
    """Build broadcast: pieces + log2 p rounds about, in each at most two pieces of S / (2 * pieces) bytes each way."""
    clock = _Clock()
    for tree, chunks in _trees(size, root, pieces):
        clock.down(tree, rank, chunks, 0)
    return Schedule(chunks=2 * pieces, rounds=clock.rounds())


@register("reduce", "double_tree", _order, takes="pieces")
def reduce(size: int, rank: int, root: int, pieces: int) -> Schedule:
    """Build reduce: pieces + log2 p rounds about; every rank but the root sends S elements once."""
    clock = _Clock()
    for tree, chunks in _trees(size, root, pieces):
        clock.up(tree, rank, chunks)
    return _summed(size, pieces, clock)


@register("all_reduce", "double_tree", _order_from_0, takes="pieces")
def all_reduce(size: int, rank: int, root: int, pieces: int) -> Schedule:  # noqa: ARG001
    """Build all-reduce: pieces + 2 log2 p rounds about, at most 2 S elements sent by a rank.

    Rank 0 is the root. A piece starts down when it is at the root, while later ones are still on their way up.
    """
    clock = _Clock()
    for tree, chunks in _trees(size, 0, pieces):
        clock.up(tree, rank, chunks)
        clock.down(tree, rank, chunks, tree.height)
    return _summed(size, pieces, clock)


def _trees(size: int, root: int, pieces: int) -> list[tuple[_Tree, range]]:
    """Return both trees with the chunks that they carry."""
    return [
        (_Tree(size, root, second=False), range(pieces)),
        (_Tree(size, root, second=True), range(pieces, 2 * pieces)),
    ]


def _summed(size: int, pieces: int, clock: _Clock) -> Schedule:
    rounds = clock.rounds()
    if size == 1:
        rounds = (Round((), tuple(Copy(Ref(Space.OUT, c), Ref(Space.IN, c)) for c in range(2 * pieces))),)
    return Schedule(chunks=2 * pieces, rounds=rounds, raw_slots=RAW_SLOTS, acc_slots=ACC_SLOTS)
