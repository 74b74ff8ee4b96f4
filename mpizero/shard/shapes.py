"""The shapes of a torch model, unit by unit, as `plan` takes them: nothing is allocated, moved or changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from mpizero.errors import ArgumentError, ArgumentTypeError, must_be
from mpizero.plan import ModelShape, UnitShape
from mpizero.shard.build import UnitRule, plan_units
from mpizero.shard.policy import Precision

if TYPE_CHECKING:
    from mpizero.shard.member import Member

__all__ = ["precision_of", "shape_of"]

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def shape_of(
    model: nn.Module, *, units: UnitRule = None, precision: Precision | None = None, name: str = ""
) -> ModelShape:
    """Return the shapes of a model's units, those that `mpizero.shard` would make with the same arguments.

    Args:
        model: a module that is not sharded; on the meta device it takes no memory.
        units: as for `mpizero.shard`.
        precision: says which modules keep their precision; as for `mpizero.shard`.
        name: what tables call the model; "" takes its class.

    Returns:
        The units in the order of the model, the root last. Operations per token are two per element of each matrix, a
        lookup in an embedding being none; what attention adds is not in them.

    Raises:
        ArgumentError: for a model without parameters, or units that match nothing.
        ArgumentTypeError: for what is no module.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(must_be("model", "a torch.nn.Module", type(model).__name__))
    plan = plan_units(model, units, precision or Precision())
    if not any(groups for _, groups in plan.values()):
        raise ArgumentError(must_be("model", "one with parameters", type(model).__name__))
    shapes = {unit: _unit(unit, [one for group in groups for one in group]) for unit, (_, groups) in plan.items()}
    root = shapes.pop("")
    return ModelShape(name=name or type(model).__name__, units=(*shapes.values(), root))


def precision_of(model: nn.Module) -> str:
    """Return the precision in which a model was built, by its name in `mpizero.plan.DTYPES`.

    Raises:
        ArgumentError: for parameters in more than one, or in another; lists them.
    """
    found = {param.dtype for param in model.parameters()}
    if len(found) != 1 or not found <= set(_NAMES):
        rule = f"all in one of {', '.join(map(str, _NAMES))}"
        raise ArgumentError(must_be("parameters of a planned model", rule, sorted(map(str, found))))
    return _NAMES[found.pop()]


def _unit(name: str, members: list[Member]) -> UnitShape:
    return UnitShape(
        name=name,
        parameters=tuple((member.names[0], tuple(member.original.shape)) for member in members),
        flops=2.0 * sum(member.original.numel() for member in members if _multiplies(member)),
        kept=frozenset(member.names[0] for member in members if member.keeps),
        frozen=frozenset(member.names[0] for member in members if not member.original.requires_grad),
    )


def _multiplies(member: Member) -> bool:
    """Return whether a parameter is a matrix that some module multiplies with."""
    looked_up = all(isinstance(module, nn.Embedding) for module, _ in member.places)
    return member.original.dim() > 1 and not looked_up
