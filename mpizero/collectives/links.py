"""The machine that the cost model knows: links between ranks, ports of nodes, arithmetic.

Legend, after Hockney's model with the reduction term of Thakur, Rabenseifner, Gropp 2005:

- `alpha`: seconds that a message takes whatever its length;
- `beta`: seconds per byte of it, the inverse of the bandwidth;
- `gamma`: seconds per byte of a result that is reduced, both operands being in memory.

Greek letters are used here and where these fields are read, and nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpizero.errors import ArgumentError, must_be

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Cluster", "Link", "fit", "place"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """Describe a class of links: a message of n bytes takes `alpha + n * beta` seconds, in both directions at once."""

    alpha: float
    """Seconds, 0 or more."""
    beta: float
    """Seconds per byte, 0 or more."""

    def __post_init__(self) -> None:
        """Refuse what is no time; raise ArgumentError."""
        for name in ("alpha", "beta"):
            _check_time(f"Link.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Describe where the ranks are and what their work costs."""

    size: int
    """Number of ranks, 1 or more."""
    nodes: tuple[int, ...]
    """The node number of each rank."""
    local: Link
    """Between ranks of one node."""
    remote: Link
    """Between nodes: what one rank alone gets, and one port of a node gives."""
    gamma: float = 0.0
    """Seconds per byte of result reduced."""
    copy: float = 0.0
    """Seconds per byte copied within a rank."""
    post: float = 0.0
    """Seconds that a rank is busy with each message that it sends or receives, whatever its length."""
    wires: int = 1
    """Network ports per node. A rank uses one; the ranks of a node share all."""

    def __post_init__(self) -> None:
        """Refuse what is no cluster; raise ArgumentError."""
        for name in ("size", "wires"):
            if getattr(self, name) < 1:
                raise ArgumentError(must_be(f"Cluster.{name}", "1 or more", getattr(self, name)))
        if len(self.nodes) != self.size:
            rule = f"a node number for each of the {self.size} ranks"
            raise ArgumentError(must_be("Cluster.nodes", rule, f"{len(self.nodes)} of them"))
        for name in ("gamma", "copy", "post"):
            _check_time(f"Cluster.{name}", getattr(self, name))

    def members(self) -> dict[int, list[int]]:
        """Return the ranks of each node, in the order of the nodes' lowest ranks."""
        ranks: dict[int, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            ranks.setdefault(node, []).append(rank)
        return ranks


def place(size: int, per_node: int, *, round_robin: bool = False) -> tuple[int, ...]:
    """Return the node number of each rank.

    Args:
        size: number of ranks.
        per_node: ranks on a node; the last node may have fewer, and with `round_robin` all may differ by one.
        round_robin: whether neighbouring ranks are on different nodes, else blocks of `per_node` ranks are on one.

    Raises:
        ArgumentError: if one of the numbers is below 1.
    """
    for what, value in (("number of ranks", size), ("ranks per node", per_node)):
        if value < 1:
            raise ArgumentError(must_be(what, "1 or more", value))
    nodes = -(-size // per_node)
    return tuple(rank % nodes if round_robin else rank // per_node for rank in range(size))


def fit(points: Sequence[tuple[float, float]]) -> Link:
    """Return the link that explains measured one-way times best.

    Minimises the sum of squared relative errors, so that short and long messages count alike, over alpha and beta of 0
    or more.

    Args:
        points: (bytes of the message, seconds it took); half of a ping-pong's time. Two lengths at least.

    Raises:
        ArgumentError: if there are fewer than two lengths, or a time is not above 0.
    """
    lengths = {nbytes for nbytes, _ in points}
    if len(lengths) < 2:
        raise ArgumentError(must_be("points", "times of two different lengths at least", sorted(lengths)))
    bad = [seconds for _, seconds in points if not (seconds > 0 and math.isfinite(seconds))]
    if bad:
        raise ArgumentError(must_be("seconds of a point", "above 0", bad[0]))
    rows = np.array([(1 / seconds, nbytes / seconds) for nbytes, seconds in points])
    ones = np.ones(len(rows))
    both = np.linalg.lstsq(rows, ones, rcond=None)[0]
    if both.min() >= 0:
        return Link(alpha=float(both[0]), beta=float(both[1]))
    # The error is convex, so with a free optimum outside of the quadrant the best is on one of its edges.
    edges = [np.zeros(2), np.zeros(2)]
    for axis, edge in enumerate(edges):
        edge[axis] = max(0.0, rows[:, axis].sum() / (rows[:, axis] ** 2).sum())
    best = min(edges, key=lambda edge: float(((rows @ edge - ones) ** 2).sum()))
    return Link(alpha=float(best[0]), beta=float(best[1]))


def _check_time(what: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise ArgumentError(must_be(what, "a time of 0 or more", value))
