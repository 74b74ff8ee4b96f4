"""The time of one training step, simulated: what is compute, what communication is not hidden, who waits for whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpizero.errors import ArgumentError, must_be
from mpizero.plan.events import Actor, Span, Times, follow
from mpizero.plan.memory import StateBytes, model_state_bytes
from mpizero.plan.program import Job, Program, program_of
from mpizero.plan.training import CHOICES, SERVICES, Speeds, Stragglers, Training, check_training

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mpizero.collectives.links import Cluster

__all__ = ["Step", "Traffic", "simulate_step"]

EVEN = Stragglers()


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Sum up the collectives of one kind in a step, on one rank."""

    kind: str
    """gather, reduce, replicas or meet."""
    link: str
    """The class of links."""
    algorithm: str
    """Of the longest of them."""
    count: int
    seconds: float
    """Of all one after the other, on links that nobody else uses."""
    sent: float
    """Bytes that the busiest rank sends."""
    wire: float
    """Bytes out of or into the busiest node."""


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
    """Seconds in which a rank waits for a collective that all ranks have come to."""
    idle: float
    """Seconds in which a rank waits for other ranks, and at last for the last to be done."""
    traffic: tuple[Traffic, ...]
    state: StateBytes
    """Bytes of one rank between two steps."""
    buffers: float
    """Bytes at most of gathered units and of gradients on their way, besides."""
    tokens_per_second: float
    """Of all ranks."""
    flops: float
    """Floating-point operations per second and rank of the model itself: nothing that is computed again."""
    spans: tuple[Span, ...]
    """The timeline of one rank, and of the links that its collectives take."""

    @property
    def communication(self) -> float:
        """Return the seconds of all collectives, one after the other."""
        return sum(traffic.seconds for traffic in self.traffic)


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

    tokens = training.tokens * training.backwards
    operations = 3 * sum(unit.flops for unit in training.model.units) * tokens
    return Step(
        seconds=seconds,
        compute=mean("computed"),
        slowest=max(float(one.computed.max()) for one in times),
        exposed=mean("exposed"),
        idle=mean("idle") + seconds - mean("clocks"),
        traffic=_traffic(program.jobs),
        state=_state(training, program),
        buffers=_buffers(training, program),
        tokens_per_second=tokens * cluster.size / seconds if seconds else 0.0,
        flops=operations / seconds if seconds else 0.0,
        spans=tuple(span for one in times for span in one.spans),
    )


def _traffic(jobs: list[Job]) -> tuple[Traffic, ...]:
    """Return the collectives by kind, in the order in which they come first."""
    kinds = list(dict.fromkeys(job.label.partition(" ")[0] for job in jobs))
    found = []
    for kind in kinds:
        alike = [job.price for job in jobs if job.label.partition(" ")[0] == kind]
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


def _state(training: Training, program: Program) -> StateBytes:
    return model_state_bytes(
        training.model.numel,
        program.group,
        program.stage,
        working_bytes=training.working_bytes,
        node_shared=training.node_shared,
    )


def _buffers(training: Training, program: Program) -> float:
    """Return what docs/sharding.md says that units take beside the model's state, at most."""
    if not program.stage:
        return 0.0
    *blocks, root = (unit.numel for unit in training.model.units)
    largest = max(blocks, default=0)
    held = 0.0
    if program.stage == 3 and not training.node_shared:
        count = min(1 + training.prefetch, len(blocks))
        if training.reshard_after_forward is False:
            count = len(blocks)
        held = (root + count * largest) * training.working_bytes
    return held + (root + min(3, len(blocks)) * largest) * training.wire_bytes
