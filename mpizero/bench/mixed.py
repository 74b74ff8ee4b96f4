"""An endless mix of collectives, drawn at random: communicators come and go, and several calls are in flight on each.

All ranks draw from one generator and so make the same calls. Each has a second one of its own for what may differ: in
which order it issues calls on different communicators, and for which of them it waits first.

[Note: quiet communicators] To cut a communicator, and to make symmetric memory on it, MPI needs all its ranks at once
and in the same order as its other collectives, of which one in the background may be the next: so what is under way is
waited for first.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from mpizero.testing.families import Family, cut
from mpizero.testing.recipes import Recipe, draw
from mpizero.testing.servings import Serving

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Mix"]

FAMILIES = 5
"""Cuts that are kept, the uncut world among them."""
DEPTH = 8
"""Calls in flight on a communicator, at most."""
RENEWED = 0.01
"""How often, per turn, a cut is closed and another one made."""
TOGETHER = 0.5
"""How often several asynchronous calls are issued on several communicators, rather than one call."""


class Mix:
    """Make calls on the ranks of a communicator, and count what was wrong."""

    def __init__(self, comm: Any, seed: int, *, kinds: Sequence[str] = ("numpy",)) -> None:
        """Begin with two cuts. Collective.

        Args:
            comm: the communicator to cut; it is only used for the first one.
            seed: of all that is drawn; the same on all ranks.
            kinds: libraries whose arrays are used.
        """
        self.shared, self.own = random.Random(seed), random.Random(f"{seed} {comm.rank}")  # noqa: S311  (no secrets)
        self.kinds = kinds
        self.families = [Family(comm=comm.split(0), depth=0)]
        self.calls = 0
        """Collectives that this rank has made."""
        self.cuts = 0
        self.wrong = 0
        """Values that were wrong on this rank."""
        self.examples: list[str] = []
        """The first calls whose values were wrong."""
        self.before: Callable[[], None] | None = None
        """Is called before each collective."""
        self._refill()

    def turn(self) -> None:
        """Make one call, several together, or a new cut."""
        drawn = self.shared.random()
        if drawn < RENEWED:
            if len(self.families) == FAMILIES:
                self._drop(self.shared.randrange(1, FAMILIES))
            self._cut()
        elif drawn < TOGETHER:
            self._several()
        else:
            self._one()

    def at_rest(self, look: Callable[[], int]) -> int:
        """Return what `look` gives when nothing is under way and every cut is closed. Collective."""
        while len(self.families) > 1:
            self._drop(1)
        self._wait(self.families[0], 0)
        found = look()
        self._refill()
        return found

    def close(self) -> None:
        """Finish what is under way and close the communicators. Collective."""
        while self.families:
            self._drop(len(self.families) - 1)

    def _refill(self) -> None:
        for _ in range(2):
            self._cut()

    def _one(self) -> None:
        family = self.shared.choice(self.families)
        recipe, async_op = self._draw(), self.shared.random() < 0.5
        if recipe.symmetric:
            self._wait(family, 0)  # see [Note: quiet communicators]
        self._start(family, recipe, async_op=async_op)
        self._wait(family, self.own.randint(0, DEPTH) if async_op else len(family.under_way) - 1)

    def _several(self) -> None:
        """Issue calls on several communicators: in order on each, but each rank as it likes between them."""
        calls = [(self.shared.choice(self.families), self._draw()) for _ in range(self.shared.randint(2, 6))]
        calls = [(family, recipe) for family, recipe in calls if not recipe.symmetric]
        families = [family for family, _ in calls]
        self.own.shuffle(families)
        for family in families:
            at = next(at for at, (other, _) in enumerate(calls) if other is family)
            self._start(*calls.pop(at), async_op=True)
        # Not before all are issued: a peer may have begun with another one, and wait for that.
        for family in families:
            self._wait(family, self.own.randint(0, DEPTH))

    def _draw(self) -> Recipe:
        return draw(self.shared.choice, kinds=self.kinds)

    def _start(self, family: Family, recipe: Recipe, *, async_op: bool) -> None:
        if self.before is not None:
            self.before()
        serving = Serving(recipe=recipe, comm=family.comm, asking=not async_op)
        serving.start(async_op=async_op)
        self.calls += 1
        family.under_way.append(serving)

    def _wait(self, family: Family, most: int) -> None:
        """Wait, in any order, until at most so many calls are in flight."""
        while len(family.under_way) > most:
            at = self.own.randrange(len(family.under_way))
            serving = family.under_way.pop(at)
            wrong = serving.finish()
            self.wrong += wrong
            if wrong and len(self.examples) < 5:
                text = f"{wrong} wrong values: {serving.recipe} by {serving.algorithm}, {family.comm}"
                self.examples.append(text)

    def _cut(self) -> None:
        parent = self.shared.choice([family for family in self.families if family.depth < 3])
        self._wait(parent, 0)
        self.families.append(cut(parent, self.shared))
        self.cuts += 1

    def _drop(self, at: int) -> None:
        family = self.families.pop(at)
        self._wait(family, 0)
        family.comm.close()
