"""The picture of `mpizero plan`: bytes by kind at the peak of a step, and seconds, one bar for each stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpizero.bench.plots import matplotlib, save
from mpizero.cli.offload_words import WHERE
from mpizero.cli.plan_question import OWN
from mpizero.cli.plan_words import scale_of
from mpizero.plan import DISK

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
    ("groups of state", "#999999", ".."),
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
    _draw_times(times, question, rows)
    setup = question.setups[0]
    title = f"{question.model.name}, {question.model.numel / 1e9:.3g}e9 parameters, {question.precision}"
    figure.suptitle(f"{title}, on {setup.ranks:,} ranks", fontsize=11)
    save(figure, target)


def _kinds(question: Question, row: Row) -> list[float]:
    """Return the bytes of each kind at the peak, in the order of LOOKS."""
    state = [row.state.parameters, row.state.gradients, row.state.optimizer]
    if question.accounting != OWN:
        return [*state, row.unit_buffers, 0.0, 0.0]
    peak = max(row.step.phases.values(), key=lambda phase: phase.total)
    return [*state, peak.held.gathered, peak.held.flying + peak.held.kept + peak.room, peak.groups]


def _draw_memory(axis: Any, question: Question, rows: Sequence[Row]) -> None:
    limits = question.limits
    outside = [row.step.outside.total for row in rows] if question.offload is not None else []
    scale, unit = scale_of(max(max(row.peak for row in rows) + limits.activations, limits.memory, *outside, 0))
    width, left = (0.4, 0.21) if outside else (0.6, 0.0)
    places = [place - left for place in range(len(rows))]
    kinds = [_kinds(question, row) for row in rows]
    below = [0.0] * len(rows)
    for place, (label, colour, hatch) in enumerate(LOOKS):
        heights = [each[place] / scale for each in kinds]
        if any(heights):
            axis.bar(places, heights, width, bottom=below, color=colour, hatch=hatch, edgecolor="white", label=label)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    if limits.activations:
        high = limits.activations / scale
        look = {"color": "#cccccc", "edgecolor": "white", "label": "activations"}
        axis.bar(places, [high] * len(rows), width, bottom=below, **look)
        below = [low + high for low in below]
    _name_heights(axis, places, below)
    if question.offload is not None:
        beside, heights = [place + left for place in range(len(rows))], [nbytes / scale for nbytes in outside]
        look = {"color": "#f0e442", "hatch": "--", "edgecolor": "white", "label": WHERE[question.offload.place]}
        axis.bar(beside, heights, width, **look)
        _name_heights(axis, beside, heights)
        below = [*below, *heights]
    if limits.memory:
        axis.axhline(limits.memory / scale, color="#222222", linestyle="--", linewidth=1.2, label="memory of a rank")
    axis.set_xticks(range(len(rows)), [str(row.stage) for row in rows])
    axis.set(title="at the peak of a step", xlabel="stage", ylabel=f"{unit} per rank")
    axis.set_ylim(0, 1.08 * max(*below, limits.memory / scale))
    axis.legend(frameon=False, fontsize=9)


def _name_heights(axis: Any, places: Sequence[float], heights: Sequence[float]) -> None:
    """Write above each bar how high it is."""
    for place, height in zip(places, heights, strict=True):
        if not height:
            continue
        axis.annotate(f"{height:.3g}", (place, height), (0, 2), textcoords="offset points", ha="center", fontsize=9)


def _draw_times(axis: Any, question: Question, rows: Sequence[Row]) -> None:
    """Draw the time of the collectives, of the disk or the link to host memory, and of the step, as far as known."""
    known = any(row.times.compute for row in rows)
    times = [row.times for row in rows]
    alone = [("communication by itself", "#cc79a7", [one.communication for one in times])]
    if question.offload is not None:
        carrier = "disk" if question.offload.place == DISK else "link to host memory"
        alone.append((f"{carrier} by itself", "#f0e442", [one.carrying for one in times]))
    ends = [(one.compute or 0.0) + (one.exposed or 0.0) for one in times]
    most = max(*(height for _, _, heights in alone for height in heights), *ends)
    unit, per_second = ("s", 1.0) if most >= 1 else ("ms", 1e3)
    count = len(alone) + known
    width = 0.8 / count if count > 1 else 0.6
    for number, (label, colour, heights) in enumerate(alone):
        places = [place + (number - (count - 1) / 2) * width for place in range(len(rows))]
        axis.bar(
            places, [per_second * height for height in heights], width, color=colour, edgecolor="white", label=label
        )
        _name_heights(axis, places, [per_second * height for height in heights])
    if known:
        places = [place + (count - 1) / 2 * width for place in range(len(rows))]
        compute = [per_second * (one.compute or 0.0) for one in times]
        exposed = [per_second * (one.exposed or 0.0) for one in times]
        axis.bar(places, compute, width, color="#8a8a8a", edgecolor="white", label="step: computation")
        look = {"color": "#222222", "hatch": "xx", "edgecolor": "white"}
        axis.bar(places, exposed, width, bottom=compute, label="step: exposed", **look)
        _name_heights(axis, places, [per_second * end for end in ends])
    axis.set_xticks(range(len(rows)), [str(row.stage) for row in rows])
    axis.set(title="time of a step, at least", xlabel="stage", ylabel=unit)
    axis.set_ylim(0, 1.35 * per_second * most or 1.0)
    axis.legend(frameon=False, fontsize=9)
