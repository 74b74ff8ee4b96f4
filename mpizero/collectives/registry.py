"""The tables that verbs, tests and benchmarks all read: operations with their traits, algorithms with their orders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from mpizero.collectives.order import Order, canonical
from mpizero.collectives.schedule import Schedule
from mpizero.errors import ArgumentError, must_be

__all__ = ["NATIVE", "OPERATIONS", "Algorithm", "Operation", "algorithm", "algorithms_of", "build", "register"]

Builder = Callable[[int, int, int], Schedule]
"""`(size, rank, root) -> schedule of that rank`."""

NATIVE = "native"
"""The name under which the MPI library's own collective may be chosen."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """State the traits of one collective."""

    name: str
    reduces: bool
    rooted: bool
    input: str
    """What a rank puts in: `whole` buffer, its own `chunk`, `root` (the root's OUT, whole), or `token`."""
    output: str
    """What a rank gets: `whole`, its own `chunk`, `root` (whole, on the root alone), or `token`."""
    bandwidth_factor: Callable[[int], float]
    """busbw over algbw for p ranks, the convention of nccl-tests."""


OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation(name="all_reduce", reduces=True, rooted=False, input="whole", output="whole",
                  bandwidth_factor=lambda p: 2 * (p - 1) / p),
        Operation(name="reduce_scatter", reduces=True, rooted=False, input="whole", output="chunk",
                  bandwidth_factor=lambda p: (p - 1) / p),
        Operation(name="all_gather", reduces=False, rooted=False, input="chunk", output="whole",
                  bandwidth_factor=lambda p: (p - 1) / p),
        Operation(name="broadcast", reduces=False, rooted=True, input="root", output="whole",
                  bandwidth_factor=lambda _: 1.0),
        Operation(name="reduce", reduces=True, rooted=True, input="whole", output="root",
                  bandwidth_factor=lambda _: 1.0),
        Operation(name="barrier", reduces=False, rooted=False, input="token", output="token",
                  bandwidth_factor=lambda _: 0.0),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Name one way to do one operation."""

    operation: str
    name: str
    build: Builder
    order: Order | None
    """The declared order of summation; None where nothing is summed."""

    def is_canonical(self, size: int, root: int = 0) -> bool:
        """Return whether every chunk is summed in the canonical order, or nothing is summed."""
        return _is_canonical(self.order, size, root)


_ALGORITHMS: dict[tuple[str, str], Algorithm] = {}


def register(operation: str, name: str, order: Order | None = None) -> Callable[[Builder], Builder]:
    """Add a builder to the table of algorithms; a decorator."""

    def add(build: Builder) -> Builder:
        _ALGORITHMS[operation, name] = Algorithm(operation=operation, name=name, build=build, order=order)
        return build

    return add


def algorithms_of(operation: str) -> list[Algorithm]:
    """Return the registered algorithms of one operation, in the order of registration."""
    return [entry for (op, _), entry in _ALGORITHMS.items() if op == operation]


def algorithm(operation: str, name: str) -> Algorithm:
    """Return one algorithm; raise ArgumentError, with the known names, where there is none of that name."""
    try:
        return _ALGORITHMS[operation, name]
    except KeyError:
        known = ", ".join(["auto", NATIVE, *(entry.name for entry in algorithms_of(operation))])
        rule = f"one of {known} for {operation}"
        raise ArgumentError(must_be("algorithm", rule, name)) from None


@lru_cache(maxsize=1024)
def build(operation: str, name: str, size: int, rank: int, root: int = 0) -> Schedule:
    """Return a schedule, built once per (operation, algorithm, size, rank, root)."""
    return algorithm(operation, name).build(size, rank, root)


@lru_cache(maxsize=1024)
def _is_canonical(order: Order | None, size: int, root: int) -> bool:
    return order is None or all(order(size, chunk, root) == canonical(size) for chunk in range(size))
