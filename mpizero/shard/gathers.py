"""The gathers of parameters: begun before they are needed, in the order that was seen before.

[Note: order of gathers] Gathers are collective, so ranks must begin them in the same order. Which unit is gathered next
is remembered from the gathers that took place, which all ranks saw alike, separately for forward and backward; what is
begun ahead of need depends on nothing else. At most `ahead` units that are let go again are begun and not yet used,
also where the order has changed; one that is not used after all is let go at the end of the forward or backward. Where
full parameters always live, all that a step has made old are begun at the next forward, at once.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mpizero.shard.unit import Unit

__all__ = ["BACKWARD", "FORWARD", "Gathers"]

FORWARD, BACKWARD = "forward", "backward"


class Gathers:
    """Begin gathers ahead of need and wait for them."""

    def __init__(
        self, ahead: int, started: Callable[[Unit], None], ended: Callable[[Unit, float, float], None]
    ) -> None:
        """Know no order yet.

        Args:
            ahead: how many units to begin before they are needed.
            started: told of every unit whose gather begins.
            ended: told of every gather that is over, with its beginning and that of the caller's wait for it, in
                seconds of `time.perf_counter`.
        """
        self.ahead, self._started, self._ended = ahead, started, ended
        self._since: dict[int, float] = {}
        """When the gathers that are under way began."""
        self._next: dict[tuple[str, int | None], Unit] = {}
        """By phase and unit, None being the beginning, which unit was gathered next."""
        self._last: tuple[str, int | None] | None = None
        self._early: dict[int, Unit] = {}
        """Units that were begun and not needed so far."""

    def begin(self, units: Iterable[Unit]) -> None:
        """Begin the gathers of these units, those that are not gathered; of units that are let go, a bounded number."""
        for unit in units:
            if unit.released and len(self._early) >= self.ahead:
                return
            if unit.stale and not unit.gathering:
                self._begin(unit)
                self._early[id(unit)] = unit

    def _begin(self, unit: Unit) -> None:
        self._started(unit)
        self._since[id(unit)] = time.perf_counter()
        unit.begin_fill()

    def _end(self, unit: Unit) -> None:
        """Wait for a gather that is under way, if any."""
        if unit.gathering:
            start = time.perf_counter()
            unit.end_fill()
            self._ended(unit, self._since[id(unit)], start)

    def need(self, unit: Unit, phase: str) -> None:
        """Have a unit's full parameters there, and begin the gathers of those that will follow."""
        early = self._early.pop(id(unit), None) is not None
        if unit.stale or early:
            self._remember(unit, phase)
            if unit.stale:
                self._begin(unit)
            if unit.released:
                following = self._expected(phase, id(unit))
                self.begin(following[: self.ahead])
                for later in following[self.ahead :]:
                    later.expect_fill()
        self._end(unit)

    def expect(self, phase: str) -> None:
        """Begin what a phase is known to begin with."""
        self._last = None
        self.begin(self._expected(phase, None)[: self.ahead])

    def finish(self, *, release: bool) -> None:
        """Wait for what nobody has needed so far, and let it go again if it would not have been there otherwise."""
        for unit in self._early.values():
            self._end(unit)
            if release and unit.released and not unit.shown:
                unit.reshard()
        self._early.clear()
        self._last = None

    def _remember(self, unit: Unit, phase: str) -> None:
        before = self._last if self._last is not None and self._last[0] == phase else (phase, None)
        self._next[before] = unit
        self._last = phase, id(unit)

    def _expected(self, phase: str, after: int | None) -> list[Unit]:
        """Return the next units, one more than `ahead`, that followed the one given when it was last gathered."""
        found: list[Unit] = []
        while len(found) <= self.ahead:
            unit = self._next.get((phase, after))
            if unit is None or unit in found:
                break
            found.append(unit)
            after = id(unit)
        return found
