"""Which ranks share a node, and who works there for what crosses nodes: what hierarchical builders are made of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from mpizero.collectives.direct import accumulators
from mpizero.collectives.order import Expr, canonical_over
from mpizero.collectives.schedule import Recv, Ref, Round, Send

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Layout", "Plan", "layout_of", "message", "renamed"]


@dataclass(frozen=True)
class Layout:
    """Hold the ranks of each node, ascending; nodes in the order of their lowest rank."""

    groups: tuple[tuple[int, ...], ...]

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Return each rank's node and its number on the node."""
        return {rank: (node, local) for node, group in enumerate(self.groups) for local, rank in enumerate(group)}

    @cached_property
    def lanes(self) -> int:
        """Return the most ranks of any node."""
        return max(len(group) for group in self.groups)

    def owner(self, node: int, lane: int) -> int:
        """Return the rank that works for a lane on a node: where there are fewer ranks than lanes, for several."""
        return self.groups[node][lane % len(self.groups[node])]

    def is_alone(self, node: int) -> bool:
        """Return whether a node has one rank: what leaves it is then no sum but that rank's input."""
        return len(self.groups[node]) == 1

    def node_trees(self) -> list[Expr]:
        """Return the order in which each node's ranks are summed."""
        return [canonical_over(group) for group in self.groups]


@lru_cache(maxsize=64)
def layout_of(nodes: tuple[int, ...]) -> Layout:
    """Return the layout of ranks with these node numbers, in any placement."""
    groups: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        groups.setdefault(node, []).append(rank)
    return Layout(tuple(tuple(group) for group in groups.values()))


@dataclass(frozen=True)
class Plan:
    """Give every chunk a lane, whose owner works for it on each node, and a home, the node where it becomes final."""

    layout: Layout
    chunks: tuple[tuple[int, int], ...]
    """Lane and home of each chunk."""

    @cached_property
    def _by_lane(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self.layout.lanes)]
        for chunk, (lane, _) in enumerate(self.chunks):
            found[lane].append(chunk)
        return found

    def of(self, rank: int) -> tuple[int, ...]:
        """Return the chunks that a rank works for on its node, ascending."""
        node, local = self.layout.places[rank]
        lanes = self._by_lane[local :: len(self.layout.groups[node])]
        return tuple(sorted(chunk for lane in lanes for chunk in lane))

    def worker(self, node: int, chunk: int) -> int:
        """Return the rank that works for a chunk on a node."""
        return self.layout.owner(node, self.chunks[chunk][0])

    def home(self, chunk: int) -> int:
        """Return the node where a chunk becomes final."""
        return self.chunks[chunk][1]

    def scratch(self, *, ring: bool = False) -> tuple[int, int]:
        """Return RAW and ACC slots that suffice for every rank; see `hierarchical`.

        On the node a rank needs room for its chunks from every other rank, and beyond it, next to its node's sums,
        for its final chunks from every other node, of which those with one rank send RAW; on a ring of nodes, for two
        sums of each.
        """
        groups = self.layout.groups
        alone = sum(self.layout.is_alone(node) for node in range(len(groups)))
        counts = Counter((home, lane % len(groups[home])) for lane, home in self.chunks)
        raw = acc = 0
        for width in {len(group) for group in groups}:
            held = max(sum(map(len, self._by_lane[local::width])) for local in range(width))
            finals = max(number for (home, _), number in counts.items() if len(groups[home]) == width)
            raws, accs = finals * (alone - (width == 1)), finals * (len(groups) - alone - (width > 1))
            across = 2 * finals if ring else accs + accumulators(len(groups))
            kept = held if width > 1 and len(groups) > 1 else 0
            raw = max(raw, (width - 1) * held, min(raws, finals) if ring else raws)
            acc = max(acc, kept + max(across, accumulators(width)))
        return raw, acc


def message(kind: type[Send | Recv], peer: int, refs: Iterable[Ref]) -> list[Send | Recv]:
    """Return the one message of these refs, or none."""
    refs = tuple(refs)
    return [kind(peer, refs)] if refs else []


def renamed(rounds: Iterable[Round], ranks: Sequence[int]) -> tuple[Round, ...]:
    """Return rounds among `len(ranks)` ranks as rounds among the ranks of these numbers."""
    return tuple(
        Round(tuple(step._replace(peer=ranks[step.peer]) for step in round_.messages), round_.local)
        for round_ in rounds
    )
