"""Direct exchange: every rank sends each peer its part, and sums its own chunk in the canonical order.

The canonical builder: its order is pairwise over ranks for every size and placement, and no partial result travels, so
16-bit floats move as 16 bits. Reduce-scatter: 1 round, p - 1 messages and S (p-1)/p bytes per rank, the least possible.
Source: the pairwise exchange of Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005, section 4.2, with all messages in one round.
"""

from __future__ import annotations

from mpizero.collectives.order import canonical
from mpizero.collectives.registry import register
from mpizero.collectives.schedule import Copy, Recv, Reduce, Ref, Round, Schedule, Send, Space

__all__ = ["accumulators", "exchange_rounds", "gather_rounds", "pairwise_steps"]


@register("reduce_scatter", "direct", canonical)
def reduce_scatter(size: int, rank: int, root: int = 0) -> Schedule:  # noqa: ARG001
    """Build reduce-scatter: 1 round, S (p-1)/p bytes sent."""
    rounds, accumulators = exchange_rounds(size, rank, Ref(Space.OUT, rank))
    return Schedule(chunks=size, rounds=rounds, raw_slots=size - 1, acc_slots=accumulators)


@register("all_gather", "direct")
def all_gather(size: int, rank: int, root: int = 0) -> Schedule:  # noqa: ARG001
    """Build all-gather: 1 round, p - 1 messages, S (p-1)/p bytes sent."""
    own = Round((), (Copy(Ref(Space.OUT, rank), Ref(Space.IN, rank)),))
    return Schedule(chunks=size, rounds=(own, *gather_rounds(size, rank)))


@register("all_reduce", "direct", canonical)
def all_reduce(size: int, rank: int, root: int = 0) -> Schedule:  # noqa: ARG001
    """Build all-reduce as reduce-scatter and all-gather: 2 rounds, 2 S (p-1)/p bytes sent."""
    rounds, accumulators = exchange_rounds(size, rank, Ref(Space.OUT, rank))
    rounds += gather_rounds(size, rank)
    return Schedule(chunks=size, rounds=rounds, raw_slots=size - 1, acc_slots=accumulators)


@register("all_to_all", "direct")
def all_to_all(size: int, rank: int, root: int = 0) -> Schedule:  # noqa: ARG001
    """Build all-to-all: 1 round, p - 1 messages, S (p-1)/p bytes sent."""
    own = rank * size + rank
    messages: list[Send | Recv] = []
    for distance in range(1, size):
        target, source = (rank + distance) % size, (rank - distance) % size
        messages.append(Recv(source, (Ref(Space.OUT, source * size + rank),)))
        messages.append(Send(target, (Ref(Space.IN, rank * size + target),)))
    exchange = Round(tuple(messages), (Copy(Ref(Space.OUT, own), Ref(Space.IN, own)),))
    return Schedule(chunks=size * size, rounds=(exchange,))


@register("reduce", "direct", canonical)
def reduce(size: int, rank: int, root: int = 0) -> Schedule:
    """Build reduce as reduce-scatter and gather to the root: 2 rounds, at most S bytes sent by a rank."""
    mine = Ref(Space.OUT, rank) if rank == root else Ref(Space.ACC, rank, 0)
    rounds, accumulators = exchange_rounds(size, rank, mine)
    others = [peer for peer in range(size) if peer != root]
    if rank == root:
        slots = {peer: Ref(Space.ACC, peer, slot) for slot, peer in enumerate(others)}
        receives = tuple(Recv(peer, (slots[peer],)) for peer in others)
        gather = Round(receives, tuple(Copy(Ref(Space.OUT, peer), slots[peer]) for peer in others))
    else:
        gather = Round((Send(root, (mine,)),))
    return Schedule(chunks=size, rounds=(*rounds, gather), raw_slots=size - 1, acc_slots=max(accumulators, size))


def exchange_rounds(size: int, rank: int, result: Ref) -> tuple[tuple[Round, ...], int]:
    """Return the rounds that leave the sum of chunk `rank` in `result`, and the accumulator slots that they use.

    Peers are met in the order of their distance, so that no rank is sent to by all others at once.
    """
    if size == 1:
        return (Round((), (Copy(result, Ref(Space.IN, rank)),)),), 0
    pieces = [Ref(Space.RAW, rank, peer - (peer > rank)) for peer in range(size)]
    pieces[rank] = Ref(Space.IN, rank)
    messages: list[Send | Recv] = []
    for distance in range(1, size):
        target, source = (rank + distance) % size, (rank - distance) % size
        messages += [Recv(source, (pieces[source],)), Send(target, (Ref(Space.IN, target),))]
    steps, accumulators = pairwise_steps(pieces, result)
    return (Round(tuple(messages), steps),), accumulators


def gather_rounds(size: int, rank: int) -> tuple[Round, ...]:
    """Return the round in which every rank sends its chunk of OUT to all others."""
    messages: list[Send | Recv] = []
    for distance in range(1, size):
        target, source = (rank + distance) % size, (rank - distance) % size
        messages += [Recv(source, (Ref(Space.OUT, source),)), Send(target, (Ref(Space.OUT, rank),))]
    return (Round(tuple(messages)),) if messages else ()


def accumulators(num_pieces: int) -> int:
    """Return how many accumulators `pairwise_steps` uses when the pieces are in none."""
    return num_pieces.bit_length() - 1 if num_pieces > 2 else 0


def pairwise_steps(pieces: list[Ref], result: Ref, first: int = 0) -> tuple[tuple[Reduce, ...], int]:
    """Return the reductions of `pieces` into `result` in pairwise order, and the accumulator slots that they use.

    Accumulators among the pieces are used up, others are numbered from `first`. One piece alone makes no steps.

    Works as a binary counter: a stack of finished subtrees of falling size, two of equal size merging at once. That is
    the pairwise tree, and needs log2(p) accumulators instead of p.
    """
    steps: list[Reduce] = []
    stack: list[tuple[int, Ref]] = []
    free: list[int] = []
    used = 0

    def merge() -> None:
        nonlocal used
        (left_size, left), (right_size, right) = stack[-2:]
        del stack[-2:]
        if left_size + right_size == len(pieces):
            steps.append(Reduce(result, left, right))
            stack.append((len(pieces), result))
            return
        slots = [ref.slot for ref in (left, right) if ref.space is Space.ACC]
        if not slots:
            slots = [free.pop() if free else first + used]
            used = max(used, slots[0] + 1 - first)
        free.extend(slots[1:])
        target = Ref(Space.ACC, result.chunk, slots[0])
        steps.append(Reduce(target, left, right))
        stack.append((left_size + right_size, target))

    for piece in pieces:
        stack.append((1, piece))
        while len(stack) > 1 and stack[-2][0] == stack[-1][0]:
            merge()
    while len(stack) > 1:
        merge()
    return tuple(steps), used
