"""Messages, bytes and seconds of a step, from the speeds of links and of arithmetic.

[Note: time of a step] A collective takes the least time that its bytes allow (`collectives.cost.lower_bound`): what a
rank has to move over its link, or a node over its ports. Collectives of one rank follow each other on one channel in
the order in which `shard` begins them, while the rank computes; it waits where `shard` would. So the time is a floor:
algorithms that send more, ranks that are late and links that others use come on top. `mpizero simulate` costs each
algorithm.

What was moved to a disk is read by the rank itself, which waits for it where it begins the gather, and by the kernel
one unit earlier, as `expect` says. A copy from host memory runs beside computation, and the gather behind it; gradients
go to host memory behind their reduction. The optimizer's step follows backward: a disk has to carry all state then, and
host memory to give back what was updated.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpizero.collectives.cost import lower_bound
from mpizero.collectives.links import Cluster, place
from mpizero.errors import ArgumentError, must_be
from mpizero.plan.moved import DISK
from mpizero.plan.prices import group_of, replicas_of

if TYPE_CHECKING:
    from mpizero.collectives.links import Link
    from mpizero.plan.ledger import Act, Move
    from mpizero.plan.model import ModelShape
    from mpizero.plan.setup import Setup
    from mpizero.plan.step import Step

__all__ = ["Network", "Times", "Traffic", "compute_seconds", "times_of", "traffic_of"]

BACKWARD = 2
"""Backward's operations over forward's."""
PASSES = {"all_reduce": 2}
"""Times that an operation moves (n-1)/n of its bytes; 1 for those not named."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Hold what one rank sends in a step."""

    nbytes: float
    """By the operations' least: (n-1)/n of the buffer for a gather or reduce-scatter among n ranks, twice that for an
    all-reduce. Ranks of one host load as many from each other."""
    collectives: int
    messages: int
    """By direct exchange: one to each other rank, two for an all-reduce. On one host a collective is a meeting, and has
    none."""
    gathered: float
    """Of `nbytes`, those of gathers."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Hold the seconds of a step, without the optimizer's own arithmetic; see [Note: time of a step]."""

    communication: float
    """What the collectives take by themselves."""
    least_exposed: float
    """What no amount of computation in every unit hides: the first gathers, the last reductions, and `streaming`."""
    carrying: float = 0.0
    """What all bytes from and to a disk, or host memory, take by themselves, both ways at once."""
    streaming: float = 0.0
    """Of it, what follows backward: state that passes from the disk and back, or shards that come from the host."""
    compute: float | None = None
    """None where no speed was given."""
    exposed: float | None = None
    """What the step takes longer than its computation."""


class Network:
    """Know how long a collective takes."""

    def __init__(self, setup: Setup, local: Link, remote: Link, *, wires: int) -> None:
        """Describe the machine.

        Args:
            setup: ranks, ranks per node and groups.
            local: between ranks of a node.
            remote: between nodes: what one rank alone gets, and one port gives.
            wires: network ports of a node.
        """
        nodes = place(setup.ranks, setup.per_node)
        whole = Cluster(size=setup.ranks, nodes=nodes, local=local, remote=remote, wires=wires)
        self._clusters = {False: group_of(whole, setup.shards), True: replicas_of(whole, setup.shards)}
        """By whether a collective sums over replicas."""
        self._known: dict[Move, float] = {}

    def seconds(self, move: Move) -> float:
        """Return the least time of a collective."""
        if move not in self._known:
            self._known[move] = lower_bound(move.operation, self._clusters[move.across], move.nbytes)
        return self._known[move]


def traffic_of(step: Step) -> Traffic:
    """Return the bytes, collectives and messages of a step; agreements of some 20 bytes per rank are left out."""
    moves = [move for move in step.moves if move.ranks > 1]
    sent = [_passes(move) * move.nbytes * (move.ranks - 1) / move.ranks for move in moves]
    return Traffic(
        nbytes=sum(sent),
        collectives=len(moves),
        messages=sum(_passes(move) * (move.ranks - 1) for move in moves),
        gathered=sum(nbytes for move, nbytes in zip(moves, sent, strict=True) if move.operation == "all_gather"),
    )


def _passes(move: Move) -> int:
    return PASSES.get(move.operation, 1)


def compute_seconds(model: ModelShape, tokens: int, flops: float) -> tuple[float, ...]:
    """Return each unit's seconds of one forward.

    Args:
        model: the units, with their operations per token.
        tokens: of one micro-batch of one rank.
        flops: operations per second that a rank reaches, not those that its maker prints.

    Raises:
        ArgumentError: for tokens below 1, and a speed that is not above 0.
    """
    if tokens < 1:
        raise ArgumentError(must_be("tokens", "1 or more", tokens))
    if not flops > 0:
        raise ArgumentError(must_be("flops", "above 0", flops))
    return tuple(unit.flops * tokens / flops for unit in model.units)


def times_of(step: Step, network: Network, compute: tuple[float, ...] = (), *, per_byte: float = 0.0) -> Times:
    """Return how long a step takes and how much of its communication computation hides.

    Args:
        step: what is done.
        network: what a collective takes.
        compute: seconds of each unit's forward, as `compute_seconds` gives them; () where they are not known.
        per_byte: seconds per byte, each way, that a rank's disk or its link to host memory takes; see `Carriers`.
    """
    communication = sum(network.seconds(move) for move in step.moves)
    carried = step.carried
    on_disk = step.setup.offload is not None and step.setup.offload.place == DISK
    streaming = per_byte * (max(carried.read, carried.written) if on_disk else carried.read)
    endless = max(communication + per_byte * (carried.gathered + carried.written), 1e-9)
    units = 1 + max(act.unit for act in step.acts)
    known = {
        "communication": communication,
        "least_exposed": _exposed(step, network, (endless,) * units, per_byte) + streaming,
        "carrying": per_byte * max(carried.gathered + carried.read, carried.written),
        "streaming": streaming,
    }
    if not compute:
        return Times(**known)
    total = sum(compute) * (1 + BACKWARD) * step.setup.micro_batches
    exposed = _exposed(step, network, compute, per_byte) + streaming
    return Times(**known, compute=total, exposed=exposed)


class _Clock:
    """Go through a step's acts and wait where the rank would; see [Note: time of a step]."""

    def __init__(self, step: Step, network: Network, per_byte: float) -> None:
        self.network, self.per_byte = network, per_byte
        self.blocks = step.setup.offload is not None and step.setup.offload.place == DISK
        """Whether a gather begins when its bytes are there: a rank reads a disk itself, and copies by an engine."""
        self.now = self.waited = 0.0
        self.free = self.inward = self.outward = 0.0
        """When the network, and what carries bytes from and to the disk or host memory, is free."""
        self.expected: dict[int, float] = {}
        self.gathers: dict[int, float] = {}
        self.reductions: deque[float] = deque()

    def wait(self, until: float) -> None:
        self.waited += max(0.0, until - self.now)
        self.now = max(self.now, until)

    def expect(self, act: Act) -> float:
        """Begin to bring what a gather needs, unless that is done, and return when it is there."""
        if act.unit not in self.expected:
            self.inward = max(self.now, self.inward) + self.per_byte * act.carried
            self.expected[act.unit] = self.inward
        return self.expected[act.unit]

    def begin(self, act: Act) -> None:
        """Begin a collective, behind what it needs, and ahead of what follows it."""
        ready = self.now
        if act.kind == "gather" and act.carried:
            ready = self.expect(act)
            del self.expected[act.unit]
            if self.blocks:
                self.wait(ready)
        seconds = sum(self.network.seconds(move) for move in act.moves)
        start = max(self.now, self.free)
        self.free = start + seconds  # what is begun later does not stand behind a copy
        if act.kind == "gather":
            self.gathers[act.unit] = max(ready, start) + seconds
        else:
            self.reductions.append(self.free)
            self.outward = max(self.outward, self.free) + self.per_byte * act.carried


def _exposed(step: Step, network: Network, compute: tuple[float, ...], per_byte: float) -> float:
    """Return the seconds for which the rank waits; see [Note: time of a step]."""
    clock = _Clock(step, network, per_byte)
    for act in step.acts:
        if act.kind == "expect":
            clock.expect(act)
        elif act.kind in {"gather", "reduce"}:
            clock.begin(act)
        elif act.kind == "gathered":
            clock.wait(clock.gathers.get(act.unit, 0.0))
        elif act.kind == "reduced":
            clock.wait(clock.reductions.popleft())
        else:
            clock.now += compute[act.unit] * (BACKWARD if act.kind == "backward" else 1)
    clock.wait(clock.outward)
    return clock.waited
