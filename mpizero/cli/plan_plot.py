"""The picture of `mpizero plan`: bytes by kind at the peak of a step, and seconds, one bar for each stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpizero.bench.plots import matplotlib, save
from mpizero.cli.plan_question import OWN
from mpizero.cli.plan_words import scale_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mpizero.cli.plan_question import Question
    from mpizero.cli.plan_text import Row

__all__ = ["draw_plan"]

LOOKS = (
    ("parameters", "#0072b2", ""),
    ("gradients", "#d55e00", ""),
    ("optimizer", "#009e73", ""),
    ("gathered units", "#56b4e9", "//"),
    ("gradients on their way", "#e6a100", "\\\\"),
)
"""Kinds, with colour and hatching: what lives within a step is hatched, so that it can be read without colours too."""


def draw_plan(question: Question, rows: Sequence[Row], target: Path) -> None:
    """Write a picture to `target`; its ending, .png or .svg, says the format. The same rows give the same file.

    Raises:
        MpiZeroError: without matplotlib.
    """
    plt = matplotlib()
    figure, (memory, times) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    _draw_memory(memory, question, rows)
    _draw_times(times, rows)
    setup = question.setups[0]
    title = f"{question.model.name}, {question.model.numel / 1e9:.3g}e9 parameters, {question.precision}"
    figure.suptitle(f"{title}, on {setup.ranks:,} ranks", fontsize=11)
    save(figure, target)


def _kinds(question: Question, row: Row) -> list[float]:
    """Return the bytes of each kind at the peak, in the order of LOOKS."""
    state = [row.state.parameters, row.state.gradients, row.state.optimizer]
    if question.accounting != OWN:
        return [*state, row.unit_buffers, 0.0]
    peak = max(row.step.phases.values(), key=lambda phase: phase.total)
    return [*state, peak.held.gathered, peak.held.flying + peak.held.kept + peak.room]


def _draw_memory(axis: Any, question: Question, rows: Sequence[Row]) -> None:
    limits = question.limits
    scale, unit = scale_of(max(max(row.peak for row in rows) + limits.activations, limits.memory))
    names = [str(row.stage) for row in rows]
    kinds = [_kinds(question, row) for row in rows]
    below = [0.0] * len(rows)
    for place, (label, colour, hatch) in enumerate(LOOKS):
        heights = [each[place] / scale for each in kinds]
        if any(heights):
            axis.bar(names, heights, 0.6, bottom=below, color=colour, hatch=hatch, edgecolor="white", label=label)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    if limits.activations:
        high = limits.activations / scale
        axis.bar(names, [high] * len(rows), 0.6, bottom=below, color="#cccccc", edgecolor="white", label="activations")
        below = [low + high for low in below]
    for place, height in enumerate(below):
        axis.annotate(f"{height:.3g}", (place, height), (0, 2), textcoords="offset points", ha="center", fontsize=9)
    if limits.memory:
        axis.axhline(limits.memory / scale, color="#222222", linestyle="--", linewidth=1.2, label="memory of a rank")
    axis.set(title="at the peak of a step", xlabel="stage", ylabel=f"{unit} per rank")
    axis.set_ylim(0, 1.08 * max(*below, limits.memory / scale))
    axis.legend(frameon=False, fontsize=9)


def _draw_times(axis: Any, rows: Sequence[Row]) -> None:
    """Draw the time of the collectives and, where a speed was given, beside it the step: what it hides of them."""
    places = range(len(rows))
    most = max(row.times.communication + (row.times.compute or 0.0) for row in rows)
    unit, per_second = ("s", 1.0) if most >= 1 else ("ms", 1e3)
    alone = [per_second * row.times.communication for row in rows]
    compute = [per_second * (row.times.compute or 0.0) for row in rows]
    known = any(compute)
    width, left = (0.38, 0.2) if known else (0.6, 0.0)
    bars = [([place - left for place in places], alone)]
    axis.bar(bars[0][0], alone, width, color="#cc79a7", edgecolor="white", label="communication by itself")
    if known:
        right = [place + left for place in places]
        exposed = [per_second * (row.times.exposed or 0.0) for row in rows]
        axis.bar(right, compute, width, color="#8a8a8a", edgecolor="white", label="step: computation")
        look = {"color": "#222222", "hatch": "xx", "edgecolor": "white"}
        axis.bar(right, exposed, width, bottom=compute, label="step: exposed communication", **look)
        bars.append((right, [sum(pair) for pair in zip(compute, exposed, strict=True)]))
    for xs, heights in bars:
        for x, height in zip(xs, heights, strict=True):
            axis.annotate(f"{height:.3g}", (x, height), (0, 2), textcoords="offset points", ha="center", fontsize=9)
    axis.set_xticks(places, [str(row.stage) for row in rows])
    axis.set(title="time of a step, at least", xlabel="stage", ylabel=unit)
    axis.set_ylim(0, 1.35 * max(height for _, heights in bars for height in heights) or 1.0)
    axis.legend(frameon=False, fontsize=9)
