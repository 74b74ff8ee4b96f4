"""Time a collective by following every message of every rank.

[Note: time of a message] The first send of a rank to a peer is met by that peer's first receive from it, and so on. A
message starts when both ends have posted it, and ends after its link's latency and the longest of:

- the bytes that the sender has in all messages of its round, on their links;
- the bytes that the receiver has in all of its round;
- between nodes, the bytes that leave the sender's node and those that enter the receiver's, over its ports.

So messages of a round share their rank's link and overlap in latency, and both directions go at once. Which messages
meet at a port is approximated: those at the same depth of the graph of messages do, and deeper ones queue behind. In
schedules whose rounds are in step, depth is the number of the round and this is exact; in others, no port carries more
than it can, but messages of different depths that overlap in time are served in the order of depth.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from mpizero.collectives.simulate import ScheduleError
from mpizero.collectives.work import ALIKE, Estimate, Flow, RoundWork, Terms

if TYPE_CHECKING:
    from mpizero.collectives.links import Cluster

__all__ = ["evaluate"]


class _Moment(NamedTuple):
    """Hold a time, and what it was spent on; later moments compare as greater."""

    seconds: float
    terms: Terms

    def after(self, *more: float) -> _Moment:
        """Return the moment that comes after seconds of each of `Terms`."""
        took = sum(more)
        return _Moment(self.seconds + took, self.terms.plus(more)) if took else self


class _Message(NamedTuple):
    source: int
    target: int
    nbytes: float


def evaluate(works: list[list[RoundWork]], cluster: Cluster) -> Estimate:
    """Return the time at which the last rank is done, and what it waited for.

    Takes memory and steps in proportion to the number of messages.

    Args:
        works: the rounds of every rank.
        cluster: where the ranks are, and what links cost.

    Raises:
        ScheduleError: if a message is never met.
    """
    return _Run(works, cluster).run()


class _Run:
    """Advance all ranks together, one depth of the graph of messages at a time."""

    def __init__(self, works: list[list[RoundWork]], cluster: Cluster) -> None:
        self.works, self.cluster = works, cluster
        start = _Moment(0.0, Terms())
        self.positions = [0] * len(works)
        self.ends = [start] * len(works)
        """When each rank's last finished round ended, then when the messages of its round did, as far as known."""
        self.ready = [start] * len(works)
        """When each rank has posted its round."""
        self.loads = [(0.0, 0.0)] * len(works)
        """Seconds of all bytes that each rank sends and receives in its round."""
        self.unmet = [0] * len(works)
        self.posted: tuple[dict[tuple[int, int], deque[float]], ...] = ({}, {})
        self.met: list[_Message] = []
        self.ports: dict[tuple[int, int], float] = {}
        """Until when the ports of a node are busy, by (node, direction)."""

    def run(self) -> Estimate:
        for rank in range(len(self.works)):
            self._start(rank)
        depth = 0
        while self.met:
            depth += 1
            messages, self.met = self.met, []
            free = self._occupy(messages)
            finished = [rank for message in messages for rank in self._deliver(message, free)]
            for rank in finished:
                self._finish(rank)
        self._check()
        terms = max(self.ends).terms
        sent, wire = self._bytes()
        return Estimate(terms=terms, rounds=depth, sent_max=sent, wire_max=wire, schedules=len(self.works))

    def _start(self, rank: int) -> None:
        """Go through rounds without messages, then post the next one."""
        while self.positions[rank] < len(self.works[rank]):
            work = self.works[rank][self.positions[rank]]
            messages = len(work.sends) + len(work.receives)
            busy = self.cluster.copy * work.packed, self.cluster.post * messages
            self.ready[rank] = self.ends[rank].after(0.0, 0.0, 0.0, 0.0, 0.0, *busy)
            self.ends[rank] = self.ready[rank]
            if messages:
                self._post(rank, work, messages)
                return
            self._compute(rank, work)

    def _post(self, rank: int, work: RoundWork, messages: int) -> None:
        self.unmet[rank] = messages
        self.loads[rank] = (self._load(rank, work.sends), self._load(rank, work.receives))
        sends, receives = self.posted
        for peer, nbytes in work.receives:
            if sends.get((peer, rank)):
                self.met.append(_Message(peer, rank, sends[peer, rank].popleft()))
            else:
                receives.setdefault((peer, rank), deque()).append(nbytes)
        for peer, nbytes in work.sends:
            if receives.get((rank, peer)):
                receives[rank, peer].popleft()
                self.met.append(_Message(rank, peer, nbytes))
            else:
                sends.setdefault((rank, peer), deque()).append(nbytes)

    def _load(self, rank: int, flows: tuple[Flow, ...]) -> float:
        nodes, local, remote = self.cluster.nodes, self.cluster.local.beta, self.cluster.remote.beta
        return sum(nbytes * (local if nodes[rank] == nodes[peer] else remote) for peer, nbytes in flows)

    def _occupy(self, messages: list[_Message]) -> dict[tuple[int, int], float]:
        """Return until when the messages of one depth keep the ports busy, by (node, direction)."""
        nodes, waiting = self.cluster.nodes, dict[tuple[int, int], tuple[float, float]]()
        for source, target, nbytes in messages:
            if nodes[source] != nodes[target]:
                begin = max(self.ready[source].seconds, self.ready[target].seconds)
                for port in ((nodes[source], 0), (nodes[target], 1)):
                    first, total = waiting.get(port, (begin, 0.0))
                    waiting[port] = (min(first, begin), total + nbytes)
        for port, (first, total) in waiting.items():
            begin = max(first, self.ports.get(port, 0.0))
            self.ports[port] = begin + total * self.cluster.remote.beta / self.cluster.wires
        return self.ports

    def _deliver(self, message: _Message, free: dict[tuple[int, int], float]) -> list[int]:
        """End a message; return the ranks whose round it was the last message of."""
        source, target, _ = message
        ready = max(self.ready[source], self.ready[target])
        serial = max(self.loads[source][0], self.loads[target][1])
        nodes, cluster = self.cluster.nodes, self.cluster
        if nodes[source] == nodes[target]:
            end = ready.after(cluster.local.alpha, serial, 0.0, 0.0, 0.0, 0.0, 0.0)
        else:
            queued = max(free[nodes[source], 0], free[nodes[target], 1]) - ready.seconds
            took = (serial, 0.0) if queued <= serial * ALIKE else (0.0, queued)
            end = ready.after(cluster.remote.alpha, 0.0, *took, 0.0, 0.0, 0.0)
        finished = []
        for rank in (source, target):
            self.ends[rank] = max(self.ends[rank], end)
            self.unmet[rank] -= 1
            if not self.unmet[rank]:
                finished.append(rank)
        return finished

    def _finish(self, rank: int) -> None:
        self._compute(rank, self.works[rank][self.positions[rank]])
        self._start(rank)

    def _compute(self, rank: int, work: RoundWork) -> None:
        """Do a round's local steps, and leave it."""
        busy = self.cluster.gamma * work.reduced, self.cluster.copy * work.copied
        self.ends[rank] = self.ends[rank].after(0.0, 0.0, 0.0, 0.0, *busy, 0.0)
        self.positions[rank] += 1

    def _check(self) -> None:
        stuck = [rank for rank, work in enumerate(self.works) if self.positions[rank] < len(work)]
        if stuck:
            raise ScheduleError(f"ranks {stuck[:8]} wait for messages that nobody sends or takes")

    def _bytes(self) -> tuple[float, float]:
        """Return the most bytes that a rank sends, and the most that leave or enter a node."""
        nodes, crossing, most = self.cluster.nodes, dict[tuple[int, int], float](), 0.0
        for rank, rounds in enumerate(self.works):
            flows = [flow for work in rounds for flow in work.sends]
            most = max(most, sum(flow.nbytes for flow in flows))
            for peer, nbytes in flows:
                if nodes[peer] != nodes[rank]:
                    for port in ((nodes[rank], 0), (nodes[peer], 1)):
                        crossing[port] = crossing.get(port, 0.0) + nbytes
        return most, max(crossing.values(), default=0.0)
