"""Time a collective from those of smaller ones, for pipelines too long or over too many ranks to follow.

[Note: growth] Two rules, each tested against the whole at sizes where both can be had:

- Pieces: a full pipeline moves steadily, so each further piece of the same length takes what the last ones took.
- Ranks: at a quarter, a half and the whole of a size that can be followed, with whole nodes left out, the number of
  messages in the longest chain tells how the pipeline grows with each doubling: by equal steps (trees) or by doubled
  ones (chains). The time goes on like it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from mpizero.collectives.work import Estimate, Terms

if TYPE_CHECKING:
    from mpizero.collectives.links import Cluster

__all__ = ["along_pieces", "along_ranks", "doublings", "shrunk"]


def along_pieces(few: Estimate, more: Estimate, further: float) -> Estimate:
    """Return the estimate for more pieces.

    Args:
        few: for few pieces.
        more: for more.
        further: for how many pieces beyond `more`, in units of the difference between the two.
    """

    def extend(low: float, high: float) -> float:
        return high + (high - low) * further

    return Estimate(
        terms=Terms(*map(extend, few.terms, more.terms)),
        rounds=round(extend(few.rounds, more.rounds)),
        sent_max=extend(few.sent_max, more.sent_max),
        wire_max=extend(few.wire_max, more.wire_max),
        schedules=few.schedules + more.schedules,
    )


def along_ranks(found: list[Estimate], doublings: float) -> Estimate:
    """Return the estimate for more ranks.

    Args:
        found: for a quarter, a half and the whole of a size.
        doublings: how many times as many ranks are wanted, as a power of two.
    """
    quarter, half, whole = found
    first, second = half.rounds - quarter.rounds, whole.rounds - half.rounds
    factor = min(2.0, max(1.0, second / first)) if first > 0 else 1.0
    # A tree has one level more as soon as the ranks are more than a power of two.
    further = math.ceil(doublings - 1e-9) if factor == 1 else factor * (factor**doublings - 1) / (factor - 1)
    longer = along_pieces(half, whole, further)
    return replace(longer, schedules=sum(estimate.schedules for estimate in found))


def shrunk(cluster: Cluster, size: int, root: int) -> tuple[Cluster, int, float]:
    """Return a cluster of about `size` of the ranks, the root's number in it, and the share of ranks that it has.

    Whole nodes are kept, the root's and then the first ones, where the size is enough for two; else ranks.
    """
    members = cluster.members()
    home = cluster.nodes[root]
    kept = list(members[home])
    for node, ranks in members.items():
        if node != home and len(kept) + len(ranks) <= size:
            kept += ranks
    if len(kept) > size or (len(kept) == len(members[home]) and len(members) > 1):
        kept = [root, *(rank for rank in range(cluster.size) if rank != root)][:size]
    kept.sort()
    smaller = replace(cluster, size=len(kept), nodes=tuple(cluster.nodes[rank] for rank in kept))
    return smaller, kept.index(root), len(kept) / cluster.size


def doublings(share: float) -> float:
    """Return how often a size is to be doubled to become the whole of which it is a share."""
    return -math.log2(share)
