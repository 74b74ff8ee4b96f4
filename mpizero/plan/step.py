"""One training step on paper: the gathers, releases and reductions that `shard` makes, in their order.

[Note: the step that is followed] Units are used one after the other, each once, inside the root's forward; the order of
gathers is known, as from the second step on; gradients of the root arrive from the beginning of backward to its end;
shards' gradients were set to None after the last step. Ranks with other habits (branches, units used twice, recomputed
activations) hold at most a unit more, or gather again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mpizero.plan.buckets import Buckets
from mpizero.plan.flats import Flat, flats_of, state_of
from mpizero.plan.ledger import Act, Held, Ledger, Move
from mpizero.plan.moved import DISK, Carried, groups_bytes, streamed

if TYPE_CHECKING:
    from mpizero.plan.memory import StateBytes
    from mpizero.plan.model import ModelShape
    from mpizero.plan.setup import Setup

__all__ = ["PHASES", "Footprint", "Step", "step_of"]

PHASES = ("between steps", "forward", "backward", "step")
"""`step` is the optimizer's: mpizero takes nothing for it, torch the temporaries of its own arithmetic."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Hold one rank's bytes by kind at the moment of a phase at which it holds most."""

    state: StateBytes
    """Always there."""
    room: int
    """Shared memory in which the node's ranks collect gradients; always there, in host memory alone."""
    groups: int = 0
    """Memory through which a step over state on a disk streams; there from the first step on."""
    held: Held
    """What lives within the step."""

    @property
    def total(self) -> float:
        """Return the sum over kinds."""
        return self.state.total + self.room + self.groups + self.held.total


@dataclass(frozen=True, kw_only=True)
class Step:
    """Hold what a step takes, and does."""

    setup: Setup
    phases: dict[str, Footprint]
    """By the names of `PHASES`."""
    outside: StateBytes
    """What is moved to a disk, or to host memory, in all phases; whole blocks of a disk."""
    carried: Carried
    acts: tuple[Act, ...]
    largest_unit: int
    """Bytes of the largest unit's full parameters, the root aside."""

    @property
    def peak(self) -> float:
        """Return the most bytes that a rank holds at any time of a step."""
        return max(footprint.total for footprint in self.phases.values())

    @property
    def moves(self) -> tuple[Move, ...]:
        """Return the collectives, in their order."""
        return tuple(move for act in self.acts for move in act.moves)


def step_of(model: ModelShape, setup: Setup) -> Step:
    """Follow one step of a model; see [Note: the step that is followed].

    Args:
        model: the model's units.
        setup: ranks, stage, precisions and options.

    Returns:
        Bytes by kind and phase of the rank that holds most, and its collectives. Not in it: activations, the gradient
        of one parameter at a time that autograd hands over, scratch memory of collectives, and temporaries of torch.

    Source of the order: `mpizero.shard`. Takes some 100 us per unit, and 30 per unit and micro-batch.
    """
    walk = _Walk(model, setup)
    for number in range(setup.micro_batches):
        walk.forward(first=number == 0)
        walk.backward(sync=number == setup.micro_batches - 1)
    flats = [flat for unit in (walk.flats[-1], *walk.flats[:-1]) for flat in unit]
    state, outside = state_of(flats, setup)
    groups = groups_bytes(flats, setup.offload, released=setup.release)
    room, peaks, acts = walk.buckets.room_bytes, walk.ledger.peaks, tuple(walk.ledger.acts)
    gathered, reduced = (sum(act.carried for act in acts if act.kind == kind) for kind in ("gather", "reduce"))
    once = streamed(flats, setup.offload, released=setup.release)
    return Step(
        setup=setup,
        phases={p: Footprint(state=state, room=room, groups=groups, held=peaks.get(p, Held())) for p in PHASES},
        outside=outside,
        carried=replace(once, gathered=gathered, written=once.written + reduced),
        acts=acts,
        largest_unit=max((sum(flat.full_bytes for flat in unit) for unit in walk.flats[:-1]), default=0),
    )


class _Walk:
    """Go through forwards and backwards, and write into the books."""

    def __init__(self, model: ModelShape, setup: Setup) -> None:
        self.setup, self.ledger = setup, Ledger()
        self.flats: list[tuple[Flat, ...]] = [flats_of(unit, setup) for unit in model.units]
        self.buckets = Buckets(self.flats, setup, self.ledger)
        self._root = len(self.flats) - 1
        again = setup.reshard_after_forward
        self._keeps = [not again if again is not None else unit == self._root for unit in range(len(self.flats))]
        self._live: set[int] = set()
        self._early: set[int] = set()
        self._unsynced: set[int] = set()
        """Units of which `no_sync` has kept gradients."""

    def forward(self, *, first: bool) -> None:
        """Go through the units; on the way at stage 3, or at the first of a step's forwards, gather."""
        self.ledger.phase = "forward"
        self.ledger.add()
        order = [self._root, *range(self._root)]
        if self.setup.release:
            self._ahead(order)
        elif self.setup.cut and not self.setup.shared and first:
            for unit in order:
                self._begin(unit)
        for place, unit in enumerate(order):
            self._need(order, place)
            if unit == self._root:
                continue
            self.ledger.act("forward", unit)
            if not self._keeps[unit]:
                self._release(unit)
        self.ledger.act("forward", self._root)
        if not self._keeps[self._root]:
            self._release(self._root)

    def backward(self, *, sync: bool) -> None:
        """Go back through the units, collect their gradients and, outside `no_sync`, reduce them."""
        order = [self._root, *reversed(range(self._root))]
        if self.setup.release:
            self._ahead([unit for unit in order if unit not in self._live])  # still in the forward's last moment
        self.ledger.phase = "backward"
        self.ledger.add()
        before = None
        for place, unit in enumerate(order):
            if self.setup.release and sync and before is not None:
                self.buckets.start(before)
            self._need(order, place)
            self.ledger.act("backward", unit)
            self._collect(unit, sync=sync)
            if unit == self._root:
                continue
            self._release(unit)
            before = unit
            if sync and not self.setup.release:
                self.buckets.start(unit)
        self._release(self._root)
        if sync:
            if self.setup.release and before is not None:
                self.buckets.start(before)
            self.buckets.start(self._root)
            self.buckets.finish()

    def _collect(self, unit: int, *, sync: bool) -> None:
        if sync:
            self.buckets.arrive(unit)
        elif unit not in self._unsynced:
            self._unsynced.add(unit)
            self.ledger.add(kept=sum(flat.length * flat.master for flat in self.flats[unit] if flat.trained))

    def _need(self, order: list[int], place: int) -> None:
        """Have a unit's full parameters there, and at stage 3 begin to gather what follows, and to read what does."""
        unit, ahead = order[place], place + 1 + self.setup.prefetch
        after, later = order[place + 1 : ahead], order[ahead : ahead + 1]
        if self.setup.release and self.flats[unit]:
            early = unit in self._early
            self._early.discard(unit)
            fresh = unit not in self._live
            self._begin(unit)
            if early or fresh:
                self._ahead(after)
                self._expect(later)
        if unit in self._live:
            self.ledger.act("gathered", unit)

    def _ahead(self, following: list[int]) -> None:
        for unit in [unit for unit in following if self.flats[unit]][: self.setup.prefetch]:
            if len(self._early) < self.setup.prefetch and unit not in self._live:
                self._begin(unit)
                self._early.add(unit)

    def _expect(self, units: list[int]) -> None:
        """Have the disk begin to read these, as far as they are not gathered."""
        for unit in units:
            if unit not in self._live and self.setup.offload is not None and self.setup.offload.params == DISK:
                self.ledger.act("expect", unit, (), self._carried(unit))

    def _carried(self, unit: int) -> int:
        """Return the bytes of this rank's part where a gather takes them from a disk or from host memory."""
        return sum(flat.shard * flat.full for flat in self.flats[unit]) if self.setup.params_moved else 0

    def _begin(self, unit: int) -> None:
        """Begin to gather a unit: at stage 3 into memory taken for it."""
        if unit in self._live:
            return
        self._live.add(unit)
        moved = [flat for flat in self.flats[unit] if flat.length and (flat.trained or self.setup.release)]
        moves = tuple(Move("all_gather", flat.full_bytes, self.setup.shards) for flat in moved)
        self.ledger.act("gather", unit, moves, self._carried(unit))
        if self.setup.release:
            self.ledger.add(gathered=sum(flat.full_bytes for flat in self.flats[unit]))

    def _release(self, unit: int) -> None:
        if unit not in self._live:
            return
        self._live.discard(unit)
        if self.setup.release:
            self.ledger.add(gathered=-sum(flat.full_bytes for flat in self.flats[unit]))
