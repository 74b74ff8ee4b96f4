"""Draw docs/scale.md's pictures, and print its table of published runs.

python docs/images/scale.py docs/images/simulated-steps.svg docs/images/scaling.svg

The first picture is of the latest benchmarks/results/simulated-*.json. All else is simulated here, in a minute or two.
"""

# ruff: noqa: INP001
from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")
mpl.rcParams["svg.hashsalt"] = "mpizero"
import matplotlib.pyplot as plt  # noqa: E402  (drawn without a screen)

from mpizero.collectives.links import Cluster, Link, place  # noqa: E402
from mpizero.plan import ModelShape, UnitShape, transformer  # noqa: E402
from mpizero.plan.simulation import simulate_step  # noqa: E402
from mpizero.plan.training import Speeds, Training  # noqa: E402

if TYPE_CHECKING:
    from mpizero.plan.simulation import Step

RESULTS = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "results"
PEAK = 312e12
"""An A100's operations per second in 16 bits."""
NODE, NETWORK = Link(alpha=5e-6, beta=1 / 300e9), Link(alpha=20e-6, beta=1 / 12.5e9)
"""NVLink's 600 GB/s of both directions, and one of four ports of 100 Gbit/s. Latencies are assumed."""
COLOURS = ("#1f6f8b", "#b03a2e", "#7b3fa0")
MEASURED, SIMULATED, NOMINAL = "#5c5c5c", "#1f6f8b", "#a9cfdb"


@dataclass(frozen=True, kw_only=True)
class Run:
    """Hold one published series: what was trained, and what throughput a GPU reached on how many."""

    name: str
    training: Training
    published: dict[int, float]
    """By number of GPUs, operations per second of one; the first is what compute is set to."""
    passes: float
    """Forwards that the published operations count per step: 4 with recomputation, 3 without."""
    reckoned: tuple[int, ...] = ()
    """Numbers of GPUs whose figure follows from another one that was published, and is not drawn."""


def by_linear(layers: int, width: int, vocabulary: int) -> ModelShape:
    """Return a GPT whose linear layers are units: four of width^2 and two of 4 width^2 a block."""
    parts = (*("qkvo"), "up", "down")
    units = []
    for index in range(layers):
        for part in parts:
            shape = (width, width * (4 if part in {"up", "down"} else 1))
            units.append(
                UnitShape(name=f"blocks.{index}.{part}", parameters=((part, shape),), flops=2.0 * shape[0] * shape[1])
            )
    root = (("embedding", (vocabulary, width)),)
    return ModelShape(
        name=f"GPT of {layers} layers, width {width}",
        units=(*units, UnitShape(name="", parameters=root, flops=2.0 * vocabulary * width)),
    )


RUNS = (
    Run(
        name="FSDP, GPT 175B",
        training=Training(model=by_linear(96, 12288, 50_000), tokens=20 * 512, recompute=True),
        published={128: 159e12, 512: 66.6e15 / 512},
        passes=4,
    ),
    Run(
        name="FSDP, GPT 1T",
        training=Training(model=by_linear(128, 25600, 50_000), tokens=4 * 2048, recompute=True),
        published={128: 84e12, 512: 81e12},
        passes=4,
    ),
    Run(
        name="MiCS, 100B",
        training=Training(model=transformer(80, 10240), tokens=8 * 2048, group=64, recompute=True),
        published={64: 0.545 * PEAK / 0.994, 512: 0.545 * PEAK},
        passes=4,
        reckoned=(64,),
    ),
)
SIZES = (64, 128, 256, 512, 1024)


def simulated(training: Training, ranks: int, flops: float) -> Step:
    """Return a step on nodes of eight GPUs and four ports, with the cheapest algorithms."""
    cluster = Cluster(size=ranks, nodes=place(ranks, 8), local=NODE, remote=NETWORK, wires=4, gamma=1e-12, copy=1e-12)
    return simulate_step(training, cluster, Speeds(flops=flops), choice="best")


def reached(run: Run, ranks: int, flops: float) -> float:
    """Return the operations per second of a GPU, counted as they were published."""
    return simulated(run.training, ranks, flops).flops * run.passes / 3


def calibrated(run: Run) -> float:
    """Return the operations per second of compute alone with which the first published figure comes out."""
    ranks, wanted = next(iter(run.published.items()))
    low, high = wanted / 2, 4 * wanted
    for _ in range(25):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(run, ranks, middle) < wanted else (low, middle)
    return high


def table(curves: dict[str, tuple[float, dict[int, float]]]) -> str:
    """Return the published figures beside the simulated ones."""
    lines = ["| run | compute set to | GPUs | published | simulated | error |", "|" + "---|" * 6]
    for run in RUNS:
        flops, curve = curves[run.name]
        first, *others = run.published
        for ranks in others:
            published, found = (
                values[ranks] / values[first] for values in (run.published, curve)
            )  # of the efficiency from the first number of GPUs
            lines.append(
                f"| {run.name} | {flops / 1e12:.0f} Tflop/s | {first} to {ranks} | {published:.3f} | {found:.3f} | "
                f"{100 * (found / published - 1):+.1f}% |"
            )
    return "\n".join(lines)


def draw_scaling(curves: dict[str, tuple[float, dict[int, float]]], target: Path) -> None:
    """Draw what a GPU reaches against the number of GPUs, published and simulated."""
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for run, colour in zip(RUNS, COLOURS, strict=True):
        curve = curves[run.name][1]
        axes.plot(list(curve), [value / 1e12 for value in curve.values()], color=colour, label=f"{run.name}, simulated")
        drawn = {ranks: value for ranks, value in run.published.items() if ranks not in run.reckoned}
        axes.plot(
            list(drawn),
            [value / 1e12 for value in drawn.values()],
            color=colour,
            marker="o",
            linestyle="none",
            label=f"{run.name}, published",
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(SIZES, [f"{size:,}" for size in SIZES])
    axes.set(xlabel="GPUs", ylabel="Tflop/s of a GPU", ylim=(0, None))
    finish(figure, axes, target)


def draw_steps(rows: list[dict[str, Any]], target: Path) -> None:
    """Draw measured and simulated steps, a panel for each number of hosts."""
    hosts = sorted({row["hosts"] for row in rows})
    figure, panels = plt.subplots(1, len(hosts), figsize=(10, 3.4), layout="constrained", sharey=True)
    for axes, count in zip(panels, hosts, strict=True):
        alike = [row for row in rows if row["hosts"] == count]
        for index, (name, key, colour) in enumerate(
            (
                ("measured", "measured_ms", MEASURED),
                ("simulated", "simulated_ms", SIMULATED),
                ("simulated from the rate alone", "nominal_ms", NOMINAL),
            )
        ):
            places = [number + 0.27 * (index - 1) for number in range(len(alike))]
            axes.bar(places, [row[key] / 1e3 for row in alike], 0.26, color=colour, label=name)
        spread = [
            [(row["measured_ms"] - row["low_ms"]) / 1e3 for row in alike],
            [(row["high_ms"] - row["measured_ms"]) / 1e3 for row in alike],
        ]
        axes.errorbar(
            [number - 0.27 for number in range(len(alike))], [row["measured_ms"] / 1e3 for row in alike], spread,
            color="black", linestyle="none", linewidth=0.8,
        )  # fmt: skip
        axes.set_xticks(range(len(alike)), [f"{row['rate_mbit']}\nstage {row['stage']}" for row in alike], fontsize=7)
        axes.set_title(f"{count} hosts, links of so many Mbit/s", fontsize=9)
    panels[0].set_ylabel("seconds of a step")
    finish(figure, panels[0], target)


def finish(figure: Any, axes: Any, target: Path) -> None:
    """Give a picture its legend and write it."""
    axes.legend(frameon=False, fontsize=8)
    for each in figure.axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(visible=True, axis="y", color="#e3e3e3", linewidth=0.7)
        each.set_axisbelow(True)
    figure.savefig(target, dpi=150, metadata={"Date": None} if target.suffix == ".svg" else None)
    plt.close(figure)


def main() -> None:
    """Draw both pictures and print the table."""
    steps, scaling = map(Path, sys.argv[1:3])
    latest = max(path for path in RESULTS.glob("simulated-*.json") if "quick" not in path.name)
    draw_steps(json.loads(latest.read_text(encoding="utf-8"))["rows"], steps)
    curves = {}
    for run in RUNS:
        flops = calibrated(run)
        sizes = [size for size in SIZES if size >= min(run.published)]
        curves[run.name] = flops, {size: reached(run, size, flops) for size in sizes}
    draw_scaling(curves, scaling)
    print(table(curves))
    often = replace(RUNS[-1], training=replace(RUNS[-1].training, backwards=4, no_sync=False))
    flops = calibrated(often)
    print(f"\nMiCS with four backwards a step: {reached(often, 512, flops) / reached(often, 64, flops):.3f}")


if __name__ == "__main__":
    main()
