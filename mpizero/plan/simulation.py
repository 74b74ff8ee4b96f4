"""The time of one training step, simulated: what is compute, what communication is not hidden, who waits for whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpizero.errors import ArgumentError, must_be
from mpizero.plan.events import Actor, Span, Times, follow
from mpizero.plan.instructions import CARRIERS, Job, Program
from mpizero.plan.memory import StateBytes, part_of, split_state
from mpizero.plan.program import program_of
from mpizero.plan.step import step_of
from mpizero.plan.training import CHOICES, SERVICES, Speeds, Stragglers, Training, check_training, setup_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mpizero.collectives.links import Cluster
    from mpizero.plan.prices import Price

__all__ = ["Step", "Traffic", "simulate_step"]

EVEN = Stragglers()
ADAM = 2
"""Values of optimizer state per parameter."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Sum up the collectives of one kind in a step, on one rank."""

    kind: str
    """gather, reduce, replicas or meet; from and to a disk or host memory, read, load, store or stream."""
    link: str
    """The class of links."""
    algorithm: str
    """Of the longest of them."""
    count: int
    seconds: float
    """Of all one after the other, on links that nobody else uses."""
    sent: float
    """Bytes that the busiest rank sends, or moves from or to its disk or host memory."""
    wire: float
    """Bytes out of or into the busiest node."""

    @property
    def carried(self) -> bool:
        """Return whether it is no collective, but from or to a disk or host memory."""
        return self.link in CARRIERS.values()


@dataclass(frozen=True, kw_only=True)
class Step:
    """Hold what a simulated step takes. Means over ranks, where nothing else is said."""

    seconds: float
    """Until the last rank is done."""
    compute: float
    """Seconds in which a rank computes, the optimizer included."""
    slowest: float
    """The same of the rank that computes longest."""
    exposed: float
    """Seconds in which a rank waits for a collective that all ranks have come to, for its disk or for host memory."""
    idle: float
    """Seconds in which a rank waits for other ranks, and at last for the last to be done."""
    traffic: tuple[Traffic, ...]
    state: StateBytes
    """Bytes of one rank between two steps, in the memory in which it computes."""
    outside: StateBytes
    """What is moved to a disk or to host memory."""
    buffers: float
    """Bytes at most of gathered units, of gradients that wait, travel or are kept back by `no_sync`, and of groups of
    state from a disk, besides: as `step_of` finds them."""
    tokens_per_second: float
    """Of all ranks."""
    flops: float
    """Floating-point operations per second and rank of the model itself: nothing that is computed again."""
    spans: tuple[Span, ...]
    """The timeline of one rank, and of the links that its collectives take."""

    @property
    def communication(self) -> float:
        """Return the seconds of all collectives, one after the other."""
        return sum(traffic.seconds for traffic in self.traffic if not traffic.carried)


def simulate_step(
    training: Training,
    cluster: Cluster,
    speeds: Speeds,
    *,
    stragglers: Stragglers = EVEN,
    choice: str = "auto",
    service: str = "shared",
) -> Step:
    """Simulate one training step, as it goes from the second on.

    The order is `shard`'s (see `program`), the collectives' times are those of `cost` for the algorithm that would be
    chosen (see `prices`), and events are followed as in [Note: what is followed] of `events`. 16,384 ranks with a
    trillion parameters take some seconds and some 70 MB. Left out: memory that has to be allocated,
    data loading, lost packets, and a forward's own communication such as batch statistics.

    Args:
        training: the work.
        cluster: the ranks, placed node by node; links, ports and arithmetic.
        speeds: how fast a rank works.
        stragglers: how unevenly; by default all alike.
        choice: `auto` takes the algorithms that mpizero would, `best` the cheapest that there are.
        service: `shared` lets collectives of several communicators share a class of links, `fifo` one after the other.

    Raises:
        ArgumentError: for descriptions that do not go together, an unknown choice or service.
    """
    for what, value, known in (("choice", choice, CHOICES), ("service", service, SERVICES)):
        if value not in known:
            raise ArgumentError(must_be(what, f"one of {', '.join(known)}", value))
    group = check_training(training, cluster, stragglers)
    program = program_of(training, cluster, speeds, group=group, choice=choice)
    actors, weights = _actors(program, cluster, stragglers)
    follow(program, actors, shared=service == "shared")
    return _summary(training, cluster, program, ([actor.times for actor in actors], weights))


def _actors(program: Program, cluster: Cluster, stragglers: Stragglers) -> tuple[list[Actor], list[int]]:
    """Return the actors, and for how many groups each stands."""
    group, groups = program.group, cluster.size // program.group
    if stragglers.spread:
        made = []
        for number in range(groups):
            factors = _factors(stragglers, number * group, group)
            generator = np.random.default_rng((stragglers.seed, number))

            def draw(generator: np.random.Generator = generator) -> NDArray[np.float64]:
                return np.exp(stragglers.spread * generator.standard_normal(group))

            made.append(Actor(program, factors, draw, traced=number == 0))
        return made, [1] * groups
    # Groups without slow ranks are alike, and in a group the ranks that are as slow as each other.
    slow = {rank // group for rank in stragglers.slow}
    even = groups - len(slow)
    first = [Actor(program, np.ones(1), None, traced=True)] if even else []
    others = [
        Actor(program, _factors(stragglers, number * group, group), None, traced=not even and number == min(slow))
        for number in sorted(slow)
    ]
    return [*first, *others], [even] * bool(even) + [1] * len(others)


def _factors(stragglers: Stragglers, start: int, ranks: int) -> NDArray[np.float64]:
    factors = np.ones(ranks)
    for rank, factor in stragglers.slow.items():
        if start <= rank < start + ranks:
            factors[rank - start] = factor
    return factors


def _summary(training: Training, cluster: Cluster, program: Program, ran: tuple[list[Times], list[int]]) -> Step:
    times, weights = ran
    seconds = max(float(one.clocks.max()) for one in times)
    groups = sum(weights)

    def mean(name: str) -> float:
        return sum(w * float(getattr(one, name).mean()) for one, w in zip(times, weights, strict=True)) / groups

    state, outside = _state(training, program)
    tokens = training.tokens * training.backwards
    operations = 3 * sum(unit.flops for unit in training.model.units) * tokens
    return Step(
        seconds=seconds,
        compute=mean("computed"),
        slowest=max(float(one.computed.max()) for one in times),
        exposed=mean("exposed"),
        idle=mean("idle") + seconds - mean("clocks"),
        traffic=_traffic(program.jobs),
        state=state,
        outside=outside,
        buffers=_buffers(training, cluster),
        tokens_per_second=tokens * cluster.size / seconds if seconds else 0.0,
        flops=operations / seconds if seconds else 0.0,
        spans=tuple(span for one in times for span in one.spans),
    )


def _traffic(jobs: list[Job]) -> tuple[Traffic, ...]:
    """Return the collectives by kind, and what is carried by direction too, in the order in which they come first."""
    by_kind: dict[tuple[str, str], list[Price]] = {}
    for job in jobs:
        link = job.price.link if job.price.link in CARRIERS.values() else ""
        by_kind.setdefault((job.label.partition(" ")[0], link), []).append(job.price)
    found = []
    for (kind, _), alike in by_kind.items():
        longest = max(alike, key=lambda price: price.seconds)
        found.append(
            Traffic(
                kind=kind,
                link=longest.link,
                algorithm=longest.algorithm,
                count=len(alike),
                seconds=sum(price.seconds for price in alike),
                sent=sum(price.sent for price in alike),
                wire=sum(price.wire for price in alike),
            )
        )
    return tuple(found)


def _state(training: Training, program: Program) -> tuple[StateBytes, StateBytes]:
    """Return the bytes of state in memory, by the stage's formula, and what is moved out of it."""
    moved = training.offload
    uncut = moved is not None and not program.stage
    part = part_of(
        training.model.numel,
        1 if uncut else program.group,
        training.stage if uncut else program.stage,
        working_bytes=training.working_bytes,
        node_shared=training.node_shared,
        params_moved=moved is not None and bool(moved.params),
    )
    return split_state(part, ADAM, moved)


def _buffers(training: Training, cluster: Cluster) -> float:
    """Return what a rank holds at the peak of a step beside the model's state."""
    step = step_of(training.model, setup_of(training, cluster))
    return max(phase.total - phase.state.total for phase in step.phases.values())
