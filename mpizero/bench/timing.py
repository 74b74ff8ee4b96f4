"""Time a collective call as its slowest rank sees it."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpizero.collectives import OPERATIONS, all_reduce, barrier
from mpizero.comm.raw import mpi

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Loop", "Measurable", "Measured", "bus_bandwidth", "measure", "median_of_slowest", "time_all_reduce"]

MOST = 50
FEWEST = 3
"""Timed iterations that no budget goes below."""


class Measurable(Protocol):
    """Be one collective on this rank, with its data."""

    @property
    def call(self) -> Callable[[], Any]:
        """Return what is timed."""
        ...

    def rewrite(self, iteration: int) -> None:
        """Write this rank's data for an iteration."""
        ...

    def wrong(self, iteration: int) -> int:
        """Return how many elements of this rank's result are wrong after it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Say how often a case is run."""

    warm_up: int
    """Iterations before those that count."""
    iterations: int
    check: bool
    """Whether results are compared with what they must be, outside of the timed part."""
    budget: float | None = None
    """Seconds for the iterations of each kind, data and checks included; None does all of them."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Hold what a case gave; the same on all ranks."""

    times: tuple[float, ...]
    """Seconds of each timed iteration, on its slowest rank."""
    wrong: int | None
    """Wrong elements in all iterations, those of the warm-up too, on all ranks; None where nothing was checked."""


def measure(job: Measurable, loop: Loop, comm: Any) -> Measured:
    """Run a case and return its times and errors. Collective.

    Each iteration rewrites the data, meets the other ranks in MPI's own barrier, makes the call under the clock, and
    checks the result. What the ranks tell each other for the measurement goes through the MPI library, so that a
    collective is never judged by itself.

    Args:
        job: the case on this rank.
        loop: how often.
        comm: its ranks.
    """
    runner = _Runner(job, comm, check=loop.check)
    runner.run(_affordable(runner, loop.warm_up, loop, least=1))
    times = runner.run(_affordable(runner, loop.iterations, loop, least=FEWEST))
    module = mpi()
    comm.mpi.Allreduce(module.IN_PLACE, times, module.MAX)
    wrong = comm.mpi.allreduce(runner.wrong)
    return Measured(times=tuple(times.tolist()), wrong=wrong if loop.check else None)


class _Runner:
    """Run iterations of a case and number them."""

    def __init__(self, job: Measurable, comm: Any, *, check: bool) -> None:
        self.job, self.comm, self.check = job, comm, check
        self.number = 0
        self.wrong = 0

    def run(self, iterations: int) -> np.ndarray[Any, Any]:
        """Return this rank's seconds of each of so many iterations."""
        return np.array([self._once() for _ in range(iterations)])

    def _once(self) -> float:
        number, call = self.number, self.job.call
        self.number += 1
        self.job.rewrite(number)
        self.comm.mpi.Barrier()
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        if self.check:
            self.wrong += self.job.wrong(number)
        return seconds


def _affordable(runner: _Runner, wanted: int, loop: Loop, *, least: int) -> int:
    """Return how many of the wanted iterations fit the budget, by the time that one takes; equal on all ranks."""
    if loop.budget is None or wanted <= least:
        return wanted
    start = time.perf_counter()
    runner.run(1)
    seconds = runner.comm.mpi.allreduce(time.perf_counter() - start, op=mpi().MAX)
    return max(least, min(wanted, int(loop.budget / seconds)))


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
