"""Gather and scatter: every rank's chunk to the root, and from it.

Direct: one round, in which the root exchanges a message with every other rank. Tree: ceil(log2 p) rounds of a binomial
tree over ranks counted from the root, in which a message carries a whole subtree's chunks; for short messages.
Source: Thakur, Rabenseifner, Gropp 2005, section 3 (binomial trees).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from mpizero.collectives.registry import register
from mpizero.collectives.schedule import Copy, Recv, Ref, Round, Schedule, Send, Space
from mpizero.collectives.tree import children, subtree

__all__: list[str] = []


@register("gather", "direct")
def gather(size: int, rank: int, root: int = 0) -> Schedule:
    """Build gather: 1 round, every rank but the root sends its S/p bytes."""
    if rank != root:
        return Schedule(chunks=size, rounds=(Round((Send(root, (Ref(Space.IN, rank),)),)),))
    peers = [(root + distance) % size for distance in range(1, size)]
    messages = tuple(Recv(peer, (Ref(Space.OUT, peer),)) for peer in peers)
    return Schedule(chunks=size, rounds=(Round(messages, (_own(root),)),))


@register("scatter", "direct")
def scatter(size: int, rank: int, root: int = 0) -> Schedule:
    """Build scatter: 1 round, the root sends S (p-1)/p bytes."""
    if rank != root:
        return Schedule(chunks=size, rounds=(Round((Recv(root, (Ref(Space.OUT, rank),)),)),))
    peers = [(root + distance) % size for distance in range(1, size)]
    messages = tuple(Send(peer, (Ref(Space.IN, peer),)) for peer in peers)
    return Schedule(chunks=size, rounds=(Round(messages, (_own(root),)),))


@register("gather", "tree")
def gather_tree(size: int, rank: int, root: int = 0) -> Schedule:
    """Build gather: ceil(log2 p) rounds, a rank sends its subtree's chunks once: S/2 bytes at most."""
    virtual = (rank - root) % size
    held = _Held(size, root, virtual, Space.OUT if rank == root else Space.IN)
    rounds = [] if virtual else [Round((), (_own(root),))]
    rounds += [
        Round((Recv((child + root) % size, held.refs(subtree(size, child))),)) for child in children(size, virtual)
    ]
    if virtual:
        parent = virtual - (virtual & -virtual)
        rounds.append(Round((Send((parent + root) % size, held.refs(subtree(size, virtual))),)))
    return Schedule(chunks=size, rounds=tuple(rounds), raw_slots=_slots(size))


@register("scatter", "tree")
def scatter_tree(size: int, rank: int, root: int = 0) -> Schedule:
    """Build scatter: ceil(log2 p) rounds, a rank gets its subtree's chunks once; the root sends S (p-1)/p bytes."""
    virtual = (rank - root) % size
    held = _Held(size, root, virtual, Space.IN if rank == root else Space.OUT)
    rounds = [] if virtual else [Round((), (_own(root),))]
    if virtual:
        parent = virtual - (virtual & -virtual)
        rounds.append(Round((Recv((parent + root) % size, held.refs(subtree(size, virtual))),)))
    rounds += [
        Round((Send((child + root) % size, held.refs(subtree(size, child))),))
        for child in reversed(children(size, virtual))
    ]
    return Schedule(chunks=size, rounds=tuple(rounds), raw_slots=_slots(size))


class _Held(NamedTuple):
    """Say where a rank has the chunks of its subtree: its own, and all of the root's, in `space`, others in RAW."""

    size: int
    root: int
    virtual: int
    space: Space

    def refs(self, numbers: range) -> tuple[Ref, ...]:
        """Return the memory of the chunks with these numbers, counted from the root."""
        refs = []
        for number in numbers:
            chunk = (number + self.root) % self.size
            stays = self.virtual in {0, number}
            refs.append(Ref(self.space, chunk) if stays else Ref(Space.RAW, chunk, number - self.virtual - 1))
        return tuple(refs)


def _own(root: int) -> Copy:
    return Copy(Ref(Space.OUT, root), Ref(Space.IN, root))


@lru_cache(maxsize=64)
def _slots(size: int) -> int:
    """Return how many chunks of others a rank holds at most, beside the root."""
    return max((len(subtree(size, virtual)) - 1 for virtual in range(1, size)), default=0)
