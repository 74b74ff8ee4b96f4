"""Algorithms that know which ranks share a node: what crosses between nodes, and the order, for any placement."""

from collections import Counter

import pytest
from sim.cases import SIZES, cases, flows, given, layouts, schedules, taken

from mpizero.collectives import algorithm
from mpizero.collectives.order import show
from mpizero.collectives.schedule import Space
from mpizero.collectives.simulate import simulate

ALL_REDUCE, LEADER = algorithm("all_reduce", "hierarchical"), algorithm("all_reduce", "leader")
SCATTER, GATHER = algorithm("reduce_scatter", "hierarchical"), algorithm("all_gather", "hierarchical")
BROADCAST, LEADER_BROADCAST = algorithm("broadcast", "hierarchical"), algorithm("broadcast", "leader")


def blocks(nodes, per_node):
    return tuple(rank // per_node for rank in range(nodes * per_node))


def between(found, nodes):
    """What leaves each node and what comes to it, of what goes to another."""
    crossing = {(s, t): nbytes for (s, t), nbytes in found.items() if nodes[s] != nodes[t]}
    out, into = Counter(), Counter()
    for (source, target), nbytes in crossing.items():
        out[nodes[source]] += nbytes
        into[nodes[target]] += nbytes
    return out, into


def placements(sizes=(*range(1, 13), 17, 24)):
    return [(size, nodes) for size in sizes for nodes in layouts(size)]


def test_all_reduce_sends_what_a_ring_of_nodes_would():
    """2 S (h-1)/h out of every node of h, whatever its ranks and wherever they are."""
    for size, nodes in [
        *placements(),
        (34, blocks(17, 2)),
        (20, blocks(20, 1)),
        (27, tuple(r % 18 for r in range(27))),
    ]:
        chunks = schedules(ALL_REDUCE, size, nodes=nodes)[0].chunks
        count = len(set(nodes))
        out, into = between(flows(ALL_REDUCE, 12 * chunks, size=size, nodes=nodes), nodes)
        theory = 2 * 12 * chunks * (count - 1) // count
        assert out == into == (dict.fromkeys(nodes, theory) if count > 1 else {})


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (4, 1), (3, 4), (2, 8), (1, 6), (17, 2)])
def test_all_reduce_shares_the_work_among_a_nodes_ranks(nodes, per_node):
    placed = blocks(nodes, per_node)
    size, total = nodes * per_node, 12 * nodes * per_node
    found = flows(ALL_REDUCE, total, size=size, nodes=placed)
    inside = Counter({pair: nbytes for pair, nbytes in found.items() if placed[pair[0]] == placed[pair[1]]})
    across = found - inside
    assert {given(inside, rank) for rank in range(size)} == {2 * total * (per_node - 1) // per_node}
    assert {given(across, rank) for rank in range(size)} == {2 * total * (nodes - 1) // nodes // per_node}
    assert {len(s.rounds) for s in schedules(ALL_REDUCE, size, nodes=placed)} == {
        2 * (per_node > 1) + (0 if nodes == 1 else 2 * (nodes - 1) if nodes > 16 else 2)
    }


def test_all_reduce_widths():
    """Of 16-bit floats, sums cross as fp32 and what is no sum does not: 2 hosts x 2, and 2 x 1."""
    found = flows(ALL_REDUCE, 48, size=4, widths=(2, 4), nodes=blocks(2, 2))
    assert between(found, blocks(2, 2))[0] == {0: 24 * 4 + 24 * 2, 1: 24 * 4 + 24 * 2}
    found = flows(ALL_REDUCE, 48, size=2, widths=(2, 4), nodes=(0, 1))
    assert given(found, 0) == given(found, 1) == 24 * 2 + 24 * 2
    found = flows(ALL_REDUCE, 48, size=3, widths=(2, 4), nodes=(0, 0, 1))
    assert between(found, (0, 0, 1))[0] == {0: 24 * 4 + 24 * 2, 1: 24 * 2 + 24 * 2}


def test_reduce_scatter_and_all_gather_cross_as_little_as_can_be():
    """A node sends every other node that node's chunks, summed, once; in all-gather its own chunks to every other."""
    for size, nodes in placements():
        lengths = [(7 * i * i + 3) % 11 for i in range(size)]
        offsets = [sum(lengths[:i]) for i in range(size + 1)]
        own = Counter()
        for rank, node in enumerate(nodes):
            own[node] += lengths[rank]
        total, others = sum(lengths), len(own) - 1
        out, into = between(flows(SCATTER, offsets, nodes=nodes), nodes)
        assert +out == +Counter({node: total - own[node] for node in own if others})
        assert +into == +Counter({node: own[node] * others for node in own})
        gathered = flows(GATHER, offsets, nodes=nodes)
        out, into = between(gathered, nodes)
        assert +out == +Counter({node: own[node] * others for node in own})
        assert +into == +Counter({node: total - own[node] for node in own if others})
        assert [taken(gathered, rank) for rank in range(size)] == [total - length for length in lengths]


def test_broadcast_crosses_once():
    """The root's node sends S, the others S (h-2)/(h-1), and every rank but the root receives S."""
    for size, nodes in placements():
        for root in {0, size // 2, size - 1}:
            chunks = schedules(BROADCAST, size, nodes=nodes)[0].chunks
            total, count = 12 * chunks, len(set(nodes))
            found = flows(BROADCAST, total, size=size, root=root, nodes=nodes)
            out, into = between(found, nodes)
            if count > 1:
                assert out[nodes[root]] == total
                rest = {node: nbytes for node, nbytes in out.items() if node != nodes[root]}
                assert set(rest.values()) <= {total * (count - 2) // (count - 1)}
                assert into == dict.fromkeys(set(nodes) - {nodes[root]}, total)
            assert [taken(found, rank) for rank in range(size)] == [0 if r == root else total for r in range(size)]
            assert max(len(s.rounds) for s in schedules(BROADCAST, size, root, nodes=nodes)) <= 4


def test_leaders_alone_cross():
    for size, nodes in placements():
        leaders = {nodes.index(node) for node in nodes}
        count = len(leaders)
        found = flows(LEADER, 1, size=size, nodes=nodes)
        crossing = Counter({pair: n for pair, n in found.items() if nodes[pair[0]] != nodes[pair[1]]})
        assert {rank for pair in crossing for rank in pair} == (leaders if count > 1 else set())
        if count & (count - 1) == 0:
            assert {given(crossing, rank) for rank in leaders} == {count.bit_length() - 1}
        for root in {0, size - 1}:
            out, into = between(flows(LEADER_BROADCAST, 1, size=size, root=root, nodes=nodes), nodes)
            assert into == dict.fromkeys(set(nodes) - {nodes[root]}, 1)
            assert sum(out.values()) == count - 1


def test_canonical_on_blocks_of_equal_powers_of_two():
    """The composition is then the canonical tree of all ranks; on one node, or with one rank on each, at any number."""
    for entry in (ALL_REDUCE, SCATTER):
        for per_node in (1, 2, 4, 8):
            for nodes in range(1, 6):
                assert entry.is_canonical(nodes * per_node, nodes=blocks(nodes, per_node))
        for size in SIZES:
            assert entry.is_canonical(size, nodes=(7,) * size)
        assert not entry.is_canonical(6, nodes=blocks(2, 3))
        assert not entry.is_canonical(4, nodes=(0, 1, 0, 1))
        assert not entry.is_canonical(6, nodes=(0, 0, 0, 1, 1, 2))
    assert not ALL_REDUCE.is_canonical(34, nodes=blocks(17, 2))
    assert SCATTER.is_canonical(34, nodes=blocks(17, 2))
    assert LEADER.is_canonical(8, nodes=blocks(4, 2))
    assert not LEADER.is_canonical(10, nodes=blocks(5, 2))


def test_orders_are_written_out():
    """Uneven nodes, ranks dealt out in turn (case K15), and a ring of nodes, in the simulator's own words."""
    found = simulate(ALL_REDUCE, 6, nodes=(0, 0, 0, 1, 1, 2)).results[5]
    assert {show(tree) for tree in found.values()} == {"(((0+1)+2)+(3+4))+5"}
    found = simulate(ALL_REDUCE, 4, nodes=(1, 0, 1, 0)).results[3]
    assert {show(tree) for tree in found.values()} == {"(0+2)+(1+3)"}
    found = simulate(LEADER, 5, nodes=(0, 1, 0, 1, 2)).results[3]
    assert {show(tree) for tree in found.values()} == {"((0+2)+(1+3))+4"}
    found = simulate(ALL_REDUCE, 17, nodes=tuple(range(17))).results[4]
    ring = [show(found[chunk]) for chunk in range(17)]
    assert ring[0].endswith("1+2)+3)+4)+5)+6)+7)+8)+9)+10)+11)+12)+13)+14)+15)+16)+0")
    assert len(set(ring)) == 17


@pytest.mark.parametrize("entry", [ALL_REDUCE, SCATTER], ids=["all_reduce", "reduce_scatter"])
def test_scratch_is_what_some_rank_uses(entry):
    """But for a few accumulators, which sums that arrive in accumulators make needless."""
    for size, _, option in [*cases(entry, range(2, 13)), (20, 0, {"nodes": blocks(20, 1)})]:
        found = schedules(entry, size, **option)
        for space, slots in ((Space.RAW, found[0].raw_slots), (Space.ACC, found[0].acc_slots)):
            used = {
                ref.slot
                for schedule in found
                for round_ in schedule.rounds
                for step in (*round_.messages, *round_.local)
                for ref in (step.refs if hasattr(step, "refs") else step)
                if ref.space is space
            }
            spare = size.bit_length() - 1 if space is Space.ACC else 0
            assert len(used) <= slots <= len(used) + spare, option


def test_scratch_of_equal_nodes():
    """At most q - 1 raw parts of h chunks: less than the buffer."""
    for nodes, per_node in ((2, 2), (4, 4), (8, 8)):
        schedule = schedules(ALL_REDUCE, nodes * per_node, nodes=blocks(nodes, per_node))[0]
        assert schedule.raw_slots == (per_node - 1) * nodes < schedule.chunks == nodes * per_node


def test_scratch_of_a_ring_of_nodes_does_not_grow_with_them():
    for nodes in (17, 32):
        schedule = schedules(ALL_REDUCE, 2 * nodes, nodes=blocks(nodes, 2))[0]
        assert (schedule.raw_slots, schedule.acc_slots) == (nodes, nodes + 2)
    schedule = schedules(ALL_REDUCE, 33, nodes=blocks(33, 1))[0]
    assert (schedule.raw_slots, schedule.acc_slots) == (1, 2)
