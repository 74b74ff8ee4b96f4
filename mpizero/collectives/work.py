"""What a schedule asks of links and memory, in bytes, round by round: what the cost model reads."""

from __future__ import annotations

from dataclasses import dataclass
from operator import add
from typing import TYPE_CHECKING, NamedTuple

from mpizero.collectives.schedule import Reduce, Ref, Schedule, Send, Space

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["ALIKE", "Estimate", "Flow", "RoundWork", "Terms", "Widths", "work_of"]


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Hold the bytes of a chunk, as a fraction where the buffer does not divide evenly."""

    plain: float
    """In the caller's dtype."""
    acc: float
    """In the accumulation dtype."""


ALIKE = 1 + 1e-6
"""How much longer a node's ports must be busy than a rank's link to be named as what is waited for."""


class Terms(NamedTuple):
    """Hold seconds by what they are spent on, along the chain of events that ends last."""

    latency: float = 0.0
    """Of messages, whatever their length."""
    local: float = 0.0
    """Bytes on links within a node."""
    remote: float = 0.0
    """Bytes that a rank sends or receives over the network."""
    port: float = 0.0
    """Bytes of other ranks of the node that share its ports, and waiting for them."""
    reduction: float = 0.0
    copies: float = 0.0
    posting: float = 0.0

    def plus(self, more: tuple[float, ...]) -> Terms:
        """Return the sum with other terms, all of them, in the order of the fields."""
        return Terms._make(map(add, self, more))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Hold what an evaluation finds."""

    terms: Terms
    """They add up to the seconds."""
    rounds: int
    """Messages that follow each other in the longest chain."""
    sent_max: float
    """Bytes that the busiest rank sends."""
    wire_max: float
    """Bytes that leave or enter the busiest node, whichever are more."""
    schedules: int
    """Schedules that were built for it."""


class Flow(NamedTuple):
    """Hold one message as one of its ends sees it."""

    peer: int
    nbytes: float


class RoundWork(NamedTuple):
    """Hold what one rank does in one round, in bytes."""

    sends: tuple[Flow, ...]
    receives: tuple[Flow, ...]
    packed: float
    """Copied before the messages are posted: a message of chunks that do not adjoin is put together first."""
    copied: float
    """Copied after the messages are done: what came packed is taken apart, and the round's own copies."""
    reduced: float
    """Of results."""


def work_of(schedule: Schedule, widths: Widths) -> list[RoundWork]:
    """Return what each round of a schedule asks for."""
    rounds = []
    for messages, local in schedule.rounds:
        sends, receives = [], []
        packed = copied = reduced = 0.0
        for step in messages:
            nbytes = _nbytes(step.refs, widths)
            if isinstance(step, Send):
                sends.append(Flow(step.peer, nbytes))
                packed += 0.0 if _is_one_run(step.refs, schedule.chunks) else nbytes
            else:
                receives.append(Flow(step.peer, nbytes))
                copied += 0.0 if _is_one_run(step.refs, schedule.chunks) else nbytes
        for action in local:
            nbytes = widths.acc if action.dst.space is Space.ACC else widths.plain
            if isinstance(action, Reduce):
                reduced += nbytes
            else:
                copied += nbytes
        rounds.append(RoundWork(tuple(sends), tuple(receives), packed, copied, reduced))
    return rounds


def _is_one_run(refs: Sequence[Ref], chunks: int) -> bool:
    """Return whether a message's chunks adjoin in memory, so that the executor need not pack them.

    The first chunk is taken to follow the last, so that ranks which differ in their numbers alone cost the same.
    """
    first = refs[0]
    in_slots = first.space is Space.RAW or first.space is Space.ACC
    start = first.slot if in_slots else first.chunk
    return all(
        ref.space is first.space
        and (ref.slot == start + distance if in_slots else ref.chunk == (start + distance) % chunks)
        for distance, ref in enumerate(refs)
    )


def _nbytes(refs: Iterable[Ref], widths: Widths) -> float:
    """Return the bytes of a message; counted first and multiplied once, so that equal messages have equal bytes."""
    wide = count = 0
    for ref in refs:
        count += 1
        wide += ref.space is Space.ACC
    return wide * widths.acc + (count - wide) * widths.plain
