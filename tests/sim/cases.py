"""What tests of builders share: every algorithm, its options, and who sends how many bytes to whom."""

from collections import Counter

import pytest

from mpizero.collectives import OPERATIONS, algorithms_of, build, even_offsets
from mpizero.collectives.schedule import Send, Space

SIZES = range(1, 34)
PIECES = [1, 2, 3, 8]
ALGORITHMS = [entry for operation in OPERATIONS for entry in algorithms_of(operation)]
NAMES = [f"{entry.operation}-{entry.name}" for entry in ALGORITHMS]

each_algorithm = pytest.mark.parametrize("entry", ALGORITHMS, ids=NAMES)


def roots_of(entry, size):
    if not OPERATIONS[entry.operation].rooted:
        return [0]
    return range(size) if size <= 9 else [size // 2, size - 1]


def layouts(size):
    """Node numbers of ranks: one node, a rank per node, blocks, uneven nodes, ranks dealt out in turn, no order."""
    uneven = [0, 0, 0, 1, 1, 2]
    found = [
        (0,) * size,
        tuple(range(size)),
        tuple(rank // 2 for rank in range(size)),
        tuple(rank // 4 for rank in range(size)),
        tuple(uneven[rank % 6] + 3 * (rank // 6) for rank in range(size)),
        tuple(rank % 2 for rank in range(size)),
        tuple(rank % 3 for rank in range(size)),
        tuple(-(rank * rank % 7) for rank in range(size)),
        (5,) * (size - 1) + (2,),
    ]
    return list(dict.fromkeys(found))


def options(entry, size, few=9):
    """All options up to `few` ranks, one for each larger size by turns, and few pieces there."""
    pieces = PIECES if size <= few else PIECES[:3]
    full = {"nodes": [{"nodes": nodes} for nodes in layouts(size)], "pieces": [{"pieces": count} for count in pieces]}
    found = full.get(entry.takes, [{}])
    return found if size <= few else [found[size % len(found)]]


def cases(entry, sizes=SIZES, few=9):
    """(size, root, options) of everything that an algorithm is proven for."""
    return [
        (size, root, option) for size in sizes for option in options(entry, size, few) for root in roots_of(entry, size)
    ]


def schedules(entry, size, root=0, **option):
    return [build(entry.operation, entry.name, size, rank, root, **option) for rank in range(size)]


def flows(entry, offsets, *, size=None, root=0, widths=(1, 1), **option):
    """Bytes (elements, if not told the widths) by (source, target); a number of elements is cut evenly."""
    size = len(offsets) - 1 if size is None else size
    found = Counter()
    for rank, schedule in enumerate(schedules(entry, size, root, **option)):
        cut = even_offsets(offsets, schedule.chunks) if isinstance(offsets, int) else offsets
        assert len(cut) == schedule.chunks + 1
        for round_ in schedule.rounds:
            for step in round_.messages:
                if isinstance(step, Send):
                    for ref in step.refs:
                        width = widths[ref.space is Space.ACC]
                        found[rank, step.peer] += (cut[ref.chunk + 1] - cut[ref.chunk]) * width
    return found


def given(found, rank):
    return sum(nbytes for (source, _), nbytes in found.items() if source == rank)


def taken(found, rank):
    return sum(nbytes for (_, target), nbytes in found.items() if target == rank)
