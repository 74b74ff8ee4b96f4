"""The table of operations and algorithms: traits, and what builders and orders are given."""

import pytest
from sim.cases import SIZES, each_algorithm, schedules

from mpizero.collectives import OPERATIONS, Algorithm, algorithm, build
from mpizero.collectives.schedule import Schedule
from mpizero.errors import ArgumentError


def test_uneven_counts_may_be_given_where_chunks_are_ranks():
    uneven = {name for name, operation in OPERATIONS.items() if operation.uneven}
    assert uneven == {"all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"}
    assert uneven == {name for name, operation in OPERATIONS.items() if operation.chunks(3) is not None}


def test_bandwidth_factors_are_those_of_nccl_tests():
    factors = {name: operation.bandwidth_factor(4) for name, operation in OPERATIONS.items()}
    assert factors.pop("all_reduce") == 1.5
    assert factors.pop("barrier") == 0
    assert factors.pop("broadcast") == factors.pop("reduce") == 1
    assert set(factors.values()) == {0.75}


@each_algorithm
def test_chunks_are_those_of_the_operation(entry):
    for size in SIZES:
        wanted = OPERATIONS[entry.operation].chunks(size)
        assert wanted is None or {schedule.chunks for schedule in schedules(entry, size)} == {wanted}


@each_algorithm
def test_build_gives_what_the_builder_takes_and_no_more(entry):
    name = (entry.operation, entry.name, 6, 3)
    plain = build(*name)
    assert build(*name) is plain
    placed, cut = build(*name, nodes=(0, 0, 1, 1, 2, 2)), build(*name, pieces=3)
    assert (placed == plain) == (entry.takes != "nodes")
    assert (cut == plain) == (entry.takes != "pieces")
    assert build(*name, nodes=(4,) * 6, pieces=1) == plain


def recorder(takes, seen):
    def builder(*args):
        seen.append(args)
        return Schedule(chunks=2, rounds=())

    def order(*args):
        seen.append(args)
        return 0

    return Algorithm(operation="all_reduce", name="recorder", build=builder, order=order, takes=takes)


@pytest.mark.parametrize(("takes", "extra"), [("", ()), ("nodes", ((5, 5, 6),)), ("pieces", (2,))])
def test_builders_and_orders_take_the_same(takes, extra):
    seen = []
    entry = recorder(takes, seen)
    entry.schedule(3, 1, 2, nodes=(5, 5, 6), pieces=2)
    entry.tree(3, 1, 2, nodes=(5, 5, 6), pieces=2)
    assert seen == [(3, 1, 2, *extra)] * 2
    del seen[:]
    assert not entry.is_canonical(3, 2, nodes=(5, 5, 6), pieces=2)
    assert all(args[3:] == extra for args in seen)


def test_without_nodes_all_ranks_are_on_one():
    seen = []
    recorder("nodes", seen).schedule(3, 0)
    assert seen == [(3, 0, 0, (0, 0, 0))]


def test_canonical_is_asked_of_every_chunk_that_there_is():
    """Pieces and lanes make more chunks than ranks: the last one's order counts too."""

    def builder(size, rank, root, pieces):
        return Schedule(chunks=8, rounds=())

    def order(size, chunk, root, pieces):
        return (0, 1) if chunk < 7 else (1, 0)

    entry = Algorithm(operation="all_reduce", name="late", build=builder, order=order, takes="pieces")
    assert not entry.is_canonical(2)


def test_mistakes_are_refused():
    with pytest.raises(ArgumentError, match=r"nodes must be the node numbers of all 4 ranks \(got \(0, 1\)\)"):
        build("all_reduce", "hierarchical", 4, 0, nodes=(0, 1))
    with pytest.raises(ArgumentError, match=r"pieces must be 1 or more \(got 0\)"):
        build("all_reduce", "segmented_ring", 4, 0, pieces=0)
    with pytest.raises(ArgumentError, match=r"algorithm must be one of auto, native, .* for all_to_all"):
        algorithm("all_to_all", "ring")
    with pytest.raises(ArgumentError, match=r"algorithm must be one that sums .*bruck for all_to_all"):
        algorithm("all_to_all", "bruck").tree(2, 0)
