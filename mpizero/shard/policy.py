"""What a user chooses: the stage as a set of lifetimes, and the precisions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mpizero.errors import ArgumentError, must_be
from mpizero.plan import check_stage

__all__ = ["Lifetime", "Precision", "lifetime_of"]

_WORKING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Choose the precisions of a sharded model.

    The optimizer always works on fp32 master values, and gradients always accumulate in fp32 across backwards.
    """

    param: torch.dtype | None = None
    """The dtype of the full parameters that forward and backward compute with; None keeps the model's own. Floating
    inputs of a unit are cast to it. Gathers move this many bytes per element."""
    reduce: torch.dtype | None = None
    """The dtype in which gradients are sent to be summed (the sum itself is fp32 and rounded once); None takes the
    gradients' own."""

    def __post_init__(self) -> None:
        """Check the dtypes."""
        for name in ("param", "reduce"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in _WORKING:
                known = ", ".join(str(known) for known in _WORKING)
                raise ArgumentError(must_be(f"Precision.{name}", f"None or one of {known}", dtype))


@dataclass(frozen=True, kw_only=True)
class Lifetime:
    """Say how long full parameters and full gradients live: all that a stage is."""

    stage: int
    cut: bool
    """Whether each rank holds, and its optimizer updates, only its shard of the master values."""
    release_parameters: bool
    """Whether full parameters live from a unit's gather to its release, or always."""
    reduce_at_end: bool
    """Whether full gradients live until the end of the backward, or until their unit's reduction."""

    @property
    def reduce_when_complete(self) -> bool:
        """Return whether a unit is reduced as soon as its gradients are there, since no gathers come in between."""
        return not self.reduce_at_end and not self.release_parameters


def lifetime_of(stage: int, ranks: int) -> Lifetime:
    """Return a stage's lifetimes; on one rank nothing is cut and nothing is released."""
    check_stage(stage)
    alone = ranks == 1
    return Lifetime(
        stage=stage,
        cut=stage >= 1 and not alone,
        release_parameters=stage == 3 and not alone,
        reduce_at_end=stage == 1,
    )
