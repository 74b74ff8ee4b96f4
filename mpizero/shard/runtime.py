"""The life of a sharded model: what happens at each forward, backward and optimizer step.

[Note: life of a unit] At stage 3 a unit's parameters are gathered in its pre-forward hook and released in its forward
hook; gathered again when the gradient of its output is known, and released when the gradients of all its parameters
are. At stages 0 to 2 the same hooks find the parameters there, unless a step has made them stale. Gradients leave
autograd one parameter at a time; a unit is reduced as soon as its own are complete (stage 1: at the end of the backward),
always in the reverse order of the units, so that all ranks reduce in one order whichever parameters they used. What did
not arrive counts as zero; a parameter that no rank used keeps `grad=None`, as in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from mpizero.errors import ShardError
from mpizero.shard.agree import Event, agree
from mpizero.shard.flat import FlatParams
from mpizero.shard.policy import Lifetime, Precision
from mpizero.shard.trees import cast_floating, tensors_in
from mpizero.shard.unit import Unit, UnitState

__all__ = ["Runtime", "runtime_of"]


class Runtime:
    """Drive the units of one model through forward, backward and step."""

    def __init__(self, model: nn.Module, units: list[Unit], comm: Any, lifetime: Lifetime, precision: Precision) -> None:
        self.model, self.units, self.comm = model, units, comm
        self.lifetime, self.precision = lifetime, precision
        self.sync = True
        self.trace: Callable[[str, str], None] | None = None
        """Called with (event, unit's name) at each gather, release and reduction; for tests and profiles."""
        self._names = [unit.name for unit in units]
        self._order = [unit for unit in reversed(units) if unit.trainable]
        self._depth = 0
        self._in_backward = False
        self._next = 0
        self._used = np.zeros(sum(unit.parameters for unit in units), np.uint8)
        self._offsets: dict[int, int] = {}
        for flat in self._trainable():
            self._offsets[id(flat)] = sum(len(other.shards) for other in self._trainable()[: len(self._offsets)])
        for number, unit in enumerate(units):
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
                module.register_state_dict_pre_hook(lambda _, prefix, __: self._refuse_state(unit, "state_dict", prefix))
                module.register_load_state_dict_pre_hook(
                    lambda _, __, prefix, *___: self._refuse_state(unit, "load_state_dict", prefix)
                )

    # Forward

    def _before_forward(self, number: int, unit: Unit, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        if self._depth == 1 and not unit.pins:
            self._start_forward(number, unit)
        if unit.state is UnitState.SHARDED:
            self._gather(unit, UnitState.GATHERED)
        if unit.has_frozen and torch.is_grad_enabled() and self.lifetime.release_parameters:
            self._watch_inputs(unit, args, kwargs)
        dtype = self.precision.param
        return (args, kwargs) if dtype is None else cast_floating((args, kwargs), dtype)

    def _start_forward(self, number: int, unit: Unit) -> None:
        """Begin an outermost forward: forget a backward that an exception cut short, and agree on what comes."""
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001  (recomputed inside backward: all is agreed)
            return
        if self._in_backward:
            self._reset()
        self._refresh(Event(kind="forward", unit=number, training=unit.module.training, grad=torch.is_grad_enabled()))

    def _refresh(self, event: Event) -> None:
        """Agree on an event and on which full parameters are stale, on any rank."""
        changed = {flat.trainable for unit in self.units for flat in unit.flats if flat.changed()}
        bits = int(True in changed) | int(False in changed) << 1
        if self.lifetime.cut:
            rows = agree(self.comm, replace(event, stale=bits), self._names)
            bits = int(np.bitwise_or.reduce(rows[:, 0]))
        for kind in (True, False):
            if bits & (1 if kind else 2):
                self.mark_stale(trainable=kind)

    def _after_forward(self, unit: Unit, output: Any) -> None:
        self._depth -= 1
        if unit.state is UnitState.BACKWARD:  # recomputed by activation checkpointing: backward still needs it
            return
        if torch.is_grad_enabled():
            wanted = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            seen = unit.version()
            for tensor in wanted:
                tensor.register_hook(lambda _, seen=seen: self._before_backward(unit, seen))
            if not wanted and unit.trainable and output is not None and not tensors_in(output):
                return  # no tensor is known by which to tell when backward comes: stay gathered
        self._reshard(unit)

    def _watch_inputs(self, unit: Unit, args: Any, kwargs: Any) -> None:
        """Release a unit with frozen parameters once backward is through it: their gradients do not tell when."""
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if inputs:
            torch.autograd.graph.register_multi_grad_hook(inputs, lambda _: self._passed(unit))

    def _passed(self, unit: Unit) -> None:
        if unit.state is UnitState.BACKWARD and unit.missing <= 0:
            self._reshard(unit)

    # Backward

    def _before_backward(self, unit: Unit, seen: int) -> None:
        unit.check_unchanged(seen)
        if not self._in_backward:
            self._in_backward, self._next = True, 0
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)  # noqa: SLF001
            if self.comm.size > 1 and (self.sync or self.lifetime.release_parameters):
                agree(self.comm, Event(kind="backward", grad=self.sync), self._names)
        if unit.state is not UnitState.BACKWARD:
            self._gather(unit, UnitState.BACKWARD)

    def _gradient(self, unit: Unit, flat: FlatParams, index: int) -> None:
        """Take one gradient; when it is the unit's last, release the parameters and reduce what is next in order."""
        flat.keep(index, sync=self.sync)
        self._used[self._offsets[id(flat)] + index] = 1
        unit.missing -= 1
        if unit.missing > 0:
            return
        if not unit.has_frozen:
            self._reshard(unit)
        if self.sync and not self.lifetime.reduce_at_end:
            while self._next < len(self._order) and self._complete(self._order[self._next]):
                self._reduce_next()

    def _complete(self, unit: Unit) -> bool:
        return all(len(flat.arrived) == len(flat.members) for flat in unit.trainable)

    def _reduce_next(self) -> None:
        unit = self._order[self._next]
        self._next += 1
        self._note("reduce", unit)
        unit.reduce()

    def _end_of_backward(self) -> None:
        """Reduce what is left, release everything, and give used parameters their gradients."""
        for unit in self.units:
            if unit.state is UnitState.BACKWARD:
                self._reshard(unit)
        self._in_backward = False
        if not self.sync:
            return
        while self._next < len(self._order):
            self._reduce_next()
        used = self._used.copy()
        self._used[:] = 0
        if self.comm.size > 1:
            used = agree(self.comm, Event(kind="end of backward"), self._names, used)[:, 1:].max(axis=0)
        for flat in self._trainable():
            start = self._offsets[id(flat)]
            flat.attach(used[start : start + len(flat.shards)].astype(bool).tolist())

    # Steps and other calls

    def mark_stale(self, *, trainable: bool = True) -> None:
        """Make the trainable (or the frozen) full parameters be filled anew before they are used again."""
        for unit in self.units:
            for flat in unit.flats:
                if flat.trainable == trainable:
                    flat.stale = flat.lifetime.cut or not flat.aliased

    def has_unsynced(self) -> bool:
        """Return whether gradients of a `no_sync` backward have not been reduced yet."""
        return any(flat.unsynced is not None for flat in self._trainable())

    def check_together(self, kind: str) -> None:
        """Agree that all ranks make the call `kind`; see `agree`."""
        if self.comm.size > 1:
            agree(self.comm, Event(kind=kind), self._names)

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Hold every unit gathered and its full parameters shown."""
        if self._depth or self._in_backward:
            raise ShardError("unsharded must be entered outside forward and backward (got a call from inside)")
        self._refresh(Event(kind="unsharded"))
        for unit in self.units:
            self._gather(unit, UnitState.GATHERED)
            unit.pins += 1
        before = [param._version for param in self._full_params()]  # noqa: SLF001
        try:
            yield
        finally:
            changed = self.lifetime.cut and before != [param._version for param in self._full_params()]  # noqa: SLF001
            for unit in self.units:
                unit.pins -= 1
                self._reshard(unit)
        if changed:
            self.mark_stale()
            raise ShardError(
                "parameters must be left alone inside unsharded (got a change in place): the shards would not see it; "
                "change values before mpizero.shard(...)"
            )

    def _trainable(self) -> list[FlatParams]:
        return [flat for unit in self.units for flat in unit.trainable]

    def _full_params(self) -> list[nn.Parameter]:
        return [param for unit in self.units for flat in unit.flats for param in flat.full_params]

    def _gather(self, unit: Unit, state: UnitState) -> None:
        self._note("gather" if any(not flat.live or flat.stale for flat in unit.flats) else "show", unit)
        unit.gather(state)

    def _reshard(self, unit: Unit) -> None:
        self._note("release" if self.lifetime.release_parameters else "hide", unit)
        unit.reshard()

    def _reset(self) -> None:
        """Forget an unfinished backward."""
        self._in_backward, self._next = False, 0
        self._used[:] = 0
        for unit in self.units:
            for flat in unit.trainable:
                flat.incoming = None
                flat.arrived.clear()
            if unit.state is not UnitState.SHARDED:
                unit.reshard()

    def _refuse_state(self, unit: Unit, call: str, prefix: str) -> None:
        if unit.pins:
            return
        raise ShardError(
            f"{call} of a sharded model must be called inside `with mpizero.unsharded(model):` on all ranks "
            f"(got {prefix or unit.name!r} with this rank's shards only)"
        )

    def _note(self, event: str, unit: Unit) -> None:
        if self.trace is not None:
            self.trace(event, unit.name)


def runtime_of(model: nn.Module) -> Runtime:
    """Return the runtime that `shard` gave to `model`; raise ShardError for a model that was not sharded."""
    runtime = getattr(model, "_mpizero_runtime", None)
    if not isinstance(runtime, Runtime):
        raise ShardError(f"model must be one that mpizero.shard was called on (got a plain {type(model).__name__})")
    return runtime
