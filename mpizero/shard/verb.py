"""The verb `shard`, and what goes with it."""

from __future__ import annotations

import os
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from mpizero.collectives import broadcast
from mpizero.comm import Stats, world
from mpizero.errors import ArgumentTypeError, must_be
from mpizero.plan import check_stage
from mpizero.settings import settings
from mpizero.shard.agree import check_same
from mpizero.shard.build import UnitRule, describe, make_units, plan_units
from mpizero.shard.clipping import catch_torch_clipping
from mpizero.shard.optimizers import install_step_hooks
from mpizero.shard.policy import Precision, lifetime_of
from mpizero.shard.runtime import Runtime, runtime_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["full_parameters", "no_sync", "shard", "stats", "unsharded"]

Model = TypeVar("Model", bound=nn.Module)


def shard(
    model: Model, comm: Any = None, *, stage: int = 3, units: UnitRule = None, precision: Precision | None = None
) -> Model:
    """Shard a model over ranks by ZeRO stage, in place, and return it.

    The model keeps its class, its parameter names and its way of being called. All ranks start from rank 0's weights
    and buffers. Build the optimizer afterwards, from `model.parameters()`: at stages 1 to 3 these are shards, each a
    `Parameter` of shape (k, 1, ...) with its parameter's number of dimensions. Gradients are averaged over ranks by
    every backward outside `no_sync`. All stages give the same bits.

    Args:
        model: a module whose parameters are in host memory.
        comm: the ranks to shard over; None means `mpizero.world()`. Models talk over a
            duplicate of it.
        stage: 0 replicates everything (plain data parallelism), 1 shards the optimizer's state, 2 gradients as well,
            3 parameters as well. Per parameter and rank, with Adam in fp32: 16, 4+12/p, 4+12/p and 16/p bytes between
            steps; a step sends 2, 2, 2 and 3 times (p-1)/p of the parameters' bytes.
        units: the modules that are gathered and reduced at a time: a set of module classes, a predicate on modules, or
            None to choose by size. Stage 3 needs room for two gathered units; smaller units mean more messages.
        precision: compute in another precision than fp32, with fp32 master values; see `Precision`.

    Raises:
        ArgumentError: for an unknown stage, units that match nothing, a model that is sharded already, or models or
            options that differ between ranks.
        ArgumentTypeError: for a model, or parameters, that cannot be sharded; names them.

    Collective. Source: Rajbhandari et al., "ZeRO", 2020 (stages); Zhao et al., "PyTorch FSDP", 2023 (units).
    """
    precision = _checked(model, precision)
    check_stage(stage)
    grouped = plan_units(model, units)
    comm = world() if comm is None else comm
    lifetime = lifetime_of(stage, comm.size)
    comm = comm.private
    _set_threads(comm)
    install_step_hooks()
    if lifetime.cut:
        catch_torch_clipping()
    if comm.size > 1:
        check_same(comm, describe(grouped, model, stage, precision))
        _broadcast_buffers(model, comm)
    made = make_units(grouped, comm, lifetime, precision)
    runtime = Runtime(model, made, comm, lifetime, precision)
    for unit in made:
        for flat in unit.flats:
            for param in flat.shards:
                param._mpizero_owner = runtime  # type: ignore[attr-defined]  # noqa: SLF001
    if lifetime.release_parameters and len(made) == 1 and comm.rank == 0:
        warnings.warn(
            f"stage 3 with one unit ({made[0].name}) gathers all parameters at once and saves no memory at the peak: "
            "pass units={...} with the classes of the model's blocks",
            stacklevel=3,  # past the callable package, to the user's line
        )
    return model


@contextmanager
def unsharded(model: nn.Module) -> Iterator[nn.Module]:
    """Hold the full parameters in the model for the length of a `with` block, for reading.

    Inside, the model can be evaluated by some ranks only, its methods called, `state_dict()` taken; parameters have
    compute precision and must not be changed. Needs memory for all parameters. Collective on entry.

    Args:
        model: a sharded model.

    Raises:
        ShardError: if it was not sharded, if ranks do not enter together, or if values were changed inside.
    """
    with runtime_of(model).unsharded():
        yield model


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Keep the gradients of backwards inside the `with` block on their rank, to be reduced with the next one outside.

    Legal at every stage. The price: one fp32 gradient of the full model per rank (4 bytes per parameter) until then,
    and the reduction that ends it sends fp32. At stage 3 parameters are gathered as usual.

    Args:
        model: a sharded model.
    """
    runtime = runtime_of(model)
    before, runtime.sync = runtime.sync, False
    try:
        yield
    finally:
        runtime.sync = before


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters, whole and in master precision, by name, on every rank.

    Args:
        model: a sharded model.

    Returns:
        Tensors of the parameters' own shapes, in the model's order; one that several modules share has all its names.

    Collective. Needs 4 bytes per parameter.
    """
    runtime = runtime_of(model)
    runtime.check_together("full_parameters")
    found: dict[str, Tensor] = {}
    for unit in runtime.units:
        for flat in unit.flats:
            whole = flat.gather_master()
            for slot, member in zip(flat.layout.slots, flat.members, strict=True):
                value = whole[slot.offset : slot.stop].view(slot.shape).clone()
                found.update(dict.fromkeys(member.names, value))
    order = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return {name: found[name] for name in order}


def stats(model: nn.Module) -> Stats:
    """Return the counters of what a sharded model has sent, received and waited for; take differences of copies.

    Args:
        model: a sharded model. Models that were sharded over the same communicator share their counters.
    """
    return runtime_of(model).comm.stats


def _checked(model: Any, precision: Any) -> Precision:
    """Return the precision, the default one for None; raise ArgumentTypeError if either argument is something else."""
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(must_be("model", "a torch.nn.Module", type(model).__name__))
    precision = Precision() if precision is None else precision
    if not isinstance(precision, Precision):
        remedy = "write mpizero.Precision(param=torch.bfloat16)"
        raise ArgumentTypeError(must_be("precision", "an mpizero.Precision", precision, remedy))
    return precision


def _broadcast_buffers(model: nn.Module, comm: Any) -> None:
    """Give all ranks rank 0's buffers; one whose elements share memory, as after `expand`, gets memory of its own."""
    for buffer in model.buffers():
        if not buffer.is_contiguous():
            buffer.data = buffer.data.contiguous()
        broadcast(buffer, comm)


def _set_threads(comm: Any) -> None:
    """Give each rank its part of the host's cores, unless the user has set the number of torch's threads."""
    cores = len(os.sched_getaffinity(0))
    untouched = settings().threads is None and torch.get_num_threads() >= min(cores, 2)
    on_host = comm.node.size if hasattr(comm, "node") else comm.size
    if untouched and on_host > 1:
        torch.set_num_threads(max(1, cores // on_host))
