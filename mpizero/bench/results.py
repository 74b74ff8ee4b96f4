"""Results of microbenchmarks as files: JSON with a version, and CSV."""

from __future__ import annotations

import csv
import json
import platform
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero import __version__
from mpizero.bench.cases import CPU
from mpizero.bench.summary import Summary, summarise
from mpizero.bench.timing import bus_bandwidth
from mpizero.comm.describe import describe, machine
from mpizero.comm.gpus import find_gpus
from mpizero.comm.launch import cores
from mpizero.errors import ArgumentError, must_be

if TYPE_CHECKING:
    from mpizero.bench.cases import Case, Plan
    from mpizero.bench.timing import Measured

__all__ = ["SCHEMA", "Row", "read_results", "results_of", "row_of", "write_csv", "write_json"]

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """Hold one case's figures, under the names that they have in files."""

    operation: str
    algorithm: str
    buffer: str
    prepared: bool
    dtype: str
    op: str
    order: str
    nbytes: int
    count: int
    iterations: int
    t_median_us: float
    """Median over the iterations of the slowest rank's time."""
    t_min_us: float
    t_p99_us: float
    algbw_GBs: float  # noqa: N815  (the unit's name)
    busbw_GBs: float  # noqa: N815
    wrong: int | None
    """Wrong elements in all; None where they were not checked."""
    limit_GBs: float | None = None  # noqa: N815
    """Bus bandwidth of a collective that takes as long as all ranks do to copy its bytes; None where not measured."""
    device: str = CPU
    """Where the buffers lay."""
    wire: str = ""
    """How device memory got from rank to rank; "" for host memory."""


def row_of(case: Case, measured: Measured, *, order: str, ranks: int, device: str = CPU) -> Row:
    """Return a case's figures.

    Args:
        case: what was measured.
        measured: its times and errors.
        order: the order of summation that was asked for.
        ranks: number of ranks.
        device: where the buffers lay.
    """
    found: Summary = summarise(measured.times)
    return Row(
        operation=case.operation,
        algorithm=case.algorithm,
        buffer=case.buffer,
        prepared=case.prepared,
        dtype=case.dtype,
        op=case.op,
        order=order,
        nbytes=case.nbytes,
        count=case.count,
        iterations=len(measured.times),
        t_median_us=found.median * 1e6,
        t_min_us=found.least * 1e6,
        t_p99_us=found.p99 * 1e6,
        algbw_GBs=case.nbytes / found.median / 1e9,
        busbw_GBs=bus_bandwidth(case.operation, case.nbytes, found.median, ranks),
        wrong=measured.wrong,
        device=device,
        wire=case.wire,
    )


def results_of(plan: Plan, hosts: tuple[str, ...], rows: list[Row], left_out: dict[str, str]) -> dict[str, Any]:
    """Return all that the JSON file holds.

    Args:
        plan: what was asked for.
        hosts: the host of each rank.
        rows: the figures.
        left_out: algorithms that could not do what was asked, each with the reason.
    """
    names = list(dict.fromkeys(hosts))
    mpi = describe()
    return {
        "schema_version": SCHEMA,
        "benchmark": f"{plan.operation}_perf",
        "operation": plan.operation,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {"cores": cores(), "processor": machine()["processor"], "system": platform.platform()},
        "versions": {
            "mpizero": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": _torch_version(),
            "mpi": f"{mpi.name} {mpi.version}",
        },
        "ranks": len(hosts),
        "device": plan.device,
        "gpus": [gpu.name for gpu in find_gpus()[0]] if plan.device == "cuda" else [],
        "nodes": len(names),
        "per_node": [hosts.count(name) for name in names],
        "seed": plan.seed,
        "warm_up": plan.warm_up,
        "root": plan.root,
        "left_out": left_out,
        "rows": [asdict(row) for row in rows],
    }


def write_json(results: dict[str, Any], path: str) -> None:
    """Write results, whole or not at all."""
    _replace(path, json.dumps(results, indent=1) + "\n")


def write_csv(rows: list[Row], path: str) -> None:
    """Write rows under a heading of their names; what was not measured is empty."""
    names = [field.name for field in fields(Row)]
    part = Path(f"{path}.part")
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    part.replace(path)


def read_results(path: Path) -> dict[str, Any]:
    """Return what `write_json` wrote.

    Raises:
        ArgumentError: if there is no such file, or it holds something else, or comes from another version.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(must_be("results", "a JSON file of bin/*_perf", str(path), str(error))) from None
    version = found.get("schema_version") if isinstance(found, dict) else None
    if version != SCHEMA or not isinstance(found.get("rows"), list):
        rule = f"results of bin/*_perf with schema_version {SCHEMA}"
        raise ArgumentError(must_be(str(path), rule, version, "measure again with this mpizero"))
    needed = {field.name for field in fields(Row)}
    for row in found["rows"]:
        if isinstance(row, dict):  # files from before there were devices
            row.setdefault("device", CPU)
            row.setdefault("wire", "")
        if missing := needed - set(row):
            raise ArgumentError(must_be(str(path), "rows with all their keys", f"one without {sorted(missing)}"))
    return found


def _replace(path: str, text: str) -> None:
    part = Path(f"{path}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _torch_version() -> str:
    """Return torch's version, "" where the run did not load it."""
    import sys

    torch = sys.modules.get("torch")
    return "" if torch is None else str(torch.__version__)
