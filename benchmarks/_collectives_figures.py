"""What the rows of benchmarks/collectives are made with: figures, what they are to reach, and how they are said."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from _collectives_runs import ROOT, NotMeasuredError

from mpizero.bench.summary import geometric_mean

if TYPE_CHECKING:
    from collections.abc import Callable

    from _collectives_runs import Runs

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Found:
    """Hold a figure and what it comes from."""

    value: float
    detail: str = ""
    holds: bool = True
    """Whether what must be true beside the figure is."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Hold what a figure is to reach."""

    name: str
    bar: float
    aim: float | None
    unit: str
    at_most: bool
    """Whether less is better."""
    measure: Callable[[Runs], Found]

    def reaches(self, found: Found, wanted: float) -> bool:
        """Return whether a figure is as good as `wanted`."""
        return found.holds and (found.value <= wanted if self.at_most else found.value >= wanted)


ROWS: list[Row] = []


def row(name: str, bar: float, aim: float | None = None, *, unit: str = "x", at_most: bool = False):
    """Add a function to the rows."""

    def add(measure):
        ROWS.append(Row(name=name, bar=bar, aim=aim, unit=unit, at_most=at_most, measure=measure))
        return measure

    return add


def times(rows: list[dict], algorithm: str, buffer: str = "private", *, prepared: bool = False) -> dict[int, float]:
    """Return median microseconds by size."""
    wanted = (algorithm, buffer, prepared)
    found = {r["nbytes"]: r["t_median_us"] for r in rows if (r["algorithm"], r["buffer"], r["prepared"]) == wanted}
    if not found:
        raise NotMeasuredError(f"no row of {algorithm}, {buffer}")
    return found


def mean_of(ratios: dict[int, float]) -> Found:
    return Found(value=geometric_mean(ratios.values()), detail=listed(ratios))


def listed(ratios: dict[int, float]) -> str:
    return ", ".join(f"{shown(nbytes)} {ratio:.2f}" for nbytes, ratio in sorted(ratios.items()))


def shown(nbytes: int) -> str:
    for unit, size in (("MiB", MIB), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} B"


def resources(line: list[str]) -> tuple[float, int]:
    """Return the seconds and the largest resident bytes of a program."""
    start = time.perf_counter()
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as job:
        said = job.stderr.read()
        _, status, usage = os.wait4(job.pid, 0)
        job.returncode = os.waitstatus_to_exitcode(status)
    if job.returncode:
        raise NotMeasuredError(f"{' '.join(line[1:])} ended with {job.returncode}: {said.strip()[-200:]}")
    return time.perf_counter() - start, usage.ru_maxrss << 10
