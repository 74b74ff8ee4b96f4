"""Rows of benchmarks/training beside step times: hidden communication, memory, bytes, Python's overhead."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from _training_figures import Figure, Want, peak_of_sum, summed
from _training_jobs import NotMeasuredError

if TYPE_CHECKING:
    from _training_jobs import Jobs

MIB = 1 << 20
HOSTS = 2
NODE = 4
"""Ranks of the rows about memory."""
STATE_BAR, STATE_AIM = 2.0, 1.0
"""Per cent."""
POINTS = 300
"""Points of a curve of memory that are kept."""
FIRST_RATE = 1000
"""Mbit/s at which communication is measured first; the rate that is wanted follows from it."""
LEAST_RATE = 10


def hidden(jobs: Jobs) -> tuple[list[Figure], dict]:
    """Measure the share of communication that a step hides where it takes as long alone as compute does."""
    stages = (2,) if jobs.quick else (0, 2, 3)
    wants = {s: Want(name=f"share of communication hidden, 2 hosts, batch 4, stage {s}", bar=0.7, aim=0.9, unit="",
                     at_most=False) for s in stages}  # fmt: skip
    try:
        with jobs.cluster(HOSTS, f"{FIRST_RATE}mbit"):
            first = jobs.probe_on_hosts("calibrate", HOSTS, "tiny" if jobs.quick else "gpt")
    except NotMeasuredError as error:
        return [want.missing(error) for want in wants.values()], {}
    found, figures = {}, []
    compute = middle(rank["compute_ms"] for rank in first)
    for stage, want in wants.items():
        alone = middle(rank["communication_ms"][str(stage)] for rank in first)
        rate = max(round(FIRST_RATE * alone / compute), LEAST_RATE)
        try:
            found[stage] = hidden_at(jobs, stage, rate)
        except NotMeasuredError as error:
            figures.append(want.missing(error))
            continue
        row = found[stage]
        detail = "step {step_ms:.0f}, compute {compute_ms:.0f}, communication {communication_ms:.0f} ms".format(**row)
        figures.append(want.got([row["share"]], 1.0, detail=f"{detail}; links of {rate} Mbit/s"))
    return figures, found


def hidden_at(jobs: Jobs, stage: int, rate: int) -> dict:
    """Measure one stage on links of `rate` Mbit/s."""
    with jobs.cluster(HOSTS, f"{rate}mbit"):
        words = ("tiny" if jobs.quick else "gpt", str(stage), "2" if jobs.quick else "4")
        ranks = jobs.probe_on_hosts("hidden", HOSTS, *words)
    row = {name: middle(rank[name] for rank in ranks) for name in ("step_ms", "compute_ms", "communication_ms")}
    share = 1 - (row["step_ms"] - row["compute_ms"]) / row["communication_ms"]
    return {"rate_mbit": rate, "share": share, **row}


def middle(times) -> float:
    """Return the mean over ranks of their medians."""
    return statistics.mean(statistics.median(each) for each in times)


def state(jobs: Jobs) -> tuple[list[Figure], dict]:
    """Compare model state with its formula, and count the full copies that a node holds."""
    want = Want(name="model state per rank over its formula, every stage, fp32 and bf16, worst", bar=STATE_BAR,
                aim=STATE_AIM, unit="% off")  # fmt: skip
    copies = Want(name="full fp32 parameters on a node of 4 ranks, stage 2", bar=1.02, aim=1.01, unit="copies")
    try:
        ranks = jobs.probe("state", NODE, "tiny" if jobs.quick else "middle")
    except NotMeasuredError as error:
        return [want.missing(error), copies.missing(error)], {}
    rows = [row for rank in ranks for row in rank["rows"]]
    off = {id(row): 100 * (row["measured"]["total"] / row["formula"]["total"] - 1) for row in rows}
    worst = max(rows, key=lambda row: abs(off[id(row)]))
    more = f"stage {worst['stage']} {worst['precision']}: {off[id(worst)]:+.2f}%"
    allowed = max(100 * excess(row) / row["formula"]["total"] for row in rows) <= STATE_BAR
    if abs(off[id(worst)]) > STATE_BAR:
        more += f"; {'' if allowed else 'not '}within {STATE_BAR:g}% beside the root unit and 2 unit buffers"
    shared = [row for row in rows if (row["stage"], row["precision"]) == (2, "fp32")]
    held = sum(row["measured"]["parameters"] for row in shared)
    one = 4 * shared[0]["numel"]
    figures = [
        want.got([abs(off[id(worst)])], 0.0, detail=more, forgiven=allowed),
        copies.got([held / one], 1.0, detail=f"{held / MIB:.1f} MiB over {one / MIB:.1f}, windows divided"),
    ]
    return figures, {"rows": ranks[0]["rows"]}


def excess(row: dict) -> float:
    """Return the bytes above the formula and above what the bar allows beside it; below the formula counts too."""
    over = row["measured"]["total"] - row["formula"]["total"]
    width = 4 if row["precision"] == "fp32" else 2
    return max(over - row["root"] * width - 2 * row["unit_buffers"], -over)


def resident(jobs: Jobs) -> tuple[list[Figure], dict]:
    """Compare the peak over time of the sum over ranks of proportional set sizes, ours at stage 3 and FSDP2's."""
    want = Want(name="peak of summed PSS, stage 3 over FSDP2, 101M parameters, 4 ranks", bar=1.0, aim=0.7)
    shape, ranks = ("small", 2) if jobs.quick else ("large", NODE)
    found = {}
    for kind in ("mpizero-3", "fsdp2"):
        try:
            said = jobs.steps(kind, ranks, "--shape", shape, "--batches", "1", "--steps", "3", "--watch")
        except NotMeasuredError as error:
            return [want.missing(error)], {}
        series = [rank["pss"] for rank in said]
        ready = max(rank["ready"] for rank in said)
        found[kind] = {
            "peak": peak_of_sum(series, ready),
            "peak_building": peak_of_sum(series),
            "sum_of_peaks": sum(max((b for at, b in one if at >= ready), default=0) for one in series),
            "curve": thinned(summed(series), ready),
        }
    ours, peer = found["mpizero-3"], found["fsdp2"]
    detail = f"{ours['peak'] / MIB:.0f} over {peer['peak'] / MIB:.0f} MiB in steps; with the building of the model "
    detail += f"{ours['peak_building'] / MIB:.0f} over {peer['peak_building'] / MIB:.0f}"
    return [want.got([ours["peak"] / peer["peak"]], detail=detail)] if peer["peak"] else [
        want.missing("no look")
    ], found


def thinned(curve: list[tuple[float, float]], zero: float) -> list[tuple[float, float]]:
    """Return at most POINTS of a curve, the largest of each stretch, its seconds counted from `zero`."""
    step = max(-(-len(curve) // POINTS), 1)
    kept = [max(curve[at : at + step], key=lambda point: point[1]) for at in range(0, len(curve), step)]
    return [(round(at - zero, 3), value) for at, value in kept]


def traffic(jobs: Jobs) -> tuple[list[Figure], dict]:
    """Compare a step's bytes over messages with theory, and tell what loads move instead."""
    want = Want(name="bytes over messages per step over theory, stages 0 to 3, worst", bar=1.0, unit="% off")
    shape = "tiny" if jobs.quick else "small"
    try:
        sent = [rank["rows"] for rank in jobs.probe("bytes", 2, shape, environment={"MPIZERO_LOADS": "0"})]
        loaded = [] if jobs.quick else [rank["rows"] for rank in jobs.probe("bytes", 2, shape)]
    except NotMeasuredError as error:
        return [want.missing(error)], {}
    rows = [row for rank in sent for row in rank]
    off = [100 * abs(row["bytes_sent"] / row["theory"] - 1) for row in rows]
    parts = [f"stage {row['stage']} {row['bytes_sent'] - row['counted']:+.0f} B" for row in sent[0]]
    detail = "beyond the builders' counts for padded units: " + ", ".join(parts)
    if loaded:
        pairs = zip(loaded[0], sent[0], strict=True)
        parts = [f"stage {row['stage']} {row['bytes_loaded'] / other['theory']:.2f}" for row, other in pairs]
        detail += "; loaded on one host over the same theory: " + ", ".join(parts)
    return [want.got([max(off)], 0.0, detail=detail)], {"messages": sent[0], "loads": loaded[0] if loaded else []}


def overhead(jobs: Jobs) -> tuple[list[Figure], dict]:
    """Measure what a unit costs in Python on one rank."""
    want = Want(name="processor time added per unit and step, 1 rank, 200 tiny units", bar=150, aim=60, unit="us")
    try:
        found = jobs.probe("overhead", 1, "10" if jobs.quick else "60")[0]
    except NotMeasuredError as error:
        return [want.missing(error)], {}
    stages = {name: us for name, us in found["us"].items() if name.startswith("stage")}
    detail = ", ".join(f"{name} {us:.0f}" for name, us in stages.items()) + f", bare hooks {found['us']['hooks']:.0f}"
    detail += f"; by the clock {max(us for name, us in found['wall_us'].items() if name in stages):.0f}"
    return [want.got([max(stages.values())], found["us"]["hooks"], detail=detail)], found
