"""The arithmetic of sharding: units cut into shards, and the formulas that measurements are held against."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpizero.errors import ArgumentError
from mpizero.plan import ALIGNMENT, layout_of, model_state_bytes, sent_per_step

SIZES = range(1, 10)
AWKWARD = [(), (0,), (1,), (3, 32001), (7, 15), (15,), (64,), (65,), (2, 0, 3), (1, 1, 1)]
each_size = pytest.mark.parametrize("ranks", SIZES)

shapes_of_units = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=8)


def named(shapes):
    return [(f"p{number}", shape) for number, shape in enumerate(shapes)]


def check(layout, shapes):
    """Every parameter is whole, aligned, and cut at multiples of 64 of its own elements, each element exactly once."""
    assert layout.shard_length % ALIGNMENT == 0
    assert layout.length == layout.shard_length * layout.ranks
    assert layout.numel == sum(math.prod(shape) for shape in shapes)
    owner = [None] * layout.length
    for index, (slot, shape) in enumerate(zip(layout.slots, shapes, strict=True)):
        assert slot.shape == shape
        assert slot.numel == math.prod(shape)
        assert slot.offset % ALIGNMENT == 0
        assert 0 <= slot.offset <= slot.stop <= layout.length
        stop = 0
        for rank in range(layout.ranks):
            piece = layout.piece(index, rank)
            assert 0 <= piece.start <= piece.stop <= slot.numel
            assert 0 <= piece.position <= piece.position + piece.numel <= layout.shard_length
            if not piece.numel:
                continue
            assert piece.start == stop
            assert piece.start % ALIGNMENT == 0
            stop = piece.stop
            for element in range(piece.start, piece.stop, 61):
                place = slot.offset + element
                assert place == rank * layout.shard_length + piece.position + element - piece.start
                assert owner[place] is None
                owner[place] = index
        assert stop == slot.numel
    padding = sum(stop - start for start, stop in layout.gaps())
    assert padding == layout.length - layout.numel
    assert all(owner[place] is None for start, stop in layout.gaps() for place in range(start, stop))


@each_size
def test_pieces_partition_awkward_parameters(ranks):
    """S12: shapes (), (0,), (1,) and (3, 32001)."""
    check(layout_of(named(AWKWARD), ranks), AWKWARD)


@each_size
@pytest.mark.parametrize("shape", AWKWARD)
def test_pieces_partition_one_parameter(ranks, shape):
    check(layout_of(named([shape]), ranks), [shape])


@given(shapes=shapes_of_units, ranks=st.integers(1, 9))
def test_pieces_partition_random_parameters(shapes, ranks):
    check(layout_of(named(shapes), ranks), shapes)


@given(shapes=shapes_of_units, ranks=st.integers(1, 9))
def test_the_offsets_do_not_depend_on_the_number_of_ranks(shapes, ranks):
    one, many = layout_of(named(shapes), 1), layout_of(named(shapes), ranks)
    assert one.slots == many.slots
    assert one.length <= many.length < one.length + ALIGNMENT * ranks


def test_the_example_of_the_docstring():
    layout = layout_of([("a", (7, 5)), ("b", (7,))], 2)
    assert [slot.offset for slot in layout.slots] == [0, 64]
    assert (layout.length, layout.shard_length) == (128, 64)
    assert layout.gaps() == [(35, 64), (71, 128)]


def test_a_unit_without_parameters_has_no_elements():
    assert layout_of([], 4).length == 0


def test_more_ranks_than_elements():
    layout = layout_of(named([(5,)]), 8)
    assert [layout.piece(0, rank).numel for rank in range(8)] == [5, 0, 0, 0, 0, 0, 0, 0]


def test_ranks_below_one_are_refused():
    with pytest.raises(ArgumentError, match=r"ranks must be at least 1 \(got 0\)"):
        layout_of([], 0)


N = 1000
FP32 = {0: (4000, 4000, 8000), 1: (4000, 1000, 2000), 2: (4000, 1000, 2000), 3: (1000, 1000, 2000)}
BF16 = {0: (2000, 4000, 12000), 1: (2000, 1000, 3000), 2: (2000, 1000, 3000), 3: (0, 1000, 3000)}
FP64 = {0: (8000, 8000, 16000), 3: (2000, 2000, 4000)}


@pytest.mark.parametrize(
    ("width", "stage", "expected"),
    [(width, stage, kinds) for width, table in ((4, FP32), (2, BF16), (8, FP64)) for stage, kinds in table.items()],
)
def test_state_of_a_thousand_parameters_with_adam_on_four_ranks(width, stage, expected):
    state = model_state_bytes(N, 4, stage, working_bytes=width)
    assert (state.parameters, state.gradients, state.optimizer) == expected
    assert state.total == sum(expected)


@pytest.mark.parametrize(("moments", "optimizer"), [(0, 0), (1, 1000), (2, 2000)])
def test_state_by_number_of_moments(moments, optimizer):
    assert model_state_bytes(N, 4, 3, moments=moments).optimizer == optimizer


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("width", "total"), [(4, 16), (2, 18)])
def test_on_one_rank_no_stage_saves_anything(stage, width, total):
    assert model_state_bytes(N, 1, stage, working_bytes=width).total == total * N


def test_seven_billion_parameters_on_64_ranks():
    """18 bytes each in bf16 with an fp32 gradient; stage 3 holds 16/64 of a byte of state each."""
    assert model_state_bytes(7 * 10**9, 64, 0, working_bytes=2).total == 126e9
    assert model_state_bytes(7 * 10**9, 64, 3, working_bytes=2).total == 1.75e9
    assert sent_per_step(7 * 10**9, 64, 3, working_bytes=2, gathers=0) == pytest.approx(13.78e9, rel=1e-3)


@pytest.mark.parametrize(("stage", "factor"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_bytes_sent_per_step(stage, factor):
    assert sent_per_step(N, 4, stage) == factor * 3000
    assert sent_per_step(N, 4, stage, working_bytes=2) == factor * 1500
    assert sent_per_step(N, 1, stage) == 0


@pytest.mark.parametrize(("stage", "factor"), [(0, 2), (1, 1), (2, 1), (3, 1)])
def test_a_node_that_shares_parameters_gathers_none(stage, factor):
    assert sent_per_step(N, 4, stage, node_shared=True) == factor * 3000


def test_stage_3_with_one_gather_sends_as_much_as_the_others():
    assert sent_per_step(N, 4, 3, gathers=1) == sent_per_step(N, 4, 0)


@pytest.mark.parametrize("stage", [-1, 4, True, "3", None])
def test_an_unknown_stage_is_refused_with_the_known_ones(stage):
    with pytest.raises(ArgumentError, match="stage must be one of 0, 1, 2, 3"):
        model_state_bytes(N, 4, stage)
    with pytest.raises(ArgumentError, match="stage must be one of 0, 1, 2, 3"):
        sent_per_step(N, 4, stage)
