"""The precisions of what is not a parameter: buffers, results, and modules that keep the model's own dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpizero.shard.trees import cast_floating

if TYPE_CHECKING:
    from torch import nn

    from mpizero.shard.policy import Precision

__all__ = ["cast_buffers", "keep_modules"]


def cast_buffers(model: nn.Module, precision: Precision) -> None:
    """Cast floating buffers to `Precision.buffers`."""
    if precision.buffers is not None:
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(precision.buffers)


def keep_modules(model: nn.Module, precision: Precision) -> None:
    """Let the modules that keep their parameters' dtype take inputs in it, and give results in `Precision.param`."""
    if precision.param is None:
        return
    for module in model.modules():
        own = next((param for param in module.parameters(recurse=False) if param.is_floating_point()), None)
        if own is not None and precision.keeps(module):
            _keep(module, own.dtype, precision.param)


def _keep(module: nn.Module, inside: Any, outside: Any) -> None:
    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_floating((args, kwargs), inside)

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        return cast_floating(output, outside)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave)
