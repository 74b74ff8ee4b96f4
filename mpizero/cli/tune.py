"""`mpizero tune`: measures which algorithm is the quickest at each size, and writes the table that `auto` follows."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpizero.bench.flags import size_of
from mpizero.collectives import OPERATIONS
from mpizero.collectives.tuned import Table
from mpizero.errors import ArgumentError, must_be
from mpizero.settings import settings

if TYPE_CHECKING:
    import argparse

__all__ = ["configure", "run"]

DEFAULT = "all_reduce,reduce_scatter,all_gather,all_to_all,broadcast,reduce,gather,scatter"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("--operations", metavar="A,B", default=DEFAULT, help=f"which collectives (default: {DEFAULT})")
    add("-b", "--begin", metavar="SIZE", default="256", help="smallest size in bytes (default: 256)")
    add("-e", "--end", metavar="SIZE", default="64M", help="largest size (default: 64M)")
    add("-f", "--factor", metavar="N", default="4", help="from one size to the next (default: 4)")
    add("--dtypes", metavar="A,B", default="float32", help="element types (default: float32)")
    add("--budget", metavar="SECONDS", default="0.1", help="per algorithm and size, about (default: 0.1)")
    add("--out", metavar="FILE", help="where to write (default: MPIZERO_TUNING, or a file in the user's cache folder)")
    parser.epilog = (
        "Run it on the ranks that you will use: mpirun -n 4 mpizero tune. Tables of other placements in the file stay; "
        "one of another machine is replaced."
    )


def run(options: argparse.Namespace) -> int:
    """Measure, write the table on rank 0, and say where it is.

    Raises:
        ArgumentError: for unknown operations and dtypes, and for numbers that are none.
    """
    from mpizero.bench.tuning import Sweep, tune
    from mpizero.comm import world
    from mpizero.comm.describe import machine

    path = _target(options.out)
    sweep = Sweep(
        operations=_operations(options.operations),
        sizes=_sizes(options),
        dtypes=tuple(options.dtypes.split(",")),
        budget=_budget(options.budget),
    )
    comm = world()

    def tell(line: str) -> None:
        if comm.rank == 0:
            print(line, file=sys.stderr, flush=True)

    table = tune(sweep, comm, machine(), tell)
    if comm.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_merged(path, table).dumps())
        print(f"{len(table.rows)} rows for {comm.size} ranks written to {path}; auto follows them from the next job on")
    return 0


def _merged(path: Path, table: Table) -> Table:
    """Return the table with those rows of the file's that are of the same machine and were not measured again."""
    try:
        old = Table.loads(path.read_text())
    except (OSError, ArgumentError):
        return table
    if old.machine != table.machine:
        return table
    new = {(row.operation, row.layout, row.dtype, row.order) for row in table.rows}
    kept = tuple(row for row in old.rows if (row.operation, row.layout, row.dtype, row.order) not in new)
    return replace(table, rows=(*kept, *table.rows))


def _target(out: str | None) -> Path:
    path = settings().tuning if out is None else Path(out)
    if path is None:
        raise ArgumentError(must_be("--out", "given where MPIZERO_TUNING is 0", None))
    return path


def _operations(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in OPERATIONS or name == "barrier":
            known = ", ".join(one for one in OPERATIONS if one != "barrier")
            raise ArgumentError(must_be("--operations", f"of {known}", name))
    return names


def _sizes(options: argparse.Namespace) -> tuple[int, ...]:
    begin, end = size_of("--begin", options.begin), size_of("--end", options.end)
    factor = size_of("--factor", options.factor)
    if begin < 1 or end < begin:
        raise ArgumentError(must_be("--end", f"{begin} or more, the smallest size being 1 or more", end))
    if factor < 2:
        raise ArgumentError(must_be("--factor", "2 or more", factor))
    sizes = [begin]
    while sizes[-1] * factor <= end:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


def _budget(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ArgumentError(must_be("--budget", "a number of seconds above 0", text))
    return value
