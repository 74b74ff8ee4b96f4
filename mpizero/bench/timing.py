"""Time a collective call as its slowest rank sees it."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.collectives import OPERATIONS, all_reduce, barrier

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["bus_bandwidth", "median_of_slowest", "time_all_reduce"]

MOST = 50
FEWEST = 3


def median_of_slowest(call: Callable[[], Any], comm: Any, *, budget: float = 0.3) -> float:
    """Return the seconds of one call: in each round the slowest rank's time, over the rounds the median. Collective.

    Every round starts at a barrier. The first two are not counted; the second says how many there will be.

    Args:
        call: the collective, the same on every rank.
        comm: its ranks.
        budget: seconds that the counted rounds take together, about; there are 3 to 50 of them.
    """
    _round(call, comm)
    rounds = int(budget / max(_slowest([_round(call, comm)], comm)[0], 1e-6))
    return statistics.median(_slowest([_round(call, comm) for _ in range(min(max(rounds, FEWEST), MOST))], comm))


def time_all_reduce(nbytes: int, comm: Any, algorithm: str) -> float:
    """Return the seconds of a sum of `nbytes` bytes of float32 over the ranks. Collective.

    Args:
        nbytes: bytes of one rank's array, a multiple of 4.
        comm: the ranks.
        algorithm: auto, native, or another that `mpizero.all_reduce` knows.
    """
    x = np.zeros(nbytes // 4, np.float32)
    return median_of_slowest(lambda: all_reduce(x, comm, algorithm=algorithm), comm)


def bus_bandwidth(operation: str, nbytes: int, seconds: float, ranks: int) -> float:
    """Return GB/s of the busiest wire: `nbytes` over `seconds`, times the operation's factor (2(p-1)/p for all_reduce).

    Source: nccl-tests, PERFORMANCE.md.
    """
    return nbytes / seconds * OPERATIONS[operation].bandwidth_factor(ranks) / 1e9


def _round(call: Callable[[], Any], comm: Any) -> float:
    barrier(comm)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _slowest(seconds: list[float], comm: Any) -> list[float]:
    slowest: list[float] = all_reduce(np.array(seconds), comm, op="max").tolist()
    return slowest
