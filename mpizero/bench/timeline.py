"""Pictures of simulated steps: what one rank computes when, and which collectives its links carry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpizero.bench.plots import matplotlib, save

if TYPE_CHECKING:
    from pathlib import Path

    from mpizero.plan.events import Span
    from mpizero.plan.simulation import Step

__all__ = ["draw", "draw_spans"]

ROWS = ("compute", "node", "network", "disk read", "disk write", "from host", "to host")
COLOURS = {
    "forward": "#8a8a8a",
    "backward": "#4d4d4d",
    "optimizer": "#b8b8b8",
    "gather": "#1f6f8b",
    "reduce": "#e0a458",
    "replicas": "#7b3fa0",
    "meet": "#b03a2e",
    "read": "#2e8b57",
    "load": "#2e8b57",
    "store": "#9acd32",
    "stream": "#556b2f",
}
"""By the first word of a span's label."""
WIDE = 0.04
"""Share of the step from which on a bar has its label in it."""
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def draw(step: Step, title: str, target: Path) -> None:
    """Write a step's timeline to `target`; its ending, .png or .svg, says the format.

    Raises:
        MpiZeroError: without matplotlib.
    """
    plt = matplotlib()
    rows = len({span.row for span in step.spans})
    figure, axes = plt.subplots(figsize=(11, max(2.6, 0.65 * rows)), layout="constrained")
    draw_spans(axes, step.spans, step.seconds)
    axes.set_title(title, fontsize=9, loc="left")
    save(figure, target)


def draw_spans(axes: Any, spans: tuple[Span, ...], seconds: float) -> None:
    """Draw a timeline on matplotlib axes, a row for compute and for each class of links, disks included, that is used.

    Args:
        axes: where.
        spans: the bars.
        seconds: the length of the step.
    """
    scale, unit = next((pair for pair in UNITS if seconds >= pair[0]), UNITS[-1])
    rows = [row for row in ROWS if any(span.row == row for span in spans)]
    seen: dict[str, Any] = {}
    for row in rows:
        bars = [span for span in spans if span.row == row]
        for kind, colour in COLOURS.items():
            alike = [span for span in bars if span.label.partition(" ")[0] == kind]
            if alike:
                places = [(span.start / scale, (span.stop - span.start) / scale) for span in alike]
                drawn = axes.broken_barh(
                    places, (rows.index(row) - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.3
                )
                seen.setdefault(kind, drawn)
        for span in bars:
            if span.stop - span.start >= WIDE * seconds:
                _name(axes, span, rows.index(row), scale)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlim(0, seconds / scale or 1)
    axes.set_xlabel(f"time, {unit}")
    axes.spines[["top", "right"]].set_visible(False)
    if seen:
        axes.legend(seen.values(), seen.keys(), loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)


def _name(axes: Any, span: Span, place: int, scale: float) -> None:
    """Write a bar's label into it."""
    dark = span.label.partition(" ")[0] not in {"reduce", "optimizer"}
    axes.text(
        (span.start + span.stop) / 2 / scale, place, span.label.partition(" ")[2] or span.label,
        ha="center", va="center", fontsize=6, color="white" if dark else "black", clip_on=True,
    )  # fmt: skip
