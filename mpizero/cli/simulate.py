"""`mpizero simulate`: costs a collective for a cluster that is described, without running it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from mpizero.bench.flags import size_of
from mpizero.cli.quantities import (
    count_of,
    links_of,
    one_of,
    per_byte_of,
    seconds_of,
    show_bytes,
    show_rate,
    show_seconds,
)
from mpizero.collectives.cost import Cost, cost, lower_bound
from mpizero.collectives.links import Cluster, place
from mpizero.collectives.registry import OPERATIONS, algorithms_of
from mpizero.errors import ArgumentError, must_be
from mpizero.tables import aligned

if TYPE_CHECKING:
    import argparse

__all__ = ["configure", "run"]

SCHEMA = 1
PLACEMENTS = ("block", "round-robin")
WIDTHS = {"float32": (4, 4), "float64": (8, 8), "bfloat16": (2, 4), "float16": (2, 4)}
"""Bytes of an element, and of an accumulated one."""
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Question:
    """Hold what the command line asks."""

    operation: str
    algorithms: tuple[str, ...]
    cluster: Cluster
    nbytes: int
    root: int
    pieces: int
    dtype: str


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments, all as text: `run` checks them."""
    parser.add_argument("operation", help=f"{', '.join(OPERATIONS)}; or train: see mpizero simulate train --help")
    for flag, default, text in (
        ("--ranks", None, "number of ranks"),
        ("--per-node", "8", "ranks on a node"),
        ("--bytes", "64M", "bytes of the whole buffer, or of each rank's input to all_to_all; K, M, G: powers of 1024"),
        ("--algorithm", ALL, f"names with commas between, or {ALL}"),
        ("--placement", "block", f"how ranks are put on nodes: {', '.join(PLACEMENTS)}"),
        ("--alpha", "2us,20us", "latency of a message within a node, and between nodes; one time serves both"),
        ("--beta", "10GB/s,12.5GB/s", "bandwidth of a rank within a node, and of a network port; one rate serves both"),
        ("--wires", "1", "network ports of a node"),
        ("--gamma", "10GB/s", "bytes of results that a rank reduces in a second"),
        ("--copy", "10GB/s", "bytes that a rank copies in a second"),
        ("--post", "0s", "time that a rank is busy with each message that it sends or receives"),
        ("--pieces", "8", "in how many pieces the algorithms that pipeline cut each part"),
        ("--root", "0", "the root of a rooted operation"),
        ("--dtype", "float32", f"type of the elements: {', '.join(WIDTHS)}"),
    ):  # fmt: skip
        shown = "required" if default is None else f"{default} by default"
        parser.add_argument(flag, default=default, required=default is None, help=f"{text} ({shown})")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.epilog = (
        "Rates are bytes or bits per second with K, M, G or T as powers of 1000: 12.5GB/s, 100Gbit/s, or inf. "
        "Nothing is run: the schedules that mpizero would execute are added up."
    )


def run(options: argparse.Namespace) -> int:
    """Cost each algorithm, and print a table or JSON; raise ArgumentError for values that make no sense."""
    question = _question(options)
    least = lower_bound(question.operation, question.cluster, question.nbytes, root=question.root)
    itemsize, acc_itemsize = WIDTHS[question.dtype]
    costs = {
        name: cost(
            question.operation,
            name,
            question.cluster,
            question.nbytes,
            root=question.root,
            pieces=question.pieces,
            itemsize=itemsize,
            acc_itemsize=acc_itemsize,
        )
        for name in question.algorithms
    }
    costs = dict(sorted(costs.items(), key=lambda item: item[1].seconds))
    print(json.dumps(_record(question, costs, least), indent=2) if options.json else _text(question, costs, least))
    return 0


def _question(options: argparse.Namespace) -> Question:
    operation = one_of("operation", options.operation, tuple(OPERATIONS))
    known = tuple(entry.name for entry in algorithms_of(operation))
    words = known if options.algorithm == ALL else tuple(dict.fromkeys(options.algorithm.split(",")))
    size = count_of("--ranks", options.ranks)
    per_node = count_of("--per-node", options.per_node)
    spread = one_of("--placement", options.placement, PLACEMENTS) != PLACEMENTS[0]
    local, remote = links_of(options.alpha, options.beta)
    root = count_of("--root", options.root, 0)
    if root >= size:
        raise ArgumentError(must_be("--root", f"a rank, 0 to {size - 1}", root))
    return Question(
        operation=operation,
        algorithms=tuple(one_of("--algorithm", word, (*known, ALL)) for word in words),
        cluster=Cluster(
            size=size,
            nodes=place(size, per_node, round_robin=spread),
            local=local,
            remote=remote,
            gamma=per_byte_of("--gamma", options.gamma),
            copy=per_byte_of("--copy", options.copy),
            post=seconds_of("--post", options.post),
            wires=count_of("--wires", options.wires),
        ),
        nbytes=size_of("--bytes", options.bytes),
        root=root,
        pieces=count_of("--pieces", options.pieces),
        dtype=one_of("--dtype", options.dtype, tuple(WIDTHS)),
    )


def _speeds(question: Question, seconds: float) -> tuple[float, float]:
    """Return algbw and busbw in GB/s, the conventions of nccl-tests; 0 where no time passes."""
    rate = question.nbytes / seconds / 1e9 if seconds else 0.0
    return rate, rate * OPERATIONS[question.operation].bandwidth_factor(question.cluster.size)


def _share(least: float, seconds: float) -> float:
    return least / seconds if seconds else 1.0


def _text(question: Question, costs: dict[str, Cost], least: float) -> str:
    head = ("algorithm", "rounds", "sent by a rank", "over a node's ports", "time", "algbw GB/s", "busbw GB/s",
            "of the bound", "most time on", "found by")  # fmt: skip
    rows = [
        (
            name,
            f"{entry.rounds:,}",
            show_bytes(entry.bytes_sent_max),
            show_bytes(entry.wire_bytes_max),
            show_seconds(entry.seconds),
            *(f"{speed:.3f}" for speed in _speeds(question, entry.seconds)),
            f"{_share(least, entry.seconds):.1%}",
            entry.bound_by,
            entry.method,
        )
        for name, entry in costs.items()
    ]
    note = (
        f"Lower bound: {show_seconds(least)}, one message's latency and the bytes that a rank has to move over its\n"
        "link or a node over its ports, whichever takes longer. Columns 3 and 4 are of the busiest rank and node."
    )
    return f"{_title(question)}\n\n{aligned([head, *rows], right=range(1, 8))}\n\n{note}"


def _title(question: Question) -> str:
    cluster = question.cluster
    counts = [len(ranks) for ranks in cluster.members().values()]
    each = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    links = [
        f"{name} {show_seconds(link.alpha)} + {show_rate(link.beta)}"
        for name, link in (("node", cluster.local), ("network", cluster.remote))
    ]
    return (
        f"{question.operation} of {show_bytes(question.nbytes)} of {question.dtype} over {cluster.size:,} ranks on "
        f"{len(counts):,} nodes of {each} ranks\n"
        f"{', '.join(links)} on each of {cluster.wires} ports; reduces {show_rate(cluster.gamma)}, copies "
        f"{show_rate(cluster.copy)}, {show_seconds(cluster.post)} per message; {question.pieces} pieces"
    )


def _record(question: Question, costs: dict[str, Cost], least: float) -> dict[str, object]:
    """Return what `--json` prints: seconds, bytes, seconds per byte, and GB/s where a name says so."""
    rows = []
    for name, entry in costs.items():
        rate, bus = _speeds(question, entry.seconds)
        shared = {key: getattr(entry, key) for key in ("seconds", "rounds", "bytes_sent_max", "wire_bytes_max")}
        rows.append(
            {
                "algorithm": name,
                **shared,
                "algbw_GBs": rate,
                "busbw_GBs": bus,
                "share_of_bound": _share(least, entry.seconds),
                "terms": entry.terms._asdict(),
                "method": entry.method,
            }
        )
    cluster = question.cluster
    machine = {key: getattr(cluster, key) for key in ("gamma", "copy", "post", "wires")}
    return {
        "schema_version": SCHEMA,
        "operation": question.operation,
        "dtype": question.dtype,
        "nbytes": question.nbytes,
        "ranks": cluster.size,
        "nodes": len(cluster.members()),
        "root": question.root,
        "pieces": question.pieces,
        "local": asdict(cluster.local),
        "remote": asdict(cluster.remote),
        **machine,
        "lower_bound_seconds": least,
        "algorithms": rows,
    }
