"""The transport over MPI point-to-point messages."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from mpizero.comm.health import Health
from mpizero.comm.raw import mpi
from mpizero.comm.stats import Stats
from mpizero.comm.voice import Voice
from mpizero.comm.waiting import ADVICE, poll, spins_for
from mpizero.errors import CollectiveError, CollectiveTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpizero.typing import Bytes

__all__ = ["STRANDS", "UNLIKE", "MessageTransport"]

TAG = 7
"""The tag of messages outside any channel: MPI keeps the order of messages between two ranks, so one is enough."""
STRANDS = 3
"""Streams of messages of one channel that never meet; each has a tag."""
CHANNELS = 10000
"""MPI grants tags up to 32767 at least."""
PIECE = 1 << 30
"""Bytes of the largest single message: a count beyond 2^31 fails on Open MPI 5.0 whatever the datatype."""

SMALL_PIECE = 32 << 10
"""Bytes of a message over TCP. Beyond Open MPI's eager limit of 64 KiB the go-ahead for a message waits behind the
bytes that go the other way, and half of the wire is idle where two ranks exchange large ones: docs/decisions/0007."""
WINDOW = 64
"""Pieces of one message that are under way at a time, so that a slow receiver is not sent megabytes to keep."""

UNLIKE = (
    "Every rank must make the same collective calls in the same order, with the same dtype, size and arguments; "
    "MPIZERO_STRICT=1 compares them"
)
"""What a message of an unexpected size means."""

Lane = tuple[str, int]
"""`send to` or `receive from`, and the peer."""


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
        self.voice = Voice()
        self.strand = 0
        """Added to the tag of what is posted next."""
        self._piece = [PIECE] * self.size
        """Per peer, the bytes of the largest single message; both ends must agree."""
        self._requests: list[Any] = []
        self._abandoned: list[Any] = []
        self._lanes: list[Lane] = []
        self._waiting: dict[Lane, deque[Bytes]] = {}
        """Pieces that are not posted yet."""
        module = mpi()
        self._byte = module.BYTE
        self.test_all = module.Request.Testall
        self.test_some = module.Request.Testsome
        self.spins = spins_for(mpi_comm.size)

    def cut_small(self, peers: list[int]) -> None:
        """Send to and receive from these peers in pieces of `SMALL_PIECE`; all ranks must do so for the same pairs."""
        for peer in peers:
            self._piece[peer] = SMALL_PIECE

    def send(self, peer: int, data: Bytes) -> None:
        """Post a send of the bytes of `data`."""
        self._enter(("send to", peer), _pieces(data, self._piece[peer]))
        self.stats.messages_sent += 1
        self.stats.bytes_sent += data.nbytes

    def receive(self, peer: int, data: Bytes) -> None:
        """Post a receive into the bytes of `data`."""
        self._enter(("receive from", peer), _pieces(data, self._piece[peer]))
        self.stats.bytes_received += data.nbytes

    def _enter(self, lane: Lane, pieces: list[Bytes]) -> None:
        """Post the first pieces, and keep the others back, in order, behind those of the same lane."""
        waiting = self._waiting.get(lane)
        if waiting:
            waiting.extend(pieces)
            return
        tag = self._tag()
        for piece in pieces[:WINDOW]:
            self._requests.append(self.post(lane, piece, tag))
            self._lanes.append(lane)
        if len(pieces) > WINDOW:
            self._waiting[lane] = deque(pieces[WINDOW:])

    def _tag(self) -> int:
        channel = self.voice.channel
        return TAG + self.strand + (STRANDS * (1 + (channel - 1) % CHANNELS) if channel else 0)

    def post(self, lane: Lane, piece: Bytes, tag: int) -> Any:
        """Return the request of one message."""
        kind, peer = lane
        message = [piece, piece.nbytes, self._byte]
        if kind == "send to":
            return self._comm.Isend(message, peer, tag)
        return self._comm.Irecv(message, peer, tag)

    def pending(self, what: str) -> _Requests | None:
        """Return the wait for everything posted since the last one; None if nothing was."""
        if not self._requests:
            return None
        wait = _Requests(self, self.voice.name(what), self._tag())
        wait.requests, self._requests = self._requests, []
        wait.lanes, self._lanes = self._lanes, []
        wait.waiting, self._waiting = self._waiting, {}
        return wait

    def abandon(self, requests: list[Any]) -> None:
        """Keep requests that nobody waits for any more, since MPI may still write into their buffers."""
        self.health.sound = False
        self._abandoned += requests


class _Requests:
    """Wait for MPI requests."""

    def __init__(self, transport: MessageTransport, what: str, tag: int) -> None:
        self.transport, self.what, self.tag = transport, what, tag
        self.requests: list[Any] = []
        self.lanes: list[Lane] = []
        """Per request, what it is."""
        self.waiting: dict[Lane, deque[Bytes]] = {}
        """Pieces that follow as earlier ones of their lane are done."""
        self._test_all = transport.test_all

    def done(self) -> bool:
        """Return whether all have come; posts pieces that were kept back.

        Raises:
            CollectiveError: where a message is of another size than the one that was expected.
        """
        try:
            return bool(self._test_all(self.requests)) if not self.waiting else self._follow()
        except mpi().Exception as error:
            self.transport.abandon(self.requests)
            here = f"{self.what}: rank {self.transport.rank} of {self.transport.size}"
            raise CollectiveError(f"{here} got a message that it did not expect ({error}). {UNLIKE}") from error

    def _follow(self) -> bool:
        for index in self.transport.test_some(self.requests) or ():
            lane = self.lanes[index]
            pieces = self.waiting.get(lane)
            if pieces:
                self.requests[index] = self.transport.post(lane, pieces.popleft(), self.tag)
                if not pieces:
                    del self.waiting[lane]
        return False

    def block(self, done: Callable[[], bool] | None = None) -> bool:
        """Return True once all have come, or what `done` asks instead, False after the time-out."""
        return poll(
            done or self.done, self.transport.timeout, lambda: self._missing("waits for"), spins=self.transport.spins
        )

    def overdue(self, seconds: float) -> bool:
        """Return whether `seconds` is more than the time-out."""
        return seconds > self.transport.timeout

    def settle(self, seconds: float, *, finished: bool) -> None:
        """Count the wait, and give its requests up if it was given up."""
        self.count(seconds)
        if not finished:
            self.transport.abandon(self.requests)

    def count(self, seconds: float) -> None:
        """Count seconds of waiting."""
        self.transport.stats.wait_seconds += seconds

    def late(self) -> CollectiveTimeoutError:
        """Say what a time-out means."""
        return CollectiveTimeoutError(f"{self._missing(f'waited {self.transport.timeout:g} s for')}. {ADVICE}")

    def _missing(self, verb: str) -> str:
        """Say which messages are still missing, as `all_gather of x: rank 0 of 2 VERB: receive from rank 1`."""
        posted = zip(self.requests, self.lanes, strict=True)
        waiting = [f"{kind} rank {peer}" for request, (kind, peer) in posted if not request.Get_status()]
        missing = ", ".join(sorted(set(waiting))) or "nothing any more"
        return f"{self.what}: rank {self.transport.rank} of {self.transport.size} {verb}: {missing}"


def _pieces(data: Bytes, most: int) -> list[Bytes]:
    """Return the array as byte arrays of at most `most` bytes, one message each."""
    if data.nbytes <= most:
        return [data]
    raw = data.view("uint8")
    return [raw[start : start + most] for start in range(0, raw.nbytes, most)]
