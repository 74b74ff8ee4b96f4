"""What a microbenchmark prints: a heading, a row per case, and a footer, as nccl-tests do."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from mpizero.bench.cases import CPU, NO_OP
from mpizero.tables import aligned

if TYPE_CHECKING:
    from mpizero.bench.results import Row

__all__ = ["label", "report"]

HEAD = ("size", "count", "type", "redop", "algorithm", "buffer", "time", "min", "p99", "algbw", "busbw", "#wrong")
UNITS = ("(B)", "(elements)", "", "", "", "", "(us)", "(us)", "(us)", "(GB/s)", "(GB/s)", "")
RIGHT = (0, 1, *range(6, len(HEAD)))


def report(results: dict[str, Any], rows: list[Row]) -> str:
    """Return the whole text.

    Args:
        results: what the JSON file holds.
        rows: its rows.
    """
    table = aligned([HEAD, UNITS, *(_cells(row) for row in rows)], right=RIGHT).splitlines()
    lines = [f"# {line}" for line in _heading(results)]
    lines += ["#", *(f"# {line}" for line in table[:2]), *(f"  {line}" for line in table[2:])]
    return "\n".join([*lines, *(f"# {line}" for line in _footer(results, rows))])


def label(row: Row) -> str:
    """Return the algorithm's name, the wire of device memory, and a mark where the call was prepared."""
    name = f"{row.algorithm}@{row.wire}" if row.wire else row.algorithm
    return f"{name}+prepared" if row.prepared else name


def _heading(results: dict[str, Any]) -> list[str]:
    versions, machine = results["versions"], results["machine"]
    per_node = ",".join(map(str, results["per_node"]))
    lines = [
        f"{results['benchmark']}: mpizero {versions['mpizero']}, {versions['mpi']}, Python {versions['python']}, "
        f"numpy {versions['numpy']}" + (f", torch {versions['torch']}" if versions["torch"] else ""),
        f"ranks {results['ranks']}  hosts {results['nodes']}  ranks per host {per_node}",
        f"machine: {machine['cores']} cores, {machine['processor']}  date {results['date']}",
        f"warm-up {results['warm_up']}  seed {results['seed']}  root {results['root']}",
        "time: median over the iterations of the slowest rank's time; min and p99 over the same",
        *_of_device(results),
    ]
    return lines + _left_out(results["left_out"])


def _of_device(results: dict[str, Any]) -> list[str]:
    """Return what there is to say of where the buffers lay; nothing for host memory."""
    if results.get("device", CPU) == CPU:
        return []
    names = ", ".join(f"{results['gpus'].count(name)} x {name}" for name in dict.fromkeys(results["gpus"]))
    notes = {"cuda": names, "stand-in": "a GPU that the host plays: times and speeds mean nothing"}
    lines = [f"device: {results['device']}, {notes[results['device']]}"]
    return [*lines, "time includes the device's completion; algorithm@wire, copies: all to the host and back"]


def _left_out(reasons: dict[str, str]) -> list[str]:
    """Return a line per algorithm, with the first of its reasons: those for other types and reductions are alike."""
    cases: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        cases.setdefault(name.partition(" ")[0], []).append(f"{name}: {reason}")
    more = {name: f" (and in {len(found) - 1} more cases)" * (len(found) > 1) for name, found in cases.items()}
    return [f"left out: {found[0]}{more[name]}" for name, found in cases.items()]


def _cells(row: Row) -> tuple[str, ...]:
    times = (_time(each) for each in (row.t_median_us, row.t_min_us, row.t_p99_us))
    wrong = "N/A" if row.wrong is None else str(row.wrong)
    speeds = (f"{row.algbw_GBs:.3f}", f"{row.busbw_GBs:.3f}")
    return (str(row.nbytes), str(row.count), row.dtype, row.op or NO_OP, label(row), row.buffer, *times, *speeds, wrong)


def _time(microseconds: float) -> str:
    return f"{microseconds:.1f}" if microseconds < 10_000 else f"{microseconds:.0f}"


def _footer(results: dict[str, Any], rows: list[Row]) -> list[str]:
    limits = {row.nbytes: row.limit_GBs for row in rows if row.limit_GBs is not None}
    lines = [
        f"Memory limit at {nbytes} B: busbw {limit:.3f} GB/s, were it as quick as all ranks copying as many bytes each"
        for nbytes, limit in sorted(limits.items())
        if results["ranks"] > 1
    ]
    checked = [row.wrong for row in rows if row.wrong is not None]
    wrong = sum(checked)
    verdict = f"{wrong} {'FAILED' if wrong else 'OK'}" if checked else "N/A, nothing was checked"
    mean = statistics.fmean(row.busbw_GBs for row in rows) if rows else 0.0
    return [*lines, f"Out of bounds values : {verdict}", f"Avg bus bandwidth : {mean:.4f}"]
