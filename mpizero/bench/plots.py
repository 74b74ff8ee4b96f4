"""Pictures of microbenchmarks: time and bus bandwidth against size, and speed-up over the MPI library's own.

A colour and a marker stand for an algorithm, the line and the marker's filling for the buffer, so that a picture can be
read without colours too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpizero.errors import ArgumentError, MpiZeroError, must_be

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FORMATS", "Picture", "draw", "matplotlib", "picture_file", "pictures_of", "save"]

FORMATS = (".png", ".svg")
FIXED = {"native": ("#222222", "s"), "mpi4py": ("#8a8a8a", "D"), "gloo": ("#a0522d", "X")}
"""Colours and markers of what mpizero is compared with: the same in every picture."""
BASELINE = {"native", "mpi4py"}
"""The MPI library's own collective, by mpizero and by mpi4py: the quicker of them is what a speed-up is over."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e6a100", "#56b4e9", "#7b3fa0", "#6b8e23", "#c2185b", "#00695c")
MARKERS = ("o", "^", "v", "P", "<", ">", "*", "h", "d", "p")
LIMIT = "#666666"
TICKS = 8
"""Labels on an axis of sizes, at most."""

Point = tuple[int, float]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Hold what is drawn together: one operation, element type and reduction."""

    name: str
    """The part of the file's name that tells it from the others of the same results; "" where it is alone."""
    title: str
    rows: tuple[dict[str, Any], ...]


def pictures_of(results: dict[str, Any]) -> list[Picture]:
    """Return the pictures that results make, one for each element type and reduction in them."""
    kinds = list(dict.fromkeys((row["operation"], row["dtype"], row["op"]) for row in results["rows"]))
    found = []
    for kind in kinds:
        rows = tuple(row for row in results["rows"] if (row["operation"], row["dtype"], row["op"]) == kind)
        name = "-".join(kind[1:]) if len(kinds) > 1 else ""
        found.append(Picture(name=name, title=_title(results, kind), rows=rows))
    return found


def draw(picture: Picture, target: Path) -> None:
    """Write a picture to `target`; its ending, .png or .svg, says the format. The same rows give the same file.

    Raises:
        MpiZeroError: without matplotlib.
    """
    plt = matplotlib()
    series = _series(picture.rows)
    styles = _styles(series)
    panels = [_draw_times, _draw_bandwidth]
    if any(row["algorithm"] in BASELINE for row in picture.rows):
        panels.append(_draw_speed_up)
    figure, axes = plt.subplots(1, len(panels), figsize=(4.5 * len(panels) + 1.8, 5), layout="constrained")
    for panel, axis in zip(panels, axes, strict=True):
        panel(axis, series, styles)
        _finish(axis, sorted({row["nbytes"] for row in picture.rows}))
    _draw_limits(axes, picture.rows)
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    figure.suptitle(picture.title, fontsize=11)
    save(figure, target)


def save(figure: Any, target: Path) -> None:
    """Write a figure, the same one to the same bytes, and forget it."""
    figure.savefig(target, dpi=150, metadata={"Date": None} if target.suffix == ".svg" else None)
    matplotlib().close(figure)


def picture_file(flag: str, text: str | None) -> Path | None:
    """Return the file that a flag names, None for no text; raise ArgumentError for one that cannot be drawn."""
    if not text:
        return None
    path = Path(text)
    if path.suffix not in FORMATS or not path.resolve().parent.is_dir():
        raise ArgumentError(must_be(flag, f"a file that ends in {' or '.join(FORMATS)}, in a folder that exists", text))
    return path


def matplotlib() -> Any:
    """Return matplotlib's pyplot, which draws without a screen; raise MpiZeroError where it is not installed."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        text = f"the picture needs matplotlib ({error}): pip install 'mpizero[plot]'"
        raise MpiZeroError(text) from error
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "mpizero"
    import matplotlib.pyplot as plt

    return plt


Key = tuple[str, str, bool]
"""Algorithm, with the wire of device memory behind it, buffer, whether prepared."""
Series = dict[Key, list[dict[str, Any]]]


def _series(rows: tuple[dict[str, Any], ...]) -> Series:
    found: Series = {}
    for row in sorted(rows, key=lambda row: row["nbytes"]):
        found.setdefault(_key(row), []).append(row)
    order = {key: place for place, key in enumerate(map(_key, rows))}
    return dict(sorted(found.items(), key=lambda item: order[item[0]]))


def _key(row: dict[str, Any]) -> Key:
    name, wire = row["algorithm"], row.get("wire", "")
    return (f"{name}@{wire}" if wire and name not in FIXED else name, row["buffer"], row["prepared"])


def _styles(series: Series) -> dict[Key, dict[str, Any]]:
    """Return matplotlib's words for each series."""
    ours = [name for name in dict.fromkeys(key[0] for key in series) if name not in FIXED]
    looks = {name: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(ours)} | FIXED
    buffers = {key[1] for key in series}
    found = {}
    for key in series:
        name, buffer, prepared = key
        colour, marker = looks[name]
        solid = buffer == "symmetric" or len(buffers) == 1
        label = name + (f", {buffer}" if len(buffers) > 1 else "") + (", prepared" if prepared else "")
        found[key] = {
            "color": colour,
            "marker": marker,
            "markersize": 5,
            "markerfacecolor": colour if solid else "white",
            "linestyle": ":" if prepared else "-" if solid else "--",
            "linewidth": 1.4,
            "label": label,
        }
    return found


def _draw_times(axis: Any, series: Series, styles: dict[Key, dict[str, Any]]) -> None:
    _lines(axis, series, styles, lambda row: row["t_median_us"])
    axis.set(yscale="log", title="time (lower is better)", ylabel="median of the slowest rank, us")


def _draw_bandwidth(axis: Any, series: Series, styles: dict[Key, dict[str, Any]]) -> None:
    _lines(axis, series, styles, lambda row: row["busbw_GBs"] or math.nan)
    axis.set(yscale="log", title="bus bandwidth (higher is better)", ylabel="bus bandwidth, GB/s")


def _draw_speed_up(axis: Any, series: Series, styles: dict[Key, dict[str, Any]]) -> None:
    """Draw the MPI library's time, the least that was measured of it, over each one's time at the same size."""
    native: dict[int, float] = {}
    for key, rows in series.items():
        for row in rows if key[0] in BASELINE else ():
            native[row["nbytes"]] = min(row["t_median_us"], native.get(row["nbytes"], math.inf))
    _lines(axis, series, styles, lambda row: native.get(row["nbytes"], math.nan) / row["t_median_us"])
    axis.axhline(1.0, color=LIMIT, linewidth=0.8)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g} x" if value >= 1 else f"1/{1 / value:g} x")
    axis.set(title="speed-up over the MPI library", ylabel="its time over time")


def _lines(axis: Any, series: Series, styles: dict[Key, dict[str, Any]], value: Callable[[Any], float]) -> None:
    for key, rows in series.items():
        axis.plot([row["nbytes"] for row in rows], [value(row) for row in rows], **styles[key])


def _draw_limits(axes: Any, rows: tuple[dict[str, Any], ...]) -> None:
    """Draw the memory limit as a line into the panels of times and of bandwidth."""
    limits = {row["nbytes"]: row for row in rows if row["limit_GBs"]}
    if not limits:
        return
    sizes = sorted(limits)
    bandwidth = [limits[size]["limit_GBs"] for size in sizes]
    # Time and bus bandwidth of one size have the same product, whoever moves the bytes.
    times = [limits[size]["t_median_us"] * limits[size]["busbw_GBs"] / limits[size]["limit_GBs"] for size in sizes]
    for axis, values in ((axes[0], times), (axes[1], bandwidth)):
        axis.plot(
            sizes, values, color=LIMIT, linewidth=3, alpha=0.5, zorder=1, label="memory limit:\nall ranks copying"
        )


def _finish(axis: Any, sizes: list[int]) -> None:
    axis.set_xscale("log", base=2)
    step = -(-len(sizes) // TICKS)
    shown = sizes[::-1][::step][::-1]
    axis.set_xticks(shown, [_short(size) for size in shown], rotation=45, fontsize=8)
    axis.minorticks_off()
    axis.set_xlabel("size of the whole array")
    axis.grid(visible=True, color="#e3e3e3", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _short(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} B"


def _title(results: dict[str, Any], kind: tuple[str, str, str]) -> str:
    operation, dtype, op = kind
    ranks, nodes = results["ranks"], results["nodes"]
    where = f"{ranks} rank{'s' * (ranks != 1)} on {nodes} host{'s' * (nodes != 1)}"
    if nodes > 1:
        where += f" ({', '.join(map(str, results['per_node']))} per host)"
    what = f"{operation} of {dtype}" + (f", {op}" if op != "none" else "")
    machine = f"{results['machine']['cores']} cores, {results['machine']['processor']}"
    return f"{what}: {where}, {results['versions']['mpi']}\n{machine}; {results['date'][:10]}"
