"""The norm of gradients that are spread over ranks: the same bits on every rank and at every stage.

[Note: one sum] Each rank sums |x|^p of its part in fp64, in blocks so small that torch takes one thread and the result
does not depend on how many there are. The ranks' sums are added in the canonical order, and the root is rounded once.
With `exact=True` the sum must not depend on the number of ranks either: see `exact_sum`.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpizero.collectives import pairwise
from mpizero.errors import ArgumentError, ArgumentTypeError, must_be
from mpizero.optim.exact_sum import ExactSum
from mpizero.optim.gradients import ignored_gradients, place, shard_gradients

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["agreed_norm", "number"]

BLOCK = 1 << 14
"""Elements that are widened at a time: below the 32,768 from which torch splits a sum over threads, and in cache. On a
GPU, where a sum has one order for one length, pieces are summed whole."""
RECORD = 6
"""Numbers that a rank sends beside its exact sum."""


def agreed_norm(runtime: Any, what: str, max_norm: float, norm_type: float) -> Tensor:
    """Return the norm of all gradients, in host memory, shape (): fp32, or float64 for a model with such parameters.

    Args:
        runtime: the model's.
        what: what the user wants it for.
        max_norm: what the user will clip at; infinity to measure alone.
        norm_type: the p of the norm.

    Raises:
        ArgumentError: on every rank, if either number is not positive, or not the same on all ranks.
        ShardError: if `no_sync` has kept gradients back, or ranks make other calls.

    Collective: one exchange of 68 bytes per rank, 364 with `exact=True`; none on one rank. On a GPU the host waits for
    the sum of its gradients, once (and once more where ignored parameters have gradients).
    """
    runtime.check_synced(what)
    exact = ExactSum() if runtime.exact is not None and 0 < norm_type < math.inf else None
    pieces = shard_gradients(runtime)
    if exact is not None:
        exact.add_powers(pieces, norm_type)
    own = power_sum(pieces, norm_type) if exact is None else 0.0
    words = np.zeros(0) if exact is None else exact.words().view(np.float64)
    record = [own, power_sum(ignored_gradients(runtime), norm_type), *place(runtime), max_norm, norm_type]
    rows = _exchanged(runtime, np.concatenate([record, words]))
    _check_numbers(rows, max_norm, norm_type, runtime.comm.rank)
    counted = [row for row in sorted(rows, key=operator.itemgetter(3)) if row[2] == 0]
    of_shards = [float(row[0]) for row in counted] if exact is None else [_exact_total(counted)]
    whole = combined(of_shards, [float(rows[0, 1])], norm_type)
    total = torch.full((), whole, dtype=torch.float64, device="cpu")
    norm = total if math.isinf(norm_type) else total.pow(1 / norm_type)
    wide = any(flat.master_dtype == torch.float64 for unit in runtime.units for flat in unit.trainable)
    return norm if wide else norm.float()


def number(what: str, value: Any) -> float:
    """Return an argument as a float; raise ArgumentTypeError if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ArgumentTypeError(must_be(what, "a number", value)) from None


def power_sum(pieces: list[Tensor], norm_type: float) -> float:
    """Return the fp64 sum of |x|^p over all elements, for p infinite the largest |x|, NaN if there is one."""
    full = [piece for piece in pieces if piece.numel()]
    blocks = [block for piece in full for block in piece.split(piece.numel() if piece.is_cuda else BLOCK)]
    if not blocks:
        return 0.0
    here = blocks[0].device  # ignored parameters may be on several
    # Into one tensor: results that are kept one by one lie between the widened blocks in the C library's heap, which
    # then takes new memory for each of them, up to twice that of the gradients.
    norms = torch.empty(len(blocks), dtype=torch.float64, device=here)
    for at, block in enumerate(blocks):
        norms[at] = torch.linalg.vector_norm(block, norm_type, dtype=torch.float64)
    return combined((norms if math.isinf(norm_type) else norms.pow(norm_type)).tolist(), [], norm_type)


def combined(parts: list[float], more: list[float], norm_type: float) -> float:
    """Return what the parts, in the canonical order, and then the rest come to."""
    if math.isinf(norm_type):
        return float(np.max([*parts, *more]))  # Python's max would lose a NaN
    return pairwise([pairwise(parts, operator.add), *more], operator.add)


def _exact_total(rows: list[np.ndarray[Any, Any]]) -> float:
    """Return the sum of all ranks' exact sums, rounded once."""
    total = ExactSum()
    for row in rows:
        total.add_words(row[RECORD:].view(np.uint64))
    return total.rounded()


def _exchanged(runtime: Any, record: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return every rank's record, in the order of the ranks, having agreed that all take the norm."""
    if runtime.comm.size == 1:
        return record[None]
    said = runtime.check_together("clip_grad_norm_", record.view(np.uint8))
    return np.ascontiguousarray(said[:, 1:]).view(np.float64)


def _check_numbers(rows: np.ndarray[Any, Any], max_norm: float, norm_type: float, rank: int) -> None:
    for what, value, column in (("max_norm", max_norm, rows[:, 4]), ("norm_type", norm_type, rows[:, 5])):
        if not np.array_equal(column, np.full_like(column, column[0]), equal_nan=True):
            raise ArgumentError(must_be(what, "the same on all ranks", f"{value:g} on rank {rank}"))
        if not value > 0:
            raise ArgumentError(must_be(what, "positive", value))
