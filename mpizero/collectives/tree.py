"""Binomial trees: ceil(log2 p) rounds of the whole buffer, for short messages and for rooted operations.

Over all ranks broadcast and reduce move S (p-1) bytes each, reduce's partial sums of 16-bit floats in fp32.

Reduce merges neighbouring groups of ranks, the lower group on the left, and keeps each partial result on the root while
the root's group is concerned, else on the group's lowest rank: canonical order for every size and every root.
Source: Thakur, Rabenseifner, Gropp 2005, sections 3 and 4.4 (binomial trees); the placement of partial results is ours.
"""

from __future__ import annotations

from mpizero.collectives.order import canonical
from mpizero.collectives.registry import register
from mpizero.collectives.schedule import Copy, Recv, Reduce, Ref, Round, Schedule, Send, Space

__all__ = ["broadcast_rounds", "children", "reduce_rounds", "subtree"]

WHOLE = 0
"""The one chunk of these schedules."""
OUT = Ref(Space.OUT, WHOLE)


@register("broadcast", "tree")
def broadcast(size: int, rank: int, root: int = 0) -> Schedule:
    """Build broadcast: ceil(log2 p) rounds, S bytes each."""
    return Schedule(chunks=1, rounds=broadcast_rounds(size, rank, root))


@register("reduce", "tree", canonical)
def reduce(size: int, rank: int, root: int = 0) -> Schedule:
    """Build reduce: ceil(log2 p) rounds, every rank but the root sends S elements once."""
    return Schedule(chunks=1, rounds=reduce_rounds(size, rank, root), raw_slots=1, acc_slots=2)


@register("all_reduce", "tree", canonical)
def all_reduce(size: int, rank: int, root: int = 0) -> Schedule:  # noqa: ARG001
    """Build all-reduce as reduce to rank 0 and broadcast: 2 ceil(log2 p) rounds, at most S elements per message."""
    rounds = reduce_rounds(size, rank, 0) + broadcast_rounds(size, rank, 0)
    return Schedule(chunks=1, rounds=rounds, raw_slots=1, acc_slots=2)


def reduce_rounds(size: int, rank: int, root: int, result: Ref = OUT) -> tuple[Round, ...]:
    """Return this rank's rounds: it merges groups that it hosts, until it sends its partial result away.

    The root's sum ends in `result`. One rank alone sums nothing: it copies its part to OUT, and elsewhere not at all.
    """
    if size == 1:
        return (Round((), (Copy(OUT, Ref(Space.IN, WHOLE)),)),) if result == OUT else ()
    rounds = []
    held = Ref(Space.IN, WHOLE)
    width = 1
    while width < size:
        start = rank // (2 * width) * (2 * width)
        middle = start + width
        if middle < size:
            left, right = _host(start, middle, root), _host(middle, min(start + 2 * width, size), root)
            winner, loser = (right, left) if root == right else (left, right)
            if rank == loser:
                rounds.append(Round((Send(winner, (held,)),)))
                break
            losers = width if loser == left else min(start + 2 * width, size) - middle
            arriving = Ref(Space.RAW, WHOLE) if losers == 1 else Ref(Space.ACC, WHOLE, 1)
            last = 2 * width >= size
            target = result if last else Ref(Space.ACC, WHOLE, 0)
            operands = (held, arriving) if rank == left else (arriving, held)
            rounds.append(Round((Recv(loser, (arriving,)),), (Reduce(target, *operands),)))
            held = Ref(Space.ACC, WHOLE, 0)
        width *= 2
    return tuple(rounds)


def _host(start: int, stop: int, root: int) -> int:
    """Return the rank that holds the partial result of the ranks [start, stop)."""
    return root if start <= root < stop else start


def broadcast_rounds(size: int, rank: int, root: int) -> tuple[Round, ...]:
    """Return this rank's rounds: it receives once, from the rank without its highest bit, then feeds farther ones."""
    buffer = (Ref(Space.OUT, WHOLE),)
    virtual = (rank - root) % size
    rounds = []
    reach = 1 << virtual.bit_length()
    if virtual:
        parent = virtual - (reach >> 1)
        rounds.append(Round((Recv((parent + root) % size, buffer),)))
    while virtual + reach < size:
        rounds.append(Round((Send((virtual + reach + root) % size, buffer),)))
        reach <<= 1
    return tuple(rounds)


def subtree(size: int, virtual: int) -> range:
    """Return the ranks below one, itself included, of the binomial tree in which they are neighbours."""
    return range(virtual, min(size, virtual + (virtual & -virtual))) if virtual else range(size)


def children(size: int, virtual: int) -> list[int]:
    """Return a rank's children in that tree, the nearest first; its parent is the rank without its lowest bit."""
    below = subtree(size, virtual)
    return [virtual + (1 << step) for step in range((len(below) - 1).bit_length())]
