"""The flat buffers of a unit, in bytes: what `shard` makes of its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpizero.arrays.disk import BLOCK
from mpizero.plan.layout import layout_of
from mpizero.plan.memory import Part, StateBytes, split_state
from mpizero.plan.moved import DISK

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpizero.plan.model import UnitShape
    from mpizero.plan.setup import Setup

__all__ = ["COUNTER", "Flat", "flats_of", "state_of"]

COUNTER = 4
"""Bytes of the step count that torch's Adam keeps for each parameter."""


@dataclass(frozen=True, kw_only=True)
class Flat:
    """Describe one flat buffer of one rank."""

    length: int
    """Elements, padding included."""
    shard: int
    """Elements of the rank's own part; all where nothing is cut."""
    full: int
    """Bytes of an element as forward computes."""
    master: int
    """As the optimizer works."""
    reduce: int
    """As gradients travel."""
    trained: bool
    tensors: int
    """Parameters in it."""
    state: int
    """Elements that the optimizer has values for: without padding where nothing is cut, else at most a shard's."""
    moments: int
    """Values per element that the optimizer has."""

    @property
    def full_bytes(self) -> int:
        """Return the bytes of the full parameters."""
        return self.length * self.full

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of one backward's gradients; none of a frozen buffer."""
        return self.length * self.reduce * self.trained


def flats_of(unit: UnitShape, setup: Setup) -> tuple[Flat, ...]:
    """Return a unit's flat buffers: one for each kind of precision and of being trained that its parameters have."""
    groups: dict[tuple[bool, bool], list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in unit.parameters:
        groups.setdefault((name in unit.kept, name not in unit.frozen), []).append((name, shape))
    widths, found = setup.widths, []
    for (kept, trained), members in groups.items():
        layout = layout_of(members, setup.shards)
        full = widths.own if kept or not widths.param else widths.param
        flat = Flat(
            length=layout.length,
            shard=layout.shard_length if setup.cut else layout.length,
            full=full,
            master=widths.master,
            reduce=widths.reduce or full,
            trained=trained,
            tensors=len(members),
            state=min(layout.numel, layout.shard_length if setup.cut else layout.numel),
            moments=setup.moments,
        )
        found.append(flat)
    return tuple(found)


def state_of(flats: Iterable[Flat], setup: Setup) -> tuple[StateBytes, StateBytes]:
    """Return the bytes of model state that one rank holds between two steps, padding included, and those it has moved.

    A copy that the node shares is charged to its ranks in equal parts, and a master copy apart from the full parameters
    counts as optimizer state, as in `mpizero.memory_report`.
    """
    near = far = StateBytes(parameters=0.0, gradients=0.0, optimizer=0.0)
    block = BLOCK if setup.offload is not None and setup.offload.place == DISK else 1
    for flat in flats:
        part = Part(
            full=0 if setup.release else flat.full_bytes / (setup.shards if setup.shared else 1),
            released=setup.release,
            shard=flat.shard,
            state=flat.state,
            working=flat.full,
            master=flat.master,
            trained=flat.trained,
        )
        here, there = split_state(part, setup.moments, setup.offload, block=block)
        counters = COUNTER * flat.tensors if flat.trained and setup.moments > 1 else 0
        near = near.plus(here).plus(StateBytes(parameters=0.0, gradients=0.0, optimizer=counters))
        far = far.plus(there)
    return near, far
