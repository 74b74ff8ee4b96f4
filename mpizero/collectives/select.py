"""Choose an algorithm, and the segment in which it works, from what all ranks know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpizero.collectives.execute import SCRATCH
from mpizero.collectives.registry import NATIVE, OPERATIONS, algorithm, algorithms_of, build
from mpizero.errors import ArgumentError, must_be

if TYPE_CHECKING:
    from mpizero.arrays import DType

__all__ = ["choose", "native_can", "segment_of"]

SMALL = 16 << 10
"""Bytes under which the MPI library's own collective is the quickest on a CPU (it posts no Python per message)."""
MANY = 16
"""Ranks beyond which a message to every peer at once is no longer a good idea, and neighbours are used instead."""

_LARGE = {"all_reduce": "direct", "reduce_scatter": "direct", "all_gather": "direct"}
_LARGE_MANY = {"all_reduce": "ring", "reduce_scatter": "ring", "all_gather": "ring"}
_OTHER = {"broadcast": "tree", "reduce": "tree", "barrier": "dissemination"}


def choose(operation: str, requested: str, order: str, dtype: DType, *, op: str, shape: tuple[int, int, bool]) -> str:
    """Return the name of the algorithm to use.

    Args:
        operation: the collective's name.
        requested: what the caller asked for; `auto` leaves it to us.
        order: `canonical` or `any`.
        dtype: the element type.
        op: the reduction.
        shape: number of ranks, bytes of the whole buffer, and whether there is a native collective.

    Raises:
        ArgumentError: for an unknown algorithm, or one that cannot do what is asked; lists those that can.
    """
    size, nbytes, has_native = shape
    reduces = OPERATIONS[operation].reduces
    exact = not reduces or dtype.kind in "iub"
    strict = order == "canonical" and not exact
    can_native = has_native and nbytes < 1 << 31 and native_can(operation, dtype, op) and not strict
    if requested == "auto":
        if can_native and nbytes <= SMALL and operation != "barrier":
            return NATIVE
        many = size > MANY and not strict
        return (_LARGE_MANY if many else _LARGE).get(operation) or _OTHER[operation]
    if requested == NATIVE:
        if can_native:
            return NATIVE
        rule = "one that can do this"
        got = f"native for {operation} of {dtype.name}, op {op}, order {order}, {nbytes} bytes"
        raise ArgumentError(
            must_be("algorithm", rule, got, f"choose one of {', '.join(_names(operation, size, strict=strict))}")
        )
    if strict and not algorithm(operation, requested).is_canonical(size):
        names = ", ".join(_names(operation, size, strict=True))
        rule = f"one that sums in canonical order on {size} ranks ({names})"
        raise ArgumentError(must_be("algorithm", rule, requested, "or pass order='any'"))
    return algorithm(operation, requested).name


def native_can(operation: str, dtype: DType, op: str) -> bool:
    """Return whether MPI's own collective gives the results that the verbs promise.

    It moves anything, and reduces integers; of floats only sums and products in 32 and 64 bits: no MPI here has a
    bfloat16, all accumulate fp16 in fp16, and max and min of NaN differ from rank to rank.
    """
    if not OPERATIONS[operation].reduces:
        return True
    if dtype.is_half or dtype.kind == "b":
        return False
    return dtype.kind in "iu" or op in {"sum", "mean", "prod"}


def segment_of(operation: str, name: str, size: int, root: int, widths: tuple[int, int]) -> int:
    """Return the elements of a chunk to work on at a time; equal on all ranks. See [Note: segments] in `execute`.

    Args:
        operation: the collective's name.
        name: the algorithm's.
        size: number of ranks.
        root: the root of a rooted operation.
        widths: bytes of an element, and of an accumulated one.
    """
    schedule = build(operation, name, size, 0, root)  # the slots are equal on all ranks; a test holds builders to that
    slots = schedule.raw_slots * widths[0] + schedule.acc_slots * widths[1]
    return max(1, SCRATCH // slots // 64 * 64) if slots else 1 << 62


def _names(operation: str, size: int, *, strict: bool) -> list[str]:
    return [entry.name for entry in algorithms_of(operation) if not strict or entry.is_canonical(size)]
