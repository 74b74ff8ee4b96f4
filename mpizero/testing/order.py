"""The literal order of events in a sharded model: which unit was gathered, released and reduced, in turn."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from mpizero.shard import runtime_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from torch import nn

__all__ = ["Event", "Record", "recorded"]


class Event(NamedTuple):
    """Name what happened to which unit."""

    kind: str
    """`gather` and `reduce` when they are issued, `release`, and whatever else the runtime tells of."""
    unit: str
    """The unit's name in the model; the root's is its class."""

    def __str__(self) -> str:
        """Return the event as a line of a test has it."""
        return f"{self.kind} {self.unit}"


@dataclass(kw_only=True)
class Record:
    """Hold the events of one rank in the order in which they came."""

    events: list[Event] = field(default_factory=list)

    def lines(self, kinds: Container[str] = ("gather", "release", "reduce")) -> list[str]:
        """Return the events of the given kinds as lines such as `gather layers.0`."""
        return [str(event) for event in self.events if event.kind in kinds]

    def counts(self, kind: str) -> Counter[str]:
        """Return how often each unit had an event of this kind; units without any are not in it."""
        return Counter(event.unit for event in self.events if event.kind == kind)


@contextmanager
def recorded(model: nn.Module) -> Iterator[Record]:
    """Record the events of a sharded model inside a `with` block. Sends nothing; blocks may nest.

    Args:
        model: a sharded model. Its parts have no record of their own.

    Raises:
        ShardError: for a model that is not sharded.
    """
    runtime, record = runtime_of(model), Record()
    outer = runtime.trace

    def note(kind: str, unit: str) -> None:
        record.events.append(Event(kind, unit))
        if outer is not None:
            outer(kind, unit)

    runtime.trace = note
    try:
        yield record
    finally:
        runtime.trace = outer
