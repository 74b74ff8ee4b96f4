"""Exact counts of a sharded model's collectives, messages and bytes, beside what they have to be by its layout.

[Note: which counts are exact] `Theory` follows the canonical builders over messages, as between hosts and between the
threads of `run_loopback`: there messages and bytes are equal to the counters, once the agreements between ranks are
added. Ranks of one host that reach each other's memory send no messages; there `Stats.bytes_moved` is within a few per
cent of `formula`, and less where they share one copy.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from mpizero.collectives import build, even_offsets
from mpizero.comm import Stats
from mpizero.shard import runtime_of, stats
from mpizero.testing.order import recorded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from torch import nn

__all__ = ["Collective", "Counts", "Theory", "counted", "theory_of"]

PARTIAL_BYTES = 4
"""Bytes of a partial sum on the wire, where an algorithm sends such."""


@dataclass(kw_only=True)
class Counts:
    """Count what one rank did inside a `counted` block; complete when the block has ended."""

    gathers: Counter[str] = field(default_factory=Counter)
    """By unit, how often its parameters were gathered from several ranks; empty at stage 0, which never does."""
    reductions: Counter[str] = field(default_factory=Counter)
    """By unit, how often its gradients were reduced."""
    moved: Stats = field(default_factory=Stats)
    """Messages and bytes, agreements between ranks included, as the communicator counted them."""


class Collective(NamedTuple):
    """Name one collective by what its cost depends on."""

    operation: str
    numel: int
    """Elements of the whole buffer."""
    itemsize: int
    """Bytes of an element on the wire."""


@dataclass(frozen=True, kw_only=True)
class Theory:
    """Say what a step has to do by the stage and the layout. See [Note: which counts are exact]."""

    ranks: int
    gathers: Counter[str]
    reductions: Counter[str]
    collectives: tuple[Collective, ...]
    formula: float
    """Bytes that one rank sends by the stage's formula, without padding and agreements."""

    def messages(self, rank: int) -> int:
        """Return the messages that `rank` sends, by the builders' count."""
        return sum(build(one.operation, "direct", self.ranks, rank).sent_messages() for one in self.collectives)

    def nbytes(self, rank: int) -> int:
        """Return the bytes that `rank` sends, padding included, by the builders' count."""
        total = 0
        for one in self.collectives:
            schedule = build(one.operation, "direct", self.ranks, rank)
            total += schedule.sent_bytes(even_offsets(one.numel, schedule.chunks), one.itemsize, PARTIAL_BYTES)
        return total

    def with_agreements(self, sizes: Sequence[int]) -> Theory:
        """Return the theory with all-gathers of records of so many bytes per rank, which are no part of the formula."""
        records = (Collective("all_gather", nbytes * self.ranks, 1) for nbytes in sizes)
        return replace(self, collectives=(*self.collectives, *records))


@contextmanager
def counted(model: nn.Module) -> Iterator[Counts]:
    """Count a sharded model's collectives, messages and bytes inside a `with` block. Sends nothing.

    Args:
        model: a sharded model; others that share its communicator must rest meanwhile.
    """
    counts, before = Counts(), stats(model).copy()
    with recorded(model) as record:
        yield counts
    counts.moved = stats(model).since(before)
    counts.reductions = record.counts("reduce")
    if runtime_of(model).lifetime.cut:
        counts.gathers = record.counts("gather")


def theory_of(model: nn.Module, *, backwards: int = 1, kept: int = 0) -> Theory:
    """Return what one training step has to cost, from the second on, by the model's stage and layout.

    Stage 0 all-reduces each unit's gradients in every backward outside `no_sync`; stages 1 to 3 reduce-scatter them.
    Stages 1 and 2 gather trainable parameters once after a step; stage 3 gathers all of them in every forward and,
    unless the unit stays gathered in between, again in every backward; a node that shares them gathers nothing. On one
    rank there is nothing to send.

    Args:
        model: a sharded model whose units are each used once in a forward, that recomputes nothing and is reduced unit
            by unit (`bucket_bytes=1`).
        backwards: forwards with backward in a step.
        kept: how many of them are inside `no_sync`; the reduction that takes their gradients along sends fp32 if any.
    """
    runtime = runtime_of(model)
    stage, ranks = runtime.lifetime.stage, runtime.comm.size
    alone = ranks == 1
    reduced = backwards - kept
    operation, passes = ("all_reduce", 2) if stage == 0 else ("reduce_scatter", 1)
    gathers: Counter[str] = Counter()
    reductions: Counter[str] = Counter()
    calls: list[Collective] = []
    elements = 0.0
    for unit in runtime.units:
        gathered = 0 if alone or stage == 0 or runtime.lifetime.shared else 1
        if gathered and stage == 3:
            gathered = backwards if unit.keep else 2 * backwards
        for flat in unit.flats:
            if stage == 3 or flat.trainable:
                calls += [Collective("all_gather", flat.layout.length, flat.full.element_size())] * gathered
                elements += flat.layout.numel * flat.full.element_size() * gathered
                gathers[unit.name] = gathered
            if flat.trainable:
                widths = _reduced_widths(flat, reduced, kept)
                calls += [Collective(operation, flat.layout.length, width) for width in widths if not alone]
                elements += flat.layout.numel * passes * sum(widths)
                reductions[unit.name] = reduced
    share = (ranks - 1) / ranks
    return Theory(
        ranks=ranks,
        gathers=+gathers,
        reductions=+reductions,
        collectives=tuple(calls),
        formula=share * elements,
    )


def _reduced_widths(flat: Any, reduced: int, kept: int) -> list[int]:
    """Return the bytes of an element in each of a step's reductions; the last takes along what `no_sync` kept."""
    usual = flat.reduce_dtype.itemsize
    widths = [usual] * reduced
    if kept and widths:
        widths[-1] = max(usual, flat.master_dtype.itemsize)
    return widths
