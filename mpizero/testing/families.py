"""Communicators that are cut out of others at random: each rank holds its own part of every cut."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from random import Random

__all__ = ["Family", "cut"]


@dataclass(kw_only=True, eq=False)
class Family:
    """Be the communicators that one cut has made, of which this rank is in one."""

    comm: Any
    """This rank's."""
    depth: int
    """How many cuts it took: 0 for the world itself."""
    under_way: list[Any] = field(default_factory=list)
    """What is in flight on it."""


def cut(parent: Family, rng: Random) -> Family:
    """Split a family's communicators at random. Collective over each of them, and nothing may be in flight on it.

    Args:
        parent: the family to split.
        rng: in the same state on all ranks of the job. It gives the number of parts and the order of ranks in them.
    """
    parts, shift, turned = rng.randint(1, 3), rng.randrange(4), rng.random() < 0.3
    rank: int = parent.comm.rank
    color = (rank * (1 + shift) + shift) // 2 % parts
    return Family(comm=parent.comm.split(color, -rank if turned else rank), depth=parent.depth + 1)
