"""The tasks of `loads`, proven: every promised chunk is stored once, and nothing is stored that others load."""

from collections import Counter

import pytest

from mpizero.collectives import OPERATIONS, algorithm
from mpizero.collectives.loads import tasks
from mpizero.collectives.simulate import simulate

SIZES = range(2, 34)
MOVING = [name for name in OPERATIONS if name != "barrier"]


def roots(operation, size):
    return sorted({0, size // 2, size - 1}) if OPERATIONS[operation].rooted else [0]


def promised(operation, size, root):
    """Each (rank, chunk) of OUT that the operation promises."""
    traits = OPERATIONS[operation]
    for rank in range(size):
        if traits.output == "column":
            yield from ((rank, source * size + rank) for source in range(size))
        elif traits.output == "chunk":
            yield rank, rank
        elif traits.output == "whole" or rank == root:
            yield from ((rank, chunk) for chunk in range(size))


def held(operation, rank, chunk, size, root):
    """Whether a rank's input has a chunk."""
    kind = OPERATIONS[operation].input
    return {
        "whole": True,
        "chunk": chunk == rank,
        "root": rank == root,
        "source": rank == root,
        "row": chunk // size == rank,
    }[kind]


@pytest.mark.parametrize("operation", MOVING)
def test_every_promise_is_kept_once(operation):
    for size in SIZES:
        for root in roots(operation, size):
            stored = Counter()
            for rank in range(size):
                for task in tasks(operation, size, rank, root):
                    stored.update((target, task.chunk) for target in task.targets)
                    assert all(held(operation, source, task.chunk, size, root) for source in task.sources)
            wanted = set(promised(operation, size, root))
            if operation == "broadcast":  # the root has its own already
                wanted -= {(root, chunk) for chunk in range(size)}
            assert set(stored) == wanted
            assert set(stored.values()) <= {1}


@pytest.mark.parametrize("operation", MOVING)
def test_in_place_nobody_stores_what_another_loads(operation):
    """A chunk that is stored into a rank's memory may be loaded from there by the storing rank alone."""
    if OPERATIONS[operation].input == "row":
        pytest.skip("an all-to-all is never in place")
    for size in SIZES:
        for root in roots(operation, size):
            loads, stores = {}, {}
            for rank in range(size):
                for task in tasks(operation, size, rank, root):
                    for source in task.sources:
                        loads.setdefault((source, task.chunk), set()).add(rank)
                    for target in task.targets:
                        stores[target, task.chunk] = rank
            for place, rank in stores.items():
                assert loads.get(place, {rank}) == {rank}


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "reduce"])
def test_the_sum_is_that_of_direct_exchange(operation):
    """The phase computes what the schedule computes, on the rank that has the chunk in `direct`."""
    for size in (2, 3, 5, 8, 13):
        found = simulate(algorithm(operation, "direct"), size)
        for rank in range(size):
            (task,) = tasks(operation, size, rank)
            assert task.chunk == rank
            assert task.sources == tuple(range(size))
            for target in task.targets:
                assert task.chunk in found.results[target]


def test_an_all_reduce_reads_and_writes_each_byte_once():
    for size in SIZES:
        everything = [task for rank in range(size) for task in tasks("all_reduce", size, rank)]
        assert sum(len(task.sources) for task in everything) == size * size  # chunks of S/p: S read per rank
        assert sum(len(task.targets) for task in everything) == size * size
