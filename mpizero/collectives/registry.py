"""The tables that verbs, tests and benchmarks all read: operations with their traits, algorithms with their orders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from mpizero.collectives.order import Expr, Order, canonical
from mpizero.collectives.schedule import Schedule
from mpizero.errors import ArgumentError, must_be

__all__ = [
    "LOADS",
    "NATIVE",
    "OPERATIONS",
    "Algorithm",
    "Operation",
    "algorithm",
    "algorithms_of",
    "build",
    "names_of",
    "register",
]

Builder = Callable[..., Schedule]
"""`(size, rank, root) -> schedule of that rank`; with a fourth argument where the algorithm takes one."""

NODES = "nodes"
"""What an algorithm takes that depends on placement: a tuple of the node number of each rank."""
PIECES = "pieces"
"""What a pipelined algorithm takes: in how many pieces each part is cut, 1 or more."""

NATIVE = "native"
"""The name under which the MPI library's own collective may be chosen."""
LOADS = "loads"
"""The name under which loads and stores may be chosen, where all ranks are on one host; see `loads`."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """State the traits of one collective."""

    name: str
    reduces: bool
    rooted: bool
    input: str
    """What a rank puts in: `whole` buffer, its own `chunk`, `root` (the root's OUT, whole), `source` (the root's IN,
    whole), `row` (of p * p chunks those with number rank * p + d, for rank d), or `token`."""
    output: str
    """What a rank gets: `whole`, its own `chunk`, `root` (whole, on the root alone), `column` (of p * p chunks those
    with number s * p + rank, from rank s), or `token`."""
    bandwidth_factor: Callable[[int], float]
    """busbw over algbw for p ranks, the convention of nccl-tests."""
    uneven: bool = False
    """Whether a caller may give the chunks' lengths."""

    def chunks(self, size: int) -> int | None:
        """Return the number of chunks of every schedule, None where the algorithm decides."""
        if self.input == "row":
            return size * size
        return size if "chunk" in {self.input, self.output} else None


OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation(name="all_reduce", reduces=True, rooted=False, input="whole", output="whole",
                  bandwidth_factor=lambda p: 2 * (p - 1) / p),
        Operation(name="reduce_scatter", reduces=True, rooted=False, input="whole", output="chunk",
                  bandwidth_factor=lambda p: (p - 1) / p, uneven=True),
        Operation(name="all_gather", reduces=False, rooted=False, input="chunk", output="whole",
                  bandwidth_factor=lambda p: (p - 1) / p, uneven=True),
        Operation(name="all_to_all", reduces=False, rooted=False, input="row", output="column",
                  bandwidth_factor=lambda p: (p - 1) / p, uneven=True),
        Operation(name="broadcast", reduces=False, rooted=True, input="root", output="whole",
                  bandwidth_factor=lambda _: 1.0),
        Operation(name="reduce", reduces=True, rooted=True, input="whole", output="root",
                  bandwidth_factor=lambda _: 1.0),
        Operation(name="gather", reduces=False, rooted=True, input="chunk", output="root",
                  bandwidth_factor=lambda p: (p - 1) / p, uneven=True),
        Operation(name="scatter", reduces=False, rooted=True, input="source", output="chunk",
                  bandwidth_factor=lambda p: (p - 1) / p, uneven=True),
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
    takes: str = ""
    """What builder and order take beyond (size, rank or chunk, root): nothing, `nodes` or `pieces`."""
    uneven: bool = True
    """Whether chunks may have any lengths, or must be cut evenly as `even_offsets` does."""

    def schedule(
        self, size: int, rank: int, root: int = 0, *, nodes: tuple[int, ...] = (), pieces: int = 1
    ) -> Schedule:
        """Return the schedule of one rank, built anew; the arguments are those of `registry.build`."""
        return self.build(size, rank, root, *self._extra(size, nodes, pieces))

    def tree(self, size: int, chunk: int, root: int = 0, *, nodes: tuple[int, ...] = (), pieces: int = 1) -> Expr:
        """Return the order in which a chunk is summed."""
        if self.order is None:
            raise ArgumentError(must_be("algorithm", "one that sums", f"{self.name} for {self.operation}"))
        return self.order(size, chunk, root, *self._extra(size, nodes, pieces))

    def is_canonical(self, size: int, root: int = 0, *, nodes: tuple[int, ...] = (), pieces: int = 1) -> bool:
        """Return whether every chunk is summed in the canonical order, or nothing is summed."""
        return _is_canonical(self, size, root, self._extra(size, nodes, pieces))

    def _extra(self, size: int, nodes: tuple[int, ...], pieces: int) -> tuple[tuple[int, ...] | int, ...]:
        """Return what the builder is given after the root; no nodes means that all ranks are on one."""
        if self.takes == NODES:
            if nodes and len(nodes) != size:
                raise ArgumentError(must_be("nodes", f"the node numbers of all {size} ranks", nodes))
            return (tuple(nodes) or (0,) * size,)
        if self.takes == PIECES:
            if pieces < 1:
                raise ArgumentError(must_be("pieces", "1 or more", pieces))
            return (pieces,)
        return ()


_ALGORITHMS: dict[tuple[str, str], Algorithm] = {}


def register(
    operation: str, name: str, order: Order | None = None, *, takes: str = "", uneven: bool = True
) -> Callable[[Builder], Builder]:
    """Add a builder to the table of algorithms; a decorator.

    Args:
        operation: the collective that it does.
        name: the algorithm's name.
        order: the order of summation, where it reduces.
        takes: what builder and order take beyond (size, rank or chunk, root): nothing, `nodes` or `pieces`.
        uneven: whether chunks may have any lengths.
    """

    def add(build: Builder) -> Builder:
        _ALGORITHMS[operation, name] = Algorithm(
            operation=operation, name=name, build=build, order=order, takes=takes, uneven=uneven
        )
        return build

    return add


def algorithms_of(operation: str) -> list[Algorithm]:
    """Return the registered algorithms of one operation, in the order of registration."""
    return [entry for (op, _), entry in _ALGORITHMS.items() if op == operation]


def names_of(operation: str) -> list[str]:
    """Return all that may be asked for: what chooses, what is no schedule, and the registered algorithms."""
    return ["auto", NATIVE, LOADS, *(entry.name for entry in algorithms_of(operation))]


def algorithm(operation: str, name: str) -> Algorithm:
    """Return one algorithm; raise ArgumentError, with the known names, where there is none of that name."""
    try:
        return _ALGORITHMS[operation, name]
    except KeyError:
        rule = f"one of {', '.join(names_of(operation))} for {operation}"
        raise ArgumentError(must_be("algorithm", rule, name)) from None


@lru_cache(maxsize=1024)
def build(
    operation: str, name: str, size: int, rank: int, root: int = 0, *, nodes: tuple[int, ...] = (), pieces: int = 1
) -> Schedule:
    """Return a schedule, built once per arguments.

    Args:
        operation: the collective's name.
        name: the algorithm's.
        size: number of ranks.
        rank: whose schedule.
        root: the root of a rooted operation.
        nodes: the node number of each rank, for algorithms that take `nodes`; none means that all are on one node.
        pieces: in how many pipelined pieces each part is cut, for algorithms that take `pieces`.

    Raises:
        ArgumentError: for an unknown algorithm, and for nodes and pieces that are none.
    """
    return algorithm(operation, name).schedule(size, rank, root, nodes=nodes, pieces=pieces)


@lru_cache(maxsize=1024)
def _is_canonical(entry: Algorithm, size: int, root: int, extra: tuple[tuple[int, ...] | int, ...]) -> bool:
    order = entry.order
    if order is None:
        return True
    chunks = entry.build(size, 0, root, *extra).chunks if extra else size
    return all(order(size, chunk, root, *extra) == canonical(size) for chunk in range(chunks))
