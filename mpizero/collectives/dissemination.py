"""The dissemination barrier: in round k every rank signals the rank 2^k above it. ceil(log2 p) rounds of one byte.

Source: Hensgen, Finkel, Manber, "Two Algorithms for Barrier Synchronization", 1988.
"""

from __future__ import annotations

from mpizero.collectives.registry import register
from mpizero.collectives.schedule import Recv, Ref, Round, Schedule, Send, Space

__all__: list[str] = []


@register("barrier", "dissemination")
def barrier(size: int, rank: int, root: int = 0) -> Schedule:  # noqa: ARG001
    """Build the barrier; its one chunk is a token of one byte."""
    token, heard = (Ref(Space.IN, 0),), (Ref(Space.RAW, 0),)
    rounds = []
    distance = 1
    while distance < size:
        rounds.append(Round((Recv((rank - distance) % size, heard), Send((rank + distance) % size, token))))
        distance *= 2
    return Schedule(chunks=1, rounds=tuple(rounds), raw_slots=1)
