"""What a collective costs on paper: the time of a schedule on a cluster that is described, not there.

A round is taken as in [Note: time of a message] of `events`: messages that are posted together overlap in latency,
share their rank's link for their bytes, and share the node's ports with those of the node's other ranks. Bytes are
reckoned in fractions, so that a buffer need not divide by the number of ranks. What is left out: the cut in segments
that bounds scratch memory (each is a run of the schedule on its own, with its own latencies), interference of ranks in
one node's memory, and switches that carry less than all ports at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mpizero.collectives import events, sampled, scaled
from mpizero.collectives.registry import OPERATIONS, algorithm
from mpizero.collectives.work import Estimate, RoundWork, Terms, Widths, work_of
from mpizero.errors import ArgumentError, must_be

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpizero.collectives.links import Cluster
    from mpizero.collectives.registry import Algorithm
    from mpizero.collectives.schedule import Schedule

__all__ = ["METHODS", "Cost", "cost", "lower_bound"]

METHODS = ("events", "sampled")

FOLLOWED = 150_000
"""Ends of messages up to which all ranks are followed; a second or two of Python."""
LARGE = 4
"""Times as many, at which no other rank is asked."""
SHORT = 8192
"""Ranks times pieces up to which a pipeline is followed whole."""
LEAST = 128
"""Ranks from which the time of many is reckoned up, at least."""
FEW, MORE = 2, 4
"""Pieces from which the time of many is."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Hold what a collective costs."""

    seconds: float
    rounds: int
    """Messages that follow each other in the longest chain."""
    bytes_sent_max: float
    """By the busiest rank."""
    wire_bytes_max: float
    """Out of or into the busiest node, whichever are more."""
    terms: Terms
    """The seconds by what they are spent on."""
    method: str
    """`events`, `sampled` or `scaled`; see `cost`."""
    schedules: int
    """Schedules that were built to find out."""

    @property
    def bound_by(self) -> str:
        """Return the name of the term that takes most of the time."""
        return max(Terms._fields, key=lambda name: float(getattr(self.terms, name)))


@dataclass(frozen=True, kw_only=True)
class _Case:
    """Hold what is to be costed."""

    entry: Algorithm
    cluster: Cluster
    nbytes: float
    root: int
    pieces: int
    ratio: float
    """Bytes of an accumulated element over those of a plain one."""

    def schedule(self, size: int, rank: int) -> Schedule:
        """Return a schedule, at the cluster's size or another."""
        nodes = self.cluster.nodes if self.entry.takes == "nodes" else ()
        return self.entry.schedule(size, rank, self.root, nodes=nodes, pieces=self.pieces)

    def works(self, rank: int) -> list[RoundWork]:
        """Return the rounds of one rank. Schedules of many ranks are large, and are not kept."""
        schedule = self.schedule(self.cluster.size, rank)
        # Every rank of an all-to-all puts in a buffer of its own, a row of the p * p chunks.
        parts = self.cluster.size if OPERATIONS[self.entry.operation].input == "row" else schedule.chunks
        plain = (self.nbytes if self.entry.operation != "barrier" else 1.0) / parts
        return work_of(schedule, Widths(plain=plain, acc=plain * self.ratio))


def cost(  # noqa: PLR0913  (what a time depends on)
    operation: str,
    name: str,
    cluster: Cluster,
    nbytes: float,
    *,
    root: int = 0,
    pieces: int = 1,
    itemsize: int = 4,
    acc_itemsize: int = 4,
    method: str = "",
) -> Cost:
    """Return what an algorithm costs on a cluster.

    Two methods give the time. `events` follows every message of every rank ([Note: time of a message] in `events`),
    and serves where these are few: at small sizes, and for trees at any. `sampled` adds up the rounds of a few ranks
    ([Note: soundness of samples] in `sampled`). Long pipelines have many messages out of step, and are `scaled` up
    from shorter ones ([Note: growth] in `scaled`).

    Args:
        operation: the collective's name.
        name: the algorithm's.
        cluster: where the ranks are, and what links and arithmetic cost.
        nbytes: bytes of the whole buffer: what a rank holds before an all_reduce, and after an all_gather. For
            all_to_all, of each rank's input. A barrier's token has one byte, whatever is given.
        root: the root of a rooted operation.
        pieces: for algorithms that take it, in how many pieces each part is pipelined.
        itemsize: bytes of an element.
        acc_itemsize: bytes of an accumulated element, as which partial results travel.
        method: `events` or `sampled`; empty chooses.

    Raises:
        ArgumentError: for an unknown operation, algorithm or method, and numbers out of range.
    """
    _check(operation, cluster, nbytes, root, pieces)
    for what, value in (("itemsize", itemsize), ("acc_itemsize", acc_itemsize)):
        if value < 1:
            raise ArgumentError(must_be(what, "1 or more", value))
    if method not in {"", *METHODS}:
        raise ArgumentError(must_be("method", f"one of {', '.join(METHODS)}", method))
    case = _Case(
        entry=algorithm(operation, name),
        cluster=cluster,
        nbytes=nbytes,
        root=root,
        pieces=pieces,
        ratio=acc_itemsize / itemsize,
    )
    estimate, used = _estimate(case, method)
    return Cost(
        seconds=sum(estimate.terms),
        rounds=estimate.rounds,
        bytes_sent_max=estimate.sent_max,
        wire_bytes_max=estimate.wire_max,
        terms=estimate.terms,
        method=used,
        schedules=estimate.schedules,
    )


def lower_bound(operation: str, cluster: Cluster, nbytes: float, *, root: int = 0) -> float:
    """Return seconds that no algorithm can beat, whatever it costs to reduce and copy.

    One message's latency, and then the bytes that a rank must move over its fastest link or a node over its ports,
    whichever takes longer: as super-ranks, nodes obey the bounds of ranks (all_reduce 2 S (u-1)/u for each of u units,
    Patarasuk and Yuan 2009, section 2; the other operations follow from what each unit has to get or give).

    Args:
        operation: the collective's name.
        cluster: where the ranks are, and what links cost.
        nbytes: as for `cost`.
        root: the root of a rooted operation.

    Raises:
        ArgumentError: for an unknown operation, and numbers out of range.
    """
    _check(operation, cluster, nbytes, root, 1)
    members = cluster.members()
    size, hosts = cluster.size, len(members)
    if size == 1:
        return 0.0
    links = [cluster.local] * (size > hosts) + [cluster.remote] * (hosts > 1)
    counts = [len(ranks) for ranks in members.values()]
    over_link = nbytes * _least(operation, size, [1] * size, 0) * min(link.beta for link in links)
    ports = min(cluster.wires, max(counts))
    home = list(members).index(cluster.nodes[root])
    over_port = nbytes * _least(operation, size, counts, home) * cluster.remote.beta / ports
    return max(link.alpha for link in links[-1:]) + max(over_link, over_port)


def _least(operation: str, size: int, counts: list[int], home: int) -> float:
    """Return what the busiest unit of ranks has to send or receive, as a share of the buffer.

    Args:
        operation: the collective's name.
        size: number of ranks.
        counts: ranks in each unit.
        home: the unit of the root.
    """
    if len(counts) == 1 or operation == "barrier":
        return 0.0
    if operation == "all_reduce":
        return 2 * (len(counts) - 1) / len(counts)
    if operation == "all_to_all":
        return max(count * (size - count) for count in counts) / size
    if operation in {"gather", "scatter"}:
        return (size - counts[home]) / size
    if operation in {"all_gather", "reduce_scatter"}:
        return (size - min(counts)) / size
    return 1.0


def _check(operation: str, cluster: Cluster, nbytes: float, root: int, pieces: int) -> None:
    if operation not in OPERATIONS:
        raise ArgumentError(must_be("operation", f"one of {', '.join(OPERATIONS)}", operation))
    if not nbytes >= 0:
        raise ArgumentError(must_be("nbytes", "0 or more", nbytes))
    if not 0 <= root < cluster.size:
        raise ArgumentError(must_be("root", f"a rank, 0 to {cluster.size - 1}", root))
    if pieces < 1:
        raise ArgumentError(must_be("pieces", "1 or more", pieces))


def _estimate(case: _Case, method: str) -> tuple[Estimate, str]:
    """Evaluate by the method, or by the one that `cost` says fits."""
    size, known = case.cluster.size, dict[int, list[RoundWork]]()

    def works(rank: int) -> list[RoundWork]:
        return known.pop(rank) if rank in known else case.works(rank)

    kind = _symmetry(case) if method != "events" else ""
    if not method and case.entry.takes == "pieces" and size * case.pieces > SHORT:
        if kind == "":
            return _by_ranks(case), "scaled"
        if case.pieces > MORE:
            return _by_pieces(case), "scaled"
    if not method:
        probes = (0,) if kind and kind != sampled.LANES else (size - 1, size // 2, case.root)
        method = "events" if _are_few(works, known, probes, size) else "sampled"
    if method == "events":
        return events.evaluate([works(rank) for rank in range(size)], case.cluster), "events"
    return sampled.evaluate(works, case.cluster, kind, root=case.root), "sampled"


def _symmetry(case: _Case) -> sampled.Symmetry:
    """Return how the ranks' schedules follow from each other."""
    if case.entry.takes == "nodes":
        return sampled.LANES
    if OPERATIONS[case.entry.operation].rooted or case.cluster.size == 1:
        return ""
    return sampled.symmetry(case.schedule, case.cluster.size)


def _are_few(
    works: Callable[[int], list[RoundWork]], known: dict[int, list[RoundWork]], probes: tuple[int, ...], size: int
) -> bool:
    """Return whether all ranks together have at most FOLLOWED sends and receives, going by the rank with the fewest.

    In a tree most ranks are leaves, and a few have many messages. The rounds built for it are left in `known`.
    """
    for rank in probes:
        known[rank] = works(rank)
        ends = size * sum(len(work.sends) + len(work.receives) for work in known[rank])
        if ends <= FOLLOWED or ends > LARGE * FOLLOWED:
            return ends <= FOLLOWED
    return False


def _by_pieces(case: _Case) -> Estimate:
    """Evaluate a long pipeline in which all ranks do the same, from few pieces."""
    few, more = (
        _estimate(replace(case, pieces=pieces, nbytes=case.nbytes * pieces / case.pieces), "sampled")[0]
        for pieces in (FEW, MORE)
    )
    return scaled.along_pieces(few, more, (case.pieces - MORE) / (MORE - FEW))


def _by_ranks(case: _Case) -> Estimate:
    """Evaluate a pipeline over many ranks, from few ranks; a chunk's length must not depend on their number."""
    most = max(LEAST, SHORT // case.pieces)
    found, share = [], 1.0
    for size in (most // 4, most // 2, most):
        cluster, root, share = scaled.shrunk(case.cluster, size, case.root)
        found.append(_estimate(replace(case, cluster=cluster, root=root), "events")[0])
    return scaled.along_ranks(found, scaled.doublings(share))
