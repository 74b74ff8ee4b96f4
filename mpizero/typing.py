"""Types that more than one floor names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Bytes", "CommunicatorLike", "Order", "ReduceOp", "Transport", "Wait"]

Bytes = np.ndarray[Any, Any]
"""A contiguous one-dimensional numpy array whose memory a message is read from or written to."""

ReduceOp = Literal["sum", "mean", "max", "min", "prod"]
Order = Literal["any", "canonical"]


class Wait(Protocol):
    """Be one thing that a rank waits for."""

    def done(self) -> bool:
        """Return whether it has come; never blocks."""
        ...

    def block(self, done: Callable[[], bool] | None = None) -> bool:
        """Return True once it has come, or what `done` asks instead, False after the time-out."""
        ...

    def count(self, seconds: float) -> None:
        """Count seconds of waiting."""
        ...

    def overdue(self, seconds: float) -> bool:
        """Return whether `seconds` is more than the time-out."""
        ...

    def settle(self, seconds: float, *, finished: bool) -> None:
        """Be told, once, how long the wait took and whether it was waited out; if not, the wire is broken."""
        ...

    def late(self) -> Exception:
        """Return the error of a wait that was given up: it names the call, this rank and the peers that are missing."""
        ...


class Transport(Protocol):
    """Move bytes between ranks: post sends and receives, then wait for all that was posted.

    Messages between the same two ranks arrive in the order in which they were posted.
    """

    rank: int
    size: int
    strand: int
    """Which of several streams of messages the next ones belong to: those of different strands never meet."""

    @property
    def stats(self) -> Any:
        """Return the counters of what was moved."""
        ...

    @property
    def health(self) -> Any:
        """Return the flag that says whether the wire can still be used."""
        ...

    def send(self, peer: int, data: Bytes) -> None:
        """Post a send; `data` must stay as it is until the wait is over."""
        ...

    def receive(self, peer: int, data: Bytes) -> None:
        """Post a receive into `data`, which holds the message once the wait is over."""
        ...

    def pending(self, what: str) -> Wait | None:
        """Return the wait for everything posted since the last one, or None; `what` names the caller in errors."""
        ...


class CommunicatorLike(Protocol):
    """What a collective needs of a communicator."""

    @property
    def rank(self) -> int:
        """Return this process's number, from 0."""
        ...

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        ...

    @property
    def nodes(self) -> tuple[int, ...]:
        """Return the number of each rank's host, in the order of the hosts' lowest ranks."""
        ...

    @property
    def transport(self) -> Transport:
        """Return the wire."""
        ...

    @property
    def native(self) -> Any:
        """Return the MPI library's own collectives, or None where there are none."""
        ...

    @property
    def board(self) -> Any:
        """Return the memory that all ranks share, or None where they are on several hosts or cannot share any."""
        ...

    def side(self, device: Any) -> Any:
        """Return what is kept on a device."""
        ...

    @property
    def channel_number(self) -> int:
        """Return the number of the channel in use, from 1; 0 outside any."""
        ...

    @property
    def notes(self) -> dict[Any, Any]:
        """Return a place for what the floors above remember of this communicator."""
        ...

    def scratch(self, nbytes: int) -> Bytes:
        """Return at least `nbytes` of memory that is kept from call to call."""
        ...

    def perform(self, what: Any, steps: Iterator[Wait]) -> None:
        """Run a collective's steps to their end, behind those that are under way; `what` names it, or is an `About`."""
        ...

    def submit(self, what: Any, steps: Iterator[Wait], result: Any, then: Callable[[], None] | None = None) -> Any:
        """Run a collective's steps in the background; return a `Work`, whose `wait` calls `then`."""
        ...
