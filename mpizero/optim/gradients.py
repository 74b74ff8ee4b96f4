"""Which gradients a rank holds of a sharded model, read from the runtime as they are now.

[Note: counted once] Each rank measures its own shard, at stage 0 the elements that would be its shard, so that the
parts together are the model. Of several groups that hold the same shards the first counts, of ignored parameters, which
every rank holds whole, rank 0's copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["all_gradients", "ignored_gradients", "place", "shard_gradients"]


def shard_gradients(runtime: Any) -> list[Tensor]:
    """Return the elements of gradients that are, or at stage 0 would be, in this rank's shards, in the units' order."""
    return [piece for flat in runtime.flats for piece in _pieces(flat)]


def ignored_gradients(runtime: Any) -> list[Tensor]:
    """Return the gradients of parameters that are neither sharded nor reduced."""
    return [_values(param) for _, param in runtime.ignored if param.grad is not None]


def all_gradients(runtime: Any) -> list[Tensor]:
    """Return every gradient that this rank holds, for changes in place."""
    shards = [param for flat in runtime.flats for param in flat.shards if param.grad is not None]
    return [*map(_values, shards), *ignored_gradients(runtime)]


def place(runtime: Any) -> tuple[int, int]:
    """Return (group, rank within it): which of the groups that hold the whole model this rank is in, and where."""
    return 0 if runtime.replicas is None else runtime.replicas.rank, runtime.ranks.group.rank


def _pieces(flat: Any) -> list[Tensor]:
    found = []
    for index, param in enumerate(flat.shards):
        if param.grad is None:
            continue
        whole = param.grad.detach().reshape(-1)
        piece = flat.layout.piece(index, flat.comm.rank)
        found.append(whole if flat.lifetime.cut else whole[piece.start : piece.stop])
    return found


def _values(param: nn.Parameter) -> Tensor:
    """Return the gradient, or the values of a sparse one, each element's once."""
    grad = param.grad
    assert grad is not None  # noqa: S101  (asked for parameters that have one)
    if grad.is_sparse:
        grad = param.grad = grad.coalesce()
        return grad._values()  # noqa: SLF001  (values() of torch is a view that autograd guards)
    return grad.detach()
