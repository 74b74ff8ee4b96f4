"""The life of a sharded model: what happens at each forward, backward and optimizer step.

[Note: life of a unit] At stage 3 a unit's parameters are gathered in its pre-forward hook and released in its forward
hook; gathered again when the gradient of its output is known, and released when the gradients of all its parameters
are. At stages 0 to 2 full parameters live on and are filled anew, all at once, by the first forward after a step. What
a forward inside backward gathers (activation checkpointing recomputes) stays until that backward is through with it.

[Note: order of reductions] Collectives must come in the same order on all ranks, also where ranks used different
parameters. Stages 0 and 2 reduce a unit as soon as its gradients are complete, but always in the reverse order of the
units; stage 1 at the end of the backward. At stage 3, where gathers come in between, completeness is not asked: before
a gather all units are reduced whose calls have all begun their backward and that do not contain the gathered one.
What did not arrive counts as zero; what arrives after its unit was reduced is reduced again at the end of the backward,
if any rank has such. A parameter that no rank used keeps `grad=None`, as in plain torch.
"""

from __future__ import annotations

import sys
import weakref
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from mpizero.errors import ShardError
from mpizero.shard.agree import Event, agree
from mpizero.shard.calls import Call, hidden_tensors, in_backward, own_modules
from mpizero.shard.checks import FROZEN, REPLACED, TOGGLED, TRAINABLE, flags_of, raise_for_flags
from mpizero.shard.trees import cast_floating, tensors_in
from mpizero.shard.unit import Unit, UnitState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpizero.shard.flat import FlatParams
    from mpizero.shard.policy import Lifetime, Precision

__all__ = ["Runtime", "runtime_of"]

USED, LATE = 1, 2
"""What a rank says of a parameter at the end of a backward, as bits."""


class Runtime:
    """Drive the units of one model through forward, backward and step."""

    def __init__(
        self, model: nn.Module, units: list[Unit], comm: Any, lifetime: Lifetime, precision: Precision
    ) -> None:
        self.model, self.units, self.comm = model, units, comm
        self.lifetime, self.precision = lifetime, precision
        self.sync = True
        self.trace: Callable[[str, str], None] | None = None
        """Called with (event, unit's name) at each gather, release and reduction; for tests and profiles."""
        self._names = [unit.name for unit in units]
        self._calls: list[Call] = []
        """The forward calls that have begun and not ended, outermost first."""
        self._backward = 0
        """The number of the latest backward."""
        self._end: Callable[[], Any] | None = None
        """A weak reference to what autograd calls at the end of the running backward: it dies if backward raises."""
        self._entered: list[Unit] = []
        self._pending: list[Unit] = []
        """The units that the running backward has yet to reduce, in the order for stages 0 to 2."""
        self._used = np.zeros(sum(unit.parameters for unit in units), np.uint8)
        self._offsets: dict[int, int] = {}
        for flat in self._trainable():
            self._offsets[id(flat)] = sum(len(other.shards) for other in self._trainable()[: len(self._offsets)])
        modules = {id(unit.module) for unit in units}
        for number, unit in enumerate(units):
            unit.own_modules = list(own_modules(unit.module, modules))
            self._install(number, unit)
        model._mpizero_runtime = self  # type: ignore[assignment]  # noqa: SLF001

    def _install(self, number: int, unit: Unit) -> None:
        unit.module.register_forward_pre_hook(
            lambda _, args, kwargs: self._before_forward(number, unit, args, kwargs), with_kwargs=True, prepend=True
        )
        unit.module.register_forward_hook(lambda _, __, output: self._after_forward(unit, output), always_call=True)
        unit.on_gradients(lambda flat, index: self._gradient(unit, flat, index))
        for module in {module for flat in unit.flats for member in flat.members for module, _ in member.places}:
            if unit.cut:
                module.register_state_dict_pre_hook(
                    lambda _, prefix, __: self._refuse_state(unit, "state_dict", prefix)
                )
                module.register_load_state_dict_pre_hook(
                    lambda _, __, prefix, *___: self._refuse_state(unit, "load_state_dict", prefix)
                )

    # Forward

    def _before_forward(self, number: int, unit: Unit, args: Any, kwargs: Any) -> Any:
        call = Call(unit, sys.exc_info()[1])
        self._calls.append(call)
        if len(self._calls) == 1 and not unit.pins:
            self._start_forward(number, unit)
        if unit.state is UnitState.SHARDED or unit.stale:
            self._gather(unit, UnitState.GATHERED if unit.state is UnitState.SHARDED else unit.state)
        call.seen_full = unit.full_version()
        outer_grad = any(outer.grad for outer in self._calls)
        if (call.grad or outer_grad) and not in_backward() and not unit.pins:  # without grad within grad: recomputed
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
        self._refresh(Event(kind="forward", unit=number, training=unit.module.training, grad=torch.is_grad_enabled()))

    def _refresh(self, event: Event) -> None:
        """Agree on an event, on mistakes that any rank has found, and on which full parameters are stale."""
        flats = [flat for unit in self.units for flat in unit.flats]
        flags = flags_of(flats)
        if self.lifetime.cut:
            rows = self._agree(replace(event, flags=flags))
            flags = int(np.bitwise_or.reduce(rows[:, 0]))
        if flags & (REPLACED | TOGGLED):
            raise_for_flags(flags, flats)
        for bit, trainable in ((TRAINABLE, True), (FROZEN, False)):
            if flags & bit:
                self.mark_stale(trainable=trainable)
        if not self.lifetime.release_parameters:
            for unit in self.units:
                if unit.stale:
                    self._note("gather", unit)
                    unit.fill()

    def _after_forward(self, unit: Unit, output: Any) -> None:
        call = self._leave(unit)
        if call is None:
            return
        failed = output is None and sys.exc_info()[1] is not call.error
        needed = in_backward() or any(other.unit is unit for other in self._calls)
        if not failed and call.grad and torch.is_grad_enabled():
            needed |= self._watch_outputs(call, output)
        if not needed:
            self._reshard(unit)
        if not failed and self.lifetime.cut and unit.full_version() != call.seen_full:
            raise ShardError(
                f"parameters of unit {unit.name!r} must be left alone inside forward (got a change in place): the "
                "shards would not see it; change them between steps, through model.parameters()"
            )

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
        found = tensors_in(output)
        if self.lifetime.release_parameters:
            found += [*call.added(), *hidden_tensors(unit.own_modules)]
        wanted = {id(tensor): tensor for tensor in found if tensor.requires_grad}
        seen = unit.version()
        for tensor in wanted.values():
            tensor.register_hook(lambda _, seen=seen: self._before_backward(call, seen))
        return not wanted and not tensors_in(output) and bool(unit.trainable) and self.lifetime.release_parameters

    def _watch_inputs(self, call: Call, args: Any, kwargs: Any) -> None:
        """Release a unit with frozen parameters once backward is through it: their gradients do not tell when."""
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if inputs:
            torch.autograd.graph.register_multi_grad_hook(inputs, lambda _: self._passed(call))

    def _passed(self, call: Call) -> None:
        if call.backward == self._backward and not call.passed:
            call.passed = True
            call.unit.open -= 1
            self._release_if_done(call.unit)

    def _release_if_done(self, unit: Unit) -> None:
        if unit.state is UnitState.BACKWARD and unit.missing <= 0 and unit.open <= 0:
            self._reshard(unit)

    # Backward

    def _before_backward(self, call: Call, seen: int) -> None:
        unit = call.unit
        unit.check_unchanged(seen)
        if torch.is_grad_enabled() and self.lifetime.release_parameters and not unit.pins:
            raise ShardError(
                "second derivatives (create_graph=True) must be taken at stages 0 to 2, or inside "
                f"`with mpizero.unsharded(model):` (got stage 3): unit {unit.name!r} lets its parameters go"
            )
        self._begin_backward()
        if call.backward != self._backward:
            call.backward, call.passed = self._backward, False
            unit.entered += 1
            unit.open += unit.has_frozen
        if unit not in self._entered:
            if self.lifetime.release_parameters and self.sync:
                self._reduce_before(unit)
            self._entered.append(unit)
        if unit.state is not UnitState.BACKWARD:
            self._gather(unit, UnitState.BACKWARD)

    def _begin_backward(self) -> None:
        """Begin a backward unless it has begun."""
        if self._end is not None:
            return

        def end() -> None:
            self._end_of_backward()

        self._backward += 1
        self._end = weakref.ref(end, self._given_up)
        self._pending = [unit for unit in reversed(self.units) if unit.trainable]
        self._drop_zeroed()
        torch.autograd.Variable._execution_engine.queue_callback(end)  # noqa: SLF001
        del end  # from here on autograd's alone
        if self.comm.size > 1 and (self.sync or self.lifetime.release_parameters):
            self._agree(Event(kind="backward", grad=self.sync))

    @torch.no_grad()
    def _gradient(self, unit: Unit, flat: FlatParams, index: int) -> None:
        """Take one gradient; when it is the unit's last, release the parameters and reduce what is due."""
        self._begin_backward()
        flat.keep(index, sync=self.sync)
        self._used[self._offsets[id(flat)] + index] = USED
        unit.missing -= 1
        self._release_if_done(unit)
        if self.sync and self.lifetime.reduce_when_complete:
            while self._pending and self._pending[0].complete:
                self._reduce(self._pending[0])

    def _reduce_before(self, gathered: Unit) -> None:
        """Reduce what is due before a unit is gathered in backward. See [Note: order of reductions]."""
        for unit in list(self._entered):
            contains = id(gathered.module) in unit.inside
            if unit in self._pending and not contains and unit.entered >= unit.calls:
                self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        if unit in self._pending:
            self._pending.remove(unit)
        self._note("reduce", unit)
        unit.reduce()

    @torch.no_grad()
    def _end_of_backward(self) -> None:
        """Release everything, reduce what is left, and give used parameters their gradients."""
        self._end = None
        self._entered.clear()
        for unit in self.units:
            unit.forget_backward()
            if unit.state is not UnitState.SHARDED:
                self._reshard(unit)
        if not self.sync:
            for flat in self._trainable():
                flat.hold_place()
            return
        while self._pending:
            self._reduce(self._pending[0])
        said = self._what_all_say()
        for flat in self._trainable():
            flat.attach((said[self._span(flat)] & USED).astype(bool).tolist())
        for unit in reversed(self.units):
            if any((said[self._span(flat)] & LATE).any() for flat in unit.trainable):
                self._reduce(unit)

    def _what_all_say(self) -> Any:
        """Return, for every parameter, what any rank says of it, and begin anew."""
        for flat in self._trainable():
            if flat.incoming is not None:
                self._used[self._span(flat)] |= LATE
        said, self._used = self._used, np.zeros_like(self._used)
        if self.comm.size > 1:
            said = np.bitwise_or.reduce(self._agree(Event(kind="end of backward"), said)[:, 1:], axis=0)
        return said

    def _given_up(self, end: Callable[[], Any]) -> None:
        """Be told that autograd has dropped its end of a backward, after it or instead of it."""
        if self._end is end:
            self._forget_backward()

    def _forget_backward(self) -> None:
        """Let go what a backward that raised has left, at once: the user sees parameters in its except block."""
        self._end = None
        self._entered.clear()
        for unit in self.units:
            unit.forget_backward()
            for flat in unit.trainable:
                flat.incoming = None
                flat.arrived.clear()
                self._used[self._span(flat)] = [USED if index in flat.kept else 0 for index in range(len(flat.shards))]
            if unit.state is not UnitState.SHARDED:
                unit.reshard()

    # Steps and other calls

    def mark_stale(self, *, trainable: bool = True) -> None:
        """Make the trainable (or the frozen) full parameters be filled anew before they are used again."""
        for unit in self.units:
            for flat in unit.flats:
                if flat.trainable == trainable:
                    flat.stale = flat.lifetime.cut or not flat.aliased

    def check_synced(self, what: str) -> None:
        """Raise ShardError if `no_sync` has kept back gradients that were not reduced yet."""
        self._drop_zeroed()
        if any(flat.unsynced is not None for flat in self._trainable()):
            raise ShardError(
                f"{what} must follow a backward outside no_sync (got gradients of this rank alone): leave no_sync for "
                "the last micro-batch"
            )

    def check_together(self, kind: str) -> None:
        """Agree that all ranks make the call `kind`; see `agree`."""
        if self.comm.size > 1:
            self._agree(Event(kind=kind))

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Hold every unit gathered and its full parameters shown."""
        if self._calls or in_backward():
            raise ShardError("unsharded must be entered outside forward and backward (got a call from inside)")
        self._refresh(Event(kind="unsharded"))
        for unit in self.units:
            self._gather(unit, UnitState.GATHERED)
            unit.pins += 1
        before = [unit.full_version() for unit in self.units]
        try:
            yield
        finally:
            changed = self.lifetime.cut and before != [unit.full_version() for unit in self.units]
            for unit in self.units:
                unit.pins -= 1
                self._reshard(unit)
            if changed:
                self.mark_stale()
                self.mark_stale(trainable=False)
        if changed:
            raise ShardError(
                "parameters must be left alone inside unsharded (got a change in place): the shards would not see it; "
                "change values before mpizero.shard(...)"
            )

    @property
    def pinned(self) -> bool:
        """Return whether full parameters are held by `unsharded`."""
        return any(unit.pins for unit in self.units)

    def _agree(self, event: Event, extra: Any = None) -> Any:
        return agree(self.comm, event, self._names, extra)

    def _drop_zeroed(self) -> None:
        for flat in self._trainable():
            for index in flat.drop_zeroed():
                self._used[self._offsets[id(flat)] + index] = 0

    def _span(self, flat: FlatParams) -> slice:
        start = self._offsets[id(flat)]
        return slice(start, start + len(flat.shards))

    def _trainable(self) -> list[FlatParams]:
        return [flat for unit in self.units for flat in unit.trainable]

    def _gather(self, unit: Unit, state: UnitState) -> None:
        self._note("gather" if unit.stale else "show", unit)
        unit.gather(state)

    def _reshard(self, unit: Unit) -> None:
        self._note("release" if self.lifetime.release_parameters and not unit.pins else "hide", unit)
        unit.reshard()

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

    def _note(self, event: str, unit: Unit) -> None:
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
