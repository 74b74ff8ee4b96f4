"""Draw a result of benchmarks/training.py: step times beside the floor, and bytes of model state per rank by stage.

python benchmarks/plot.py benchmarks/results/DATE-training-2ranks-batch4.json docs/images/training.svg
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

OURS, PEER, FLOOR = "#1f6f8b", "#b9b9b9", "#5c5c5c"
KIND_COLOURS = {"parameters": "#1f6f8b", "gradients": "#e0a458", "optimizer": "#7d9d6f"}


def draw(result: dict, target: Path) -> None:
    """Write the picture to `target`; its ending says the format."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "mpizero"  # the same data give the same file
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.4), width_ratios=(3, 2))
    draw_times(left, result)
    draw_bytes(right, result)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(target, dpi=150, metadata={"Date": None} if target.suffix == ".svg" else None)


def draw_times(axes, result: dict) -> None:
    """Draw a bar per kind, and the floor as a line."""
    rows = result["rows"]
    times = [statistics.median(row["ms"]) for row in rows]
    colours = [FLOOR if r["kind"] == "compute" else OURS if r["kind"].startswith("mpizero") else PEER for r in rows]
    names = [row["kind"].replace("mpizero-", "mpizero\nstage ") for row in rows]
    bars = axes.bar(names, times, color=colours)
    axes.bar_label(bars, fmt="%.0f", fontsize=8)
    floor = [t for row, t in zip(rows, times, strict=True) if row["kind"] == "compute"]
    if floor:
        axes.axhline(floor[0], color=FLOOR, linewidth=0.8, linestyle="--")
    axes.margins(y=0.12)
    axes.set_ylabel("step, ms")
    axes.set_title(f"GPT 25.5M, fp32, {result['ranks']} ranks, batch {result['batch']} per rank", fontsize=9)
    axes.tick_params(axis="x", labelsize=7)


def draw_bytes(axes, result: dict) -> None:
    """Draw stacked bytes per rank for each stage."""
    rows = [row for row in result["rows"] if row.get("bytes")]
    names = [row["kind"].removeprefix("mpizero-") for row in rows]
    bottom = [0.0] * len(rows)
    for kind, colour in KIND_COLOURS.items():
        values = [row["bytes"][kind] / 2**20 for row in rows]
        axes.bar(names, values, bottom=bottom, color=colour, label=kind)
        bottom = [base + value for base, value in zip(bottom, values, strict=True)]
    for index, total in enumerate(bottom):
        axes.text(index, total, f"{total:.0f}", ha="center", va="bottom", fontsize=8)
    axes.set_ylim(0, max(bottom, default=1) * 1.35)
    axes.set_ylabel("model state per rank, MiB")
    axes.set_xlabel("stage")
    axes.set_title("measured, AdamW", fontsize=9)
    axes.legend(fontsize=7, frameon=False, ncols=3, loc="upper center")


def main() -> None:
    """Read the command line and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path, nargs="+")
    args = parser.parse_args()
    for target in args.picture:
        draw(json.loads(args.result.read_text()), target)


if __name__ == "__main__":
    main()
