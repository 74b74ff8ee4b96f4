"""How long the collectives of a step take, by the cost model of the algorithm that would be chosen.

[Note: which algorithm] `auto` is what `shard` would take where links are measured: the cheapest canonical algorithm up
to 64 ranks, beyond them what `collectives.select` says for messages. `best` is the cheapest of those in `OFFERED`,
whatever the order of its sums: what a library may reach that is not bound to the canonical order.

Ranks of one node are costed as if they sent each other messages over the local link; there is no schedule of loads. A
collective that would be cut in segments is costed as one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from mpizero.arrays import dtype_named
from mpizero.collectives.cost import cost
from mpizero.collectives.registry import algorithms_of
from mpizero.collectives.select import MODELLED, Case, by_messages, pieces_of

if TYPE_CHECKING:
    from mpizero.collectives.links import Cluster

__all__ = ["LOCAL", "REMOTE", "Price", "Prices", "group_of", "replicas_of"]

LOCAL, REMOTE = "node", "network"
"""Classes of links."""
MEETING = "meeting"
IN_STEP = ("hierarchical", "ring", "direct", "pairwise", "doubling", "halving", "halving_doubling")
"""Algorithms in which all ranks send in every round, so that a few ranks tell the time of all: see `sampled`."""
DTYPES = {2: "bfloat16", 4: "float32", 8: "float64"}
OFFERED = {
    "all_gather": ("hierarchical", "ring", "doubling", "direct"),
    "reduce_scatter": ("hierarchical", "ring", "halving", "direct"),
    "all_reduce": ("hierarchical", "ring", "halving_doubling", "direct"),
}


class Price(NamedTuple):
    """Hold what one collective costs."""

    seconds: float
    link: str
    """The class of links that it keeps busy: REMOTE if it leaves a node."""
    sent: float
    """Bytes that its busiest rank sends."""
    wire: float
    """Bytes that leave or enter its busiest node."""
    algorithm: str


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Price the collectives of one communicator."""

    cluster: Cluster
    choice: str = "auto"
    """`auto` or `best`; see [Note: which algorithm]."""

    def of(self, operation: str, nbytes: float, width: int) -> Price:
        """Return the price of a collective over all ranks of the communicator.

        Args:
            operation: all_gather, reduce_scatter or all_reduce.
            nbytes: bytes of the whole buffer.
            width: bytes of an element; 16-bit sums travel as 4 bytes where an algorithm sends partial ones.
        """
        return _price(self, operation, float(nbytes), width)

    def meeting(self, nbytes: float) -> Price:
        """Return the price of an exchange in which every rank tells the others `nbytes`: direct, as `shard` does it."""
        return _price(self, MEETING, float(nbytes * self.cluster.size), 1)


def group_of(cluster: Cluster, size: int) -> Cluster:
    """Return the cluster of the first group of `size` ranks; ranks are placed node by node."""
    return cluster if size == cluster.size else replace(cluster, size=size, nodes=cluster.nodes[:size])


def replicas_of(cluster: Cluster, size: int) -> Cluster:
    """Return the cluster of ranks 0, `size`, 2 x `size` and so on, whose ports the other such columns share.

    All columns sum at the same time, so that each of them gets an equal part of what a node's ports carry.
    """
    per_node = cluster.nodes.count(cluster.nodes[0])
    columns = min(size, per_node)
    wires = max(1, cluster.wires // columns)
    beta = cluster.remote.beta * columns * wires / cluster.wires
    remote = replace(cluster.remote, beta=max(beta, cluster.remote.beta))
    nodes = cluster.nodes[::size]
    return replace(cluster, size=len(nodes), nodes=nodes, remote=remote, wires=wires)


@lru_cache(maxsize=512)
def _price(prices: Prices, operation: str, nbytes: float, width: int) -> Price:
    cluster = prices.cluster
    link = LOCAL if len(set(cluster.nodes)) == 1 else REMOTE
    if cluster.size == 1 or not nbytes:
        return Price(0.0, link, 0.0, 0.0, "none")
    acc = max(4, width) if operation.startswith(("all_reduce", "reduce")) else width
    candidates = _candidates(prices, operation, nbytes, width)
    if operation == MEETING:
        operation = "all_gather"
    found = {}
    for name, pieces in candidates:
        method = "sampled" if cluster.size > MODELLED and name in IN_STEP else ""
        found[name] = cost(
            operation, name, cluster, nbytes, pieces=pieces, itemsize=width, acc_itemsize=acc, method=method
        )
    best = min(found, key=lambda name: found[name].seconds)
    return Price(found[best].seconds, link, found[best].bytes_sent_max, found[best].wire_bytes_max, best)


def _candidates(prices: Prices, operation: str, nbytes: float, width: int) -> list[tuple[str, int]]:
    """Return the algorithms of which the cheapest is taken, each with its number of pieces."""
    cluster = prices.cluster
    if operation == MEETING:
        return [("direct", 1)]
    case = Case(
        size=cluster.size, nbytes=int(nbytes), dtype=dtype_named(DTYPES[width]), strict=True, nodes=cluster.nodes
    )
    if prices.choice == "best":
        return [(name, 1) for name in OFFERED[operation]]
    if cluster.size > MODELLED:
        name = by_messages(operation, case).name
        return [(name, pieces_of(operation, name, case))]
    names = [(entry, pieces_of(operation, entry.name, case)) for entry in algorithms_of(operation)]
    return [
        (entry.name, pieces)
        for entry, pieces in names
        if entry.is_canonical(cluster.size, 0, nodes=cluster.nodes, pieces=pieces)
    ]
