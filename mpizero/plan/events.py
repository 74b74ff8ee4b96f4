"""Follow the events of a step: ranks that compute and wait, collectives that queue, links that are shared.

[Note: what is followed] An actor is a group of ranks that cut parameters among each other; groups in which nobody is
slow are alike, and one stands for all of them. The ranks of an actor follow the same program, each with a clock of its
own (one number where all are alike). A collective begins when every rank has posted it, those before it on its
communicator are over, and its links are free (`fifo`), or at once on links that all who use them share in equal parts
(`shared`). Its links are those of its class at every actor that takes part: so long as it runs nobody else has them
alone, even where it spends a part of its time on latency. What a disk or host memory gives to each rank is followed
in the same way: as a collective of a group of which every rank does its own part.

An actor goes through its program until it waits for a collective that is not over; what it posts meanwhile lies in the
future of the events, never in their past. Memory and time are proportional to actors x collectives and, for clocks that
differ, to ranks x instructions, of which only the clocks are held.

[Note: driving messages] Where a rank's own core drives its messages, a computation beside a collective is longer by
what that costs, at most by the share of the collective's time that it is, until the collective is waited for: then the
core is free for it. Which of several collectives is under way is not looked at: their costs are one debt.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.plan.instructions import INWARD, OUTWARD, POST, RUN, WITHIN, Program

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from mpizero.plan.prices import Price

    Clocks = NDArray[np.float64]

__all__ = ["Actor", "Span", "Times", "follow"]

END = "end"


@dataclass(frozen=True)
class Span:
    """Hold one bar of a timeline, in seconds from the beginning of the step."""

    row: str
    """compute, or the class of links."""
    label: str
    start: float
    stop: float


@dataclass(kw_only=True, eq=False)
class Times:
    """Hold what an actor's ranks did, in seconds, an entry per rank (one where they are alike)."""

    clocks: Clocks
    """When each is done."""
    computed: Clocks
    exposed: Clocks
    """In which it waited for a collective that all had come to, in a queue or under way, a disk or host memory."""
    idle: Clocks
    """In which it waited for other ranks."""
    spans: list[Span] = field(default_factory=list)
    """Of the first rank, where they are asked for."""


class Actor:
    """Be the ranks of one group; see [Note: what is followed]."""

    def __init__(self, program: Program, factors: Clocks, draw: Callable[[], Clocks] | None, *, traced: bool) -> None:
        """Begin at time 0.

        Args:
            program: the ranks' instructions.
            factors: how many times as long each rank computes; of shape (ranks,), or (1,) where all are alike.
            draw: gives further factors of that shape for one computation; None for none.
            traced: whether to keep the spans of the first rank.
        """
        self.program, self.factors, self.draw, self.traced = program, factors, draw, traced
        self.position = 0
        self.awaits = -1
        """The number of the collective that it waits for, -1 for none."""
        self.debts: dict[int, float] = {}
        """By number of a collective that is not waited for, the seconds of the core that it may still take."""
        self.started: dict[int, _Run] = {}
        """By number, the collectives that are posted and not waited for."""
        zero = np.zeros_like(factors)
        self.times = Times(clocks=zero.copy(), computed=zero.copy(), exposed=zero.copy(), idle=zero.copy())

    def run(self, seconds: float, label: str) -> None:
        """Compute."""
        took = (seconds + self._pay(seconds)) * self.factors
        if self.draw is not None:
            took = took * self.draw()
        start = float(self.times.clocks[0])
        self.times.clocks += took
        self.times.computed += took
        if self.traced and took[0]:
            self.times.spans.append(Span("compute", label, start, float(self.times.clocks[0])))

    def _pay(self, seconds: float) -> float:
        """Return what driving messages adds to a computation; see [Note: driving messages]."""
        left = paid = 0.0
        if self.debts:
            share = max(self.program.drive * price.sent / price.seconds for price in self._prices())
            left = paid = min(sum(self.debts.values()), seconds * share)
        for number in list(self.debts):
            part = min(left, self.debts[number])
            left -= part
            self.debts[number] -= part
            if not self.debts[number]:
                del self.debts[number]
        return paid

    def _prices(self) -> list[Price]:
        return [self.program.jobs[number].price for number in self.debts]

    def owe(self, number: int) -> None:
        """Begin a collective, and the one that follows it."""
        while number >= 0 and self.program.drive:
            job = self.program.jobs[number]
            if job.price.seconds and job.price.sent and job.scope not in {INWARD, OUTWARD}:
                self.debts[number] = self.program.drive * job.price.sent
            number = job.then

    def await_end(self, run: _Run) -> None:
        """Wait until a collective is over: first for ranks that are not there yet, then for the collective."""
        self.debts.pop(run.number, None)
        clocks = self.times.clocks
        waited = np.maximum(run.end - clocks, 0.0)
        idle = np.clip(run.ready - clocks, 0.0, waited)
        self.times.idle += idle
        self.times.exposed += waited - idle
        np.maximum(clocks, run.end, out=clocks)


class _Run:
    """Be one collective under way or to come, over one actor or all."""

    __slots__ = (
        "actors",
        "end",
        "keys",
        "left",
        "links",
        "missing",
        "number",
        "ready",
        "since",
        "speed",
        "start",
        "turn",
    )

    def __init__(self, number: int, actors: list[int], link: str, scope: str, seconds: float) -> None:
        self.number, self.actors, self.left = number, actors, seconds
        self.missing = len(actors)
        self.links = [(link, actor) for actor in actors]
        self.keys = [(scope, actor) for actor in actors]
        """The queues in which it has to be the first."""
        self.ready = self.start = self.end = -1.0
        self.since = self.speed = 0.0
        self.turn = 0
        """How often its speed was set: ends that were reckoned before are void."""


class _Course:
    """Advance actors, queues and links by events in the order of time."""

    def __init__(self, program: Program, actors: Sequence[Actor], *, shared: bool) -> None:
        self.program, self.actors, self.shared = program, actors, shared
        self.heap: list[tuple[float, int, str, Any]] = []
        self.numbers = count()
        self.queues: dict[tuple[str, int], deque[_Run]] = {}
        self.busy: dict[tuple[str, int], list[_Run]] = {}
        """By link, the collectives that are under way on it."""
        self.queued: dict[tuple[str, int], deque[_Run]] = {}
        """By link, those that could begin if it were free, where links are not shared."""
        self.joint: dict[int, _Run] = {}
        """By number, collectives of all actors that some have come to."""

    def follow(self) -> None:
        """Run to the end."""
        for index in range(len(self.actors)):
            self._advance(index)
        while self.heap:
            now, _, what, item = heapq.heappop(self.heap)
            if what == POST:
                self._arrive(now, *item)
            elif item[1] == item[0].turn:
                self._finish(now, item[0])

    def _later(self, when: float, what: str, item: Any) -> None:
        heapq.heappush(self.heap, (when, next(self.numbers), what, item))

    def _advance(self, index: int) -> None:
        """Follow an actor's instructions until it has to wait."""
        actor, instructions = self.actors[index], self.program.instructions
        while actor.position < len(instructions):
            kind, seconds, job, label = instructions[actor.position]
            if kind == RUN:
                actor.run(seconds, label)
            elif kind == POST:
                self._later(float(actor.times.clocks.max()), POST, (index, job))
                actor.owe(job)
            else:
                run = actor.started.get(job)
                if run is None or run.end < 0:
                    actor.awaits = job
                    return
                actor.await_end(run)
                del actor.started[job]
            actor.position += 1

    def _arrive(self, now: float, index: int, number: int) -> None:
        """Have an actor come to a collective."""
        _, scope, price, _ = self.program.jobs[number]
        if scope in WITHIN:
            run = _Run(number, [index], price.link, scope, price.seconds)
        else:
            run = self.joint.get(number) or _Run(
                number, list(range(len(self.actors))), price.link, scope, price.seconds
            )
            self.joint[number] = run
        self.actors[index].started[number] = run
        self.queues.setdefault((scope, index), deque()).append(run)
        run.missing -= 1
        if not run.missing:
            run.ready = now
            self.joint.pop(number, None)
            self._try(now, run)

    def _try(self, now: float, run: _Run) -> None:
        """Begin a collective if it is the first of its queues, and its links are free or shared."""
        if run.missing or run.start >= 0 or any(self.queues[key][0] is not run for key in run.keys):
            return
        if not self.shared:
            lines = [self.queued.setdefault(link, deque()) for link in run.links]
            for line in lines:
                if run not in line:
                    line.append(run)
            if any(self.busy.get(link) for link in run.links) or any(line[0] is not run for line in lines):
                return
            for line in lines:
                line.popleft()
        run.start = run.since = now
        for link in run.links:
            self.busy.setdefault(link, []).append(run)
        self._set_speeds(now, run.links)

    def _set_speeds(self, now: float, links: list[tuple[str, int]]) -> None:
        """Reckon anew how fast the collectives on these links go, and when they will be over."""
        touched = {id(run): run for link in links for run in self.busy.get(link, ())}
        for run in touched.values():
            run.left = max(0.0, run.left - (now - run.since) * run.speed)
            run.speed = 1 / max(len(self.busy[link]) for link in run.links)
            run.since = now
            run.turn += 1
            self._later(now + run.left / run.speed, END, (run, run.turn))

    def _finish(self, now: float, run: _Run) -> None:
        """End a collective: begin what its links and queues were in the way of, and wake who waits for it."""
        run.end = now
        for link in run.links:
            self.busy[link].remove(run)
        self._set_speeds(now, run.links)
        self._tell(now, run)
        for key in run.keys:
            self.queues[key].popleft()
        for key in run.keys:
            if self.queues[key]:
                self._try(now, self.queues[key][0])
        for link in run.links:
            if self.queued.get(link):
                self._try(now, self.queued[link][0])
        for index in run.actors:
            if self.actors[index].awaits == run.number:
                self.actors[index].awaits = -1
                self._advance(index)

    def _tell(self, now: float, run: _Run) -> None:
        """Note a collective that is over in its actors' timelines, and have them come to the one that follows it."""
        job = self.program.jobs[run.number]
        for index in run.actors:
            actor = self.actors[index]
            if actor.traced and run.end > run.start:
                actor.times.spans.append(Span(job.price.link, job.label, run.start, now))
            if job.then >= 0:
                if self.program.jobs[job.then].scope != OUTWARD:
                    del actor.started[run.number]  # it is the second that the program waits for
                self._later(now, POST, (index, job.then))


def follow(program: Program, actors: Sequence[Actor], *, shared: bool = False) -> None:
    """Run a program on all actors together; their `times` say afterwards what each rank did.

    Args:
        program: what every rank does.
        actors: groups of ranks; collectives beyond a group are of all of them.
        shared: whether collectives of several communicators share a link, or have it one after the other.
    """
    _Course(program, actors, shared=shared).follow()
