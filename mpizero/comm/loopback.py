"""Ranks as threads of one process: the cheapest world in which real schedules move real bytes."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpizero.comm.stats import Stats
from mpizero.errors import CollectiveError, CollectiveTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpizero.typing import Bytes

__all__ = ["LoopbackCommunicator", "run_loopback"]

Result = TypeVar("Result")
Address = tuple[int, int, int | None]
"""The sending rank, the receiving rank, and the channel."""


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
        self._mailboxes = mailboxes
        self._channel: int | None = None
        self._label = ""
        self._wanted: list[tuple[Address, Bytes]] = []

    def speak_of(self, number: int | None, label: str) -> None:
        """Change to the channel `number`, or with None to the common one; see `Communicator.channel`."""
        self._channel, self._label = number, label

    def send(self, peer: int, data: Bytes) -> None:
        """Put a copy of the bytes into the peer's mailbox."""
        self._mailboxes.put((self.rank, peer, self._channel), data.tobytes())
        self.stats.messages_sent += 1
        self.stats.bytes_sent += data.nbytes

    def receive(self, peer: int, data: Bytes) -> None:
        """Remember where the next message of `peer` goes."""
        self._wanted.append(((peer, self.rank, self._channel), data))
        self.stats.bytes_received += data.nbytes

    def wait(self, what: str) -> None:
        """Fill every posted receive; raise if a message is missing at the time-out or has another length."""
        wanted, self._wanted = self._wanted, []
        about = f"{what} of {self._label}" if self._label else what
        for address, data in wanted:
            peer = address[0]
            message = self._mailboxes.take(address, self.timeout)
            if message is None:
                text = f"{about}: rank {self.rank} of {self.size} waited {self.timeout:g} s for rank {peer}"
                raise CollectiveTimeoutError(text)
            if len(message) != data.nbytes:
                text = f"{about}: rank {self.rank} expected {data.nbytes} bytes of rank {peer} and got {len(message)}"
                raise CollectiveError(text)
            data.view(np.uint8)[:] = np.frombuffer(message, np.uint8)


class LoopbackCommunicator:
    """Be one thread's communicator in a loopback world; has what the collectives need and no MPI."""

    native = None

    def __init__(self, mailboxes: _Mailboxes, rank: int, timeout: float) -> None:
        self.transport = LoopbackTransport(mailboxes, rank, timeout)
        self.rank, self.size = rank, mailboxes.size
        self.stats = self.transport.stats
        self._scratch = np.empty(0, np.uint8)

    def scratch(self, nbytes: int) -> Bytes:
        """Return at least `nbytes` bytes that are kept from call to call."""
        if self._scratch.nbytes < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch

    @property
    def private(self) -> LoopbackCommunicator:
        """Return this communicator: a thread's calls come in one order, whoever makes them."""
        return self

    @contextmanager
    def channel(self, number: int, label: str) -> Iterator[None]:
        """Mark the messages sent inside; see `Communicator.channel`."""
        self.transport.speak_of(number, label)
        try:
            yield
        finally:
            self.transport.speak_of(None, "")

    @contextmanager
    def exclusive(self, what: str) -> Iterator[None]:  # noqa: ARG002  (the signature is the protocol's)
        """Do nothing: every rank is a thread of its own here."""
        yield


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
