"""Schedules and what is done with them: build, prove, count, choose, execute; and the verbs that users call."""

from mpizero.collectives import (  # noqa: F401  (they fill the registry)
    bruck,
    direct,
    dissemination,
    double_tree,
    exchange,
    halving,
    hierarchical,
    lanes,
    leader,
    pipeline,
    ring,
    rooted,
    scatter_gather,
    tree,
)
from mpizero.collectives.order import pairwise
from mpizero.collectives.prepare import prepare
from mpizero.collectives.registry import OPERATIONS, Algorithm, Operation, algorithm, algorithms_of, build
from mpizero.collectives.schedule import Schedule, even_offsets
from mpizero.collectives.stop import stop_requested
from mpizero.collectives.symmetric import empty
from mpizero.collectives.verbs import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)

__all__ = [
    "OPERATIONS",
    "Algorithm",
    "Operation",
    "Schedule",
    "algorithm",
    "algorithms_of",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "build",
    "empty",
    "even_offsets",
    "gather",
    "pairwise",
    "prepare",
    "reduce",
    "reduce_scatter",
    "scatter",
    "stop_requested",
]
