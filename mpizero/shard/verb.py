"""The verb `shard`, and what goes with it."""

from __future__ import annotations

import os
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from mpizero.collectives import broadcast
from mpizero.collectives.call import default_communicator
from mpizero.errors import ArgumentError, ArgumentTypeError, must_be
from mpizero.settings import settings
from mpizero.shard.agree import check_same
from mpizero.shard.build import Plan, UnitRule, describe, make_units, plan_units, window_sizes
from mpizero.shard.casting import cast_buffers, keep_modules
from mpizero.shard.clipping import catch_torch_clipping
from mpizero.shard.exact import Course, check_exact, check_exact_ranks
from mpizero.shard.home import Home, home_of
from mpizero.shard.meta import MetaModel
from mpizero.shard.offload import Offload, check_spill, checked_offload, make_spill
from mpizero.shard.optimizers import install_step_hooks
from mpizero.shard.policy import Overlap, Precision, Ranks, lifetime_of, parse_stage, ranks_of
from mpizero.shard.runtime import Runtime, runtime_of
from mpizero.shard.scaling import catch_torch_scaling
from mpizero.shard.window import Window, make_window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mpizero.comm import Stats

__all__ = ["full_parameters", "no_sync", "shard", "stats", "unsharded"]

Model = TypeVar("Model", bound=nn.Module)


def shard(  # noqa: PLR0913  (each is a word that users of the peers know)
    model: Model,
    comm: Any = None,
    *,
    stage: int | str = 3,
    units: UnitRule = None,
    precision: Precision | None = None,
    group: Any = None,
    ignored_params: Iterable[nn.Parameter] = (),
    reshard_after_forward: bool | None = None,
    prefetch: int = 1,
    bucket_bytes: int = 1 << 20,
    node_shared: bool | None = None,
    exact: bool = False,
    materialize: Callable[[nn.Module], Any] | None = None,
    offload: Offload | None = None,
) -> Model:
    """Shard a model over ranks by ZeRO stage, in place, and return it.

    The model keeps its class, its parameter names and its way of being called. All ranks start from rank 0's weights
    and buffers. Build the optimizer afterwards, from `model.parameters()`: at stages 1 to 3 these are shards, each a
    `Parameter` of shape (k, 1, ...) with its parameter's number of dimensions. Gradients are averaged over ranks by
    every backward outside `no_sync`. All stages give the same bits.

    Args:
        model: a module whose parameters are in host memory or all on one CUDA device, or, all or some of them, on the
            meta device. The latter get their values one unit at a time, from `materialize`: no rank holds more than its
            shards and a unit. They go where the model's other parameters are; a model that has none yet, where a buffer
            is on a CUDA device, or else to torch's default device (`torch.set_default_device("cuda")`).
        comm: the ranks to train on; None means `mpizero.world()`. Models talk over a
            duplicate of it.
        stage: 0 replicates everything (plain data parallelism), 1 shards the optimizer's state, 2 gradients as well,
            3 parameters as well. Per parameter and rank, with Adam in fp32: 16, 4+12/p, 4+12/p and 16/p bytes between
            steps; a step sends 2, 2, 2 and 3 times (p-1)/p of the parameters' bytes. Or a strategy by its name:
            NO_SHARD is stage 0, SHARD_GRAD_OP 2, FULL_SHARD 3, HYBRID_SHARD stage 3 within each node.
        units: the modules that are gathered and reduced at a time: a set of module classes, a predicate on modules, or
            None to choose by size. Stage 3 needs room for two gathered units; smaller units mean more messages.
        precision: compute in another precision than fp32, with fp32 master values; see `Precision`.
        group: for hybrid sharding, the communicator of this rank's group, over which parameters are cut; groups are
            replicas of each other. None means all ranks, or the node under HYBRID_SHARD. With g ranks in a group, p/g
            groups and S bytes of parameters: what a stage costs in memory and messages it costs over g ranks, and each
            rank sends 2 (1-g/p) S/g more, fp32, to sum gradients over the groups.
        ignored_params: parameters to leave whole on every rank: they start from rank 0's values, and are neither
            sharded nor reduced; their gradients are the caller's to average.
        reshard_after_forward: at stage 3, whether a unit lets its full parameters go between forward and backward.
            True costs a second gather, False the memory of all units; None keeps the root's only.
        prefetch: at stage 3, how many units are gathered ahead of need, in the order that the first step had. Each
            costs the memory of a gathered unit; 0 waits for every gather.
        bucket_bytes: gradients of smaller units wait for each other until there are so many bytes, and are then reduced
            in one collective; the first unit of a backward goes alone. Changes no bits.
        node_shared: whether the ranks of a node hold one copy of the full parameters together, at stages 1 to 3, which
            saves its gathers and (p-1)/p of its memory; possible in host memory alone, where all ranks of a group are
            on one node and /dev/shm has room. None shares where it is possible, True raises where it is not.
        exact: whether the same bits are wanted on 1, 2, 4, 8, ... ranks for the same batches cut into the same M
            micro-batches, which `micro_batches` hands out (and without which backward raises). Gradients are sent in
            the master values' precision, 4 bytes per element in place of bf16's 2, and their partial sums are held, see
            `micro_batches`; clipping makes an exact sum of squares. Torch runs on one thread, unless OMP_NUM_THREADS
            says otherwise: it must be the same wherever the same bits are wanted. On a GPU the computation has to give
            equal bits by itself: `torch.use_deterministic_algorithms(True)`, with CUBLAS_WORKSPACE_CONFIG=:4096:8 in
            the environment, and GPUs of one kind. Refuses modules that keep running
            statistics of their batches, trained `ignored_params`, and other numbers of ranks; False does none of this.
        materialize: called with each module that has parameters or buffers of its own on the meta device, once they
            have memory, to initialise these and not those of modules inside; None calls `module.reset_parameters()`.
            Tensors that have values keep them. It runs on rank 0, twice for each module: first in the model's order,
            which leads to the random numbers of a real build where modules were made in that order and do nothing
            else in their constructors; a parameter that modules share gets the values of the first. A model that goes
            to a GPU is initialised there.
        offload: what lives on a disk or, of a model on a GPU, on the host; see `Offload`. Changes no bits.

    Raises:
        ArgumentError: for an unknown stage, units that match nothing, a model that is sharded already or lies on
            several devices, models or options that differ between ranks, or what is on the meta device and never
            initialised; lists it.
        ArgumentTypeError: for a model, or parameters, that cannot be sharded; names them. For a GPU without CuPy.
        DiskError: on all ranks, if the disk of some rank cannot be used or has no room.

    Collective. Source: Rajbhandari et al., "ZeRO", 2020 (stages); Zhao et al., "PyTorch FSDP", 2023 (units, prefetch,
    hybrid sharding).
    """
    precision = _checked(model, precision)
    number, hybrid = parse_stage(stage)
    overlap = Overlap(prefetch=prefetch, bucket_bytes=bucket_bytes, reshard_after_forward=reshard_after_forward)
    ignored = _ignored(model, ignored_params)
    grouped = plan_units(model, units, precision, {id(param) for _, param in ignored})
    comm = default_communicator(comm).private
    others = [*model.buffers(), *(param for _, param in ignored)]
    home = home_of(_members(grouped), others, alone=comm.size == 1)
    offload = checked_offload(offload, number, node_shared=node_shared)
    _set_threads(comm, exact=exact)
    install_step_hooks()
    course = Course(model, torch.get_num_threads()) if exact else None
    if comm.size > 1:
        choices = [
            f"model {'on a GPU' if home.on_device else 'in host memory'}",
            f"stage {stage}",
            str(precision),
            str(overlap),
            f"node_shared {node_shared}",
            f"exact {exact}",
            f"offload {None if offload is None else offload.kinds}",
        ]
        choices += [f"{course.threads} threads of torch", *course.lines] if course is not None else []
        check_same(comm, describe(grouped, model, choices))
    if course is not None:
        check_exact(model, precision, ignored)
    meta = MetaModel(model, materialize, home.device)
    meta.prepare(comm, [param for _, param in ignored])
    if comm.size > 1:
        _broadcast([*model.buffers(), *(param.data for _, param in ignored)], comm)
    ranks, number = ranks_of(comm, number, group, hybrid=hybrid)
    if course is not None:
        check_exact_ranks(ranks)
    _let_caller_drive(ranks, home)
    window = None
    spill = make_spill(offload, comm, home.device)
    on_disk = spill is not None and spill.params is not None
    if lifetime_of(number, ranks.group.size).cut and node_shared is not False and not on_disk:
        window = _window(ranks.group, window_sizes(grouped, ranks.group.size, precision), home, wanted=node_shared)
    moved = on_disk or (spill is not None and spill.transfers is not None and spill.offload.params is not None)
    lifetime = lifetime_of(number, ranks.group.size, shared=window is not None, exact=course, moved=moved)
    if lifetime.cut:
        catch_torch_clipping()
    catch_torch_scaling()
    cast_buffers(model, precision)
    keep_modules(model, precision)
    made = make_units(grouped, ranks, lifetime, precision, home=home, window=window, meta=meta, spill=spill)
    check_spill(spill, comm)
    runtime = Runtime(model, made, ranks, (lifetime, precision, overlap), home=home, window=window, spill=spill)
    runtime.ignored = ignored
    for flat in runtime.flats:
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
    for flat in runtime.flats:
        whole = flat.gather_master()
        for slot, member in zip(flat.layout.slots, flat.members, strict=True):
            value = whole[slot.offset : slot.stop].view(slot.shape).clone()
            found.update(dict.fromkeys(member.names, value))
    named = model.named_parameters(remove_duplicate=False)
    return {name: found[name] if name in found else param.detach().clone() for name, param in named}  # or ignored


def stats(model: nn.Module) -> Stats:
    """Return the counters of what a sharded model has sent, received and waited for so far.

    Args:
        model: a sharded model. Models that were sharded over the same communicator share their counters.

    Returns:
        Call it before and after, and take `after.since(before)` of a `copy()` made before: without hybrid sharding the
        counters themselves are returned, and go on counting.
    """
    ranks = runtime_of(model).ranks
    found: Stats = ranks.everyone.stats
    if ranks.replicas is not None:
        found = found.plus(ranks.group.stats).plus(ranks.replicas.stats)
    return found


def _checked(model: Any, precision: Any) -> Precision:
    """Return the precision, the default one for None; raise ArgumentTypeError if either argument is something else."""
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(must_be("model", "a torch.nn.Module", type(model).__name__))
    precision = Precision() if precision is None else precision
    if not isinstance(precision, Precision):
        remedy = "write mpizero.Precision(param=torch.bfloat16)"
        raise ArgumentTypeError(must_be("precision", "an mpizero.Precision", precision, remedy))
    return precision


def _members(plan: Plan) -> list[tuple[str, Tensor]]:
    """Return the parameters that will be sharded, by name."""
    return [(member.names[0], member.original) for _, groups in plan.values() for group in groups for member in group]


def _let_caller_drive(ranks: Ranks, home: Home) -> None:
    """Have collectives that are loads and stores move between two computations, not beside them.

    On a GPU the progress thread drives them: it only starts the device's work and waits for it, and the caller, who
    computes on the device too, has time to spare.
    """
    for one in {id(one): one for one in (ranks.group, ranks.everyone, ranks.replicas)}.values():
        if hasattr(one, "let_caller_drive"):
            one.let_caller_drive(on=one.board is not None and not home.on_device)


def _ignored(model: nn.Module, params: Iterable[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    """Return the ignored parameters with their names; raise ArgumentError for one that is not the model's."""
    wanted = {id(param) for param in params}
    found = [(name, param) for name, param in model.named_parameters() if id(param) in wanted]
    if len(found) < len(wanted):
        got = f"{len(wanted) - len(found)} others"
        raise ArgumentError(must_be("ignored_params", "parameters of the model", got, "take them from the model"))
    return found


def _window(group: Any, sizes: list[int], home: Home, *, wanted: Any) -> Window | None:
    """Return the node's shared memory, None where there is none; raise ArgumentError if it is wanted nevertheless."""
    window = None if home.on_device else make_window(group, sizes)
    if window is None and wanted:
        rule = "False or None where ranks of a group are on several nodes, or cannot share memory"
        if home.on_device:
            rule = "False or None for a model on a GPU: only host memory is shared by ranks"
        raise ArgumentError(must_be("node_shared", rule, wanted))
    return window


def _broadcast(tensors: list[Tensor], comm: Any) -> None:
    """Give all ranks rank 0's tensors; one whose elements share memory, as after `expand`, gets memory of its own."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            tensor.data = tensor.data.contiguous()
        broadcast(tensor, comm)


def _set_threads(comm: Any, *, exact: bool) -> None:
    """Give each rank its part of the host's cores, or one if exact, unless the user has set torch's threads."""
    cores = len(os.sched_getaffinity(0))
    untouched = settings().threads is None and torch.get_num_threads() >= min(cores, 2)
    on_host = comm.node.size if hasattr(comm, "node") else comm.size
    if untouched and (exact or on_host > 1):
        torch.set_num_threads(1 if exact else max(1, cores // on_host))
