"""Pairwise exchange: p - 1 rounds, in each of which a rank sends to one peer and receives from one.

In round i a rank sends to the rank i above it and receives from the rank i below it; where p is a power of two,
all-to-all pairs ranks by exclusive or, so that both are the same peer. No partial result travels.
Source: Thakur, Rabenseifner, Gropp 2005, sections 4.2 (reduce-scatter) and 4.3 (all-to-all).
"""

from __future__ import annotations

from mpizero.collectives import order
from mpizero.collectives.registry import register
from mpizero.collectives.schedule import Copy, Recv, Reduce, Ref, Round, Schedule, Send, Space

__all__: list[str] = []


@register("reduce_scatter", "pairwise", order.descending)
def reduce_scatter(size: int, rank: int, root: int = 0) -> Schedule:  # noqa: ARG001
    """Build reduce-scatter: p - 1 rounds, S (p-1)/p bytes sent; one part and one sum of scratch."""
    own, held = Ref(Space.IN, rank), Ref(Space.ACC, rank)
    if size == 1:
        return Schedule(chunks=1, rounds=(Round((), (Copy(Ref(Space.OUT, rank), own),)),), raw_slots=1, acc_slots=1)
    rounds = []
    arriving = Ref(Space.RAW, rank)
    for distance in range(1, size):
        target, source = (rank + distance) % size, (rank - distance) % size
        result = Ref(Space.OUT, rank) if distance == size - 1 else held
        add = Reduce(result, own if distance == 1 else held, arriving)
        rounds.append(Round((Recv(source, (arriving,)), Send(target, (Ref(Space.IN, target),))), (add,)))
    return Schedule(chunks=size, rounds=tuple(rounds), raw_slots=1, acc_slots=1)


@register("all_gather", "pairwise")
def all_gather(size: int, rank: int, root: int = 0) -> Schedule:  # noqa: ARG001
    """Build all-gather: p - 1 rounds, S (p-1)/p bytes sent."""
    mine = Ref(Space.OUT, rank)
    rounds = [Round((), (Copy(mine, Ref(Space.IN, rank)),))]
    for distance in range(1, size):
        target, source = (rank + distance) % size, (rank - distance) % size
        rounds.append(Round((Recv(source, (Ref(Space.OUT, source),)), Send(target, (mine,)))))
    return Schedule(chunks=size, rounds=tuple(rounds))


@register("all_to_all", "pairwise")
def all_to_all(size: int, rank: int, root: int = 0) -> Schedule:  # noqa: ARG001
    """Build all-to-all: p - 1 rounds, S (p-1)/p bytes sent."""
    own = rank * size + rank
    rounds = [Round((), (Copy(Ref(Space.OUT, own), Ref(Space.IN, own)),))]
    for distance in range(1, size):
        target, source = (rank + distance) % size, (rank - distance) % size
        if size & (size - 1) == 0:
            target = source = rank ^ distance
        arriving, leaving = Ref(Space.OUT, source * size + rank), Ref(Space.IN, rank * size + target)
        rounds.append(Round((Recv(source, (arriving,)), Send(target, (leaving,)))))
    return Schedule(chunks=size * size, rounds=tuple(rounds))
