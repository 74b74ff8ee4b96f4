"""Bytes of model state per rank and bytes sent per step, by stage: the formulas that measurements are held against.

Per parameter, with Adam (two fp32 moments): `fp32` holds 4 bytes of parameter, 4 of gradient and 8 of moments; `bf16`
holds a 2-byte working copy, a 4-byte gradient accumulator, and 12 bytes of optimizer state, the fp32 master copy
included. The stage says which of them are divided by the number of ranks (Rajbhandari et al., "ZeRO", 2020, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass

from mpizero.errors import ArgumentError, must_be
from mpizero.plan.moved import HOST, Moved

__all__ = [
    "STAGES",
    "Part",
    "StateBytes",
    "check_stage",
    "model_state_bytes",
    "part_of",
    "sent_per_step",
    "split_state",
]

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Hold one rank's bytes of model state by kind, as they are between two steps."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Return the sum over kinds."""
        return self.parameters + self.gradients + self.optimizer

    def plus(self, other: StateBytes) -> StateBytes:
        """Return the sum of both, kind by kind."""
        return StateBytes(
            parameters=self.parameters + other.parameters,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
        )


def check_stage(stage: int) -> int:
    """Return the stage; raise ArgumentError where there is none of that number."""
    if stage not in STAGES or isinstance(stage, bool):
        raise ArgumentError(must_be("stage", f"one of {', '.join(map(str, STAGES))}", stage))
    return stage


@dataclass(frozen=True, kw_only=True)
class Part:
    """Describe what one rank has of parameters that are kept alike."""

    full: float
    """Bytes of full parameters that always live, as far as they are charged to this rank; 0 where they are released."""
    released: bool
    shard: float
    """Elements that the rank updates."""
    state: float
    """Elements of these that the optimizer has values for."""
    working: int
    """Bytes of an element as forward computes."""
    master: int
    """As the optimizer works."""
    trained: bool = True


def split_state(
    part: Part, moments: int, moved: Moved | None = None, *, block: int = 1
) -> tuple[StateBytes, StateBytes]:
    """Return the bytes of model state in the memory in which a rank computes, and those that are moved out of it.

    A master copy apart from the full parameters counts as optimizer state. What is updated in host memory has a master
    copy there in any case, and the gradients, and memory to copy from; on a disk, fp32 parameters that stay in memory
    are their own.

    Args:
        part: what the rank has.
        moments: values of optimizer state per element, in master precision.
        moved: what is moved.
        block: bytes of which what is moved takes a multiple, for each array.
    """
    near = {"parameters": part.full, "gradients": 0.0, "optimizer": 0.0}
    far = dict.fromkeys(near, 0.0)
    optimizer, params = (bool(moved.optimizer), bool(moved.params)) if moved is not None else (False, False)
    on_host = moved is not None and moved.optimizer == HOST and part.trained
    own, copy = part.shard * part.master, part.shard * part.working
    whole, whole_copy = (-(-nbytes // block) * block if block > 1 else nbytes for nbytes in (own, copy))
    if part.trained:
        near["gradients"] += 0 if on_host else own
        far["gradients"] += own * on_host
        near["optimizer"] += 0 if optimizer else moments * part.state * part.master
        far["optimizer"] += moments * whole * optimizer
    if part.working != part.master:
        kind = "optimizer" if part.trained else "parameters"
        near[kind] += 0 if optimizer else own
        far[kind] += whole * optimizer
        near["parameters"] += copy * (optimizer and not params and part.released)
        far["parameters"] += whole_copy * (params or on_host)
    elif on_host:
        far["optimizer"] += whole
        far["parameters"] += whole
        near["parameters"] += own * (part.released and not params)
    elif part.released:
        near["parameters"] += 0 if params else own
        far["parameters"] += whole * params
    return StateBytes(**near), StateBytes(**far)


def model_state_bytes(
    numel: int, ranks: int, stage: int, *, working_bytes: int = 4, moments: int = 2, node_shared: bool = False
) -> StateBytes:
    """Return the stage's formula for one rank, where nothing is moved.

    Args:
        numel: trainable parameters of the model.
        ranks: over how many ranks it is sharded.
        stage: 0 to 3.
        working_bytes: bytes of a parameter in compute precision: 2 (bf16), or 4 or 8, where it is its own master copy
            and gradients and moments are as wide.
        moments: fp32 values of optimizer state per parameter: 2 for Adam, 1 for SGD with momentum, 0 without.
        node_shared: whether the ranks, all on one node, hold one copy of the full parameters together, each being
            charged its part of it: at stages 1 to 3 that is working_bytes/p, whatever the stage.

    Not in it: the unit buffers: a unit's gathered parameters at stage 3, and its gradients while they are collected and
    reduced.
    """
    part = part_of(numel, ranks, stage, working_bytes=working_bytes, node_shared=node_shared)
    return split_state(part, moments)[0]


def part_of(
    numel: int,
    ranks: int,
    stage: int,
    *,
    working_bytes: int = 4,
    node_shared: bool = False,
    params_moved: bool = False,
    trained: bool = True,
) -> Part:
    """Return what one rank has of so many parameters, without padding; for `split_state`.

    Args:
        numel: parameters.
        ranks: over how many ranks they are sharded.
        stage: 0 to 3.
        working_bytes: see `model_state_bytes`.
        node_shared: see there.
        params_moved: whether parameters lie elsewhere between their uses, and so are released on one rank too.
        trained: whether they are.
    """
    cut = check_stage(stage) >= 1
    shared = node_shared and cut
    released = stage == 3 and (ranks > 1 or params_moved) and not shared
    shard = numel / ranks if cut else numel
    return Part(
        full=0 if released else numel * working_bytes / (ranks if shared else 1),
        released=released,
        shard=shard,
        state=shard,
        working=working_bytes,
        master=max(4, working_bytes),
        trained=trained,
    )


def sent_per_step(
    numel: int, ranks: int, stage: int, *, working_bytes: int = 4, gathers: int = 2, node_shared: bool = False
) -> float:
    """Return the bytes that one rank sends in one step of one backward: the stage's sum.

    Stage 0 all-reduces gradients, 2 (p-1)/p S. Stages 1 and 2 reduce-scatter gradients and gather parameters once:
    the same. Stage 3 gathers in forward and again in backward: 3 (p-1)/p S, 1.5 times as much. Where ranks share the
    full parameters there is nothing to gather: (p-1)/p S, for the gradients, at stages 1 to 3 alike.

    Args:
        numel: trainable parameters.
        ranks: number of ranks.
        stage: 0 to 3.
        working_bytes: bytes of an element on the wire.
        gathers: gathers per step at stage 3.
        node_shared: whether the ranks hold one copy of the full parameters together.
    """
    share = (ranks - 1) / ranks * numel * working_bytes
    if check_stage(stage) >= 1 and node_shared:
        return share
    return share * (1 + gathers if stage == 3 else 2)
