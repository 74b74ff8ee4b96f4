"""Units: the modules whose parameters are gathered and reduced together."""

from __future__ import annotations

import weakref
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from mpizero.errors import ShardError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

    from mpizero.shard.flat import FlatParams

__all__ = ["Unit", "UnitState"]


class UnitState(Enum):
    """Say what a unit holds, and what that costs in memory.

    With n elements in the unit and p ranks. Where full parameters live on, at stages 0 to 2 and in a node's shared
    memory, their n elements are there in every state, and a state says only what modules show.
    """

    SHARDED = "sharded"
    """Modules hold shards: n/p master elements and n/p accumulators."""
    GATHERED = "gathered"
    """Modules hold full parameters: n elements more. In forward, from the unit's pre-forward hook to its end."""
    BACKWARD = "backward"
    """As gathered, and gradients arrive: n elements more from the first one to the reduction."""


class Unit:
    """Own the flat buffers of one module's parameters and say what may happen to them."""

    def __init__(self, name: str, module: nn.Module, flats: list[FlatParams]) -> None:
        self.name = name or type(module).__name__
        self.own_modules: list[nn.Module] = []
        """The module and those inside it that belong to no other unit."""
        self.inside = {id(inner) for inner in module.modules()}
        self.module = module
        self.flats = flats
        self.state = UnitState.SHARDED
        self.pins = 0
        self.keep = False
        """Whether the unit stays gathered from its forward to the end of its backward."""
        self.missing = 0
        """Parameters whose gradients this backward has yet to bring."""
        self.calls = 0
        """Forward calls since the last backward ended."""
        self.entered = 0
        """Those of them whose backward has begun."""
        self.open = 0
        """Those of which backward may still need frozen parameters."""
        self._hooked: set[tuple[int, int]] = set()
        """The parameters, by buffer and index, whose gradients are told of."""
        self.parameters = sum(len(flat.shards) for flat in flats)
        self.cut = any(flat.lifetime.cut for flat in flats)
        """Whether ranks hold different parts."""
        self.released = any(flat.lifetime.release_parameters for flat in flats)
        """Whether full parameters are let go between uses."""
        self.count()

    def count(self) -> None:
        """Count what is trained, anew after parameters were frozen or unfrozen."""
        self.trainable = [flat for flat in self.flats if flat.trainable]
        self.gradients = [flat.gradients for flat in self.trainable if flat.gradients is not None]
        self.trained = sum(len(flat.trained) for flat in self.flats)
        self.has_frozen = self.trained < self.parameters
        self.gradient_bytes = sum(gradients.nbytes for gradients in self.gradients)
        """Bytes of one backward's gradients."""

    @property
    def shown(self) -> bool:
        """Return whether modules hold the full parameters."""
        return self.state is not UnitState.SHARDED

    @property
    def stale(self) -> bool:
        """Return whether any full parameters have to be filled before they are used."""
        for flat in self.flats:  # noqa: SIM110  (asked several times per call; a generator costs a microsecond)
            if flat.stale or not flat.live:
                return True
        return False

    @property
    def gathering(self) -> bool:
        """Return whether a gather is under way."""
        for flat in self.flats:  # noqa: SIM110  (as in `stale`)
            if flat.gathering is not None:
                return True
        return False

    @property
    def complete(self) -> bool:
        """Return whether the gradients of all parameters of all calls are there."""
        done = self.missing <= 0 and self.entered >= self.calls
        return done and all(gradients.complete for gradients in self.gradients)

    def version(self) -> int:
        """Return a number that grows with every change in place of any of this rank's shards."""
        return sum(flat.version() for flat in self.flats)

    def full_version(self) -> int:
        """Return a number that grows with every change in place of any full parameter."""
        return sum(flat.full_version() for flat in self.flats)

    def show(self, state: UnitState) -> None:
        """Put the full parameters, which must be there, into the modules."""
        for flat in self.flats:
            flat.show(full=True)
        if state is UnitState.BACKWARD and self.state is not UnitState.BACKWARD:
            self.missing = self.trained
        self.state = state

    def expect_gradients(self) -> None:
        """Wait for all gradients anew where those of earlier calls are there: the next call brings its own."""
        if self.missing <= 0:
            self.missing = self.trained

    def begin_fill(self) -> None:
        """Begin to give the full parameters the current values. Collective where the unit is cut and not yet filled."""
        for flat in self.flats:
            flat.begin_unshard()

    def expect_fill(self) -> None:
        """Have a disk that holds the values begin to read them."""
        for flat in self.flats:
            if not flat.live:
                flat.source.expect()

    def end_fill(self) -> None:
        """Wait for what `begin_fill` began."""
        for flat in self.flats:
            flat.end_unshard()

    @property
    def ended(self) -> float:
        """Return when the latest gather was over, in seconds of `time.perf_counter`."""
        return max(flat.gathered for flat in self.flats)

    def forget_backward(self) -> None:
        """Start counting calls anew."""
        self.calls = self.entered = self.open = 0

    def reshard(self, *, release: bool = True) -> None:
        """Show the shards again and, where the stage says so, let the full parameters go. Pinned units stay."""
        if self.pins:
            self.state = UnitState.GATHERED
            return
        for flat in self.flats:
            flat.show(full=False)
            if release and flat.lifetime.release_parameters and flat.live:
                flat.release()
        self.state = UnitState.SHARDED

    def check_unchanged(self, version: int, seen: int) -> None:
        """Raise ShardError if a parameter was changed in place since the forward that saw version `seen` (case S23)."""
        if version == seen:
            return
        raise ShardError(
            f"parameters of unit {self.name!r} must be left alone between forward and backward (got a change in place, "
            "or an optimizer step): the gradient would be taken at other values than the loss; step after backward, "
            "or run forward again"
        )

    def on_gradients(
        self, ready: Callable[[Unit, FlatParams, int], None], flat: FlatParams, indices: Iterable[int]
    ) -> None:
        """Call `ready(unit, flat, index)` each time autograd has finished the gradient of one of these full parameters.

        Args:
            ready: must hold neither unit nor buffer: the garbage collector does not see what hooks of autograd hold.
            flat: the buffer.
            indices: the parameters.
        """
        for index in indices:
            if (id(flat), index) not in self._hooked:  # frozen meanwhile, and trained again
                self._hooked.add((id(flat), index))
                hook = partial(_forward_to, ready, weakref.ref(self), weakref.ref(flat), index)
                flat.full_params[index].register_post_accumulate_grad_hook(hook)


def _forward_to(ready: Callable[..., None], unit: Any, flat: Any, index: int, _: Tensor) -> None:
    alive = unit(), flat()
    if None not in alive:
        ready(*alive, index)
