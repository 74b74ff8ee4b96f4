"""Catch torch's own loss scaler on shards: it would let one rank step while another, which saw an overflow, skips.

[Note: torch's own scaler] The hooks on optimizer steps are no place to look from: a step that is skipped does not reach
them, and they are not told of the scaler. Everything that torch's class does with gradients goes through one method of
it, which its subclasses call too, and which is wrapped here to look at the parameters' owner first. It is not a public
name; where a torch version lacks it, torch's scaler is not caught.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import torch

from mpizero.errors import ShardError
from mpizero.shard.optimizers import runtimes_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["catch_torch_scaling"]


@cache
def catch_torch_scaling() -> None:
    """Make torch's loss scaler refuse optimizers of shards; does nothing the second time."""
    cls = torch.amp.GradScaler
    if hasattr(cls, "_unscale_grads_"):
        cls._unscale_grads_ = _refusing(cls._unscale_grads_)  # type: ignore[method-assign]


def _refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def checked(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        runtimes = runtimes_of(optimizer)
        if not getattr(scaler, "agrees_over_ranks", False) and any(runtime.lifetime.cut for runtime in runtimes):
            raise ShardError(
                f"losses of a sharded model must be scaled by mpizero.GradScaler() (got {type(scaler).__module__}."
                f"{type(scaler).__name__}): torch's would let a rank step while another skips"
            )
        if any(runtime.spill is not None and runtime.spill.transfers is not None for runtime in runtimes):
            # The gradients are on the host, where torch would copy the scale without waiting for it.
            args = tuple(value.cpu() if isinstance(value, torch.Tensor) else value for value in args)
        return method(scaler, optimizer, *args, **kwargs)

    return checked
