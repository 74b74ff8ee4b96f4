"""Draw what lives when in one step of a model of a root and three blocks, at stages 0, 2 and 3 and shared by a node.

python docs/images/unit_life.py docs/images/unit-life.svg
"""

# ruff: noqa: INP001
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

COMPUTE, GATHER, REDUCE = "#5c5c5c", "#1f6f8b", "#e0a458"
PARAMETERS, GRADIENTS, MEETING = "#a9cfdb", "#f3d9b1", "#b03a2e"
ROWS = ("compute", "collectives", "root", "block 1", "block 2", "block 3")
FORWARD = (("root", 0.7), ("1", 1.0), ("2", 1.0), ("3", 1.0), ("root", 0.7))
BACKWARD = (("root", 1.2), ("3", 2.0), ("2", 2.0), ("1", 2.0), ("root", 0.8))
PANELS = {
    "Stage 0: full parameters and gradients live always; gradients are all-reduced": (0, False),
    "Stages 1 and 2: full parameters live always, and are gathered once after each step": (2, False),
    "Stage 3: full parameters live from a unit's gather to its release, twice a step": (3, False),
    "Stages 1 to 3, parameters shared by the node: one copy for its ranks lives always, nothing is gathered": (3, True),
}
UNITS = ("root", "1", "2", "3")
Times = dict[str, list[tuple[float, float]]]
"""By unit, when it computes."""


class Panel:
    """Draw one stage's step on axes whose rows are `ROWS`, from above."""

    def __init__(self, axes: Any, stage: int, *, shared: bool) -> None:
        self.axes, self.stage, self.shared = axes, stage, shared
        self.cut = stage > 0
        self.gathers = self.cut and not shared
        self.released = stage == 3 and not shared

    def bar(self, row: str, start: float, stop: float, colour: str, text: str) -> None:
        """Draw one bar with its text."""
        place = ROWS.index(row)
        self.axes.barh(place, stop - start, left=start, height=0.8, color=colour, edgecolor="white", linewidth=0.6)
        dark = colour in {COMPUTE, GATHER}
        self.axes.text(
            (start + stop) / 2, place, text, ha="center", va="center", fontsize=6, color="white" if dark else "black"
        )

    def live(self, unit: str, start: float, stop: float, colour: str) -> None:
        """Draw how long a unit's full parameters (upper half of its row) or gradients (lower half) live."""
        place = ROWS.index("root" if unit == "root" else f"block {unit}") + (-0.2 if colour == PARAMETERS else 0.2)
        self.axes.barh(place, stop - start, left=start, height=0.36, color=colour)

    def meet(self, at: float, text: str, style: str = "-", side: str = "center") -> None:
        """Draw a meeting of all ranks, and name it above."""
        self.axes.axvline(at, color=MEETING, linewidth=0.9, linestyle=style)
        self.axes.text(at, -0.75, text, ha=side, va="bottom", fontsize=6, color=MEETING)

    def draw(self) -> float:
        """Draw the step; return when it ends."""
        start = 0.5 if self.gathers else 0.0  # the root's gather is waited for
        if self.cut:
            self.meet(0, "forward")
        forward, at = self.phase(FORWARD, start)
        self.meet(at + 0.25, "backward", ":")
        backward, end = self.phase(BACKWARD, at + 0.25)
        if self.gathers:
            self.draw_gathers(forward, backward)
        last = self.draw_reductions(backward)
        self.meet(last + 0.1, "end of backward", side="right")
        self.bar("compute", last + 0.15, last + 0.6, COMPUTE, "clip")
        self.meet(last + 0.6, "clip", side="left")
        stop = last + 0.65 + (0.8 if self.cut else 1.6)
        self.bar("compute", last + 0.65, stop, COMPUTE, "step")
        self.draw_parameters(forward, backward, stop)
        self.draw_gradients(backward, stop)
        return max(end, stop)

    def phase(self, parts: Any, at: float) -> tuple[Times, float]:
        """Draw the compute of a forward or backward; return each unit's intervals, and the end."""
        times: Times = {}
        for unit, length in parts:
            self.bar("compute", at, at + length, COMPUTE, unit)
            times.setdefault(unit, []).append((at, at + length))
            at += length
        return times, at

    def draw_gathers(self, forward: Times, backward: Times) -> None:
        """Draw gathers: at stages 1 and 2 all at once, at stage 3 one unit ahead of need."""
        begun = {"root": 0.0, "1": 0.5, "2": 1.0, "3": 1.5}
        if self.released:
            begun |= {"2": forward["1"][0][0], "3": forward["2"][0][0]}
        self.begun = begun
        for unit, at in begun.items():
            self.bar("collectives", at, at + 0.5, GATHER, unit)
        self.again = {}
        if self.released:
            self.again = {"3": forward["root"][-1][1], "2": backward["3"][0][0], "1": backward["2"][0][0]}
            for unit, at in self.again.items():
                self.bar("collectives", at, at + 0.5, GATHER, unit)

    def draw_reductions(self, backward: Times) -> float:
        """Draw the reductions, each begun when its unit's gradients are complete; return the end of the last one."""
        self.reduced = {}
        at = 0.0
        for unit in ("3", "2", "1", "root"):
            at = max(at, backward[unit][-1][1] + (0.5 if self.released and unit not in {"root", "1"} else 0))
            self.bar("collectives", at, at + 0.9, REDUCE, unit)
            at += 0.9
            self.reduced[unit] = at
        return at

    def draw_parameters(self, forward: Times, backward: Times, stop: float) -> None:
        """Draw how long full parameters live."""
        for unit in UNITS:
            if not self.released:
                self.live(unit, 0, stop, PARAMETERS)
            elif unit == "root":
                self.live(unit, 0, backward[unit][-1][1], PARAMETERS)
            else:
                self.live(unit, self.begun[unit], forward[unit][-1][1], PARAMETERS)
                self.live(unit, self.again[unit], backward[unit][-1][1], PARAMETERS)

    def draw_gradients(self, backward: Times, stop: float) -> None:
        """Draw how long full gradients live."""
        for unit in UNITS:
            self.live(unit, *((backward[unit][0][0], self.reduced[unit]) if self.cut else (0, stop)), GRADIENTS)


def draw(target: Path) -> None:
    """Write the picture to `target`; its ending says the format."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "mpizero"  # the same script gives the same file
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    figure, panels = plt.subplots(len(PANELS), 1, figsize=(9.6, 9.4), sharex=True)
    ends = []
    for axes, (title, (stage, shared)) in zip(panels, PANELS.items(), strict=True):
        ends.append(Panel(axes, stage, shared=shared).draw())
        axes.set_title(title, fontsize=8, loc="left", pad=14)
        axes.set_yticks(range(len(ROWS)), ROWS, fontsize=7)
        axes.set_ylim(len(ROWS) - 0.4, -0.6)
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    panels[-1].set_xlim(-0.3, max(ends) + 0.1)
    panels[-1].set_xlabel("time of one step, not to scale", fontsize=8)
    kinds = {"compute": COMPUTE, "gather": GATHER, "reduction": REDUCE}
    kinds |= {"full parameters live": PARAMETERS, "full gradients live": GRADIENTS, "ranks meet": MEETING}
    handles = [Patch(color=colour, label=label) for label, colour in kinds.items()]
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), fontsize=7, frameon=False)
    figure.tight_layout(rect=(0, 0.025, 1, 1))
    figure.savefig(target, dpi=130, metadata={"Date": None} if target.suffix == ".svg" else None)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        draw(Path(name))
