"""Schedules and what is done with them: build, prove, count, choose, execute; and the verbs that users call."""

from mpizero.collectives import direct, dissemination, halving, ring, tree  # noqa: F401  (they fill the registry)
from mpizero.collectives.order import pairwise
from mpizero.collectives.registry import OPERATIONS, Algorithm, Operation, algorithm, algorithms_of, build
from mpizero.collectives.schedule import Schedule, even_offsets
from mpizero.collectives.verbs import all_gather, all_reduce, barrier, broadcast, reduce, reduce_scatter

__all__ = [
    "OPERATIONS",
    "Algorithm",
    "Operation",
    "Schedule",
    "algorithm",
    "algorithms_of",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "build",
    "even_offsets",
    "pairwise",
    "reduce",
    "reduce_scatter",
]
