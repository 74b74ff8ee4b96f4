"""The picture of benchmarks/training: steps over compute, hidden communication, memory over time."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from mpizero.errors import MpiZeroError

if TYPE_CHECKING:
    from pathlib import Path

OURS, PEER, FLOOR, BAR = "#1f6f8b", "#b9b9b9", "#5c5c5c", "#c2410c"
SHADES = {"mpizero-3": OURS, "fsdp2": "#8a8a8a"}
GIB = 1 << 30


def draw(result: dict, targets: list[Path]) -> bool:
    """Write the picture to each target, whose ending says the format; return whether there was anything to draw.

    Raises:
        MpiZeroError: without matplotlib.
    """
    plt = _matplotlib()
    panels = [(_draw_steps, rows) for batch in (4, 1) if (rows := _kinds(result, batch))]
    panels += [(_draw_hidden, result["hidden"])] if result.get("hidden") else []
    panels += [(_draw_memory, result["resident"])] if result.get("resident") else []
    if not panels:
        return False
    columns = min(len(panels), 2)
    lines = -(-len(panels) // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(6.6 * columns, 4.2 * lines), layout="constrained", squeeze=False
    )
    axes = list(grid.flat)
    for (panel, data), axis in zip(panels, axes, strict=False):
        panel(axis, data, result)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    figure.suptitle(_title(result), fontsize=10)
    for target in targets:
        figure.savefig(target, dpi=150, metadata={"Date": None} if target.suffix == ".svg" else None)
    plt.close(figure)
    return True


def _matplotlib() -> Any:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MpiZeroError(f"the picture needs matplotlib ({error}): pip install 'mpizero[plot]'") from error
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "mpizero"  # the same data give the same file
    import matplotlib.pyplot as plt

    return plt


def _kinds(result: dict, batch: int) -> list[dict]:
    return [row for row in result.get("kinds", []) if row["batch"] == batch and row["over_compute"]]


def _draw_steps(axis: Any, rows: list[dict], result: dict) -> None:
    """Draw a bar per kind with its range over rounds, and a mark at what it is to reach."""
    batch = rows[0]["batch"]
    bars = {figure["name"]: figure["bar"] for figure in result["rows"]}
    widest = max(max(row["over_compute"]) for row in rows)
    for place, row in enumerate(rows):
        ratios = row["over_compute"]
        middle = statistics.median(ratios)
        colour = FLOOR if row["kind"] == "compute" else OURS if row["kind"].startswith("mpizero") else PEER
        axis.barh(place, middle, color=colour, height=0.68)
        axis.plot([min(ratios), max(ratios)], [place, place], color="black", linewidth=1)
        text = f"{middle:.2f}  ({statistics.median(row['ms']):.0f} ms)"
        axis.text(max(*ratios, middle) + 0.03 * widest, place, text, va="center", fontsize=8)
        bar = bars.get(f"step over compute, batch {batch}, stage {row['kind'][-1]}")
        if bar is not None and row["kind"].startswith("mpizero"):
            axis.plot([bar, bar], [place - 0.4, place + 0.4], color=BAR, linewidth=2)
    axis.plot([], [], color=BAR, linewidth=2, label="to reach, at most")
    axis.plot([], [], color="black", linewidth=1, label="range over rounds")
    axis.axvline(1, color=FLOOR, linewidth=0.8, linestyle="--")
    axis.set_yticks(range(len(rows)), [row["label"].replace(", ", "\n") for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.4 * widest)
    axis.set_title(f"batch {batch}: step over compute alone (shorter is better)", fontsize=10)
    axis.legend(fontsize=8, frameon=False, loc="upper right")


def _draw_hidden(axis: Any, found: dict, _result: dict) -> None:
    """Draw each stage's step as compute and the communication that shows, beside the communication that hides."""
    stages = list(found)
    rows = [found[stage] for stage in stages]
    exposed = [max(row["step_ms"] - row["compute_ms"], 0) for row in rows]
    concealed = [max(row["communication_ms"] - more, 0) for row, more in zip(rows, exposed, strict=True)]
    base = [row["compute_ms"] for row in rows]
    places = range(len(stages))
    axis.bar(places, base, color=FLOOR, label="compute alone", width=0.6)
    axis.bar(places, exposed, bottom=base, color=BAR, label="communication that shows", width=0.6)
    top = [one + more for one, more in zip(base, exposed, strict=True)]
    axis.bar(places, concealed, bottom=top, color="#dbe9ee", edgecolor=OURS, linewidth=0.7, linestyle="--",
             label="communication that is hidden", width=0.6)  # fmt: skip
    for place, (row, under, more) in enumerate(zip(rows, top, concealed, strict=True)):
        text = f"{row['share']:.0%} hidden\n{row['rate_mbit']} Mbit/s"
        axis.text(place, under + more, text, ha="center", va="bottom", fontsize=8)
    axis.set_ylim(0, 1.5 * max(one + more for one, more in zip(top, concealed, strict=True)))
    axis.set_xticks(places, [f"stage {stage}" for stage in stages], fontsize=8)
    axis.set_title("2 hosts, batch 4, links on which communication alone takes as long as compute", fontsize=10)
    axis.set_ylabel("ms")
    axis.legend(fontsize=7, frameon=False, loc="upper left", ncols=3, columnspacing=1)


def _draw_memory(axis: Any, found: dict, result: dict) -> None:
    """Draw the summed PSS over time, the first step at 0."""
    names = {"mpizero-3": "mpizero stage 3", "fsdp2": "torch FSDP2"}
    for kind, row in found.items():
        seconds = [at for at, _ in row["curve"]]
        axis.plot(seconds, [value / GIB for _, value in row["curve"]], color=SHADES[kind], linewidth=1.3,
                  label=f"{names[kind]}, peak in steps {row['peak'] / GIB:.2f} GiB")  # fmt: skip
        axis.axhline(row["peak"] / GIB, color=SHADES[kind], linewidth=0.7, linestyle=":")
    axis.axvline(0, color=FLOOR, linewidth=0.8, linestyle="--")
    axis.set_ylim(0, 1.3 * max(row["peak_building"] for row in found.values()) / GIB)
    axis.text(0, axis.get_ylim()[1] * 0.01, " steps", fontsize=7, color=FLOOR, va="bottom")
    what = "2 ranks, a small model" if result["quick"] else "4 ranks, 101M parameters"
    axis.set_title(f"proportional set size summed over {what}", fontsize=10)
    axis.set(xlabel="seconds from the first step", ylabel="GiB")
    axis.legend(fontsize=8, frameon=False, loc="upper left")


def _title(result: dict) -> str:
    machine, versions = result.get("machine", {}), result.get("versions", {})
    what = "a small GPT (quick run: the figures mean little)" if result["quick"] else "GPT of 25.5M parameters"
    where = f"{machine.get('cores', '?')} cores, {machine.get('processor', '')}; {versions.get('mpi', '')}"
    where += f", torch {versions.get('torch', '?')}; {result['date'][:10]}"
    return f"{what}, fp32, AdamW, 2 ranks, one torch thread each\n{where}"
