"""The transport over MPI point-to-point messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpizero.comm.health import Health
from mpizero.comm.raw import mpi
from mpizero.comm.stats import Stats
from mpizero.comm.waiting import ADVICE, SPINS, cores, poll
from mpizero.errors import CollectiveTimeoutError

if TYPE_CHECKING:
    from mpizero.typing import Bytes

__all__ = ["MessageTransport"]

TAG = 7
"""The tag of messages outside any channel: MPI keeps the order of messages between two ranks, so one is enough."""
CHANNELS = 32000
"""MPI grants tags up to 32767 at least."""
PIECE = 1 << 30
"""Bytes of the largest single message: a count beyond 2^31 fails on Open MPI 5.0 whatever the datatype."""

SMALL_PIECE = 64 << 10
"""Bytes of a message over TCP: two large ones that cross on one connection wait for each other, half of the wire idle,
where a stream of short ones keeps it busy both ways."""


class MessageTransport:
    """Send and receive bytes with `Isend` and `Irecv` on a communicator that belongs to mpizero alone."""

    def __init__(self, mpi_comm: Any, timeout: float, health: Health | None = None) -> None:
        """Use `mpi_comm`, an mpi4py intracommunicator; a wait ends with an error after `timeout` seconds."""
        self.health = health or Health()
        self.rank: int = mpi_comm.rank
        self.size: int = mpi_comm.size
        self.stats = Stats()
        self.timeout = timeout
        self._comm = mpi_comm
        self._tag, self._label = TAG, ""
        self._piece = [PIECE] * self.size
        """Per peer, the bytes of the largest single message; both ends must agree."""
        self._requests: list[Any] = []
        self._abandoned: list[Any] = []
        self._peers: list[tuple[str, int]] = []
        module = mpi()
        self._byte = module.BYTE
        self.test_all = module.Request.Testall
        self.spins = SPINS if mpi_comm.size <= cores() else 1

    def cut_small(self, peers: list[int]) -> None:
        """Send to and receive from these peers in pieces of `SMALL_PIECE`; all ranks must do so for the same pairs."""
        for peer in peers:
            self._piece[peer] = SMALL_PIECE

    def speak_of(self, number: int | None, label: str) -> None:
        """Change to the channel `number`, or with None to the common one; see `Communicator.channel`."""
        self._tag = TAG if number is None else TAG + 1 + number % CHANNELS
        self._label = label

    def send(self, peer: int, data: Bytes) -> None:
        """Post a send of the bytes of `data`."""
        for piece in _pieces(data, self._piece[peer]):
            self._requests.append(self._comm.Isend([piece, piece.nbytes, self._byte], peer, self._tag))
            self._peers.append(("send to", peer))
        self.stats.messages_sent += 1
        self.stats.bytes_sent += data.nbytes

    def receive(self, peer: int, data: Bytes) -> None:
        """Post a receive into the bytes of `data`."""
        for piece in _pieces(data, self._piece[peer]):
            self._requests.append(self._comm.Irecv([piece, piece.nbytes, self._byte], peer, self._tag))
            self._peers.append(("receive from", peer))
        self.stats.bytes_received += data.nbytes

    def pending(self, what: str) -> _Requests | None:
        """Return the wait for everything posted since the last one; None if nothing was."""
        if not self._requests:
            return None
        requests, self._requests = self._requests, []
        peers, self._peers = self._peers, []
        return _Requests(self, requests, peers, f"{what} of {self._label}" if self._label else what)

    def abandon(self, requests: list[Any]) -> None:
        """Keep requests that nobody waits for any more, since MPI may still write into their buffers."""
        self.health.sound = False
        self._abandoned += requests


class _Requests:
    """Wait for MPI requests."""

    def __init__(
        self, transport: MessageTransport, requests: list[Any], peers: list[tuple[str, int]], what: str
    ) -> None:
        self.transport, self.requests, self.peers, self.what = transport, requests, peers, what
        self._test_all = transport.test_all

    def done(self) -> bool:
        """Return whether all have come."""
        return bool(self._test_all(self.requests))

    def block(self) -> bool:
        """Return True once all have come, False after the time-out."""
        return poll(self.done, self.transport.timeout, lambda: self._missing("waits for"), spins=self.transport.spins)

    def overdue(self, seconds: float) -> bool:
        """Return whether `seconds` is more than the time-out."""
        return seconds > self.transport.timeout

    def settle(self, seconds: float, *, finished: bool) -> None:
        """Count the wait, and give its requests up if it was given up."""
        self.transport.stats.wait_seconds += seconds
        if not finished:
            self.transport.abandon(self.requests)

    def late(self) -> CollectiveTimeoutError:
        """Say what a time-out means."""
        return CollectiveTimeoutError(f"{self._missing(f'waited {self.transport.timeout:g} s for')}. {ADVICE}")

    def _missing(self, verb: str) -> str:
        """Say which messages are still missing, as `all_gather of x: rank 0 of 2 VERB: receive from rank 1`."""
        posted = zip(self.requests, self.peers, strict=True)
        waiting = [f"{kind} rank {peer}" for request, (kind, peer) in posted if not request.Get_status()]
        missing = ", ".join(sorted(set(waiting))) or "nothing any more"
        return f"{self.what}: rank {self.transport.rank} of {self.transport.size} {verb}: {missing}"


def _pieces(data: Bytes, most: int) -> list[Bytes]:
    """Return the array as byte arrays of at most `most` bytes, one message each."""
    if data.nbytes <= most:
        return [data]
    raw = data.view("uint8")
    return [raw[start : start + most] for start in range(0, raw.nbytes, most)]
