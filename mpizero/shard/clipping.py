"""Catch torch's own gradient clipping, which would take the norm of this rank's shards for the global one (case S23).

[Note: torch's own clipping] `torch.nn.utils.clip_grad_norm_` is a plain function that users import by name, and sees
nothing but tensors. Every way to it goes through one helper of its module, which is wrapped here to look at the
gradients' owner first. The helper is not a public name; where a torch version lacks it, the public function is wrapped.
`torch.nn.utils.clip_grad_value_` looks at one element at a time, and is right on shards.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import torch

from mpizero.errors import ShardError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MARK", "catch_torch_clipping"]

MARK = "_mpizero_shard_gradient"
"""The attribute that marks the gradient of a cut parameter."""


@cache
def catch_torch_clipping() -> None:
    """Make torch's clipping by norm refuse gradients of shards; does nothing the second time."""
    module = torch.nn.utils.clip_grad
    for name in ("_get_total_norm", "get_total_norm"):
        if hasattr(module, name):
            setattr(module, name, _refusing(getattr(module, name)))
            return
    module.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_ = _refusing(module.clip_grad_norm_)


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def checked(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if any(hasattr(tensor, MARK) or hasattr(tensor.grad if tensor.is_leaf else None, MARK) for tensor in tensors):
            raise ShardError(
                "gradients of a sharded model must be clipped by mpizero.clip_grad_norm_(model, max_norm) (got "
                "torch.nn.utils.clip_grad_norm_): torch's would take the norm of this rank's shards alone"
            )
        return function(tensors, *args, **kwargs)

    return checked
