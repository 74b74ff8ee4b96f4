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
    return [piece for flat in _flats(runtime) for piece in _pieces(flat)]


def ignored_gradients(runtime: Any) -> list[Tensor]:
    """Return the gradients of parameters that are neither sharded nor reduced."""
    return [_values(param) for param in _ignored(runtime) if param.grad is not None]


def all_gradients(runtime: Any) -> list[Tensor]:
    """Return every gradient that this rank holds, for changes in place."""
    params = [param for flat in _flats(runtime) for param in flat.shards] + _ignored(runtime)
    return [_values(param) for param in params if param.grad is not None]


def place(runtime: Any) -> tuple[int, int]:
    """Return (group, rank within it): which of the groups that hold the whole model this rank is in, and where."""
    replicas, flats = _replicas(runtime), _flats(runtime)
    comm = flats[0].comm if flats else runtime.comm
    return 0 if replicas is None else replicas.rank, comm.rank


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


def _flats(runtime: Any) -> list[Any]:
    return [flat for unit in runtime.units for flat in unit.flats]


# What a runtime has only where parameters are ignored or shards are replicated.


def _ignored(runtime: Any) -> list[nn.Parameter]:
    return [param for _, param in getattr(runtime, "ignored", ())]


def _replicas(runtime: Any) -> Any:
    """Return the communicator of the ranks that hold the same shards as this one, None if there are no others."""
    return getattr(runtime, "replicas", None)
