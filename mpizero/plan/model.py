"""What a model is to the arithmetic: the shapes of its parameters, unit by unit, and the work of a token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from mpizero.errors import ArgumentError, must_be

__all__ = ["ModelShape", "UnitShape", "equal_units", "transformer"]


@dataclass(frozen=True, kw_only=True)
class UnitShape:
    """Describe one unit of sharding: a layer, or what no layer has."""

    name: str
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """(name, shape) of each, in the order in which `layout_of` lays them out."""
    flops: float
    """Floating-point operations of the forward pass for one token, a multiplication and an addition being two; the
    backward pass has twice as many."""
    kept: frozenset[str] = frozenset()
    """Names of the parameters that stay in the model's own precision; see `mpizero.Precision.keep_fp32`."""
    frozen: frozenset[str] = frozenset()
    """Names of the parameters that are not trained."""

    @property
    def numel(self) -> int:
        """Return the number of its elements."""
        return sum(math.prod(shape) for _, shape in self.parameters)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Describe a model by its units."""

    name: str
    units: tuple[UnitShape, ...]
    """In the order of the forward pass; the root unit, of what lies outside all layers, comes last."""

    @property
    def numel(self) -> int:
        """Return the number of its parameters' elements."""
        return sum(unit.numel for unit in self.units)


def transformer(layers: int, width: int, *, vocabulary: int = 0, context: int = 0, gated: int = 0) -> ModelShape:
    """Return a decoder-only transformer: per layer 12 width^2 weights, or 4 width^2 + 3 width x gated.

    Args:
        layers: blocks of attention and MLP, each a unit.
        width: of the residual stream.
        vocabulary: rows of the embedding, which the output layer shares; 0 for neither.
        context: positions that have an embedding, and over which attention is counted in `flops`; 0 for none.
        gated: the width of a gated MLP (as LLaMA's 11008); 0 for one of two matrices and 4 x width.

    Raises:
        ArgumentError: for a number that is out of range.
    """
    for what, value, least in (
        ("layers", layers, 1),
        ("width", width, 1),
        ("vocabulary", vocabulary, 0),
        ("context", context, 0),
        ("gated", gated, 0),
    ):
        if value < least:
            raise ArgumentError(must_be(what, f"at least {least}", value))
    wide = gated or 4 * width
    gate = [("gate", (gated, width))] if gated else []
    mlp = (*gate, ("up", (wide, width)), ("down", (width, wide)))
    block: tuple[tuple[str, tuple[int, ...]], ...]
    block = (("qkv", (3 * width, width)), ("out", (width, width)), *mlp, ("norm1", (width,)), ("norm2", (width,)))
    matrices = sum(math.prod(shape) for _, shape in block if len(shape) > 1)
    flops = 2.0 * matrices + 4.0 * context * width
    blocks = tuple(UnitShape(name=f"blocks.{i}", parameters=block, flops=flops) for i in range(layers))
    outer: list[tuple[str, tuple[int, ...]]] = [
        ("embedding", (vocabulary, width)),
        ("positions", (context, width)),
        ("norm", (width,)),
    ]
    root = UnitShape(name="", parameters=tuple(pair for pair in outer if pair[1][0]), flops=2.0 * vocabulary * width)
    return ModelShape(name=f"transformer of {layers} layers, width {width}", units=(*blocks, root))


def equal_units(numel: int, units: int) -> ModelShape:
    """Return a model of which only the number of parameters is known, cut into equal units; the root has none.

    Args:
        numel: parameters; each takes part in one multiplication and addition per token.
        units: into how many units.

    Raises:
        ArgumentError: for a number below 1, or more units than parameters.
    """
    for what, value in (("parameters", numel), ("units", units)):
        if value < 1:
            raise ArgumentError(must_be(what, "at least 1", value))
    if units > numel:
        raise ArgumentError(must_be("units", f"at most the number of parameters, {numel}", units))
    cuts = [numel * unit // units for unit in range(units + 1)]
    sizes = [stop - start for start, stop in pairwise(cuts)]
    made = [
        UnitShape(name=f"units.{unit}", parameters=(("weight", (size,)),), flops=2.0 * size)
        for unit, size in enumerate(sizes)
    ]
    root = UnitShape(name="", parameters=(), flops=0.0)
    return ModelShape(name=f"{units} equal units", units=(*made, root))
