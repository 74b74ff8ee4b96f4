"""Single parameters, gradients and optimizer states of a sharded model, whole, to be looked at and set by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from mpizero.collectives import all_gather, broadcast
from mpizero.errors import ArgumentError, ArgumentTypeError, ShardError, must_be
from mpizero.shard.access import ShardHandle

if TYPE_CHECKING:
    from mpizero.shard.flat import FlatParams
    from mpizero.shard.runtime import Runtime

__all__ = [
    "full_gradient",
    "full_optimizer_state",
    "full_parameter",
    "set_full_gradient",
    "set_full_optimizer_state",
    "set_full_parameter",
]

READ, WRITE = 0, 3
PARAMETER, GRADIENT, STATE = 0, 1, 2
"""What is asked for, as a number that ranks can compare."""
CALLS = ("full_parameter", "full_gradient", "full_optimizer_state",
         "set_full_parameter", "set_full_gradient", "set_full_optimizer_state")  # fmt: skip
MISSING, ELEMENTS, ALIKE, MISFIT = 0, 1, 2, 3
"""What a rank has: nothing, an element for each of its parameter's, one value that all have, or a value to be set that
does not fit."""


def full_parameter(param: Tensor) -> Tensor:
    """Return a copy of one parameter, whole and in master precision, on every rank.

    Args:
        param: a shard, from `model.parameters()`, or what an attribute gives, as `model.layer.weight`.

    Returns:
        A tensor of the parameter's own shape.

    Raises:
        ArgumentTypeError: for what is not a sharded model's parameter.
        ShardError: on all ranks, if they ask for different things; names them.

    Collective. Each rank sends its part to all others of its group: at most 4 bytes per element of the parameter and
    rank, and a few dozen bytes to agree. Needs memory for the parameter.
    """
    place = _Place(param)
    place.agree(READ + PARAMETER, ELEMENTS)
    return place.gather(place.shard)


def full_gradient(param: Tensor) -> Tensor | None:
    """Return a copy of one parameter's gradient as it is now, whole and reduced; None where there is none.

    Gradients that `no_sync` has kept back are not in it. Arguments, errors and costs are those of `full_parameter`.
    """
    place = _Place(param)
    grad = place.shard.grad
    said = place.agree(READ + GRADIENT, MISSING if grad is None else ELEMENTS)
    if grad is None or said == MISSING:
        return None
    return place.gather(grad)


def full_optimizer_state(param: Tensor, optimizer: torch.optim.Optimizer, key: str) -> Any:
    """Return a copy of what an optimizer keeps for one parameter, whole, on every rank.

    Args:
        param: see `full_parameter`.
        optimizer: one that was built from the sharded model's parameters.
        key: which of its states, such as "exp_avg".

    Returns:
        A tensor of the parameter's own shape; or, for a state that has not an element for each of the parameter's, such
        as "step", this rank's.

    Raises:
        ArgumentError: on all ranks, if any has no such state; names those there are.

    Other errors and costs are those of `full_parameter`.
    """
    place = _Place(param)
    value: Any = place.state(optimizer).get(key)
    if place.agree_on_state(READ + STATE, value, key, optimizer) == ELEMENTS:
        return place.gather(value)
    return value.clone() if isinstance(value, Tensor) else value


def set_full_parameter(param: Tensor, value: Tensor | None) -> None:
    """Give one parameter other values, from a whole tensor, between steps.

    Args:
        param: see `full_parameter`.
        value: of the parameter's own shape. Rank 0's counts; other ranks may pass None.

    Raises:
        ArgumentError: on all ranks, if rank 0's value has another shape, or is None.
        ShardError: on all ranks, if they set different things, or inside `unsharded`.

    Collective. Rank 0 sends the parameter to all: 4 bytes per element and rank.
    """
    place = _Place(param)
    runtime = place.runtime
    if runtime.pinned:
        raise ShardError(f"{CALLS[WRITE]} must be called outside mpizero.unsharded (got a call inside)")
    place.agree(WRITE + PARAMETER, place.fits(value), value)
    whole = place.receive(value, place.shard.dtype)
    runtime.before_step()
    with torch.no_grad():
        place.shard.copy_(place.cut(whole))
    runtime.refill([place.flat])


def set_full_gradient(param: Tensor, value: Tensor | None) -> None:
    """Give one parameter a gradient, from a whole tensor, as if backward had found it; it is not averaged.

    Arguments, errors and costs are those of `set_full_parameter`, and frozen parameters are refused.
    """
    place = _Place(param)
    fits = place.fits(value) if place.shard.requires_grad and place.flat.gradients is not None else MISSING
    place.agree(WRITE + GRADIENT, fits, value)
    whole = place.receive(value, place.shard.dtype)
    assert place.flat.gradients is not None  # noqa: S101  (or it would not fit)
    view = place.flat.gradients.views[place.index]
    view.copy_(place.cut(whole))
    place.shard.grad = view


def set_full_optimizer_state(
    param: Tensor, optimizer: torch.optim.Optimizer, key: str, value: Tensor | float | None
) -> None:
    """Give an optimizer another state for one parameter, from a whole tensor.

    Args:
        param: see `full_parameter`.
        optimizer: one that was built from the sharded model's parameters, and has stepped.
        key: which of its states.
        value: of the parameter's own shape, or a number for a state that is one. Rank 0's counts; other ranks may pass
            None.

    Errors and costs are those of `full_optimizer_state` and `set_full_parameter`.
    """
    place = _Place(param)
    state = place.state(optimizer)
    old: Any = state.get(key)
    kind = place.agree_on_state(WRITE + STATE, old, key, optimizer)
    if kind == ELEMENTS:
        if isinstance(value, int | float) and not place.slot.shape:
            value = torch.full((), float(value), device="cpu")
        place.agree(WRITE + STATE, place.fits(value), value, key=key)
        old.copy_(place.cut(place.receive(value, old.dtype)))
        return
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    number = number if isinstance(number, int | float) else None
    place.agree(WRITE + STATE, MISSING if number is None else ALIKE, value, key=key)
    told = np.array([0.0 if number is None else number], np.float64)
    if place.runtime.comm.size > 1:
        broadcast(told, place.runtime.comm)
    if isinstance(old, Tensor):
        old.fill_(float(told[0]))
    else:
        state[key] = type(old)(float(told[0]))


class _Place:
    """Find where a parameter lies, and move whole tensors there and back."""

    def __init__(self, param: Any) -> None:
        shard = param.__dict__["_mpizero_shard"] if isinstance(param, ShardHandle) else param
        owner: Any = getattr(shard, "_mpizero_owner", None)
        found = [
            (flat, index)
            for flat in (() if owner is None else owner.flats)
            for index, other in enumerate(flat.shards)
            if other is shard
        ]
        if not found:
            rule = "a parameter of a sharded model, from model.parameters() or an attribute outside forward"
            remedy = "ignored parameters, and those seen inside unsharded, are whole already"
            raise ArgumentTypeError(must_be("param", rule, type(param).__name__, remedy))
        self.shard: Tensor = shard
        self.runtime: Runtime = owner
        self.flat: FlatParams
        self.flat, self.index = found[0]
        self.slot = self.flat.layout.slots[self.index]

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return what an optimizer keeps for the shard; looking does not make it."""
        found: dict[str, Any] = optimizer.state.get(self.shard, {})
        return found

    def fits(self, value: Any) -> int:
        """Return whether a whole tensor can be cut, as one of the words for what a rank has."""
        if value is None:
            return MISSING
        return ELEMENTS if isinstance(value, Tensor) and tuple(value.shape) == self.slot.shape else MISFIT

    def agree(self, call: int, has: int, value: Any = None, *, key: str = "", looks: bool = False) -> int:
        """Agree that all ranks ask for the same; return what they have.

        Args:
            call: what this rank asks for.
            has: what it has: where something is set, rank 0's counts.
            value: what it wants to set, for the error.
            key: which of an optimizer's states.
            looks: whether a call that sets something only looks at what is there, so far.

        Raises:
            ShardError: on all ranks, if they ask for different things, or some have a gradient and others none.
            ArgumentError: on all ranks, if rank 0's value does not fit.
        """
        what = f"{CALLS[call]} of {self.slot.name!r}"
        mine = np.array([call, self._number(), crc32(key.encode()) >> 1, has], np.int32)
        runtime, rows = self.runtime, mine[None]
        if runtime.comm.size > 1:
            said = runtime.check_together("full_parameter", mine.view(np.uint8))
            rows = np.ascontiguousarray(said[:, 1:]).view(np.int32)
        if (rows[:, :3] != rows[0, :3]).any():
            calls = "; ".join(f"rank {rank}: {self._describe(*row[:3])}" for rank, row in enumerate(rows.tolist()))
            raise ShardError(f"all ranks must ask for the same (got {calls}): these calls are collective")
        everyones, sets = rows[:, 3], call >= WRITE and not looks
        if sets:
            if everyones[0] in {MISSING, MISFIT}:
                got = "something else" if runtime.comm.rank else _shown(value)
                rule = f"rank 0's tensor of shape {self.slot.shape}, for a parameter that is trained, or a number"
                raise ArgumentError(must_be(f"value for {what}", rule, got))
        elif (everyones == MISSING).any() != (everyones == MISSING).all():
            have = np.flatnonzero(everyones != MISSING).tolist()
            raise ShardError(f"{what} must be there on all ranks or on none (got it on ranks {have})")
        return int(everyones[0]) if sets or (everyones == everyones[0]).all() else ALIKE

    def agree_on_state(self, call: int, value: Any, key: str, optimizer: torch.optim.Optimizer) -> int:
        """Agree on what a state is; raise ArgumentError on all ranks if there is none."""
        has = MISSING if value is None else ALIKE
        if isinstance(value, Tensor) and value.shape == self.shard.shape:
            has = ELEMENTS
        if (kind := self.agree(call, has, key=key, looks=True)) == MISSING:
            known = ", ".join(self.state(optimizer)) or "no state before its first step"
            raise ArgumentError(must_be(f"key of {CALLS[call]}", f"one that the optimizer has ({known})", key))
        return kind

    def gather(self, part: Tensor) -> Tensor:
        """Return the whole of what `part` is this rank's part of."""
        flat, slot = self.flat, self.slot
        if not flat.lifetime.cut:
            return part.detach().clone()
        if not slot.numel:
            return part.new_empty(slot.shape)
        counts = [flat.layout.piece(self.index, rank).numel for rank in range(flat.comm.size)]
        whole: Tensor = all_gather(part.detach().reshape(-1), flat.comm, counts=counts)
        return whole.view(slot.shape)

    def receive(self, value: Any, dtype: torch.dtype) -> Tensor:
        """Return rank 0's whole tensor."""
        comm = self.runtime.comm
        whole = torch.empty(self.slot.shape, dtype=dtype, device=self.shard.device)
        if comm.rank == 0:
            whole.copy_(value.detach())
        if comm.size > 1 and whole.numel():
            broadcast(whole, comm)
        return whole

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part, in the shape of the shard."""
        if not self.flat.lifetime.cut:
            return whole
        piece = self.flat.layout.piece(self.index, self.flat.comm.rank)
        return whole.reshape(-1)[piece.start : piece.stop].view(self.shard.shape)

    def _number(self) -> int:
        """Return the parameter's place among all of the model's."""
        before = self.runtime.flats[: self.flat.number]
        return sum(len(flat.shards) for flat in before) + self.index

    def _describe(self, call: int, number: int, key: int) -> str:
        names = [slot.name for flat in self.runtime.flats for slot in flat.layout.slots]
        return f"{CALLS[call]} of {names[number]!r}" + (f", key #{key:x}" if key else "")


def _shown(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
