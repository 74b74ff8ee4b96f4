"""Measure which algorithm is the quickest, by operation, order and size, on the ranks of a communicator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpizero.arrays import dtype_named
from mpizero.bench.timing import median_of_slowest
from mpizero.collectives import OPERATIONS, algorithms_of
from mpizero.collectives.bind import BINDERS
from mpizero.collectives.prepare import Prepared
from mpizero.collectives.registry import LOADS, NATIVE
from mpizero.collectives.tuned import Choice, Row, Table, layout_of
from mpizero.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["PIECES", "Sweep", "tune"]

PIECES = (1, 2, 4, 8)
"""What is tried for pipelined algorithms, by name `algorithm/pieces`."""
HOPELESS = 8.0
"""An algorithm that took so many times the best at one size is not tried at the next ones, unless it is the default."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Say what is measured."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    """Bytes, ascending."""
    dtypes: tuple[str, ...] = ("float32",)
    budget: float = 0.1
    """Seconds per algorithm and size, about."""


def tune(sweep: Sweep, comm: Any, machine: dict[str, str], tell: Callable[[str], None]) -> Table:
    """Return the table that `auto` is to follow on these ranks, the same on all of them. Collective.

    Buffers are private and results not looked at: tests do that.

    Args:
        sweep: what is measured.
        comm: the ranks.
        machine: what the table is of; see `comm.describe`.
        tell: called on every rank with a line for each size that is done.
    """
    rows = []
    for operation in sweep.operations:
        for dtype in sweep.dtypes:
            for order in ("any", "canonical") if OPERATIONS[operation].reduces else ("any",):
                kind = _Kind(operation, dtype, order)
                choices = tuple(_choices(kind, sweep, comm, tell))
                rows.append(Row(layout=layout_of(comm.nodes), choices=choices, **kind._asdict()))
    return Table(machine=machine, rows=tuple(rows))


class _Kind(NamedTuple):
    """Name what one row of the table is of."""

    operation: str
    dtype: str
    order: str


def _choices(kind: _Kind, sweep: Sweep, comm: Any, tell: Callable[[str], None]) -> Iterator[Choice]:
    names = _candidates(kind.operation)
    for nbytes in sweep.sizes:
        times: dict[str, float] = {}
        for name in names:
            call = _prepare(kind, name, nbytes, comm)
            if call is not None:
                times[name] = round(median_of_slowest(call, comm, budget=sweep.budget) * 1e6, 2)
        times = comm.mpi.bcast(times)
        best = min(times, key=lambda name: times[name])
        names = [name for name in names if name in times and times[name] < HOPELESS * times[best]]
        algorithm, _, pieces = best.partition("/")
        tell(f"{' '.join(kind)} {nbytes} bytes: {best}, {times[best]:.1f} us")
        yield Choice(nbytes=nbytes, algorithm=algorithm, pieces=int(pieces or 1), us=times[best], others=times)


def _candidates(operation: str) -> list[str]:
    found = [NATIVE, LOADS]
    for entry in algorithms_of(operation):
        found += [f"{entry.name}/{pieces}" for pieces in PIECES] if entry.takes == "pieces" else [entry.name]
    return found


def _prepare(kind: _Kind, name: str, nbytes: int, comm: Any) -> Prepared | None:
    """Return the call, or None where the algorithm cannot do it: on all ranks alike."""
    algorithm, _, pieces = name.partition("/")
    words = {"order": kind.order} if OPERATIONS[kind.operation].reduces else {}
    call, result = BINDERS[kind.operation](*_operands(kind.operation, kind.dtype, nbytes, comm), **words)
    try:
        return Prepared(call, algorithm, result, int(pieces or 0))
    except ArgumentError:
        return None


def _operands(operation: str, dtype: str, nbytes: int, comm: Any) -> tuple[Any, ...]:
    if operation == "barrier":
        return (comm,)
    traits = OPERATIONS[operation]
    count = max(nbytes // dtype_named(dtype).itemsize // comm.size, 1) * comm.size
    share = count // comm.size if traits.input == "chunk" else count
    return np.zeros(share, dtype), comm
