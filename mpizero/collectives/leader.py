"""One leader per node: few messages between nodes, for small buffers.

The buffer goes whole: binomial trees on each node, and between the leaders a tree or recursive doubling.
Sources: Thakur, Rabenseifner, Gropp 2005, section 4.4 (recursive doubling); Traeff, Rougier, "MPI Collectives and
Datatypes for Hierarchical All-to-all Communication", 2014, among many, for one leader per node.
"""

from __future__ import annotations

from mpizero.collectives import order
from mpizero.collectives.halving import Fold
from mpizero.collectives.placement import Layout, layout_of, renamed
from mpizero.collectives.registry import register
from mpizero.collectives.schedule import Recv, Reduce, Ref, Round, Schedule, Send, Space
from mpizero.collectives.tree import broadcast_rounds, reduce_rounds

__all__: list[str] = []

IN, OUT, RAW = Ref(Space.IN, 0), Ref(Space.OUT, 0), Ref(Space.RAW, 0)
HELD, ARRIVING = Ref(Space.ACC, 0, 0), Ref(Space.ACC, 0, 1)


def _order(size: int, chunk: int, root: int, nodes: tuple[int, ...]) -> order.Expr:  # noqa: ARG001
    return order.folded_over(layout_of(nodes).node_trees())


@register("all_reduce", "leader", _order, takes="nodes")
def all_reduce(size: int, rank: int, root: int, nodes: tuple[int, ...]) -> Schedule:  # noqa: ARG001
    """Build all-reduce: 2 log2 q rounds on nodes of q ranks, log2 h among h of them (two more when h is folded).

    A leader sends at most S ceil(log2 h) elements to other nodes. Leaders are the lowest ranks of their nodes.
    """
    layout = layout_of(nodes)
    node, local = layout.places[rank]
    group = layout.groups[node]
    result = OUT if len(layout.groups) == 1 else HELD
    rounds = renamed(reduce_rounds(len(group), local, 0, result), group)
    if local == 0:
        rounds += renamed(_exchange(layout, node), [ranks[0] for ranks in layout.groups])
    rounds += renamed(broadcast_rounds(len(group), local, 0), group)
    return Schedule(chunks=1, rounds=rounds, raw_slots=1, acc_slots=2)


@register("broadcast", "leader", takes="nodes")
def broadcast(size: int, rank: int, root: int, nodes: tuple[int, ...]) -> Schedule:  # noqa: ARG001
    """Build broadcast: log2 h rounds among the leaders of h nodes, log2 q on each; a node receives S bytes once.

    Leaders are the lowest ranks of their nodes, and the root.
    """
    layout = layout_of(nodes)
    (node, local), (root_node, root_local) = layout.places[rank], layout.places[root]
    group = layout.groups[node]
    head = root_local if node == root_node else 0
    rounds: tuple[Round, ...] = ()
    if local == head:
        leaders = [root if number == root_node else ranks[0] for number, ranks in enumerate(layout.groups)]
        rounds = renamed(broadcast_rounds(len(leaders), node, root_node), leaders)
    return Schedule(chunks=1, rounds=rounds + renamed(broadcast_rounds(len(group), local, head), group))


def _exchange(layout: Layout, node: int) -> list[Round]:
    """Return the recursive doubling of a leader among leaders, from its node's sum to OUT; see `Fold` for other sizes.

    A node of one rank has no sum but that rank's input: it is sent as it is, and arrives in RAW.
    """
    fold = Fold(len(layout.groups), node)
    held = IN if layout.is_alone(node) else HELD
    if not fold.works and fold.partner is not None:
        return [Round((Send(fold.partner, (held,)),)), Round((Recv(fold.partner, (OUT,)),))]
    rounds = []
    if fold.partner is not None:
        arriving = RAW if layout.is_alone(fold.partner) else ARRIVING
        rounds.append(Round((Recv(fold.partner, (arriving,)),), (Reduce(HELD, held, arriving),)))
        held = HELD
    group = fold.group_of(node)
    for step in range(fold.steps):
        other = group ^ (1 << step)
        peer = fold.worker(other)
        is_raw = step == 0 and other >= fold.pairs and layout.is_alone(peer)
        arriving = RAW if is_raw else ARRIVING
        operands = (held, arriving) if group < other else (arriving, held)
        add = Reduce(OUT if step == fold.steps - 1 else HELD, *operands)
        rounds.append(Round((Recv(peer, (arriving,)), Send(peer, (held,))), (add,)))
        held = HELD
    if fold.partner is not None:
        rounds.append(Round((Send(fold.partner, (OUT,)),)))
    return rounds
