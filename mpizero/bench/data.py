"""Data whose sums are exact, and the results that they must give.

[Note: exact data] Rank r's element i in iteration t is a small integer out of a table of PERIOD random ones, read from
a place that depends on r and t. PERIOD is prime, so that a chunk or a segment that lands elsewhere, by a power of two
say, is noticed; t makes the last iteration's data wrong. The integers are so small that every sum of them over the
ranks is exact in the element type, in any order of summation; hence results are compared with ==. As the table is kept
twice in a row, a rank's data are a slice of it: rewriting an array before each iteration costs no more than a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.bench.cases import NO_OP
from mpizero.collectives import OPERATIONS

if TYPE_CHECKING:
    from mpizero.arrays import DType

__all__ = ["PERIOD", "Expected", "Pattern", "count_wrong", "fill"]

Array = np.ndarray[Any, Any]

PERIOD = 4099
BLOCK = 64
"""Periods that are compared at a time, so that the outcome of the comparison stays in cache."""
EXACT = {"int8": 127, "uint8": 255, "bfloat16": 256, "float16": 2048, "bool": 1}
"""The largest whole number up to which a type has all; types that are not here have far more than is needed."""
MOST = 63
RANK_STRIDE, ITERATION_STRIDE = 1009, 313


@dataclass(frozen=True, kw_only=True)
class Expected:
    """State what elements [start, stop) of a result must be: `period`, over and over."""

    start: int
    stop: int
    period: Array
    """At most PERIOD elements, in the storage of the element type."""


class Pattern:
    """Give the data of one case and the result that it must have. See [Note: exact data]."""

    def __init__(self, operation: str, dtype: DType, op: str, *, ranks: int, seed: int) -> None:
        """Draw the table.

        Args:
            operation: the collective.
            dtype: the element type.
            op: the reduction, NO_OP where there is none.
            ranks: number of ranks.
            seed: the same on all ranks.
        """
        self.traits, self.dtype, self.op, self.ranks = OPERATIONS[operation], dtype, op, ranks
        self.stride = 1 if op == "prod" else RANK_STRIDE
        table = self._table(np.random.default_rng(seed))
        self.numbers = np.concatenate([table, table])
        # A mean divides by the number of ranks: inputs are multiples of it, so that the quotient is whole.
        self.stored = _stored(self.numbers * ranks if op == "mean" else self.numbers, dtype)

    def given(self, rank: int, iteration: int, start: int, count: int) -> Array:
        """Return the first period of a rank's elements [start, start + count), as stored."""
        at = self._place(rank, iteration, start)
        return self.stored[at : at + min(count, PERIOD)]

    def expected(self, rank: int, iteration: int, count: int, root: int) -> list[Expected]:
        """Return what a rank's result must be; nothing where it gets none.

        Args:
            rank: the rank that has the result.
            iteration: the number of the iteration.
            count: elements of the whole array.
            root: the root of a rooted operation.
        """
        part = count // self.ranks
        if self.traits.reduces:
            if self.traits.output == "root" and rank != root:
                return []
            start, length = (rank * part, part) if self.traits.output == "chunk" else (0, count)
            return [Expected(start=0, stop=length, period=self._reduced(iteration, start, length))]
        if self.traits.output == "whole" and self.traits.input != "chunk":
            return [Expected(start=0, stop=count, period=self.given(root, iteration, 0, count))]
        first = rank * part if self.traits.output == "column" else 0
        return [
            Expected(start=peer * part, stop=(peer + 1) * part, period=self.given(peer, iteration, first, part))
            for peer in range(self.ranks)
        ]

    def _reduced(self, iteration: int, start: int, count: int) -> Array:
        length = min(count, PERIOD)
        places = (self._place(rank, iteration, start) for rank in range(self.ranks))
        parts = [self.numbers[at : at + length] for at in places]
        combine = {"max": np.maximum, "min": np.minimum, "prod": np.multiply}.get(self.op, np.add)
        total = parts[0].copy()
        for part in parts[1:]:
            combine(total, part, out=total)
        return _stored(total, self.dtype)

    def _place(self, rank: int, iteration: int, start: int) -> int:
        return (start + rank * self.stride + iteration * ITERATION_STRIDE) % PERIOD

    def _table(self, draw: np.random.Generator) -> Array:
        if self.op == "prod":
            # One rank in `span` has a 2, the others 1: products stay under 2^7 however many ranks there are.
            span = max(3, -(-self.ranks // 5))
            return 1 + (np.arange(PERIOD) % span == 0).astype(np.int64)
        terms = 1 if self.op in {"max", "min", NO_OP} else self.ranks
        return draw.integers(0, max(2, min(MOST, EXACT.get(self.dtype.name, MOST * terms) // terms) + 1), PERIOD)


def fill(data: Array, period: Array) -> None:
    """Write `period` into the one-dimensional `data`, over and over."""
    rows, whole = _rows(data)
    if whole:
        rows[:] = period
    data[whole:] = period[: len(data) - whole]


def count_wrong(data: Array, period: Array) -> int:
    """Return how many elements of the one-dimensional `data` differ from `period`, repeated; NaN differs from all."""
    rows, whole = _rows(data)
    wrong = sum(int(np.count_nonzero(rows[at : at + BLOCK] != period)) for at in range(0, len(rows), BLOCK))
    return wrong + int(np.count_nonzero(data[whole:] != period[: len(data) - whole]))


def _rows(data: Array) -> tuple[Array, int]:
    """Return the whole periods as rows, and the number of elements in them."""
    whole = len(data) // PERIOD * PERIOD
    return data[:whole].reshape(-1, PERIOD), whole


def _stored(numbers: Array, dtype: DType) -> Array:
    """Return whole numbers as numpy stores the element type: bfloat16 as the bits of a float32's upper half."""
    if dtype.name != "bfloat16":
        return numbers.astype(dtype.storage)
    bits = numbers.astype(np.float32).view(np.uint32)
    nearest = bits + 0x7FFF + ((bits >> 16) & 1)  # to even, as a number beyond 256 is rounded
    return (nearest >> 16).astype(np.uint16)
