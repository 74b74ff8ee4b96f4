"""Multi-lane hierarchy: sum on the node, let every rank of the node cross with its share at once, spread on the node.

The buffer is cut in lanes, as many as the most ranks of any node, and each lane in parts, one per node. Lane j belongs
on a node of q ranks to its local rank j mod q. Between nodes a lane's owners exchange parts directly up to 16 nodes,
beyond them on a ring. A node's link carries what one rank per node would have to send, no more, in q streams.

Ranks are summed on each node in the canonical order, nodes in that of their lowest ranks: canonically where they
exchange directly. For nodes of equal power-of-two size that hold neighbouring ranks it is the canonical order of all.
Any placement will do: uneven nodes, ranks dealt out to nodes in turn, nodes of one rank, one node.
Sources: Traeff, "Decomposing Collectives for Exploiting Multi-lane Communication", 2019 (arXiv 1910.13373); Bayatpour,
Chakraborty, Subramoni, Lu, Panda, "Scalable Reduction Collectives with Data Partitioning-based Multi-Leader Design",
2017. Direct exchange between nodes, for the order, is ours.

[Note: widths] What a node of one rank puts in is that rank's IN and arrives in RAW; what others put in is a sum, and
arrives in ACC. Both ends know which from the layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import count

from mpizero.collectives import order
from mpizero.collectives.direct import pairwise_steps
from mpizero.collectives.placement import Layout, Plan, layout_of, message
from mpizero.collectives.registry import register
from mpizero.collectives.schedule import Copy, Recv, Reduce, Ref, Round, Schedule, Send, Space

__all__ = ["node_gather"]

MANY = 16
"""Nodes beyond which all-reduce uses a ring between nodes."""


def _all_reduce_order(size: int, chunk: int, root: int, nodes: tuple[int, ...]) -> order.Expr:  # noqa: ARG001
    trees = layout_of(nodes).node_trees()
    if len(trees) <= MANY:
        return order.canonical_over(trees)
    first = chunk % len(trees) + 1
    total = trees[first % len(trees)]
    for step in range(1, len(trees)):
        total = (total, trees[(first + step) % len(trees)])
    return total


def _direct_order(size: int, chunk: int, root: int, nodes: tuple[int, ...]) -> order.Expr:  # noqa: ARG001
    return order.canonical_over(layout_of(nodes).node_trees())


@register("all_reduce", "hierarchical", _all_reduce_order, takes="nodes")
def all_reduce(size: int, rank: int, root: int, nodes: tuple[int, ...]) -> Schedule:  # noqa: ARG001
    """Build all-reduce: 4 rounds, or 2 + 2 (h-1) on more than 16 nodes.

    On h nodes of q ranks a rank sends S (q-1)/q bytes on the node before and after the crossing, and 2 S/q (h-1)/h
    elements to other nodes. Part i of lane j is chunk j * h + i.
    """
    plan = _plan_of_parts(layout_of(nodes))
    work = _Work(plan, rank)
    nodes_used = len(plan.layout.groups)
    sums = work.sum_on_node(Space.OUT if nodes_used == 1 else Space.ACC)
    ring = nodes_used > MANY
    across = _ring(work) if ring else (*work.sum_across(), *work.gather_across())
    rounds = (*sums, *across, *node_gather(plan, rank))
    raw, acc = plan.scratch(ring=ring)
    return Schedule(chunks=len(plan.chunks), rounds=rounds, raw_slots=raw, acc_slots=acc)


@register("reduce_scatter", "hierarchical", _direct_order, takes="nodes")
def reduce_scatter(size: int, rank: int, root: int, nodes: tuple[int, ...]) -> Schedule:  # noqa: ARG001
    """Build reduce-scatter: 2 rounds; nodes send others S (p-q)/p elements, the least possible.

    Local rank l of a node sums for it the chunks of all nodes' local ranks l, and sends them their sums.
    """
    plan = _plan_of_ranks(layout_of(nodes))
    work = _Work(plan, rank)
    rounds = (*work.sum_on_node(Space.OUT if len(plan.layout.groups) == 1 else Space.ACC), *work.sum_across())
    raw, acc = plan.scratch()
    return Schedule(chunks=size, rounds=rounds, raw_slots=raw, acc_slots=acc)


@register("all_gather", "hierarchical", takes="nodes")
def all_gather(size: int, rank: int, root: int, nodes: tuple[int, ...]) -> Schedule:  # noqa: ARG001
    """Build all-gather: 2 rounds; a rank sends its chunk once to every other node, S (p-q)/p bytes come to each.

    Local ranks l of all nodes exchange chunks, and then every rank gives what it has to the others of its node.
    """
    plan = _plan_of_ranks(layout_of(nodes))
    own = Round((), (Copy(Ref(Space.OUT, rank), Ref(Space.IN, rank)),))
    return Schedule(chunks=size, rounds=(own, *_Work(plan, rank).gather_across(), *node_gather(plan, rank)))


@lru_cache(maxsize=64)
def _plan_of_parts(layout: Layout) -> Plan:
    """Return the plan of all-reduce: every lane has a part for each node."""
    return Plan(layout, tuple((lane, node) for lane in range(layout.lanes) for node in range(len(layout.groups))))


@lru_cache(maxsize=64)
def _plan_of_ranks(layout: Layout) -> Plan:
    """Return the plan in which chunk r is rank r's: its lane is r's number on its node, its home that node."""
    return Plan(layout, tuple((layout.places[rank][1], layout.places[rank][0]) for rank in sorted(layout.places)))


@dataclass
class _Work:
    """Build the rounds of one rank, whose sums for its node are in `held` as soon as there are any."""

    plan: Plan
    rank: int

    def __post_init__(self) -> None:
        """Find the rank's place; what it holds at first is its input."""
        self.layout = self.plan.layout
        self.node, _ = self.layout.places[self.rank]
        self.chunks = self.plan.of(self.rank)
        self.finals = [chunk for chunk in self.chunks if self.plan.home(chunk) == self.node]
        self.others = [node for node in range(len(self.layout.groups)) if node != self.node]
        self.held = {chunk: Ref(Space.IN, chunk) for chunk in self.chunks}
        self.free = 0  # the first accumulator beyond those of `held`

    def sum_on_node(self, space: Space) -> tuple[Round, ...]:
        """Return the direct reduce-scatter among the node's ranks, which ends in `space`.

        In ACC the n-th chunk of the rank's is in slot n. A rank alone keeps its input, or copies it to OUT.
        """
        group = self.layout.groups[self.node]
        if len(group) == 1 and space is not Space.OUT:
            return ()
        results = {c: Ref(space, c, n if space is Space.ACC else 0) for n, c in enumerate(self.chunks)}
        if len(group) == 1:
            return (Round((), tuple(Copy(results[c], self.held[c]) for c in self.chunks)),)
        peers = [peer for peer in group if peer != self.rank]
        width = len(self.chunks)
        self.free = width if space is Space.ACC else 0
        parts = {
            p: {c: Ref(Space.RAW, c, i * width + n) for n, c in enumerate(self.chunks)} for i, p in enumerate(peers)
        }
        parts[self.rank] = self.held
        messages: list[Send | Recv] = []
        for peer in peers:
            messages += message(Recv, peer, parts[peer].values())
            messages += message(Send, peer, [Ref(Space.IN, c) for c in self.plan.of(peer)])
        steps = [
            step for c in self.chunks for step in pairwise_steps([parts[p][c] for p in group], results[c], self.free)[0]
        ]
        self.held = results
        return (Round(tuple(messages), tuple(steps)),)

    def sum_across(self) -> tuple[Round, ...]:
        """Return the round in which nodes send sums to the chunks' homes; those are summed in the order of nodes."""
        if not self.others:
            return ()
        messages: list[Send | Recv] = []
        steps: list[Reduce] = []
        sums_of = [node for node in self.others if not self.layout.is_alone(node)]
        after = self.free + len(self.finals) * len(sums_of)
        raw, acc = count(), count(self.free)
        for chunk in self.chunks:
            if chunk not in self.finals:
                messages += [Send(self.plan.worker(self.plan.home(chunk), chunk), (self.held[chunk],))]
                continue
            sums = {self.node: self.held[chunk]}
            for node in self.others:
                alone = self.layout.is_alone(node)
                sums[node] = Ref(Space.RAW, chunk, next(raw)) if alone else Ref(Space.ACC, chunk, next(acc))
                messages += [Recv(self.plan.worker(node, chunk), (sums[node],))]
            steps += pairwise_steps([sums[node] for node in sorted(sums)], Ref(Space.OUT, chunk), after)[0]
        return (Round(tuple(messages), tuple(steps)),)

    def gather_across(self) -> tuple[Round, ...]:
        """Return the round in which the homes of chunks send them to the other nodes, from OUT to OUT."""
        messages: list[Send | Recv] = []
        for chunk in self.chunks:
            refs = (Ref(Space.OUT, chunk),)
            if chunk in self.finals:
                messages += [Send(self.plan.worker(node, chunk), refs) for node in self.others]
            else:
                messages += [Recv(self.plan.worker(self.plan.home(chunk), chunk), refs)]
        return (Round(tuple(messages)),) if self.others else ()


def _ring(work: _Work) -> tuple[Round, ...]:
    """Return the rounds in which every lane's parts go round the nodes to be summed, and again to be spread."""
    num_nodes = len(work.layout.groups)
    after, before = (work.node + 1) % num_nodes, (work.node - 1) % num_nodes
    starts = sorted({chunk - work.plan.home(chunk) for chunk in work.chunks})
    rounds = []
    leaving = dict(work.held)
    for step in range(2 * (num_nodes - 1)):
        messages: list[Send | Recv] = []
        steps = []
        for lane, start in enumerate(starts):
            out, chunk = start + (work.node - step - 1) % num_nodes, start + (work.node - step - 2) % num_nodes
            slot = Ref(Space.ACC, chunk, work.free + 2 * lane + step % 2)
            arriving = Ref(Space.RAW, chunk, lane) if step == 0 and work.layout.is_alone(before) else slot
            if step >= num_nodes - 1:
                arriving = Ref(Space.OUT, chunk)
            else:
                last = step == num_nodes - 2
                steps.append(Reduce(Ref(Space.OUT, chunk) if last else slot, arriving, work.held[chunk]))
            messages.append(Recv(work.plan.worker(before, chunk), (arriving,)))
            messages.append(Send(work.plan.worker(after, out), (leaving[out],)))
            leaving[chunk] = Ref(Space.OUT, chunk) if step >= num_nodes - 2 else slot
        rounds.append(Round(tuple(messages), tuple(steps)))
    return tuple(rounds)


def node_gather(plan: Plan, rank: int, *, skip: int | None = None) -> tuple[Round, ...]:
    """Return the round in which every rank of a node gives the others the chunks of OUT that it works for.

    Nothing is given to the rank `skip`, which has all.
    """
    node, _ = plan.layout.places[rank]
    messages: list[Send | Recv] = []
    for peer in plan.layout.groups[node]:
        if peer != rank:
            give, take = peer != skip, rank != skip
            messages += message(Recv, peer, [Ref(Space.OUT, c) for c in plan.of(peer) if take])
            messages += message(Send, peer, [Ref(Space.OUT, c) for c in plan.of(rank) if give])
    return (Round(tuple(messages)),) if messages else ()
