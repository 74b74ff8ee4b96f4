"""How much memory a sharded model takes, measured on its tensors, beside the stage's formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpizero.plan import DISK, HOST, Moved, StateBytes
from mpizero.plan.memory import part_of, split_state
from mpizero.shard.optimizers import OFFLOADED
from mpizero.shard.runtime import runtime_of

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["MemoryReport", "memory_report"]

NOTHING = StateBytes(parameters=0, gradients=0, optimizer=0)


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Hold one rank's bytes of model state, between two steps."""

    measured: StateBytes
    """Bytes of the storages that exist, each counted once."""
    formula: StateBytes
    """Bytes by the stage's formula, of what is left in memory; without padding, and counters of steps."""
    unit_buffers: int
    """Bytes of the largest unit in compute precision: at stage 3 up to two such, and the root, are gathered at a time,
    and up to two more hold gradients that are being collected or reduced."""
    room: int
    """Bytes of shared memory in which this rank's gradients are collected for its peers to read; see `reductions`."""
    node_shared: bool
    """Whether the node's ranks hold one copy of the full parameters together, as they can in host memory alone; each is
    charged its part of it."""
    device: str
    """Where the model lies: "cpu", or "cuda:0" and the like."""
    on_disk: int = 0
    """Bytes of scratch files; what is in them is in no other measured figure."""
    on_host: int = 0
    """Bytes in host memory of a model on a GPU; they are in no other measured figure."""
    formula_outside: StateBytes = NOTHING
    """By the same formula, what is moved: to scratch files, or to host memory."""
    groups: int = 0
    """Bytes of memory through which the optimizer's step streams what is on a disk."""


def memory_report(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> MemoryReport:
    """Return the bytes of model state that this rank holds, by kind.

    Args:
        model: a sharded model, outside forward and backward.
        optimizer: its optimizer, after the first step; None leaves its state out.

    On a GPU these are bytes that torch's allocator has given out; what it holds back for later is not in them.
    A master copy apart from the working copy counts as optimizer state, as in the ZeRO paper.
    """
    runtime = runtime_of(model)
    flats = runtime.flats
    near = [flat for flat in flats if flat.source.region is None]  # the others' master values are on a disk
    masters_apart = [flat for flat in near if flat.trainable and flat.dtype != flat.master_dtype]
    held: list[Tensor] = [flat.full for flat in flats if flat.window is None]
    held += [flat.master for flat in near if flat not in masters_apart and not (flat.window and flat.aliased)]
    held += [flat.source.working for flat in flats if flat.source.working is not None and flat.window is None]
    shared = sum(flat.full.numel() * flat.full.element_size() / flat.comm.size for flat in flats if flat.window)
    state: list[Tensor] = [flat.master for flat in masters_apart]
    moments = 0
    if optimizer is not None:
        values = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
        state += [value for value in values if not (runtime.spill is not None and runtime.spill.holds(value))]
        shards = max(1, sum(flat.master.numel() for flat in flats if flat.trainable))
        moments = round(sum(value.numel() for value in values if value.numel() > 1) / shards)
    gradients = [tensor for own in runtime.gradients() for tensor in (own.accumulator, *own.held())]
    here = [[tensor for tensor in kind if tensor.device == runtime.home.device] for kind in (held, gradients, state)]
    parameters, accumulators, optimizers = map(_bytes, here)
    measured = StateBytes(parameters=parameters + shared, gradients=accumulators, optimizer=optimizers)
    formula, outside = _formula(runtime, moments)
    biggest = max(sum(flat.layout.length * flat.full.element_size() for flat in unit.flats) for unit in runtime.units)
    return MemoryReport(
        measured=measured,
        formula=formula,
        unit_buffers=biggest,
        room=runtime.reductions.room_bytes,
        node_shared=runtime.lifetime.shared,
        device=str(runtime.home.device),
        on_disk=0 if runtime.spill is None else runtime.spill.nbytes,
        on_host=_bytes([*held, *gradients, *state]) - parameters - accumulators - optimizers,
        formula_outside=outside,
        groups=getattr(optimizer, "memory", 0) if hasattr(optimizer, OFFLOADED) else 0,
    )


def _formula(runtime: Any, moments: int) -> tuple[StateBytes, StateBytes]:
    """Return the stage's bytes, in memory and moved out of it."""
    ranks, stage, shared = runtime.ranks.group.size, runtime.lifetime.stage, runtime.lifetime.shared
    near, far, moved = NOTHING, NOTHING, _moved(runtime)
    for flat in runtime.flats:
        part = part_of(
            flat.layout.numel,
            ranks,
            stage,
            working_bytes=flat.full.element_size(),
            node_shared=shared,
            params_moved=moved is not None and bool(moved.params),
            trained=flat.trainable,
        )
        here, there = split_state(part, moments, moved)
        near, far = near.plus(here), far.plus(there)
    return near, far


def _moved(runtime: Any) -> Moved | None:
    """Return what of the model is moved, as `plan` says it; None where all is where the model computes."""
    if runtime.spill is None:
        return None
    offload = runtime.spill.offload
    elsewhere = HOST if runtime.home.on_device else ""  # "cpu" is where a model in host memory is anyway

    def place(name: str) -> str:
        return DISK if offload.folder(name) is not None else elsewhere if getattr(offload, name) is not None else ""

    optimizer, params = place("optimizer"), place("params")
    return Moved(optimizer=optimizer, params=params) if optimizer or params else None


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages under the tensors."""
    return sum({storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in tensors)}.values())
