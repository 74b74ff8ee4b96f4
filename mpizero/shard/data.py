"""Batches that do not come out even: ranks with fewer of them, and batches with fewer tokens.

[Note: a communicator for data] What ranks tell each other here goes over a communicator of its own, made at the first
use: neither the caller's messages nor a model's gathers, which may be under way between two steps, are waited for.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from torch import Tensor

from mpizero.collectives import all_gather
from mpizero.collectives.call import default_communicator
from mpizero.errors import ArgumentError, ArgumentTypeError, must_be

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["global_mean", "join"]

Batch = TypeVar("Batch")
Total = TypeVar("Total", Tensor, float)

NEVER, OUT, HAS = 0, 1, 2
"""What a rank says of its batches: it never had one, has no more, has one."""


def join(batches: Iterable[Batch], comm: Any = None, *, template: Batch | None = None) -> Iterator[tuple[Batch, float]]:
    """Yield this rank's batches with their weights, so that all ranks make equally many steps (case S7).

    Write `for batch, weight in mz.join(loader): loss = model(batch) * weight; loss.backward(); ...`. The average over
    ranks that backward makes of the gradients is then the mean over the ranks that have a batch. A rank that has run
    out gets its last batch again, with weight 0; the loop ends on all ranks together, when all have run out.

    Args:
        batches: this rank's, as many as there are, none perhaps.
        comm: the ranks, as given to `mpizero.shard`; None means `mpizero.world()`.
        template: what a rank that never had a batch gets, with weight 0.

    Yields:
        The batch, and its weight: ranks / (ranks that have a batch), or 0.0.

    Raises:
        ArgumentError: on all ranks, if some rank never had a batch and no template, while others have one; names it.

    Collective at every step: an all-gather of one byte per rank. All ranks must leave the loop at the same step, by
    `break` too. A repeated batch goes through the whole model: BatchNorm's running statistics (with `SyncBatchNorm`,
    the other ranks' results too) and the states of dropout's random numbers see it, and a loss that is infinite or not
    a number stays so when multiplied by 0.
    """
    comm = _own(comm)
    source, last, ended = iter(batches), template, False
    known = template is not None
    while True:
        if not ended:
            try:
                last, known = next(source), True
            except StopIteration:
                ended = True
        says = HAS if not ended else OUT if known else NEVER
        table = all_gather(np.array([says], np.uint8), comm)
        having = int(np.count_nonzero(table == HAS))
        if not having:
            return
        _check_known(table)
        yield last, 0.0 if ended else comm.size / having  # type: ignore[misc]  # a batch or the template, as checked


def global_mean(total: Total, count: float | Tensor, comm: Any = None) -> Total:
    """Turn a rank's sum of losses into the loss whose gradient, averaged over ranks, is that of the mean over all.

    The mean of the ranks' means is wrong where they have unevenly many tokens (case S21): of 3 on one rank and 29 on
    another each of the 3 would weigh ten times as much. So divide by the count of all ranks:

        loss = mz.global_mean(cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum())

    Over several micro-batches, the counts of all of them belong to one mean. Ask for the factor once per step:

        factor = mz.global_mean(1.0, sum(number of tokens in each micro-batch of this rank))
        for batch in micro_batches: (sum_of_losses(model(batch)) * factor).backward()

    Inside `mz.join`, give `total` and `count` times `weight > 0`.

    Args:
        total: the sum (not the mean) of this rank's losses, shape () with its graph, or a number.
        count: how many terms the sum has; 0 is fine, but `total` must have a graph also then, so that the rank takes
            part in backward (an empty sum has one).
        comm: the ranks, as given to `mpizero.shard`; None means `mpizero.world()`.

    Returns:
        total * ranks / (count of all ranks), of total's dtype. Its mean over ranks is the mean over all terms; by
        itself it is no loss to print.

    Raises:
        ArgumentTypeError: if `total` is neither a tensor nor a number, or `count` no number.
        ArgumentError: on all ranks, if a count is negative or not finite, or all are 0.

    Collective: an all-gather of 8 bytes per rank. A count in a GPU's memory is read by the host, which waits for the
    device: a number, or a tensor in host memory, costs no such wait.
    """
    if not isinstance(total, Tensor | float | int):
        raise ArgumentTypeError(must_be("total", "a tensor, the sum of this rank's losses", type(total).__name__))
    comm = _own(comm)
    counts = all_gather(np.array([_number(count)], np.float64), comm).tolist()
    for rank, value in enumerate(counts):
        if not 0 <= value < math.inf:
            raise ArgumentError(must_be("count", "finite and at least 0 on every rank", f"{value} on rank {rank}"))
    whole = math.fsum(counts)
    if not whole:
        remedy = "leave the step out, on all ranks"
        raise ArgumentError(must_be("count", "above 0 on some rank", "0 on all ranks", remedy))
    return total * (comm.size / whole)


def _own(comm: Any) -> Any:
    """Return the communicator of [Note: a communicator for data]."""
    return default_communicator(comm).private.private


def _number(count: Any) -> float:
    try:
        return float(count)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentTypeError(must_be("count", "a number, or a tensor of one element", count)) from error


def _check_known(table: Any) -> None:
    never = np.flatnonzero(table == NEVER).tolist()
    if never:
        got = f"none on rank {', '.join(map(str, never))}"
        remedy = "pass template=, a batch of the right shape, on that rank at least; it will count for nothing"
        raise ArgumentError(must_be("batches", "at least one on every rank", got, remedy))
