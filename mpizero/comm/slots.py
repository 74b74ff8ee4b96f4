"""Transfers that go through slots: who may fill one, who may take one, and what follows when a step is done.

[Note: slots] A way that moves device memory through other memory has a fixed number of slots per rank, which all its
peers, channels and strands share, so that a rank of a large job needs no more memory than one of a small one. Shared
slots can deadlock: those that hold pieces for a rank that does not receive yet are missing for one that does, and the
first may be waiting for the second. Two rules forbid it:

1. Who posts a receive announces it to the sender, by a token. A send slot is filled for announced messages alone.
2. A receive slot is taken only for a piece that has been sent, which MPI's matched probe finds.

By 2 what a receive slot waits for is under way, so that it becomes free by work of MPI and of one device. The rank of
an announced message waits for it, and every wait advances all transfers of its rank; so a piece that was sent is taken,
sooner or later, and by 1 every send slot becomes free. Hence each message of which both ends are posted goes on,
whatever the others do, and one slot is enough for that; more let a copy run beside a message.

The price is a message of 8 bytes per message. It is sent when the receive is posted, mostly before the sender has
anything to send, and it lets the sender see that the two ends disagree on the length.

Pieces of one message are filled in order, and messages between two ranks in one strand and channel one after the other,
so that MPI's order of messages with one tag is theirs. Messages of different such lanes take turns, piece by piece.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.comm.raw import mpi

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpizero.arrays import Device, DeviceArray, Event
    from mpizero.errors import CollectiveError

__all__ = ["Copies", "Expected", "Lane", "Mail", "Promised", "Transfer", "after", "parts_of", "token"]

Lane = tuple[int, int]
"""A peer, and the number of a strand of a channel: what is sent in one arrives in the order of posting."""
Then = Any
"""What is called, without arguments, when a step is done."""


class Transfer:
    """Be one message in device memory, from its posting until its memory is the caller's again."""

    __slots__ = ("announced", "data", "lane", "left", "name", "started")

    def __init__(self, name: str, lane: Lane, data: DeviceArray) -> None:
        """Hold a message.

        Args:
            name: what it is, in errors: `send to rank 1`.
            lane: its peer and strand.
            data: the bytes to send, or where those received go.
        """
        self.name, self.lane, self.data = name, lane, data.view(np.uint8)
        self.started = 0
        """Bytes of which the transfer has begun."""
        self.left = data.nbytes
        """Bytes that are not yet sent, or not yet in place."""
        self.announced = False

    @property
    def peer(self) -> int:
        """Return the other rank."""
        return self.lane[0]

    def cut(self, most: int) -> DeviceArray:
        """Return the next piece, of at most so many bytes."""
        start = self.started
        self.started = min(start + most, self.data.nbytes)
        return self.data[start : self.started]

    @property
    def is_cut(self) -> bool:
        """Return whether there is no further piece."""
        return self.started == self.data.nbytes

    def moved(self, nbytes: int) -> None:
        """Count bytes that are over."""
        self.left -= nbytes


class Mail:
    """Post messages on a communicator, and go on with what follows each when it has come."""

    def __init__(self, mpi_comm: Any) -> None:
        """Use an mpi4py communicator that nobody else uses."""
        module = mpi()
        self._comm = mpi_comm
        self._byte, self._any = module.BYTE, module.ANY_SOURCE
        self._status = module.Status()
        self._test: Callable[[list[Any]], list[int] | None] = module.Request.Testsome
        self._requests: list[Any] = []
        """mpi4py's requests keep their buffers alive."""
        self._follow: list[Then] = []

    def send(self, peer: int, tag: int, memory: Any, then: Then) -> None:
        """Send memory, which stays as it is until `then` is called."""
        self._requests.append(self._comm.Isend([memory, memory.nbytes, self._byte], peer, tag))
        self._follow.append(then)

    def receive(self, peer: int, tag: int, memory: Any, then: Then) -> None:
        """Receive into memory, which is filled when `then` is called."""
        self._requests.append(self._comm.Irecv([memory, memory.nbytes, self._byte], peer, tag))
        self._follow.append(then)

    def probe(self, tag: int) -> tuple[int, Any] | None:
        """Return the sender of a message that has come, and the message, which nobody else gets now; else None."""
        message = self._comm.Improbe(self._any, tag, self._status)
        return None if message is None else (self._status.source, message)

    def take(self, message: Any, memory: Any, then: Then) -> None:
        """Receive a probed message into memory, which is filled when `then` is called."""
        self._requests.append(message.Irecv([memory, memory.nbytes, self._byte]))
        self._follow.append(then)

    def advance(self) -> None:
        """Go on with what follows each message that has come or gone, in the order of posting."""
        if not self._requests:
            return
        over = self._test(self._requests)
        if not over:
            return
        follow = [self._follow[index] for index in sorted(over)]
        for index in sorted(over, reverse=True):
            del self._requests[index], self._follow[index]
        for then in follow:
            then()


class Copies:
    """Copy on a stream of a device, and go on with what follows each copy when the host has seen that it is done."""

    def __init__(self, device: Device) -> None:
        """Make the stream."""
        self._device = device
        self._stream = device.stream()
        self._queue: deque[tuple[Event, Any, Any, Then]] = deque()

    def start(self, dst: Any, src: Any, then: Then) -> None:
        """Start a copy of the bytes of `src`; both belong to it until `then` is called."""
        self._device.copy(dst, src, self._stream)
        self._queue.append((self._stream.record(), dst, src, then))

    def advance(self) -> None:
        """Go on with what follows the copies that are done, which they are in the order of their start."""
        while self._queue and self._queue[0][0].done():
            self._queue.popleft()[3]()


class Promised:
    """Hold the sends of one way: those announced by their receivers are cut in pieces, lane by lane in turn."""

    def __init__(self, mail: Mail, tag_of: Callable[[int], int], refuse: Callable[[str], CollectiveError]) -> None:
        """Hold no sends.

        Args:
            mail: where announcements come in.
            tag_of: their tag in a strand.
            refuse: makes the error of a message whose two ends disagree.
        """
        self._mail, self._tag_of, self._refuse = mail, tag_of, refuse
        self._lanes: dict[Lane, deque[Transfer]] = {}
        self._turns: deque[Lane] = deque()
        """Lanes whose first message is announced."""

    def add(self, transfer: Transfer) -> None:
        """Take a send up; it goes on when its receiver has announced it."""
        self._lanes.setdefault(transfer.lane, deque()).append(transfer)
        wanted = token(0)

        def announced() -> None:
            self._announced(transfer, int(wanted[0]))

        self._mail.receive(transfer.peer, self._tag_of(transfer.lane[1]), wanted, announced)

    def _announced(self, transfer: Transfer, nbytes: int) -> None:
        if nbytes != transfer.data.nbytes:
            got = f"{transfer.data.nbytes:,} bytes, and {nbytes:,} bytes there"
            raise self._refuse(f"{transfer.name} must have one length on both (got {got})")
        transfer.announced = True
        if self._lanes[transfer.lane][0] is transfer:
            self._turns.append(transfer.lane)

    def cut(self, most: int) -> tuple[Transfer, DeviceArray] | None:
        """Return the next piece to be sent, of at most so many bytes, and its message; None where there is none."""
        if not self._turns:
            return None
        lane = self._turns.popleft()
        waiting = self._lanes[lane]
        transfer = waiting[0]
        piece = transfer.cut(most)
        if transfer.is_cut:
            waiting.popleft()
        if not waiting:
            del self._lanes[lane]
        elif waiting[0].announced:
            self._turns.append(lane)
        return transfer, piece


class Expected:
    """Hold the receives of one way: announces them, and finds the pieces that have come."""

    def __init__(self, mail: Mail, announce: Callable[[int], int], tag_of: Callable[[int], int]) -> None:
        """Hold no receives.

        Args:
            mail: where announcements go and pieces come in.
            announce: the tag of announcements in a strand.
            tag_of: the tag of what tells of a piece, or is one, in a strand.
        """
        self._mail, self._announce, self._tag_of = mail, announce, tag_of
        self._strands: dict[int, dict[int, deque[Transfer]]] = {}
        """Per strand and peer, the receives of which pieces are to come."""

    def add(self, transfer: Transfer) -> None:
        """Take a receive up, and announce it."""
        peer, strand = transfer.lane
        self._strands.setdefault(strand, {}).setdefault(peer, deque()).append(transfer)
        self._mail.send(peer, self._announce(strand), token(transfer.data.nbytes), _nothing)

    def find(self, most: int) -> tuple[Transfer, DeviceArray, Any] | None:
        """Return a receive of which a piece has come, the piece's place and its MPI message; None where none has.

        The message must be taken (`Mail.take`).

        Args:
            most: bytes of a piece, as its sender cuts.
        """
        for strand, peers in self._strands.items():
            found = self._mail.probe(self._tag_of(strand))
            if found is None:
                continue
            peer, message = found
            transfer = peers[peer][0]
            piece = transfer.cut(most)
            if transfer.is_cut:
                self._close(strand, peer)
            return transfer, piece, message
        return None

    def _close(self, strand: int, peer: int) -> None:
        """Let the first receive of a lane go."""
        peers = self._strands[strand]
        peers[peer].popleft()
        if not peers[peer]:
            del peers[peer]
        if not peers:
            del self._strands[strand]


def token(number: int) -> np.ndarray[Any, Any]:
    """Return the memory of a message of one number."""
    return np.array([number], np.int64)


def _nothing() -> None:
    pass


def parts_of(memory: Any, most: int) -> list[Any]:
    """Return memory cut in parts of at most so many bytes."""
    return [memory[start : start + most] for start in range(0, memory.nbytes, most)]


def after(number: int, then: Then) -> Then:
    """Return what calls `then` when it has been called so many times."""
    left = [number]

    def one() -> None:
        left[0] -= 1
        if not left[0]:
            then()

    return one
