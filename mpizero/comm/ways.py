"""Three ways to move device memory to another rank, with one interface: on device pointers, by loads, through the host.

Each takes up sends and receives of messages (`slots.Transfer`), and advances them without blocking. The copies of a
rank run on two streams of the transport's own, one for what leaves and one for what comes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mpizero.comm.messages import WINDOW
from mpizero.comm.raw import mpi
from mpizero.comm.slots import Copies, Expected, Mail, Promised, Transfer, after, parts_of, token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpizero.arrays import Device, DeviceArray
    from mpizero.comm.slots import Lane
    from mpizero.errors import CollectiveError

__all__ = ["Direct", "Peer", "Slots", "Staged", "Tools", "Way"]

ACKNOWLEDGED = 0
"""The tag of the messages that give slots back."""
ANNOUNCED, DIRECT, STAGED, PEER = range(4)
FAMILIES = 4
"""Kinds of messages per strand: their tags are apart, so that a probe for one finds no other."""


def tag(family: int, strand: int) -> int:
    """Return the tag of a kind of messages in a strand, from 0, of a channel."""
    return 1 + family + FAMILIES * strand


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Say how many slots a rank has, per direction, and how large they are; equal on all ranks."""

    nbytes: int
    """Bytes of one: of a piece of a message."""
    number: int
    """How many there are: a message's own pipeline wants two or three, and several strands share them."""

    @property
    def whole(self) -> int:
        """Return the bytes of all."""
        return self.nbytes * self.number

    def cut(self, memory: Any) -> list[Any]:
        """Return the slots that memory of `whole` bytes holds."""
        return parts_of(memory, self.nbytes)


class Tools(NamedTuple):
    """Hold what the ways of a rank share."""

    device: Device
    mail: Mail
    leaving: Copies
    coming: Copies
    most: list[int]
    """Per peer, the bytes of the largest single message."""
    refuse: Callable[[str], CollectiveError]
    """Makes the error of a message whose two ends disagree."""


class Way(Protocol):
    """Move messages to and from some peers."""

    def send(self, transfer: Transfer) -> None:
        """Take a send up."""
        ...

    def receive(self, transfer: Transfer) -> None:
        """Take a receive up."""
        ...

    def advance(self) -> None:
        """Go on as far as possible; never blocks."""
        ...


class Direct:
    """Give device pointers to MPI, which must be CUDA-aware. No copies, and no memory of its own.

    A message is cut in pieces of the largest size that one MPI message may have, of which `WINDOW` are under way.
    """

    def __init__(self, tools: Tools) -> None:
        """Use a rank's tools."""
        self._tools = tools
        self._memory = mpi().buffer.fromaddress
        self._lanes: dict[tuple[Any, Lane], deque[Transfer]] = {}
        """Messages of which pieces are not posted, by what posts them and lane."""

    def send(self, transfer: Transfer) -> None:
        """Post a send, or as many of its pieces as may be under way."""
        self._enter(self._tools.mail.send, transfer)

    def receive(self, transfer: Transfer) -> None:
        """Post a receive, likewise."""
        self._enter(self._tools.mail.receive, transfer)

    def _enter(self, post: Any, transfer: Transfer) -> None:
        waiting = self._lanes.setdefault((post, transfer.lane), deque())
        waiting.append(transfer)
        if waiting[0] is transfer:
            for _ in range(WINDOW):
                self._post(post, transfer.lane)

    def _post(self, post: Any, lane: Lane) -> None:
        """Post the next piece of a lane, if there is one."""
        waiting = self._lanes.get((post, lane))
        if not waiting:
            return
        peer, strand = lane
        transfer = waiting[0]
        piece = transfer.cut(self._tools.most[peer])
        if transfer.is_cut:
            waiting.popleft()
            if not waiting:
                del self._lanes[post, lane]

        def over() -> None:
            transfer.moved(piece.nbytes)
            self._post(post, lane)

        post(peer, tag(DIRECT, strand), self._memory(piece.address, piece.nbytes), over)

    def advance(self) -> None:
        """Do nothing: what follows a message is all there is."""


class Staged:
    """Go through page-locked host memory: a copy to it, messages, and a copy from it, pipelined by pieces.

    A send slot is filled by a copy, sent when the copy is done, and free when MPI is done with it. A receive slot is
    filled by messages, emptied by a copy when all of them have come, and free when the copy is done. A message of n
    bytes costs two copies of n bytes, n bytes sent, and one small message. Over links that want small messages a slot
    goes as several.
    """

    def __init__(self, tools: Tools, slots: Slots) -> None:
        """Allocate the slots of both directions, `2 * slots.whole` bytes of page-locked host memory."""
        self._tools, self._slots = tools, slots
        self._to_fill = slots.cut(tools.device.pinned(slots.whole))
        self._to_receive = slots.cut(tools.device.pinned(slots.whole))
        announced = partial(tag, ANNOUNCED)
        self._promised = Promised(tools.mail, announced, tools.refuse)
        self._expected = Expected(tools.mail, announced, partial(tag, STAGED))

    def send(self, transfer: Transfer) -> None:
        """Take a send up."""
        self._promised.add(transfer)

    def receive(self, transfer: Transfer) -> None:
        """Take a receive up."""
        self._expected.add(transfer)

    def advance(self) -> None:
        """Fill the send slots that are free, and receive into the receive slots that are."""
        while self._to_fill and (job := self._promised.cut(self._slots.nbytes)) is not None:
            self._fill(*job)
        while self._to_receive and (found := self._expected.find(self._slots.nbytes)) is not None:
            self._take(*found)

    def _fill(self, transfer: Transfer, piece: DeviceArray) -> None:
        slot = self._to_fill.pop()
        memory = slot[: piece.nbytes]

        def sent() -> None:
            self._to_fill.append(slot)
            transfer.moved(piece.nbytes)

        def filled() -> None:
            parts = parts_of(memory, self._tools.most[transfer.peer])
            one = after(len(parts), sent)
            for part in parts:
                self._tools.mail.send(transfer.peer, tag(STAGED, transfer.lane[1]), part, one)

        self._tools.leaving.start(memory, piece, filled)

    def _take(self, transfer: Transfer, piece: DeviceArray, message: Any) -> None:
        slot = self._to_receive.pop()
        memory = slot[: piece.nbytes]

        def in_place() -> None:
            self._to_receive.append(slot)
            transfer.moved(piece.nbytes)

        def received() -> None:
            self._tools.coming.start(piece, memory, in_place)

        first, *others = parts_of(memory, self._tools.most[transfer.peer])
        one = after(1 + len(others), received)
        self._tools.mail.take(message, first, one)
        for part in others:
            self._tools.mail.receive(transfer.peer, tag(STAGED, transfer.lane[1]), part, one)


class Peer:
    """Load from the peer's device memory, opened by CUDA IPC: both ends on one host.

    The sender's device copies a piece into a slot of its own memory. When that is done, a token tells the receiver,
    whose device copies the piece out of the slot; when that is done, a token gives the slot back. A message of n bytes
    costs two copies of n bytes within devices or between them, a token each way per piece, and one announcement.
    """

    def __init__(self, tools: Tools, slots: Slots) -> None:
        """Allocate the slots, `slots.whole` bytes of device memory."""
        self._tools, self._slots = tools, slots
        self._pool: DeviceArray = tools.device.allocate(slots.whole)
        self._cut = slots.cut(self._pool)
        self._free = list(range(slots.number))
        self._theirs: dict[int, Sequence[DeviceArray]] = {}
        """Per peer, its slots."""
        announced = partial(tag, ANNOUNCED)
        self._promised = Promised(tools.mail, announced, tools.refuse)
        self._expected = Expected(tools.mail, announced, partial(tag, PEER))
        self.lent = 0
        """Slots that a receiver has been told of and has not given back."""

    @property
    def handle(self) -> bytes:
        """Return the handle by which peers open the slots."""
        return self._tools.device.share(self._pool)

    def open(self, handles: dict[int, bytes]) -> None:
        """Open the slots of peers by their handles.

        Raises:
            DeviceError: where the system does not let one process reach the other's memory.
        """
        device, slots = self._tools.device, self._slots
        self._theirs = {peer: slots.cut(device.open(handle, slots.whole)) for peer, handle in handles.items()}

    def shut(self) -> None:
        """Close the slots of the peers, before these free them."""
        self._theirs = {}

    def send(self, transfer: Transfer) -> None:
        """Take a send up."""
        self._promised.add(transfer)

    def receive(self, transfer: Transfer) -> None:
        """Take a receive up."""
        self._expected.add(transfer)

    def advance(self) -> None:
        """Take back the slots that were emptied, fill those that are free, and empty those of peers."""
        while self.lent and (found := self._tools.mail.probe(ACKNOWLEDGED)) is not None:
            self._take_back(found[1])
        while self._free and (job := self._promised.cut(self._slots.nbytes)) is not None:
            self._fill(*job)
        while (piece := self._expected.find(self._slots.nbytes)) is not None:
            self._load(*piece)

    def _take_back(self, message: Any) -> None:
        self.lent -= 1
        told = token(0)
        self._tools.mail.take(message, told, lambda: self._free.append(int(told[0])))

    def _fill(self, transfer: Transfer, piece: DeviceArray) -> None:
        number = self._free.pop()

        def filled() -> None:
            self.lent += 1
            over = partial(transfer.moved, piece.nbytes)
            self._tools.mail.send(transfer.peer, tag(PEER, transfer.lane[1]), token(number), over)

        self._tools.leaving.start(self._cut[number][: piece.nbytes], piece, filled)

    def _load(self, transfer: Transfer, piece: DeviceArray, message: Any) -> None:
        told = token(0)

        def emptied() -> None:
            over = partial(transfer.moved, piece.nbytes)
            self._tools.mail.send(transfer.peer, ACKNOWLEDGED, told, over)

        def come() -> None:
            slot = self._theirs[transfer.peer][int(told[0])]
            self._tools.coming.start(piece, slot[: piece.nbytes], emptied)

        self._tools.mail.take(message, told, come)
