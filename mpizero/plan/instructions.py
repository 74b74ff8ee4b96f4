"""What a simulated step is made of: computations, and collectives, reads and writes that are begun and waited for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from mpizero.plan.moved import DISK, HOST

if TYPE_CHECKING:
    from mpizero.plan.prices import Price

__all__ = [
    "CARRIERS",
    "GROUP",
    "INWARD",
    "OUTWARD",
    "POST",
    "REPLICAS",
    "RUN",
    "WAIT",
    "WITHIN",
    "WORLD",
    "Instruction",
    "Job",
    "Program",
]

RUN, POST, WAIT = "run", "post", "wait"
WORLD, GROUP, REPLICAS = "world", "group", "replicas"
"""Communicators; each runs its collectives in the order in which they were begun."""
INWARD, OUTWARD = "in", "out"
"""The same for what each rank's disk, or link to host memory, carries."""
WITHIN = (GROUP, INWARD, OUTWARD)
"""What concerns the ranks of one group alone."""
CARRIERS = {
    (DISK, INWARD): "disk read",
    (DISK, OUTWARD): "disk write",
    (HOST, INWARD): "from host",
    (HOST, OUTWARD): "to host",
}
"""Classes of links, by place and direction."""


class Job(NamedTuple):
    """Describe one collective of the program."""

    label: str
    """gather, reduce, meet, read, load, store or stream, and the unit's name."""
    scope: str
    """The communicator on which it runs."""
    price: Price
    then: int = -1
    """The number of the job that begins when this one is over; -1 for none."""


class Instruction(NamedTuple):
    """Name one thing that a rank does."""

    kind: str
    """RUN, POST or WAIT."""
    seconds: float
    """Of a RUN on a rank that is neither slow nor fast."""
    job: int
    """The number of the job, to POST or WAIT for."""
    label: str = ""
    """Of a RUN: the phase and the unit's name."""


@dataclass(kw_only=True)
class Program:
    """Hold the instructions of every rank, and the collectives that they speak of."""

    group: int
    """Ranks over which a parameter is cut."""
    stage: int
    """0 where nothing is cut because groups are of one rank."""
    drive: float = 0.0
    """Seconds of a rank's core per byte that it sends; see `Speeds`."""
    instructions: list[Instruction] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)

    def run(self, seconds: float, label: str) -> None:
        """Compute for so long."""
        self.instructions.append(Instruction(RUN, seconds, -1, label))

    def post(self, *jobs: Job) -> int:
        """Begin a collective, and others each behind the one before it; return the number of the last."""
        first = len(self.jobs)
        last = first + len(jobs) - 1
        self.jobs += [job._replace(then=first + place + 1) for place, job in enumerate(jobs[:-1])]
        self.jobs.append(jobs[-1])
        self.instructions.append(Instruction(POST, 0.0, first))
        return last

    def wait(self, job: int) -> None:
        """Wait for a collective."""
        self.instructions.append(Instruction(WAIT, 0.0, job))
