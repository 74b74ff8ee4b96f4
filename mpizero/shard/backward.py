"""One backward of a sharded model at a time: units are entered, gradients arrive, are reduced and attached.

[Note: order of reductions] Collectives must come in the same order on all ranks, also where ranks used different
parameters. Where full parameters live on, a unit is reduced as soon as its gradients are complete, but always in the
reverse order of the units. Where gathers come in between, completeness is not asked: when backward enters a unit, all
units are reduced whose calls have all begun their backward and that do not contain the one entered. What did not arrive
counts as zero; what arrives after its unit was reduced is reduced again at the end of the backward, if any rank has
such. A parameter that no rank used keeps `grad=None`, as in plain torch. A reduction is begun and goes on while
backward computes; the end of the backward waits for all of them (see `reductions`).
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from mpizero.errors import ShardError
from mpizero.shard.agree import Agreement, Event, agreements
from mpizero.shard.unit import Unit, UnitState

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpizero.shard.calls import Call
    from mpizero.shard.exact import Course
    from mpizero.shard.flat import FlatParams
    from mpizero.shard.gradients import Buffer, Gradients
    from mpizero.shard.home import Home
    from mpizero.shard.policy import Lifetime
    from mpizero.shard.reductions import Reductions
    from mpizero.shard.window import Window

__all__ = ["Backward"]

USED, LATE = 1, 2
"""What a rank says of a parameter at the end of a backward, as bits."""


class Driver(Protocol):
    """Be the runtime whose backwards these are; see `Runtime`."""

    units: list[Unit]
    flats: list[FlatParams]
    names: list[str]
    comm: Any
    lifetime: Lifetime
    window: Window | None
    exact: Course | None
    home: Home
    sync: bool
    trained: int

    def gradients(self) -> list[Gradients]:
        """Return the gradients of all flat buffers with something to train."""
        ...

    def version(self, unit: Unit) -> int:
        """Return a number that grows with every change of a unit's values."""
        ...

    def gather(self, unit: Unit, state: UnitState) -> None:
        """Have a unit's full parameters there and shown."""
        ...

    def reshard(self, unit: Unit, *, release: bool = True) -> None:
        """Show a unit's shards again."""
        ...

    def hide_all(self) -> None:
        """Show all shards again, and let go what the stage does not keep."""
        ...

    def agree(self, event: Event, extra: Any = None) -> Any:
        """Agree on an event."""
        ...

    def end_reading(self, *, together: bool = False) -> None:
        """Tell the node that this rank reads the shared parameters no longer."""
        ...

    def observe(self, kind: str, unit: str, start: float, stop: float | None = None, nbytes: int = 0) -> None:
        """Tell the profile of something that took time."""
        ...

    def note(self, event: str, unit: Unit) -> None:
        """Tell whoever traces the model of an event."""
        ...


class Backward:
    """Drive the units of one model through its backwards."""

    def __init__(self, runtime: Driver, reductions: Reductions) -> None:
        """Know the model's units; none has been entered."""
        self._runtime, self._reductions = runtime, reductions
        self._number = 0
        """The number of the latest backward."""
        self._end: Callable[[], Any] | None = None
        """A weak reference to what autograd calls at the end of the running backward: it dies if backward raises."""
        self._giving_up = threading.RLock()
        self._began = 0.0
        self._entered: dict[Unit, None] = {}
        """The units that it has come to, in their order."""
        self._pending: list[Unit] = []
        """The units that the running backward has yet to reduce, in the order where full parameters live on."""
        self._used = np.zeros(sum(unit.parameters for unit in runtime.units), np.uint8)
        self._offsets: dict[int, int] = {}
        position = 0
        for flat in runtime.flats:
            self._offsets[id(flat)] = position
            position += len(flat.shards)
        self.watch: Any = None
        """Who looks at the gradients, if anybody does."""
        self._agreement: Agreement | None = None
        """What ranks have told each other at the beginning of the backward, not looked at yet."""

    @property
    def running(self) -> bool:
        """Return whether a backward has begun and not ended."""
        return self._end is not None

    def enter(self, call: Call, seen: int) -> None:
        """Come to a call of a unit, whose forward saw version `seen` of it: gather the unit, reduce what is due."""
        unit = call.unit
        unit.check_unchanged(self._runtime.version(unit), seen)
        if torch.is_grad_enabled() and self._runtime.lifetime.release_parameters and not unit.pins:
            raise ShardError(
                "second derivatives (create_graph=True) must be taken at stages 0 to 2, or inside "
                f"`with mpizero.unsharded(model):` (got stage 3): unit {unit.name!r} lets its parameters go"
            )
        self._begin()
        if call.backward != self._number:
            call.backward, call.passed = self._number, False
            unit.entered += 1
            unit.open += unit.has_frozen
            unit.expect_gradients()
        if unit not in self._entered:
            if self._runtime.lifetime.release_parameters and self._runtime.sync:
                self._reduce_before(unit)
            self._entered[unit] = None
        if unit.state is not UnitState.BACKWARD:
            if self._runtime.lifetime.release_parameters:
                self.check_agreement()
            self._runtime.gather(unit, UnitState.BACKWARD)

    def _begin(self) -> None:
        """Begin a backward unless it has begun."""
        if self._end is not None:
            return

        def end() -> None:
            self._finish()

        if self._runtime.exact is not None:
            self._runtime.exact.begin_backward(sync=self._runtime.sync)
        self._number += 1
        self._began = time.perf_counter()
        self._end = weakref.ref(end, self._given_up)
        self._pending = [unit for unit in reversed(self._runtime.units) if unit.trainable]
        self.drop_zeroed()
        if self.watch is not None:
            self.watch.begin()
        torch.autograd.Variable._execution_engine.queue_callback(end)  # noqa: SLF001
        del end  # from here on autograd's alone
        if self._runtime.window is not None:
            self._runtime.window.begin_reading(agreements(self._runtime.comm) + self._runtime.sync)
        if self._runtime.comm.size > 1 and (self._runtime.sync or self._runtime.lifetime.release_parameters):
            self._agreement = Agreement(
                self._runtime.comm,
                Event(kind="backward", grad=self._runtime.sync, unit=self._runtime.trained),
                self._runtime.names,
            )

    def check_agreement(self) -> None:
        """Look at what the others said they were beginning, before anything is waited for that depends on it."""
        if self._agreement is not None:
            agreement, self._agreement = self._agreement, None
            start = time.perf_counter()
            agreement.check()
            self._runtime.observe("agree", "", start)

    def gradient(self, unit: Unit, flat: FlatParams, index: int) -> None:
        """Take one gradient; when it is the unit's last, release the parameters and reduce what is due."""
        with self._runtime.home.order():
            if torch.is_grad_enabled():  # under create_graph alone
                with torch.no_grad():
                    self._take(unit, flat, index)
            else:
                self._take(unit, flat, index)

    def _take(self, unit: Unit, flat: FlatParams, index: int) -> None:
        if self._end is None:
            self._begin()
        gradients = flat.gradients
        if gradients is None:
            return
        if self.watch is not None:
            self.watch.arrived(self._offsets[id(flat)] + index, flat.full_params[index].grad)
        if self._runtime.sync and gradients.incoming is None:
            self._reductions.lend(unit)
        gradients.keep(index, sync=self._runtime.sync)
        self._used[self._offsets[id(flat)] + index] = USED
        unit.missing -= 1
        self._release_if_done(unit)
        if self._runtime.sync and not self._runtime.lifetime.release_parameters:
            while self._pending and self._pending[0].complete:
                self._reduce(self._pending[0])
        self._reductions.poll()

    def _reduce_before(self, gathered: Unit) -> None:
        """Reduce what is due before a unit is gathered in backward. See [Note: order of reductions]."""
        for unit in list(self._entered):
            nested = id(gathered.module) in unit.inside or id(unit.module) in gathered.inside
            if unit in self._pending and not nested and unit.entered >= unit.calls:
                self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        if unit in self._pending:
            self._pending.remove(unit)
        self._runtime.note("reduce", unit)
        with self._runtime.home.order():
            self._reductions.start(unit)

    @torch.no_grad()
    def _finish(self) -> None:
        """Release everything, reduce what is left, and give used parameters their gradients."""
        with self._runtime.home.order():
            self._settle()
        self._end = None
        self._runtime.end_reading()
        self._runtime.observe("backward", "", self._began)
        if self.watch is not None:
            self.watch.settle()

    def _settle(self) -> None:
        self._entered.clear()
        self._runtime.hide_all()
        for unit in self._runtime.units:
            unit.forget_backward()
        if self._runtime.sync:
            self._reduce_rest()
        else:
            for gradients in self._runtime.gradients():
                gradients.hold_place()
        self.check_agreement()
        if self._runtime.exact is not None:
            self._runtime.exact.end_backward()

    def _reduce_rest(self) -> None:
        """Reduce what backward has not, tell each other what was used, and attach the gradients."""
        while self._pending:
            self._reduce(self._pending[0])
        self._reductions.finish()
        said = self._what_all_say()
        if self._runtime.exact is not None and (said & LATE).any():
            raise ShardError(
                "gradients must be there when their unit is reduced with exact=True (got some that came later, for a "
                "parameter that several units use): take stages 0 to 2, or node_shared=True"
            )
        for gradients in self._runtime.gradients():
            gradients.attach((said[self.span(gradients.flat)] & USED).astype(bool).tolist())
        late = [
            unit
            for unit in reversed(self._runtime.units)
            if any((said[self.span(flat)] & LATE).any() for flat in unit.trainable)
        ]
        for unit in late:
            self._reduce(unit)
        self._reductions.finish()

    def _what_all_say(self) -> Any:
        """Return, for every parameter, what any rank says of it, and begin anew."""
        for gradients in self._runtime.gradients():
            if gradients.incoming is not None:
                self._used[self.span(gradients.flat)] |= LATE
        said, self._used = self._used, np.zeros_like(self._used)
        if self.watch is not None:
            said |= self.watch.bits()
        rows = said[None]
        if self._runtime.comm.size > 1:
            rows = self._runtime.agree(Event(kind="end of backward"), said)[:, 1:]
        if self.watch is not None:
            self.watch.heard(rows)
        return np.bitwise_or.reduce(rows, axis=0)

    def _given_up(self, end: Callable[[], Any]) -> None:
        """Be told that autograd has dropped its end of a backward, after it or instead of it."""
        with self._giving_up:
            if self._end is end:
                self._forget()

    def give_up(self) -> None:
        """Let go what a backward has left that is over without an end, if nobody has yet.

        On a GPU autograd drops its end in a thread of its own, perhaps after the caller has got the exception, which
        then waits here if that thread is about it.
        """
        with self._giving_up:
            if self._end is not None:
                self._forget()

    def _forget(self) -> None:
        """Let go what a backward that raised has left, at once: the user sees parameters in its except block."""
        self._end = self._agreement = None
        with self._runtime.home.order():
            self._let_go()

    def _let_go(self) -> None:
        if self._runtime.exact is not None:
            self._runtime.exact.stop()
        self._entered.clear()
        self._reductions.forget()
        self._runtime.hide_all()
        for unit in self._runtime.units:
            unit.forget_backward()
            for gradients in unit.gradients:
                gradients.forget()
                kept, span = gradients.kept, self.span(gradients.flat)
                self._used[span] = [USED if index in kept else 0 for index in range(len(gradients.flat.shards))]
        self._runtime.end_reading()

    def passed(self, call: Call) -> None:
        """Be told that backward is through with the inputs of a call."""
        if call.backward == self._number and not call.passed:
            call.passed = True
            call.unit.open -= 1
            self._release_if_done(call.unit)

    def _release_if_done(self, unit: Unit) -> None:
        if unit.state is UnitState.BACKWARD and unit.missing <= 0 and unit.open <= 0:
            self._runtime.reshard(unit)

    def begin_step(self) -> None:
        """Begin the sum over a step's micro-batches anew, with exact=True."""
        self._used[:] = 0
        for gradients in self._runtime.gradients():
            gradients.begin()
        if self.watch is not None:
            self.watch.begin_step()

    def drop_zeroed(self) -> None:
        """Forget gradients that `no_sync` has kept and `zero_grad` has taken away since."""
        for gradients in self._runtime.gradients():
            for index in gradients.drop_zeroed():
                self._used[self._offsets[id(gradients.flat)] + index] = 0

    def span(self, flat: Buffer) -> slice:
        """Return the places of a buffer's parameters among all of the model's."""
        start = self._offsets[id(flat)]
        return slice(start, start + len(flat.shards))
