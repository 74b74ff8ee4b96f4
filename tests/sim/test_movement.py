"""Algorithms that move data and sum nothing, and pairwise exchange: bytes and messages against theory."""

import pytest
from sim.cases import SIZES, flows, given, roots_of, schedules, taken

from mpizero.collectives import algorithm, even_offsets
from mpizero.collectives.order import show
from mpizero.collectives.simulate import simulate


def lengths_of(size):
    return [(7 * i * i + 3) % 11 for i in range(size)]


def offsets_of(lengths):
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def messages(entry, size, root=0):
    return [schedule.sent_messages() for schedule in schedules(entry, size, root)]


@pytest.mark.parametrize("name", ["direct", "pairwise"])
def test_all_to_all_sends_every_pair_its_own_chunk(name):
    entry = algorithm("all_to_all", name)
    for size in SIZES:
        lengths = lengths_of(size * size)
        found = flows(entry, offsets_of(lengths), size=size)
        assert found == {(s, d): lengths[s * size + d] for s in range(size) for d in range(size) if s != d}
        assert messages(entry, size) == [size - 1] * size


def test_direct_all_to_all_has_one_round_and_pairwise_one_per_peer():
    for size in SIZES:
        assert {len(s.rounds) for s in schedules(algorithm("all_to_all", "direct"), size)} == {1}
        for rank, schedule in enumerate(schedules(algorithm("all_to_all", "pairwise"), size)):
            pairs = [[message.peer for message in round_.messages] for round_ in schedule.rounds[1:]]
            assert len(pairs) == size - 1
            if size & (size - 1) == 0:
                assert pairs == [[rank ^ i, rank ^ i] for i in range(1, size)]


def test_bruck_all_to_all_sends_chunks_once_per_bit_of_their_distance():
    entry = algorithm("all_to_all", "bruck")
    assert not entry.uneven
    for size in SIZES:
        found = flows(entry, 3 * size * size, size=size)
        hops = sum(distance.bit_count() for distance in range(size))
        assert [given(found, rank) for rank in range(size)] == [3 * hops] * size
        assert messages(entry, size) == [(size - 1).bit_length()] * size
        assert schedules(entry, size)[0].raw_slots <= size + 1


@pytest.mark.parametrize("name", ["bruck", "pairwise"])
def test_all_gather_bytes(name):
    entry = algorithm("all_gather", name)
    for size in SIZES:
        found = flows(entry, 3 * size, size=size)
        assert [given(found, rank) for rank in range(size)] == [3 * (size - 1)] * size
        depth = (size - 1).bit_length() if name == "bruck" else size - 1
        assert messages(entry, size) == [depth] * size
        lengths = lengths_of(size)
        uneven = flows(entry, offsets_of(lengths))
        assert [taken(uneven, rank) for rank in range(size)] == [sum(lengths) - length for length in lengths]


def test_pairwise_reduce_scatter():
    """All but the own chunk is sent, nothing of it summed before; an order of its own; little scratch."""
    entry = algorithm("reduce_scatter", "pairwise")
    for size in SIZES:
        lengths = lengths_of(size)
        found = flows(entry, offsets_of(lengths), widths=(2, 4))
        assert [given(found, rank) for rank in range(size)] == [2 * (sum(lengths) - length) for length in lengths]
        assert {(s.raw_slots, s.acc_slots) for s in schedules(entry, size)} == {(1, 1)}
    found = simulate(entry, 4).results
    assert [show(found[rank][rank]) for rank in range(4)] == [
        "((0+3)+2)+1",
        "((1+0)+3)+2",
        "((2+1)+0)+3",
        "((3+2)+1)+0",
    ]


def test_scatter_all_gather_gives_every_rank_every_chunk_once():
    """van de Geijn: p - 1 ranks receive S bytes each; the root sends a scatter, and chunks 0 and 1 round the ring."""
    entry = algorithm("broadcast", "scatter_all_gather")
    for size in SIZES:
        for root in roots_of(entry, size):
            found = flows(entry, offsets_of(lengths_of(size)), root=root)
            total = sum(lengths_of(size))
            assert [taken(found, rank) for rank in range(size)] == [0 if r == root else total for r in range(size)]
            even = flows(entry, 3 * size, size=size, root=root)
            assert max((given(even, rank) for rank in range(size)), default=0) <= 2 * 3 * size
            assert max(len(s.rounds) for s in schedules(entry, size, root)) <= (size - 1).bit_length() + size - 1


@pytest.mark.parametrize("operation", ["gather", "scatter"])
def test_direct_gather_and_scatter_bytes(operation):
    entry = algorithm(operation, "direct")
    for size in SIZES:
        lengths = lengths_of(size)
        for root in roots_of(entry, size):
            found = flows(entry, offsets_of(lengths), root=root)
            peers = [rank for rank in range(size) if rank != root]
            if operation == "gather":
                assert found == {(rank, root): lengths[rank] for rank in peers}
            else:
                assert found == {(root, rank): lengths[rank] for rank in peers}


def test_tree_gather_and_scatter_bytes():
    """One is the other backwards. A chunk makes as many hops as its rank, counted from the root, has bits."""
    gather, scatter = algorithm("gather", "tree"), algorithm("scatter", "tree")
    for size in SIZES:
        lengths = lengths_of(size)
        for root in roots_of(gather, size):
            up, down = (flows(entry, offsets_of(lengths), root=root) for entry in (gather, scatter))
            assert up == {(target, source): nbytes for (source, target), nbytes in down.items()}
            assert sum(up.values()) == sum(lengths[(root + i) % size] * i.bit_count() for i in range(size))
            assert taken(up, root) == sum(lengths) - lengths[root]
            assert sum(messages(gather, size, root)) == size - 1
            assert max(len(s.rounds) for s in schedules(scatter, size, root)) <= (size - 1).bit_length() + 1
            slots = {s.raw_slots for s in schedules(gather, size, root)}
            assert max(slots) <= size // 2
            even = flows(gather, even_offsets(4 * size, size), root=root)
            assert max((given(even, rank) for rank in range(size)), default=0) <= 4 * max(1, -(-size // 2))
