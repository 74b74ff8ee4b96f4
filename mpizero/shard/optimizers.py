"""Which optimizers may step on shards, and the hooks that look at every step.

An element-wise optimizer updates each element from that element's own history, so updating shards is updating the
whole. One that looks at whole matrices (Muon, Adafactor, Shampoo) or at all parameters at once (L-BFGS) would go wrong
on shards in silence, hence the list of those that are known to be safe.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mpizero.errors import ShardError
from mpizero.shard.access import ShardHandle

if TYPE_CHECKING:
    import torch

__all__ = ["elementwise", "install_step_hooks", "is_elementwise", "runtimes_of"]

ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")

OFFLOADED = "_mpizero_offloaded"
"""What optimizers have whose state is on a disk."""

OptimizerClass = TypeVar("OptimizerClass", bound=type)


def elementwise(cls: OptimizerClass) -> OptimizerClass:
    """Declare, as a decorator or by a call, that an optimizer class updates every element by itself.

    Args:
        cls: a subclass of `torch.optim.Optimizer` whose update of an element depends on no other element.

    Returns:
        The class. Declaring one that is not element-wise gives wrong numbers in silence.
    """
    cls._mpizero_elementwise = True  # type: ignore[attr-defined]
    return cls


@cache
def install_step_hooks() -> None:
    """Look at the steps of all optimizers from now on; does nothing the second time."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            _check_parameter(param)
    for runtime in runtimes_of(optimizer):
        if runtime.lifetime.cut and not is_elementwise(type(optimizer)):
            known = ", ".join(ELEMENTWISE)
            raise ShardError(
                f"the optimizer of a sharded model must be element-wise (got {type(optimizer).__name__}, which may "
                f"need whole matrices): use one of {known}, stage 0, or declare your own class with mpizero.elementwise"
            )
        if runtime.spill is not None and runtime.spill.optimizer is not None and not hasattr(optimizer, OFFLOADED):
            raise ShardError(
                "the optimizer of a model with Offload(optimizer=PATH) must be one of mpizero.offloaded (got "
                f"{type(optimizer).__name__}, which keeps its state in memory): write "
                f"mpizero.offloaded(torch.optim.{type(optimizer).__name__}, model, ...)"
            )
        if runtime.pinned:
            raise ShardError(
                "the optimizer must step outside mpizero.unsharded (got a step inside): leave the block first"
            )
        runtime.check_synced("a step")
        runtime.before_step()


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for runtime in runtimes_of(optimizer):
        runtime.after_step()


def runtimes_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the runtimes whose shards the optimizer holds."""
    owners = (getattr(param, "_mpizero_owner", None) for group in optimizer.param_groups for param in group["params"])
    return list({id(owner): owner for owner in owners if owner is not None}.values())


def _check_parameter(param: torch.Tensor) -> None:
    replaced = getattr(param, "_mpizero_replaced", None)
    if replaced is None and isinstance(param, ShardHandle):
        replaced = param._mpizero_name  # type: ignore[attr-defined]  # noqa: SLF001
    if replaced is not None:
        raise ShardError(
            f"the optimizer must be built after mpizero.shard, from model.parameters() (got parameter {replaced!r} as "
            "it was before, or as an attribute): its steps would not reach the model"
        )


def is_elementwise(cls: type) -> bool:
    """Return whether a class is known, or declared, to update every element by itself."""
    if getattr(cls, "_mpizero_elementwise", False):
        return True
    return any(base.__module__.startswith("torch.optim") and base.__name__ in ELEMENTWISE for base in cls.__mro__)
