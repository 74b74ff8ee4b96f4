"""Ring: each rank talks to its two neighbours only.

Reduce-scatter and all-gather take p - 1 rounds and S (p-1)/p bytes each; all-reduce both. The order of summation of
chunk c starts at rank c + 1 and goes round. Partial sums travel, in fp32 for 16-bit floats.
Source: Patarasuk, Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", 2009, section 3.
"""

from __future__ import annotations

from mpizero.collectives import order
from mpizero.collectives.registry import register
from mpizero.collectives.schedule import Copy, Recv, Reduce, Ref, Round, Schedule, Send, Space

__all__: list[str] = []


@register("reduce_scatter", "ring", order.ring)
def reduce_scatter(size: int, rank: int, root: int = 0) -> Schedule:  # noqa: ARG001
    """Build reduce-scatter: p - 1 rounds, S (p-1)/p elements sent."""
    return Schedule(chunks=size, rounds=_reduce_rounds(size, rank), raw_slots=1, acc_slots=2)


@register("all_gather", "ring")
def all_gather(size: int, rank: int, root: int = 0) -> Schedule:  # noqa: ARG001
    """Build all-gather: p - 1 rounds, S (p-1)/p bytes sent."""
    own = Round((), (Copy(Ref(Space.OUT, rank), Ref(Space.IN, rank)),))
    return Schedule(chunks=size, rounds=(own, *_gather_rounds(size, rank)))


@register("all_reduce", "ring", order.ring)
def all_reduce(size: int, rank: int, root: int = 0) -> Schedule:  # noqa: ARG001
    """Build all-reduce: 2 (p - 1) rounds, 2 S (p-1)/p elements sent."""
    rounds = _reduce_rounds(size, rank) + _gather_rounds(size, rank)
    return Schedule(chunks=size, rounds=rounds, raw_slots=1, acc_slots=2)


def _reduce_rounds(size: int, rank: int) -> tuple[Round, ...]:
    """Return the rounds that leave the sum of chunk `rank` in OUT.

    Round t sends chunk rank - t - 1 and receives chunk rank - t - 2, which comes raw in the first round (its sender
    only had its own part) and as a partial sum afterwards. Two accumulators alternate: one leaves, one arrives.
    """
    if size == 1:
        return (Round((), (Copy(Ref(Space.OUT, rank), Ref(Space.IN, rank)),)),)
    after, before = (rank + 1) % size, (rank - 1) % size
    rounds = []
    outgoing = Ref(Space.IN, (rank - 1) % size)
    for step in range(size - 1):
        chunk = (rank - step - 2) % size
        slot = Ref(Space.ACC, chunk, step % 2)
        arriving = Ref(Space.RAW, chunk) if step == 0 else slot
        target = Ref(Space.OUT, rank) if chunk == rank else slot
        messages = (Recv(before, (arriving,)), Send(after, (outgoing,)))
        rounds.append(Round(messages, (Reduce(target, arriving, Ref(Space.IN, chunk)),)))
        outgoing = slot
    return tuple(rounds)


def _gather_rounds(size: int, rank: int) -> tuple[Round, ...]:
    """Return the rounds that pass every rank's chunk of OUT once round the ring."""
    after, before = (rank + 1) % size, (rank - 1) % size
    rounds = []
    for step in range(size - 1):
        arriving, leaving = Ref(Space.OUT, (rank - step - 1) % size), Ref(Space.OUT, (rank - step) % size)
        rounds.append(Round((Recv(before, (arriving,)), Send(after, (leaving,)))))
    return tuple(rounds)
