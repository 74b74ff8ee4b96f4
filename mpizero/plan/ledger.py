"""The books of one step: bytes that come and go, their peaks by phase, and what is done in which order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Act", "Held", "Ledger", "Move"]


class Move(NamedTuple):
    """Name one collective by what its cost depends on."""

    operation: str
    nbytes: int
    """Of the whole buffer, as it travels."""
    ranks: int
    """How many take part."""
    across: bool = False
    """Whether they are the replicas of a hybrid group's ranks, each in another group."""


class Act(NamedTuple):
    """Say what a rank does next: begins a collective, waits for it, or computes."""

    kind: str
    """`expect` (has the disk read ahead), `gather`, `gathered` (waited for), `forward`, `backward`, `reduce` or
    `reduced`."""
    unit: int
    moves: tuple[Move, ...] = ()
    carried: int = 0
    """Bytes that come from a disk or from host memory ahead of a gather, or go to host memory after a reduction."""


class Held(NamedTuple):
    """Hold bytes that live within a step only."""

    gathered: int = 0
    """Full parameters of units that are gathered now."""
    flying: int = 0
    """Gradients from their arrival to the end of their reduction."""
    kept: int = 0
    """Gradients that `no_sync` has kept back."""

    @property
    def total(self) -> int:
        """Return the sum."""
        return self.gathered + self.flying + self.kept


@dataclass(kw_only=True)
class Ledger:
    """Keep the books. The fields of `Held` change as the step goes on."""

    gathered: int = 0
    flying: int = 0
    kept: int = 0
    phase: str = "forward"
    peaks: dict[str, Held] = field(default_factory=dict)
    acts: list[Act] = field(default_factory=list)

    def add(self, *, gathered: int = 0, flying: int = 0, kept: int = 0) -> None:
        """Take, or with numbers below 0 let go of, memory, and remember the most that was held."""
        self.gathered += gathered
        self.flying += flying
        self.kept += kept
        now = Held(self.gathered, self.flying, self.kept)
        if now.total >= self.peaks.get(self.phase, Held()).total:
            self.peaks[self.phase] = now

    def act(self, kind: str, unit: int, moves: tuple[Move, ...] = (), carried: int = 0) -> None:
        """Write down what is done."""
        self.acts.append(Act(kind, unit, moves, carried))
