"""Clip by the global norm of gradients that are spread over ranks."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpizero.collectives import all_reduce, pairwise
from mpizero.errors import ArgumentError, must_be
from mpizero.shard import runtime_of

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients of a sharded model so that their global 2-norm is at most `max_norm`.

    Args:
        model: a sharded model, after a backward outside `no_sync`.
        max_norm: the largest norm; positive, may be infinity.

    Returns:
        The norm before clipping, fp32, shape (), the same bits on every rank and at every stage: an fp64 sum of squares
        over shards in the canonical order, rounded once. Parameters without a gradient count as zero.

    Raises:
        ArgumentError: if `max_norm` is not positive.
        ShardError: if `model` is not sharded, or `no_sync` has kept gradients back.

    Collective: one all-reduce of 8 bytes at stages 1 to 3. As torch's, the factor is max_norm / (norm + 1e-6), at most
    1.
    """
    if not max_norm > 0:
        raise ArgumentError(must_be("max_norm", "positive", max_norm))
    runtime = runtime_of(model)
    runtime.check_synced("clipping")
    runtime.check_together("clip_grad_norm_")
    comm, cut = runtime.comm, runtime.lifetime.cut
    flats = [flat for unit in runtime.units for flat in unit.trainable]
    if cut:
        total = np.array([_square_sum([_pieces(flat, comm.rank) for flat in flats])])
        all_reduce(total, comm, order="canonical")
        square = float(total[0])
    else:
        parts = [_square_sum([_pieces(flat, rank) for flat in flats]) for rank in range(comm.size)]
        square = pairwise(parts, operator.add)  # as the all-reduce of the other stages would
    norm = torch.tensor(math.sqrt(square), dtype=torch.float32)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for flat in flats:
        for param in flat.shards:
            if param.grad is not None:
                param.grad.mul_(factor)
    return norm


def _pieces(flat: Any, rank: int) -> list[Tensor]:
    """Return the gradients' elements that are, or at stage 0 would be, in the shard of `rank`."""
    found = []
    for index, param in enumerate(flat.shards):
        if param.grad is None:
            continue
        piece = flat.layout.piece(index, rank)
        whole = param.grad.reshape(-1)
        found.append(whole if flat.lifetime.cut else whole[piece.start : piece.stop])
    return found


def _square_sum(groups: list[list[Tensor]]) -> float:
    """Return the fp64 sum of squares, added up in the order of the pieces."""
    total = 0.0
    for pieces in groups:
        for piece in pieces:
            if piece.numel():
                total += float(torch.linalg.vector_norm(piece, dtype=torch.float64)) ** 2
    return total
