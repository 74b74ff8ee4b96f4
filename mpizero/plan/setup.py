"""What a plan is made for: ranks and where they are, the stage, the precisions, and the options of `mpizero.shard`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpizero.errors import ArgumentError, ArgumentTypeError, must_be
from mpizero.plan.memory import check_stage

if TYPE_CHECKING:
    from mpizero.plan.moved import Moved

__all__ = ["DTYPES", "Setup", "Widths", "widths"]

DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
"""Bytes of an element of each precision that `mpizero.Precision` takes."""


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Hold the bytes of an element in each role; see `mpizero.Precision`."""

    own: int = 4
    """As the model was built."""
    param: int = 0
    """As forward and backward compute; 0 keeps the model's own."""
    reduce: int = 0
    """As gradients travel; 0 takes that in which they are computed."""

    @property
    def master(self) -> int:
        """Return the bytes in which the optimizer works and gradients accumulate: 4, or 8 of a model in fp64."""
        return max(4, self.own)


def widths(param: str = "fp32", *, reduce: str = "", own: str = "fp32") -> Widths:
    """Return the widths of precisions by their names.

    Args:
        param: what the model computes in, a name of `DTYPES`.
        reduce: what gradients travel in; "" takes `param`.
        own: what the model was built in.

    Raises:
        ArgumentError: for another name; lists those known.
    """
    found = []
    for what, name in (("precision", param), ("reduce precision", reduce or param), ("model's precision", own)):
        if name not in DTYPES:
            raise ArgumentError(must_be(what, f"one of {', '.join(DTYPES)}", name))
        found.append(DTYPES[name])
    return Widths(own=found[2], param=found[0], reduce=found[1] if reduce else 0)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Describe a job; the options have the names and defaults that `mpizero.shard` gives them."""

    ranks: int
    per_node: int = 8
    """Ranks on a node, neighbours together; the last node may have fewer."""
    stage: int = 3
    widths: Widths = field(default_factory=Widths)
    group: int = 0
    """Ranks of a group of hybrid sharding; 0 cuts parameters over all ranks."""
    on_gpu: bool = True
    """Whether models lie in GPUs' memory; in host memory the ranks of a node can share one copy of the parameters."""
    node_shared: bool | None = None
    reshard_after_forward: bool | None = None
    prefetch: int = 1
    bucket_bytes: int = 1 << 20
    micro_batches: int = 1
    """Backwards of a step, all but the last inside `no_sync`."""
    moments: int = 2
    """Values of the optimizer's state per parameter, in master precision: 2 for Adam, 1 for SGD with momentum."""
    offload: Moved | None = None
    """What is moved out of the memory in which the model computes."""

    def __post_init__(self) -> None:
        """Refuse what is no job; raise ArgumentError, or ArgumentTypeError for numbers that are not whole."""
        check_stage(self.stage)
        for name, least in (("ranks", 1), ("per_node", 1), ("group", 0), ("prefetch", 0), ("bucket_bytes", 1),
                            ("micro_batches", 1), ("moments", 0)):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ArgumentTypeError(must_be(name, "a whole number", value))
            if value < least:
                raise ArgumentError(must_be(name, f"{least} or more", value))
        if self.group and self.ranks % self.group:
            raise ArgumentError(must_be("group", f"a divisor of the number of ranks, {self.ranks}", self.group))
        if self.node_shared and self.cut and (self.on_gpu or not self.on_one_node):
            rule = "False or None for models on GPUs, and where ranks of a group are on several nodes"
            raise ArgumentError(must_be("node_shared", rule, self.node_shared))
        if self.offload is not None:
            self.offload.check(self.stage, on_gpu=self.on_gpu, node_shared=bool(self.node_shared))

    @property
    def hybrid(self) -> bool:
        """Return whether parameters are cut over groups that are replicas of each other."""
        return self.stage > 0 and 1 < self.group < self.ranks

    @property
    def shards(self) -> int:
        """Return over how many ranks a parameter is laid out."""
        return self.group if self.hybrid else self.ranks

    @property
    def cut(self) -> bool:
        """Return whether ranks hold different parts."""
        return self.stage >= 1 and self.shards > 1 and self.group != 1

    @property
    def on_one_node(self) -> bool:
        """Return whether the ranks that a parameter is cut over are always on one node."""
        return self.ranks <= self.per_node or (self.shards <= self.per_node and self.per_node % self.shards == 0)

    @property
    def shared(self) -> bool:
        """Return whether the node's ranks hold one copy of the full parameters together."""
        wanted = self.node_shared is not False and not self.params_moved
        return self.cut and not self.on_gpu and self.on_one_node and wanted

    @property
    def rooms(self) -> bool:
        """Return whether gradients are collected in memory that the ranks of the node share."""
        return self.cut and not self.on_gpu and self.on_one_node

    @property
    def release(self) -> bool:
        """Return whether full parameters live from a unit's gather to its release, or always."""
        return self.stage == 3 and (self.cut or self.params_moved) and not self.shared

    @property
    def params_moved(self) -> bool:
        """Return whether parameters lie elsewhere between their uses; then they are released on one rank too."""
        return self.offload is not None and bool(self.offload.params)
