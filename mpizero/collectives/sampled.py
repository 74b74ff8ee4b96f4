"""Time a collective from the schedules of a few ranks, for sizes at which all messages are too many to follow.

[Note: soundness of samples] A rank's own rounds follow each other, so the sum of their times, each as if the rank's
peers were ready when it is, is a time that the collective cannot beat. It is the time of the collective where the
slowest rank never waits for ranks that started a round later, as in schedules in which all ranks send in every round
(rings, exchanges, halving and doubling, lanes): there the slowest rank is slowest in every round, and its peers wait
for it. It is too short for pipelines and trees, in which ranks wait at first or at last; those have so few messages per
rank that `events` follows them all, and `cost` chooses so.

What a round costs depends on the rank through the nodes of its peers, through the bytes of the ranks that share its
node's ports, and through its schedule. Hence whole nodes are looked at: the root's, the first with the most and with
the fewest ranks, and the last. Where the schedules of all ranks are one schedule, with peers shifted by the rank (r + d
modulo p) or flipped by it (r xor d), only one is built, and every rank of these nodes is looked at. Else a few ranks of
a node are built, the first and the last and some that stand for all between, and the bytes of the node are reckoned up
from them. Shifts and flips are looked for in the schedules of all ranks at small sizes, powers of two for a
power of two and others else: builders are pure functions of integers that treat no size apart in any other way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpizero.collectives.work import ALIKE, Estimate, RoundWork, Terms, Widths, work_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from mpizero.collectives.links import Cluster
    from mpizero.collectives.schedule import Schedule

    Numbers = NDArray[np.float64]
    Indices = NDArray[np.int64]

__all__ = ["LANES", "Symmetry", "evaluate", "symmetry"]

LANES = "lanes"

MEMBERS = {"": 8, LANES: 3}
"""Ranks of a node that are built and looked at, at most."""
MOVED = 64
"""The same, where one schedule is built for all."""

Symmetry = str
"""`shift` or `flip`; LANES where the ranks of a node do the same for different parts; empty for none of these."""


class _Flows(NamedTuple):
    """Hold the messages of one rank in one direction, as arrays."""

    rounds: Indices
    peers: Indices
    nbytes: Numbers


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """Hold one rank's rounds as arrays; `rounds` long, where not said otherwise."""

    rounds: int
    flows: tuple[_Flows, _Flows]
    """Sent and received, an entry per message."""
    messages: Numbers
    copied: Numbers
    reduced: Numbers


class _Way(NamedTuple):
    """Hold how one rank uses its links in one direction, an entry per round."""

    latency: Numbers
    """Seconds, of the slowest link used."""
    serial: Numbers
    """Seconds of all bytes."""
    crossing: Numbers
    """Bytes over the node's ports."""


def symmetry(schedule: Callable[[int, int], Schedule], size: int) -> Symmetry:
    """Return how the schedules of an algorithm's ranks follow from rank 0's; see [Note: soundness of samples].

    Args:
        schedule: returns the schedule for (size, rank).
        size: number of ranks that it is asked for.
    """
    power = size & (size - 1) == 0
    for kind in ("flip", "shift") if power else ("shift",):
        if all(_alike(schedule, small, kind) for small in ((4, 8, 16) if power else (3, 6, 7, 12))):
            return kind
    return ""


def evaluate(build: Callable[[int], list[RoundWork]], cluster: Cluster, kind: Symmetry, *, root: int = 0) -> Estimate:
    """Return the time of the slowest rank among those looked at; see [Note: soundness of samples].

    Args:
        build: returns the rounds of one rank. They are let go before those of another node are built.
        cluster: where the ranks are, and what links cost.
        kind: what `symmetry` found, or LANES for an algorithm that knows the nodes.
        root: the root of a rooted operation.
    """
    model = None if kind in MEMBERS else _arrays(build(0))
    found, built = [], 0 if model is None else 1
    for members in _nodes(cluster, root):
        picked = _picked(members, MEMBERS.get(kind, MOVED), root)
        if model is None:
            ranks = {rank: _arrays(build(rank)) for rank in picked}
            built += len(ranks)
        else:
            ranks = {rank: _moved(model, rank, cluster.size, kind) for rank in picked}
        found.append(_node(ranks, picked, cluster))
    best = max(found, key=lambda estimate: sum(estimate.terms))
    return Estimate(
        terms=best.terms,
        rounds=max(estimate.rounds for estimate in found),
        sent_max=max(estimate.sent_max for estimate in found),
        wire_max=max(estimate.wire_max for estimate in found),
        schedules=built,
    )


def _alike(schedule: Callable[[int, int], Schedule], size: int, kind: Symmetry) -> bool:
    """Return whether every rank's rounds are rank 0's with moved peers."""
    seen = {
        _relative(work_of(schedule(size, rank), Widths(plain=1.0, acc=1e6)), rank, size, kind) for rank in range(size)
    }
    return len(seen) == 1


def _relative(works: list[RoundWork], rank: int, size: int, kind: Symmetry) -> tuple[object, ...]:
    """Return a rank's rounds with peers counted from the rank."""

    def offset(peer: int) -> int:
        return peer ^ rank if kind == "flip" else (peer - rank) % size

    return tuple(
        (*(tuple((offset(flow.peer), flow.nbytes) for flow in flows) for flows in work[:2]), *work[2:])
        for work in works
    )


def _nodes(cluster: Cluster, root: int) -> list[list[int]]:
    """Return the members of the nodes to look at."""
    members = cluster.members()
    by_size = sorted(members, key=lambda node: len(members[node]))
    wanted = dict.fromkeys((cluster.nodes[root], by_size[-1], by_size[0], cluster.nodes[-1]))
    return [members[node] for node in wanted]


def _picked(members: list[int], most: int, root: int) -> dict[int, float]:
    """Return the members to look at, and how many each stands for: ends and root are one, the rest share the others."""
    if len(members) <= most:
        return dict.fromkeys(members, 1.0)
    ends = {members[0], members[-1], *([root] if root in members else [])}
    between = [rank for rank in members if rank not in ends]
    count = max(1, most - len(ends))
    middle = [between[(2 * index + 1) * len(between) // (2 * count)] for index in range(count)]
    return {**dict.fromkeys(sorted(ends), 1.0), **dict.fromkeys(middle, len(between) / count)}


def _arrays(works: list[RoundWork]) -> _Rank:
    """Return a rank's rounds as arrays."""
    return _Rank(
        rounds=len(works),
        flows=(_flows([work.sends for work in works]), _flows([work.receives for work in works])),
        messages=np.array([float(len(work.sends) + len(work.receives)) for work in works]),
        copied=np.array([work.packed + work.copied for work in works]),
        reduced=np.array([work.reduced for work in works]),
    )


def _flows(by_round: list[tuple[tuple[int, float], ...]]) -> _Flows:
    counts = [len(flows) for flows in by_round]
    return _Flows(
        np.repeat(np.arange(len(by_round)), counts),
        np.array([peer for flows in by_round for peer, _ in flows], np.int64),
        np.array([nbytes for flows in by_round for _, nbytes in flows], np.float64),
    )


def _moved(model: _Rank, rank: int, size: int, kind: Symmetry) -> _Rank:
    """Return the rounds of a rank, given rank 0's."""

    def move(flows: _Flows) -> _Flows:
        return flows._replace(peers=flows.peers ^ rank if kind == "flip" else (flows.peers + rank) % size)

    return _Rank(
        rounds=model.rounds,
        flows=(move(model.flows[0]), move(model.flows[1])),
        messages=model.messages,
        copied=model.copied,
        reduced=model.reduced,
    )


def _node(ranks: dict[int, _Rank], counts: dict[int, float], cluster: Cluster) -> Estimate:
    """Return the estimate of a node's slowest rank, given how many ranks each of those looked at stands for."""
    nodes = np.array(cluster.nodes)
    seen = {rank: [_way(work, flows, rank, nodes, cluster) for flows in work.flows] for rank, work in ranks.items()}
    longest = max(work.rounds for work in ranks.values())
    ports = [np.zeros(longest), np.zeros(longest)]
    for rank, ways in seen.items():
        for port, way in zip(ports, ways, strict=True):
            port[: len(way.crossing)] += counts[rank] * way.crossing
    busy = [port * cluster.remote.beta / cluster.wires for port in ports]
    terms = [
        _terms(work, [_wire(*pair) for pair in zip(seen[rank], busy, strict=True)], cluster)
        for rank, work in ranks.items()
    ]
    return Estimate(
        terms=max(terms, key=sum),
        rounds=max(int((work.messages > 0).sum()) for work in ranks.values()),
        sent_max=max(float(work.flows[0].nbytes.sum()) for work in ranks.values()),
        wire_max=max(float(port.sum()) for port in ports),
        schedules=len(ranks),
    )


def _way(work: _Rank, flows: _Flows, rank: int, nodes: Indices, cluster: Cluster) -> _Way:
    """Return how a rank's messages of one direction use its links."""
    away = nodes[flows.peers] != nodes[rank]
    latency = np.zeros(work.rounds)
    for link, which in ((cluster.local, ~away), (cluster.remote, away)):
        used = np.bincount(flows.rounds[which], minlength=work.rounds) > 0
        latency = np.maximum(latency, used * link.alpha)
    crossing = np.where(away, flows.nbytes, 0.0)
    seconds = flows.nbytes * np.where(away, cluster.remote.beta, cluster.local.beta)
    return _Way(
        latency,
        np.bincount(flows.rounds, seconds, minlength=work.rounds).astype(np.float64),
        np.bincount(flows.rounds, crossing, minlength=work.rounds).astype(np.float64),
    )


def _wire(way: _Way, busy: Numbers) -> Numbers:
    """Return the seconds of one direction of a rank's rounds by the first four of `Terms`, shape (4, rounds).

    Args:
        way: how the rank uses its links.
        busy: seconds that the node's ports have to do in each round, of this rank at least.
    """
    busy = busy[: len(way.serial)]
    away = way.crossing > 0
    shared = away & (busy > way.serial * ALIKE)
    serial = np.where(shared, 0.0, way.serial)
    return np.stack(
        [way.latency, np.where(away, 0.0, serial), np.where(away, serial, 0.0), np.where(shared, busy, 0.0)]
    )


def _terms(work: _Rank, wires: list[Numbers], cluster: Cluster) -> Terms:
    """Return what a rank's rounds take, each as long as the slower of its directions."""
    sends, receives = wires
    slower = np.where(sends.sum(axis=0) >= receives.sum(axis=0), sends, receives).sum(axis=1)
    latency, local, remote, port = map(float, slower)
    return Terms(
        latency=latency,
        local=local,
        remote=remote,
        port=port,
        reduction=float(work.reduced.sum()) * cluster.gamma,
        copies=float(work.copied.sum()) * cluster.copy,
        posting=float(work.messages.sum()) * cluster.post,
    )
