"""Which file holds what: by arithmetic, the same whoever asks, and quick however many ranks there are."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpizero.checkpoint.spaces import Space, Stored
from mpizero.plan import layout_of

shapes = st.lists(st.integers(0, 700), min_size=1, max_size=6)


@given(shapes, st.integers(1, 9), st.integers(1, 5))
def test_files_hold_every_element_once(sizes, shards, copies):
    layout = layout_of([(str(n), (size,)) for n, size in enumerate(sizes)], shards)
    spaces = (Space(length=layout.shard_length, shards=shards, copies=copies),)
    for slot in layout.slots:
        stored = Stored(key=slot.name, dtype="F32", shape=slot.shape, space=0, offset=slot.offset)
        own = [piece for file in range(shards * copies) if (piece := stored.own(spaces, file))]
        assert [n for piece in own for n in range(piece.start, piece.stop)] == list(range(slot.numel))
        assert list(stored.pieces(spaces, 0, slot.numel)) == own
        low, high = slot.numel // 3, slot.numel - slot.numel // 4
        assert list(stored.pieces(spaces, low, high)) == [one for one in own if one.start < high and one.stop > low]
        for piece in own:
            assert all(spaces[0].file_at(slot.offset + n) == piece.file for n in (piece.start, piece.stop - 1))
    for file in range(shards * copies):  # what a file holds is part of the shard of its writer
        shard = file // copies
        assert shard * layout.shard_length <= spaces[0].begin(file)
        assert spaces[0].begin(file + 1) <= (shard + 1) * layout.shard_length


@given(st.integers(1, 400), st.integers(1, 7))
def test_copies_share_evenly(grains, copies):
    space = Space(length=64 * grains, shards=3, copies=copies)
    sizes = [space.begin(file + 1) - space.begin(file) for file in range(3 * copies)]
    assert max(sizes) - min(sizes) <= 64
    assert all(space.begin(file) % 64 == 0 for file in range(3 * copies + 1))


def calls_of(function):
    count = 0

    def profile(_, event, __):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("ranks", [16, 16384])
def test_one_rank_plans_alone(ranks):
    """Of 3 x 1,000 tensors each rank works out its own ranges in as many steps, for any number of ranks."""
    layouts = [layout_of([(f"{unit}.{n}", (4096, 1024)) for n in range(20)], ranks) for unit in range(50)]
    spaces = tuple(Space(length=layout.shard_length, shards=ranks) for layout in layouts)
    tensors = [
        Stored(key=f"{kind}/{slot.name}", dtype="F32", shape=slot.shape, space=number, offset=slot.offset)
        for kind in ("model", "exp_avg", "exp_avg_sq")
        for number, layout in enumerate(layouts)
        for slot in layout.slots
    ]
    pieces = [None]

    def plan():
        pieces[:] = [piece for one in tensors if (piece := one.own(spaces, ranks // 2))]

    assert calls_of(plan) < 10 * len(tensors)
    each = 50 * 20 * 4096 * 1024 // ranks
    assert sum(piece.stop - piece.start for piece in pieces) == 3 * each
