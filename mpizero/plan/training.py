"""What a simulated training step depends on: the work, the machine's speeds, and how evenly ranks work."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpizero.errors import ArgumentError, must_be
from mpizero.plan.memory import check_stage
from mpizero.plan.setup import Setup, Widths

if TYPE_CHECKING:
    from mpizero.collectives.links import Cluster
    from mpizero.plan.model import ModelShape
    from mpizero.plan.moved import Moved

__all__ = ["CHOICES", "SERVICES", "Speeds", "Stragglers", "Training", "check_training", "setup_of"]

WIDTHS = (2, 4, 8)
"""Bytes of a parameter that there are dtypes for."""
CHOICES = ("auto", "best")
SERVICES = ("fifo", "shared")


def _check_whole(what: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError(must_be(what, f"a whole number, {least} or more", value))


@dataclass(frozen=True, kw_only=True)
class Training:
    """Describe the work of one step, as `shard` and its options do it."""

    model: ModelShape
    stage: int = 3
    tokens: float = 2048.0
    """Of one rank in one backward."""
    working_bytes: int = 2
    """Bytes of a parameter in compute precision: 2, 4 or 8. Gathers move so many."""
    reduce_bytes: int = 0
    """Bytes of a gradient that is reduced; 0 for those of the parameter."""
    group: int = 0
    """Ranks over which a parameter is cut, in hybrid sharding; 0 for all."""
    backwards: int = 1
    """Forwards with backward in a step."""
    no_sync: bool = False
    """Whether all of them but the last are inside `no_sync`."""
    prefetch: int = 1
    """Units whose gather begins before they are needed, at stage 3."""
    bucket_bytes: int = 1 << 20
    reshard_after_forward: bool | None = None
    """At stage 3: None keeps the root alone from forward to backward, False all, True none."""
    node_shared: bool = False
    """Whether the ranks of a group, all on one node, hold one copy of the full parameters together."""
    recompute: bool = False
    """Whether backward computes each unit's forward again first: activation checkpointing."""
    on_gpu: bool = True
    """Whether models lie in GPUs' memory; those that a node shares never do."""
    offload: Moved | None = None
    """What is moved out of the memory in which the model computes."""

    def __post_init__(self) -> None:
        """Check the numbers; raise ArgumentError."""
        check_stage(self.stage)
        for name, least in (("group", 0), ("backwards", 1), ("prefetch", 0), ("bucket_bytes", 1)):
            _check_whole(name, getattr(self, name), least)
        if self.working_bytes not in WIDTHS:
            raise ArgumentError(must_be("working_bytes", "2, 4 or 8", self.working_bytes))
        if self.reduce_bytes not in (0, *WIDTHS):
            raise ArgumentError(must_be("reduce_bytes", "0, 2, 4 or 8", self.reduce_bytes))
        if not (self.tokens > 0 and math.isfinite(self.tokens)):
            raise ArgumentError(must_be("tokens", "above 0", self.tokens))
        if self.offload is not None:
            self.offload.check(self.stage, on_gpu=self.device, node_shared=self.node_shared)

    @property
    def wire_bytes(self) -> int:
        """Return the bytes of a gradient as it is reduced outside `no_sync`."""
        return self.reduce_bytes or self.working_bytes

    @property
    def kept(self) -> bool:
        """Return whether `no_sync` keeps gradients back."""
        return self.no_sync and self.backwards > 1

    @property
    def device(self) -> bool:
        """Return whether gradients that wait lie in a GPU's memory."""
        return self.on_gpu and not self.node_shared


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Say how fast a rank works, communication aside."""

    flops: float
    """Floating-point operations per second that it reaches in forward and backward."""
    backward: float = 2.0
    """Seconds of a backward over those of its forward."""
    update: float = 0.0
    """Seconds of the optimizer per element that the rank updates."""
    carry: float = 0.0
    """Seconds per byte, each way, that the disk or the link to host memory takes for one rank; see `Carriers`."""
    launch: float = 0.0
    """Seconds that each forward and each backward of a unit takes beside its operations: kernels' starts, Python."""

    drive: float = 0.0
    """Seconds of the rank's core per byte that it sends in the background, which a computation meanwhile loses; 0 where
    another core or a copy engine drives messages."""

    def __post_init__(self) -> None:
        """Check the numbers; raise ArgumentError."""
        if not (self.flops > 0 and math.isfinite(self.flops)):
            raise ArgumentError(must_be("flops", "above 0", self.flops))
        for name in ("backward", "update", "carry", "launch", "drive"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ArgumentError(must_be(name, "0 or more", value))


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """Say how unevenly ranks compute. What is drawn follows from the seed, whatever the number of ranks before."""

    slow: dict[int, float] = field(default_factory=dict)
    """By rank, how many times as long it computes."""
    spread: float = 0.0
    """Standard deviation of the logarithm of every single time, drawn for each rank, unit and phase anew: a log-normal
    distribution whose median is the time itself."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the numbers; raise ArgumentError."""
        for rank, factor in self.slow.items():
            _check_whole("rank of Stragglers.slow", rank, 0)
            if not (factor > 0 and math.isfinite(factor)):
                raise ArgumentError(must_be("factor of Stragglers.slow", "above 0", factor))
        if not 0 <= self.spread <= 3:
            raise ArgumentError(must_be("Stragglers.spread", "0 to 3", self.spread))
        _check_whole("Stragglers.seed", self.seed, 0)


def check_training(training: Training, cluster: Cluster, stragglers: Stragglers) -> int:
    """Check what depends on more than one description; return over how many ranks a parameter is cut.

    Raises:
        ArgumentError: for a group that does not divide the ranks or lies askew to nodes, ranks that are not placed node
            by node, a shared copy that no single node could hold, and slow ranks that there are not.
    """
    group = training.group or cluster.size
    if cluster.size % group:
        raise ArgumentError(must_be("group", f"a divisor of the {cluster.size} ranks", group))
    counts = [len(ranks) for ranks in cluster.members().values()]
    if list(cluster.nodes) != sorted(cluster.nodes):
        raise ArgumentError(must_be("Cluster.nodes", "ranks placed node by node", "another placement"))
    per_node = counts[0]
    if group < cluster.size and (len(set(counts)) > 1 or (group % per_node and per_node % group)):
        rule = f"whole nodes of {per_node} ranks, or equal parts of one, with as many ranks on every node"
        raise ArgumentError(must_be("group", rule, group))
    if training.node_shared and (group > min(counts) or training.stage == 0):
        where = f"a group of {group} ranks at stage {training.stage}, {min(counts)} on a node"
        raise ArgumentError(must_be("node_shared", "for stages 1 to 3 and groups within one node", where))
    missing = [rank for rank in sorted(stragglers.slow) if rank >= cluster.size]
    if missing:
        raise ArgumentError(must_be("rank of Stragglers.slow", f"0 to {cluster.size - 1}", missing[0]))
    return group


def setup_of(training: Training, cluster: Cluster) -> Setup:
    """Return the job of which `step_of` says what it holds; what `check_training` accepts."""
    width = training.working_bytes
    return Setup(
        ranks=cluster.size,
        per_node=cluster.nodes.count(cluster.nodes[0]),
        stage=training.stage,
        widths=Widths(own=max(4, width), param=width, reduce=training.reduce_bytes),
        group=training.group,
        on_gpu=training.device,
        node_shared=training.node_shared,
        reshard_after_forward=training.reshard_after_forward,
        prefetch=training.prefetch,
        bucket_bytes=training.bucket_bytes,
        micro_batches=training.backwards if training.kept else 1,
        offload=training.offload,
    )
