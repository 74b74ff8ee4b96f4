"""Bruck's algorithms: ceil(log2 p) rounds for any number of ranks, for short messages.

Source: Bruck, Ho, Kipnis, Upfal, Weathersby, "Efficient Algorithms for All-to-All Communications in Multiport
Message-Passing Systems", 1997. Chunks are addressed by number, so that the rotations of the paper cost no copies.
"""

from __future__ import annotations

from typing import NamedTuple

from mpizero.collectives.registry import register
from mpizero.collectives.schedule import Copy, Recv, Ref, Round, Schedule, Send, Space

__all__: list[str] = []


@register("all_gather", "bruck")
def all_gather(size: int, rank: int, root: int = 0) -> Schedule:  # noqa: ARG001
    """Build all-gather: ceil(log2 p) rounds, S (p-1)/p bytes sent.

    A rank holds the chunks of the ranks next above it, and in every round gets as many again from as far above.
    """
    rounds = [Round((), (Copy(Ref(Space.OUT, rank), Ref(Space.IN, rank)),))]
    reach = 1
    while reach < size:
        count = min(reach, size - reach)
        held = tuple(Ref(Space.OUT, (rank + i) % size) for i in range(count))
        wanted = tuple(Ref(Space.OUT, (rank + reach + i) % size) for i in range(count))
        rounds.append(Round((Recv((rank + reach) % size, wanted), Send((rank - reach) % size, held))))
        reach *= 2
    return Schedule(chunks=size, rounds=tuple(rounds))


@register("all_to_all", "bruck", uneven=False)
def all_to_all(size: int, rank: int, root: int = 0) -> Schedule:  # noqa: ARG001
    """Build all-to-all: ceil(log2 p) rounds, in each of which a rank sends about half of its S bytes.

    A chunk for a rank i above its source goes 2^k up in round k where i has bit k. Chunks wait in between on ranks that
    are neither their source nor their target, which know no lengths but equal ones.
    """
    own = rank * size + rank
    rounds = [Round((), (Copy(Ref(Space.OUT, own), Ref(Space.IN, own)),))]
    moves_of_rounds, slots = _moves(size)
    for step, moves in enumerate(moves_of_rounds):
        reach = 1 << step
        sends, receives = [], []
        for move in moves:
            begun, ended = (rank - move.distance % reach) % size, (rank - move.distance % (2 * reach)) % size
            leaving = begun * size + (begun + move.distance) % size
            arriving = ended * size + (ended + move.distance) % size
            sends.append(Ref(Space.IN, leaving) if move.leaves is None else Ref(Space.RAW, leaving, move.leaves))
            receives.append(Ref(Space.OUT, arriving) if move.enters is None else Ref(Space.RAW, arriving, move.enters))
        above, below = (rank + reach) % size, (rank - reach) % size
        rounds.append(Round((Recv(below, tuple(receives)), Send(above, tuple(sends)))))
    return Schedule(chunks=size * size, rounds=tuple(rounds), raw_slots=slots)


class _Move(NamedTuple):
    """Say what a rank passes on, and gets, in one round: the chunk whose target is `distance` above its source."""

    distance: int
    leaves: int | None
    """The slot in which it waited; None for the source's IN."""
    enters: int | None
    """The slot in which it will wait; None for the target's OUT."""


def _moves(size: int) -> tuple[list[list[_Move]], int]:
    """Return the moves of each round, alike for all ranks, and the number of slots in use at most.

    A slot that is left is free again in the next round.
    """
    held: dict[int, int] = {}
    free: list[int] = []
    used = 0
    rounds = []
    for step in range((size - 1).bit_length()):
        reach = 1 << step
        moves, left = [], []
        for distance in (i for i in range(size) if i & reach):
            leaves, enters = held.pop(distance, None), None
            if leaves is not None:
                left.append(leaves)
            if distance >= 2 * reach:
                enters = free.pop() if free else used
                used = max(used, enters + 1)
                held[distance] = enters
            moves.append(_Move(distance, leaves, enters))
        free += left
        rounds.append(moves)
    return rounds, used
