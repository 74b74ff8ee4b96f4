"""torch's reductions in the words of the verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PLAIN", "Reduction", "reduction"]

_KINDS: Any = ReduceOp.RedOpType

PLAIN = {
    hash(_KINDS.SUM): "sum",
    hash(_KINDS.AVG): "mean",
    hash(_KINDS.PRODUCT): "prod",
    hash(_KINDS.MIN): "min",
    hash(_KINDS.MAX): "max",
}
"""Those that the verbs do themselves, by the hash of a `ReduceOp`, which is its number: to compare two takes longer."""
_FOLDS: dict[Any, Callable[..., torch.Tensor]] = {
    _KINDS.BAND: torch.bitwise_and,
    _KINDS.BOR: torch.bitwise_or,
    _KINDS.BXOR: torch.bitwise_xor,
}


class Reduction(NamedTuple):
    """Say how a reduction is made."""

    verb: str
    """What the verbs call it; unused with a `fold`."""
    factor: Any = None
    """A number or a tensor with which every operand is multiplied first, in its own dtype (PREMUL_SUM)."""
    fold: Callable[..., torch.Tensor] | None = None
    """A function of two tensors, where the ranks' operands are moved and then combined."""


def reduction(opts: Any) -> Reduction:
    """Return the reduction that options, or a `ReduceOp` itself, ask for; None asks for a sum."""
    op = getattr(opts, "reduceOp", opts)
    if op is None:
        return Reduction("sum")
    kind = getattr(op, "op", op)
    if hash(kind) in PLAIN:
        return Reduction(PLAIN[hash(kind)])
    if kind in _FOLDS:
        return Reduction("", fold=_FOLDS[kind])
    return Reduction("sum", factor=op.__getstate__()[1])
