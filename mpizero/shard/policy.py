"""What a user chooses: the stage as a set of lifetimes, the groups of ranks, and the precisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from mpizero.collectives import all_gather
from mpizero.errors import ArgumentError, ArgumentTypeError, must_be
from mpizero.plan import check_stage

__all__ = [
    "FULL_SHARD",
    "HALF",
    "HYBRID_SHARD",
    "NO_SHARD",
    "SHARD_GRAD_OP",
    "Lifetime",
    "Overlap",
    "Precision",
    "Ranks",
    "lifetime_of",
    "parse_stage",
    "ranks_of",
]

NO_SHARD, SHARD_GRAD_OP, FULL_SHARD, HYBRID_SHARD = "NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"
_STAGES = {NO_SHARD: 0, SHARD_GRAD_OP: 2, FULL_SHARD: 3, HYBRID_SHARD: 3}
REPLICAS = "replicas"
HALF = (torch.bfloat16, torch.float16)
_WORKING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

ModuleRule = Iterable[type[nn.Module]] | Callable[[nn.Module], bool] | None


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
    output: torch.dtype | None = None
    """The dtype to which floating results of the model are cast; None leaves them as they are. Costs no messages."""
    buffers: torch.dtype | None = None
    """The dtype to which floating buffers are cast by `shard`; None leaves them as they are."""
    keep_fp32: ModuleRule = None
    """Modules, as classes or a predicate, whose own parameters stay in the model's dtype, as norms may have to: their
    floating inputs are cast to it and their results back to `param`. They are gathered and reduced apart from the
    others of their unit, in 4 bytes per element: one more message per rank and collective."""

    def __post_init__(self) -> None:
        """Check the dtypes, and the rule, which may be an iterator."""
        for name in ("param", "reduce", "output", "buffers"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in _WORKING:
                known = ", ".join(str(known) for known in _WORKING)
                raise ArgumentError(must_be(f"Precision.{name}", f"None or one of {known}", dtype))
        rule = self.keep_fp32
        if isinstance(rule, type | Iterable):
            classes: tuple[Any, ...] = (rule,) if isinstance(rule, type) else tuple(rule)
            if all(isinstance(item, type) and issubclass(item, nn.Module) for item in classes):
                object.__setattr__(self, "keep_fp32", classes)
                return
        elif rule is None or callable(rule):
            return
        raise ArgumentTypeError(must_be("Precision.keep_fp32", "module classes, a predicate or None", rule))

    def keeps(self, module: nn.Module) -> bool:
        """Return whether a module's own parameters keep the model's dtype."""
        rule = self.keep_fp32
        if rule is None or self.param is None:
            return False
        return bool(rule(module)) if callable(rule) else isinstance(module, tuple(rule))

    def __str__(self) -> str:
        """Name the dtypes; a rule is code, and has no text that all ranks share."""
        words = [f"{name}={getattr(self, name)}" for name in ("param", "reduce", "output", "buffers")]
        return f"Precision({', '.join(words)}, keep_fp32={'a rule' if self.keep_fp32 is not None else None})"


@dataclass(frozen=True, kw_only=True)
class Lifetime:
    """Say how long full parameters and full gradients live: all that a stage is."""

    stage: int
    cut: bool
    """Whether each rank holds, and its optimizer updates, only its shard of the master values."""
    release_parameters: bool
    """Whether full parameters live from a unit's gather to its release, or always."""
    shared: bool = False
    """Whether the ranks of the node hold one copy of the full parameters together, which then lives always."""
    exact: Any = None
    """Where the sum over micro-batches stands, if its order does not depend on the number of ranks; see `exact`."""


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Say how communication and computation overlap."""

    prefetch: int = 1
    """Units whose gather is begun before they are needed, at stage 3; each costs the memory of a gathered unit."""
    bucket_bytes: int = 1 << 20
    """Bytes of gradients that are reduced at once, at least: smaller units wait for each other."""
    reshard_after_forward: bool | None = None
    """Whether a unit is released between forward and backward, at stage 3; None means all units but the root."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, least in (("prefetch", 0), ("bucket_bytes", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ArgumentError(must_be(name, f"a whole number, {least} or more", value))
        again = self.reshard_after_forward
        if again is not None and not isinstance(again, bool):
            raise ArgumentError(must_be("reshard_after_forward", "True, False or None", again))


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Say which ranks do what together."""

    everyone: Any
    """The communicator of all ranks, over which gradients are averaged."""
    group: Any
    """Of those that a parameter is cut over; `everyone` without hybrid sharding."""
    replicas: Any = None
    """Of those that hold the same shards, one in each group; None without hybrid sharding."""


def parse_stage(stage: int | str) -> tuple[int, bool]:
    """Return the stage as a number, and whether it is to be taken within the node.

    Raises:
        ArgumentError: for what is neither a stage nor the name of a strategy.
    """
    if isinstance(stage, str):
        if stage not in _STAGES:
            raise ArgumentError(must_be("stage", f"0 to 3 or one of {', '.join(_STAGES)}", stage))
        return _STAGES[stage], stage == HYBRID_SHARD
    return check_stage(stage), False


def ranks_of(comm: Any, stage: int, group: Any, *, hybrid: bool) -> tuple[Ranks, int]:
    """Return who does what, and the stage: 0, plain replication, where groups are of one rank. Collective.

    Args:
        comm: all ranks.
        stage: 0 to 3; at stage 0 there are no groups.
        group: the communicator of this rank's group, for hybrid sharding; None means the node where `hybrid` asks.
        hybrid: whether hybrid sharding is asked for by name.

    Raises:
        ArgumentTypeError: if `group` is no communicator.
        ArgumentError: on all ranks, if the groups are not of equal size.
    """
    if group is not None and not hasattr(group, "transport"):
        raise ArgumentTypeError(must_be("group", "an mpizero.Communicator", type(group).__name__))
    if group is None and not hybrid:
        return Ranks(everyone=comm, group=comm), stage
    group = comm.node if group is None else group.private
    kept, replicas = group.notes.get(REPLICAS, (None, None))
    known = kept is comm and not replicas.closed
    table = all_gather(np.array([group.size, known], np.int64), comm, algorithm="direct").reshape(comm.size, 2)
    sizes = table[:, 0].tolist()
    if len(set(sizes)) > 1:
        rule = "groups of equally many ranks, for hybrid sharding"
        raise ArgumentError(must_be("group", rule, f"groups of {sorted(set(sizes))}", "pass another group"))
    if stage == 0 or group.size in {1, comm.size}:  # an axis of size 1: plain replication, or plain sharding
        return Ranks(everyone=comm, group=comm), 0 if group.size == 1 else stage
    if not table[:, 1].all():  # an MPI has only some 2,000 to give: models of one group share one
        replicas = comm.split(group.rank, comm.rank)
        comm.adopt(replicas)
        group.notes[REPLICAS] = comm, replicas
    return Ranks(everyone=comm, group=group, replicas=replicas), stage


def lifetime_of(stage: int, ranks: int, *, shared: bool = False, exact: Any = None, moved: bool = False) -> Lifetime:
    """Return a stage's lifetimes; on one rank nothing is cut, and nothing is released that does not lie elsewhere.

    Args:
        stage: 0 to 3.
        ranks: over how many a parameter is cut.
        shared: whether these can, and are to, hold one copy of the full parameters together.
        exact: where the sum over micro-batches will stand, if it is to be exact.
        moved: whether the parameters are on a disk, or on the host of a GPU, between their uses.
    """
    cut = check_stage(stage) >= 1 and ranks > 1
    release = stage == 3 and (cut or moved) and not shared
    return Lifetime(stage=stage, cut=cut, release_parameters=release, shared=shared and cut, exact=exact)
