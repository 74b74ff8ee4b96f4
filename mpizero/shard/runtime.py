"""The life of a sharded model: what happens at each forward, backward and optimizer step.

[Note: life of a unit] Where full parameters are released, a unit's are gathered in its pre-forward hook and released in
its forward hook; gathered again when the gradient of its output is known, and released when the gradients of all
its parameters are. What follows is begun ahead (see `gathers`). Elsewhere full parameters live on and are filled anew
after a step: their gathers begin all at once with the next forward, and each unit waits for its own; in a node's shared
memory there is nothing to gather. What a forward inside backward gathers (activation checkpointing recomputes) stays
until that backward is through with it.
"""

from __future__ import annotations

import sys
import time
import weakref
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch
from torch import nn

from mpizero.arrays.trim import give_back
from mpizero.errors import ShardError
from mpizero.shard.agree import Event, agree, agreements, check_same
from mpizero.shard.backward import Backward
from mpizero.shard.calls import Call, hidden_tensors, in_backward, own_modules, running
from mpizero.shard.checks import FROZEN, REPLACED, TOGGLED, TRAINABLE, flags_of, raise_for_replaced, trained_lines
from mpizero.shard.compiled import add_hooks
from mpizero.shard.gathers import BACKWARD, FORWARD, Gathers
from mpizero.shard.reductions import Reductions
from mpizero.shard.spans import Span
from mpizero.shard.trees import cast_floating, tensors_in
from mpizero.shard.unit import Unit, UnitState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpizero.shard.exact import Course
    from mpizero.shard.flat import FlatParams
    from mpizero.shard.gradients import Gradients
    from mpizero.shard.home import Home
    from mpizero.shard.offload import Spill
    from mpizero.shard.policy import Lifetime, Overlap, Precision, Ranks
    from mpizero.shard.window import Window

__all__ = ["Runtime", "runtime_of"]


class Runtime:
    """Drive the units of one model through forward, backward and step."""

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        ranks: Ranks,
        policy: tuple[Lifetime, Precision, Overlap],
        *,
        home: Home,
        window: Window | None = None,
        spill: Spill | None = None,
    ) -> None:
        """Install the hooks. Collective.

        Args:
            model: the root.
            units: its units, the root first.
            ranks: who does what together.
            policy: what the user chose.
            home: where the model lies.
            window: the node's shared memory, where the full parameters lie in it.
            spill: what is moved out of the model's memory.
        """
        self.model, self.units, self.ranks, self.window = model, units, ranks, window
        self.home = home
        self.flats = [flat for unit in units for flat in unit.flats]
        """All flat buffers, in the order of the units."""
        self.comm, self.replicas = ranks.everyone, ranks.replicas
        self.lifetime, self.precision, overlap = policy
        self.exact: Course | None = self.lifetime.exact
        self.ignored: list[tuple[str, nn.Parameter]] = []
        """Parameters that are neither sharded nor reduced, by name."""
        self.spill = spill
        self.updates: Any = None
        """What updates shards while backward goes on; see `optim.early`."""
        self.sync = True
        self.trace: Callable[[str, str], None] | None = None
        """Called with (event, unit's name) at each gather, release and reduction; see `testing.order`."""
        self.observer: Callable[[Span], None] | None = None
        """Told of everything that takes time; see `spans`."""
        self.before_steps: list[Callable[[], None]] = []
        """Called before each step of an optimizer, when no rank reads the parameters any more."""
        self.after_steps: list[Callable[[], None]] = []
        """Called after each step."""
        self._stepping = 0.0
        """When the optimizer's step began."""
        self.names = [unit.name for unit in units]
        self._calls: list[Call] = []
        """The forward calls that have begun and not ended, outermost first."""
        self.gathers = Gathers(overlap.prefetch, lambda unit: self.note("gather", unit), self._gathered)
        policies = self.lifetime, overlap
        transfers = None if spill is None else spill.transfers
        self.reductions = Reductions(
            ranks, units, policies, self._check_agreement, self.observe, on_device=home.on_device, transfers=transfers
        )
        self.trained = 0
        """A checksum of which parameters are trained, once that has changed."""
        self.backward = Backward(self, self.reductions)
        again = overlap.reshard_after_forward
        for unit in units:
            unit.keep = not again if again is not None else unit is units[0]
        modules = {id(unit.module) for unit in units}
        for number, unit in enumerate(units):
            unit.own_modules = list(own_modules(unit.module, modules))
            self._install(number, unit)
        model._mpizero_runtime = self  # type: ignore[assignment]  # noqa: SLF001

    def _install(self, number: int, unit: Unit) -> None:
        add_hooks(
            unit.module,
            lambda args, kwargs: self._before_forward(number, unit, args, kwargs),
            lambda output: self._after_forward(unit, output),
        )
        for flat in unit.flats:
            self._hook_gradients(unit, flat, flat.trained)
        if not unit.cut:
            return
        for module in {module for flat in unit.flats for member in flat.members for module, _ in member.places}:
            module.register_state_dict_pre_hook(lambda _, prefix, __: self._refuse_state(unit, "state_dict", prefix))
            module.register_load_state_dict_pre_hook(
                lambda _, __, prefix, *___: self._refuse_state(unit, "load_state_dict", prefix)
            )

    def _hook_gradients(self, unit: Unit, flat: FlatParams, indices: Any) -> None:
        runtime = weakref.ref(self)  # the garbage collector does not see what these hooks hold

        def ready(unit: Unit, flat: FlatParams, index: int) -> None:
            alive = runtime()
            if alive is not None:
                alive.backward.gradient(unit, flat, index)

        unit.on_gradients(ready, flat, indices)

    # Forward

    def _before_forward(self, number: int, unit: Unit, args: Any, kwargs: Any) -> Any:
        self._forget_interrupted(unit)
        call = Call(unit, sys.exc_info()[1])
        self._calls.append(call)
        if len(self._calls) == 1 and not unit.pins:
            self._start_forward(number, unit)
        if unit.state is UnitState.SHARDED or unit.stale or unit.gathering:
            self.gather(unit, UnitState.GATHERED if unit.state is UnitState.SHARDED else unit.state)
        call.seen_full = unit.full_version()
        # Without grad inside a call with grad: activation checkpointing, which comes again with grad.
        if any(outer.grad for outer in self._calls) and not in_backward() and not unit.pins:
            unit.calls += 1
        if unit.has_frozen and call.grad and self.lifetime.release_parameters:
            self._watch_inputs(call, args, kwargs)
        if self.precision.param is not None:
            args, kwargs = cast_floating((args, kwargs), self.precision.param)
        if call.grad and self.lifetime.release_parameters:
            call.remember(args, kwargs)
        return args, kwargs

    def _start_forward(self, number: int, unit: Unit) -> None:
        """Begin an outermost forward: agree on what comes."""
        if in_backward():  # recomputed: all is agreed
            return
        if self.updates is not None:
            self.updates.check_over("forward")
        self._refresh(Event(kind="forward", unit=number, training=unit.module.training, grad=torch.is_grad_enabled()))

    def _refresh(self, event: Event) -> None:
        """Agree on an event and on mistakes that any rank has found; begin to fill full parameters that are stale."""
        flats = self.flats
        if self.window is not None:
            self._fill_window(self.window)
            self.window.begin_reading(agreements(self.comm) + 1)
        flags = flags_of(flats)
        if self.lifetime.cut:
            rows = self.agree(replace(event, flags=flags))
            flags = int(np.bitwise_or.reduce(rows[:, 0]))
        if flags & REPLACED:
            raise_for_replaced(flats)
        self.mark_stale([flat for flat in flats if flags & (TRAINABLE if flat.trainable else FROZEN)])
        if flags & TOGGLED:  # last: the flags speak of what was trained until now
            self._follow_toggles()
        if not self.lifetime.release_parameters:
            self.gathers.begin(self.units)

    def _fill_window(self, window: Window) -> None:
        """Put what the user has changed, beside the optimizer, into the shared parameters."""
        changed = [flat for flat in self.flats if flat.changed() or flat.stale]
        if changed:
            self._await_readers(window)
            for flat in changed:
                flat.stale = True
                flat.unshard()
            window.stepped()

    def _follow_toggles(self) -> None:
        """Train what the user has unfrozen since, and no longer what was frozen; the same on all ranks.

        Collective where parameters are cut; else the next backward's agreement finds ranks that differ.
        """
        if self.lifetime.cut:
            check_same(self.comm, trained_lines(self.flats))
        for unit in self.units:
            for flat in unit.flats:
                self._hook_gradients(unit, flat, flat.follow())
            unit.count()
        self.trained = crc32("".join(trained_lines(self.flats)).encode()) >> 1

    def _after_forward(self, unit: Unit, output: Any) -> Any:
        call = self._leave(unit)
        if call is None:
            return None
        failed = output is None and sys.exc_info()[1] is not call.error
        needed = in_backward() or any(other.unit is unit for other in self._calls)
        if not failed and call.grad and torch.is_grad_enabled():
            needed |= self._watch_outputs(call, output)
        if not needed:
            self.reshard(unit, release=not (unit.keep and call.grad and not failed))
        if not self._calls:
            self._end_forward(call, failed=failed)
        if not failed and self.lifetime.cut and unit.full_version() != call.seen_full:
            raise ShardError(
                f"parameters of unit {unit.name!r} must be left alone inside forward (got a change in place): the "
                "shards would not see it; change them between steps, through model.parameters()"
            )
        outer = not self._calls and not in_backward()
        return cast_floating(output, self.precision.output) if outer and self.precision.output is not None else None

    def _end_forward(self, call: Call, *, failed: bool) -> None:
        """End an outermost forward: settle gathers that it did not need, and begin those that backward will."""
        if in_backward():
            return
        self.gathers.finish(release=True)
        self.observe("forward", "", call.began)
        if call.grad and not failed and not call.unit.pins and self.lifetime.release_parameters:
            self.gathers.expect(BACKWARD)
        self.end_reading(together=not call.grad and not failed)

    def _forget_interrupted(self, entering: Unit | None = None) -> None:
        """Let go what calls have left that ended by what no hook hears of, such as KeyboardInterrupt."""
        if not in_backward():
            self.backward.give_up()
        if not self._calls or in_backward():
            return
        outermost = self._calls[0].unit
        if not running(outermost.module, besides=int(entering is outermost)):
            self._calls.clear()
            self.hide_all()
            self.end_reading()

    def hide_all(self) -> None:
        """Show all shards, settle what was gathered ahead, and let go what the stage does not keep."""
        self.gathers.finish(release=True)
        for unit in self.units:
            if unit.shown or (unit.keep and unit.released):
                self.reshard(unit)

    def _leave(self, unit: Unit) -> Call | None:
        """End the unit's innermost call, and those inside it that never ended; None if its beginning was not seen."""
        for index in reversed(range(len(self._calls))):
            if self._calls[index].unit is unit:
                call = self._calls[index]
                del self._calls[index:]
                return call
        return None

    def _watch_outputs(self, call: Call, output: Any) -> bool:
        """Find the tensors by whose gradients backward enters the unit; return whether it must stay gathered."""
        unit = call.unit
        outputs = found = tensors_in(output)
        if self.lifetime.release_parameters:
            found = [*found, *call.added(), *hidden_tensors(unit.own_modules)]
        wanted = {id(tensor): tensor for tensor in found if tensor.requires_grad}
        seen = self.version(unit)
        for tensor in wanted.values():
            tensor.register_hook(lambda _, seen=seen: self.backward.enter(call, seen))
        return not wanted and not outputs and bool(unit.trainable) and self.lifetime.release_parameters

    def _watch_inputs(self, call: Call, args: Any, kwargs: Any) -> None:
        """Release a unit with frozen parameters once backward is through it: their gradients do not tell when."""
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if inputs:
            torch.autograd.graph.register_multi_grad_hook(inputs, lambda _: self.backward.passed(call))

    def before_step(self) -> None:
        """Wait until no rank reads the parameters that the optimizer is about to write."""
        self._stepping = time.perf_counter()
        self._forget_interrupted()
        if self.updates is not None:
            self.updates.wait()  # who is about to write, or to look, must not meet them
        if self.window is not None:
            self._await_readers(self.window)
        for call in self.before_steps:
            call()

    def after_step(self) -> None:
        """Have the full parameters filled anew: at once where the node shares them, else with the next forward."""
        trainable = [flat for flat in self.flats if flat.trainable]
        for flat in trainable:
            flat.source.stepped()
        self.mark_stale(trainable)
        self.refill(trainable)
        self.observe("step", "", self._stepping)
        for call in list(self.after_steps):
            call()

    def refill(self, flats: list[FlatParams]) -> None:
        """Fill the node's shared parameters anew; elsewhere the next forward finds that buffers have changed."""
        if self.window is not None:
            self.mark_stale(flats)
            for flat in flats:
                flat.unshard()
            self.window.stepped()

    def mark_stale(self, flats: list[FlatParams]) -> None:
        """Make full parameters be filled anew before they are used again."""
        for flat in flats:
            flat.stale = flat.apart

    def check_synced(self, what: str) -> None:
        """Raise ShardError if `no_sync` has kept back gradients that were not reduced yet."""
        if self.exact is not None:
            self.exact.check_closed(what)
        self.backward.drop_zeroed()
        if any(gradients.unsynced is not None for gradients in self.gradients()):
            raise ShardError(
                f"{what} must follow a backward outside no_sync (got gradients of this rank alone): leave no_sync for "
                "the last micro-batch"
            )

    def check_changeable(self, what: str) -> None:
        """Raise ShardError for a change of gradients that comes too late: they are used while backward goes on."""
        if self.updates is not None:
            raise ShardError(
                f"{what} must come before the update, when all gradients are there (got an optimizer of "
                "mpizero.offloaded with during_backward=True): build it without"
            )

    def check_together(self, kind: str, extra: Any = None) -> Any:
        """Agree that all ranks make the call `kind`; return what `agree` does, None on one rank."""
        self._forget_interrupted()
        if self.updates is not None and kind in {"save", "full_parameters", "check_replicas"}:
            self.updates.check_over(kind)
        return self.agree(Event(kind=kind), extra) if self.comm.size > 1 else None

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Hold every unit gathered and its full parameters shown."""
        self._forget_interrupted()
        if self._calls or in_backward():
            raise ShardError("unsharded must be entered outside forward and backward (got a call from inside)")
        if self.updates is not None:
            self.updates.check_over("unsharded")
        try:
            self._refresh(Event(kind="unsharded"))
        except BaseException:
            self.end_reading()
            raise
        for unit in self.units:
            self.gather(unit, UnitState.GATHERED)
            unit.pins += 1
        self.gathers.finish(release=False)
        before = [unit.full_version() for unit in self.units]
        try:
            yield
        finally:
            changed = self.lifetime.cut and before != [unit.full_version() for unit in self.units]
            for unit in self.units:
                unit.pins -= 1
                self.reshard(unit)
            self.end_reading(together=sys.exc_info()[1] is None)
            if changed:
                self.mark_stale(self.flats)
        if changed:
            raise ShardError(
                "parameters must be left alone inside unsharded (got a change in place): the shards would not see it; "
                "change values before mpizero.shard(...)"
            )

    @property
    def pinned(self) -> bool:
        """Return whether full parameters are held by `unsharded`."""
        return any(unit.pins for unit in self.units)

    def _check_agreement(self) -> None:
        self.backward.check_agreement()

    def agree(self, event: Event, extra: Any = None) -> Any:
        """Agree on an event; see `agree.agree`. Collective."""
        start = time.perf_counter()
        said = agree(self.comm, event, self.names, extra)
        self.observe("agree", "", start)
        return said

    def end_reading(self, *, together: bool = False) -> None:
        """Tell the node that this rank reads the shared parameters no longer, unless it does.

        Args:
            together: whether to wait for the other ranks where shards are the shared memory itself: what the user may
                do next, a write in place, would reach them.
        """
        if self.window is not None and not (self._calls or self.backward.running or self.pinned):
            self.window.end_reading()
            if together and any(flat.aliased for flat in self.flats):
                self._await_readers(self.window)

    def _await_readers(self, window: Window) -> None:
        start = time.perf_counter()
        window.await_readers(agreements(self.comm))
        self.observe("agree", "", start)

    def version(self, unit: Unit) -> int:
        """Return a number that grows with every change of a unit's values that this rank can know of."""
        return unit.version() + (0 if self.window is None else self.window.generation())

    def gradients(self) -> list[Gradients]:
        """Return the gradients of all flat buffers with something to train."""
        return [gradients for unit in self.units for gradients in unit.gradients]

    def gather(self, unit: Unit, state: UnitState) -> None:
        """Have a unit's full parameters there and shown. Collective where they have to be gathered."""
        if not unit.stale:
            self.note("show", unit)
        self.gathers.need(unit, BACKWARD if in_backward() else FORWARD)
        unit.show(state)

    def reshard(self, unit: Unit, *, release: bool = True) -> None:
        """Show a unit's shards again and, where the stage says so, let its full parameters go."""
        release = release and self.lifetime.release_parameters and not unit.pins
        self.note("release" if release else "hide", unit)
        unit.reshard(release=release)
        if release and self.spill is not None and self.spill.files and not self.home.on_device:
            give_back()  # memory is short where so much is on a disk

    def _refuse_state(self, unit: Unit, call: str, prefix: str) -> None:
        remedy = "call it inside `with mpizero.unsharded(model):`, entered by all ranks"
        if call == "load_state_dict":
            remedy = "load before mpizero.shard(...), on rank 0 at least, whose values all ranks start from"
        elif unit.pins:
            return
        raise ShardError(
            f"{call} of a sharded model must find parameters whole (got this rank's part of {prefix or unit.name!r}): "
            f"{remedy}"
        )

    def _gathered(self, unit: Unit, began: float, waited: float) -> None:
        """Be told of a gather that is over: when it began, and when the caller began to wait for it."""
        nbytes = sum(flat.full.numel() * flat.full.element_size() for flat in unit.flats)
        self.observe("wait", unit.name, waited)
        self.observe("gather", unit.name, began, unit.ended, nbytes)

    def observe(self, kind: str, unit: str, start: float, stop: float | None = None, nbytes: int = 0) -> None:
        """Tell the profile, if there is one, of something that took from `start` to `stop` (None: to now)."""
        observer = self.observer
        if observer is not None:
            observer(Span(kind, unit, start, time.perf_counter() if stop is None else stop, nbytes))

    def note(self, event: str, unit: Unit) -> None:
        """Tell whoever traces the model of an event."""
        if self.trace is not None:
            self.trace(event, unit.name)


def runtime_of(model: nn.Module) -> Runtime:
    """Return the runtime that `shard` gave to `model`; raise ShardError for a model that was not sharded."""
    runtime = getattr(model, "_mpizero_runtime", None)
    if not isinstance(runtime, Runtime):
        raise ShardError(
            f"model must be one that mpizero.shard was called on (got {type(model).__name__}): pass the model itself"
        )
    return runtime
