"""Figures out of many measurements."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Summary", "geometric_mean", "percentile", "summarise"]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Hold what the times of a case's iterations come to, in seconds."""

    median: float
    least: float
    p99: float


def summarise(times: Sequence[float]) -> Summary:
    """Return median, least and 99th percentile of at least one time."""
    return Summary(median=statistics.median(times), least=min(times), p99=percentile(times, 99))


def percentile(times: Sequence[float], percent: float) -> float:
    """Return the least of `times` that at least `percent` of 100 of them do not exceed (nearest rank).

    Of fewer than 100 times the 99th percentile is therefore the largest.
    """
    ranked = sorted(times)
    return ranked[max(math.ceil(len(ranked) * percent / 100), 1) - 1]


def geometric_mean(ratios: Iterable[float]) -> float:
    """Return the geometric mean of ratios, each of two times out of the same run; nan of none.

    The mean of ratios that says the same of a/b as of b/a, and in which no size outweighs another.
    """
    found = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(found) / len(found)) if found else math.nan
