"""What a sharded model did and when, as spans of time, and what they come to step by step.

[Note: exposed and hidden] A rank is exposed to communication while its main thread is blocked by it: in a wait for a
gather or a reduction, or in a meeting of all ranks. All other time of a step counts as compute, whatever the rank did
in it (loading data too). Communication is the time in which a gather or a reduction was under way, or ranks met; what
of it is not exposed is hidden behind compute. A wait that outlasts its collective is charged to communication all the
same, so that the hidden share is, if anything, told too small.

All times are the host's. On a GPU, forward, backward, step and compute are the time that the host takes to issue the
work, not the device's to do it; a collective lasts from its issue until the host knows of its end, and a wait is one of
the host. Whole steps are true as soon as the host has to wait for the device in each, as it does in reductions.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["COLLECTIVES", "EXPOSED", "ProfiledStep", "Span", "UnitTraffic", "covered", "steps_of"]

COLLECTIVES = ("gather", "reduce")
EXPOSED = ("wait", "agree")
COMMUNICATION = (*COLLECTIVES, "agree")


@dataclass(frozen=True, slots=True)
class Span:
    """Say what a rank did from one moment to another."""

    kind: str
    """forward: one call of the outermost forward. backward: from its first hook to its end. step: an optimizer's step.
    gather, reduce: from the issue of the collective to its completion. wait: the main thread is blocked until a gather
    or a reduction is there, or does its own part of the sum. agree: a meeting of ranks."""
    unit: str
    """The unit's name; "" where the span is of no unit."""
    start: float
    """Seconds of `time.perf_counter`."""
    stop: float
    nbytes: int = 0
    """Bytes of the buffer that is gathered or reduced."""


@dataclass(frozen=True, kw_only=True)
class UnitTraffic:
    """Hold what one unit had to do with other ranks in one step."""

    gathers: int
    reductions: int
    gathered_bytes: int
    """Bytes of the whole buffers that were gathered; of p ranks each receives (p-1)/p of them."""
    reduced_bytes: int
    """Bytes of the whole buffers that were reduced."""
    waited: float
    """Seconds in which the main thread was blocked by this unit."""


@dataclass(frozen=True, kw_only=True)
class ProfiledStep:
    """Hold the seconds of one step on one rank: from the end of the optimizer step before it to the end of its own.

    See [Note: exposed and hidden] in `mpizero.shard.spans`.
    """

    seconds: float
    forward: float
    """Seconds inside forwards; what they waited for is in it, as in the next two."""
    backward: float
    optimizer: float
    compute: float
    """All seconds that are not exposed."""
    waited: float
    """Seconds blocked until a gather or a reduction was there."""
    agreed: float
    """Seconds in meetings of ranks: whoever comes first waits there for the others."""
    exposed: float
    """Seconds blocked by communication, in waits and in meetings."""
    communication: float
    """Seconds in which at least one gather or reduction was under way, or ranks met."""
    hidden: float
    """Seconds of communication behind compute: `communication - exposed`, and at least 0."""
    units: Mapping[str, UnitTraffic]
    """By the unit's name. A collective counts in the step in which it was issued."""

    @property
    def hidden_share(self) -> float:
        """Return the part of communication that was hidden, from 0 to 1; nan where there was none."""
        return self.hidden / self.communication if self.communication else math.nan


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals, each given as (start, stop)."""
    total, reached = 0.0, -math.inf
    for start, stop in sorted(intervals):
        if stop > reached:
            total += stop - max(start, reached)
            reached = stop
    return total


def steps_of(spans: Sequence[Span], start: float) -> tuple[ProfiledStep, ...]:
    """Divide spans into steps at the end of each span of kind "step"; what comes after the last one is left out.

    A span that runs across the end of a step gives each step its part of the time.

    Args:
        spans: in any order.
        start: seconds of `time.perf_counter` at which the first step begins; what was before is left out.
    """
    edges = [start, *sorted(span.stop for span in spans if span.kind == "step" and span.stop > start)]
    inside: list[list[Span]] = [[] for _ in edges[1:]]
    for span in spans:
        first = max(bisect_right(edges, span.start) - 1, 0)
        last = max(bisect_left(edges, span.stop), first + (span.start >= start))
        for found in inside[first:last]:
            found.append(span)
    return tuple(_step(begin, end, found) for begin, end, found in zip(edges, edges[1:], inside, strict=False))


def _step(start: float, stop: float, spans: Sequence[Span]) -> ProfiledStep:
    """Return what spans come to between two moments; each has a part of its time there, or begins there."""

    def length(*kinds: str) -> float:
        return covered((max(s.start, start), min(s.stop, stop)) for s in spans if s.kind in kinds)

    exposed, communication = length(*EXPOSED), length(*COMMUNICATION)
    return ProfiledStep(
        seconds=stop - start,
        forward=length("forward"),
        backward=length("backward"),
        optimizer=length("step"),
        compute=stop - start - exposed,
        waited=length("wait"),
        agreed=length("agree"),
        exposed=exposed,
        communication=communication,
        hidden=max(communication - exposed, 0.0),
        units=_by_unit(start, stop, spans),
    )


def _by_unit(start: float, stop: float, spans: Iterable[Span]) -> dict[str, UnitTraffic]:
    found: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        if span.kind in (*COLLECTIVES, "wait"):
            found.setdefault(span.unit, []).append(span)
    return {unit: _traffic(start, stop, own) for unit, own in found.items()}


def _traffic(start: float, stop: float, spans: Iterable[Span]) -> UnitTraffic:
    begun = [span for span in spans if span.start >= start]
    gathers = [span.nbytes for span in begun if span.kind == "gather"]
    reductions = [span.nbytes for span in begun if span.kind == "reduce"]
    waits = ((max(span.start, start), min(span.stop, stop)) for span in spans if span.kind == "wait")
    return UnitTraffic(
        gathers=len(gathers),
        reductions=len(reductions),
        gathered_bytes=sum(gathers),
        reduced_bytes=sum(reductions),
        waited=covered(waits),
    )
