"""Which part of which parameter each rank holds: what a checkpoint needs to know of a sharded model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mpizero.errors import ShardError
from mpizero.shard.offload import OnLoan
from mpizero.shard.runtime import runtime_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from torch import Tensor, nn

__all__ = [
    "Cut",
    "Held",
    "communicator_of",
    "cuts_of",
    "held_by",
    "is_exact",
    "loan_of",
    "meet",
    "set_held",
    "whole_parameters",
]


@dataclass(frozen=True, kw_only=True)
class Held:
    """Say which elements of one parameter this rank holds."""

    names: tuple[str, ...]
    """In the model's order; more than one where modules share the parameter."""
    shape: tuple[int, ...]
    """The whole parameter's."""
    shard: Tensor = field(repr=False)
    """The elements, in master precision: what an optimizer holds."""
    start: int
    """The first element held, counted within the parameter."""
    stop: int
    buffer: int
    """The number of the flat buffer that the parameter lies in, from 0."""
    offset: int
    """The flat buffer's element at which the parameter begins."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Say how a flat buffer is cut over ranks."""

    length: int
    """Elements of one shard."""
    shards: int
    copies: int
    """How many ranks hold each shard: of hybrid sharding, the number of groups. At stage 0 shards are cut on paper
    only, and each of them has one rank to answer for it."""
    shard: int
    """Which shard this rank answers for, from 0."""
    copy: int
    """Which of its copies this rank holds."""


def held_by(model: nn.Module) -> tuple[Held, ...]:
    """Return what this rank holds of every sharded parameter, in the same order on all ranks.

    Args:
        model: a sharded model; raises ShardError for another.
    """
    found = []
    for flat in runtime_of(model).flats:
        for index, (slot, member) in enumerate(zip(flat.layout.slots, flat.members, strict=True)):
            start, stop = 0, slot.numel
            if flat.lifetime.cut:
                piece = flat.layout.piece(index, flat.comm.rank)
                start, stop = piece.start, piece.stop
            where = {"start": start, "stop": stop, "buffer": flat.number, "offset": slot.offset}
            found.append(Held(names=tuple(member.names), shape=slot.shape, shard=flat.shards[index], **where))
    return tuple(found)


def cuts_of(model: nn.Module) -> tuple[Cut, ...]:
    """Return how each flat buffer is cut, by its number."""
    replicas = runtime_of(model).replicas
    copies, copy = (1, 0) if replicas is None else (replicas.size, replicas.rank)
    return tuple(
        Cut(length=flat.layout.shard_length, shards=flat.comm.size, copies=copies, shard=flat.comm.rank, copy=copy)
        for flat in runtime_of(model).flats
    )


def whole_parameters(model: nn.Module) -> tuple[tuple[str, nn.Parameter], ...]:
    """Return the parameters that were left whole on every rank (`ignored_params`), by name."""
    return tuple(runtime_of(model).ignored)


def communicator_of(model: nn.Module) -> Any:
    """Return the communicator of all ranks of a sharded model, for mpizero's own use."""
    return runtime_of(model).comm


def loan_of(model: nn.Module) -> OnLoan | None:
    """Return memory on a disk for what a load reads of a model that has state there; None for others.

    Raises:
        DiskError: if there can be none.
    """
    spill = runtime_of(model).spill
    return OnLoan(spill) if spill is not None and spill.files else None


def is_exact(model: nn.Module) -> bool:
    """Return whether a model was sharded with `exact=True`."""
    return runtime_of(model).exact is not None


def meet(model: nn.Module, kind: str, extra: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Agree that all ranks are about to save, or to load; return every rank's `extra`, of shape (ranks, n).

    Args:
        model: a sharded model.
        kind: "save" or "load".
        extra: n bytes (uint8), equally many on all ranks.

    Raises:
        ShardError: on all ranks, if they are about to do different things with the model, and inside `unsharded`.

    Collective: 20 + n bytes per rank, none on one rank.
    """
    runtime = runtime_of(model)
    if runtime.pinned:
        raise ShardError(f"{kind} must be called outside mpizero.unsharded (got a call inside): leave the block first")
    said = runtime.check_together(kind, extra)
    rows: np.ndarray[Any, Any] = extra[None] if said is None else said[:, 1:]
    return rows


def set_held(model: nn.Module, values: Sequence[Tensor]) -> None:
    """Give this rank's shards other values, on all ranks, between steps; whole parameters follow.

    Args:
        model: a sharded model.
        values: for each of `held_by(model)` as many elements as it holds, of any shape and of any floating dtype.

    Sends nothing; the next forward, or what else meets all ranks, has to come before anybody uses the parameters.
    """
    runtime = runtime_of(model)
    runtime.before_step()
    with torch.no_grad():
        for held, value in zip(held_by(model), values, strict=True):
            held.shard.copy_(value.view(held.shard.shape))
    runtime.refill(runtime.flats)
