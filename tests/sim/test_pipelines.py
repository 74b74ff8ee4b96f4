"""Pipelined algorithms: bytes, rounds and scratch against theory, and what may overlap."""

from itertools import pairwise

import pytest
from sim.cases import PIECES, SIZES, flows, given, roots_of, schedules, taken

from mpizero.collectives import algorithm
from mpizero.collectives.order import show
from mpizero.collectives.schedule import Send, Space
from mpizero.collectives.simulate import simulate

each_pieces = pytest.mark.parametrize("pieces", PIECES)
FEW = [*range(1, 10), 16, 33]
RING, CHAIN = algorithm("all_reduce", "segmented_ring"), algorithm("broadcast", "chain")
TREES = [algorithm(operation, "double_tree") for operation in ("broadcast", "reduce", "all_reduce")]


def places(refs):
    """The memory of refs: a slot holds one chunk at a time, and in place IN and OUT are the same."""
    return {(ref.space, ref.slot) if ref.space in {Space.RAW, Space.ACC} else (Space.OUT, ref.chunk) for ref in refs}


@each_pieces
def test_segmented_ring_is_the_ring_in_pieces(pieces):
    """2 S (p-1)/p, to the next rank alone; a part's first step is narrow, the others of the reduce-scatter are wide."""
    for size in FEW:
        each = 12
        found = flows(RING, each * size * pieces, size=size, pieces=pieces)
        after = {(rank, (rank + 1) % size): 2 * (size - 1) * each * pieces for rank in range(size)}
        assert found == (after if size > 1 else {})
        wide = flows(RING, each * size * pieces, size=size, widths=(2, 4), pieces=pieces)
        elements = 2 + 4 * (size - 2) + 2 * (size - 1)
        assert [given(wide, rank) for rank in range(size)] == [elements * each * pieces if size > 1 else 0] * size


@each_pieces
def test_segmented_ring_rounds_and_scratch(pieces):
    for size in FEW[1:]:
        for schedule in schedules(RING, size, pieces=pieces):
            assert schedule.chunks == size * pieces
            assert len(schedule.rounds) == (size - 1) * pieces + (size - 1) + (pieces > 1)
            assert (schedule.raw_slots, schedule.acc_slots) == (2, 4)


@each_pieces
def test_segmented_ring_sums_one_piece_while_another_moves(pieces):
    """With two pieces or more no local step touches what the messages of its round touch, also in place."""
    for size in FEW[1:]:
        touching = 0
        for schedule in schedules(RING, size, pieces=pieces):
            for round_ in schedule.rounds:
                moved = places(ref for step in round_.messages for ref in step.refs)
                sources = places(ref for step in round_.messages if isinstance(step, Send) for ref in step.refs)
                targets = moved - sources
                for step in round_.local:
                    touching += bool(places([step.dst]) & moved or places(step[1:]) & targets)
        assert (touching > 0) == (pieces == 1)


def test_segmented_ring_order_is_that_of_its_ring_chunk():
    found = simulate(RING, 3, pieces=2).results[0]
    assert [show(found[chunk]) for chunk in range(6)] == ["(1+2)+0"] * 2 + ["(2+0)+1"] * 2 + ["(0+1)+2"] * 2


@each_pieces
def test_chain(pieces):
    for size in SIZES:
        for root in roots_of(CHAIN, size):
            found = flows(CHAIN, 12 * pieces, size=size, root=root, pieces=pieces)
            line = [(root + i) % size for i in range(size)]
            assert found == dict.fromkeys(pairwise(line), 12 * pieces)
            rounds = [len(schedule.rounds) for schedule in schedules(CHAIN, size, root, pieces=pieces)]
            assert max(rounds) <= pieces + 1


def senders(entry, size, root, pieces, half):
    """The ranks that send anything of one half of the buffer, with the number of ranks that they send it to."""
    found = {}
    for rank, schedule in enumerate(schedules(entry, size, root, pieces=pieces)):
        peers = {
            step.peer
            for round_ in schedule.rounds
            for step in round_.messages
            if isinstance(step, Send) and step.refs[0].chunk // pieces == half
        }
        if peers:
            found[rank] = len(peers)
    return found


@each_pieces
def test_double_tree_has_no_rank_that_is_inner_in_both(pieces):
    entry = algorithm("broadcast", "double_tree")
    for size in SIZES[1:]:
        for root in roots_of(entry, size):
            first, second = (senders(entry, size, root, pieces, half) for half in range(2))
            assert set(first) & set(second) == {root}
            assert first[root] == second[root] == 1
            assert max([*first.values(), *second.values()]) <= 2


@each_pieces
def test_double_tree_bytes(pieces):
    """Down S to every rank but the root, up S from each; all-reduce does both, 2 S from a rank at most."""
    down, up, both = TREES
    each, total = 6, 12 * pieces
    for size in SIZES:
        for root in roots_of(down, size):
            spread = flows(down, total, size=size, root=root, pieces=pieces)
            assert [taken(spread, rank) for rank in range(size)] == [0 if r == root else total for r in range(size)]
            assert max(given(spread, rank) for rank in range(size)) <= total
            summed = flows(up, total, size=size, root=root, pieces=pieces)
            assert [given(summed, rank) for rank in range(size)] == [0 if r == root else total for r in range(size)]
            assert max(taken(summed, rank) for rank in range(size)) <= total
            wide = flows(up, total, size=size, root=root, widths=(2, 4), pieces=pieces)
            # a leaf's part is narrow, an inner rank's wide: no rank is inner twice, some are leaves twice
            assert {given(wide, rank) for rank in range(size)} <= {0, 2 * total, (2 + 4) * each * pieces}
        found = flows(both, total, size=size, pieces=pieces)
        assert found == flows(down, total, size=size, pieces=pieces) + flows(up, total, size=size, pieces=pieces)
        assert max(given(found, rank) for rank in range(size)) <= 2 * total


@each_pieces
def test_double_tree_rounds_and_scratch(pieces):
    """A pair of pieces a round, after a tree's depth; up and down overlap, so that an all-reduce adds depth alone."""
    for entry, times in zip(TREES, [1, 1, 2], strict=True):
        for size in SIZES[1:]:
            found = schedules(entry, size, pieces=pieces)
            depth = (size - 1).bit_length()
            assert max(len(schedule.rounds) for schedule in found) <= pieces + times * depth
            slots = {(schedule.raw_slots, schedule.acc_slots) for schedule in found}
            assert slots == ({(0, 0)} if entry.operation == "broadcast" else {(2, 3)})


def test_double_tree_orders_are_written_out():
    up, both = TREES[1:]
    found = simulate(both, 6, pieces=1).results[0]
    assert [show(found[chunk]) for chunk in range(2)] == ["0+((((1+2)+3)+4)+5)", "0+((((2+3)+4)+5)+1)"]
    found = simulate(up, 5, 2, pieces=1).results[2]
    assert [show(found[chunk]) for chunk in range(2)] == ["2+(((0+1)+3)+4)", "2+(((4+3)+1)+0)"]
