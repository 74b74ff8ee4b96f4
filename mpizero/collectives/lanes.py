"""Multi-lane broadcast: the root's node sends every byte to the others once, all its ranks at the same time.

Source: Traeff 2019 (see `hierarchical`), section 3; scatter and all-gather between nodes as in `scatter_gather`.
"""

from __future__ import annotations

from functools import lru_cache

from mpizero.collectives.hierarchical import node_gather
from mpizero.collectives.placement import Layout, Plan, layout_of, message
from mpizero.collectives.registry import register
from mpizero.collectives.schedule import Recv, Ref, Round, Schedule, Send, Space

__all__: list[str] = []


@register("broadcast", "hierarchical", takes="nodes")
def broadcast(size: int, rank: int, root: int, nodes: tuple[int, ...]) -> Schedule:  # noqa: ARG001
    """Build broadcast: at most 4 rounds; the root's node sends S bytes to others, a node receives S.

    The buffer is cut in lanes, and each lane in a part for every node but the root's. On its node the root gives lanes
    to their owners (1), who send each part to its node (2), whose owner sends it to those of the remaining nodes (3);
    then the ranks of each node exchange lanes (4). Of h nodes one that is not the root's sends S (h-2)/(h-1).
    """
    layout = layout_of(nodes)
    root_node, _ = layout.places[root]
    plan = _plan(layout, root_node)
    rounds = (*_deal(plan, rank, root), *_cross(plan, rank, root_node), *node_gather(plan, rank, skip=root))
    return Schedule(chunks=len(plan.chunks), rounds=rounds)


@lru_cache(maxsize=64)
def _plan(layout: Layout, root_node: int) -> Plan:
    homes = [node for node in range(len(layout.groups)) if node != root_node] or [root_node]
    return Plan(layout, tuple((lane, home) for lane in range(layout.lanes) for home in homes))


def _deal(plan: Plan, rank: int, root: int) -> tuple[Round, ...]:
    """Return the round in which the root gives the other ranks of its node their lanes."""
    group = plan.layout.groups[plan.layout.places[root][0]]
    messages: list[Send | Recv] = []
    for peer in group:
        if peer != root and rank in {root, peer}:
            kind = Send if rank == root else Recv
            other = peer if rank == root else root
            messages += message(kind, other, [Ref(Space.OUT, chunk) for chunk in plan.of(peer)])
    return (Round(tuple(messages)),) if messages else ()


def _cross(plan: Plan, rank: int, root_node: int) -> tuple[Round, ...]:
    """Return the rounds in which parts go to their homes, and from there to the remaining nodes."""
    node, _ = plan.layout.places[rank]
    others = [other for other in range(len(plan.layout.groups)) if other not in {node, root_node}]
    scatter: list[Send | Recv] = []
    gather: list[Send | Recv] = []
    for chunk in plan.of(rank):
        refs, home = (Ref(Space.OUT, chunk),), plan.home(chunk)
        if node == root_node != home:
            scatter.append(Send(plan.worker(home, chunk), refs))
        elif node == home != root_node:
            scatter.append(Recv(plan.worker(root_node, chunk), refs))
            gather += [Send(plan.worker(other, chunk), refs) for other in others]
        elif node != root_node:
            gather.append(Recv(plan.worker(home, chunk), refs))
    return tuple(Round(tuple(messages)) for messages in (scatter, gather) if messages)
