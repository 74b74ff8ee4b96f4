"""The rows of benchmarks/collectives: a function for each figure, with what it is to reach.

"Native" is the least time that the MPI library took for a size, by mpi4py's blocking call: under Open MPI with its
default choice, with each of its all-reduce algorithms 3 to 6, and with its component han.
"""

from __future__ import annotations

import importlib.util
import sys

from _collectives_figures import MIB, Found, listed, mean_of, resources, row, shown, times
from _collectives_runs import RATE, NotMeasuredError, Runs, variants

from mpizero.bench.summary import geometric_mean

SIMULATED = ("ring", "hierarchical", "halving_doubling")
SMALL_JOBS = (("all_reduce", "float32"), ("all_reduce", "int32"), ("broadcast", "float32"), ("all_gather", "float32"))


@row("symmetric fp32 all_reduce, 2 ranks, native/ours, 1 to 256 MiB", 2.8, 4.0)
def symmetric_2(runs: Runs) -> Found:
    return mean_of(over_native(runs, "all_reduce", 2, "symmetric"))


@row("symmetric fp32 all_reduce, 4 ranks, native/ours, 16 to 256 MiB", 3.0, 4.0)
def symmetric_4(runs: Runs) -> Found:
    ratios = over_native(runs, "all_reduce", 4, "symmetric")
    return mean_of({nbytes: ratio for nbytes, ratio in ratios.items() if nbytes >= 16 * MIB})


@row("private fp32 all_reduce, 2 ranks, native/ours, 1 to 256 MiB, none under 0.9", 1.3, 1.8)
def private_2(runs: Runs) -> Found:
    ratios = over_native(runs, "all_reduce", 2, "private")
    found = mean_of(ratios)
    return Found(value=found.value, detail=found.detail, holds=min(ratios.values()) >= 0.9)


@row("symmetric fp32 all_reduce, 2 ranks, gloo/ours, 1 to 256 MiB", 12, 18)
def gloo_2(runs: Runs) -> Found:
    if importlib.util.find_spec("torch") is None:
        raise NotMeasuredError("gloo needs torch")
    rows = main_job(runs, "all_reduce", 2)
    gloo, ours = times(rows, "gloo"), times(rows, "auto", "symmetric")
    return mean_of({nbytes: gloo[nbytes] / ours[nbytes] for nbytes in ours})


@row("auto over the best single algorithm, worst size, 2 and 4 ranks, both buffers", 1.15, 1.05, at_most=True)
def auto_choice(runs: Runs) -> Found:
    top = "1M" if runs.quick else "16M"
    words = f"-b 8 -e {top} -f 8 --algorithm all --buffer private,symmetric"
    worst, where = 0.0, ""
    for ranks in (2,) if runs.quick else (2, 4):
        rows = runs.perf("all_reduce", ranks, f"{words} {runs.close_loop}")
        for buffer in ("private", "symmetric"):
            # On one host auto takes loads: both were measured, and are the same code.
            auto, taken = times(rows, "auto", buffer), times(rows, "loads", buffer)
            for nbytes in auto:
                mine = min(auto[nbytes], taken[nbytes])
                others = [each for each in rows if (each["nbytes"], each["buffer"]) == (nbytes, buffer)]
                best = min((each for each in others if each["algorithm"] != "auto"), key=lambda r: r["t_median_us"])
                if mine / best["t_median_us"] > worst:
                    worst = mine / best["t_median_us"]
                    where = f"{shown(nbytes)} {buffer}, {ranks} ranks: {best['algorithm']} is better"
    return Found(value=worst, detail=where)


@row("4 B to 16 KiB, 2 ranks, verb over the same mpi4py call, worst", 4, 2, unit="us more", at_most=True)
def small_verb(runs: Runs) -> Found:
    return worst_small(runs, prepared=False)


@row("4 B to 16 KiB, 2 ranks, prepared over the same mpi4py call, worst", 1, 0.5, unit="us more", at_most=True)
def small_prepared(runs: Runs) -> Found:
    return worst_small(runs, prepared=True)


@row("the same, float sum, canonical order, prepared", 3, 1.5, unit="us more", at_most=True)
def small_canonical(runs: Runs) -> Found:
    return worst(small(runs, "all_reduce", "float32", "--order canonical", prepared=True))


@row("share of the memory limit, symmetric all_reduce, 2 ranks, 64 MiB and up, least", 0.90, 1.0)
def memory_share(runs: Runs) -> Found:
    rows = [each for each in main_job(runs, "all_reduce", 2) if each["algorithm"] == "auto"]
    least = 16 if runs.quick else 64
    shares = {
        each["nbytes"]: each["busbw_GBs"] / each["limit_GBs"]
        for each in rows
        if each["buffer"] == "symmetric" and each["nbytes"] >= least * MIB
    }
    return Found(value=min(shares.values()), detail=listed(shares))


@row("2 hosts x 2 ranks, 1 Gbit/s, hierarchical all_reduce of 16 and 64 MiB, wire limit over time", 0.85, 0.95)
def wire_2x2(runs: Runs) -> Found:
    with runs.cluster(2):
        return over_wire(hierarchical_2x2(runs), 1.0)


@row("the same of 16 MiB, the MPI library's default over ours", 5)
def wire_2x2_default(runs: Runs) -> Found:
    with runs.cluster(2):
        ours = times(hierarchical_2x2(runs), "hierarchical")
        size = 1 if runs.quick else 16
        words = f"-b {size}M -e {size}M --algorithm none --versus mpi4py -n 3 -w 0"
        theirs = times(runs.perf_on_hosts("all_reduce", 2, words), "mpi4py")
    return mean_of({nbytes: taken / ours[nbytes] for nbytes, taken in theirs.items()})


@row("4 hosts x 1 rank, 1 Gbit/s, ring all_reduce of 16 and 64 MiB, wire limit over time", 0.85, 0.95)
def wire_4x1(runs: Runs) -> Found:
    with runs.cluster(4):
        rows = runs.perf_on_hosts("all_reduce", 1, f"{shaped(runs)} --algorithm ring -n 3 -w 1")
    return over_wire(rows, 2 * 3 / 4)


def other_operation(operation: str) -> None:
    """Add the row of an operation other than all_reduce."""

    @row(f"symmetric {operation}, 2 and 4 ranks, native/ours, 1 to 256 MiB", 1.5, 2.5)
    def measure(runs: Runs) -> Found:
        by_ranks = {ranks: over_native(runs, operation, ranks, "symmetric") for ranks in (2, 4)}
        ratios = [ratio for found in by_ranks.values() for ratio in found.values()]
        detail = "; ".join(f"{ranks} ranks: {listed(found)}" for ranks, found in by_ranks.items())
        return Found(value=geometric_mean(ratios), detail=detail)


for _operation in ("reduce_scatter", "all_gather", "all_to_all", "broadcast"):
    other_operation(_operation)


@row("bf16 over fp32 all_reduce of the same bytes, symmetric, 16 MiB and up, 2 ranks", 1.6, 1.1, at_most=True)
def bf16_2(runs: Runs) -> Found:
    return bf16(runs, 2)


@row("bf16 over fp32 all_reduce of the same bytes, symmetric, 16 MiB and up, 4 ranks", 4, 2.5, at_most=True)
def bf16_4(runs: Runs) -> Found:
    return bf16(runs, 4)


@row("memory of an all_reduce of 256 MiB beside its array, per rank, 2 ranks", 132, 1, unit="MiB", at_most=True)
def scratch(runs: Runs) -> Found:
    found = {buffer: runs.probe(2, "memory", str(256 * MIB), buffer) for buffer in ("private", "symmetric")}
    grown = {buffer: each["grown"] / MIB for buffer, each in found.items()}
    detail = ", ".join(f"{buffer} {each:.1f}" for buffer, each in grown.items())
    return Found(value=max(grown.values()), detail=detail, holds=all(each["right"] for each in found.values()))


@row("predicted against measured, 2 hosts x 2 ranks, 1 to 64 MiB, worst", 30, 15, unit="%", at_most=True)
def prediction(runs: Runs) -> Found:
    from mpizero.collectives.cost import cost
    from mpizero.collectives.links import Cluster, fit

    words = "-b 1M -e 4M -f 4" if runs.quick else "-b 1M -e 64M -f 4"
    with runs.cluster(2):
        measured = runs.probe_on_hosts(2, "links")
        rows = runs.perf_on_hosts("all_reduce", 2, f"{words} --algorithm ring,hierarchical -n 3 -w 1")
    links = {name: fit([tuple(point) for point in measured[name]]) for name in ("local", "remote")}
    cluster = Cluster(size=4, nodes=(0, 0, 1, 1), gamma=measured["gamma"], copy=measured["copy"], **links)
    errors = {}
    for each in rows:
        predicted = cost("all_reduce", each["algorithm"], cluster, each["nbytes"]).seconds * 1e6
        errors[each["algorithm"], each["nbytes"]] = (predicted / each["t_median_us"] - 1) * 100
    detail = ", ".join(f"{name} {shown(nbytes)} {error:+.0f}%" for (name, nbytes), error in errors.items())
    return Found(value=max(map(abs, errors.values())), detail=detail)


@row("simulate 16,384 ranks, one all_reduce, at most 1 GiB", 10, 2, unit="s", at_most=True)
def simulate(runs: Runs) -> Found:
    slowest, most, parts = 0.0, 0, []
    for algorithm in SIMULATED[:1] if runs.quick else SIMULATED:
        words = f"-m mpizero simulate all_reduce --ranks 16384 --per-node 8 --bytes 1G --algorithm {algorithm}"
        seconds, nbytes = resources([sys.executable, *words.split()])
        slowest, most = max(slowest, seconds), max(most, nbytes)
        parts.append(f"{algorithm} {seconds:.1f} s, {nbytes / MIB:.0f} MiB")
    return Found(value=slowest, detail="; ".join(parts), holds=most <= 1 << 30)


def main_job(runs: Runs, operation: str, ranks: int) -> list[dict]:
    """Return the rows of the job in which mpizero is measured beside others."""
    is_main = operation == "all_reduce"
    peers = "gloo,mpi4py" if is_main and importlib.util.find_spec("torch") is not None else "mpi4py"
    buffers = "private,symmetric" if is_main else "symmetric"
    words = f"{runs.large} {runs.loop} --algorithm auto --buffer {buffers} --versus {peers}"
    return runs.perf(operation, ranks, words)


def native(runs: Runs, operation: str, ranks: int) -> dict[int, float]:
    """Return the least microseconds that the MPI library took, by size."""
    found = times(main_job(runs, operation, ranks), "mpi4py")
    for flags in variants(operation, quick=runs.quick):
        words = f"{runs.large} {runs.loop} --algorithm none --versus mpi4py"
        for nbytes, taken in times(runs.perf(operation, ranks, words, mpi_args=flags), "mpi4py").items():
            found[nbytes] = min(found[nbytes], taken)
    return found


def over_native(runs: Runs, operation: str, ranks: int, buffer: str) -> dict[int, float]:
    """Return native over ours by size."""
    ours = times(main_job(runs, operation, ranks), "auto", buffer)
    least = native(runs, operation, ranks)
    return {nbytes: least[nbytes] / taken for nbytes, taken in ours.items()}


def small(runs: Runs, operation: str, dtype: str, more: str = "", *, prepared: bool) -> dict[str, float]:
    """Return by how many microseconds ours is slower than mpi4py's call, by case."""
    words = f"-b 4 -e 16K -f 8 -d {dtype} --algorithm auto --prepared --versus mpi4py {runs.small_loop} {more}"
    rows = runs.perf(operation, 2, words)
    theirs, ours = times(rows, "mpi4py"), times(rows, "auto", prepared=prepared)
    return {f"{operation} {dtype} {shown(nbytes)}": ours[nbytes] - theirs[nbytes] for nbytes in ours}


def worst_small(runs: Runs, *, prepared: bool) -> Found:
    jobs = SMALL_JOBS[:1] if runs.quick else SMALL_JOBS
    return worst({k: v for job in jobs for k, v in small(runs, *job, prepared=prepared).items()})


def worst(excess: dict[str, float]) -> Found:
    case = max(excess, key=excess.__getitem__)
    typical = sorted(excess.values())[len(excess) // 2]
    return Found(value=excess[case], detail=f"{case}; median of the cases {typical:+.1f}")


def bf16(runs: Runs, ranks: int) -> Found:
    top = "16M" if runs.quick else "256M"
    words = f"-b 16M -e {top} -f 4 -d float32,bfloat16 --algorithm auto --buffer symmetric {runs.loop}"
    rows = runs.perf("all_reduce", ranks, words)
    by_type = {
        dtype: times([r for r in rows if r["dtype"] == dtype], "auto", "symmetric") for dtype in ("float32", "bfloat16")
    }
    ratios = {nbytes: by_type["bfloat16"][nbytes] / taken for nbytes, taken in by_type["float32"].items()}
    return Found(value=max(ratios.values()), detail=listed(ratios))


def shaped(runs: Runs) -> str:
    return "-b 1M -e 1M" if runs.quick else "-b 16M -e 64M -f 4"


def hierarchical_2x2(runs: Runs) -> list[dict]:
    return runs.perf_on_hosts("all_reduce", 2, f"{shaped(runs)} --algorithm hierarchical -n 3 -w 1")


def over_wire(rows: list[dict], share: float) -> Found:
    """Return the seconds in which a link carries `share` of each array, over those that were taken: the least."""
    shares = {r["nbytes"]: share * r["nbytes"] / RATE / (r["t_median_us"] * 1e-6) for r in rows}
    return Found(value=min(shares.values()), detail=listed(shares))
