"""Ranks as threads of one process: the cheapest world in which real schedules move real bytes."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpizero.comm.health import Health
from mpizero.comm.progress import Work
from mpizero.comm.stats import Stats
from mpizero.comm.voice import Voice
from mpizero.comm.waiting import drive
from mpizero.errors import ArgumentError, CollectiveError, CollectiveTimeoutError, must_be

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from mpizero.typing import Bytes, Wait

__all__ = ["LoopbackCommunicator", "run_loopback"]

Result = TypeVar("Result")
Address = tuple[int, int, int, int]
"""The sending rank, the receiving rank, the channel and the strand."""


class _Mailboxes:
    """Hold the messages under way between the ranks of one loopback world, in order per pair."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.failed = False
        self.changed = [threading.Condition() for _ in range(size)]
        self.queues: dict[Address, deque[bytes]] = {}

    def put(self, address: Address, data: bytes) -> None:
        changed = self.changed[address[1]]
        with changed:
            self.queues.setdefault(address, deque()).append(data)
            changed.notify_all()

    def take(self, address: Address, timeout: float) -> bytes | None:
        def ready() -> bool:
            return self.failed or bool(self.queues.get(address))

        changed = self.changed[address[1]]
        with changed:
            changed.wait_for(ready, timeout)
            queue = self.queues.get(address)
            return queue.popleft() if queue else None

    def fail(self) -> None:
        """Let every waiting rank give up, since one has."""
        self.failed = True
        for changed in self.changed:
            with changed:
                changed.notify_all()


class LoopbackTransport:
    """Copy messages through memory: a send is done when posted, receives are served in the order of their posting."""

    def __init__(self, mailboxes: _Mailboxes, rank: int, timeout: float) -> None:
        self.rank, self.size = rank, mailboxes.size
        self.stats = Stats()
        self.timeout = timeout
        self.health = Health()
        self._mailboxes = mailboxes
        self.voice = Voice()
        self.strand = 0
        self._wanted: list[tuple[Address, Bytes]] = []

    def send(self, peer: int, data: Bytes) -> None:
        """Put a copy of the bytes into the peer's mailbox."""
        self._mailboxes.put((self.rank, peer, self.voice.channel, self.strand), data.tobytes())
        self.stats.messages_sent += 1
        self.stats.bytes_sent += data.nbytes

    def receive(self, peer: int, data: Bytes) -> None:
        """Remember where the next message of `peer` goes."""
        self._wanted.append(((peer, self.rank, self.voice.channel, self.strand), data))
        self.stats.bytes_received += data.nbytes

    def pending(self, what: str) -> _Receives | None:
        """Return the wait for every posted receive; None if there is none."""
        if not self._wanted:
            return None
        wanted, self._wanted = self._wanted, []
        return _Receives(self, wanted, self.voice.name(what))

    def fill(self, address: Address, data: Bytes, what: str) -> bool:
        """Store a message; return False if it is missing at the time-out, raise if its length differs."""
        message = self._mailboxes.take(address, self.timeout)
        if message is None:
            return False
        if len(message) != data.nbytes:
            text = f"{what}: rank {self.rank} expected {data.nbytes} bytes of rank {address[0]} and got {len(message)}"
            raise CollectiveError(text)
        data.view(np.uint8)[:] = np.frombuffer(message, np.uint8)
        return True


class _Receives:
    """Wait for messages by a condition variable, since threads that poll would keep each other from running."""

    def __init__(self, transport: LoopbackTransport, wanted: list[tuple[Address, Bytes]], what: str) -> None:
        self.transport, self.wanted, self.what = transport, wanted, what
        self.peer = -1

    def done(self) -> bool:
        """Block: in a loopback world every rank is a thread of its own, and has nothing else to do."""
        return self.block()

    def block(self, done: Callable[[], bool] | None = None) -> bool:
        """Return True once all messages are stored, False if one is missing at the time-out."""
        if done is not None:
            return done()
        while self.wanted:
            address, data = self.wanted[0]
            self.peer = address[0]
            if not self.transport.fill(address, data, self.what):
                return False
            del self.wanted[0]
        return True

    def overdue(self, seconds: float) -> bool:
        """Return whether `seconds` is more than the time-out."""
        return seconds > self.transport.timeout

    def settle(self, seconds: float, *, finished: bool) -> None:  # noqa: ARG002  (a thread's failure ends its world)
        """Count the wait."""
        self.count(seconds)

    def count(self, seconds: float) -> None:
        """Count seconds of waiting."""
        self.transport.stats.wait_seconds += seconds

    def late(self) -> CollectiveTimeoutError:
        """Name the first peer whose message is missing."""
        own = self.transport
        text = f"{self.what}: rank {own.rank} of {own.size} waited {own.timeout:g} s for rank {self.peer}"
        return CollectiveTimeoutError(text)


class LoopbackCommunicator:
    """Be one thread's communicator in a loopback world; has what the collectives need and no MPI."""

    native = None
    board = None

    def __init__(self, mailboxes: _Mailboxes, rank: int, timeout: float) -> None:
        self.transport = LoopbackTransport(mailboxes, rank, timeout)
        self.rank, self.size = rank, mailboxes.size
        self.nodes = (0,) * mailboxes.size
        self.notes: dict[Any, Any] = {}
        self.stats = self.transport.stats
        self._scratch = np.empty(0, np.uint8)

    def side(self, device: Any) -> Any:
        """Refuse: threads of one process have one device, and no need to meet on it."""
        raise ArgumentError(must_be("comm", "an mpizero.Communicator for arrays in GPU memory", f"one for {device}"))

    def scratch(self, nbytes: int) -> Bytes:
        """Return at least `nbytes` bytes that are kept from call to call."""
        if self._scratch.nbytes < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch

    @property
    def channel_number(self) -> int:
        """Return the channel in use, from 1; 0 outside any."""
        return self.transport.voice.channel

    @property
    def private(self) -> LoopbackCommunicator:
        """Return this communicator: a thread's calls come in one order, whoever makes them."""
        return self

    def channel(self, number: int, label: str) -> AbstractContextManager[None]:
        """Mark the messages sent inside; see `Communicator.channel`."""
        return self.transport.voice.speak(number + 1, label)

    def perform(self, what: Any, steps: Iterator[Wait]) -> None:  # noqa: ARG002  (the signature is the protocol's)
        """Run a collective's steps to their end: every rank is a thread of its own here."""
        drive(steps)

    def progress(self) -> None:
        """Do nothing: everything is over when `submit` returns."""

    def submit(self, what: Any, steps: Iterator[Wait], result: Any, then: Callable[[], None] | None = None) -> Work:
        """Run a collective's steps at once, and return them as done."""
        self.perform(what, steps)
        return Work.finished(result, then)


def run_loopback(size: int, body: Callable[[LoopbackCommunicator], Result], timeout: float = 20.0) -> list[Result]:
    """Run `body(communicator)` on `size` threads, one per rank, and return the results in the order of the ranks.

    Raises:
        Exception: the exception that came first, if any rank raised; the others then stop waiting.
    """
    mailboxes = _Mailboxes(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            results[rank] = body(LoopbackCommunicator(mailboxes, rank, timeout))
        except BaseException as error:  # noqa: BLE001  (carried to the caller's thread)
            errors.append(error)
            mailboxes.fail()

    threads = [threading.Thread(target=main, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
