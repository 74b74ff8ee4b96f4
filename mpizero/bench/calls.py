"""The arrays of a case, and its collective as a function of no arguments, made by mpizero."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import mpizero as mz
from mpizero.arrays import borrow, dtype_named
from mpizero.bench.cases import NO_OP
from mpizero.bench.data import Pattern, count_wrong, fill
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


def arrays_of(case: Case, comm: Any) -> Arrays:
    """Return new arrays for a case, their contents undefined. Collective for symmetric ones.

    All-reduce, broadcast and reduce work in place, the others from one array into another.
    """
    traits = OPERATIONS[case.operation]
    part = case.count // comm.size
    given = part if traits.input == "chunk" else case.count
    in_place = {traits.input, traits.output} <= {"whole", "root"}
    x = _new(case, given, comm)
    if in_place:
        return Arrays(x=x, out=None)
    return Arrays(x=x, out=_new(case, part if traits.output == "chunk" else case.count, comm))


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

    def __init__(self, case: Case, plan: Plan, arrays: Arrays, comm: Any) -> None:
        """Bind the arrays; `call` is to be set to what is measured."""
        self.arrays, self.rank, self.root, self.count = arrays, comm.rank, plan.root, case.count
        self.given = borrow(arrays.x, writable=True).view.data
        self.result = borrow(arrays.result, "out", writable=True).view.data
        dtype = dtype_named(case.dtype)
        self.pattern = Pattern(case.operation, dtype, case.op, ranks=comm.size, seed=plan.seed)
        self.call: Callable[[], Any] = _unset

    def rewrite(self, iteration: int) -> None:
        """Write the iteration's data into this rank's array."""
        # A rank's part is numbered from 0: its expectation at the receiver is too.
        fill(self.given, self.pattern.given(self.rank, iteration, 0, len(self.given)))

    def wrong(self, iteration: int) -> int:
        """Return how many elements of this rank's result are wrong."""
        expected = self.pattern.expected(self.rank, iteration, self.count, self.root)
        return sum(count_wrong(self.result[part.start : part.stop], part.period) for part in expected)


class CopyJob:
    """Be the memory limit on this rank: a copy of the case's bytes from one private array to another."""

    def __init__(self, case: Case) -> None:
        """Make both arrays."""
        self.source, self.target = np.zeros(case.nbytes, np.uint8), np.zeros(case.nbytes, np.uint8)
        self.value = 0

    def call(self) -> None:
        """Copy."""
        np.copyto(self.target, self.source)

    def rewrite(self, iteration: int) -> None:
        """Rewrite the source, as a collective's data are."""
        self.value = iteration % 251
        self.source[:] = self.value

    def wrong(self, iteration: int) -> int:
        """Return 0; numpy's copies need no check."""
        _ = iteration
        return 0


def _new(case: Case, count: int, comm: Any) -> Any:
    kind: Any = case.dtype
    if case.dtype == "bfloat16":
        import torch

        kind = torch.bfloat16
        if case.buffer == "private":
            return torch.empty(count, dtype=kind)
    if case.buffer == "symmetric":
        return mz.empty((count,), kind, comm)
    return np.empty(count, kind)


def _unset() -> None:
    raise AssertionError("a job without its call")
