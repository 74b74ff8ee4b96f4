"""Broadcast of long buffers as scatter and all-gather: no rank sends much more than 2 S bytes, however many ranks.

Source: Barnett, Gupta, Payne, Shuler, van de Geijn, Watts, "Interprocessor Collective Communication Library
(InterCom)", 1994; Thakur, Rabenseifner, Gropp 2005, section 3.
"""

from __future__ import annotations

from mpizero.collectives.registry import register
from mpizero.collectives.schedule import Recv, Ref, Round, Schedule, Send, Space
from mpizero.collectives.tree import children, subtree

__all__: list[str] = []


@register("broadcast", "scatter_all_gather")
def broadcast(size: int, rank: int, root: int = 0) -> Schedule:
    """Build broadcast: ceil(log2 p) + p - 1 rounds; every rank but the root receives each chunk once, S bytes.

    Chunks are counted from the root, as ranks are. The binomial scatter leaves a rank the chunks of its subtree; then
    chunks go round the ring, but for those that the next rank has already.
    """
    virtual = (rank - root) % size
    rounds = []
    if virtual:
        parent = virtual - (virtual & -virtual)
        rounds.append(Round((Recv((parent + root) % size, _refs(size, root, subtree(size, virtual))),)))
    rounds += [
        Round((Send((child + root) % size, _refs(size, root, subtree(size, child))),))
        for child in reversed(children(size, virtual))
    ]
    below, above = (virtual - 1) % size, (virtual + 1) % size
    for step in range(size - 1):
        messages: list[Send | Recv] = []
        leaving, arriving = (virtual - step) % size, (below - step) % size
        if arriving not in subtree(size, virtual):
            messages.append(Recv((below + root) % size, _refs(size, root, range(arriving, arriving + 1))))
        if leaving not in subtree(size, above):
            messages.append(Send((above + root) % size, _refs(size, root, range(leaving, leaving + 1))))
        if messages:
            rounds.append(Round(tuple(messages)))
    return Schedule(chunks=size, rounds=tuple(rounds))


def _refs(size: int, root: int, numbers: range) -> tuple[Ref, ...]:
    """Return the chunks with these numbers, counted from the root, in OUT."""
    return tuple(Ref(Space.OUT, (number + root) % size) for number in numbers)
