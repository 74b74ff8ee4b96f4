"""Watch a model for NaN and Inf, and say where they came from: which parameter, rank and micro-batch.

[Note: where a NaN is seen] After the reduction every rank has the NaN of one. So each gradient is looked at as autograd
brings it, on its own rank. What was found travels as bits of the byte per parameter that ranks tell each other at the
end of a backward anyway, so that all know at once, and a rank that found nothing names the same culprits. Only then do
ranks say more. The reduced gradients are looked at too: a sum may overflow where all its terms are finite.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from mpizero.errors import ArgumentError, NonFiniteError, must_be
from mpizero.shard.agree import Event, check_same, gather_texts
from mpizero.shard.runtime import Runtime, runtime_of
from mpizero.tables import ranks_in_words

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["NonFiniteWatch", "watch_nonfinite"]

LOCAL, REDUCED, SCALED = 4, 8, 16
"""What a rank says of a parameter, beside the bits of `backward`: its own gradient, or its part of the reduced one, is
not finite; and that its loss scaler will see to it."""
ACTIONS = ("raise", "warn")
_REMEDY = {
    LOCAL: "look at these ranks' batches and at the learning rate; the overflows of a GradScaler are left to it with "
    "watch_nonfinite(model, scaler=scaler)",
    REDUCED: "all ranks' own gradients are finite and their sum is not: take Precision(reduce=torch.float32), or scale "
    "the loss down",
}


def watch_nonfinite(
    model: nn.Module, *, action: str = "raise", parameters: bool = False, scaler: Any = None
) -> NonFiniteWatch:
    """Watch a sharded model's gradients for NaN and Inf from now on; say on all ranks where they came from.

    At the end of the backward that reduces them, all ranks raise the same error, or warn. It names the first such
    parameter in the model's order, the ranks in whose own gradient it was, before any reduction, the micro-batch of the
    step, counted from 0, and the parameter that backward came to first, which is nearest to the cause. Works at every
    stage, with prefetch, hybrid groups, `no_sync` and `exact`. Gradients are attached by then: after the error a
    program can look at them, call `zero_grad` on all ranks, and go on.

    Args:
        model: a sharded model.
        action: "raise" for `NonFiniteError`, "warn" for a RuntimeWarning on every rank.
        parameters: whether to look at the parameters too, after each optimizer step.
        scaler: a GradScaler whose losses are used: while its scale is above 1, what is not finite is taken for an
            overflow, which it notices itself by leaving the step out.

    Returns:
        What ends it by `remove()`, on all ranks, and counts in `step` the optimizer steps since; set it where a
        training goes on from a checkpoint.

    Raises:
        ArgumentError: for another action, options that differ between ranks, or a model that is watched already.

    Collective. Off it costs nothing. On, each rank reads each gradient once more, its part of the reduced ones too, and
    with `parameters` its masters; on a GPU the host waits for the device once per backward. No more is sent, but with
    `parameters` a byte per parameter and rank and step, and some dozen bytes per rank where something was found.
    Gradients of `ignored_params` are not seen.
    """
    runtime = runtime_of(model)
    if action not in ACTIONS:
        raise ArgumentError(must_be("action", f"one of {', '.join(ACTIONS)}", action))
    runtime.check_changeable("watch_nonfinite")
    if runtime.backward.watch is not None:
        raise ArgumentError(must_be("model of watch_nonfinite", "not watched yet", "one that is", "remove() the first"))
    if runtime.comm.size > 1:
        options = f"action {action}, parameters {parameters}, scaler {scaler is not None}"
        check_same(runtime.comm, [options], "options of watch_nonfinite")
    watch = NonFiniteWatch(runtime, action, scaler, parameters=parameters)
    runtime.backward.watch = watch
    runtime.after_steps.append(watch.stepped)
    return watch


class _Found(NamedTuple):
    """Say where a rank first met a gradient that is not finite."""

    micro: int
    position: int
    kind: str


class NonFiniteWatch:
    """Be one model's watch; made by `watch_nonfinite`."""

    def __init__(self, runtime: Runtime, action: str, scaler: Any, *, parameters: bool) -> None:
        """Begin with nothing found."""
        self.step = 0
        """Optimizer steps so far."""
        self.overflows = 0
        """Backwards whose findings were left to the scaler."""
        self._runtime, self._action, self._scaler, self._parameters = runtime, action, scaler, parameters
        self._names = [slot.name for flat in runtime.flats for slot in flat.layout.slots]
        """By position: the order of the flat buffers."""
        order = {name: place for place, (name, _) in enumerate(runtime.model.named_parameters(remove_duplicate=False))}
        self._order = sorted(range(len(self._names)), key=lambda position: order.get(self._names[position], -1))
        """The positions in the model's order."""
        self._micro = 0
        self._peaks: list[tuple[int, Tensor]] = []
        """Per gradient of the running backward, in the order of their arrival: its position and largest magnitude."""
        self._found: dict[int, _Found] = {}
        """By position, in the order of arrival: what was not finite since the step began."""
        self._told: set[int] = set()
        """The positions that were spoken of since then: the reduced gradient may stay as it is."""
        self._shards = [shard for flat in runtime.flats for shard in flat.shards]
        self._spoiled: set[int] = set()
        """The positions whose `.grad` on this rank is not finite from an earlier step."""
        self._rows: Any = None

    def remove(self) -> None:
        """End the watch; to be called on all ranks, or twice."""
        if self._runtime.backward.watch is self:
            self._runtime.backward.watch = None
        if self.stepped in self._runtime.after_steps:
            self._runtime.after_steps.remove(self.stepped)

    def begin(self) -> None:
        """Be told that a backward begins."""
        self._peaks.clear()
        fresh = all(shard.grad is None for shard in self._shards)
        if fresh and self._runtime.exact is None:
            self.begin_step()

    def begin_step(self) -> None:
        """Count micro-batches from 0."""
        self._micro = 0
        self._spoiled = {position for position in self._told | self._spoiled if self._is_spoiled(position)}
        self._found.clear()
        self._told.clear()

    def arrived(self, position: int, gradient: Tensor | None) -> None:
        """Look at one gradient as autograd has left it."""
        if gradient is not None:
            peak = _peak(gradient)
            if peak is not None:
                self._peaks.append((position, peak))

    def end(self) -> None:
        """Read what was found in the running backward."""
        peaks, self._peaks = self._peaks, []
        for (position, _), value in zip(peaks, _read([peak for _, peak in peaks]), strict=True):
            if not math.isfinite(value) and position not in self._found:
                self._found[position] = _Found(self._micro, position, _kind(value))

    def bits(self) -> np.ndarray[Any, Any]:
        """Return what this rank says of every parameter at the end of a backward that was reduced."""
        self.end()
        said = np.zeros(len(self._names), np.uint8)
        said[list(self._found)] |= LOCAL
        reduced = self._not_finite([(own.accumulator, own.views) for own in self._runtime.gradients()])
        said[[position for position in reduced if position not in self._spoiled]] |= REDUCED
        if self._scaler is not None and self._scaler.is_enabled() and self._scaler.get_scale() > 1:
            said |= SCALED
        return said

    def heard(self, rows: np.ndarray[Any, Any]) -> None:
        """Remember what all ranks said, for `settle`; of shape (ranks, parameters)."""
        self._rows = rows

    def settle(self) -> None:
        """Speak of what was found; called when the backward is over and all is at rest. Collective if something was."""
        self.end()
        self._micro += 1
        rows, self._rows = self._rows, None
        if rows is None:
            return
        known = np.isin(np.arange(rows.shape[1]), list(self._told))
        for bit in (LOCAL, REDUCED):
            bad = ((rows & bit) != 0) & ~known
            if bad.any():
                if (rows & SCALED).all():
                    self.overflows += 1
                    return
                self._told.update(np.flatnonzero((rows & (LOCAL | REDUCED)).any(axis=0)).tolist())
                self._report(bit, bad)
                return

    def _report(self, bit: int, bad: np.ndarray[Any, Any]) -> None:
        first = next(position for position in self._order if bad[:, position].any())
        texts = gather_texts(self._runtime.comm, self._own_text(first) if bit == LOCAL else "")
        where = "; ".join(f"rank {rank} {text}" for rank, text in enumerate(texts) if text)
        if bit == REDUCED:
            where = f"in the sum over ranks, held by {_ranks(bad[:, first])}"
        count = int(bad.any(axis=0).sum())
        which = f"{self._names[first]!r}, the first of {count} parameters" if count > 1 else repr(self._names[first])
        self._say(f"gradients must be finite (got NaN or Inf in {which}, in step {self.step}: {where}): {_REMEDY[bit]}")

    def _own_text(self, first: int) -> str:
        """Say what this rank found of the parameter that all speak of, and what it came to first; "" for nothing."""
        if first not in self._found:
            return ""
        found, earliest = self._found[first], next(iter(self._found.values()))
        text = f"has {found.kind} in its micro-batch {found.micro}"
        if earliest.position == first:
            return text
        return f"{text}, and came to {earliest.kind} of {self._names[earliest.position]!r} first"

    def _check_parameters(self) -> None:
        """Look at this rank's master values, and speak of what any rank found. Collective."""
        trained = [flat for flat in self._runtime.flats if flat.trainable]
        said = np.zeros(len(self._names), np.uint8)
        pieces = [(flat.master, [shard.detach() for shard in flat.shards]) for flat in trained]
        said[self._not_finite(pieces, trained)] = LOCAL
        rows = said[None]
        if self._runtime.comm.size > 1:
            rows = self._runtime.agree(Event(kind="watch_nonfinite"), said)[:, 1:]
        bad = rows != 0
        if bad.any():
            first = next(position for position in self._order if bad[:, position].any())
            where = f"{self._names[first]!r} after step {self.step - 1}, in values held by {_ranks(bad[:, first])}"
            remedy = "look at the learning rate and at what the optimizer divides by; go on from a checkpoint"
            self._say(f"parameters must be finite (got NaN or Inf in {where}): {remedy}")

    def stepped(self) -> None:
        """Be told that the optimizer has stepped; look at the parameters if that is asked for."""
        self.step += 1
        self.begin_step()
        if self._parameters:
            self._check_parameters()

    def _is_spoiled(self, position: int) -> bool:
        grad = self._shards[position].grad
        peak = None if grad is None else _peak(grad)
        return peak is not None and not math.isfinite(float(peak))

    def _say(self, text: str) -> None:
        if self._action == "raise":
            raise NonFiniteError(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _not_finite(self, buffers: list[tuple[Tensor, list[Tensor]]], flats: list[Any] | None = None) -> list[int]:
        """Return the positions of what is not finite in any of the buffers, each with the parts of its parameters."""
        owners = [own.flat for own in self._runtime.gradients()] if flats is None else flats
        peaks = [(flat, parts, _peak(whole)) for flat, (whole, parts) in zip(owners, buffers, strict=True)]
        there = [(flat, parts, peak) for flat, parts, peak in peaks if peak is not None]
        found = []
        for (flat, parts, _), value in zip(there, _read([peak for _, _, peak in there]), strict=True):
            if not math.isfinite(value):
                start = self._runtime.backward.span(flat).start
                values = [None if (peak := _peak(part)) is None else float(peak) for part in parts]
                found += [start + at for at, one in enumerate(values) if one is not None and not math.isfinite(one)]
        return found


def _peak(values: Tensor) -> Tensor | None:
    """Return the largest magnitude, NaN where there is one: a single pass, without room for as many flags."""
    if values.layout is not torch.strided:
        values = values.coalesce().values()
    return torch.linalg.vector_norm(values.detach(), math.inf) if values.numel() else None


def _read(peaks: list[Tensor]) -> list[float]:
    """Return numbers that a GPU may still be computing, waiting for it once."""
    return torch.stack([peak.double() for peak in peaks]).tolist() if peaks else []


def _kind(value: float) -> str:
    return "NaN" if math.isnan(value) else "Inf"


def _ranks(bad: np.ndarray[Any, Any]) -> str:
    return ranks_in_words(np.flatnonzero(bad).tolist())
