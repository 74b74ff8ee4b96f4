"""Bytes of model state per rank and bytes sent per step, by stage: the formulas that measurements are held against.

Per parameter, with Adam (two fp32 moments): `fp32` holds 4 bytes of parameter, 4 of gradient and 8 of moments; `bf16`
holds a 2-byte working copy, a 4-byte gradient accumulator, and 12 bytes of optimizer state, the fp32 master copy
included. The stage says which of them are divided by the number of ranks (Rajbhandari et al., "ZeRO", 2020, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass

from mpizero.errors import ArgumentError, must_be

__all__ = ["STAGES", "StateBytes", "check_stage", "model_state_bytes", "sent_per_step"]

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


def check_stage(stage: int) -> int:
    """Return the stage; raise ArgumentError where there is none of that number."""
    if stage not in STAGES or isinstance(stage, bool):
        raise ArgumentError(must_be("stage", f"one of {', '.join(map(str, STAGES))}", stage))
    return stage


def model_state_bytes(
    numel: int, ranks: int, stage: int, *, working_bytes: int = 4, moments: int = 2, node_shared: bool = False
) -> StateBytes:
    """Return the stage's formula for one rank.

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
    check_stage(stage)
    wide = max(4, working_bytes)
    master = wide if wide > working_bytes else 0
    shares = [1 / ranks if stage >= threshold else 1.0 for threshold in (3, 1, 1)]
    if stage >= 3 and master and ranks > 1:
        shares[0] = 0.0  # the working copy exists only while its unit is gathered
    if node_shared and stage >= 1:
        shares[0] = 1 / ranks
    return StateBytes(
        parameters=numel * working_bytes * shares[0],
        gradients=numel * wide * shares[1],
        optimizer=numel * (wide * moments + master) * shares[2],
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
