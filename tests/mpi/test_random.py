"""Collectives drawn at random, over operations, algorithms, dtypes, sizes, layouts and communicators, against numpy.

Rank 0 draws and tells the others, so that all ranks make the same calls, also while hypothesis looks for a smaller
example of a failure; what a rank finds wrong, all ranks hear.
"""

import contextlib
import random
import traceback

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mpizero.bench.mixed import Mix
from mpizero.testing.families import Family, cut
from mpizero.testing.recipes import Recipe, draw, libraries
from mpizero.testing.servings import Serving

pytestmark = pytest.mark.mpi

FEW, MANY = 24, 400
"""Examples; with many ranks there are fewer, since each takes longer."""


class Band:
    """Be the ranks that make the calls which rank 0 draws."""

    def __init__(self, world):
        self.world = world
        self.families = []
        self.form()

    def form(self):
        """Take the world, a cut of it in halves, and a cut of those with the ranks in reverse."""
        rng = random.Random(36)
        self.families = [Family(comm=self.world, depth=0)]
        for _ in range(2):
            self.families.append(cut(self.families[-1], rng))

    def close(self):
        for family in reversed(self.families[1:]):
            family.comm.close()

    def lead(self, example):
        """Make an example's calls on all ranks; called by rank 0."""
        self.world.mpi.bcast(example)
        self.take_part(example)

    def follow(self):
        """Make rank 0's calls until there are no more."""
        while (example := self.world.mpi.bcast(None)) is not None:
            with contextlib.suppress(AssertionError):  # rank 0 raises it too, and looks for a smaller example
                self.take_part(example)

    def take_part(self, example):
        """Make the calls: some in flight together, waited for in the order drawn."""
        try:
            found = self.wrong(*example)
        except Exception:  # noqa: BLE001  (shown by rank 0)
            found = [traceback.format_exc()]
        everyone = self.world.mpi.allgather(found)
        if any(everyone):
            self.form()  # those of before may be broken
            raise AssertionError("\n".join(f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text))

    def wrong(self, calls, order):
        servings = []
        for recipe, family, async_op in calls:
            serving = Serving(recipe=recipe, comm=self.families[family].comm)
            serving.start(async_op=async_op)
            servings.append(serving)
        counts = [(servings[at], servings[at].finish()) for at in order if at < len(servings)]
        return [f"{count} wrong values: {one.recipe}, by {one.algorithm}" for one, count in counts if count]


@pytest.fixture
def band(world):
    made = Band(world)
    yield made
    made.close()


@st.composite
def examples(composed):
    pick = lambda options: composed(st.sampled_from(options))  # noqa: E731
    kinds = libraries()
    numbers = range(pick((1, 1, 1, 2, 3)))
    # Symmetric memory is asked for from all ranks together, and so not while anything is under way.
    calls = [(draw(pick, kinds=kinds), pick(range(3)), pick((False, True))) for _ in numbers]
    if any(recipe.symmetric for recipe, _, _ in calls):
        calls = [(recipe, family, False) for recipe, family, _ in calls]
    return calls, composed(st.permutations(range(3)))


@pytest.mark.timeout_s(250)
def test_calls_drawn_at_random(band, pytestconfig):
    """Every value, guards between strided elements and inputs that must stay: equal to numpy's."""
    if band.world.rank:
        band.follow()
        return

    few = FEW if band.world.size <= 4 else FEW // 2

    @settings(
        max_examples=MANY if pytestconfig.getoption("--all") else few,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(examples())
    def lead(example):
        band.lead(example)

    try:
        lead()
    finally:
        band.world.mpi.bcast(None)


def test_mixed_collectives(world):
    """The soak's mix, in short: cuts that come and go, several calls in flight, waited for in any order."""
    mix = Mix(world, seed=5, kinds=("numpy",))
    for _ in range(20):
        mix.turn()
    assert mix.at_rest(lambda: len(mix.families)) == 1
    mix.close()
    assert not any(world.mpi.allgather(mix.examples))
    assert mix.wrong == 0
    assert len(set(world.mpi.allgather((mix.calls, mix.cuts)))) == 1


def test_what_is_wrong_is_counted(world):
    """A wrong value, a changed input, and a store beside a strided array."""
    recipe = Recipe(
        operation="all_reduce", algorithm="auto", dtype="float32", count=6, layout="strided", target="given"
    )
    serving = Serving(recipe=recipe, comm=world)
    serving.start()
    assert serving.finish() == 0
    serving.start()
    serving.words["out"][1] += 1
    serving.x[2] = 9
    serving.x.base[0] = 5
    assert serving.finish() == 3
