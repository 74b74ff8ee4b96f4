"""Collectives by loads and stores, for ranks that reach each other's buffers: who computes what, in one phase.

Between two meetings of all ranks every task of every rank runs: it loads its chunk from the buffers of its `sources`,
sums it in the canonical order, and stores the result into the buffers of its `targets`. So an all-reduce of S bytes
reads S and writes S per rank, the least possible: chunk r is read by rank r alone, so rank r may overwrite it
everywhere at once. That is direct exchange (see `direct`) with its two rounds fused: what would be sent is loaded, what
would be gathered is stored. The bound is derived in docs/algorithms.md.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from mpizero.collectives.registry import OPERATIONS

__all__ = ["Task", "tasks"]


class Task(NamedTuple):
    """Be one rank's work on one chunk."""

    chunk: int
    sources: tuple[int, ...]
    """The ranks whose input has the chunk: all of them, to be summed in the canonical order, or one, to be copied."""
    targets: tuple[int, ...]
    """The ranks whose output gets it."""


@lru_cache(maxsize=1024)
def tasks(operation: str, size: int, rank: int, root: int = 0) -> tuple[Task, ...]:
    """Return what `rank` does in the one phase.

    A rank's chunk goes to its peers in the order of their distance, so that they are not all stored to at once. A
    broadcast is shared out: every rank copies one chunk of the root's buffer to all others.

    Args:
        operation: the collective's name.
        size: number of ranks.
        rank: whose tasks.
        root: the root of a rooted operation.
    """
    traits = OPERATIONS[operation]
    around = tuple((rank + distance) % size for distance in range(size))
    if traits.input == "token":
        return ()
    if traits.input == "row":
        return tuple(Task(source * size + rank, (source,), (rank,)) for source in around)
    if traits.input == "root":
        return (Task(rank, (root,), tuple(peer for peer in around if peer != root)),)
    wanted = {"whole": around, "chunk": (rank,), "root": (root,)}[traits.output]
    if traits.reduces:
        return (Task(rank, tuple(range(size)), wanted),)
    return (Task(rank, (root if traits.input == "source" else rank,), wanted),)
