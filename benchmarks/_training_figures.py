"""Figures of benchmarks/training: what was measured, what it is to reach, and the arithmetic between."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Hold a figure, what it is to reach, and what nothing could better."""

    name: str
    value: float | None
    """None where it was not measured; `detail` says why."""
    bar: float
    aim: float | None = None
    limit: float | None = None
    """What the best thinkable way would reach: compute alone, the formula."""
    unit: str = "x"
    at_most: bool = True
    """Whether less is better."""
    low: float | None = None
    high: float | None = None
    """The least and the largest over rounds."""
    detail: str = ""
    forgiven: bool = False
    """Whether the bar is met by a rule that `detail` gives, though the figure alone does not reach it."""

    def reaches(self, wanted: float | None) -> bool | None:
        """Return whether the figure is as good as `wanted`; None where either is not there."""
        if self.value is None or wanted is None:
            return None
        return self.value <= wanted if self.at_most else self.value >= wanted

    @property
    def met(self) -> bool | None:
        """Return whether the bar is reached."""
        return self.reaches(self.bar) or (self.forgiven if self.value is not None else None)

    def as_dict(self) -> dict:
        """Return what the JSON file holds."""
        return {**asdict(self), "met": self.met, "aim_met": self.reaches(self.aim)}


@dataclass(frozen=True, kw_only=True)
class Want:
    """Hold what a figure is to reach, before it is measured."""

    name: str
    bar: float
    aim: float | None = None
    unit: str = "x"
    at_most: bool = True

    def got(self, values: Sequence[float], limit: float | None = None, **more) -> Figure:
        """Return the figure of a value per round: their median."""
        spread = {"low": min(values), "high": max(values)} if len(values) > 1 else {}
        return Figure(**asdict(self), value=statistics.median(values), limit=limit, **spread, **more)

    def missing(self, why: object) -> Figure:
        """Return the figure that was not measured."""
        return Figure(**asdict(self), value=None, detail=f"not measured: {why}")


def shown(value: float | None, unit: str = "") -> str:
    """Return a number as text."""
    return "-" if value is None else f"{value:.3g} {unit}".rstrip()


def peak_of_sum(series: Iterable[Sequence[Sequence[float]]], since: float = 0.0) -> float:
    """Return the largest sum over ranks at one time.

    Args:
        series: for each rank its (seconds, bytes), in one clock.
        since: seconds from which on the sum counts.
    """
    return max((total for at, total in summed(series) if at >= since), default=0.0)


def summed(series: Iterable[Sequence[Sequence[float]]]) -> list[tuple[float, float]]:
    """Return (seconds, sum over ranks of the latest bytes of each), from when all have been looked at."""
    ranks = list(series)
    events = sorted((at, rank, value) for rank, samples in enumerate(ranks) for at, value in samples)
    latest: dict[int, float] = {}
    found = []
    for at, rank, value in events:
        latest[rank] = value
        if len(latest) == len(ranks):
            found.append((at, sum(latest.values())))
    return found
