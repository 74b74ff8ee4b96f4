"""Clip, and measure, gradients that are spread over ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from mpizero.errors import ArgumentError, ShardError, must_be
from mpizero.optim.gradients import all_gradients
from mpizero.optim.norm import agreed_norm, number
from mpizero.shard import runtime_of

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["clip_grad_norm_", "clip_grad_value_", "grad_norm"]


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients of a sharded model so that their global norm is at most `max_norm`.

    Takes the gradients as they are now: those that were set, changed or removed (`param.grad = None`) by hand too, if
    all ranks did the same. Ignored parameters count once and are scaled like the others.

    Args:
        model: a sharded model, after a backward outside `no_sync`.
        max_norm: the largest norm; positive, may be infinity.
        norm_type: the p of the p-norm; positive, may be infinity (or "inf") for the largest magnitude.
        error_if_nonfinite: whether to raise, and leave the gradients as they are, if the norm is infinite or NaN.
            Otherwise the factor is 0 or NaN, as torch's.

    Returns:
        The norm before clipping, shape (), on the model's device, fp32, in float64 for a model of such parameters; the
        same bits on every rank and at every stage: an fp64 sum over shards in the canonical order, rounded once.
        Parameters without a gradient count as zero, NaN makes it NaN.

    Raises:
        ArgumentError: on every rank, if `max_norm` or `norm_type` is not positive, or not the same on all ranks.
        ShardError: if `model` is not sharded, `no_sync` has kept gradients back, or the norm is not finite.

    Collective: one exchange of 68 bytes per rank, of 364 for a model sharded with `exact=True`, whose sum of powers is
    exact, so that any number of ranks gives the same bits. Reads every gradient once, and writes it once if the norm is
    too large. As torch's, the factor is max_norm / (norm + 1e-6), at most 1. On a GPU the host waits for the device
    once, to tell the other ranks its sum, and whoever reads what is returned waits again.
    """
    runtime = runtime_of(model)
    runtime.check_changeable("clipping")
    max_norm, norm_type = number("max_norm", max_norm), number("norm_type", norm_type)
    norm = agreed_norm(runtime, "clipping", max_norm, norm_type)
    if error_if_nonfinite and not math.isfinite(norm):
        raise ShardError(
            f"the gradients' norm of order {norm_type:g} must be finite (got {float(norm)}): skip the step, or pass "
            "error_if_nonfinite=False to scale by it anyway"
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if float(factor) != 1:
        for grad in all_gradients(runtime):
            grad.mul_(factor)
    return _at_home(norm, runtime)


@torch.no_grad()
def clip_grad_value_(model: nn.Module, clip_value: float) -> None:
    """Limit every element of the gradients of a sharded model to the range from -`clip_value` to `clip_value`.

    Args:
        model: a sharded model, after a backward outside `no_sync`.
        clip_value: the largest magnitude; positive. NaN elements stay NaN.

    Raises:
        ArgumentError: if `clip_value` is not positive.
        ShardError: if `model` is not sharded, or `no_sync` has kept gradients back.

    Sends nothing: each rank limits the elements that it holds.
    """
    runtime = runtime_of(model)
    clip_value = number("clip_value", clip_value)
    if not clip_value > 0:
        raise ArgumentError(must_be("clip_value", "positive", clip_value))
    runtime.check_synced("clipping")
    runtime.check_changeable("clipping")
    for grad in all_gradients(runtime):
        grad.clamp_(-clip_value, clip_value)


@torch.no_grad()
def grad_norm(model: nn.Module, norm_type: float = 2.0) -> Tensor:
    """Return the global norm of a sharded model's gradients, as they are now, and leave them alone.

    Args:
        model: a sharded model, after a backward outside `no_sync`.
        norm_type: as of `clip_grad_norm_`.

    Returns:
        What `clip_grad_norm_` returns.

    Raises:
        ArgumentError: on every rank, if `norm_type` is not positive, or not the same on all ranks.
        ShardError: if `model` is not sharded, or `no_sync` has kept gradients back.

    Collective: one exchange of 68 bytes per rank, of 364 with `exact=True`. Reads every gradient once.
    """
    runtime = runtime_of(model)
    return _at_home(agreed_norm(runtime, "a norm of gradients", math.inf, number("norm_type", norm_type)), runtime)


def _at_home(norm: Tensor, runtime: Any) -> Tensor:
    """Return a norm on the model's device: filled in, since a copy from the host's memory would wait for the device."""
    if norm.device == runtime.home.device:
        return norm
    return torch.full((), float(norm), dtype=norm.dtype, device=runtime.home.device)
