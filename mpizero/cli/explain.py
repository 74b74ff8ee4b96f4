"""`mpizero explain`: says which algorithm `auto` would choose for a collective, and why; needs no MPI."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpizero.arrays import dtype_named
from mpizero.bench.flags import size_of
from mpizero.cli.quantities import count_of, show_bytes, show_seconds
from mpizero.collectives import OPERATIONS, algorithms_of
from mpizero.collectives.cost import cost
from mpizero.collectives.links import place
from mpizero.collectives.registry import LOADS, NATIVE
from mpizero.collectives.select import Case, cluster_of, decide, pieces_of
from mpizero.collectives.tuned import Table
from mpizero.errors import ArgumentError, must_be
from mpizero.settings import settings
from mpizero.tables import aligned

if TYPE_CHECKING:
    import argparse

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("operation", metavar="OPERATION", help=", ".join(OPERATIONS))
    add("--ranks", metavar="N", default="4", help="number of ranks (default: 4)")
    add("--per-node", metavar="Q", help="ranks on each host (default: all on one)")
    add("--bytes", metavar="SIZE", default="1M", help="of the whole buffer, as 64M (default: 1M)")
    add("--dtype", default="float32", help="element type (default: float32)")
    add("--op", default="sum", help="reduction (default: sum)")
    add("--order", default="any", choices=["any", "canonical"], help="order of summation (default: any)")


def run(options: argparse.Namespace) -> int:
    """Print the choice, its reason, and what else could have been taken.

    Raises:
        ArgumentError: for an unknown operation, and numbers that are none.
    """
    name = options.operation
    if name not in OPERATIONS:
        raise ArgumentError(must_be("OPERATION", f"one of {', '.join(OPERATIONS)}", name))
    ranks = count_of("--ranks", options.ranks)
    per_node = ranks if options.per_node is None else count_of("--per-node", options.per_node)
    nodes = place(ranks, per_node)
    hosts = len(set(nodes))
    case = Case(
        size=ranks,
        nbytes=size_of("--bytes", options.bytes),
        dtype=dtype_named(options.dtype, "the buffer"),
        op=options.op,
        strict=options.order == "canonical",
        native=True,
        board=hosts == 1 and ranks > 1,
        nodes=nodes,
        notes=_notes(),
    )
    decision = decide(name, "auto", case)
    where = "one host" if hosts == 1 else f"{hosts} hosts"
    print(f"{name}, {show_bytes(case.nbytes)} of {case.dtype.name}, {ranks} ranks on {where}, order {options.order}")
    print(f"auto takes {decision.name}: {decision.why}")
    print()
    print(_others(name, case))
    return 0


def _notes() -> dict[Any, Any]:
    """Return the tuning table of this user, as a job on its machine would find it."""
    path = settings().tuning
    try:
        text = path.read_text() if path is not None else ""
    except OSError:
        text = ""
    return {"tuning": text, "machine": Table.loads(text).machine} if text else {}


def _others(operation: str, case: Case) -> str:
    cluster = cluster_of(case)
    rows: list[tuple[object, ...]] = [("algorithm", "usable", "over messages, by the cost model")]
    for name in (LOADS, NATIVE, *(entry.name for entry in algorithms_of(operation))):
        try:
            decide(operation, name, case)
            usable = "yes"
        except ArgumentError:
            usable = "no"
        time = "-"
        if name not in {LOADS, NATIVE} and operation != "barrier":
            pieces = pieces_of(operation, name, case)
            time = show_seconds(cost(operation, name, cluster, case.nbytes, pieces=pieces).seconds)
        rows.append((name, usable, time))
    link = cluster.remote
    table = aligned(rows, right=(2,))
    return f"{table}\n\nlinks of {show_seconds(link.alpha)} and {1e-9 / link.beta:.3g} GB/s, not measured here"
