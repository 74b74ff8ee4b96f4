"""Types that more than one floor names."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import numpy as np

__all__ = ["Bytes", "CommunicatorLike", "Order", "ReduceOp", "Transport"]

Bytes = np.ndarray[Any, Any]
"""A contiguous one-dimensional numpy array whose memory a message is read from or written to."""

ReduceOp = Literal["sum", "mean", "max", "min", "prod"]
Order = Literal["any", "canonical"]


class Transport(Protocol):
    """Move bytes between ranks: post sends and receives, then wait for all that was posted.

    Messages between the same two ranks arrive in the order in which they were posted.
    """

    rank: int
    size: int

    def send(self, peer: int, data: Bytes) -> None:
        """Post a send; `data` must stay as it is until `wait` returns."""
        ...

    def receive(self, peer: int, data: Bytes) -> None:
        """Post a receive into `data`, which holds the message once `wait` has returned."""
        ...

    def wait(self, what: str) -> None:
        """Block until everything posted is done; `what` names the caller in the error of a time-out."""
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
    def transport(self) -> Transport:
        """Return the wire."""
        ...

    @property
    def native(self) -> Any:
        """Return the MPI library's own collectives, or None where there are none."""
        ...

    def scratch(self, nbytes: int) -> Bytes:
        """Return at least `nbytes` of memory that is kept from call to call."""
        ...

    def exclusive(self, what: str) -> Any:
        """Return a context manager that refuses a second thread."""
        ...
