"""Every registered builder, proven for sizes 1 to 33: results, order of summation, and bytes against theory."""

from itertools import accumulate, pairwise

import pytest
from sim.cases import NAMES, SIZES, cases, each_algorithm, roots_of, schedules

from mpizero.collectives import OPERATIONS, algorithm, build, even_offsets
from mpizero.collectives.order import canonical, show
from mpizero.collectives.simulate import simulate


def is_power_of_two(size):
    return size & (size - 1) == 0


def shapes(size):
    """Offsets of chunks: even, uneven, some empty, all but one empty, none at all."""
    few = max(1, size // 2)
    yield even_offsets(12 * size, size)
    yield even_offsets(12 * size + 5, size)
    yield even_offsets(few, size)
    yield [0, *accumulate((7 * i * i + 3) % 11 for i in range(size))]
    yield [0] * size + [17]
    yield [0] * (size + 1)


def sent(entry, offsets, itemsize=4, acc_itemsize=4, root=0):
    size = len(offsets) - 1
    totals = []
    for rank in range(size):
        schedule = build(entry.operation, entry.name, size, rank, root)
        cut = offsets if schedule.chunks == size else [0, offsets[-1]]
        totals.append(schedule.sent_bytes(cut, itemsize, acc_itemsize))
    return totals


def test_the_builders_of_the_design_are_there():
    names = {
        "all_reduce": "direct ring segmented_ring halving_doubling tree double_tree hierarchical leader",
        "reduce_scatter": "direct ring halving pairwise hierarchical",
        "all_gather": "direct ring doubling bruck pairwise hierarchical",
        "all_to_all": "direct bruck pairwise",
        "broadcast": "tree double_tree scatter_all_gather chain hierarchical leader",
        "reduce": "direct tree double_tree",
        "gather": "direct tree",
        "scatter": "direct tree",
        "barrier": "dissemination",
    }
    assert set(names) == set(OPERATIONS)
    assert set(NAMES) == {f"{operation}-{name}" for operation, words in names.items() for name in words.split()}


@each_algorithm
@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in_place"])
def test_every_size_root_and_option(entry, in_place):
    """Of larger sizes by turns in place and apart."""
    for size, root, option in cases(entry):
        if size > 9 and size % 2 == in_place:
            continue
        found = simulate(entry, size, root, in_place=in_place, **option)
        assert found.messages == [schedule.sent_messages() for schedule in schedules(entry, size, root, **option)]


CANONICAL = {"direct": set(SIZES), "tree": set(SIZES), "hierarchical": set(SIZES), "leader": set(SIZES)}
CANONICAL |= {"ring": {1}, "segmented_ring": {1}, "pairwise": {1}, "double_tree": {1, 2}}


@each_algorithm
def test_canonical_where_it_is_declared(entry):
    """With all ranks on one node; `test_placed` has others."""
    sizes = {size for size in SIZES if entry.is_canonical(size)}
    if not OPERATIONS[entry.operation].reduces:
        assert sizes == set(SIZES)
    elif entry.name in CANONICAL:
        assert sizes == CANONICAL[entry.name]
    else:  # folding gives the canonical tree for some sizes that are no powers of two as well, as (0+1)+2
        assert sizes > {1, 2, 4, 8, 16, 32}
        assert not sizes & {5, 9, 10, 11, 13, 33}


@each_algorithm
def test_what_is_summed_is_the_canonical_tree(entry):
    """The simulator's own result, not the declaration, against the canonical tree written out by hand."""
    by_hand = {1: "0", 2: "0+1", 3: "(0+1)+2", 4: "(0+1)+(2+3)", 5: "((0+1)+(2+3))+4", 7: "((0+1)+(2+3))+((4+5)+6)"}
    if not OPERATIONS[entry.operation].reduces:
        return
    for size, text in by_hand.items():
        assert show(canonical(size)) == text
        for root in roots_of(entry, size):
            if entry.is_canonical(size, root):
                trees = [tree for rank in simulate(entry, size, root).results for tree in rank.values()]
                assert {show(tree) for tree in trees} == {text}


def test_orders_that_are_not_canonical_are_written_out():
    ring = simulate(algorithm("all_reduce", "ring"), 4).results[0]
    assert [show(ring[chunk]) for chunk in range(4)] == ["((1+2)+3)+0", "((2+3)+0)+1", "((3+0)+1)+2", "((0+1)+2)+3"]
    folded = simulate(algorithm("all_reduce", "halving_doubling"), 6).results[0]
    assert {show(tree) for tree in folded.values()} == {"((0+1)+(2+3))+(4+5)"}
    folded = simulate(algorithm("all_reduce", "halving_doubling"), 5).results[0]
    assert {show(tree) for tree in folded.values()} == {"((0+1)+2)+(3+4)"}


@pytest.mark.parametrize("name", ["direct", "ring", "halving_doubling"])
def test_all_reduce_bytes(name):
    """2 (p-1)/p S on each rank where chunks are equal; 2 (p-1) S over all ranks for any chunks, folded or not."""
    entry = algorithm("all_reduce", name)
    for size in SIZES:
        for offsets in shapes(size):
            total = sent(entry, offsets)
            assert sum(total) == 2 * (size - 1) * offsets[-1] * 4
        if name != "halving_doubling" or is_power_of_two(size):
            count = 12 * size
            assert sent(entry, even_offsets(count, size)) == [2 * (size - 1) * count // size * 4] * size
            uneven = even_offsets(count + 5, size)
            theory = 2 * (size - 1) / size * (count + 5) * 4
            assert all(abs(nbytes - theory) <= 2 * size * 4 for nbytes in sent(entry, uneven))


@pytest.mark.parametrize("name", ["direct", "ring", "halving"])
def test_reduce_scatter_bytes(name):
    """All but the own chunk, on every rank, for any chunks."""
    entry = algorithm("reduce_scatter", name)
    for size in SIZES:
        if name == "halving" and not is_power_of_two(size):
            continue
        for offsets in shapes(size):
            lengths = [stop - start for start, stop in pairwise(offsets)]
            assert sent(entry, offsets) == [(offsets[-1] - length) * 4 for length in lengths]


@pytest.mark.parametrize("name", ["direct", "ring", "doubling"])
def test_all_gather_bytes(name):
    """(p-1) S over all ranks for any chunks; direct sends the own chunk p - 1 times, ring all chunks but one."""
    entry = algorithm("all_gather", name)
    for size in SIZES:
        for offsets in shapes(size):
            count = offsets[-1]
            lengths = [stop - start for start, stop in pairwise(offsets)]
            total = sent(entry, offsets)
            assert sum(total) == (size - 1) * count * 4
            if name == "direct":
                assert total == [(size - 1) * length * 4 for length in lengths]
            if name == "ring":
                assert total == [(count - lengths[(rank + 1) % size]) * 4 for rank in range(size)]
        if name != "doubling" or is_power_of_two(size):
            assert len(set(sent(entry, even_offsets(12 * size, size)))) == 1


def test_folded_bytes():
    """Of p = 2^k + f ranks, f odd ones send their part once; of even chunks no rank sends over 3 S and a chunk."""
    for size in SIZES:
        if is_power_of_two(size):
            continue
        groups = 1 << size.bit_length() - 1
        folded = size - groups
        for offsets in shapes(size):
            count = offsets[-1]
            total = sent(algorithm("all_reduce", "halving_doubling"), offsets)
            odd = [total[2 * pair + 1] for pair in range(folded)]
            assert odd == [count * 4] * folded
            scatter = sent(algorithm("reduce_scatter", "halving"), offsets)
            given = sum(offsets[2 * pair + 2] - offsets[2 * pair + 1] for pair in range(folded))
            assert sum(scatter) == ((size - 1) * count + given) * 4
        even = even_offsets(12 * size, size)
        assert max(sent(algorithm("all_reduce", "halving_doubling"), even)) <= (3 * size + 1) * 12 * 4
        assert max(sent(algorithm("reduce_scatter", "halving"), even)) <= 2 * 12 * size * 4


def test_tree_bytes():
    """Every rank but one gets, and every rank but one gives, the whole buffer once per tree."""
    for size in SIZES:
        depth = (size - 1).bit_length()
        offsets = even_offsets(10, size)
        for root in roots_of(algorithm("broadcast", "tree"), size):
            down = sent(algorithm("broadcast", "tree"), offsets, root=root)
            up = sent(algorithm("reduce", "tree"), offsets, root=root)
            assert sum(down) == (size - 1) * 40
            assert down[root] == max(down) == depth * 40
            assert up == [0 if rank == root else 40 for rank in range(size)]
        both = sent(algorithm("all_reduce", "tree"), offsets)
        assert both == [
            a + b
            for a, b in zip(
                sent(algorithm("reduce", "tree"), offsets), sent(algorithm("broadcast", "tree"), offsets), strict=True
            )
        ]


def test_direct_reduce_bytes():
    """A rank sends the others their chunks, and then its own chunk's sum, in fp32, to the root."""
    entry = algorithm("reduce", "direct")
    for size in SIZES:
        for root in roots_of(entry, size):
            for offsets in shapes(size):
                lengths = [stop - start for start, stop in pairwise(offsets)]
                theory = [
                    (offsets[-1] - length) * 2 + (length * 4 if rank != root else 0)
                    for rank, length in enumerate(lengths)
                ]
                assert sent(entry, offsets, 2, 4, root) == theory


def test_16_bit_bytes():
    """Direct sends no partial sums, so nothing is wide; ring and halving send all but the first step's in fp32."""
    for size in SIZES:
        offsets = even_offsets(12 * size + 5, size)
        lengths = [stop - start for start, stop in pairwise(offsets)]
        for operation in ("all_reduce", "reduce_scatter"):
            entry = algorithm(operation, "direct")
            assert sent(entry, offsets, 2, 4) == sent(entry, offsets, 2, 2)
        ring = sent(algorithm("reduce_scatter", "ring"), offsets, 2, 4)
        if size > 1:
            first = [lengths[(rank - 1) % size] for rank in range(size)]
            rest = [sum(lengths) - lengths[rank] - first[rank] for rank in range(size)]
            assert ring == [a * 2 + b * 4 for a, b in zip(first, rest, strict=True)]
        if is_power_of_two(size) and size > 1:
            count = 12 * size
            halving = sent(algorithm("reduce_scatter", "halving"), even_offsets(count, size), 2, 4)
            assert halving == [count // 2 * 2 + (count // 2 - count // size) * 4] * size


def messages(operation, name, size):
    return [build(operation, name, size, rank).sent_messages() for rank in range(size)]


def test_messages():
    """The latencies that the docstrings state."""
    for size in SIZES:
        depth = (size - 1).bit_length()
        assert messages("barrier", "dissemination", size) == [depth] * size
        assert messages("all_reduce", "direct", size) == [2 * (size - 1)] * size
        assert messages("all_reduce", "ring", size) == [2 * (size - 1)] * size
        if is_power_of_two(size):
            assert messages("all_reduce", "halving_doubling", size) == [2 * depth] * size


@each_algorithm
def test_scratch_is_equal_on_all_ranks(entry):
    """All ranks cut chunks into the same segments, which follow from the slots of rank 0."""
    for size, root, option in cases(entry):
        found = schedules(entry, size, root, **option)
        assert len({(schedule.raw_slots, schedule.acc_slots) for schedule in found}) == 1


def test_scratch_grows_slowly():
    """Scratch slots bound the segment: direct holds p - 1 raw parts and about log2 p accumulators."""
    for size in SIZES:
        schedule = build("all_reduce", "direct", size, size - 1)
        assert schedule.raw_slots == size - 1
        assert schedule.acc_slots <= size.bit_length()
        ring = build("all_reduce", "ring", size, size - 1)
        assert (ring.raw_slots, ring.acc_slots) == (1, 2)


def test_even_offsets():
    for count in (0, 1, 2, 5, 12, 13, 31, 1 << 40):
        for chunks in SIZES:
            offsets = even_offsets(count, chunks)
            lengths = [stop - start for start, stop in pairwise(offsets)]
            assert (offsets[0], offsets[-1], len(lengths)) == (0, count, chunks)
            assert set(lengths) <= {count // chunks, count // chunks + 1}


@each_algorithm
def test_show_has_a_line_per_step(entry):
    schedule = build(entry.operation, entry.name, 5, 3, 0)
    steps = sum(len(round_.messages) + len(round_.local) for round_ in schedule.rounds)
    text = schedule.show()
    assert len(text.splitlines()) == 1 + len(schedule.rounds) + steps
    assert text.count("send to") == schedule.sent_messages()
