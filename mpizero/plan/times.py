"""Messages, bytes and seconds of a step, from the speeds of links and of arithmetic.

[Note: time of a step] A collective takes the least time that its bytes allow (`collectives.cost.lower_bound`): what a
rank has to move over its link, or a node over its ports. Collectives of one rank follow each other on one channel in
the order in which `shard` begins them, while the rank computes; it waits where `shard` would. So the time is a floor:
algorithms that send more, ranks that are late and links that others use come on top. `mpizero simulate` costs each
algorithm.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpizero.collectives.cost import lower_bound
from mpizero.collectives.links import Cluster, place
from mpizero.errors import ArgumentError, must_be
from mpizero.plan.prices import group_of, replicas_of

if TYPE_CHECKING:
    from mpizero.collectives.links import Link
    from mpizero.plan.ledger import Move
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
    """Hold the seconds of a step, without the optimizer's own; see [Note: time of a step]."""

    communication: float
    """What the collectives take by themselves."""
    least_exposed: float
    """Of it, what no amount of computation in every unit hides: the first gathers and the last reductions."""
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


def times_of(step: Step, network: Network, compute: tuple[float, ...] = ()) -> Times:
    """Return how long a step takes and how much of its communication computation hides.

    Args:
        step: what is done.
        network: what a collective takes.
        compute: seconds of each unit's forward, as `compute_seconds` gives them; () where they are not known.
    """
    communication = sum(network.seconds(move) for move in step.moves)
    endless = max(communication, 1e-9)
    units = 1 + max(act.unit for act in step.acts)
    least = _exposed(step, network, (endless,) * units)
    if not compute:
        return Times(communication=communication, least_exposed=least)
    total = sum(compute) * (1 + BACKWARD) * step.setup.micro_batches
    exposed = _exposed(step, network, compute)
    return Times(communication=communication, least_exposed=least, compute=total, exposed=exposed)


def _exposed(step: Step, network: Network, compute: tuple[float, ...]) -> float:
    """Return the seconds for which the rank waits; see [Note: time of a step]."""
    now = free = waited = 0.0
    gathers: dict[int, float] = {}
    reductions: deque[float] = deque()
    for act in step.acts:
        if act.kind in {"gather", "reduce"}:
            free = max(now, free) + sum(network.seconds(move) for move in act.moves)
            if act.kind == "gather":
                gathers[act.unit] = free
            else:
                reductions.append(free)
        elif act.kind in {"gathered", "reduced"}:
            until = gathers.get(act.unit, 0.0) if act.kind == "gathered" else reductions.popleft()
            waited += max(0.0, until - now)
            now = max(now, until)
        else:
            now += compute[act.unit] * (BACKWARD if act.kind == "backward" else 1)
    return waited
