"""The arrays of a case, and its collective as a function of no arguments, made by mpizero."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import mpizero as mz
from mpizero.arrays import dtype_named
from mpizero.bench.cases import NO_OP
from mpizero.bench.data import Pattern
from mpizero.bench.place import HostPlace
from mpizero.collectives import OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpizero.bench.cases import Case, Plan

__all__ = ["Arrays", "CopyJob", "Job", "arrays_of", "verb"]


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """Hold what a rank puts in and where its result lies."""

    x: Any
    """A numpy array or a torch tensor, of one dimension."""
    out: Any
    """The same; None where the operation works in place, in `x`."""

    @property
    def result(self) -> Any:
        """Return the array that holds the result."""
        return self.x if self.out is None else self.out


def arrays_of(case: Case, comm: Any, place: HostPlace | None = None) -> Arrays:
    """Return new arrays for a case, their contents undefined. Collective for symmetric ones.

    All-reduce, broadcast and reduce work in place, the others from one array into another.
    """
    traits = OPERATIONS[case.operation]
    part = case.count // comm.size
    given = part if traits.input == "chunk" else case.count
    in_place = {traits.input, traits.output} <= {"whole", "root"}
    place = place or HostPlace()
    x = place.new(case.dtype, given, comm, symmetric=case.buffer == "symmetric")
    if in_place:
        return Arrays(x=x, out=None)
    taken = part if traits.output == "chunk" else case.count
    return Arrays(x=x, out=place.new(case.dtype, taken, comm, symmetric=case.buffer == "symmetric"))


def verb(case: Case, plan: Plan, arrays: Arrays, comm: Any) -> Callable[[], Any]:
    """Return mpizero's collective on the arrays, prepared if the case says so.

    Raises:
        ArgumentError, ArgumentTypeError: from the preparation; from the first call where there is none.
    """
    traits = OPERATIONS[case.operation]
    options: dict[str, Any] = {"algorithm": case.algorithm}
    if case.op != NO_OP:
        options |= {"op": case.op, "order": plan.order}
    if traits.rooted:
        options["root"] = plan.root
    if arrays.out is not None:
        options["out"] = arrays.out
    function = getattr(mz, case.operation)
    if case.prepared:
        prepared: Callable[[], Any] = mz.prepare(function, arrays.x, comm, **options)
        return prepared
    return partial(function, arrays.x, comm, **options)


class Job:
    """Be one case on this rank: rewrite the data, make the call, check the result."""

    def __init__(self, case: Case, plan: Plan, arrays: Arrays, comm: Any, *, place: HostPlace | None = None) -> None:
        """Bind the arrays, which lie at `place`; `call` is to be set to what is measured."""
        self.place = place or HostPlace()
        self.arrays, self.rank, self.root, self.count = arrays, comm.rank, plan.root, case.count
        self.given = self.place.elements(arrays.x)
        self.result = self.place.elements(arrays.result)
        dtype = dtype_named(case.dtype)
        self.pattern = Pattern(case.operation, dtype, case.op, ranks=comm.size, seed=plan.seed)
        self.call: Callable[[], Any] = _unset

    def rewrite(self, iteration: int) -> None:
        """Write the iteration's data into this rank's array."""
        # A rank's part is numbered from 0: its expectation at the receiver is too.
        self.place.fill(self.given, self.pattern.given(self.rank, iteration, 0, len(self.given)))

    def wrong(self, iteration: int) -> int:
        """Return how many elements of this rank's result are wrong."""
        expected = self.pattern.expected(self.rank, iteration, self.count, self.root)
        return sum(self.place.count_wrong(self.result[part.start : part.stop], part.period) for part in expected)


class CopyJob:
    """Be the memory limit on this rank: a copy of the case's bytes from one private array to another."""

    def __init__(self, case: Case, place: HostPlace) -> None:
        """Make both arrays."""
        self.source, self.call = place.copying(case.nbytes)
        self.place = place

    def rewrite(self, iteration: int) -> None:
        """Rewrite the source, as a collective's data are."""
        self.place.paint(self.source, iteration % 251)

    def wrong(self, iteration: int) -> int:
        """Return 0; plain copies need no check."""
        _ = iteration
        return 0


def _unset() -> None:
    raise AssertionError("a job without its call")
